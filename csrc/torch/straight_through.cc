// Fake quantization with a fixed scale and zero point: the nodes for its straight-through gradient and its forward
// functions.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <nanobind/stl/vector.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <utility>

#include "torch/arguments.h"
#include "torch/functions.h"
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

// --- nodes ---------------------------------------------------------------------------------------

// Whether nothing else refers to a gradient, so that it can be overwritten. New memory takes longer than the computation.
bool is_last_use(const Tensor& dy) {
  if (at::GradMode::is_enabled() || dy.use_count() != 1 || dy.storage().use_count() != 1) return false;
  const auto sizes = dy.sizes();
  return std::none_of(sizes.begin(), sizes.end(), [](int64_t n) { return n == 1; });
}

// Clipped: dx = dy inside the range, 0 outside. Saves the mask.
struct FakeQuantizeBackward : Node {
  SavedVariable mask_;
  Order order_;
  bool multiply_ = false;

  std::string name() const override { return "FakeQuantizeBackward"; }
  void release_variables() override { mask_.reset_data(); }

  variable_list apply(variable_list&& gradients) override {
    const Tensor dy = std::move(gradients[0]);
    if (!dy.defined()) return {Tensor()};
    const Tensor mask = mask_.unpack(getptr());
    const bool packed = mask.scalar_type() == at::kByte;
    const bool same_order = packed ? is_dense_in(dy, order_)
                                   : dy.is_non_overlapping_and_dense() && dy.strides() == mask.strides();
    if (!is_simple_gradient(dy) || !is_eager(mask) || !same_order) {
      at::IValue order = order_ ? at::IValue(*order_) : at::IValue();
      return {call_operator("fakequant::mask_backward", dy, mask, std::move(order), multiply_)[0].toTensor()};
    }
    // The strides of dy * mask, including those of axes of length 1.
    Tensor dx = is_last_use(dy)      ? dy
                : dy.is_contiguous() ? at::empty_like(dy, at::MemoryFormat::Contiguous)
                                     : at::empty_like(dy);
    if (dy.numel() > 0) {
      g_kernels->mask_backward({*kernel_dtype(dy), dy.numel(), packed ? MaskKind::packed : MaskKind::bytes, multiply_,
                                dy.const_data_ptr(), static_cast<const uint8_t*>(mask.const_data_ptr()),
                                dx.mutable_data_ptr()});
    }
    return {dx};
  }

  void compiled_args(CompiledNodeArgs& args) const override {
    args.collect(mask_, /*is_output=*/false);
    args.collect(multiply_);
    args.collect(order_.value_or(std::vector<int64_t>{}));
  }
  variable_list apply_with_saved(const variable_list& inputs, SwapSavedVariables& saved) override {
    saved.before(mask_);
    variable_list result = apply(variable_list(inputs));
    saved.after(mask_);
    return result;
  }
};

struct PassThroughBackward : Node {
  std::string name() const override { return "FakeQuantizePassThroughBackward"; }
  variable_list apply(variable_list&& gradients) override { return std::move(gradients); }
  void compiled_args(CompiledNodeArgs&) const override {}
  variable_list apply_with_saved(const variable_list& inputs, SwapSavedVariables&) override { return inputs; }
};

// --- forward -------------------------------------------------------------------------------------

// The output of a forward function: y, and the mask if the backward pass needs one.
struct Result {
  const bool records;  // whether autograd records this call
  Tensor y, mask;

  // x is dense; it is `source` or a copy of it.
  Result(const Tensor& source, const Tensor& x, bool clipped)
      : records(at::GradMode::is_enabled() && source.requires_grad()) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    y = reusable_empty_like(x, x.scalar_type());
    if (records && clipped) mask = at::empty({(x.numel() + 7) / 8}, at::TensorOptions(at::kByte));
  }

  FakeQuantizeArgs args(const Tensor& x, const Shape& shape, const Grid& grid) const {
    return {*kernel_dtype(x), shape, grid, x.const_data_ptr(), y.mutable_data_ptr(),
            mask.defined() ? MaskKind::packed : MaskKind::none,
            mask.defined() ? static_cast<uint8_t*>(mask.mutable_data_ptr()) : nullptr};
  }

  // Attaches the node that computes the gradient of `source` and returns y.
  nb::object finish(const Tensor& source, Numerics numerics) {
    if (mask.defined()) {
      auto node = make_node<FakeQuantizeBackward>();
      node->mask_ = SavedVariable(mask, /*is_output=*/false);
      node->order_ = memory_order(y);
      node->multiply_ = !is_own(numerics);
      set_result(y, node, source);
    } else if (records) {
      set_result(y, make_node<PassThroughBackward>(), source);
    }
    return wrap(std::move(y));
  }
};

}  // namespace

