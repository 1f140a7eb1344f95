// Floats to codes and back.
//
//   quantize     q = clamp(code(x), qmin, qmax)       (NaN: 0 in half_away, qmin in all other rules)
//   dequantize   y = (q - z) * s
//
// Codes of a float format are bit patterns, always unsigned.
#include "codes-inl.h"
#include "numerics-inl.h"
#include "runs-inl.h"
#include "targets.h"

namespace fakequant::FQ_TARGET {
namespace {

constexpr int64_t kBuffer = 256;  // number of codes; a multiple of 64

// Buffers codes as int32 and writes them to memory 256 at a time. This separates the rule (float to code) from the
// storage (code to bytes), so that r rules and s storage types need r + s instantiations instead of r * s.
struct CodeBuffer {
  using Flush = void (*)(const int32_t* codes, int64_t n, uint8_t* out);
  Flush flush;
  int bits;
  uint8_t* out;
  int64_t filled = 0;
  int32_t codes[kBuffer + kLanes];
  CodeBuffer(Flush flush, int bits, void* q, int64_t begin)
      : flush(flush), bits(bits), out(static_cast<uint8_t*>(q) + begin * bits / 8) {}
  template <class V> FQ_INLINE void put(V clamped) {  // floats or integers
    constexpr int N = kWidth<V>;
    store_raw(codes + filled, convert<Vec<int32_t, N>>(clamped));
    filled += N;
    if (filled >= kBuffer) {
      flush(codes, kBuffer, out);
      out += kBuffer * bits / 8;
      filled -= kBuffer;
      __builtin_memcpy(codes, codes + kBuffer, kLanes * sizeof(int32_t));
    }
  }
  void finish() { flush(codes, filled, out); }
};

template <class Code> void flush_codes(const int32_t* codes, int64_t n, uint8_t* out) {
  using Q = typename Code::type;
  if constexpr (Code::packed) {
    uint8_t bytes[kBuffer];
    for (int64_t i = 0; i < n; ++i) bytes[i] = uint8_t(codes[i]);
    pack_codes<Code::bits>(bytes, n, out);
  } else {
    Q* q = reinterpret_cast<Q*>(out);
    for (int64_t i = 0; i < n; ++i) q[i] = Q(codes[i]);
  }
}

template <class Rule, class T>
void to_codes(const QuantizeArgs& a, int64_t begin, int64_t end, CodeBuffer sink) {
  using C = Compute<T>;
  constexpr int N = kLanesOf<C>;
  using V = Vec<C, N>;
  using V1 = Vec<C, 1>;
  const GridParams<Rule, V> params(a.grid);
  const GridParams<Rule, V1> single(a.grid);
  const auto put = [&](const auto& x, const auto& p) { sink.put(to_code<Rule>(Rule::round(x, p), p)); };
  for_each_run(a.shape, begin, end, [&](const Run& run) {
    const T* x = static_cast<const T*>(a.x) + run.start;
    const int64_t n = run.length;
    int64_t i = 0;
    if (run.per_element) {
      for (; i + N <= n; i += N) put(load<N>(x + i), params.per_element(run.parameter + i));
      for (; i < n; ++i) put(load<1>(x + i), single.one(run.parameter + i));
    } else {
      const auto p = params.one(run.parameter);
      for (; i + N <= n; i += N) put(load<N>(x + i), p);
      const auto p1 = lane<V1>(p);
      for (; i < n; ++i) put(load<1>(x + i), p1);
    }
  });
  sink.finish();
}

// Returns q - z, computed exactly and rounded once to the compute type. Codes of up to 16 bits are exact in float32.
template <class V, class Q> FQ_INLINE V level(const Q* q, V zero) {
  constexpr int N = kWidth<V>;
  if constexpr (sizeof(Q) == 4) {
    using D = Vec<double, N>;
    return convert<V>(load_as<D>(q) - convert<D>(zero));
  } else {
    return convert<V>(convert<Vec<int32_t, N>>(load_raw<Vec<Q, N>>(q))) - zero;
  }
}

template <class Rule, class Q, class P> FQ_INLINE auto value_of_codes(const Q* q, const P& p) {
  using V = decltype(p.lo);
  if constexpr (kIsGgmlRule<Rule>) return Rule::template value<V>(level(q, V{}), p);
  else return level(q, p.zero) * p.scale;
}

template <class Rule, class Q, class T>
FQ_INLINE void run_from_codes(const Q* q, T* y, int64_t n, const Grid& g, int64_t parameter, bool per_element) {
  using C = Compute<T>;
  constexpr int N = kLanesOf<C>;
  using V = Vec<C, N>;
  using V1 = Vec<C, 1>;
  const GridParams<Rule, V> params(g);
  int64_t i = 0;
  if (per_element) {
    const GridParams<Rule, V1> single(g);
    for (; i + N <= n; i += N) {
      const auto p = params.per_element(parameter + i);
      store<T, N>(y + i, value_of_codes<Rule>(q + i, p));
    }
    for (; i < n; ++i) {
      const auto p = single.one(parameter + i);
      store<T, 1>(y + i, value_of_codes<Rule>(q + i, p));
    }
  } else {
    const auto p = params.one(parameter);
    for (; i + N <= n; i += N) store<T, N>(y + i, value_of_codes<Rule>(q + i, p));
    const auto p1 = lane<V1>(p);
    for (; i < n; ++i) store<T, 1>(y + i, value_of_codes<Rule>(q + i, p1));
  }
}

// The values of all codes of a float format.
struct ValueTable {
  float values[256];
  explicit ValueTable(Numerics numerics) {
    const FloatFormat f = float_format(numerics);
    for (int code = 0; code < 256; ++code) values[code] = value_of_code(f, code & ((1 << f.bits) - 1));
  }
};

// The table is computed by the first call: for a few codes, it would take longer than everything else.
const ValueTable& table_of(Numerics numerics) {
  static const ValueTable tables[] = {
      ValueTable(Numerics::e4m3fn),   ValueTable(Numerics::e5m2), ValueTable(Numerics::e4m3fnuz),
      ValueTable(Numerics::e5m2fnuz), ValueTable(Numerics::e2m3), ValueTable(Numerics::e3m2),
      ValueTable(Numerics::e2m1)};
  return tables[int(numerics) - int(Numerics::e4m3fn)];
}

template <class Code, class T>
void from_float_codes(const DequantizeArgs& a, int64_t begin, int64_t end) {
  using C = Compute<T>;
  constexpr int N = kLanesOf<C>;
  using V = Vec<C, N>;
  using V1 = Vec<C, 1>;
  const GridParams<FloatRule, V> params(a.grid);
  const GridParams<FloatRule, V1> single(a.grid);
  const ValueTable& table = table_of(a.grid.numerics);
  uint8_t unpacked[kBuffer];
  float levels[kBuffer];
  for (int64_t start = begin; start < end; start += kBuffer) {
    const int64_t count = end - start < kBuffer ? end - start : kBuffer;
    const uint8_t* codes = static_cast<const uint8_t*>(a.q);
    if constexpr (Code::packed) unpack_codes<uint8_t, Code::bits>(codes, start, count, unpacked);
    codes = Code::packed ? unpacked : codes + start;
    for (int64_t k = 0; k < count; ++k) levels[k] = table.values[codes[k]];
    for_each_run(a.shape, start, start + count, [&](const Run& run) {
      const float* level = levels + (run.start - start);
      T* y = static_cast<T*>(a.y) + run.start;
      const int64_t n = run.length, p = run.parameter;
      int64_t k = 0;
      if (run.per_element) {
        for (; k + N <= n; k += N) store<T, N>(y + k, load_as<V>(level + k) * params.per_element(p + k).scale);
        for (; k < n; ++k) store<T, 1>(y + k, load_as<V1>(level + k) * single.one(p + k).scale);
      } else {
        const V scale = params.one(p).scale;
        for (; k + N <= n; k += N) store<T, N>(y + k, load_as<V>(level + k) * scale);
        for (; k < n; ++k) store<T, 1>(y + k, load_as<V1>(level + k) * splat<V1>(scale[0]));
      }
    });
  }
}

template <class Rule, class Code, class T>
void from_codes(const DequantizeArgs& a, int64_t begin, int64_t end) {
  using Q = typename Code::type;
  T* y = static_cast<T*>(a.y);
  for_each_run(a.shape, begin, end, [&](const Run& run) {
    if constexpr (Code::packed) {
      Q codes[kBuffer];
      for (int64_t i = 0; i < run.length; i += kBuffer) {
        const int64_t n = run.length - i < kBuffer ? run.length - i : kBuffer;
        unpack_codes<Q, Code::bits>(static_cast<const uint8_t*>(a.q), run.start + i, n, codes);
        run_from_codes<Rule>(codes, y + run.start + i, n, a.grid, run.parameter + (run.per_element ? i : 0),
                             run.per_element);
      }
    } else {
      run_from_codes<Rule>(static_cast<const Q*>(a.q) + run.start, y + run.start, run.length, a.grid, run.parameter,
                           run.per_element);
    }
  });
}

}  // namespace

void quantize(const QuantizeArgs& a, int64_t begin, int64_t end) {
  with_code(a.code, [&](auto code) {
    using Code = decltype(code);
    const CodeBuffer sink(flush_codes<Code>, Code::bits, a.q, begin);
    with_dtype(a.dtype, [&](auto t) {
      using T = typename decltype(t)::type;
      with_rule(a.grid.numerics, [&](auto rule) { to_codes<decltype(rule), T>(a, begin, end, sink); });
    });
  });
}

void dequantize(const DequantizeArgs& a, int64_t begin, int64_t end) {
  with_dtype(a.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    with_code(a.code, [&](auto code) {
      using Code = decltype(code);
      if constexpr (kSame<typename Code::type, uint8_t>) {
        if (is_float_format(a.grid.numerics)) return from_float_codes<Code, T>(a, begin, end);
      }
      if constexpr (sizeof(typename Code::type) == 1) {
        if (has_offset(a.grid.numerics)) return from_codes<GgmlRule<Numerics::q4_1>, Code, T>(a, begin, end);
        if (is_ggml(a.grid.numerics)) return from_codes<GgmlRule<Numerics::q8_0>, Code, T>(a, begin, end);
      }
      from_codes<TorchTensor, Code, T>(a, begin, end);
    });
  });
}

}  // namespace fakequant::FQ_TARGET
