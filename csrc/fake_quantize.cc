// Fake quantization and its clipped gradient.
//
//   forward    q = clamp(code(x), qmin, qmax);  y = (q - z) * s;  mask = (q == code(x))
//   backward   dx = dy * mask  (torch)  or  mask ? dy : 0  (all other rules)
//
// One pass: each element is read once, its value and its mask bit are written once. With eight lanes, forward takes
// about fourteen instructions per vector and is limited by memory bandwidth.
#include "bf16_levels-inl.h"
#include "e2m1_blocks-inl.h"
#include "numerics-inl.h"
#include "runs-inl.h"
#include "targets.h"

namespace fakequant::FQ_TARGET {
namespace {

// Writers of a packed mask. put_64 appends 64 bits, put appends the lowest n <= 32 bits, finish writes what is still buffered.
struct NoMask {
  static constexpr bool kWanted = false;
  explicit NoMask(uint8_t*) {}
  FQ_INLINE void put_64(uint64_t) {}
  FQ_INLINE void put(uint32_t, int) {}
  FQ_INLINE void finish() {}
};

// Buffers up to 64 bits, so that a run may start or end inside a byte.
struct PackedMask {
  static constexpr bool kWanted = true;
  uint8_t* out;
  uint64_t pending = 0;
  int filled = 0;
  explicit PackedMask(uint8_t* out) : out(out) {}
  FQ_INLINE void put_64(uint64_t bits) {
    const uint64_t word = pending | bits << filled;
    __builtin_memcpy(out, &word, 8);
    out += 8;
    pending = bits >> 1 >> (63 - filled);  // two shifts: one by 64 would be undefined
  }
  FQ_INLINE void put(uint32_t bits, int n) {
    pending |= uint64_t(bits) << filled;
    filled += n;
    if (filled >= 64) {
      __builtin_memcpy(out, &pending, 8);
      out += 8;
      filled -= 64;
      pending = filled ? uint64_t(bits) >> (n - filled) : 0;
    }
  }
  FQ_INLINE void finish() {
    for (; filled > 0; filled -= 8, pending >>= 8) *out++ = uint8_t(pending);
  }
};

// Fake-quantizes N elements. Returns the lanes that were inside the range.
template <class Rule, int N, class T, class P>
FQ_INLINE auto step(const T* x, T* y, const P& p) {
  using V = Vec<Compute<T>, N>;
  const V rounded = Rule::round(load<N>(x), p);
  const V clamped = Rule::clamp(rounded, p);
  store<T, N>(y, Rule::value(clamped, p));
  return inside_lanes<Rule>(clamped, rounded);
}

template <bool B> struct Flag { static constexpr bool value = B; };

// Rules whose values are integers times the scale.
template <class Rule> inline constexpr bool kHasLevels =
    kSame<Rule, Onnx> || kSame<Rule, TorchTensor> || kSame<Rule, TorchChannel>;

// Numbers that are searched for NaN together.
inline constexpr int64_t kBlock = 256;

template <class Rule, class T, class V, class Mask>
FQ_INLINE void run_with_one_scale(const T* x, T* y, int64_t n, const GridParams<Rule, V>& params, int64_t parameter,
                                  Mask& out) {
  using C = Compute<T>;
  constexpr int N = kWidth<V>;
  Mask mask = out;  // a local copy: stores to y might alias the members of `out`
  const auto p = params.one(parameter);
  // `step` for 32 elements. The stages are interleaved over several independent vectors to hide instruction latency.
  const auto step_32 = [&](int64_t i, auto has_ties) FQ_INLINE_LAMBDA {
    constexpr int K = 32 / N;
    V rounded[K], clamped[K];
    decltype(inside_lanes<Rule>(V{}, V{})) inside[K];
#pragma GCC unroll 16
    for (int k = 0; k < K; k += 2) load_pair<N>(x + i + k * N, rounded[k], rounded[k + 1]);
    round_all<Rule>(rounded, p);
#pragma GCC unroll 16
    for (int k = 0; k < K; ++k) clamped[k] = Rule::clamp(rounded[k], p);
#pragma GCC unroll 16
    for (int k = 0; k < K; k += 2) {
      store_pair<T, N, decltype(has_ties)::value>(y + i + k * N, Rule::value(clamped[k], p), Rule::value(clamped[k + 1], p));
      inside[k] = inside_lanes<Rule>(clamped[k], rounded[k]);
      inside[k + 1] = inside_lanes<Rule>(clamped[k + 1], rounded[k + 1]);
    }
    return Mask::kWanted ? bits_of_32<T, N>(inside) : 0u;
  };
  int64_t i = 0;
  const auto steps = [&](auto has_ties) FQ_INLINE_LAMBDA {
    for (; i + 64 <= n; i += 64) {
      const uint64_t low = step_32(i, has_ties), high = step_32(i + 32, has_ties);
      mask.put_64(low | high << 32);
    }
  };
  if constexpr (kSame<T, bf16> && kHasLevels<Rule> && !kCompilesFast) {
    if (n >= 1024 && !may_have_ties(p)) {
      if constexpr (kSame<Rule, Onnx> && kHasFma) {
        const Bf16Range<V> range = bf16_range(p);
        const auto clamped_steps = [&](auto by_reciprocal) FQ_INLINE_LAMBDA {
          while (i + kBlock <= n) {
            const bool careful = any_nan(x + i, kBlock);
            for (const int64_t end = i + kBlock; i < end; i += 64) {
              const auto step = [&](int64_t j) FQ_INLINE_LAMBDA {
                if (careful) return step_32(j, Flag<true>{});
                return clamped_step<decltype(by_reciprocal)::value, false, V>(x + j, y + j, range.high[0], range.low[0], p);
              };
              const uint64_t low = step(i), high = step(i + 32);
              mask.put_64(low | high << 32);
            }
          }
        };
        if (range.usable) reciprocal_suffices(p) ? clamped_steps(Flag<true>{}) : clamped_steps(Flag<false>{});
      } else {
        steps(Flag<false>{});
      }
    }
  }
  steps(Flag<true>{});
  if (i + 32 <= n) {
    mask.put(step_32(i, Flag<true>{}), 32);
    i += 32;
  }
  for (; i + N <= n; i += N) mask.put(lane_bits(step<Rule, N>(x + i, y + i, p)), N);
  const auto p1 = lane<Vec<C, 1>>(p);
  for (; i < n; ++i) mask.put(lane_bits(step<Rule, 1>(x + i, y + i, p1)), 1);
  out = mask;
}

template <class Rule, class T, class V, class Mask>
FQ_INLINE void run_with_scale_per_element(const T* x, T* y, int64_t n, const GridParams<Rule, V>& params,
                                          const GridParams<Rule, Vec<Elem<V>, 1>>& single, int64_t parameter,
                                          Mask& out) {
  constexpr int N = kWidth<V>;
  Mask mask = out;
  int64_t i = 0;
  for (; i + N <= n; i += N) {
    const auto p = params.per_element(parameter + i);
    mask.put(lane_bits(step<Rule, N>(x + i, y + i, p)), N);
  }
  for (; i < n; ++i) {
    const auto p = single.one(parameter + i);
    mask.put(lane_bits(step<Rule, 1>(x + i, y + i, p)), 1);
  }
  out = mask;
}

// A clamped level or code, and whether it was inside the range.
template <class Rule, class V> struct Clamped {
  V clamped;
  decltype(inside_lanes<Rule>(V{}, V{})) inside;
};
template <class Rule, class V, class P> FQ_INLINE Clamped<Rule, V> clamped(V rounded, const P& p) {
  const V v = Rule::clamp(rounded, p);
  return {v, inside_lanes<Rule>(v, rounded)};
}

// Returns the reciprocals of powers of two, by which one can multiply instead of dividing, and 0 for other values.
template <class V> FQ_INLINE V exact_reciprocals(V v) {
  using I = Vec<int32_t, kWidth<V>>;
  const I bits = bit_cast<I>(v), field = bits >> 23;
  const auto is_power = ((bits & 0x7FFFFF) == 0) & (field >= 1) & (field <= 253);
  return zero_unless(is_power, bit_cast<V>((254 - field) << 23));
}

// Quantizes some rows of e2m1 in bfloat16, if their scales allow it; see e2m1_blocks-inl.h. Returns their number.
template <class Blocks, class Mask>
FQ_INLINE int64_t e2m1_rows(const bf16* x, bf16* y, int64_t length, int64_t rows, const float* scale, Mask& mask) {
  constexpr int N = kLanes, kSets = 8;  // several sets at once, since the elements of one wait for its words
  Blocks blocks[kSets];
  int sets = 0;
  for (; sets < kSets && (sets + 1) * N <= rows; ++sets) {
    const auto s = load_raw<Vec<float, N>>(scale + sets * N);
    if (!Blocks::usable(s)) break;
    blocks[sets].set(s);
  }
  const auto quantize = [&](auto lanes, bool several) FQ_INLINE_LAMBDA {
    constexpr int M = kWidth<decltype(lanes)>;
    const int step = several ? M / 16 : 1;
    for (int set = 0; set < sets; ++set) {
      for (int r = 0; r < N; r += step) {
        for (int64_t i = 0; i < length * step; i += M, x += M, y += M) {
          const auto inside = blocks[set].template quantize<Mask::kWanted, M>(x, y, unsigned(r), several);
          if constexpr (Mask::kWanted) mask.put(lane_bits(inside), M);
        }
      }
    }
  };
  if (length % (2 * N) == 0) quantize(Vec<uint16_t, 2 * N>{}, false);
  else if (N == 16 && length == 16) quantize(Vec<uint16_t, 2 * N>{}, true);
  else quantize(Vec<uint16_t, N>{}, false);
  return sets * N;
}

// Quantizes some rows of integer codes in bfloat16, if their grids and numbers allow it; see bf16_levels-inl.h. Returns
// their number.
template <class V, class Mask>
FQ_INLINE int64_t clamped_rows(const bf16* x, bf16* y, int64_t length, int64_t rows, const GridParams<Onnx, V>& params,
                               int64_t first, Mask& mask) {
  constexpr int N = kWidth<V>, kSets = 8;  // several sets at once, as in e2m1_rows
  if (length != 32 && length % 64 != 0) return 0;
  uint32_t high[kSets * N], low[kSets * N];
  float scale[kSets * N], inverse[kSets * N];
  int count = 0;
  bool exact = true;  // products with a power of two are exact, and have no more bits than the level
  for (; count < kSets * N && count + N <= rows; count += N) {
    const auto p = params.per_element(first + count);
    const Bf16Range<V> range = bf16_range(p);
    if (!range.usable || any_nan(x + count * length, N * length)) break;
    store_raw(high + count, range.high);
    store_raw(low + count, range.low);
    store_raw(scale + count, p.scale);
    store_raw(inverse + count, p.inverse);
    exact &= !any_lane(exact_reciprocals(p.scale) == V{});
  }
  const int step = length == 32 ? 2 : 1;
  const auto quantize = [&](auto is_exact) FQ_INLINE_LAMBDA {
    constexpr bool kExact = decltype(is_exact)::value;
    const auto step_32 = [&](int64_t i, int r) FQ_INLINE_LAMBDA {
      const Params<V> p{splat<V>(scale[r]), splat<V>(inverse[r]), V{}, V{}, V{}};
      return clamped_step<kExact, !kExact, V>(x + i, y + i, high[r], low[r], p);
    };
    for (int r = 0; r < count; r += step, x += length * step, y += length * step) {
      for (int64_t i = 0; i < length * step; i += 64) {
        const uint64_t low_bits = step_32(i, r), high_bits = step_32(i + 32, r + step - 1);
        mask.put_64(low_bits | high_bits << 32);
      }
    }
  };
  exact ? quantize(Flag<true>{}) : quantize(Flag<false>{});
  return count;
}

// Quantizes a row of 32 elements. Returns the bits of its mask.
template <class Rule, class T, class P, class Round>
FQ_INLINE uint32_t row_of_32(const T* x, T* y, const P& p, int r, Round&& round) {
  constexpr int N = kLanesOf<float>, K = 32 / N;
  using V = Vec<float, N>;
  decltype(inside_lanes<Rule>(V{}, V{})) inside[K];
#pragma GCC unroll 8
  for (int k = 0; k < K; k += 2) {
    V v, w;
    load_pair<N>(x + k * N, v, w);
    const auto first = round(v, p, r), second = round(w, p, r);
    store_pair<T, N>(y + k * N, Rule::value(first.clamped, p), Rule::value(second.clamped, p));
    inside[k] = first.inside;
    inside[k + 1] = second.inside;
  }
  return bits_of_32<T, N>(inside);
}

// Short rows with one scale each: groups and blocks. Does the same as run_with_one_scale with less work between rows. The
// parameters of several rows are computed together. Quotients are divided: in groups with symmetric scales the largest
// value is often at a tie, where the check of Onnx::round_all fails, and a branch that nothing predicts costs more.
template <class Rule, class T, class Mask>
FQ_INLINE void short_rows(const FakeQuantizeArgs& a, int64_t begin, int64_t end, Mask& mask) {
  constexpr int N = kLanesOf<float>;
  using V = Vec<float, N>;
  const int64_t length = a.shape.inner, last = end / length;
  const T* x = static_cast<const T*>(a.x) + begin;
  T* y = static_cast<T*>(a.y) + begin;
  const GridParams<Rule, V> params(a.grid);
  int64_t row = begin / length;
  for (; row + N <= last; row += N) {
    int64_t rows = 0;
    if constexpr (kSame<Rule, FixedFloatRule<Numerics::e2m1>> && kSame<T, bf16> && !kCompilesFast) {
      rows = e2m1_rows<E2m1Powers>(x, y, length, last - row, a.grid.scale_f32 + row, mask);
      if (rows == 0) rows = e2m1_rows<E2m1Blocks>(x, y, length, last - row, a.grid.scale_f32 + row, mask);
    } else if constexpr (kSame<Rule, Onnx> && kSame<T, bf16> && kHasFma) {
      rows = clamped_rows(x, y, length, last - row, params, row, mask);
    }
    if (rows > 0) {
      row += rows - N, x += rows * length, y += rows * length;
      continue;
    }
    const auto several = params.per_element(row);
    const auto for_rows = [&](auto&& round) FQ_INLINE_LAMBDA {
      if (Mask::kWanted && length == 32) {  // the bits of two rows are a word of the mask
        for (int r = 0; r < N; r += 2, x += 64, y += 64) {
          const uint64_t low = row_of_32<Rule>(x, y, lane<V>(several, r), r, round);
          const uint64_t high = row_of_32<Rule>(x + 32, y + 32, lane<V>(several, r + 1), r + 1, round);
          mask.put_64(low | high << 32);
        }
        return;
      }
      for (int r = 0; r < N; ++r, x += length, y += length) {
        const auto p = lane<V>(several, r);
        int64_t i = 0;
        for (; i + 2 * N <= length; i += 2 * N) {
          V v, w;
          load_pair<N>(x + i, v, w);
          const auto first = round(v, p, r), second = round(w, p, r);
          store_pair<T, N>(y + i, Rule::value(first.clamped, p), Rule::value(second.clamped, p));
          mask.put(pair_bits<T, N>(first.inside, second.inside), 2 * N);
        }
        for (; i < length; i += N) {
          const auto result = round(load<N>(x + i), p, r);
          store<T, N>(y + i, Rule::value(result.clamped, p));
          mask.put(lane_bits(result.inside), N);
        }
      }
    };
    if constexpr (kIsGgmlRule<Rule>) {
      for_rows([](V v, const auto& p, int) FQ_INLINE_LAMBDA { return clamped<Rule>(Rule::round(v, p), p); });
    } else {
      const auto from_quotient = [](V t, const auto& p) FQ_INLINE_LAMBDA {
        if constexpr (kIsFloatRule<Rule> && !Mask::kWanted) {
          const V v = Rule::round_and_clamp(t, p);
          return Clamped<Rule, V>{v, {}};
        } else {
          return clamped<Rule>(Rule::round_quotient(t, p), p);
        }
      };
      const V inverse = exact_reciprocals(several.scale);
      if (any_lane(inverse == V{})) {
        for_rows([&](V v, const auto& p, int) FQ_INLINE_LAMBDA { return from_quotient(v / p.scale, p); });
      } else {
        for_rows([&](V v, const auto& p, int r) FQ_INLINE_LAMBDA {
          return from_quotient(v * splat<V>(inverse[r]), p);
        });
      }
    }
  }
  for (; row < last; ++row, x += length, y += length) run_with_one_scale(x, y, length, params, row, mask);
}

template <class Rule> inline constexpr bool has_rows_of_blocks =
    kSame<Rule, Onnx> || kIsGgmlRule<Rule> || kIsFixedFloatRule<Rule>;

template <class T> bool has_short_rows(const FakeQuantizeArgs& a, int64_t begin, int64_t end) {
  const Shape& s = a.shape;
  return kSame<Compute<T>, float> && a.grid.scale_f32 && s.batch == 1 && s.outer == 1 && s.blocks > 1 &&
         s.inner <= 256 && s.inner % kLanesOf<float> == 0 && begin % s.inner == 0 && end % s.inner == 0;
}

// `bits` is where the first element's bit is written, at the start of a byte.
template <class Rule, class T, class Mask>
__attribute__((noinline)) void forward(const FakeQuantizeArgs& a, int64_t begin, int64_t end, uint8_t* bits) {
  Mask mask(bits);
  if constexpr (has_rows_of_blocks<Rule> && kSame<Compute<T>, float>) {
    if (has_short_rows<T>(a, begin, end)) {
      short_rows<Rule, T>(a, begin, end, mask);
      return mask.finish();
    }
  }
  const T* x = static_cast<const T*>(a.x);
  T* y = static_cast<T*>(a.y);
  using C = Compute<T>;
  const GridParams<Rule, Vec<C, kLanesOf<C>>> params(a.grid);
  const GridParams<Rule, Vec<C, 1>> single(a.grid);
  for_each_run(a.shape, begin, end, [&](const Run& run) {
    const T* from = x + run.start;
    T* to = y + run.start;
    if (run.per_element) run_with_scale_per_element(from, to, run.length, params, single, run.parameter, mask);
    else run_with_one_scale(from, to, run.length, params, run.parameter, mask);
  });
  mask.finish();
}

// Expands 64 bits to 64 bytes of 0 or 1.
FQ_INLINE void store_as_bytes(uint64_t bits, uint8_t* out) {
#if defined(__AVX512BW__)
  store_raw(out, _mm512_maskz_set1_epi8(bits, 1));
#elif defined(__AVX2__)
  const __m256i byte_of_lane = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bit_of_lane = _mm256_set1_epi64x(int64_t(0x8040201008040201u));
  for (int half = 0; half < 2; ++half) {
    const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(int(bits >> (32 * half))), byte_of_lane);
    const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit_of_lane), bit_of_lane);
    store_raw(out + 32 * half, _mm256_and_si256(is_set, _mm256_set1_epi8(1)));
  }
