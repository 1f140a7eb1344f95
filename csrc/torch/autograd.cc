// The Python module `fakequant._autograd_<torch version>`: the short way from Python to a kernel and
// back through torch's autograd engine.
//
// Python takes longer to look at its arguments than a kernel for a few thousand elements, and a
// backward node written in Python as long again. This does what fakequant/_backends/torch does in the case that
// matters: ordinary CPU memory, one scale, one per channel or one per group, first derivative. The
// functions return None for anything else, and the nodes hand it to the operators `torch.ops.fakequant`,
// so that there is one definition of each.
//
// torch's C++ interface changes between releases; that is why the release is part of the module's name
// and why this is a module of its own. Without it the Python nodes do the work.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "bounded.h"
#include "kernel_api.h"
#include "torch/node.h"

namespace nb = nanobind;
using namespace nb::literals;
using at::Tensor;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::dynamo::autograd::CompiledNodeArgs;
using torch::dynamo::autograd::SwapSavedVariables;

namespace fakequant {
namespace {

const KernelApi* g_kernels = nullptr;

// --- which tensors are ours ----------------------------------------------------------------------

// Of ordinary CPU tensors; the second is that of inference mode. See fakequant/_backends/torch/plain_memory.py.
constexpr c10::DispatchKeySet kInference({c10::DispatchKey::CPU, c10::DispatchKey::AutocastCPU});
constexpr c10::DispatchKeySet kPlain =
    kInference | c10::DispatchKeySet({c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::AutogradCPU});

bool is_eager(const Tensor& t) {
  const auto keys = t.key_set();
  if (keys != kPlain && keys != kInference) return false;
  return (c10::impl::tls_local_dispatch_key_set().included_ - c10::default_included_set).empty();
}

std::optional<DType> kernel_dtype(const Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat: return DType::f32;
    case at::kDouble: return DType::f64;
    case at::kBFloat16: return DType::bf16;
    case at::kHalf: return DType::f16;
    default: return std::nullopt;
  }
}

// Whether a first derivative of it on our kernels is all that is asked for.
bool is_simple(const Tensor& dy) {
  return is_eager(dy) && kernel_dtype(dy) && !(at::GradMode::is_enabled() && dy.requires_grad());
}

using Order = std::optional<std::vector<int64_t>>;  // axes from the outermost in memory; none: C order

bool is_dense_in(const Tensor& t, const Order& order) {
  return order ? t.permute(*order).is_contiguous() : t.is_contiguous();
}

// Calls an operator of the library by name, with whatever rules the dispatcher finds for the arguments.
template <class... Args> c10::Stack call(const char* name, Args&&... args) {
  c10::Stack stack;
  (stack.emplace_back(std::forward<Args>(args)), ...);
  c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(&stack);
  return stack;
}

// --- clipped -------------------------------------------------------------------------------------

// dx = dy inside the range, else 0. Keeps the mask.
struct FakeQuantizeBackward : Node {
  SavedVariable mask_;
  Order order_;
  bool multiply_ = false;

  std::string name() const override { return "FakeQuantizeBackward"; }
  void release_variables() override { mask_.reset_data(); }

