// Gradients of fake quantization with a learned scale and zero point, in one pass.
//
//   inside the range    dx = dy   ds += dy * ((q - z) - x / s)         dz += 0
//   outside             dx = 0    ds += dy * (qmin - z or qmax - z)    dz += -dy * s
//
//
// and for ggml's types, with t the distance from code 0 in steps, whose z is a value:
//
//   inside the range    dx = dy   ds += dy * (q - t)                   dz += 0
//   outside             dx = 0    ds += dy * q                         dz += dy
//
// with each ds and dz multiplied by grad_factor. Terms are computed in the element's compute type and summed in double.
// Element j of a run is added to lane j % 8 of the accumulator on every target, and the lanes are combined in a fixed
// order, so that the sums do not depend on the vector width.
#include <utility>

#include "numerics-inl.h"
#include "targets.h"

namespace fakequant::FQ_TARGET {
namespace {

constexpr int kSumLanes = 8;
// Lanes of a vector: no more than a register has. GCC computes on wider ones element by element.
template <class C> constexpr int kVectorLanes = kLanesOf<C> < kSumLanes ? kLanesOf<C> : kSumLanes;

// First stage: the position of elements on the grid.
template <class V>
struct Placed {
  V level;  // clamped code minus zero point
  decltype(V{} == V{}) inside;
};

// Second stage: the gradient and the terms of the sums.
template <class V>
struct Terms { V dx, ds, dz; };

// Multiplies by grad_factor. `One` stands for a factor of 1 and skips the multiplication.
template <class V> FQ_INLINE V times(V v, double factor) { return v * splat<V>(Elem<V>(factor)); }
struct One {};
template <class V> FQ_INLINE V times(V v, One) { return v; }

// torch's backward rounds after adding the zero point, uses fused multiply-adds, and multiplies dy by the mask.
struct TorchLearned {
  static constexpr bool kOnLevels = false;
  template <class V> static FQ_INLINE Placed<V> place(V x, const Params<V>& p) {
    const V code = as_int64(rint(fma(x, p.inverse, p.zero)));
    const V q = clamp_nan_to_low(code, p);
    return {q - p.zero, q == code};
  }
  template <class V, class Factor>
  static FQ_INLINE Terms<V> terms(V dy, V x, const Placed<V>& at, const Params<V>& p, Factor factor) {
    const V distance = at.inside ? fma(at.level, p.scale, -x) : at.level;
    // Outside the range the factor is 1 instead of the reciprocal, which leaves the bits unchanged.
    const V ds = times((dy * distance) * (at.inside ? p.inverse : splat<V>(1)), factor);
    const V dz = times(dy * -p.scale, factor);
    return {dy * zero_unless(at.inside, splat<V>(1)), ds, zero_where(at.inside, dz)};
  }
};

// The backward of fakequant's own rules.
template <class Rule>
struct OwnLearned : Rule {
  template <class V, class P> static FQ_INLINE Placed<V> place(V x, const P& p) {
    const V rounded = Rule::round(x, p);
    const V clamped = clamp_nan_to_low(rounded, p);
    if constexpr (Rule::kOnLevels) return {clamped, clamped == rounded};
    else return {clamped - p.zero, clamped == rounded};
  }
  template <class V, class P, class Factor>
  static FQ_INLINE Terms<V> terms(V dy, V x, const Placed<V>& at, const P& p, Factor factor) {
    const auto finite = magnitude(x) < splat<V>(Elem<V>(__builtin_inf()));
    const V ds = times(dy * (at.inside ? at.level - x / p.scale : at.level), factor);
    const V dz = times(dy * -p.scale, factor);
    // Non-finite elements contribute 0. Selected instead of multiplied by 0, because inf * 0 is NaN.
    return {zero_unless(at.inside & finite, dy), zero_unless(finite, ds),
            zero_where(at.inside, zero_unless(finite, dz))};
  }
};

// The backward of ggml's rules. A scale is rounded to float16 in the forward only, and z is the value of code 0.
template <class Rule>
struct GgmlLearned : Rule {
  template <class V> static FQ_INLINE Placed<V> place(V x, const GgmlParams<V>& p) {
    const V rounded = Rule::round(x, p);
    const V clamped = clamp_nan_to_low(rounded, p);
    return {clamped, clamped == rounded};
  }
  template <class V, class Factor>
  static FQ_INLINE Terms<V> terms(V dy, V x, const Placed<V>& at, const GgmlParams<V>& p, Factor factor) {
    const auto finite = magnitude(x) < splat<V>(Elem<V>(__builtin_inf()));
    const V ds = times(dy * (at.inside ? at.level - convert<V>(Rule::steps(x, p)) : at.level), factor);
    return {zero_unless(at.inside & finite, dy), zero_unless(finite, ds),
            zero_where(at.inside, zero_unless(finite, times(dy, factor)))};
  }
};

// Eight partial sums, in as many vectors as the target needs for eight doubles.
class LaneSums {
 public:
  // Adds to the lanes from `First` on, as many as `terms` has.
  template <int First, class V> FQ_INLINE void add(V terms) {
    add_parts<First / kPart>(terms, std::make_integer_sequence<int, kWidth<V> / kPart>{});
  }
  FQ_INLINE void add_lane(int lane, double term) { sum_[lane / kPart][lane % kPart] += term; }
  FQ_INLINE double total() const {
    double v[kSumLanes];
    __builtin_memcpy(v, sum_, sizeof(v));
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
  }