#else
  for (int i = 0; i < 8; ++i, bits >>= 8) {
    const uint64_t one_bit_each = (bits & 0xFF) * 0x0101010101010101u & 0x8040201008040201u;
    store_raw(out + 8 * i, (one_bit_each + 0x7F7F7F7F7F7F7F7Fu) >> 7 & 0x0101010101010101u);
  }
#endif
}

// A mask of bytes. Only kernels for packed masks are compiled: their bits are expanded, some elements at a time.
template <class Rule, class T> void forward_with_bytes(const FakeQuantizeArgs& a, int64_t begin, int64_t end) {
  constexpr int64_t kElements = 4096;
  uint8_t bits[kElements / 8];
  for (int64_t start = begin; start < end; start += kElements) {
    const int64_t n = end - start < kElements ? end - start : kElements;
    forward<Rule, T, PackedMask>(a, start, start + n, bits);
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) store_as_bytes(load_raw<uint64_t>(bits + i / 8), a.mask + start + i);
    for (; i < n; ++i) a.mask[start + i] = bits[i / 8] >> (i % 8) & 1;
  }
}

template <class Rule, class T> void forward_with_mask(const FakeQuantizeArgs& a, int64_t begin, int64_t end) {
  switch (a.mask_kind) {
    case MaskKind::none: return forward<Rule, T, NoMask>(a, begin, end, nullptr);
    case MaskKind::packed: return forward<Rule, T, PackedMask>(a, begin, end, a.mask + begin / 8);
    case MaskKind::bytes: return forward_with_bytes<Rule, T>(a, begin, end);
  }
}

