#include "torch/arguments.h"

#include <algorithm>
#include <cmath>

namespace fakequant::autograd {
namespace {

constexpr int64_t kWholeAxis = -1;  // group size that stands for the length of the axis; see fakequant/spec.py

bool is_learned(const Tensor& parameter) {
  return (at::GradMode::is_enabled() && parameter.requires_grad()) || parameter._fw_grad(0).defined();
}

template <class T>
bool are_valid_scales(const T* scale, int64_t n, Numerics numerics) {
  if (is_ggml(numerics)) return std::all_of(scale, scale + n, [](T s) { return std::isfinite(s); });
  return std::all_of(scale, scale + n, [](T s) { return s > 0 && !std::isinf(s); });
}

// In a dense tensor the stride of an axis is the number of elements inside it, whatever the order of the axes.
std::optional<Shape> shape_of(const Tensor& x, std::optional<int64_t> axis) {
  const int64_t n = x.numel();
  if (!axis) return Shape{1, 1, 1, n};
  if (*axis < 0 || *axis >= x.dim() || n == 0) return std::nullopt;
  const int64_t blocks = x.size(*axis), inner = blocks == 1 ? 1 : x.stride(*axis);
  if (blocks == 1) return Shape{1, 1, 1, n};
  return Shape{1, n / (blocks * inner), blocks, inner};
}

}  // namespace

bool Blocks::fit(const Tensor& parameter) const {
  if (parameter.numel() != count || !parameter.is_contiguous() || !is_eager(parameter)) return false;
  if (!sizes.empty()) {
    return parameter.sizes().equals(sizes) ||
           (!sizes_without_axis.empty() && parameter.sizes().equals(sizes_without_axis));
  }
  return parameter.dim() == 1 || (parameter.dim() == 0 && !per_channel);
}

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

std::vector<int32_t> rounded_zeros(const Tensor& zero, int64_t qmin, int64_t qmax, bool truncates) {
  std::vector<int32_t> out;
  if (!zero.defined()) return out;
  out.reserve(size_t(zero.numel()));
  const float* z = zero.const_data_ptr<float>();
  // Clamped in double: float32 may round the end of a wide range to a number outside it.
  for (int64_t i = 0; i < zero.numel(); ++i) {
    const double whole = truncates ? double(z[i] + 0.5f) : std::nearbyint(double(z[i]));
    out.push_back(int32_t(std::clamp(whole, double(qmin), double(qmax))));  // the conversion truncates
  }
  return out;
}

Parameters::Parameters(int numerics, int64_t qmin, int64_t qmax, const Blocks& blocks, bool has_torchs_name)
    : blocks(blocks), n(blocks.count), has_torchs_name(has_torchs_name) {
  grid.numerics = Numerics(numerics);
  grid.qmin = qmin;
  grid.qmax = qmax;
}

bool Parameters::set_scale(nb::handle object, bool wide, bool learnable) {
  if (PyFloat_CheckExact(object.ptr()) && blocks.is_per_tensor()) {
    scale_f64_ = PyFloat_AS_DOUBLE(object.ptr());
  } else if (is_tensor(object)) {
    const Tensor& t = tensor(object);
    if (!blocks.fit(t) || (is_learned(t) && !learnable)) return false;
    if (t.scalar_type() == (wide ? at::kDouble : at::kFloat)) {
      if (wide) grid.scale_f64 = t.const_data_ptr<double>();
      else grid.scale_f32 = t.const_data_ptr<float>();
      return has_torchs_name || (wide ? are_valid_scales(grid.scale_f64, n, grid.numerics)
                                      : are_valid_scales(grid.scale_f32, n, grid.numerics));
    }
    if (n != 1 || learnable || t.scalar_type() != at::kFloat) return false;
    scale_f64_ = t.const_data_ptr<float>()[0];
  } else {
    return false;
  }
  scale_f32_ = float(scale_f64_);
  if (wide) grid.scale_f64 = &scale_f64_;
  else grid.scale_f32 = &scale_f32_;
  return has_torchs_name || (wide ? are_valid_scales(&scale_f64_, 1, grid.numerics)
                                  : are_valid_scales(&scale_f32_, 1, grid.numerics));
}

bool Parameters::set_zero(nb::handle object, int64_t low, int64_t high) {
  if (has_offset(grid.numerics)) {
    if (!is_tensor(object)) return false;
    const Tensor& t = tensor(object);
    if (!blocks.fit(t) || is_learned(t) || t.scalar_type() != at::kFloat) return false;
    grid.zero_f32 = t.const_data_ptr<float>();
    return std::all_of(grid.zero_f32, grid.zero_f32 + n, [](float z) { return std::isfinite(z); });
  }
  if (PyLong_CheckExact(object.ptr())) {
    int overflow = 0;
    zero_i64_ = PyLong_AsLongLongAndOverflow(object.ptr(), &overflow);
    if (overflow || zero_i64_ < low || zero_i64_ > high) return false;
    if (zero_i64_ == 0) return true;
    // 32 bits if possible: with 64-bit zero points the kernels compute one element at a time.
    zero_i32_ = int32_t(zero_i64_);
    if (zero_i32_ == zero_i64_) grid.zero_i32 = &zero_i32_;
    else grid.zero_i64 = &zero_i64_;
    return n == 1;
  }
  if (!is_tensor(object)) return false;
  const Tensor& t = tensor(object);
  if (!blocks.fit(t) || is_learned(t) || n == 0) return false;
  const auto within = [&](const auto* z) {
    return std::all_of(z, z + n, [&](auto v) { return v >= low && v <= high; });
  };
  if (t.scalar_type() == at::kInt) return within(grid.zero_i32 = t.const_data_ptr<int32_t>());
  if (t.scalar_type() == at::kLong && blocks.is_per_tensor()) {
    zero_i64_ = t.const_data_ptr<int64_t>()[0];
    zero_i32_ = int32_t(zero_i64_);
    if (zero_i32_ != zero_i64_) return false;
    grid.zero_i32 = &zero_i32_;
    return within(&zero_i64_);
  }
  if (t.scalar_type() == at::kFloat && grid.numerics == Numerics::torch_channel && has_torchs_name) {
    grid.numerics = Numerics::torch_channel_float;
    grid.zero_f32 = t.const_data_ptr<float>();
    return true;
  }
  return false;
}

bool Parameters::set_learned_zero(nb::handle object) {
  if (object.is_none()) return true;
  if (!is_tensor(object)) return false;
  const Tensor& t = tensor(object);
  if (!blocks.fit(t) || t.scalar_type() != at::kFloat) return false;
  const float* z = t.const_data_ptr<float>();
  if (!std::all_of(z, z + n, [](float value) { return std::isfinite(value); })) return false;
  zeros_ = rounded_zeros(t, grid.qmin, grid.qmax, /*truncates=*/false);
  grid.zero_i32 = zeros_.data();
  return true;
}

}  // namespace fakequant::autograd