 private:
  using Part = Vec<double, kLanesOf<double>>;
  static constexpr int kPart = kLanesOf<double>;
  static constexpr int kParts = kSumLanes / kPart;
  template <int First, class V, int... I> FQ_INLINE void add_parts(V terms, std::integer_sequence<int, I...>) {
    ((sum_[First + I] += convert<Part>(part<kPart, I>(terms))), ...);
  }
  Part sum_[kParts]{};
};

template <bool HasZero, class Rule, class T, class DX, class Factor>
FQ_INLINE void run_with_one_scale(const T* dy, const T* x, DX* dx, int64_t n, const Grid& g, int64_t parameter,
                                  Factor factor, double& ds, double* dz) {
  using C = Compute<T>;
  constexpr int N = kVectorLanes<C>;
  using V = Vec<C, N>;
  using V1 = Vec<C, 1>;
  const auto p = GridParams<Rule, V>(g).one(parameter);
  LaneSums ds_sums, dz_sums;
  const auto finish = [&]<int First>(int64_t i, const Placed<V>& at) FQ_INLINE_LAMBDA {
    const auto t = Rule::terms(load<N>(dy + i + First), load<N>(x + i + First), at, p, factor);
    store<DX, N>(dx + i + First, t.dx);
    ds_sums.template add<First>(t.ds);
    if constexpr (HasZero) dz_sums.template add<First>(t.dz);
  };
  // Eight elements: the first stage, and the second.
  struct Eight { Placed<V> at[kSumLanes / N]; };
  const auto place_8 = [&](int64_t i) FQ_INLINE_LAMBDA {
    Eight e;
    for (int k = 0; k < kSumLanes / N; ++k) e.at[k] = Rule::place(load<N>(x + i + k * N), p);
    return e;
  };
  const auto finish_8 = [&]<int... K>(int64_t i, const Eight& e, std::integer_sequence<int, K...>) FQ_INLINE_LAMBDA {
    (finish.template operator()<K * N>(i, e.at[K]), ...);
  };
  constexpr std::make_integer_sequence<int, kSumLanes / N> kEach;
  int64_t i = 0;
  // Two loops over a few vectors at a time. In a single loop each vector is a dependency chain of about 45 cycles,
  // and the CPU's scheduler holds only two such chains; the shorter stages overlap better.
  constexpr int kVectors = 8;
  for (; i + kVectors * kSumLanes <= n; i += kVectors * kSumLanes) {
    Eight e[kVectors];
    for (int k = 0; k < kVectors; ++k) e[k] = place_8(i + k * kSumLanes);
    for (int k = 0; k < kVectors; ++k) finish_8(i + k * kSumLanes, e[k], kEach);
  }
  for (; i + kSumLanes <= n; i += kSumLanes) finish_8(i, place_8(i), kEach);
  const auto p1 = lane<V1>(p);
  for (; i < n; ++i) {
    const V1 v = load<1>(x + i);
    const auto t = Rule::terms(load<1>(dy + i), v, Rule::place(v, p1), p1, factor);
    store<DX, 1>(dx + i, t.dx);
    ds_sums.add_lane(int(i % kSumLanes), double(t.ds[0]));
    if constexpr (HasZero) dz_sums.add_lane(int(i % kSumLanes), double(t.dz[0]));
  }
  ds += ds_sums.total();
  if constexpr (HasZero) *dz += dz_sums.total();
}

// One scale per element of a row: element i is added to ds[i] and dz[i].
template <bool HasZero, class Rule, class T, class DX, class Factor>
FQ_INLINE void row_with_scale_per_element(const T* dy, const T* x, DX* dx, int64_t n, const Grid& g,
                                          int64_t parameter, Factor factor, double* ds, double* dz) {
  using C = Compute<T>;
  constexpr int N = kVectorLanes<C>;
  using V = Vec<C, N>;
  using V1 = Vec<C, 1>;
  using D = Vec<double, N>;
  const GridParams<Rule, V> params(g);
  const GridParams<Rule, V1> single(g);
  int64_t i = 0;
  for (; i + N <= n; i += N) {
    const auto p = params.per_element(parameter + i);
    const V v = load<N>(x + i);
    const auto t = Rule::terms(load<N>(dy + i), v, Rule::place(v, p), p, factor);
    store<DX, N>(dx + i, t.dx);
    store_raw(ds + i, load_raw<D>(ds + i) + convert<D>(t.ds));
    if constexpr (HasZero) store_raw(dz + i, load_raw<D>(dz + i) + convert<D>(t.dz));
  }
  for (; i < n; ++i) {
    const auto p = single.one(parameter + i);
    const V1 v = load<1>(x + i);
    const auto t = Rule::terms(load<1>(dy + i), v, Rule::place(v, p), p, factor);
    store<DX, 1>(dx + i, t.dx);
    ds[i] += double(t.ds[0]);
    if constexpr (HasZero) dz[i] += double(t.dz[0]);
  }
}

template <bool HasZero, class Rule, class T, class DX, class Factor>
void backward(const LearnedBackwardArgs& a, Factor factor, const Tile& t, const LearnedTile& out) {
  const T* dy = static_cast<const T*>(a.dy);
  const T* x = static_cast<const T*>(a.x);
  DX* dx = static_cast<DX*>(a.dx);
  const Shape& s = a.shape;
  for (int64_t k = 0; k < t.k1 - t.k0; ++k) out.dscale[k] = 0;
  if constexpr (HasZero) {
    for (int64_t k = 0; k < t.k1 - t.k0; ++k) out.dzero[k] = 0;
  }
  for (int64_t o = t.o0; o < t.o1; ++o) {
    const int64_t row = (t.batch * s.outer + o) * s.blocks;
    const int64_t parameter = t.batch * s.blocks;
    if (s.inner == 1) {
      const int64_t i = row + t.k0;
      row_with_scale_per_element<HasZero, Rule>(dy + i, x + i, dx + i, t.k1 - t.k0, a.grid, parameter + t.k0, factor,
                                       out.dscale, out.dzero);
      continue;
    }
    for (int64_t k = t.k0; k < t.k1; ++k) {
      const int64_t i = (row + k) * s.inner + t.j0;
      run_with_one_scale<HasZero, Rule>(dy + i, x + i, dx + i, t.j1 - t.j0, a.grid, parameter + k, factor,
                               out.dscale[k - t.k0], HasZero ? out.dzero + (k - t.k0) : nullptr);
    }
  }
}

template <bool HasZero, class Rule, class T, class DX>
void backward_with_factor(const LearnedBackwardArgs& a, const Tile& t, const LearnedTile& out) {
  if constexpr (!kCompilesFast) {
    if (a.grad_factor == 1) return backward<HasZero, Rule, T, DX>(a, One{}, t, out);
  }
  backward<HasZero, Rule, T, DX>(a, a.grad_factor, t, out);
}

template <class Rule, class T, class DX>
void backward_of_parameters(const LearnedBackwardArgs& a, const Tile& t, const LearnedTile& out) {
  if (out.dzero) backward_with_factor<true, Rule, T, DX>(a, t, out);
  else backward_with_factor<false, Rule, T, DX>(a, t, out);
}

template <class Rule>
void backward_in_dtype(const LearnedBackwardArgs& a, const Tile& t, const LearnedTile& out) {
  with_dtype(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) == 2) {
      if (a.dx_dtype == DType::f32) return backward_of_parameters<Rule, T, float>(a, t, out);
    }
    backward_of_parameters<Rule, T, T>(a, t, out);
  });
}

}  // namespace

