// Blocks of e2m1 values in bfloat16, by comparisons of integers.
//
// Rounding is monotonic and e2m1 has eight magnitudes, so for one scale s there are seven bfloat16 numbers t_i such that
//
//   rounded(|x| / s) >= level_i   if and only if   bits(|x|) > bits(t_i)
//
// and eight results, level_i * s in bfloat16. From level 2 on, both repeat in every binade: levels 2, 4 and 6 are
// s, 2 s and 4 s, and levels 3, 5 and 7 are 1.5 times as much. So a few words for each block are enough, which are
// computed for several blocks at once.
//
// The bits are those of FloatRule. It rounds the quotient to float32 and then to e2m1, both half to even. Let T be the
// tie below level i, and h half of the distance from T to the float32 next to it. T has few bits, so a quotient halfway
// between the two becomes T. If i is odd, the tie goes down, and level i is reached if |x| > c = s * (T + h). If i is
// even, it goes up, and level i is reached if |x| >= c = s * (T - h). Let r be c rounded to float32, which one fma
// computes, since h is a power of two. The sign of c - r is known from a second fma, since s * T - r has few bits. No
// float32 is between c and r, so bits(t_i) = bits(r) >> 16, or (bits(r) - 1) >> 16 if c < r. (If i is even, c has more
// bits than a float32, and c = r does not happen. For level 1, where T = 1/4, no float32 is between s * T and c.)
//
// All of this holds if no product is subnormal or infinite, for which `usable` asks.
#pragma once

#include "simd.h"

namespace fakequant::FQ_TARGET {

// Returns a - b, or 0 if that is negative.
template <class U> FQ_INLINE U minus_or_zero(U a, U b) {
#if defined(__AVX512F__)
  if constexpr (sizeof(U) == 64) return bit_cast<U>(_mm512_subs_epu16(bit_cast<__m512i>(a), bit_cast<__m512i>(b)));
#endif
#if defined(__AVX2__)
  if constexpr (sizeof(U) == 32) return bit_cast<U>(_mm256_subs_epu16(bit_cast<__m256i>(a), bit_cast<__m256i>(b)));
#endif
  return larger(a, b) - b;
}

// Keeps GCC from loading a value for each use: a vector of 64 bytes is usually in two cache lines.
template <class U> FQ_INLINE U in_register(U v) {
#if defined(__AVX512F__)
  if constexpr (sizeof(U) == 64) asm("" : "+v"(v));
#endif
  return v;
}

// Comparisons of words below 2^15, and what is done with their results.
template <class U> FQ_INLINE auto above(U a, U b) {
#if defined(__AVX512F__)
  if constexpr (sizeof(U) == 64) return uint32_t(_mm512_cmpgt_epi16_mask(bit_cast<__m512i>(a), bit_cast<__m512i>(b)));
  else
#endif
  return bit_cast<U>(bit_cast<Vec<int16_t, kWidth<U>>>(a) > bit_cast<Vec<int16_t, kWidth<U>>>(b));
}
template <class U> FQ_INLINE U plus_where(U lanes, U v, U w) { return v + (w & lanes); }
template <class U> FQ_INLINE U value_where(U lanes, U v) { return v & lanes; }
template <class U> FQ_INLINE U ones_where(U lanes, U v) { return v | lanes; }
#if defined(__AVX512F__)
template <class U> FQ_INLINE U plus_where(uint32_t lanes, U v, U w) {
  return bit_cast<U>(_mm512_mask_add_epi16(bit_cast<__m512i>(v), lanes, bit_cast<__m512i>(v), bit_cast<__m512i>(w)));
}
template <class U> FQ_INLINE U value_where(uint32_t lanes, U v) {
  return bit_cast<U>(_mm512_maskz_mov_epi16(lanes, bit_cast<__m512i>(v)));
}
template <class U> FQ_INLINE U ones_where(uint32_t lanes, U v) {
  return bit_cast<U>(_mm512_mask_mov_epi16(bit_cast<__m512i>(v), lanes, bit_cast<__m512i>(splat<U>(0xFFFF))));
}
#endif

// Returns the bytes of a table at each byte of an index below 16.
template <class U> FQ_INLINE U bytes_at(const uint8_t (&table)[16], U index) {
  const auto entries = load_raw<Vec<uint8_t, 16>>(table);
#if defined(__AVX512F__)
  if constexpr (sizeof(U) == 64) {
    return bit_cast<U>(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(bit_cast<__m128i>(entries)), bit_cast<__m512i>(index)));
  }
#endif
#if defined(__AVX2__)
  if constexpr (sizeof(U) == 32) {
    return bit_cast<U>(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(bit_cast<__m128i>(entries)), bit_cast<__m256i>(index)));
  }
#endif
#if defined(__aarch64__)
  if constexpr (sizeof(U) == 16) return bit_cast<U>(vqtbl1q_u8(bit_cast<uint8x16_t>(entries), bit_cast<uint8x16_t>(index)));
#endif
  auto bytes = bit_cast<Vec<uint8_t, int(sizeof(U))>>(index);
  for (int i = 0; i < int(sizeof(U)); ++i) bytes[i] = entries[bytes[i]];
  return bit_cast<U>(bytes);
}

// Returns word `first`, or for 32 elements of two blocks, that word and the next one.
template <class U>
FQ_INLINE U words_at(const uint32_t (&word)[kLanes], unsigned first, [[maybe_unused]] bool several) {
#if defined(__AVX512F__)
  if constexpr (sizeof(U) == 64) {
    if (several) {
      const __m512i block = _mm512_add_epi32(_mm512_set1_epi32(int(first)), _mm512_maskz_set1_epi32(0xFF00, 1));
      return bit_cast<U>(_mm512_permutexvar_epi32(block, _mm512_loadu_si512(word)));
    }
  }
#endif
  return bit_cast<U>(splat<Vec<uint32_t, kWidth<U> / 2>>(word[first]));
}

