// The rules of ggml's block types, with the interface of the rules in numerics-inl.h.
//
//   t = (x - z) * inverse;  q = clamp(rounded t);  y = q * d + m
//
//                rounded t               inverse    d                z, m
//   q4_0         floor(t + 8.5) - 8      1 / s      f16(s)           0
//   q4_1         floor(t + 0.5)          1 / s      f16(s)           z, f16(z)
//   q8_0, tq2_0  half away from zero     1 / s      f16(s)           0
//   q8_0_input   half to even            127 / s    f16(s / 127)     0
//   q8_k_input   half to even            -127 / s   1 / inverse      0
//   q4_k, q6_k   half to even            (t = (x - z) / s)   s       z, z; 0 in q6_k
//
// Everything is in float32, for float64 data too. Inverses are finite: a block of zeros has a scale of 0.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace fakequant::FQ_TARGET {

template <class V> struct GgmlParams {
  using F = Vec<float, kWidth<V>>;
  F scale, inverse, zero, offset;
  V lo, hi;
};

// Returns a value rounded to float16, at most its largest value.
template <class F> FQ_INLINE F as_float16(F v) {
  constexpr int N = kWidth<F>;
  const F limit = splat<F>(65504.0f);
  return widen_f16<N>(narrow_f16<N>(min_or_second(limit, max_or_second(-limit, v))));
}

template <class V> FQ_INLINE GgmlParams<V> ggml_params(Numerics numerics, V scale, V zero, V lo, V hi) {
  using F = Vec<float, kWidth<V>>;
  const F s = convert<F>(scale), largest = splat<F>(__FLT_MAX__);
  const float one = numerics == Numerics::q8_0_input ? 127.0f : numerics == Numerics::q8_k_input ? -127.0f : 1.0f;
  const F z = convert<F>(zero);
  // Data are divided by these scales, and by the largest float32 if the scale is 0. Adding -0.0 changes nothing.
  if (numerics == Numerics::q4_k || numerics == Numerics::q6_k) {
    return {s, s != F{} ? s : largest, z, numerics == Numerics::q4_k ? z : -F{}, lo, hi};
  }
  const F inverse = min_or_second(largest, max_or_second(-largest, one / s));
  F d = s;
  if (numerics == Numerics::q8_0_input) d = s / 127.0f;
  d = numerics == Numerics::q8_k_input ? zero_unless(s != F{}, 1.0f / inverse) : as_float16(d);
  return {d, inverse, z, numerics == Numerics::q4_1 ? as_float16(z) : z, lo, hi};
}

// One struct per way of rounding.
template <Numerics Kind> struct GgmlRule {
  static constexpr bool kIsGgml = true;
  static constexpr bool kOnLevels = false;
  static constexpr bool kKeepsNan = true;
  // Returns the distance from code 0 in steps.
  template <class V> static FQ_INLINE auto steps(V x, const GgmlParams<V>& p) {
    auto t = convert<typename GgmlParams<V>::F>(x);
    if constexpr (Kind == Numerics::q4_1 || Kind == Numerics::q4_k) t = t - p.zero;
    if constexpr (Kind == Numerics::q4_k) return t / p.inverse;
    else return t * p.inverse;
  }
  template <class V> static FQ_INLINE V round(V x, const GgmlParams<V>& p) {
    using F = typename GgmlParams<V>::F;
    const F t = steps(x, p);
    if constexpr (Kind == Numerics::q4_0) return convert<V>(FQ_TARGET::floor(t + 8.5f) - 8.0f);
    else if constexpr (Kind == Numerics::q4_1) return convert<V>(FQ_TARGET::floor(t + 0.5f));
    else if constexpr (Kind == Numerics::q8_0) return convert<V>(round_half_away(t) + F{});  // no -0.0
    else return convert<V>(rint(t) + F{});
  }
  template <class V> static FQ_INLINE V clamp(V code, const GgmlParams<V>& p) {
    return min_or_second(p.hi, max_or_second(p.lo, code));
  }
  template <class V> static FQ_INLINE V value(V code, const GgmlParams<V>& p) {
    using F = typename GgmlParams<V>::F;
    if constexpr (Kind == Numerics::q4_1 || Kind == Numerics::q4_k) {
      return convert<V>(convert<F>(code) * p.scale + p.offset);
    }
    else return convert<V>(convert<F>(code) * p.scale);
  }
};

template <class Rule> inline constexpr bool kIsGgmlRule = requires { Rule::kIsGgml; };

template <class W, class V> FQ_INLINE GgmlParams<W> lane(const GgmlParams<V>& p, int i = 0) {
  using F = typename GgmlParams<W>::F;
  return {splat<F>(p.scale[i]), splat<F>(p.inverse[i]), splat<F>(p.zero[i]), splat<F>(p.offset[i]),
          splat<W>(p.lo[i]), splat<W>(p.hi[i])};
}

}  // namespace fakequant::FQ_TARGET
