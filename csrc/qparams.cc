// From an observed range to a scale and a zero point.
#include <algorithm>
#include <cmath>

#include "core.h"

namespace fakequant {

// symmetric   s = max(absmax / ((qmax - qmin) / 2), eps)                     z = 0
// affine      s = max((hi - lo) / (qmax - qmin), eps), lo <= 0 <= hi         z = clamp(qmin - rint(lo / s))
//
// All in float32, in this order of operations.
QParam choose_qparams(float lo, float hi, int64_t qmin, int64_t qmax, bool symmetric, float eps) {
  lo = std::min(lo, 0.0f);
  hi = std::max(hi, 0.0f);
  const float levels = float(double(qmax - qmin) / (symmetric ? 2 : 1));
  if (symmetric) return {std::max(std::max(-lo, hi) / levels, eps), 0};
  const float scale = std::max((hi - lo) / levels, eps);
  // |lo / scale| is at most about qmax - qmin: it fits.
  const int64_t zero = qmin - int64_t(std::nearbyint(lo / scale));
  return {scale, int32_t(std::clamp(zero, qmin, qmax))};
}

// Differs from the above on purpose, as torch's fused operator does: float64 arithmetic, a floor for
// the scale below which the range is stretched, the zero point taken from the end of the range that
// rounds better, and a symmetric range only if the data has both signs.
QParam choose_qparams_fused(float lo, float hi, int32_t qmin, int32_t qmax, bool symmetric) {
  constexpr float kSmallScale = 6.1e-5f;
  if (lo < 0 && hi > 0 && symmetric) {
    const int symmetric_qmin = -((qmax - qmin) / 2 + 1);
    const int symmetric_qmax = (qmax - qmin) / 2;
    const double max_scale = std::max(std::fabs(lo / symmetric_qmin), std::fabs(hi / symmetric_qmax));
    lo = float(max_scale * symmetric_qmin);
    hi = float(max_scale * symmetric_qmax);
  }
  lo = std::min(lo, 0.0f);
  hi = std::max(hi, 0.0f);

  double scale = (double(hi) - lo) / (qmax - qmin);
  if (float(scale) == 0.0f || std::isinf(1.0f / float(scale))) scale = 0.1;
  if (scale < kSmallScale) {
    const float original = float(scale);
    scale = kSmallScale;
    if (lo == 0.0f) hi = kSmallScale * float(qmax - qmin);
    else if (hi == 0.0f) lo = -kSmallScale * float(qmax - qmin);
    else {
      const float amplifier = kSmallScale / original;
      lo *= amplifier;
      hi *= amplifier;
    }
  }

  const double from_lo = qmin - lo / scale, from_hi = qmax - hi / scale;
  const double lo_error = std::fabs(double(qmin)) + std::fabs(lo / scale);
  const double hi_error = std::fabs(double(qmax)) + std::fabs(hi / scale);
  double zero = lo_error < hi_error ? from_lo : from_hi;
  if (lo < 0 && hi > 0 && symmetric) zero = double(qmin + qmax) / 2;

  QParam result{float(scale), 0};
  if (zero < qmin) result.zero_point = qmin;
  else if (zero > qmax) result.zero_point = qmax;
  else if (zero != zero) result.zero_point = INT32_MIN;  // what x86 makes of NaN as an integer
  else result.zero_point = int32_t(std::nearbyint(zero));
  return result;
}

float moving_average(float running, float value, float c) {
  return std::isinf(running) ? value : running + c * (value - running);
}

}  // namespace fakequant
