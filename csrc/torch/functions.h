// The functions of the Python module (autograd.cc), grouped by the file that defines them.
//
// They handle the common case: ordinary CPU memory; one scale per tensor, channel or group; first derivatives. Unless
// stated otherwise they return None for anything else, without having changed anything. Python then handles the call
// or raises the error.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fakequant::autograd {

namespace nb = nanobind;

// --- straight_through.cc: fixed scale and zero point, straight-through gradient -------------------

// Returns y, fake-quantized from x.
//   numerics          a value of the enum Numerics
//   axis, group       None, or as in QuantSpec; axis is not negative
//   lowest_zero,      the zero points allowed
//   highest_zero
//   has_torchs_name   accept and reject arguments as torch's function of the same name does
//   clipped           gradient 0 outside [qmin, qmax]; otherwise the gradient passes through unchanged
nb::object fake_quantize(nb::handle x, nb::handle scale, nb::handle zero_point, int64_t qmin, int64_t qmax,
                         int numerics, std::optional<int64_t> axis, std::optional<int64_t> group, int64_t lowest_zero,
                         int64_t highest_zero, bool has_torchs_name, bool clipped);

// Updates the running range with x, writes scale and zero point and, if `quantize`, fake-quantizes x. Returns
// (y, count), where y is None unless `quantize` and count is the number of values that are not finite. Returns None
// also if a block has no range to quantize with; the running range is then unchanged, scale and zero point may not be.
//   running_min, running_max, scale   float32 buffers, one value per block
//   zero_point                        int32 buffer, one value per block; float32 for offsets of ggml
//   scale_rule, update                values of the enums ScaleRule and RangeUpdate
nb::object observe(nb::handle x, nb::handle running_min, nb::handle running_max, nb::handle scale,
                   nb::handle zero_point, int64_t qmin, int64_t qmax, int numerics, bool symmetric, int scale_rule,
                   int update, double averaging_constant, double eps, std::optional<int64_t> axis, std::optional<int64_t> group,
                   bool quantize, bool clipped);

// Records that y, computed from x without autograd, has a clipped gradient.
//   mask       uint8, one bit per element in memory order, or bool of y's shape and strides
//   order      memory order of a packed mask: axes from outermost to innermost, or None for C order
//   multiply   dx is dy * mask, as in torch, instead of mask ? dy : 0
void clipped(nb::handle x, nb::handle y, nb::handle mask, nb::handle order, bool multiply);

// Records that y, computed from x without autograd, passes its gradient through unchanged.
void pass_through(nb::handle x, nb::handle y);

// --- learned_scale.cc: scale and zero point are parameters ----------------------------------------

// Returns y, fake-quantized from x and differentiable in x, scale and zero_point.
//   numerics_name, numerics   the rule, by its Python name and as a value of the enum Numerics
//   grad_factor               factor of the gradients of scale and zero_point
nb::object fake_quantize_learned(nb::handle x, nb::handle scale, nb::handle zero_point, int64_t qmin, int64_t qmax,
                                 std::string numerics_name, int numerics, std::optional<int64_t> axis,
                                 bool has_torchs_name, double grad_factor);

// Clamps `value` in place; see bounded.h. Returns false, and does nothing, unless both are plain float32 tensors of the
// same size.
bool keep_within(nb::handle value, nb::handle before, double low, double high);

// --- reused_memory.cc -----------------------------------------------------------------------------

// Returns contiguous float32 memory, which the next call may use again once nothing refers to it.
nb::object empty_floats(const std::vector<int64_t>& sizes);

// --- linear.cc ------------------------------------------------------------------------------------

// Returns x @ weight.T + bias. Its backward pass unpacks one saved tensor at a time.
nb::object linear(nb::handle x, nb::handle weight, nb::handle bias);

// The same, with exact sums of products of levels, of values on grids of at most 8 bits. Also without gradients. Returns
// None also if values are not on their grid, NaN for example.
//   *_scale, *_zero   one for the tensor, one per row of x or of the weight; zero points may be None
//   *_low, *_high     the range of the codes
//   bias_codes        None, or the bias as integers in float64, at the scale of the sums divided by `code_factor`. They
//                     are added to the sums; `bias` then only gets a gradient
//   with_int8         use the CPU's instructions for products of 8-bit integers
//   kept              None, or what `weight_levels` has returned for this weight
nb::object integer_linear(nb::handle x, nb::handle x_scale, nb::handle x_zero, int64_t x_low, int64_t x_high,
                          nb::handle weight, nb::handle weight_scale, nb::handle weight_zero, int64_t weight_low,
                          int64_t weight_high, nb::handle bias, nb::handle bias_codes, double code_factor, bool with_int8,
                          nb::handle kept);

// Returns the levels of a weight, for several calls of `integer_linear`.
nb::object weight_levels(nb::handle weight, nb::handle scale, nb::handle zero, int64_t low, int64_t high, bool with_int8);

// --- convolution.cc -------------------------------------------------------------------------------

// Returns the convolution of x, of one to three axes of space, with exact sums. Arguments are those of `integer_linear`,
// but the input has one scale, and how the kernel moves along each axis.
nb::object integer_convolution(nb::handle x, nb::handle x_scale, nb::handle x_zero, int64_t x_low, int64_t x_high,
                               nb::handle weight, nb::handle weight_scale, nb::handle weight_zero, int64_t weight_low,
                               int64_t weight_high, nb::handle bias, nb::handle bias_codes, double code_factor,
                               std::vector<int64_t> stride, std::vector<int64_t> padding, std::vector<int64_t> dilation,
                               int64_t groups, bool with_int8);

}  // namespace fakequant::autograd
