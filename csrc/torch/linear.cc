// Linear layers: with float sums, or with exact integer sums. Their backward pass needs less memory if saved tensors
// are recomputed by hooks.
#include <ATen/Context.h>
#include <ATen/ops/_int_mm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "torch/functions.h"
#include "torch/levels.h"
#include "torch/node.h"
#include "torch/plain_tensors.h"
#include "torch/reused_memory.h"
#include "torch/run_kernels.h"

namespace fakequant::autograd {
namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::dynamo::autograd::CompiledNodeArgs;
using torch::dynamo::autograd::SwapSavedVariables;

// Computes the same products as torch's node. torch's unpacks x and weight together. This one unpacks them one after
// the other, so if hooks recompute them from something smaller, only one of them is in memory at a time.
struct LinearBackward : Node {
  SavedVariable x_, weight_;
  std::vector<int64_t> sizes_;  // of x

  std::string name() const override { return "LinearBackward"; }
  void release_variables() override {
    x_.reset_data();
    weight_.reset_data();
  }

  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined()) return {Tensor(), Tensor(), Tensor()};
    const Tensor dy = gradients[0].reshape({-1, gradients[0].size(-1)});
    gradients.clear();
    Tensor dx, dweight;
    if (task_should_compute_output(1)) dweight = dy.t().mm(x_.unpack().reshape({-1, sizes_.back()}));
    if (task_should_compute_output(0)) dx = dy.mm(weight_.unpack()).reshape(sizes_);
    return {dx, dweight, task_should_compute_output(2) ? dy : Tensor()};  // the engine sums dy to the bias's shape
  }

  void compiled_args(CompiledNodeArgs& args) const override {
    args.collect(x_, false);
    args.collect(weight_, false);
    args.collect(sizes_);
  }
  variable_list apply_with_saved(const variable_list& inputs, SwapSavedVariables& saved) override {
    saved.before(x_);
    saved.before(weight_);
    variable_list result = apply(variable_list(inputs));
    saved.after(x_);
    saved.after(weight_);
    return result;
  }
};

// Attaches the node, if autograd records this call.
nb::object finish(Tensor&& y, const Tensor& x, const Tensor& weight, const Tensor& bias) {
  const bool differentiable = x.requires_grad() || weight.requires_grad() || (bias.defined() && bias.requires_grad());
  if (at::GradMode::is_enabled() && differentiable) {
    auto node = make_node<LinearBackward>();
    node->x_ = SavedVariable(x, false);
    node->weight_ = SavedVariable(weight, false);
    node->sizes_ = x.sizes().vec();
    set_result(y, node, x, weight, bias);
  }
  return wrap(std::move(y));
}

bool can_multiply(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  if (x.dim() < 2 || weight.dim() != 2 || x.numel() == 0 || !x.is_contiguous()) return false;
  for (const Tensor& t : {x, weight, bias}) {
    if (t.defined() && (!is_simple_data(t) || t.scalar_type() != x.scalar_type())) return false;
  }
  return !bias.defined() || bias.is_contiguous();
}

// --- integers ------------------------------------------------------------------------------------

// One of 8 x 8 bits whose sum is exact in float32 whatever the order.
constexpr int64_t kBlock = 512;

// Returns the sums of products of levels, and in what they are given.
std::pair<Tensor, SumKind> exact_sums(const Levels& x, const Levels& weight, bool of_codes) {
  const nb::gil_scoped_release without_gil;
  if (of_codes) return {at::_int_mm(x.values, weight.values.t()), SumKind::codes};
  const int64_t inner = x.values.size(1);
  if (inner > kLongestSum || rounds_operands(at::Float32Op::MATMUL))
    return {x.values.to(at::kDouble).mm(weight.values.to(at::kDouble).t()), SumKind::f64};
  if (weight.norm() * x.largest() < kExactInFloat32) return {x.values.mm(weight.values.t()), SumKind::f32};
  Tensor sums;
  for (int64_t begin = 0; begin < inner; begin += kBlock) {
    const int64_t length = std::min(kBlock, inner - begin);
    const Tensor part = x.values.narrow(1, begin, length).mm(weight.values.narrow(1, begin, length).t()).to(at::kInt);
    sums = sums.defined() ? sums.add_(part) : part;
  }
  return {sums, SumKind::i32};
}

// torch multiplies codes one by one, slowly, where oneDNN is switched off.
// With one column, its result depends on memory that it must not read.
bool multiplies_codes(bool with_int8, int64_t inner) {
  return with_int8 && inner > 1 && inner <= kLongestSum && at::globalContext().userEnabledMkldnn();
}

