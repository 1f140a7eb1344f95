// Reads shapes, scales and zero points from the arguments of a call.
//
// Functions here do not raise. They report arguments that they do not handle, and Python then handles them or raises
// the error.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kernels.h"
#include "torch/plain_tensors.h"

namespace fakequant::autograd {

// Whether a rule is one of fakequant's, as opposed to one of torch's.
inline bool is_own(Numerics n) { return n >= Numerics::onnx; }

// Which elements share a scale.
struct Blocks {
  Shape shape;
  int64_t count = 1;  // number of scales
  bool per_channel = false;
  // With one scale per group: the shapes that a tensor of scales may have. Otherwise empty.
  std::vector<int64_t> sizes, sizes_without_axis;

  bool is_per_tensor() const { return !per_channel && sizes.empty(); }

  // Whether a tensor of scales or zero points has the right shape and can be read by the kernels. The scale of a
  // whole tensor may be 0-dimensional; scales per channel must have one axis.
  bool fit(const Tensor& parameter) const;
};

// Returns the blocks of x for one scale per tensor (no axis), per channel (axis) or per group (axis and group).
// Returns nullopt if axis or group do not fit x, or if x has groups and is not contiguous.
// x must be non-overlapping and dense.
std::optional<Blocks> blocks_of(const Tensor& x, std::optional<int64_t> axis, std::optional<int64_t> group);

// Rounds learned zero points to integers and clamps them to [qmin, qmax]; see
// fakequant/_backends/torch/routes.py. Rounds half to even. If `truncates`, truncates z + 0.5 instead, as
// torch's per-tensor backward does. An undefined `zero` returns an empty vector.
std::vector<int32_t> rounded_zeros(const Tensor& zero, int64_t qmin, int64_t qmax, bool truncates);

// The grid of a call. It points into tensors of the call, or into this object for Python numbers and rounded values.
// The setters return false for values they do not handle and for values that need an error message.
struct Parameters {
  Grid grid;
  const Blocks& blocks;
  const int64_t n;             // number of scales
  const bool has_torchs_name;  // torch's functions accept any scale, and fractional zero points per channel

  Parameters(int numerics, int64_t qmin, int64_t qmax, const Blocks& blocks, bool has_torchs_name);
  Parameters(const Parameters&) = delete;
  Parameters& operator=(const Parameters&) = delete;

  // Accepts a float, or a tensor of scales.
  //   wide        read the scale as float64, otherwise as float32
  //   learnable   allow a tensor that requires a gradient
  bool set_scale(nb::handle object, bool wide, bool learnable);

  // Accepts a tensor of integers within [low, high], an int if there is one scale or the int is 0, and float zero
  // points where torch's functions do.
  bool set_zero(nb::handle object, int64_t low, int64_t high);

  // Accepts None, or a float32 tensor of finite values, which are rounded half to even.
  bool set_learned_zero(nb::handle object);

 private:
  float scale_f32_ = 0;
  double scale_f64_ = 0;
  int64_t zero_i64_ = 0;
  int32_t zero_i32_ = 0;
  std::vector<int32_t> zeros_;
};

}  // namespace fakequant::autograd
