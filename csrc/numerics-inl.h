// The rules that map an element to a code and back, one struct per value of Numerics.
//
// Most rules compute the *level*, code - zero point, instead of the code: the level is what the scale is multiplied by,
// and clamping the level to [qmin - zero, qmax - zero] is the same as clamping the code to [qmin, qmax]. This saves an
// addition and a subtraction per element. Rules with float zero points and half_away round after adding the zero point,
// so they compute codes.
//
//   round   returns the level or code before clamping: an integer as a float, never -0.0
//   clamp   clamps to [lo, hi]; the order of operands determines whether NaN is kept
//   value   returns the dequantized value, in the precision the rule prescribes
//
// V is a vector of float or double of any width. The rules are exact if bounds and zero points are at most 2^23 in
// magnitude; wide.cc handles larger ones.
#pragma once

#include "formats-inl.h"
#include "ggml-inl.h"
#include "kernels.h"
#include "simd.h"

namespace fakequant::FQ_TARGET {

template <class V>
struct Params {
  V scale, inverse, zero;  // `inverse` is the float32 reciprocal of the float32 scale
  V lo, hi;                // bounds of the level, or of the code if the rule computes codes
};

// Codes and levels are integers and have no negative zero; -0.0 + 0.0 is +0.0.
template <class V> FQ_INLINE V without_negative_zero(V v) { return v + V{}; }

template <class V, class P> FQ_INLINE V clamp_nan_to_low(V v, const P& p) {
  return min_or_second(max_or_second(v, p.lo), p.hi);
}
template <class V, class P> FQ_INLINE V clamp_keep_nan(V v, const P& p) {
  return min_or_second(p.hi, max_or_second(p.lo, v));
}

// Emulates a conversion to int64 and back. x86 converts values of at least 2^63, infinities and NaN to INT64_MIN,
// which is below every range. This function returns NaN for them, which clamps to lo and compares unequal. Values
// below -2^63 clamp to lo anyway. The comparison is on integers: the bits of all values to replace compare greater
// than those of the largest float below 2^63, and all-ones is a NaN.
template <class V> FQ_INLINE V as_int64(V v) {
  using I = Vec<typename Int<int(sizeof(Elem<V>))>::type, kWidth<V>>;
  constexpr Elem<I> kLargest = sizeof(Elem<V>) == 4 ? Elem<I>(0x5EFFFFFF) : Elem<I>(0x43DFFFFFFFFFFFFF);
  return bit_cast<V>(bit_cast<I>(v) | (bit_cast<I>(v) > splat<I>(kLargest)));
}

struct TorchTensor {
  static constexpr bool kOnLevels = true;
  static constexpr bool kKeepsNan = false;
  template <class V> static FQ_INLINE V round(V x, const Params<V>& p) {
    return without_negative_zero(rint(x * p.inverse));
  }
  template <class V> static FQ_INLINE V clamp(V level, const Params<V>& p) { return clamp_nan_to_low(level, p); }
  template <class V> static FQ_INLINE V value(V level, const Params<V>& p) {
    if constexpr (sizeof(Elem<V>) == 8) {
      // Per tensor, torch multiplies in float32 even for float64 input.
      using F = Vec<float, kWidth<V>>;
      return convert<V>(convert<F>(level) * convert<F>(p.scale));
    } else {
      return level * p.scale;
    }
  }
};

struct TorchChannel : TorchTensor {
  template <class V> static FQ_INLINE V round(V x, const Params<V>& p) {
    const V level = TorchTensor::round(x, p);
    // Near 2^63, level and code are the same float32 but may be different float64 values.
    if constexpr (sizeof(Elem<V>) == 8) return p.zero + level < splat<V>(0x1p63) ? level : splat<V>(__builtin_nan(""));
    else return as_int64(level);
  }
  template <class V> static FQ_INLINE V value(V level, const Params<V>& p) { return level * p.scale; }
};

// The zero point is a float and added before rounding. The sum is rounded to float32, for float64 input too.
template <bool Fused>
struct TorchChannelFloatZero {
  static constexpr bool kOnLevels = false;
  static constexpr bool kKeepsNan = false;
  template <class V> static FQ_INLINE V round(V x, const Params<V>& p) {
    V sum;
    if constexpr (Fused) sum = fma(x, p.inverse, p.zero);
    else sum = p.zero + x * p.inverse;
    return convert<V>(as_int64(without_negative_zero(rint(convert<Vec<float, kWidth<V>>>(sum)))));
  }
  template <class V> static FQ_INLINE V clamp(V code, const Params<V>& p) { return clamp_nan_to_low(code, p); }
  template <class V> static FQ_INLINE V value(V code, const Params<V>& p) {
    return value_in_double(code, p.zero, p.scale);
  }

