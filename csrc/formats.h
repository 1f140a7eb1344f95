// The float formats of few bits: their constants, and the rule that chooses a power of two for a block.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels.h"

namespace fakequant {

struct FloatFormat {
  int bits, mantissa_bits, bias;
  float largest;
  int nan_code;  // of the lowest value if the format has no NaN
  bool has_negative_zero;
  int first_special;  // magnitudes of codes from here on are not finite
};

constexpr bool is_float_format(Numerics n) { return n >= Numerics::e4m3fn && n <= Numerics::e2m1; }

constexpr FloatFormat float_format(Numerics n) {
  switch (n) {
    case Numerics::e4m3fn: return {8, 3, 7, 448.0f, 0x7F, true, 0x7F};
    case Numerics::e5m2: return {8, 2, 15, 57344.0f, 0x7F, true, 0x7C};
    case Numerics::e4m3fnuz: return {8, 3, 8, 240.0f, 0x80, false, 0x80};
    case Numerics::e5m2fnuz: return {8, 2, 16, 57344.0f, 0x80, false, 0x80};
    case Numerics::e2m3: return {6, 3, 1, 7.5f, 0x3F, true, 0x20};
    case Numerics::e3m2: return {6, 2, 3, 28.0f, 0x3F, true, 0x20};
    default: return {4, 1, 1, 6.0f, 0x0F, true, 0x08};
  }
}

// Returns the value of a code.
inline float value_of_code(const FloatFormat& f, int code) {
  const int sign = 1 << (f.bits - 1), magnitude = code & (sign - 1);
  const float direction = code & sign ? -1.0f : 1.0f;
  if (!f.has_negative_zero && code == sign) return NAN;
  if (magnitude >= f.first_special) {
    return f.first_special == 0x7C && magnitude == 0x7C ? direction * INFINITY : NAN;
  }
  const int exponent = magnitude >> f.mantissa_bits, mantissa = magnitude & ((1 << f.mantissa_bits) - 1);
  const int steps = exponent ? mantissa + (1 << f.mantissa_bits) : mantissa;
  return direction * std::ldexp(float(steps), (exponent ? exponent : 1) - f.bias - f.mantissa_bits);
}

}  // namespace fakequant
