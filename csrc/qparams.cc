// Scale and zero point of an observed range.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "core.h"
#include "formats.h"

namespace fakequant {
namespace {

// Rounds a positive scale to a format, ties to even. A scale beyond the format becomes its smallest or largest value.
float rounded_scale(float scale, ScaleRule rule) {
  if (rule == ScaleRule::any) return scale;
  uint32_t bits;
  std::memcpy(&bits, &scale, 4);
  if (rule == ScaleRule::bfloat16) {
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000;
    bits = std::clamp<uint32_t>(bits, 0x00010000, 0x7F7F0000);
    std::memcpy(&scale, &bits, 4);
    return scale;
  }
  // The sum has 10 mantissa bits below the leading one of the scale, or as many as subnormal numbers have.
  if (scale >= 65504.0f) return 65504.0f;
  float power;
  bits &= 0x7F800000;
  std::memcpy(&power, &bits, 4);
  const float above = std::max(power, 0x1p-14f) * 0x1p13f;
  return std::max((scale + above) - above, 0x1p-24f);
}

}  // namespace

// symmetric   s = max(absmax / ((qmax - qmin) / 2), eps)                     z = 0
// float       s = max(absmax / largest, eps)                                 z = 0
// affine      s = max((hi - lo) / (qmax - qmin), eps), lo <= 0 <= hi         z = clamp(qmin - rint(lo / s))
//
// All operations are in float32 and in this order. Scales of 16 bits are rounded before z is found.
QParam choose_qparams(float lo, float hi, const Grid& grid, bool symmetric, ScaleRule rule, float eps) {
  const int64_t qmin = grid.qmin, qmax = grid.qmax;
  lo = std::min(lo, 0.0f);
  hi = std::max(hi, 0.0f);
  if (is_float_format(grid.numerics)) {
    return {rounded_scale(std::max(std::max(-lo, hi) / float_format(grid.numerics).largest, eps), rule), 0};
  }
  const float levels = float(double(qmax - qmin) / (symmetric ? 2 : 1));
  if (symmetric) return {rounded_scale(std::max(std::max(-lo, hi) / levels, eps), rule), 0};
  // The width of a range may overflow float32 although its scale does not.
  const float width = hi - lo;
  const float exact = std::max(std::isinf(width) ? float((double(hi) - lo) / levels) : width / levels, eps);
  const float scale = rounded_scale(exact, rule);
  // |lo / scale| is at most about qmax - qmin, so the conversion does not overflow.
  const int64_t zero = qmin - int64_t(std::nearbyint(lo / scale));
  return {scale, int32_t(std::clamp(zero, qmin, qmax))};
}

// Converts to int32 with wraparound, as torch's int32 arithmetic does, without undefined overflow.
static int32_t wrapped(int64_t value) { return int32_t(uint32_t(value)); }

// Follows torch's fused operator, whose rule differs from choose_qparams:
// - the scale is computed in float64 and rounded to float32;
// - if it is below a minimum, the range is stretched;
// - the zero point is computed from the end of the range with the smaller error;
// - the range is symmetric only if the data has both signs.
QParam choose_qparams_fused(float lo, float hi, int32_t qmin, int32_t qmax, bool symmetric) {
  constexpr float kSmallScale = 6.1e-5f;
  const int32_t levels = wrapped(int64_t(qmax) - qmin);
  if (lo < 0 && hi > 0 && symmetric) {
    const int32_t symmetric_qmin = -(levels / 2 + 1);
    const int32_t symmetric_qmax = levels / 2;
    const double max_scale = std::max(std::fabs(lo / symmetric_qmin), std::fabs(hi / symmetric_qmax));
    lo = float(max_scale * symmetric_qmin);
    hi = float(max_scale * symmetric_qmax);
  }
  lo = std::min(lo, 0.0f);
  hi = std::max(hi, 0.0f);

  float scale = float((double(hi) - lo) / levels);
  if (scale == 0.0f || std::isinf(1.0f / scale)) scale = 0.1f;
  if (scale < kSmallScale) {
    if (lo == 0.0f) {
      hi = kSmallScale * float(levels);
    } else if (hi == 0.0f) {
      lo = -kSmallScale * float(levels);
    } else {
      const float amplifier = kSmallScale / scale;
      lo *= amplifier;
      hi *= amplifier;
    }
    scale = kSmallScale;
  }

  const double lo_steps = lo / double(scale), hi_steps = hi / double(scale);
  const double lo_error = wrapped(std::abs(int64_t(qmin))) + std::fabs(lo_steps);
  const double hi_error = wrapped(std::abs(int64_t(qmax))) + std::fabs(hi_steps);
  double zero = lo_error < hi_error ? qmin - lo_steps : qmax - hi_steps;
  if (lo < 0 && hi > 0 && symmetric) zero = double(wrapped(int64_t(qmin) + qmax)) / 2;

  QParam result{scale, 0};
  if (zero < qmin) result.zero_point = qmin;
  else if (zero > qmax) result.zero_point = qmax;
  else if (zero != zero) result.zero_point = INT32_MIN;  // the result of x86's conversion of NaN
  else result.zero_point = int32_t(std::nearbyint(zero));
  return result;
}

float moving_average(float running, float value, float c) {
  return std::isinf(running) ? value : running + c * (value - running);
}

}  // namespace fakequant