nb::object fake_quantize(nb::handle x_object, nb::handle scale, nb::handle zero_point, int64_t qmin, int64_t qmax,
                         int numerics, std::optional<int64_t> axis, std::optional<int64_t> group, int64_t lowest_zero,
                         int64_t highest_zero, bool has_torchs_name, bool clipped) {
  if (!is_tensor(x_object) || qmin > qmax) return nb::none();
  // torch's functions accept two numbers or two tensors, not one of each.
  if (has_torchs_name && is_tensor(scale) != is_tensor(zero_point)) return nb::none();
  const Tensor& source = tensor(x_object);
  if (!is_readable_data(source)) return nb::none();
  const Tensor x = dense(source);
  const auto blocks = blocks_of(x, axis, group);
  if (!blocks) return nb::none();
  Parameters p(numerics, qmin, qmax, *blocks, has_torchs_name);
  if (!p.set_scale(scale, x.scalar_type() == at::kDouble && is_own(p.grid.numerics), false)) return nb::none();
  if (!p.set_zero(zero_point, lowest_zero, highest_zero)) return nb::none();
  Result result(source, x, clipped);
  run_fake_quantize(result.args(x, blocks->shape, p.grid));
  return result.finish(source, Numerics(numerics));
}

nb::object observe(nb::handle x_object, nb::handle running_min, nb::handle running_max, nb::handle scale,
                   nb::handle zero_point, int64_t qmin, int64_t qmax, int numerics, bool symmetric, int scale_rule,
                   int update, double averaging_constant, double eps, std::optional<int64_t> axis, std::optional<int64_t> group,
                   bool quantize, bool clipped) {
  if (!is_tensor(x_object)) return nb::none();
  const Tensor& x = tensor(x_object);
  if (!is_simple_data(x) || x.numel() == 0) return nb::none();
  const auto blocks = blocks_of(x, axis, group);
  if (!blocks) return nb::none();
  const int64_t n = blocks->count;
  const bool has_offsets = has_offset(ScaleRule(scale_rule));
  int32_t* zero = has_offsets ? reinterpret_cast<int32_t*>(buffer<float>(zero_point, n, at::kFloat))
                              : buffer<int32_t>(zero_point, n, at::kInt);
  const ObserveArgs o{RangeRule::own, RangeUpdate(update), /*observe=*/true, quantize, symmetric,
                      ScaleRule(scale_rule), float(averaging_constant), float(eps),
                      buffer<float>(running_min, n, at::kFloat), buffer<float>(running_max, n, at::kFloat),
                      buffer<float>(scale, n, at::kFloat), zero};
  if (!o.running_min || !o.running_max || !o.scale || !o.zero_point) return nb::none();
  Grid grid;
  grid.numerics = Numerics(numerics);
  grid.qmin = qmin;
  grid.qmax = qmax;
  std::optional<Result> result;
  if (quantize) result.emplace(x, x, clipped);
  const FakeQuantizeArgs args = result ? result->args(x, blocks->shape, grid)
                                       : FakeQuantizeArgs{*kernel_dtype(x), blocks->shape,  grid,   x.const_data_ptr(),
                                                          nullptr,          MaskKind::none, nullptr};
  const ObserveResult seen =
      without_gil_if_large(x.numel(), [&] { return g_kernels->observe_fake_quantize(o, args); });
  if (seen.unseen) return nb::none();
  // Makes autograd reject saved references to the old values of the buffers.
  for (nb::handle changed : {running_min, running_max, scale, zero_point}) {
    if (!tensor(changed).is_inference()) tensor(changed).unsafeGetTensorImpl()->bump_version();
  }
  const int64_t nonfinite = seen.nan_count + seen.posinf_count + seen.neginf_count;
  return nb::make_tuple(result ? result->finish(x, Numerics(numerics)) : nb::none(), nonfinite);
}

// --- results computed elsewhere ------------------------------------------------------------------

void clipped(nb::handle x, nb::handle y, nb::handle mask, nb::handle order, bool multiply) {
  auto node = make_node<FakeQuantizeBackward>();
  node->mask_ = SavedVariable(tensor(mask), /*is_output=*/false);
  if (!order.is_none()) node->order_ = nb::cast<std::vector<int64_t>>(order);
  node->multiply_ = multiply;
  set_result(tensor(y), node, tensor(x));
}

void pass_through(nb::handle x, nb::handle y) {
  set_result(tensor(y), make_node<PassThroughBackward>(), tensor(x));
}

}  // namespace fakequant::autograd