void learned_backward(const LearnedBackwardArgs& a, const Tile& t, const LearnedTile& out) {
  switch (a.grid.numerics) {
    case Numerics::onnx: return backward_in_dtype<OwnLearned<Onnx>>(a, t, out);
    case Numerics::half_away: return backward_in_dtype<OwnLearned<HalfAway>>(a, t, out);
    case Numerics::torch_tensor: case Numerics::torch_channel: case Numerics::torch_channel_float:
    case Numerics::torch_channel_half: return backward_in_dtype<TorchLearned>(a, t, out);
    case Numerics::q4_0: return backward_in_dtype<GgmlLearned<GgmlRule<Numerics::q4_0>>>(a, t, out);
    case Numerics::q4_1: return backward_in_dtype<GgmlLearned<GgmlRule<Numerics::q4_1>>>(a, t, out);
    case Numerics::q8_0: case Numerics::tq2_0:
      return backward_in_dtype<GgmlLearned<GgmlRule<Numerics::q8_0>>>(a, t, out);
    case Numerics::q4_k: case Numerics::q6_k:
      return backward_in_dtype<GgmlLearned<GgmlRule<Numerics::q4_k>>>(a, t, out);
    case Numerics::q8_0_input: case Numerics::q8_k_input: return;  // not learned; refused in bindings.cc
    default: return backward_in_dtype<OwnLearned<FloatRule>>(a, t, out);
  }
}

}  // namespace fakequant::FQ_TARGET
