// Keeps learned values (scales, zero points, clipping values) valid after an optimizer step.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace fakequant {

// Clamps n values to [low, high] in place. A value that is not finite is replaced by its element of `before`. If the
// bounds are positive, they are bounds of magnitudes, and a value keeps the sign that it had before. Then `before` is set
// to the new values, for the next call.
inline void keep_within(float* values, float* before, int64_t n, float low, float high) {
  for (int64_t i = 0; i < n; ++i) {
    const float sign = low > 0 && before[i] < 0 ? -1.0f : 1.0f;
    const float kept = std::isfinite(values[i]) ? sign * std::clamp(sign * values[i], low, high) : before[i];
    if (kept != values[i]) values[i] = kept;  // not written if unchanged: copy-on-write pages stay shared
    before[i] = kept;
  }
}

}  // namespace fakequant
