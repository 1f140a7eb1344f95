// The largest finite magnitude of every block, with or without its sign, or its range.
//
// Magnitudes are compared as integers: the bits of floats without their sign are in the order of the values, and those
// of NaN and infinities are above all others. So one comparison tells whether a block has such values; only then it is
// read again, one value at a time. Rows are compared as they are stored: 16-bit floats are not widened.
#include "numerics-inl.h"
#include "targets.h"

namespace fakequant::FQ_TARGET {
namespace {

template <class V> using Ints = Vec<typename Int<int(sizeof(Elem<V>))>::type, kWidth<V>>;
template <class C> using IntOf = typename Int<int(sizeof(C))>::type;

template <class V> FQ_INLINE Ints<V> magnitude_bits(V v) { return bit_cast<Ints<V>>(magnitude(v)); }

template <class C> FQ_INLINE IntOf<C> bits_of_infinity() { return bit_cast<IntOf<C>>(C(__builtin_inf())); }

// Returns a value as float32, at most its largest one.
template <class C> FQ_INLINE float as_float(C value) {
  if constexpr (sizeof(C) == 4) return value;
  const C limit = C(__FLT_MAX__);
  return float(value < -limit ? -limit : value > limit ? limit : value);
}

// Ignores values that are not finite and adds their number to `nonfinite`.
template <class T> Compute<T> careful_magnitude(const T* x, int64_t n, int64_t stride, int64_t& nonfinite) {
  using C = Compute<T>;
  IntOf<C> largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const IntOf<C> bits = magnitude_bits(load<1>(x + i * stride))[0];
    if (bits >= bits_of_infinity<C>()) ++nonfinite;
    else largest = larger(largest, bits);
  }
  return bit_cast<C>(largest);
}

template <class T> bool first_is_negative(const T* x, int64_t n, int64_t stride, Compute<T> magnitude) {
  for (int64_t i = 0; i < n; ++i) {
    const Compute<T> v = load<1>(x + i * stride)[0];
    if (v == magnitude || v == -magnitude) return v < 0;
  }
  return false;
}

// The same, with the sign of the first value of that magnitude if `WithSign`.
template <bool WithSign, class T> float careful_largest(const T* x, int64_t n, int64_t stride, int64_t& nonfinite) {
  const auto found = careful_magnitude(x, n, stride, nonfinite);
  return as_float(WithSign && first_is_negative(x, n, stride, found) ? -found : found);
}

// The bits of an element as they are in memory.
template <class T> using Stored = typename UInt<int(sizeof(T))>::type;

template <class T> FQ_INLINE Compute<T> value_of_bits(Stored<T> bits) {
  const T value = bit_cast<T>(bits);
  return load<1>(&value)[0];
}

// Returns integers that sort like magnitudes. With the sign in the lowest bit, a negative value comes after a positive
// one of the same magnitude.
template <bool WithSign, class U> FQ_INLINE U keys(U bits) {
  if constexpr (WithSign) return (bits << 1) | (bits >> (8 * int(sizeof(Elem<U>)) - 1));
  else return bits + bits;
}

template <class U> FQ_INLINE Elem<U> largest_key(U v) {
#if defined(__SSE4_1__)
  if constexpr (kSame<U, Vec<uint16_t, 8>>) {
    return Elem<U>(~_mm_extract_epi16(_mm_minpos_epu16(bit_cast<__m128i>(~v)), 0));
  }
#endif
  if constexpr (sizeof(U) == 16 && kWidth<U> == 4) {
    v = larger(v, __builtin_shufflevector(v, v, 2, 3, 0, 1));
    return larger(v, __builtin_shufflevector(v, v, 1, 0, 3, 2))[0];
  } else if constexpr (kWidth<U> == 1) {
    return v[0];
  } else {
    return largest_key(larger(low_half(v), high_half(v)));
  }
}

// The same as careful_largest for a row of at least N elements.
template <bool WithSign, int N, class T> FQ_INLINE float row_largest(const T* x, int64_t n, int64_t& nonfinite) {
  using U = Vec<Stored<T>, N>;
  const auto at = [&](int64_t i) FQ_INLINE_LAMBDA {  // the last vector may overlap the one before
    return keys<WithSign>(load_raw<U>(x + (i + N <= n ? i : n - N)));
  };
  U largest{};
  for (int64_t i = 0; i < n; i += N) largest = larger(largest, at(i));
  Stored<T> key = largest_key(largest);
  const auto magnitude = value_of_bits<T>(key >> 1);
  if (__builtin_expect(!(magnitude < Compute<T>(__builtin_inf())), 0)) {
    return careful_largest<WithSign>(x, n, 1, nonfinite);
  }
  if constexpr (!WithSign) return as_float(magnitude);
  // No branch depends on the sign: it would be mispredicted half of the time. Only a negative value has a positive one
  // of the same magnitude beside it, whose key is one less.
  U found{};
  for (int64_t i = 0; i < n; i += N) found |= bit_cast<U>(at(i) == splat<U>(key ^ 1));
  if (__builtin_expect(any_bit(found), 0)) key ^= !first_is_negative(x, n, 1, magnitude);
  return as_float(value_of_bits<T>(key >> 1 | key << (8 * sizeof(T) - 1)));
}

template <bool WithSign, class T> FQ_INLINE float largest_of_row(const T* x, int64_t n, int64_t& nonfinite) {
  constexpr int N = kRegisterBytes / int(sizeof(T));
  if (n >= N) return row_largest<WithSign, N>(x, n, nonfinite);
  if (n >= N / 2) return row_largest<WithSign, N / 2>(x, n, nonfinite);
  return careful_largest<WithSign>(x, n, 1, nonfinite);
}

// --- rows of 16-bit floats ------------------------------------------------------------------------

template <class W> FQ_INLINE W larger_halves(W a, W b) {
  using I = Vec<int16_t, 2 * kWidth<W>>;  // magnitudes are positive
  return bit_cast<W>(larger(bit_cast<I>(a), bit_cast<I>(b)));
}

// Each word of a and of b holds two numbers of 16 bits. Returns the larger of each two, in words that hold one of a in the
// lower half and one of b in the upper half.
template <class W> FQ_INLINE W maxima_of_halves(W a, W b) {
  return larger_halves(interleave_halves<false>(a, b), interleave_halves<true>(a, b));
}

// Returns the largest magnitudes of N rows of Length elements, as 16-bit floats. The rows are reduced together, as a tree:
// every step halves the number of vectors.
template <int Length, int N = kLanes> FQ_INLINE Vec<uint16_t, N> largest_of_rows(const uint16_t* x) {
  constexpr int kPerRow = Length / (2 * N);
  using W = Vec<uint32_t, N>;
  const auto vector = [&](int i) FQ_INLINE_LAMBDA { return load_raw<W>(x + i * 2 * N) & 0x7FFF7FFFu; };
  const auto row = [&](int i) FQ_INLINE_LAMBDA {  // or two rows, if they are half as long as a vector
    if constexpr (kPerRow <= 1) return vector(i);
    W v = vector(i * kPerRow);
    for (int k = 1; k < kPerRow; ++k) v = larger_halves(v, vector(i * kPerRow + k));
    return v;
  };
  constexpr int kVectors = kPerRow == 0 ? N / 2 : N;
  W v[kVectors / 2];
#pragma GCC unroll 8
  for (int i = 0; i < kVectors / 2; ++i) v[i] = maxima_of_halves(row(2 * i), row(2 * i + 1));
#pragma GCC unroll 8
  for (int i = 0; i < kVectors / 4; ++i) {
    v[i] = larger_halves(interleave_words<false>(v[2 * i], v[2 * i + 1]), interleave_words<true>(v[2 * i], v[2 * i + 1]));
  }
  if constexpr (N > 4) {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors / 8; ++i) {
      v[i] = larger_halves(interleave_pairs<false>(v[2 * i], v[2 * i + 1]), interleave_pairs<true>(v[2 * i], v[2 * i + 1]));
    }
  }
  // The results of a row are now in the same place of each half of a vector, or of each quarter.
  using D = Vec<uint64_t, N / 2>;
  using H = Vec<uint16_t, 2 * N>;
  if constexpr (N == 16) {
    D d = bit_cast<D>(v[0]);
    if constexpr (kPerRow == 1) {
      const D e = bit_cast<D>(v[1]);
      d = bit_cast<D>(larger_halves(bit_cast<W>(__builtin_shufflevector(d, e, 0, 1, 2, 3, 8, 9, 10, 11)),
                                    bit_cast<W>(__builtin_shufflevector(d, e, 4, 5, 6, 7, 12, 13, 14, 15))));
    }
    const H h = bit_cast<H>(larger_halves(bit_cast<W>(d), bit_cast<W>(__builtin_shufflevector(d, d, 2, 3, 0, 1, 6, 7, 4, 5))));
    if constexpr (kPerRow == 1) return __builtin_shufflevector(h, h, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    else return __builtin_shufflevector(h, h, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  } else {
    const H h = bit_cast<H>(v[0]);
    using I = Vec<int16_t, N>;
    return bit_cast<Vec<uint16_t, N>>(larger(bit_cast<I>(low_half(h)), bit_cast<I>(high_half(h))));
  }
}

// Writes the largest magnitudes of the rows [begin, end) of 16-bit floats. Returns the first row that is left.
template <int Length, class T>
FQ_INLINE int64_t many_rows(const T* x, int64_t begin, int64_t end, float* largest, int64_t& nonfinite) {
  constexpr int N = kLanes;
  using I = Vec<int16_t, N>;
  const I limit = splat<I>(kSame<T, bf16> ? 0x7F80 : 0x7C00);
  int64_t p = begin;
  for (; p + N <= end; p += N) {
    const auto found = largest_of_rows<Length>(reinterpret_cast<const uint16_t*>(x + p * Length));
    store_raw(largest + p, kSame<T, bf16> ? widen_bf16<N>(found) : widen_f16<N>(found));
    if (__builtin_expect(any_bit(bit_cast<I>(bit_cast<I>(found) >= limit)), 0)) {
      for (int64_t i = p; i < p + N; ++i) largest[i] = careful_largest<false>(x + i * Length, Length, 1, nonfinite);
    }
  }
  return p;
}

// --- ranges --------------------------------------------------------------------------------------

// The lowest and highest finite value of a block; lo > hi if there is none.
template <class C> struct Ends { C lo, hi; };

// Returns integers that sort like the values. A NaN sorts above or below every number, by its sign.
template <class V> FQ_INLINE Ints<V> ordered_bits(V v) {
  const auto bits = bit_cast<Ints<V>>(v);
  return bits ^ bit_cast<Ints<V>>(bit_cast<Bits<V>>(bits >> (8 * int(sizeof(Elem<V>)) - 1)) >> 1);
}
template <class C> FQ_INLINE C value_of_ordered(IntOf<C> bits) {
  using U = typename UInt<int(sizeof(C))>::type;
  return bit_cast<C>(bits ^ IntOf<C>(bits < 0 ? U(-1) >> 1 : U(0)));
}

template <class T> Ends<Compute<T>> careful_ends(const T* x, int64_t n, int64_t stride, int64_t& nonfinite) {
  using C = Compute<T>;
  Ends<C> ends{C(__builtin_inf()), -C(__builtin_inf())};
  for (int64_t i = 0; i < n; ++i) {
    const auto v = load<1>(x + i * stride);
    if (magnitude_bits(v)[0] >= bits_of_infinity<C>()) {
      ++nonfinite;
      continue;
    }
    ends = {v[0] < ends.lo ? v[0] : ends.lo, v[0] > ends.hi ? v[0] : ends.hi};
  }
  return ends;
}

template <class T> FQ_INLINE Ends<Compute<T>> row_ends(const T* x, int64_t n, int64_t& nonfinite) {
  using C = Compute<T>;
  constexpr int N = kLanesOf<C>;
  if (n < N) return careful_ends(x, n, 1, nonfinite);
  auto low = ordered_bits(load<N>(x)), high = low;
  // The last vector may overlap the one before.
  for (int64_t i = N; i < n; i += N) {
    const auto bits = ordered_bits(load<N>(x + (i + N <= n ? i : n - N)));
    low = bits < low ? bits : low;
    high = larger(high, bits);
  }
  // ~ turns the order around
  const Ends<C> ends{value_of_ordered<C>(~largest_key(~low)), value_of_ordered<C>(largest_key(high))};
  const C infinity = C(__builtin_inf());
  if (__builtin_expect(!(ends.lo > -infinity && ends.hi < infinity), 0)) return careful_ends(x, n, 1, nonfinite);
  return ends;
}

// --- blocks --------------------------------------------------------------------------------------

// W adjacent blocks, one per column.
template <int W, class T>
FQ_INLINE void column_magnitudes(const T* x, int64_t rows, int64_t stride, float* out, int64_t& nonfinite) {
  using C = Compute<T>;
  using I = Ints<Vec<C, W>>;
  I largest{};
  for (int64_t o = 0; o < rows; ++o) largest = larger(largest, magnitude_bits(load<W>(x + o * stride)));
  for (int w = 0; w < W; ++w) {
    const bool finite = largest[w] < bits_of_infinity<C>();
    out[w] = as_float(finite ? bit_cast<C>(IntOf<C>(largest[w])) : careful_magnitude(x + w, rows, stride, nonfinite));
  }
}

// Writes the range from 0 to a value.
FQ_INLINE void store_signed(float v, const MagnitudeArgs& a, int64_t p) {
  using F = Vec<float, 1>;
  a.lowest[p] = min_or_second(F{v}, F{})[0];
  a.largest[p] = max_or_second(F{v}, F{})[0];
}

// Calls f with a constant for the usual lengths of blocks, for which the compiler then unrolls loops.
template <class F> FQ_INLINE void with_length(int64_t n, F&& f) {
  if (n == 32) f(32);
  else if (n == 16) f(16);
  else f(n);
}

template <class T> int64_t ranges_of(const MagnitudeArgs& a, int64_t begin, int64_t end) {
  const Shape& s = a.shape;
  int64_t nonfinite = 0;
  if (a.with_sign && s.outer == 1) {
    with_length(s.inner, [&](int64_t n) FQ_INLINE_LAMBDA {
      for (int64_t p = begin; p < end; ++p) {
        store_signed(largest_of_row<true>(static_cast<const T*>(a.x) + p * n, n, nonfinite), a, p);
      }
    });
    return nonfinite;
  }
  const bool is_row = s.outer == 1;
  const int64_t n = is_row ? s.inner : s.outer, stride = is_row ? 1 : s.blocks;
  for (int64_t p = begin; p < end; ++p) {
    const T* x = static_cast<const T*>(a.x) + (is_row ? p * s.inner : p / s.blocks * s.outer * s.blocks + p % s.blocks);
    if (a.with_sign) {
      store_signed(careful_largest<true>(x, n, stride, nonfinite), a, p);
    } else {
      const auto ends = is_row ? row_ends(x, n, nonfinite) : careful_ends(x, n, stride, nonfinite);
      const bool empty = ends.lo > ends.hi;
      a.lowest[p] = empty ? 0.0f : as_float(ends.lo) + 0.0f;  // not -0.0
      a.largest[p] = empty ? 0.0f : as_float(ends.hi) + 0.0f;
    }
  }
  return nonfinite;
}

template <class T> int64_t magnitudes_of(const MagnitudeArgs& a, int64_t begin, int64_t end) {
  if (a.lowest) return ranges_of<T>(a, begin, end);
  const T* x = static_cast<const T*>(a.x);
  const Shape& s = a.shape;
  int64_t nonfinite = 0;
  if (s.outer == 1) {
    int64_t first = begin;
    if constexpr (sizeof(T) == 2 && !kCompilesFast) {
      if (s.inner == 32) first = many_rows<32>(x, begin, end, a.largest, nonfinite);
      else if (s.inner == 16) first = many_rows<16>(x, begin, end, a.largest, nonfinite);
    }
    with_length(s.inner, [&](int64_t n) FQ_INLINE_LAMBDA {
      for (int64_t p = first; p < end; ++p) a.largest[p] = largest_of_row<false>(x + p * n, n, nonfinite);
    });
    return nonfinite;
  }
  constexpr int W = kLanesOf<Compute<T>>;
  for (int64_t p = begin; p < end; p += s.blocks) {
    const T* batch = x + p * s.outer;
    int64_t k = 0;
    for (; k + W <= s.blocks; k += W) {
      column_magnitudes<W>(batch + k, s.outer, s.blocks, a.largest + p + k, nonfinite);
    }
    for (; k < s.blocks; ++k) column_magnitudes<1>(batch + k, s.outer, s.blocks, a.largest + p + k, nonfinite);
  }
  return nonfinite;
}

}  // namespace

int64_t magnitudes(const MagnitudeArgs& a, int64_t begin, int64_t end) {
  int64_t nonfinite = 0;
  with_dtype(a.dtype, [&](auto tag) { nonfinite = magnitudes_of<typename decltype(tag)::type>(a, begin, end); });
  return nonfinite;
}

}  // namespace fakequant::FQ_TARGET
