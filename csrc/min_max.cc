// Minimum and maximum of the finite values per block, and counts of NaN and infinities.
//
// The fast loop does not classify values: its comparisons skip NaN, and one flag tells whether any value of the stretch
// was NaN or infinite. Only such a stretch is read again, one value at a time.
#include "numerics-inl.h"
#include "targets.h"

namespace fakequant::FQ_TARGET {
namespace {

// Short enough to still be in the L1 cache when it is read again.
constexpr int64_t kStretch = 4096;

template <class C>
struct Found {
  C lo = C(__builtin_inf()), hi = -C(__builtin_inf());
  int64_t nan = 0, posinf = 0, neginf = 0;
  FQ_INLINE void include(C v) {
    lo = v < lo ? v : lo;
    hi = v > hi ? v : hi;
  }
};

template <class C> FQ_INLINE void look_at(C v, Found<C>& f) {
  if (v != v) ++f.nan;
  else if (v == C(__builtin_inf())) ++f.posinf;
  else if (v == -C(__builtin_inf())) ++f.neginf;
  else f.include(v);
}

template <class T> FQ_INLINE void stretch_min_max(const T* x, int64_t n, Found<Compute<T>>& found) {
  using C = Compute<T>;
  constexpr int N = kLanesOf<C>;
  using V = Vec<C, N>;
  const V inf = splat<V>(C(__builtin_inf()));
  // Two independent chains hide the latency of min and max.
  V lo0 = inf, lo1 = inf, hi0 = -inf, hi1 = -inf;
  auto finite = inf == inf;
  int64_t i = 0;
  for (; i + 2 * N <= n; i += 2 * N) {
    const V a = load<N>(x + i), b = load<N>(x + i + N);
    lo0 = min_or_second(a, lo0);
    hi0 = max_or_second(a, hi0);
    lo1 = min_or_second(b, lo1);
    hi1 = max_or_second(b, hi1);
    finite &= (magnitude(a) < inf) & (magnitude(b) < inf);
  }
  if (any_lane(~finite)) {
    for (int64_t j = 0; j < i; ++j) look_at(load<1>(x + j)[0], found);
  } else {
    const V lo = min_or_second(lo0, lo1), hi = max_or_second(hi0, hi1);
    for (int k = 0; k < N; ++k) {
      found.lo = lo[k] < found.lo ? lo[k] : found.lo;
      found.hi = hi[k] > found.hi ? hi[k] : found.hi;
    }
  }
  for (; i < n; ++i) look_at(load<1>(x + i)[0], found);
}

// -0.0 and +0.0 compare equal, so which one a minimum returns would depend on the order of comparisons. Adding +0.0
// makes every zero positive and changes no other value.
template <class C> FQ_INLINE void merge(const Found<C>& f, const MinMaxTile& out, int64_t k) {
  const double lo = double(f.lo) + 0.0, hi = double(f.hi) + 0.0;
  out.lo[k] = lo < out.lo[k] ? lo : out.lo[k];
  out.hi[k] = hi > out.hi[k] ? hi : out.hi[k];
  out.nan_count[k] += f.nan;
  out.posinf_count[k] += f.posinf;
  out.neginf_count[k] += f.neginf;
}

// One block per element of a row: processes W adjacent blocks over all rows.
template <class T, int W>
FQ_INLINE void columns_min_max(const T* x, int64_t rows, int64_t stride, const MinMaxTile& out, int64_t k) {
  using C = Compute<T>;
  using V = Vec<C, W>;
  const V inf = splat<V>(C(__builtin_inf()));
  V lo = inf, hi = -inf;
  auto finite = inf == inf;
  for (int64_t o = 0; o < rows; ++o) {
    const V v = load<W>(x + o * stride);
    lo = min_or_second(v, lo);
    hi = max_or_second(v, hi);
    finite &= magnitude(v) < inf;
  }
  for (int w = 0; w < W; ++w) {
    Found<C> found;
    if (finite[w]) {
      found.lo = lo[w];
      found.hi = hi[w];
    } else {
      for (int64_t o = 0; o < rows; ++o) look_at(load<1>(x + o * stride + w)[0], found);
    }
    merge(found, out, k + w);
  }
}

template <class T> void tile_min_max(const MinMaxArgs& a, const Tile& t, const MinMaxTile& out) {
  using C = Compute<T>;
  const T* x = static_cast<const T*>(a.x);
  const Shape& s = a.shape;
  const int64_t blocks = t.k1 - t.k0;
  for (int64_t k = 0; k < blocks; ++k) {
    out.lo[k] = __builtin_inf();
    out.hi[k] = -__builtin_inf();
    out.nan_count[k] = out.posinf_count[k] = out.neginf_count[k] = 0;
  }
  const int64_t first_row = (t.batch * s.outer + t.o0) * s.blocks;
  if (s.inner == 1) {
    constexpr int W = kLanesOf<C>;
    int64_t k = 0;
    for (; k + W <= blocks; k += W) columns_min_max<T, W>(x + first_row + t.k0 + k, t.o1 - t.o0, s.blocks, out, k);
    for (; k < blocks; ++k) columns_min_max<T, 1>(x + first_row + t.k0 + k, t.o1 - t.o0, s.blocks, out, k);
    return;
  }
  for (int64_t o = t.o0; o < t.o1; ++o) {
    for (int64_t k = t.k0; k < t.k1; ++k) {
      const T* run = x + ((t.batch * s.outer + o) * s.blocks + k) * s.inner;
      Found<C> found;
      for (int64_t j = t.j0; j < t.j1; j += kStretch) {
        stretch_min_max(run + j, t.j1 - j < kStretch ? t.j1 - j : kStretch, found);
      }
      merge(found, out, k - t.k0);
    }
  }
}

}  // namespace

void min_max(const MinMaxArgs& a, const Tile& t, const MinMaxTile& out) {
  with_dtype(a.dtype, [&](auto tag) { tile_min_max<typename decltype(tag)::type>(a, t, out); });
}

}  // namespace fakequant::FQ_TARGET