// --- backward ------------------------------------------------------------------------------------

// Returns a vector with all-ones in lane i if bit i is set, otherwise 0.
template <class C, int N> FQ_INLINE auto lanes_of_bits(uint32_t bits) {
  using U = Bits<Vec<C, N>>;
  U select{};
  for (int i = 0; i < N; ++i) select[i] = Elem<U>(1) << i;
  const U spread = (U{} + Elem<U>(bits)) & select;
  return spread == select;
}

template <bool Multiply, int N, class T>
FQ_INLINE void backward_step(const T* dy, uint32_t bits, T* dx) {
  using C = Compute<T>;
  using V = Vec<C, N>;
  const auto keep = lanes_of_bits<C, N>(bits);
  const V v = load<N>(dy);
  if constexpr (Multiply) {
    store<T, N>(dx, v * (keep ? splat<V>(C(1)) : V{}));
  } else {
    store<T, N>(dx, bit_cast<V>(bit_cast<Bits<V>>(v) & bit_cast<Bits<V>>(keep)));
  }
}

// Packs eight bytes of 0 or 1 into eight bits.
FQ_INLINE uint32_t bytes_to_bits(const uint8_t* bytes) {
  uint64_t b;
  __builtin_memcpy(&b, bytes, 8);
  return uint32_t((b & 0x0101010101010101u) * 0x0102040810204080u >> 56);
}

