// The largest finite magnitude of every block, or its range.
//
// Magnitudes are compared as integers: the bits of floats without their sign are in the order of the values, and those
// of NaN and infinities are above all others. So one comparison tells whether a block has such values; only then it is
// read again, one value at a time.
#include "numerics-inl.h"
#include "targets.h"

namespace fakequant::FQ_TARGET {
namespace {

template <class V> using Ints = Vec<typename Int<int(sizeof(Elem<V>))>::type, kWidth<V>>;
template <class C> using IntOf = typename Int<int(sizeof(C))>::type;

template <class V> FQ_INLINE Ints<V> magnitude_bits(V v) { return bit_cast<Ints<V>>(magnitude(v)); }
template <class I> FQ_INLINE I larger(I a, I b) { return a > b ? a : b; }

template <class C> FQ_INLINE IntOf<C> bits_of_infinity() { return bit_cast<IntOf<C>>(C(__builtin_inf())); }

// Returns the largest lane.
template <class I> FQ_INLINE Elem<I> largest_lane(I v) {
  if constexpr (kWidth<I> == 1) return v[0];
  else return largest_lane(larger(low_half(v), high_half(v)));
}

// Returns a magnitude as float32. Float64 values beyond float32 become its largest value.
template <class C> FQ_INLINE float as_float(IntOf<C> bits) {
  const C value = bit_cast<C>(bits);
  return value > C(__FLT_MAX__) ? __FLT_MAX__ : float(value);
}

// Ignores values that are not finite and adds their number to `nonfinite`.
template <class T>
float careful_magnitude(const T* x, int64_t n, int64_t stride, int64_t& nonfinite) {
  using C = Compute<T>;
  IntOf<C> largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const IntOf<C> bits = magnitude_bits(load<1>(x + i * stride))[0];
    if (bits >= bits_of_infinity<C>()) ++nonfinite;
    else largest = larger(largest, bits);
  }
  return as_float<C>(largest);
}

template <class T> FQ_INLINE float row_magnitude(const T* x, int64_t n, int64_t& nonfinite) {
  using C = Compute<T>;
  constexpr int N = kLanesOf<C>;
  using I = Ints<Vec<C, N>>;
  I first{}, second{};
  int64_t i = 0;
  for (; i + 2 * N <= n; i += 2 * N) {
    first = larger(first, magnitude_bits(load<N>(x + i)));
    second = larger(second, magnitude_bits(load<N>(x + i + N)));
  }
  for (; i + N <= n; i += N) first = larger(first, magnitude_bits(load<N>(x + i)));
  IntOf<C> largest = largest_lane(larger(first, second));
  for (; i < n; ++i) largest = larger(largest, magnitude_bits(load<1>(x + i))[0]);
  if (__builtin_expect(largest >= bits_of_infinity<C>(), 0)) return careful_magnitude(x, n, 1, nonfinite);
  return as_float<C>(largest);
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

// Returns the largest lanes of two vectors, together in fewer steps than one by one.
template <class I> FQ_INLINE void largest_lanes(I a, I b, Elem<I>& of_a, Elem<I>& of_b) {
  if constexpr (sizeof(I) > 16) {
    largest_lanes(larger(low_half(a), high_half(a)), larger(low_half(b), high_half(b)), of_a, of_b);
  } else if constexpr (kWidth<I> == 4) {
    const I pairs = larger(__builtin_shufflevector(a, b, 0, 4, 1, 5), __builtin_shufflevector(a, b, 2, 6, 3, 7));
    const I both = larger(pairs, __builtin_shufflevector(pairs, pairs, 2, 3, 0, 1));
    of_a = both[0];
    of_b = both[1];
  } else {
    of_a = largest_lane(a);
    of_b = largest_lane(b);
  }
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
  IntOf<C> lowest, highest;
  largest_lanes(~low, high, lowest, highest);  // ~ turns the order around
  const Ends<C> ends{value_of_ordered<C>(~lowest), value_of_ordered<C>(highest)};
  const C infinity = C(__builtin_inf());
  if (__builtin_expect(!(ends.lo > -infinity && ends.hi < infinity), 0)) return careful_ends(x, n, 1, nonfinite);
  return ends;
}

template <class T> bool first_is_negative(const T* x, int64_t n, int64_t stride, Compute<T> magnitude) {
  for (int64_t i = 0; i < n; ++i) {
    const Compute<T> v = load<1>(x + i * stride)[0];
    if (v == magnitude || v == -magnitude) return v < 0;
  }
  return false;
}

template <class T>
FQ_INLINE void store_range(const Ends<Compute<T>>& ends, const T* x, int64_t n, int64_t stride, bool breaks_ties,
                           float* lo, float* hi) {
  using C = Compute<T>;
  const bool empty = ends.lo > ends.hi;
  C low = empty ? C(0) : ends.lo, high = empty ? C(0) : ends.hi;
  if (breaks_ties && __builtin_expect(-low == high, 0)) {
    if (first_is_negative(x, n, stride, high)) high = C(0);
    else low = C(0);
  }
  const C limit = C(__FLT_MAX__);
  *lo = float(low < -limit ? -limit : low > limit ? limit : low) + 0.0f;  // not -0.0
  *hi = float(high < -limit ? -limit : high > limit ? limit : high) + 0.0f;
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
    out[w] = finite ? as_float<C>(largest[w]) : careful_magnitude(x + w, rows, stride, nonfinite);
  }
}

template <class T> int64_t ranges_of(const MagnitudeArgs& a, int64_t begin, int64_t end) {
  const Shape& s = a.shape;
  int64_t nonfinite = 0;
  for (int64_t p = begin; p < end; ++p) {
    const bool is_row = s.outer == 1;
    const int64_t first = is_row ? p * s.inner : p / s.blocks * s.outer * s.blocks + p % s.blocks;
    const int64_t n = is_row ? s.inner : s.outer, stride = is_row ? 1 : s.blocks;
    const T* x = static_cast<const T*>(a.x) + first;
    const auto ends = is_row ? row_ends(x, n, nonfinite) : careful_ends(x, n, stride, nonfinite);
    store_range(ends, x, n, stride, a.breaks_ties, a.lowest + p, a.largest + p);
  }
  return nonfinite;
}

template <class T> int64_t magnitudes_of(const MagnitudeArgs& a, int64_t begin, int64_t end) {
  if (a.lowest) return ranges_of<T>(a, begin, end);
  const T* x = static_cast<const T*>(a.x);
  const Shape& s = a.shape;
  int64_t nonfinite = 0;
  if (s.outer == 1) {
    for (int64_t p = begin; p < end; ++p) a.largest[p] = row_magnitude(x + p * s.inner, s.inner, nonfinite);
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
