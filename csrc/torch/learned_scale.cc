// Fake quantization with a learned scale and zero point: its node and its forward function.
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <vector>

#include "bounded.h"
#include "torch/arguments.h"
#include "torch/functions.h"
#include "torch/node.h"
#include "torch/plain_tensors.h"
#include "torch/run_kernels.h"

namespace fakequant::autograd {
namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::dynamo::autograd::CompiledNodeArgs;
using torch::dynamo::autograd::SwapSavedVariables;

// Computes dx, dscale and dzero_point. Saves x, scale and zero point.
struct LearnedFakeQuantizeBackward : Node {
  SavedVariable x_, scale_, zero_point_;
  bool has_zero_point_ = false;
  int64_t qmin_ = 0, qmax_ = 0;
  std::string numerics_name_;
  Numerics numerics_ = Numerics::onnx;
  double grad_factor_ = 1;
  Shape shape_{};
  int64_t axis_ = -1;  // -1: one scale for the whole tensor

  std::string name() const override { return "LearnedFakeQuantizeBackward"; }
  void release_variables() override {
    x_.reset_data();
    scale_.reset_data();
    if (has_zero_point_) zero_point_.reset_data();
  }

  variable_list apply(variable_list&& gradients) override {
    Tensor dy = gradients[0];
    if (!dy.defined()) return {Tensor(), Tensor(), Tensor()};
    const Tensor x = x_.unpack(), scale = scale_.unpack();
    const Tensor zero = has_zero_point_ ? zero_point_.unpack() : Tensor();
    if (at::GradMode::is_enabled() || !is_simple_gradient(dy) || !is_eager(x) || !is_eager(scale) ||
        dy.dtype() != x.dtype()) {
      auto zeros = has_zero_point_ ? at::IValue(as_blocks(zero, x)) : at::IValue();
      auto out = call_operator("fakequant::learned_backward", dy, x, as_blocks(scale, x), std::move(zeros), qmin_,
                               qmax_, numerics_name_, grad_factor_);
      return {out[0].toTensor(), out[1].toTensor().reshape(scale.sizes()),
              has_zero_point_ ? out[2].toTensor().reshape(zero.sizes()) : Tensor()};
    }
    Tensor dx = at::empty_like(x);
    if (dy.strides() != x.strides() && !(dy.is_contiguous() && x.is_contiguous())) dy = at::empty_like(x).copy_(dy);
    const int64_t n = shape_.parameters();
    std::vector<double> sums(size_t(has_zero_point_ ? 2 * n : n));
    const std::vector<int32_t> zeros = rounded_zeros(zero, qmin_, qmax_, numerics_ == Numerics::torch_tensor);
    Grid grid;
    grid.numerics = numerics_;
    grid.qmin = qmin_;
    grid.qmax = qmax_;
    if (scale.scalar_type() == at::kDouble) grid.scale_f64 = scale.const_data_ptr<double>();
    else grid.scale_f32 = scale.const_data_ptr<float>();
    if (!zeros.empty()) grid.zero_i32 = zeros.data();
    const DType dtype = *kernel_dtype(x);
    g_kernels->learned_backward({dtype, dtype, shape_, grid, grad_factor_, dy.const_data_ptr(), x.const_data_ptr(),
                                 dx.mutable_data_ptr(), sums.data(), has_zero_point_ ? sums.data() + n : nullptr});
    return {dx, like(scale, sums.data()), has_zero_point_ ? like(zero, sums.data() + n) : Tensor()};
  }

  // Views a parameter in the shape the operators expect, which broadcasts against x.
  Tensor as_blocks(const Tensor& parameter, const Tensor& x) const {
    if (axis_ < 0) return parameter;
    std::vector<int64_t> shape(size_t(x.dim()), 1);
    shape[size_t(axis_)] = -1;
    return parameter.view(shape);
  }

