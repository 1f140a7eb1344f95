// Learned values that stay where they make sense, whatever an optimizer does to them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace fakequant {

// Keeps values within [low, high]: what is not finite becomes what it was `before`, and `before` is what
// all of them are now.
inline void keep_within(float* values, float* before, int64_t n, float low, float high) {
  for (int64_t i = 0; i < n; ++i) {
    const float kept = std::isfinite(values[i]) ? std::clamp(values[i], low, high) : before[i];
    if (kept != values[i]) values[i] = kept;  // a page that is only read is not copied
    before[i] = kept;
  }
}

}  // namespace fakequant