template <bool Multiply, bool Packed, class T>
void backward(const MaskBackwardArgs& a, int64_t begin, int64_t end) {
  constexpr int N = kLanesOf<Compute<T>>;
  const T* dy = static_cast<const T*>(a.dy);
  T* dx = static_cast<T*>(a.dx);
  // Sixteen elements at a time on every target: two bytes of a packed mask.
  int64_t i = begin;
  for (; i + 16 <= end; i += 16) {
    uint32_t bits;
    if constexpr (Packed) bits = a.mask[i / 8] | uint32_t(a.mask[i / 8 + 1]) << 8;
    else bits = bytes_to_bits(a.mask + i) | bytes_to_bits(a.mask + i + 8) << 8;
#pragma GCC unroll 8
    for (int k = 0; k < 16; k += N) backward_step<Multiply, N>(dy + i + k, bits >> k & ((1u << N) - 1), dx + i + k);
  }
  for (; i < end; ++i) {
    const uint32_t bit = Packed ? a.mask[i / 8] >> (i % 8) & 1 : a.mask[i] & 1;
    backward_step<Multiply, 1>(dy + i, bit, dx + i);
  }
}

}  // namespace

void fake_quantize(const FakeQuantizeArgs& a, int64_t begin, int64_t end) {
  with_dtype(a.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    with_rule(a.grid.numerics, [&](auto rule) {
      // One kernel for all float formats, or one for each.
      constexpr bool kAnyFormat = kCompilesFast && kIsFloatRule<decltype(rule)>;
      if constexpr (kAnyFormat) forward_with_mask<FloatRule, T>(a, begin, end);
      else forward_with_mask<decltype(rule), T>(a, begin, end);
    });
  });
}

void mask_backward(const MaskBackwardArgs& a, int64_t begin, int64_t end) {
  with_dtype(a.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    const bool packed = a.mask_kind == MaskKind::packed;
    if (a.multiply) packed ? backward<true, true, T>(a, begin, end) : backward<true, false, T>(a, begin, end);
    else packed ? backward<false, true, T>(a, begin, end) : backward<false, false, T>(a, begin, end);
  });
}

}  // namespace fakequant::FQ_TARGET
