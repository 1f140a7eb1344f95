// Rounding to a float format of few bits, with the interface of the rules in numerics-inl.h.
//
// `round` uses no table and no branch. Adding a power of two c makes the sum so large that the addition itself rounds,
// half to even, to the spacing of the format at that magnitude; subtracting c again is exact:
//
//   t = x / s;  a = min(|t|, 2 * largest);  p = 2^floor(log2 a)
//   c = max(p, smallest normal) * 2^(F - M)          F, M: mantissa bits of the compute type and of the format
//   r = copysign((a + c) - c, t)
//
// The limit 2 * largest is above everything that rounds to `largest` and keeps c from overflowing.
#pragma once

#include "formats.h"
#include "simd.h"

namespace fakequant::FQ_TARGET {

template <class V>
struct FloatParams {
  V scale;
  V lo, hi;           // -largest and largest
  V limit;            // 2 * largest
  V smallest_normal;
  V spacing;          // 2^(F - M)
  V added_zero;       // +0.0 to remove the sign of zeros, -0.0 to keep it
};

template <class C> inline constexpr int kMantissaBits = sizeof(C) == 8 ? 52 : 23;

template <class C> FQ_INLINE C power_of_two(int exponent) {
  constexpr int kBias = sizeof(C) == 8 ? 1023 : 127;
  return bit_cast<C>(typename UInt<int(sizeof(C))>::type(exponent + kBias) << kMantissaBits<C>);
}

struct FloatRule {
  static constexpr bool kIsFloat = true;
  static constexpr bool kOnLevels = true;
  static constexpr bool kKeepsNan = true;
  template <class V> static FQ_INLINE V round(V x, const FloatParams<V>& p) { return round_quotient(x / p.scale, p); }
  template <class V> static FQ_INLINE V round_quotient(V t, const FloatParams<V>& p) {
    return round_magnitude(min_or_second(p.limit, magnitude(t)), t, p);
  }
  // Returns `a`, which is at most 2 * largest, rounded and with the sign of `sign`.
  template <class V> static FQ_INLINE V round_magnitude(V a, V sign, const FloatParams<V>& p) {
    using U = Bits<V>;
    constexpr Elem<U> kExponent = sizeof(Elem<V>) == 8 ? Elem<U>(0x7FF0000000000000) : Elem<U>(0x7F800000);
    const V power = bit_cast<V>(bit_cast<U>(a) & splat<U>(kExponent));
    const V c = max_or_second(power, p.smallest_normal) * p.spacing;
    return with_sign_of((a + c) - c, sign) + p.added_zero;
  }
  template <class V> static FQ_INLINE V clamp(V level, const FloatParams<V>& p) {
    return min_or_second(p.hi, max_or_second(p.lo, level));
  }
  template <class V> static FQ_INLINE V value(V level, const FloatParams<V>& p) { return level * p.scale; }
};

// Returns the constants of a format with this scale.
template <class V> FQ_INLINE FloatParams<V> float_params(Numerics numerics, V scale) {
  using C = Elem<V>;
  const FloatFormat f = float_format(numerics);
  return {scale,
          splat<V>(C(-f.largest)),
          splat<V>(C(f.largest)),
          splat<V>(C(2 * f.largest)),
          splat<V>(power_of_two<C>(1 - f.bias)),
          splat<V>(power_of_two<C>(kMantissaBits<C> - f.mantissa_bits)),
          splat<V>(f.has_negative_zero ? C(-0.0) : C(0.0))};
}

// The same rule for a format that is known when the kernel is compiled. With short blocks, parameters are needed again
// every few vectors; here they are no more than the scale.
template <class V, Numerics Format> struct FixedFloatParams {
  V scale;
  FQ_INLINE operator FloatParams<V>() const { return float_params(Format, scale); }
};

template <Numerics Format> struct FixedFloatRule : FloatRule {
  static constexpr Numerics kFormat = Format;
  template <class V> using P = FixedFloatParams<V, Format>;
  template <class V> static FQ_INLINE V round(V x, const P<V>& p) { return FloatRule::round<V>(x, p); }
  template <class V> static FQ_INLINE V round_quotient(V t, const P<V>& p) { return FloatRule::round_quotient<V>(t, p); }
  // Rounds and clamps a quotient, in this order or the other one: the largest value is its own rounding.
  template <class V> static FQ_INLINE V round_and_clamp(V t, const P<V>& p) {
    return FloatRule::round_magnitude<V>(min_or_second(FloatParams<V>(p).hi, magnitude(t)), t, p);
  }
  template <class V> static FQ_INLINE V clamp(V level, const P<V>& p) { return FloatRule::clamp<V>(level, p); }
  template <class V> static FQ_INLINE V value(V level, const P<V>& p) { return level * p.scale; }
};

template <class Rule> inline constexpr bool kIsFloatRule = requires { Rule::kIsFloat; };
template <class Rule> inline constexpr bool kIsFixedFloatRule = requires { Rule::kFormat; };

template <class W, class V, Numerics Format>
FQ_INLINE FixedFloatParams<W, Format> lane(const FixedFloatParams<V, Format>& p, int i = 0) {
  return {splat<W>(p.scale[i])};
}

template <class W, class V> FQ_INLINE FloatParams<W> lane(const FloatParams<V>& p, int i = 0) {
  return {splat<W>(p.scale[i]), splat<W>(p.lo[i]), splat<W>(p.hi[i]), splat<W>(p.limit[i]),
          splat<W>(p.smallest_normal[i]), splat<W>(p.spacing[i]), splat<W>(p.added_zero[i])};
}

// Returns the codes of clamped values, as integers as wide as V.
//
// The exponent and the upper mantissa bits of a normal value are its code, but for the bias. A value below the smallest
// normal is a number of equal steps; adding the smallest normal gives all of them the same exponent.
template <class V> FQ_INLINE auto codes_of_values(V q, const FloatFormat& f) {
  using C = Elem<V>;
  using I = Vec<typename Int<int(sizeof(C))>::type, kWidth<V>>;
  const int shift = kMantissaBits<C> - f.mantissa_bits;
  const Elem<I> bias = Elem<I>((sizeof(C) == 8 ? 1023 : 127) - f.bias) << f.mantissa_bits;
  const V a = magnitude(q), smallest_normal = splat<V>(power_of_two<C>(1 - f.bias));
  const I normal = (bit_cast<I>(a) >> shift) - bias;
  const I subnormal = (bit_cast<I>(a + smallest_normal) - bit_cast<I>(smallest_normal)) >> shift;
  const I code = a < smallest_normal ? subnormal : normal;
  const I sign = bit_cast<I>(bit_cast<Bits<V>>(q) >> (8 * int(sizeof(C)) - 1)) << (f.bits - 1);
  return q == q ? code | sign : splat<I>(Elem<I>(f.nan_code));
}

}  // namespace fakequant::FQ_TARGET
