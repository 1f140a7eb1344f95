// Scales of few bits from the largest magnitudes of blocks: powers of two, and e4m3fn values.
//
// Magnitudes are never negative or NaN, so they are compared as integers.
#include "numerics-inl.h"
#include "targets.h"

namespace fakequant::FQ_TARGET {
namespace {

template <class V> using Words = Vec<int32_t, kWidth<V>>;

// Returns v, at least `low` and at most `high`.
template <class V> FQ_INLINE V between(V v, float low, float high) {
  const auto at_least = larger(bit_cast<Words<V>>(v), bit_cast<Words<V>>(splat<V>(low)));
  const auto most = bit_cast<Words<V>>(splat<V>(high));
  return bit_cast<V>(at_least < most ? at_least : most);
}

template <class V> FQ_INLINE V power_scale(V absmax, const BlockScaleArgs& a) {
  using I = Words<V>;
  const bool rceil = a.rule == ScaleRule::rceil;
  I bits = bit_cast<I>(rceil ? absmax / a.largest : absmax);
  if (a.rule == ScaleRule::even) bits += (1 << 22) >> a.mantissa_bits;
  if (a.rule == ScaleRule::even_e2m1) bits += 1 << 21;
  I field = bits >> 23;
  if (a.rule == ScaleRule::ceil || rceil) field -= bit_cast<I>((bits & 0x7FFFFF) != 0);
  if (!rceil) field -= a.exponent;
  field = field < 254 ? field : splat<I>(254);
  return bit_cast<V>(field > 0 ? field << 23 : splat<I>(1 << 22));  // 2^(field - 127), which may be subnormal
}

// Rounds a value between the smallest normal and the largest value of e4m3fn; see formats-inl.h.
template <class V> FQ_INLINE V round_e4m3fn(V v) {
  const V c = bit_cast<V>(bit_cast<Words<V>>(v) & 0x7F800000) * 0x1p20f;
  return (v + c) - c;
}

template <class V> FQ_INLINE V e4m3fn_scale(V absmax, const BlockScaleArgs& a) {
  const V value = round_e4m3fn(between((absmax / 6.0f) / a.under, 0x1p-6f, 448.0f));
  return between(value * a.under, 0x1p-149f, __FLT_MAX__);  // a product of tiny numbers may be 0
}

// The tensor's scale is a divisor, and values may be subnormal.
template <class V> FQ_INLINE V e4m3fn_divided_scale(V absmax, const BlockScaleArgs& a) {
  const V v = between((absmax / 6.0f) * a.under, 0.0f, 448.0f);
  const V value = v < 0x1p-6f ? (v + 0x1p14f) - 0x1p14f : round_e4m3fn(v);
  return (value == 0.0f ? splat<V>(0.125f) : value) / a.under;
}

template <class F> FQ_INLINE void for_each_scale(const BlockScaleArgs& a, F&& scale_of) {
  constexpr int N = kLanes;
  int64_t i = 0;
  for (; i + N <= a.n; i += N) store_raw(a.scale + i, scale_of(load_raw<Vec<float, N>>(a.absmax + i)));
  for (; i < a.n; ++i) store_raw(a.scale + i, scale_of(load_raw<Vec<float, 1>>(a.absmax + i)));
}

}  // namespace

void block_scales(const BlockScaleArgs& a) {
  switch (a.rule) {
    case ScaleRule::e4m3fn: return for_each_scale(a, [&](auto v) FQ_INLINE_LAMBDA { return e4m3fn_scale(v, a); });
    case ScaleRule::e4m3fn_divided:
      return for_each_scale(a, [&](auto v) FQ_INLINE_LAMBDA { return e4m3fn_divided_scale(v, a); });
    default: return for_each_scale(a, [&](auto v) FQ_INLINE_LAMBDA { return power_scale(v, a); });
  }
}

float mirrored(const float* absmax, int64_t n, float* lowest) {
  constexpr int N = kLanes;
  using V = Vec<float, N>;
  auto largest = Words<V>{};
  int64_t i = 0;
  for (; i + N <= n; i += N) {
    const V v = load_raw<V>(absmax + i);
    store_raw(lowest + i, without_negative_zero(-v));
    largest = larger(largest, bit_cast<Words<V>>(v));
  }
  int32_t most = 0;
  for (int k = 0; k < N; ++k) most = larger(most, int32_t(largest[k]));
  for (; i < n; ++i) {
    lowest[i] = -absmax[i] + 0.0f;
    most = larger(most, bit_cast<int32_t>(absmax[i]));
  }
  return bit_cast<float>(most);
}

}  // namespace fakequant::FQ_TARGET
