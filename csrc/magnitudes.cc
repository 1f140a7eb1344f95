// The largest finite magnitude of every block.
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
IntOf<Compute<T>> careful_magnitude(const T* x, int64_t n, int64_t stride, int64_t& nonfinite) {
  using C = Compute<T>;
  IntOf<C> largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const IntOf<C> bits = magnitude_bits(load<1>(x + i * stride))[0];
    if (bits >= bits_of_infinity<C>()) ++nonfinite;
    else largest = larger(largest, bits);
  }
  return largest;
}

// Returns a magnitude as float32, negative if the first value that has it is.
template <class T> FQ_INLINE float with_first_sign(IntOf<Compute<T>> largest, const T* x, int64_t n, int64_t stride) {
  using C = Compute<T>;
  constexpr int N = kLanesOf<C>;
  int64_t i = 0;
  if (stride == 1) {
    const auto wanted = splat<Ints<Vec<C, N>>>(largest);
    uint32_t found = 0;
    for (; i + N <= n && found == 0; i += N) found = lane_bits(magnitude_bits(load<N>(x + i)) == wanted);
    if (found != 0) i += __builtin_ctz(found) - N;
  }
  while (i < n - 1 && magnitude_bits(load<1>(x + i * stride))[0] != largest) ++i;
  return load<1>(x + i * stride)[0] < 0 ? -as_float<C>(largest) : as_float<C>(largest);
}

template <class T> FQ_INLINE IntOf<Compute<T>> row_magnitude(const T* x, int64_t n, int64_t& nonfinite) {
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
  return largest;
}

// W adjacent blocks, one per column.
template <int W, class T>
FQ_INLINE void column_magnitudes(const T* x, int64_t rows, int64_t stride, float* out, bool with_sign,
                                 int64_t& nonfinite) {
  using C = Compute<T>;
  using I = Ints<Vec<C, W>>;
  I largest{};
  for (int64_t o = 0; o < rows; ++o) largest = larger(largest, magnitude_bits(load<W>(x + o * stride)));
  for (int w = 0; w < W; ++w) {
    const bool finite = largest[w] < bits_of_infinity<C>();
    const IntOf<C> found = finite ? largest[w] : careful_magnitude(x + w, rows, stride, nonfinite);
    out[w] = with_sign ? with_first_sign(found, x + w, rows, stride) : as_float<C>(found);
  }
}

template <class T> int64_t magnitudes_of(const MagnitudeArgs& a, int64_t begin, int64_t end) {
  const T* x = static_cast<const T*>(a.x);
  const Shape& s = a.shape;
  int64_t nonfinite = 0;
  if (s.outer == 1) {
    for (int64_t p = begin; p < end; ++p) {
      const T* row = x + p * s.inner;
      const auto largest = row_magnitude(row, s.inner, nonfinite);
      a.largest[p] = a.with_sign ? with_first_sign(largest, row, s.inner, 1) : as_float<Compute<T>>(largest);
    }
    return nonfinite;
  }
  constexpr int W = kLanesOf<Compute<T>>;
  for (int64_t p = begin; p < end; p += s.blocks) {
    const T* batch = x + p * s.outer;
    int64_t k = 0;
    for (; k + W <= s.blocks; k += W) {
      column_magnitudes<W>(batch + k, s.outer, s.blocks, a.largest + p + k, a.with_sign, nonfinite);
    }
    for (; k < s.blocks; ++k) {
      column_magnitudes<1>(batch + k, s.outer, s.blocks, a.largest + p + k, a.with_sign, nonfinite);
    }
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
