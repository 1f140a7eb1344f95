// The rules of numerics-inl.h for bounds or zero points above 2^23 in magnitude, which the vector kernels cannot handle
// exactly. Computes one element at a time in int64 and double. Rarely used, so written for clarity rather than speed.
#include "wide.h"

#include "codes-inl.h"
#include "numerics-inl.h"
#include "runs-inl.h"

namespace fakequant::FQ_TARGET {
namespace {

// Converts as x86 does: values outside int64 become INT64_MIN. In C++ their conversion is undefined.
int64_t to_int64(double v) {
  return v >= -9223372036854775808.0 && v < 9223372036854775808.0 ? int64_t(v) : INT64_MIN;
}

// Subtracts with wraparound, without undefined overflow.
int64_t minus(int64_t a, int64_t b) { return int64_t(uint64_t(a) - uint64_t(b)); }

template <class C> C rint1(C v) { return rint(Vec<C, 1>{v})[0]; }
template <class C> C round_half_away1(C v) { return round_half_away(Vec<C, 1>{v})[0]; }
template <class C> C fma1(C a, C b, C c) { return fma(Vec<C, 1>{a}, Vec<C, 1>{b}, Vec<C, 1>{c})[0]; }

// fmin(fmax(v, lo), hi): NaN becomes lo.
double clamp_in_double(double v, double lo, double hi) {
  v = v > lo ? v : lo;
  return v < hi ? v : hi;
}

template <class C>
struct Param {
  C scale;
  float inverse;
  int64_t zero;
  float zero_float;
};

template <class C> Param<C> param(const Grid& g, int64_t i) {
  Param<C> p;
  p.scale = g.scale_f64 ? C(g.scale_f64[i]) : C(g.scale_f32[i]);
  p.inverse = 1.0f / float(p.scale);
  p.zero = g.zero_i32 ? g.zero_i32[i] : g.zero_i64 ? g.zero_i64[i] : 0;
  p.zero_float = g.zero_f32 ? g.zero_f32[i] : 0;
  return p;
}

template <class C>
struct Element {
  int64_t q;  // the code, clamped
  C y;
  bool inside;
};

template <class C> Element<C> torch_tensor(C x, const Param<C>& p, const Grid& g) {
  const C code = C(p.zero) + rint1(x * C(p.inverse));
  const int64_t q = to_int64(clamp_in_double(double(code), double(g.qmin), double(g.qmax)));
  return {q, C(float(minus(q, p.zero)) * float(p.scale)), C(g.qmin) <= code && code <= C(g.qmax)};
}

template <class C> Element<C> torch_channel(int64_t code, double zero, const Param<C>& p, const Grid& g) {
  const double q = clamp_in_double(double(code), double(g.qmin), double(g.qmax));
  return {to_int64(q), C((q - zero) * double(p.scale)), g.qmin <= code && code <= g.qmax};
}

template <class C> Element<C> element(C x, const Param<C>& p, const Grid& g) {
  switch (g.numerics) {
    case Numerics::torch_tensor: return torch_tensor(x, p, g);
    case Numerics::torch_channel:
      return torch_channel(to_int64(double(C(p.zero) + rint1(x * C(p.inverse)))), double(p.zero), p, g);
    case Numerics::torch_channel_float:
      return torch_channel(to_int64(rint1(float(fma1(x, C(p.inverse), C(p.zero_float))))), p.zero_float, p, g);
    case Numerics::torch_channel_half:
      return torch_channel(to_int64(rint1(float(C(p.zero_float) + x * C(p.inverse)))), p.zero_float, p, g);
    default: break;  // float formats are never wide
  }
  const bool onnx = g.numerics == Numerics::onnx;
  const double code = onnx ? double(rint1(x / p.scale)) + double(p.zero)
                           : double(round_half_away1(x / p.scale + C(p.zero)));
  if (x != x) {
    if (onnx) return {g.qmin, x, false};
    return {0, x, false};
  }
  const int64_t q = int64_t(clamp_in_double(code, double(g.qmin), double(g.qmax)));
  return {q, C(q - p.zero) * p.scale, double(g.qmin) <= code && code <= double(g.qmax)};
}

template <class T, class F>
void for_each_element(const Shape& shape, const Grid& g, const void* x_, int64_t begin, int64_t end, F&& visit) {
  using C = Compute<T>;
  const T* x = static_cast<const T*>(x_);
  for_each_run(shape, begin, end, [&](const Run& run) {
    for (int64_t i = 0; i < run.length; ++i) {
      const auto p = param<C>(g, run.parameter + (run.per_element ? i : 0));
      visit(run.start + i, element<C>(load<1>(x + run.start + i)[0], p, g));
    }
  });
}

template <class C>
struct LearnedTerm { C dx, ds, dz; };

template <class C> LearnedTerm<C> learned_term(C dy, C x, const Param<C>& p, const Grid& g, C factor) {
  if (g.numerics == Numerics::onnx || g.numerics == Numerics::half_away) {
    const auto e = element<C>(x, p, g);
    if (!(x - x == 0)) return {0, 0, 0};
    const C level = C(e.q - p.zero);
    const C ds = (dy * (e.inside ? level - x / p.scale : level)) * factor;
    return {e.inside ? dy : 0, ds, e.inside ? 0 : (-dy * p.scale) * factor};
  }
  const C zero = g.zero_f32 ? C(p.zero_float) : C(p.zero);
  const int64_t code = to_int64(double(rint1(fma1(x, C(p.inverse), zero))));
  const int64_t q = code < g.qmin ? g.qmin : code > g.qmax ? g.qmax : code;
  // torch's per-channel zero points are floats, so the code is rounded to a float before the subtraction.
  const C level = g.zero_f32 ? C(q) - zero : C(minus(q, p.zero));
  if (q != code) return {dy * 0, (dy * level) * factor, (-dy * p.scale) * factor};
  return {dy * 1, ((dy * fma1(level, p.scale, -x)) * C(p.inverse)) * factor, 0};
}

template <class T, class DX> void learned(const LearnedBackwardArgs& a, const Tile& t, const LearnedTile& out) {
  using C = Compute<T>;
  const Shape& s = a.shape;
  for (int64_t k = t.k0; k < t.k1; ++k) {
    const auto p = param<C>(a.grid, t.batch * s.blocks + k);
    double ds = 0, dz = 0;
    for (int64_t o = t.o0; o < t.o1; ++o) {
      for (int64_t j = t.j0; j < t.j1; ++j) {
        const int64_t i = ((t.batch * s.outer + o) * s.blocks + k) * s.inner + j;
        const C dy = load<1>(static_cast<const T*>(a.dy) + i)[0], x = load<1>(static_cast<const T*>(a.x) + i)[0];
        const auto term = learned_term<C>(dy, x, p, a.grid, C(a.grad_factor));
        store<DX, 1>(static_cast<DX*>(a.dx) + i, Vec<Compute<DX>, 1>{Compute<DX>(term.dx)});
        ds += double(term.ds);
        dz += double(term.dz);
      }
    }
    out.dscale[k - t.k0] = ds;
    if (out.dzero) out.dzero[k - t.k0] = dz;
  }
}

}  // namespace

void fake_quantize(const FakeQuantizeArgs& a, int64_t begin, int64_t end) {
  with_dtype(a.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    for_each_element<T>(a.shape, a.grid, a.x, begin, end, [&](int64_t i, const auto& e) {
      store<T, 1>(static_cast<T*>(a.y) + i, Vec<Compute<T>, 1>{e.y});
      if (a.mask_kind == MaskKind::bytes) a.mask[i] = e.inside;
      if (a.mask_kind == MaskKind::packed) {
        // `begin` is a multiple of 64, so no other range writes to this byte.
        if (i % 8 == 0) a.mask[i / 8] = 0;
        a.mask[i / 8] |= uint8_t(e.inside) << (i % 8);
      }
    });
  });
}