  // Copies sums into a new tensor with the shape and dtype of `parameter`.
  static Tensor like(const Tensor& parameter, const double* sums) {
    Tensor out = at::empty_like(parameter, at::MemoryFormat::Contiguous);
    const int64_t n = out.numel();
    if (out.scalar_type() == at::kDouble) std::copy_n(sums, n, out.mutable_data_ptr<double>());
    else std::transform(sums, sums + n, out.mutable_data_ptr<float>(), [](double s) { return float(s); });
    return out;
  }

  void compiled_args(CompiledNodeArgs& args) const override {
    args.collect(x_, false);
    args.collect(scale_, false);
    args.collect(has_zero_point_);
    if (has_zero_point_) args.collect(zero_point_, false);
    args.collect(qmin_);
    args.collect(qmax_);
    args.collect(numerics_name_);
    args.collect(grad_factor_);
    args.collect(axis_);
  }
  variable_list apply_with_saved(const variable_list& inputs, SwapSavedVariables& saved) override {
    saved.before(x_);
    saved.before(scale_);
    if (has_zero_point_) saved.before(zero_point_);
    variable_list result = apply(variable_list(inputs));
    saved.after(x_);
    saved.after(scale_);
    if (has_zero_point_) saved.after(zero_point_);
    return result;
  }
};

}  // namespace

nb::object fake_quantize_learned(nb::handle x_object, nb::handle scale_object, nb::handle zero_object, int64_t qmin,
                                 int64_t qmax, std::string numerics_name, int numerics, std::optional<int64_t> axis,
                                 bool has_torchs_name, double grad_factor) {
  if (!is_tensor(x_object) || !is_tensor(scale_object)) return nb::none();
  const Tensor &x = tensor(x_object), &scale = tensor(scale_object);
  if (!is_simple_data(x) || scale._fw_grad(0).defined()) return nb::none();
  // torch's functions require 1-dimensional scales, and per channel also data of at least two dimensions.
  if (has_torchs_name && (scale.dim() != 1 || (axis && x.dim() == 1))) return nb::none();
  const auto blocks = blocks_of(x, axis, std::nullopt);
  if (!blocks || x.numel() == 0) return nb::none();
  const DType dtype = *kernel_dtype(x);
  Parameters p(numerics, qmin, qmax, *blocks, has_torchs_name);
  if (!p.set_scale(scale_object, dtype == DType::f64 && is_own(p.grid.numerics), true)) return nb::none();
  if (!p.set_learned_zero(zero_object)) return nb::none();
  const Tensor zero = zero_object.is_none() ? Tensor() : tensor(zero_object);
  if (zero.defined() && (zero._fw_grad(0).defined() || (has_torchs_name && zero.dim() != 1))) return nb::none();
  Tensor y;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    y = at::empty_like(x);
  }
  run_fake_quantize({dtype, blocks->shape, p.grid, x.const_data_ptr(), y.mutable_data_ptr(), MaskKind::none, nullptr});
  if (at::GradMode::is_enabled() &&
      (x.requires_grad() || scale.requires_grad() || (zero.defined() && zero.requires_grad()))) {
    auto node = make_node<LearnedFakeQuantizeBackward>();
    node->x_ = SavedVariable(x, false);
    node->scale_ = SavedVariable(scale, false);
    node->has_zero_point_ = zero.defined();
    if (zero.defined()) node->zero_point_ = SavedVariable(zero, false);
    node->qmin_ = qmin;
    node->qmax_ = qmax;
    node->numerics_name_ = std::move(numerics_name);
    node->numerics_ = Numerics(numerics);
    node->grad_factor_ = grad_factor;
    node->shape_ = blocks->shape;
    node->axis_ = axis.value_or(-1);
    set_result(y, node, x, scale, zero);
  }
  return wrap(std::move(y));
}

bool keep_within(nb::handle value, nb::handle before, double low, double high) {
  const int64_t n = is_tensor(value) ? tensor(value).numel() : 0;
  float* v = buffer<float>(value, n, at::kFloat);
  float* b = buffer<float>(before, n, at::kFloat);
  if (!v || !b) return false;
  fakequant::keep_within(v, b, n, float(low), float(high));
  return true;
}

}  // namespace fakequant::autograd
