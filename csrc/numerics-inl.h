// The rules by which an element becomes a code, one struct per numerics.
//
//   code    what the rule computes, before clamping; an integer held in a float
//   clamp   into [lo, hi]; the order of operands decides what happens to NaN
//   value   (code - zero) * scale, in the precision the rule prescribes
//
// All of them work on vectors of any width V of float or double. They are exact while the range and
// the zero points are exactly representable in V's element; `wide.cc` computes the rest.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace fakequant::FQ_TARGET {

template <class V>
struct Params {
  V scale, inverse, zero;  // `inverse` is the float32 reciprocal of the float32 scale
};

template <class V>
struct Range {
  V lo, hi;
  bool nan_is_code_zero;
};

// Codes at or above 2^63 do not fit int64, and x86 turns them, infinities and NaN into INT64_MIN.
// -inf stands for that: it clamps to lo and is out of every range. Very negative codes clamp to lo
// by themselves. `code < limit` is false for NaN.
template <class V> FQ_INLINE V as_int64(V code) {
  return code < splat<V>(Elem<V>(9223372036854775808.0)) ? code : splat<V>(-Elem<V>(__builtin_inf()));
}

template <class V> FQ_INLINE V clamp_nan_to_low(V code, const Range<V>& r) {
  return min_or_second(max_or_second(code, r.lo), r.hi);
}
template <class V> FQ_INLINE V clamp_keep_nan(V code, const Range<V>& r) {
  return min_or_second(r.hi, max_or_second(r.lo, code));
}

// The product in float64, then rounded: where torch computes in double.
template <class V> FQ_INLINE V scaled_in_double(V code, V zero, V scale) {
  using D = Vec<double, kWidth<V>>;
  return convert<V>((convert<D>(code) - convert<D>(zero)) * convert<D>(scale));
}

struct TorchTensor {
  template <class V> static FQ_INLINE V code(V x, const Params<V>& p) { return p.zero + rint(x * p.inverse); }
  template <class V> static FQ_INLINE V clamp(V code, const Range<V>& r) { return clamp_nan_to_low(code, r); }
  template <class V> static FQ_INLINE V clamp_to_code(V code, const Range<V>& r) { return clamp_nan_to_low(code, r); }
  template <class V> static FQ_INLINE V value(V q, V, const Params<V>& p, const Range<V>&) {
    if constexpr (sizeof(Elem<V>) == 8) {
      // Per tensor, torch multiplies in float32 even for float64 input.
      using F = Vec<float, kWidth<V>>;
      return convert<V>(convert<F>(q - p.zero) * convert<F>(p.scale));
    } else {
      return (q - p.zero) * p.scale;
    }
  }
};

struct TorchChannel : TorchTensor {
  template <class V> static FQ_INLINE V code(V x, const Params<V>& p) { return as_int64(p.zero + rint(x * p.inverse)); }
  template <class V> static FQ_INLINE V value(V q, V, const Params<V>& p, const Range<V>&) { return (q - p.zero) * p.scale; }
};

// A float zero point is added before rounding. The sum is rounded to float32 also for float64 input.
template <bool Fused>
struct TorchChannelFloatZero : TorchTensor {
  template <class V> static FQ_INLINE V code(V x, const Params<V>& p) {
    V sum;
    if constexpr (Fused) sum = fma(x, p.inverse, p.zero);
    else sum = p.zero + x * p.inverse;
    using F = Vec<float, kWidth<V>>;
    return convert<V>(as_int64(rint(convert<F>(sum))));
  }
  template <class V> static FQ_INLINE V value(V q, V, const Params<V>& p, const Range<V>&) {
    return scaled_in_double(q, p.zero, p.scale);
  }
};
using TorchChannelFloat = TorchChannelFloatZero<true>;
using TorchChannelHalf = TorchChannelFloatZero<false>;