// Writes the levels of `t`, seen as a matrix. Returns 0 or a reason why there are none.
int encode_matrix(Levels& levels, const Tensor& t, int64_t rows, bool as_codes) {
  return levels.encode(t, rows, reusable_empty({rows, t.numel() / rows}, as_codes ? at::kChar : at::kFloat));
}

constexpr const char* kWeightLevels = "fakequant.weight_levels";

}  // namespace

nb::object weight_levels(nb::handle weight_object, nb::handle scale, nb::handle zero, int64_t low, int64_t high,
                         bool with_int8) {
  const Tensor& weight = tensor(weight_object);
  if (weight.dim() != 2 || weight.numel() == 0 || !is_simple_data(weight) || weight.scalar_type() != at::kFloat)
    return nb::none();
  auto levels = std::make_unique<Levels>();
  if (!levels->set_grid(scale, zero, low, high, weight.size(0))) return nb::none();
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (encode_matrix(*levels, weight.contiguous(), weight.size(0), multiplies_codes(with_int8, weight.size(1))))
    return nb::none();
  return nb::capsule(levels.release(), kWeightLevels, [](void* p) noexcept { delete static_cast<Levels*>(p); });
}

nb::object integer_linear(nb::handle x_object, nb::handle x_scale, nb::handle x_zero, int64_t x_low, int64_t x_high,
                          nb::handle weight_object, nb::handle weight_scale, nb::handle weight_zero, int64_t weight_low,
                          int64_t weight_high, nb::handle bias_object, nb::handle bias_codes, double code_factor,
                          bool with_int8, nb::handle kept) {
  const Tensor &x = tensor(x_object), &weight = tensor(weight_object);
  const Tensor bias = bias_object.is_none() ? Tensor() : tensor(bias_object);
  if (!can_multiply(x, weight, bias) || x.scalar_type() != at::kFloat || weight.numel() == 0) return nb::none();
  const int64_t inner = x.size(-1), rows = x.numel() / inner, columns = weight.size(0);
  if (weight.size(1) != inner || (bias.defined() && bias.numel() != columns)) return nb::none();
  Levels left, right;
  if (!left.set_grid(x_scale, x_zero, x_low, x_high, rows)) return nb::none();
  if (!kept.is_none()) {
    right = *static_cast<const Levels*>(nb::cast<nb::capsule>(kept).data(kWeightLevels));
    if (right.values.sizes() != weight.sizes()) return nb::none();
  } else if (!right.set_grid(weight_scale, weight_zero, weight_low, weight_high, columns)) {
    return nb::none();
  }
  const double* codes = nullptr;
  if (!bias_codes.is_none() && !(codes = buffer<double>(bias_codes, columns, at::kDouble))) return nb::none();
  const bool as_codes =
      kept.is_none() ? multiplies_codes(with_int8, inner) : right.values.scalar_type() == at::kChar;
  Tensor y;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (encode_matrix(left, x, rows, as_codes)) return nb::none();
    if (kept.is_none() && encode_matrix(right, weight.contiguous(), columns, as_codes)) return nb::none();
    auto [sums, kind] = exact_sums(left, right, as_codes);
    std::vector<int64_t> sizes = x.sizes().vec();
    sizes.back() = columns;
    y = kind == SumKind::f64 ? at::empty({rows, columns}, x.options()) : sums.view(at::kFloat);
    const ScaleSumsArgs args{kind,
                             rows,
                             columns,
                             inner,
                             sums.const_data_ptr(),
                             y.mutable_data_ptr(),
                             left.count,
                             right.count,
                             left.scale.const_data_ptr<float>(),
                             right.scale.const_data_ptr<float>(),
                             left.zeros(),
                             right.zeros(),
                             left.shift,
                             right.shift,
                             left.totals.const_data_ptr<int32_t>(),
                             right.totals.const_data_ptr<int32_t>(),
                             bias.defined() && !codes ? bias.const_data_ptr<float>() : nullptr,
                             codes,
                             code_factor};
    without_gil_if_large(rows * columns, [&] { g_kernels->scale_sums(args); });
    y = y.view(sizes);
  }
  return finish(std::move(y), x, weight, bias);
}

nb::object linear(nb::handle x_object, nb::handle weight_object, nb::handle bias_object) {
  const Tensor &x = tensor(x_object), &weight = tensor(weight_object);
  const Tensor bias = bias_object.is_none() ? Tensor() : tensor(bias_object);
  if (!at::GradMode::is_enabled() || !can_multiply(x, weight, bias) || !weight.is_contiguous()) return nb::none();
  Tensor y;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    y = at::linear(x, weight, bias.defined() ? std::optional<Tensor>(bias) : std::nullopt);
  }
  return finish(std::move(y), x, weight, bias);
}

}  // namespace fakequant::autograd