  variable_list apply(variable_list&& gradients) override {
    const Tensor& dy = gradients[0];
    if (!dy.defined()) return {Tensor()};
    const Tensor mask = mask_.unpack(getptr());
    const bool packed = mask.scalar_type() == at::kByte;
    const bool same_order = packed ? is_dense_in(dy, order_)
                                   : dy.is_non_overlapping_and_dense() && dy.strides() == mask.strides();
    if (!is_simple(dy) || !is_eager(mask) || !same_order) {
      at::IValue order = order_ ? at::IValue(*order_) : at::IValue();
      return {call("fakequant::mask_backward", dy, mask, std::move(order), multiply_)[0].toTensor()};
    }
    // The strides of dy * mask, also of axes of length 1, where they mean nothing.
    Tensor dx = dy.is_contiguous() ? at::empty_like(dy, at::MemoryFormat::Contiguous) : at::empty_like(dy);
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

// --- pass-through --------------------------------------------------------------------------------

struct PassThroughBackward : Node {
  std::string name() const override { return "FakeQuantizePassThroughBackward"; }
  variable_list apply(variable_list&& gradients) override { return std::move(gradients); }
  void compiled_args(CompiledNodeArgs&) const override {}
  variable_list apply_with_saved(const variable_list& inputs, SwapSavedVariables&) override { return inputs; }
};

// --- learned -------------------------------------------------------------------------------------

// Learned zero points as integers, as fakequant/_backends/torch/tensor_zero_points.py rounds them: half to even, but
// torch's backward for one scale cuts off the fraction of z + 0.5 instead.
std::vector<int32_t> rounded_zeros(const Tensor& zero, int64_t qmin, int64_t qmax, bool cuts_off) {
  std::vector<int32_t> out;
  if (!zero.defined()) return out;
  out.reserve(size_t(zero.numel()));
  const float* z = zero.const_data_ptr<float>();
  // Clamped in double: in float32 the end of a wide range may be rounded to a number outside it.
  for (int64_t i = 0; i < zero.numel(); ++i) {
    const double whole = cuts_off ? double(z[i] + 0.5f) : std::nearbyint(double(z[i]));
    out.push_back(int32_t(std::clamp(whole, double(qmin), double(qmax))));  // the conversion cuts off
  }
  return out;
}

// dx, dscale and dzero_point. Keeps what they are computed from.
struct LearnedFakeQuantizeBackward : Node {
  SavedVariable x_, scale_, zero_point_;
  bool has_zero_point_ = false;
  int64_t qmin_ = 0, qmax_ = 0;
  std::string numerics_name_;
  Numerics numerics_ = Numerics::onnx;
  double grad_factor_ = 1;
  Shape shape_{};
  int64_t axis_ = -1;  // -1: one scale for the tensor

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
    if (at::GradMode::is_enabled() || !is_simple(dy) || !is_eager(x) || !is_eager(scale) || dy.dtype() != x.dtype()) {
      auto zeros = has_zero_point_ ? at::IValue(as_blocks(zero, x)) : at::IValue();
      auto out = call("fakequant::learned_backward", dy, x, as_blocks(scale, x), std::move(zeros), qmin_, qmax_,
                      numerics_name_, grad_factor_);
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

  // The shape in which the operators take one value per channel.
  Tensor as_blocks(const Tensor& parameter, const Tensor& x) const {
    if (axis_ < 0) return parameter;
    std::vector<int64_t> shape(size_t(x.dim()), 1);
    shape[size_t(axis_)] = -1;
    return parameter.view(shape);
  }

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

// --- linear --------------------------------------------------------------------------------------

// y = x w^T + b, with the products of torch's own backward pass. Torch's needs x and w at the same time;
// where hooks compute them anew from something smaller, this has only one of them in memory.
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
    return {dx, dweight, task_should_compute_output(2) ? dy : Tensor()};  // the engine sums dy to the shape of b
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

// --- forward -------------------------------------------------------------------------------------

const Tensor& tensor(nb::handle object) {
  if (!THPVariable_Check(object.ptr())) throw nb::type_error("expected a torch.Tensor");
  return THPVariable_Unpack(object.ptr());
}

bool is_tensor(nb::handle object) { return THPVariable_Check(object.ptr()); }

bool is_learned(const Tensor& parameter) {
  return (at::GradMode::is_enabled() && parameter.requires_grad()) || parameter._fw_grad(0).defined();
}

bool is_own(Numerics n) { return n >= Numerics::onnx; }

// Data the kernels can read, if need be from a dense copy.
bool is_readable_data(const Tensor& x) { return kernel_dtype(x) && is_eager(x) && !x._fw_grad(0).defined(); }

// Data the kernels can be pointed at.
bool is_simple_data(const Tensor& x) { return is_readable_data(x) && x.is_non_overlapping_and_dense(); }

// x, or a copy of it without gaps that has the strides of results computed from x.
Tensor dense(const Tensor& x) {
  if (x.is_non_overlapping_and_dense()) return x;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return at::empty_like(x).copy_(x);
}

// One scale for the tensor, or one per index on an axis. In a tensor without gaps the stride of an axis
// is the number of elements inside it, whatever the order of the axes.
std::optional<Shape> shape_of(const Tensor& x, std::optional<int64_t> axis) {
  const int64_t n = x.numel();
  if (!axis) return Shape{1, 1, 1, n};
  if (*axis < 0 || *axis >= x.dim() || n == 0) return std::nullopt;
  const int64_t blocks = x.size(*axis), inner = blocks == 1 ? 1 : x.stride(*axis);
  if (blocks == 1) return Shape{1, 1, 1, n};
  return Shape{1, n / (blocks * inner), blocks, inner};
}

// Which elements share a scale.
struct Blocks {
  Shape shape;
  int64_t count = 1;  // how many scales there are
  bool per_channel = false;
  // The shapes that scales may have if there is one per group; empty: one scale, or one per channel.
  std::vector<int64_t> sizes, sizes_without_axis;

  // One value per channel has an axis; the only one of a tensor may have none.
  bool fit(const Tensor& parameter) const {
    if (parameter.numel() != count || !parameter.is_contiguous() || !is_eager(parameter)) return false;
    if (!sizes.empty()) {
      return parameter.sizes().equals(sizes) ||
             (!sizes_without_axis.empty() && parameter.sizes().equals(sizes_without_axis));
    }
    return parameter.dim() == 1 || (parameter.dim() == 0 && !per_channel);
  }
};

constexpr int64_t kWholeAxis = -1;  // as a group size; see fakequant/spec.py

// The blocks of x, which has no gaps; none if the groups do not fit it, or if it takes more than this.
std::optional<Blocks> blocks_of(const Tensor& x, std::optional<int64_t> axis, std::optional<int64_t> group) {
  Blocks blocks;
  if (!group) {
    const auto shape = shape_of(x, axis);
    if (!shape) return std::nullopt;
    blocks.shape = *shape;
    blocks.count = axis ? x.size(*axis) : 1;
    blocks.per_channel = axis.has_value();
    return blocks;
  }
  if (!axis || *axis < 0 || *axis >= x.dim() || x.numel() == 0 || !x.is_contiguous()) return std::nullopt;
  const int64_t length = x.size(*axis), size = *group == kWholeAxis ? length : *group;
  if (size < 1 || length % size != 0) return std::nullopt;
  int64_t after = 1;
  for (int64_t inside = *axis + 1; inside < x.dim(); ++inside) after *= x.size(inside);
  blocks.count = x.numel() / size;
  blocks.shape = after == 1 ? Shape{1, 1, blocks.count, size} : Shape{blocks.count / after, size, after, 1};
  blocks.sizes = x.sizes().vec();
  blocks.sizes[size_t(*axis)] = length / size;
  if (*group == kWholeAxis && x.dim() > 1) {
    blocks.sizes_without_axis = blocks.sizes;
    blocks.sizes_without_axis.erase(blocks.sizes_without_axis.begin() + *axis);
  }
  return blocks;
}

// Scale and zero point of a call, and the memory they are in if they were numbers.
struct Parameters {
  Grid grid;
  const Blocks& blocks;
  const int64_t n;             // how many scales there are
  const bool has_torchs_name;  // torch's functions take any scale, and zero points with a fraction per channel
  float scale_f32 = 0;
  double scale_f64 = 0;
  int64_t zero_i64 = 0;
  int32_t zero_i32 = 0;
  std::vector<int32_t> zeros;

  Parameters(int numerics, int64_t qmin, int64_t qmax, const Blocks& blocks, bool has_torchs_name)
      : blocks(blocks), n(blocks.count), has_torchs_name(has_torchs_name) {
    grid.numerics = Numerics(numerics);
    grid.qmin = qmin;
    grid.qmax = qmax;
  }
  Parameters(const Parameters&) = delete;
  Parameters& operator=(const Parameters&) = delete;

  // False: not a scale we know, or one that needs an error.
  bool set_scale(nb::handle object, bool wide, bool learnable) {
    if (PyFloat_CheckExact(object.ptr()) && is_per_tensor()) {
      scale_f64 = PyFloat_AS_DOUBLE(object.ptr());
    } else if (is_tensor(object)) {
      const Tensor& t = tensor(object);
      if (!blocks.fit(t) || (is_learned(t) && !learnable)) return false;
      if (t.scalar_type() == (wide ? at::kDouble : at::kFloat)) {
        if (wide) grid.scale_f64 = t.const_data_ptr<double>();
        else grid.scale_f32 = t.const_data_ptr<float>();
        return has_torchs_name || (wide ? valid(grid.scale_f64, n) : valid(grid.scale_f32, n));
      }
      if (n != 1 || learnable || t.scalar_type() != at::kFloat) return false;
      scale_f64 = t.const_data_ptr<float>()[0];
    } else {
      return false;
    }
    scale_f32 = float(scale_f64);
    if (wide) grid.scale_f64 = &scale_f64;
    else grid.scale_f32 = &scale_f32;
    return has_torchs_name || (wide ? valid(&scale_f64, 1) : valid(&scale_f32, 1));
  }

  // An integer zero point within [low, high].
  bool set_zero(nb::handle object, int64_t low, int64_t high) {
    if (PyLong_CheckExact(object.ptr())) {
      int overflow = 0;
      zero_i64 = PyLong_AsLongLongAndOverflow(object.ptr(), &overflow);
      if (overflow || zero_i64 < low || zero_i64 > high) return false;
      if (zero_i64 == 0) return true;
      // What fits 32 bits is much faster: beyond, the kernels compute one element at a time.
      zero_i32 = int32_t(zero_i64);
      if (zero_i32 == zero_i64) grid.zero_i32 = &zero_i32;
      else grid.zero_i64 = &zero_i64;
      return n == 1;
    }
    if (!is_tensor(object)) return false;
    const Tensor& t = tensor(object);
    if (!blocks.fit(t) || is_learned(t) || n == 0) return false;
    const auto within = [&](const auto* z) { return std::all_of(z, z + n, [&](auto v) { return v >= low && v <= high; }); };
    if (t.scalar_type() == at::kInt) return within(grid.zero_i32 = t.const_data_ptr<int32_t>());
    if (t.scalar_type() == at::kLong && is_per_tensor()) {
      zero_i64 = t.const_data_ptr<int64_t>()[0];
      zero_i32 = int32_t(zero_i64);
      if (zero_i32 != zero_i64) return false;
      grid.zero_i32 = &zero_i32;
      return within(&zero_i64);
    }
    if (t.scalar_type() == at::kFloat && grid.numerics == Numerics::torch_channel && has_torchs_name) {
      grid.numerics = Numerics::torch_channel_float;
      grid.zero_f32 = t.const_data_ptr<float>();
      return true;
    }
    return false;
  }

  // A learned zero point, rounded half to even.
  bool set_learned_zero(nb::handle object) {
    if (object.is_none()) return true;
    if (!is_tensor(object)) return false;
    const Tensor& t = tensor(object);
    if (!blocks.fit(t) || t.scalar_type() != at::kFloat) return false;
    const float* z = t.const_data_ptr<float>();
    if (!std::all_of(z, z + n, [](float value) { return std::isfinite(value); })) return false;
    zeros = rounded_zeros(t, grid.qmin, grid.qmax, /*cuts_off=*/false);
    grid.zero_i32 = zeros.data();
    return true;
  }

  bool is_per_tensor() const { return !blocks.per_channel && blocks.sizes.empty(); }

  template <class T> static bool valid(const T* scale, int64_t n) {
    return std::all_of(scale, scale + n, [](T s) { return s > 0 && !std::isinf(s); });
  }
};

// Waiting for the GIL again can take longer than a small tensor's whole computation.
constexpr int64_t kReleaseGilFrom = 4096;

void run(const FakeQuantizeArgs& args) {
  if (args.shape.size() < kReleaseGilFrom) {
    if (args.shape.size() > 0) g_kernels->fake_quantize(args);
    return;
  }
  const nb::gil_scoped_release without_gil;
  g_kernels->fake_quantize(args);
}

// Makes y, which was computed without autograd, the result of `node`.
template <class... Inputs>
void set_result(const Tensor& y, const NodePointer<Node>& node, const Inputs&... inputs) {
  node->set_next_edges(torch::autograd::collect_next_edges(inputs...));
  torch::autograd::set_history(y, node);
}

Order memory_order(const Tensor& x) {
  if (x.is_contiguous()) return std::nullopt;
  std::vector<int64_t> order(size_t(x.dim()));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return (x.size(a) > 1 ? x.stride(a) : 0) > (x.size(b) > 1 ? x.stride(b) : 0);
  });
  return order;
}

nb::object wrap(Tensor&& t) { return nb::steal(THPVariable_Wrap(std::move(t))); }

// y and what its gradient needs: a mask, or nothing.
struct Result {
  const bool records;
  Tensor y, mask;

  // `x` has no gaps; it is `source` or a copy of it.
  Result(const Tensor& source, const Tensor& x, bool clipped)
      : records(at::GradMode::is_enabled() && source.requires_grad()) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    y = at::empty_like(x);
    if (records && clipped) mask = at::empty({(x.numel() + 7) / 8}, at::TensorOptions(at::kByte));
  }

  FakeQuantizeArgs args(const Tensor& x, const Shape& shape, const Grid& grid) const {
    return {*kernel_dtype(x), shape, grid, x.const_data_ptr(), y.mutable_data_ptr(),
            mask.defined() ? MaskKind::packed : MaskKind::none,
            mask.defined() ? static_cast<uint8_t*>(mask.mutable_data_ptr()) : nullptr};
  }

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

// y, with a clipped or passed-through gradient; None if it takes more than this.
nb::object fake_quantize(nb::handle x_object, nb::handle scale, nb::handle zero_point, int64_t qmin, int64_t qmax,
                         int numerics, std::optional<int64_t> axis, std::optional<int64_t> group, int64_t lowest_zero,
                         int64_t highest_zero, bool has_torchs_name, bool clipped) {
  if (!is_tensor(x_object) || qmin > qmax) return nb::none();
  // torch's functions take two numbers or two tensors.
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
  run(result.args(x, blocks->shape, p.grid));
  return result.finish(source, Numerics(numerics));
}

// The memory of a buffer of a quantizer with n scales; null if it is not what it should be.
template <class T> T* buffer(nb::handle object, int64_t n, at::ScalarType dtype) {
  if (!is_tensor(object)) return nullptr;
  const Tensor& t = tensor(object);
  if (t.scalar_type() != dtype || t.numel() != n || !t.is_contiguous() || !is_eager(t)) return nullptr;
  return t.mutable_data_ptr<T>();
}

// Updates a running range with x, chooses scales and, if asked to, quantizes: y or None, and how many
// values were not finite. None if it takes more than this, or if there is no range to quantize a block
// with; then nothing is changed.
nb::object observe(nb::handle x_object, nb::handle running_min, nb::handle running_max, nb::handle scale,
                   nb::handle zero_point, int64_t qmin, int64_t qmax, int numerics, bool symmetric, int update,
                   double averaging_constant, double eps, std::optional<int64_t> axis, std::optional<int64_t> group,
                   bool quantize, bool clipped) {
  if (!is_tensor(x_object)) return nb::none();
  const Tensor& x = tensor(x_object);
  if (!is_simple_data(x) || x.numel() == 0) return nb::none();
  const auto blocks = blocks_of(x, axis, group);
  if (!blocks) return nb::none();
  const int64_t n = blocks->count;
  const ObserveArgs o{RangeRule::own, RangeUpdate(update), true, quantize, symmetric, float(averaging_constant), float(eps),
                      buffer<float>(running_min, n, at::kFloat), buffer<float>(running_max, n, at::kFloat),
                      buffer<float>(scale, n, at::kFloat), buffer<int32_t>(zero_point, n, at::kInt)};
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
  ObserveResult seen;
  if (x.numel() < kReleaseGilFrom) {
    seen = g_kernels->observe_fake_quantize(o, args);
  } else {
    const nb::gil_scoped_release without_gil;
    seen = g_kernels->observe_fake_quantize(o, args);
  }
  if (seen.unseen) return nb::none();
  // What was saved of a buffer that changes must not be used any more.
  for (nb::handle changed : {running_min, running_max, scale, zero_point}) {
    if (!tensor(changed).is_inference()) tensor(changed).unsafeGetTensorImpl()->bump_version();
  }
  const int64_t nonfinite = seen.nan_count + seen.posinf_count + seen.neginf_count;
  return nb::make_tuple(result ? result->finish(x, Numerics(numerics)) : nb::none(), nonfinite);
}

// y, differentiable in x, scale and zero point; None if it takes more than this.
nb::object fake_quantize_learned(nb::handle x_object, nb::handle scale_object, nb::handle zero_object, int64_t qmin,
                                 int64_t qmax, std::string numerics_name, int numerics, std::optional<int64_t> axis,
                                 bool has_torchs_name, double grad_factor) {
  if (!is_tensor(x_object) || !is_tensor(scale_object)) return nb::none();
  const Tensor &x = tensor(x_object), &scale = tensor(scale_object);
  if (!is_simple_data(x) || scale._fw_grad(0).defined()) return nb::none();
  // torch's functions take scales of one axis only, and per channel only data of more.
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
  run({dtype, blocks->shape, p.grid, x.const_data_ptr(), y.mutable_data_ptr(), MaskKind::none, nullptr});
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

// Whether both are ordinary memory; then `value` is kept within [low, high], see bounded.h.
bool keep_within(nb::handle value, nb::handle before, double low, double high) {
  const int64_t n = is_tensor(value) ? tensor(value).numel() : 0;
  float* v = buffer<float>(value, n, at::kFloat);
  float* b = buffer<float>(before, n, at::kFloat);
  if (!v || !b) return false;
  fakequant::keep_within(v, b, n, float(low), float(high));
  return true;
}

// x w^T + b; None if it takes more than this.
nb::object linear(nb::handle x_object, nb::handle weight_object, nb::handle bias_object) {
  const Tensor &x = tensor(x_object), &weight = tensor(weight_object);
  const Tensor bias = bias_object.is_none() ? Tensor() : tensor(bias_object);
  if (!at::GradMode::is_enabled() || x.dim() < 2 || weight.dim() != 2 || x.numel() == 0) return nb::none();
  for (const Tensor& t : {x, weight, bias}) {
    if (t.defined() && (!is_simple_data(t) || !t.is_contiguous() || t.scalar_type() != x.scalar_type())) return nb::none();
  }
  Tensor y;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    y = at::linear(x, weight, bias.defined() ? std::optional<Tensor>(bias) : std::nullopt);
  }
  auto node = make_node<LinearBackward>();
  node->x_ = SavedVariable(x, false);
  node->weight_ = SavedVariable(weight, false);
  node->sizes_ = x.sizes().vec();
  set_result(y, node, x, weight, bias);
  return wrap(std::move(y));
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

void use_kernels(size_t address) {
  g_kernels = reinterpret_cast<const KernelApi*>(address);
}

}  // namespace
}  // namespace fakequant

NB_MODULE(FAKEQUANT_AUTOGRAD_MODULE, m) {
  using namespace fakequant;
  m.doc() = "Short ways to the kernels and back through autograd. Private: use the functions of `fakequant`.";
  // What a hook of saved tensors raised, such as the one that ends a recomputation of a checkpoint.
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (python_error& error) {
      error.restore();
    }
  });
  m.def("use_kernels", &use_kernels, "address"_a, "The address `_native.kernel_api()` returns.");
  m.def("fake_quantize", &fake_quantize, "x"_a.none(), "scale"_a.none(), "zero_point"_a.none(), "qmin"_a,
        "qmax"_a, "numerics"_a, "axis"_a.none(), "group"_a.none(), "lowest_zero"_a, "highest_zero"_a,
        "has_torchs_name"_a, "clipped"_a);
  m.def("observe", &observe, "x"_a, "running_min"_a, "running_max"_a, "scale"_a, "zero_point"_a, "qmin"_a, "qmax"_a,
        "numerics"_a, "symmetric"_a, "update"_a, "averaging_constant"_a, "eps"_a, "axis"_a.none(), "group"_a.none(),
        "quantize"_a, "clipped"_a);
  m.def("fake_quantize_learned", &fake_quantize_learned, "x"_a.none(), "scale"_a.none(),
        "zero_point"_a.none(), "qmin"_a, "qmax"_a, "numerics_name"_a, "numerics"_a, "axis"_a.none(),
        "has_torchs_name"_a, "grad_factor"_a);
  m.def("keep_within", nb::overload_cast<nb::handle, nb::handle, double, double>(&keep_within), "value"_a, "before"_a,
        "low"_a, "high"_a);
  m.def("linear", &linear, "x"_a, "weight"_a, "bias"_a.none(), "None if torch's own is to be used.");
  m.def("clipped", &clipped, "x"_a, "y"_a, "mask"_a, "order"_a.none(), "multiply"_a,
        "Gives y, computed from x without autograd, a clipped gradient.");
  m.def("pass_through", &pass_through, "x"_a, "y"_a, "The same with the gradient passed through.");
}