 private:
  // In halves if the doubles need more than a register.
  template <class V> static FQ_INLINE V value_in_double(V code, V zero, V scale) {
    using D = Vec<double, kWidth<V>>;
    if constexpr (kWidth<V> > 1 && int(sizeof(D)) > kRegisterBytes) {
      return join<V>(value_in_double(low_half(code), low_half(zero), low_half(scale)),
                     value_in_double(high_half(code), high_half(zero), high_half(scale)));
    } else {
      return convert<V>((convert<D>(code) - convert<D>(zero)) * convert<D>(scale));
    }
  }
};
using TorchChannelFloat = TorchChannelFloatZero<true>;
using TorchChannelHalf = TorchChannelFloatZero<false>;

// `limit`: how far a product with the reciprocal may be from the nearest integer, as the bits of a float; -1 if the
// reciprocal cannot be used.
template <class V> struct OnnxParams : Params<V> { Vec<int32_t, kWidth<V>> limit; };

struct Onnx {
  static constexpr bool kOnLevels = true;
  static constexpr bool kKeepsNan = true;
  template <class V> static FQ_INLINE V round(V x, const Params<V>& p) { return round_quotient(x / p.scale, p); }
  template <class V> static FQ_INLINE V round(V x, const OnnxParams<V>& p) {
    V v[] = {x};
    round_all(v, p);
    return v[0];
  }
  // Replaces x by rint(x / s), without a division if the product with the reciprocal rounds to the same integer.
  //
  // Let p = fl(x * fl(1/s)) and Q = fl(x / s). Then |p - Q| < 1.5 * 2^-23 |p|, so if p is more than 2^-21 |p| away from
  // the nearest half-integer, p and Q lie on the same side of it. `limit` has the largest |p| for which that matters:
  // one more than the highest level. Distances are not negative, so their bits can be compared as integers, and NaN
  // compares as too large. Vectors are compared together, because a branch costs as much as rounding one.
  template <class V, int K> static FQ_INLINE void round_all(V (&x)[K], const OnnxParams<V>& p) {
    using I = decltype(p.limit);
    V nearest[K];
    I distance{};
#pragma GCC unroll 16
    for (int k = 0; k < K; ++k) {
      const V product = x[k] * p.inverse;
      nearest[k] = rint(product);
      distance = larger(distance, bit_cast<I>(magnitude(product - nearest[k])));
    }
    if (__builtin_expect(any_greater(distance, p.limit), 0)) {
      for (int k = 0; k < K; ++k) nearest[k] = rint(x[k] / p.scale);
    }
#pragma GCC unroll 16
    for (int k = 0; k < K; ++k) x[k] = without_negative_zero(nearest[k]);
  }
  template <class V> static FQ_INLINE V round_quotient(V t, const Params<V>&) { return without_negative_zero(rint(t)); }
  // rint(x / s) for a bfloat16 x, possibly -0.0. With its 8 bits, the product with the reciprocal and one correction give
  // the bits of the quotient, for all mantissas (kernels_test tries them). Nothing overflows, and what is subnormal rounds
  // to 0, if `corrects` and the quotient is at most 2^60.
  template <class V> static FQ_INLINE V round_bf16(V x, const Params<V>& p) {
    const V q = x * p.inverse;
    return rint(fma(fma(-q, p.scale, x), p.inverse, q));
  }
  static FQ_INLINE bool corrects(float scale) { return scale >= 0x1p-60f && scale <= 0x1p60f; }
  // Returns the value, which is 0.0 for -0.0.
  template <class V> static FQ_INLINE V value_of_signed(V level, const Params<V>& p) { return fma(level, p.scale, V{}); }
  template <class V> static FQ_INLINE V clamp(V level, const Params<V>& p) { return clamp_keep_nan(level, p); }
  template <class V> static FQ_INLINE V value(V level, const Params<V>& p) { return level * p.scale; }
};

struct HalfAway {
  static constexpr bool kOnLevels = false;
  static constexpr bool kKeepsNan = true;
  template <class V> static FQ_INLINE V round(V x, const Params<V>& p) {
    return without_negative_zero(round_half_away(x / p.scale + p.zero));
  }
  template <class V> static FQ_INLINE V clamp(V code, const Params<V>& p) { return clamp_keep_nan(code, p); }
  template <class V> static FQ_INLINE V value(V code, const Params<V>& p) { return (code - p.zero) * p.scale; }
};

// Returns the lanes that were inside the range, which are those that clamping did not change. If the rule clamps NaN,
// equal values have equal bits, and an integer comparison spares the busier floating-point units.
template <class Rule, class V> FQ_INLINE auto inside_lanes(V clamped, V rounded) {
  if constexpr (Rule::kKeepsNan) return equal_lanes(clamped, rounded);
  else return equal_bit_lanes(clamped, rounded);
}

// Clamps the level or code and returns the code. NaN becomes 0 in half_away, qmin in all other rules on integers.
template <class Rule, class V, class P> FQ_INLINE auto to_code(V rounded, const P& p) {
  if constexpr (kIsFloatRule<Rule>) {
    return codes_of_values(Rule::clamp(rounded, p), float_format(Rule::kFormat));
  } else if constexpr (kSame<Rule, HalfAway>) {
    const V q = HalfAway::clamp(rounded, p);
    return q == q ? q : V{};
  } else if constexpr (Rule::kOnLevels) {
    return clamp_nan_to_low(rounded, p) + p.zero;
  } else {
    return clamp_nan_to_low(rounded, p);
  }
}

// --- parameters ----------------------------------------------------------------------------------

// Returns the float32 reciprocal of the float32 scale.
template <class V> FQ_INLINE V inverse_of(V scale) { return convert<V>(1.0f / convert<Vec<float, kWidth<V>>>(scale)); }

template <class V> FQ_INLINE OnnxParams<V> onnx_params(const Params<V>& p) {
  using I = decltype(OnnxParams<V>::limit);
  const V highest = max_or_second(magnitude(p.lo), magnitude(p.hi)) + 1.0f;
  const V limit = 0.5f - highest * 0x1p-21f;
  // The bound on the error does not hold if the reciprocal is subnormal or infinite.
  const V a = magnitude(p.inverse);
  const auto usable = (limit >= V{}) & (a >= splat<V>(0x1p-126f)) & (a < splat<V>(__builtin_inff()));
  return {p, usable ? bit_cast<I>(limit) : splat<I>(-1)};
}

// The parameters of the blocks of a grid.
template <class Rule, class V> class GridParams {
 public:
  explicit FQ_INLINE GridParams(const Grid& g) : g_(g) {}

  // Returns the parameters of block i in every lane.
  FQ_INLINE auto one(int64_t i) const {
    const C scale = g_.scale_f64 ? C(g_.scale_f64[i]) : C(g_.scale_f32[i]);
    const C zero = g_.zero_i32 ? C(g_.zero_i32[i]) : g_.zero_f32 ? C(g_.zero_f32[i]) : C(0);
    return make(splat<V>(scale), splat<V>(zero));
  }

  // Returns the parameters of blocks i, i + 1, ..., one per lane.
  FQ_INLINE auto per_element(int64_t i) const {
    const V scale = g_.scale_f64 ? load_as<V>(g_.scale_f64 + i) : load_as<V>(g_.scale_f32 + i);
    const V zero = g_.zero_i32 ? load_as<V>(g_.zero_i32 + i) : g_.zero_f32 ? load_as<V>(g_.zero_f32 + i) : V{};
    return make(scale, zero);
  }

 private:
  using C = Elem<V>;

  FQ_INLINE auto make(V scale, V zero) const {
    scale = quiet(scale);
    if constexpr (kIsFixedFloatRule<Rule>) {
      return FixedFloatParams<V, Rule::kFormat>{scale};
    } else if constexpr (kIsFloatRule<Rule>) {
      return float_params(g_.numerics, scale);
    } else if constexpr (kIsGgmlRule<Rule>) {
      return ggml_params(g_.numerics, scale, zero, splat<V>(C(g_.qmin)), splat<V>(C(g_.qmax)));
    } else {
      const V shift = Rule::kOnLevels ? zero : V{};
      const Params<V> p{scale, inverse_of(scale), zero, splat<V>(C(g_.qmin)) - shift, splat<V>(C(g_.qmax)) - shift};
      if constexpr (kSame<Rule, Onnx> && sizeof(C) == 4) return onnx_params(p);
      else return p;
    }
  }

  const Grid& g_;
};

// Returns the parameters of lane i in every lane of another vector type.
template <class W, class V> FQ_INLINE Params<W> lane(const Params<V>& p, int i = 0) {
  return {splat<W>(p.scale[i]), splat<W>(p.inverse[i]), splat<W>(p.zero[i]), splat<W>(p.lo[i]), splat<W>(p.hi[i])};
}
template <class W, class V> FQ_INLINE OnnxParams<W> lane(const OnnxParams<V>& p, int i = 0) {
  return {lane<W>(static_cast<const Params<V>&>(p), i), splat<Vec<int32_t, kWidth<W>>>(p.limit[i])};
}

// Rounds several vectors in place.
template <class Rule, class V, int K, class P> FQ_INLINE void round_all(V (&v)[K], const P& p) {
  if constexpr (requires { Rule::round_all(v, p); }) Rule::round_all(v, p);
  else {
#pragma GCC unroll 16
    for (int k = 0; k < K; ++k) v[k] = Rule::round(v[k], p);
  }
}

// Calls f with an instance of the rule, so that the choice is made once per array and not per element.
template <class F> FQ_INLINE void with_rule(Numerics numerics, F&& f) {
  switch (numerics) {
    case Numerics::torch_tensor: return f(TorchTensor{});
    case Numerics::torch_channel: return f(TorchChannel{});
    case Numerics::torch_channel_float: return f(TorchChannelFloat{});
    case Numerics::torch_channel_half: return f(TorchChannelHalf{});
    case Numerics::onnx: return f(Onnx{});
    case Numerics::half_away: return f(HalfAway{});
    case Numerics::e4m3fn: return f(FixedFloatRule<Numerics::e4m3fn>{});
    case Numerics::e5m2: return f(FixedFloatRule<Numerics::e5m2>{});
    case Numerics::e4m3fnuz: return f(FixedFloatRule<Numerics::e4m3fnuz>{});
    case Numerics::e5m2fnuz: return f(FixedFloatRule<Numerics::e5m2fnuz>{});
    case Numerics::e2m3: return f(FixedFloatRule<Numerics::e2m3>{});
    case Numerics::e3m2: return f(FixedFloatRule<Numerics::e3m2>{});
    case Numerics::e2m1: return f(FixedFloatRule<Numerics::e2m1>{});
    case Numerics::q4_0: return f(GgmlRule<Numerics::q4_0>{});
    case Numerics::q4_1: return f(GgmlRule<Numerics::q4_1>{});
    case Numerics::q8_0: case Numerics::tq2_0: return f(GgmlRule<Numerics::q8_0>{});
    case Numerics::q8_0_input: case Numerics::q8_k_input: return f(GgmlRule<Numerics::q8_0_input>{});
    case Numerics::q4_k: case Numerics::q6_k: return f(GgmlRule<Numerics::q4_k>{});
  }
}

template <class T> struct TypeTag { using type = T; };

// Calls f with a TypeTag of the element type.
template <class F> FQ_INLINE void with_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f32: return f(TypeTag<float>{});
    case DType::f64: return f(TypeTag<double>{});
    case DType::bf16: return f(TypeTag<bf16>{});
    case DType::f16: return f(TypeTag<f16>{});
  }
}

}  // namespace fakequant::FQ_TARGET
