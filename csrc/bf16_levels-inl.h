// Integer codes in bfloat16, clamped before they are rounded.
//
// Rounding is monotonic, so the numbers with a code in the range are those from one bfloat16 to another. Numbers are
// clamped to these as integers, two in a word, which takes half as many instructions as clamping levels, and those that
// do not change are inside the range.
#pragma once

#include "numerics-inl.h"

namespace fakequant::FQ_TARGET {

// Whether a value of a grid may be halfway between two bfloat16 numbers.
template <class V> FQ_INLINE bool may_have_ties(const Params<V>& p) {
  constexpr int N = kWidth<V>;
  const float lo = p.lo[0], hi = p.hi[0];
  if (!(hi - lo <= 256)) return true;
  V level = splat<V>(lo);
  for (int i = 0; i < N; ++i) level[i] += float(i);
  Bits<V> found{};
  for (float first = lo; first <= hi; first += float(N), level += float(N)) {
    found |= bit_cast<Bits<V>>(is_bf16_tie(level * p.scale));
  }
  return any_bit(found);
}

// The number nearest to a tie. Of all others it is clear on which side of the tie they are.
template <class V> FQ_INLINE V number_at_tie(V tie, const Params<V>& p) {
  return bit_cast<V>(rounded_to_bf16_without_ties<kWidth<V>>(tie * p.scale) & 0xFFFF0000u);
}

// The numbers inside the range of the grid of each lane, as bits in both halves of a word: at most `high` as signed
// integers, and at most `low`, which is negative, as unsigned ones.
template <class V> struct Bf16Range {
  Bits<V> high, low;
  bool usable;  // whether these numbers round to the ends of the grids
};

template <class V> FQ_INLINE Bf16Range<V> bf16_range(const Params<V>& p) {
  using I = Vec<int32_t, kWidth<V>>;
  const auto level_of = [&](I bits) FQ_INLINE_LAMBDA { return Onnx::round_bf16(bit_cast<V>(bits << 16), p); };
  const auto usable = [&](V level, I bits) FQ_INLINE_LAMBDA {
    return (level >= 0.0f) & (level <= 256.0f) & (level_of(bits) == level);
  };
  // The largest number that rounds to at most `level`.
  const auto last = [&](V level) FQ_INLINE_LAMBDA {
    const I bits = bit_cast<I>(number_at_tie(level + 0.5f, p)) >> 16;
    return bits + (level_of(bits) > level);  // a comparison returns -1 or 0
  };
  const I high = last(p.hi), low = last(-p.lo);
  const auto all = usable(p.hi, high) & usable(-p.lo, low) & (p.scale >= 0x1p-60f) & (p.scale <= 0x1p60f);
  const I sign = low | 0x8000;
  return {bit_cast<Bits<V>>(high | high << 16), bit_cast<Bits<V>>(sign | sign << 16), !any_lane(I(~all))};
}

// Whether products with the reciprocal round to the same levels as quotients.
template <class V> FQ_INLINE bool reciprocal_suffices(const Params<V>& p) {
  constexpr int N = kWidth<V>;
  const float end = larger(p.hi[0], -p.lo[0]);
  V tie = splat<V>(0.5f);
  for (int i = 0; i < N; ++i) tie[i] += float(i);
  Bits<V> found{};
  for (float first = 0; first <= end; first += float(N), tie += float(N)) {
    const V x = number_at_tie(tie, p);
    found |= bit_cast<Bits<V>>(rint(x * p.inverse) != Onnx::round_bf16(x, p));
  }
  return !any_bit(found);
}

// Fake-quantizes 32 numbers, of which none is NaN. Returns the bits of the mask.
template <bool ByReciprocal, bool HasTies, class V, class P>
FQ_INLINE uint32_t clamped_step(const bf16* x, bf16* y, uint32_t high, uint32_t low, const P& p) {
  constexpr int N = kWidth<V>, M = 2 * N;
  using I = Vec<int16_t, M>;
  using U = Vec<uint16_t, M>;
  decltype(equal_bit_lanes(U{}, U{})) inside[32 / M];
  const auto value = [&](Bits<V> word) FQ_INLINE_LAMBDA {
    const V v = bit_cast<V>(word);
    return Onnx::value_of_signed(ByReciprocal ? rint(v * p.inverse) : Onnx::round_bf16(v, p), p);
  };
#pragma GCC unroll 4
  for (int i = 0; i < 32; i += M) {
    const I from = load_raw<I>(x + i);
    const U at_most = bit_cast<U>(smaller(from, bit_cast<I>(splat<Bits<V>>(high))));
    const U clamped = smaller(at_most, bit_cast<U>(splat<Bits<V>>(low)));
    const auto words = bit_cast<Bits<V>>(clamped);
    store_pair<bf16, N, HasTies>(y + i, value(words << 16), value(words & 0xFFFF0000u));
    inside[i / M] = equal_bit_lanes(bit_cast<U>(from), clamped);
  }
  return word_bits_of_32<M>(inside);
}

// Whether one of n numbers is NaN, in whole vectors.
FQ_INLINE bool any_nan(const bf16* x, int64_t n) {
  using I = Vec<int16_t, 2 * kLanes>;
  I largest{};
  for (int64_t i = 0; i < n; i += 2 * kLanes) largest = larger(largest, I(load_raw<I>(x + i) & 0x7FFF));
  return any_greater(largest, splat<I>(0x7F80));
}

}  // namespace fakequant::FQ_TARGET