// Blocks whose scales are the lanes of a vector.
class E2m1Blocks {
 public:
  static constexpr int N = kLanes;
  using F = Vec<float, N>;
  using W = Vec<uint32_t, N>;

  // Whether this class is exact for these scales.
  static FQ_INLINE bool usable(F scale) {
    using I = Vec<int32_t, N>;
    const I bits = bit_cast<I>(scale);
    return !any_lane((bits < splat<I>(27 << 23)) | (bits > splat<I>(227 << 23)));
  }

  FQ_INLINE void set(F s) {
    const F h = s * 0x1p-24f;
    const W third = threshold<true>(s, 1.25f, h), fourth = threshold<false>(s, 1.75f, h);
    store_raw(first_, upper_halves(bit_cast<W>(s)) - 2 * kBinade);
    store_raw(second_, threshold<false>(s, 1.5f, h) - kBinade);
    store_raw(below_third_, third - (kBinade - kOne));
    store_raw(below_fourth_, fourth - (kBinade - kOne));
    store_raw(enough_, third + (2 * kBinade + kOne));
    store_raw(highest_, fourth + 2 * kBinade);
    const W one = upper_halves(rounded_to_bf16<N>(s));
    store_raw(half_, one - kBinade);
    store_raw(odd_, upper_halves(rounded_to_bf16<N>(1.5f * s)) - one);
  }

  // Quantizes M elements of block `first`, or of several blocks from there on, if they have 16 elements and M is more.
  // Returns the lanes that were inside the range, if they are wanted.
  template <bool WithInside, int M> FQ_INLINE auto quantize(const bf16* x, bf16* y, unsigned first, bool several) const {
    using U = Vec<uint16_t, M>;
    const auto at = [&](const uint32_t (&word)[N]) FQ_INLINE_LAMBDA { return words_at<U>(word, first, several); };
    const U bits = in_register(load_raw<U>(x)), sign = splat<U>(0x8000), binade = splat<U>(0x0080), a = bits & ~sign;
    const U limited = smaller(a, at(enough_));
    // How many of the thresholds 3, 5 and 7 are exceeded, and how many of 4 and 6, times a binade.
    const U odd = minus_or_zero(limited, at(below_third_)) & U(-binade);
    const U even = minus_or_zero(limited, at(below_fourth_)) & U(-binade);
    U value = even + at(half_);
    value = plus_where(above(odd, even), value, at(odd_));
    value = plus_where(above(a, at(second_)), value, binade);
    value = value_where(above(a, at(first_)), value) | (bits & sign);
    store_raw(y, ones_where(above(a, splat<U>(0x7F80)), value));  // all ones is a NaN
    if constexpr (WithInside) return above(at(highest_) + U(splat<U>(1)), a);
    else return 0;
  }

 private:
  // In both halves of a word.
  static constexpr uint32_t kBinade = 0x00800080u, kOne = 0x00010001u;

  // Copies the upper halves to the lower ones.
  static FQ_INLINE W upper_halves(W v) { return FQ_TARGET::upper_halves(v, v); }

  template <bool Odd> static FQ_INLINE W threshold(F s, float tie, F h) {
    const F offset = Odd ? h : -h, t = splat<F>(tie);
    const F r = fma(s, t, offset);
    const auto is_above = fma(s, t, -r) < -offset;  // r > c, as -1
    return upper_halves(bit_cast<W>(r) + bit_cast<W>(is_above));
  }

  uint32_t first_[N], second_[N], below_third_[N], below_fourth_[N], enough_[N], highest_[N];
  uint32_t half_[N], odd_[N];  // level 1; level 3 - level 2
};

// The same for scales s that are powers of two, as in MX. Counted in bfloat16 numbers, all thresholds and results have
// the same distance to s / 4 in every block.
class E2m1Powers {
 public:
  static constexpr int N = kLanes;
  using F = Vec<float, N>;

  static FQ_INLINE bool usable(F scale) {
    return E2m1Blocks::usable(scale) && !any_bit(bit_cast<Bits<F>>(scale) & 0x7FFFFFu);
  }

  FQ_INLINE void set(F s) {
    const auto words = bit_cast<Bits<F>>(s * 0.25f);
    store_raw(quarter_, words | words >> 16);
  }

  template <bool WithInside, int M> FQ_INLINE auto quantize(const bf16* x, bf16* y, unsigned first, bool several) const {
    using U = Vec<uint16_t, M>;
    const U bits = in_register(load_raw<U>(x)), sign = splat<U>(0x8000), a = bits & ~sign;
    const U quarter = words_at<U>(quarter_, first, several), above_quarter = minus_or_zero(a, quarter);
    const U limited = smaller(above_quarter, splat<U>(0x0240));  // 6 s
    const U level = (limited + bytes_at(kAddend, U(limited >> 6))) & 0x03C0;
    const U value = value_where(above(above_quarter, U{}), level + quarter) | (bits & sign);
    store_raw(y, ones_where(above(a, splat<U>(0x7F80)), value));  // all ones is a NaN
    if constexpr (WithInside) return above(splat<U>(0x0260), above_quarter);
    else return 0;
  }

 private:
  // For each half of a binade, what is added before the lowest six bits are cut off: below 3/4 s for the result s / 2,
  // from there to s for s, and above for the nearest half of a binade, ties to even. The first is also in the upper bytes
  // of words, where it is cut off.
  static constexpr uint8_t kAddend[16] = {128, 64, 0, 64, 31, 32, 31, 32, 31};
  uint32_t quarter_[N];
};

}  // namespace fakequant::FQ_TARGET