struct Onnx {
  // rint(x / s), without the division wherever the product with the reciprocal must round to the
  // same integer. With p = fl(x * fl(1/s)) and Q = fl(x / s), |p - Q| < 1.5 * 2^-23 |p|; so if p is
  // further than 2^-21 |p| from the nearest half-integer, both lie on the same side of it. The test
  // is false for NaN and infinities too, which then take the division. A reciprocal that is
  // subnormal or infinite has lost that accuracy; `inverse` is NaN then (see `make_params`).
  template <class V> static FQ_INLINE V quotient_code(V x, const Params<V>& p) {
    if constexpr (sizeof(Elem<V>) == 8) {
      return rint(x / p.scale);
    } else {
      const V product = x * p.inverse;
      const V nearest = rint(product);
      const auto safe = magnitude(product - nearest) + magnitude(product) * 0x1p-21f < splat<V>(0.5f);
      if (__builtin_expect(!any_lane(~safe), 1)) return nearest;
      return rint(x / p.scale);
    }
  }
  template <class V> static FQ_INLINE V code(V x, const Params<V>& p) { return quotient_code(x, p) + p.zero; }
  template <class V> static FQ_INLINE V clamp(V code, const Range<V>& r) { return clamp_keep_nan(code, r); }
  template <class V> static FQ_INLINE V clamp_to_code(V code, const Range<V>& r) { return clamp_nan_to_low(code, r); }
  template <class V> static FQ_INLINE V value(V q, V, const Params<V>& p, const Range<V>&) { return (q - p.zero) * p.scale; }
};

struct HalfAway {
  template <class V> static FQ_INLINE V code(V x, const Params<V>& p) { return round_half_away(x / p.scale + p.zero); }
  template <class V> static FQ_INLINE V clamp(V code, const Range<V>& r) {
    const V q = clamp_keep_nan(code, r);
    return r.nan_is_code_zero ? zero_where_nan(q) : q;
  }
  template <class V> static FQ_INLINE V clamp_to_code(V code, const Range<V>& r) { return zero_where_nan(clamp_keep_nan(code, r)); }
  template <class V> static FQ_INLINE V value(V q, V, const Params<V>& p, const Range<V>&) { return (q - p.zero) * p.scale; }

 private:
  template <class V> static FQ_INLINE V zero_where_nan(V q) { return q == q ? q : V{}; }
};

// --- parameters ----------------------------------------------------------------------------------

template <class Rule, class V> FQ_INLINE V inverse_of(V scale) {
  using F = Vec<float, kWidth<V>>;
  const F inverse = 1.0f / convert<F>(scale);
  if constexpr (kSame<Rule, Onnx> && sizeof(Elem<V>) == 4) {
    // NaN sends every element to the exact division, see Onnx::quotient_code.
    const F a = magnitude(inverse);
    const auto usable = (a >= splat<F>(0x1p-126f)) & (a < splat<F>(__builtin_inff()));
    return usable ? inverse : splat<F>(__builtin_nanf(""));
  } else {
    return convert<V>(inverse);
  }
}

template <class Rule, class V> FQ_INLINE Params<V> one_param(const Grid& g, int64_t i) {
  using C = Elem<V>;
  const V scale = quiet(splat<V>(g.scale_f64 ? C(g.scale_f64[i]) : C(g.scale_f32[i])));
  const V zero = splat<V>(g.zero_i32 ? C(g.zero_i32[i]) : g.zero_f32 ? C(g.zero_f32[i]) : C(0));
  return {scale, inverse_of<Rule>(scale), zero};
}

template <class Rule, class V> FQ_INLINE Params<V> params_per_element(const Grid& g, int64_t i) {
  const V scale = quiet(g.scale_f64 ? load_as<V>(g.scale_f64 + i) : load_as<V>(g.scale_f32 + i));
  const V zero = g.zero_i32 ? load_as<V>(g.zero_i32 + i) : g.zero_f32 ? load_as<V>(g.zero_f32 + i) : V{};
  return {scale, inverse_of<Rule>(scale), zero};
}

template <class V> FQ_INLINE Range<V> make_range(const Grid& g) {
  return {splat<V>(Elem<V>(g.qmin)), splat<V>(Elem<V>(g.qmax)), g.nan_is_code_zero};
}

// Calls f with the rule as a type: one indirect decision per array, none per element.
template <class F> FQ_INLINE void with_rule(Numerics numerics, F&& f) {
  switch (numerics) {
    case Numerics::torch_tensor: return f(TorchTensor{});
    case Numerics::torch_channel: return f(TorchChannel{});
    case Numerics::torch_channel_float: return f(TorchChannelFloat{});
    case Numerics::torch_channel_half: return f(TorchChannelHalf{});
    case Numerics::onnx: return f(Onnx{});
    case Numerics::half_away: return f(HalfAway{});
  }
}

template <class T> struct TypeTag { using type = T; };

template <class F> FQ_INLINE void with_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f32: return f(TypeTag<float>{});
    case DType::f64: return f(TypeTag<double>{});
    case DType::bf16: return f(TypeTag<bf16>{});
    case DType::f16: return f(TypeTag<f16>{});
  }
}

}  // namespace fakequant::FQ_TARGET