void quantize(const QuantizeArgs& a, int64_t begin, int64_t end) {
  with_dtype(a.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    with_code(a.code, [&](auto code) {
      using Code = decltype(code);
      using Q = typename Code::type;
      for_each_element<T>(a.shape, a.grid, a.x, begin, end, [&](int64_t i, const auto& e) {
        // Packed codes have at most 4 bits, and so do their zero points: they are never wide.
        if constexpr (!Code::packed) static_cast<Q*>(a.q)[i] = Q(e.q);
      });
    });
  });
}

void dequantize(const DequantizeArgs& a, int64_t begin, int64_t end) {
  with_dtype(a.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    using C = Compute<T>;
    with_code(a.code, [&](auto code) {
      using Code = decltype(code);
      using Q = typename Code::type;
      if constexpr (!Code::packed) {
        for_each_run(a.shape, begin, end, [&](const Run& run) {
          for (int64_t i = 0; i < run.length; ++i) {
            const auto p = param<C>(a.grid, run.parameter + (run.per_element ? i : 0));
            const int64_t q = static_cast<const Q*>(a.q)[run.start + i];
            store<T, 1>(static_cast<T*>(a.y) + run.start + i, Vec<C, 1>{C(q - p.zero) * p.scale});
          }
        });
      }
    });
  });
}

void learned_backward(const LearnedBackwardArgs& a, const Tile& t, const LearnedTile& out) {
  with_dtype(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) == 2) {
      if (a.dx_dtype == DType::f32) return learned<T, float>(a, t, out);
    }
    learned<T, T>(a, t, out);
  });
}

}  // namespace fakequant::FQ_TARGET
