// Runs every kernel with every dtype, every rule and difficult shapes on every instruction set this CPU supports. All
// targets must give the same bytes, with any number of threads.
//
// With --digest it prints one line per case, of the best target on one thread, so that the output of two machines, or of
// an emulator, can be compared with diff. Equality with the reference and with torch is tested from Python.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core.h"
#include "formats.h"
#include "parallel.h"

using namespace fakequant;

namespace {

struct Random {
  uint64_t state = 0x9E3779B97F4A7C15u;
  uint64_t next() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
  }
  double uniform() { return double(next() >> 11) * 0x1p-53; }
};

// Returns a random special value, tie, float next to a tie, or ordinary value.
float hostile(Random& rng) {
  static const float kSpecial[] = {0.0f, -0.0f, 1e-45f, -1e-40f, 3.4e38f, -3.4e38f, 9.3e18f, -9.3e18f,
                                   std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                                   std::numeric_limits<float>::quiet_NaN()};
  const uint64_t kind = rng.next() % 8;
  if (kind == 0) return kSpecial[rng.next() % 11];
  const float tie = (float(int(rng.next() % 600) - 300) + 0.5f) * 0.1f;
  if (kind <= 3) {
    uint32_t bits;
    std::memcpy(&bits, &tie, 4);
    bits += uint32_t(rng.next() % 5) - 2;
    float near;
    std::memcpy(&near, &bits, 4);
    return near;
  }
  return float(rng.uniform() * 60 - 30);
}

uint16_t to_bf16(float v) {
  uint32_t u;
  std::memcpy(&u, &v, 4);
  return uint16_t(v != v ? 0x7FC0 : u >> 16);
}

// Returns random half-precision bits with the sign of v, which include subnormals and infinities; NaN for NaN.
uint16_t to_f16(float v, Random& rng) {
  if (v != v) return 0x7E00;
  return rng.next() % 4 ? uint16_t(rng.next() % 0x7C01) | uint16_t(v < 0) << 15 : uint16_t(v < 0) << 15;
}

std::vector<uint8_t> hostile_array(DType d, int64_t n, Random& rng) {
  std::vector<uint8_t> data(size_t(n * bytes_of(d)));
  for (int64_t i = 0; i < n; ++i) {
    const float v = hostile(rng);
    uint8_t* p = data.data() + i * bytes_of(d);
    if (d == DType::f32) std::memcpy(p, &v, 4);
    if (d == DType::f64) {
      const double w = double(v) * (1 + double(rng.next() % 3) * 0x1p-52);
      std::memcpy(p, &w, 8);
    }
    if (d == DType::bf16) { const uint16_t h = to_bf16(v); std::memcpy(p, &h, 2); }
    if (d == DType::f16) { const uint16_t h = to_f16(v, rng); std::memcpy(p, &h, 2); }
  }
  return data;
}

// FNV-1a hash. Payloads and signs of NaN differ between CPUs and are not part of the contract, so every NaN hashes
// alike.
struct Digest {
  uint64_t hash = 1469598103934665603u;
  void add(const void* data, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) hash = (hash ^ static_cast<const uint8_t*>(data)[i]) * 1099511628211u;
  }
  void add_floats(DType d, const void* data, int64_t n) {
    const uint8_t* p = static_cast<const uint8_t*>(data);
    for (int64_t i = 0; i < n; ++i, p += bytes_of(d)) {
      bool nan = false;
      if (d == DType::f64) { double v; std::memcpy(&v, p, 8); nan = v != v; }
      if (d == DType::f32) { float v; std::memcpy(&v, p, 4); nan = v != v; }
      if (bytes_of(d) == 2) {
        uint16_t h;
        std::memcpy(&h, p, 2);
        nan = (h & 0x7FFF) > (d == DType::bf16 ? 0x7F80 : 0x7C00);
      }
      if (nan) add("NaN", 3);
      else add(p, size_t(bytes_of(d)));
    }
  }
};

struct Case {
  DType dtype;
  Numerics numerics;
  Shape shape;
  int64_t qmin, qmax;
};

const char* kDTypes[] = {"f32", "f64", "bf16", "f16"};
const char* kNumerics[] = {"torch_tensor", "torch_channel", "torch_channel_float", "torch_channel_half", "onnx", "half_away",
                           "e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e2m3", "e3m2", "e2m1",
                           "q4_0", "q4_1", "q8_0", "tq2_0", "q8_0_input", "q8_k_input", "q4_k", "q6_k"};

struct Inputs {
  std::vector<uint8_t> x, dy;
  std::vector<float> scale, zero_float;
  std::vector<int32_t> zero;
};

Inputs make_inputs(const Case& c) {
  Random rng;
  rng.state += uint64_t(c.shape.size()) * 31 + uint64_t(c.numerics) * 7 + uint64_t(c.dtype);
  Inputs in;
  in.x = hostile_array(c.dtype, c.shape.size(), rng);
  in.dy = hostile_array(c.dtype, c.shape.size(), rng);
  static const float kScales[] = {0.1f, 0.05f, 1.0f, 0.3f, 1e-3f, 1e-42f, 1e38f, 7.0f};
  for (int64_t i = 0; i < c.shape.parameters(); ++i) {
    in.scale.push_back(kScales[rng.next() % 8]);
    in.zero.push_back(int32_t(c.qmin + int64_t(rng.next() % uint64_t(c.qmax - c.qmin + 1))));
    in.zero_float.push_back(float(in.zero.back()) + float(rng.next() % 3) * 0.25f);
  }
  return in;
}

Grid make_grid(const Case& c, const Inputs& in, bool integer_zero) {
  Grid g;
  g.numerics = c.numerics;
  g.qmin = c.qmin;
  g.qmax = c.qmax;
  g.scale_f32 = in.scale.data();
  if (is_float_format(c.numerics)) return g;
  if (is_ggml(c.numerics)) {
    if (has_offset(c.numerics)) g.zero_f32 = in.zero_float.data();
    return g;
  }
  const bool is_float = c.numerics == Numerics::torch_channel_float || c.numerics == Numerics::torch_channel_half;
  if (is_float && !integer_zero) g.zero_f32 = in.zero_float.data();
  else g.zero_i32 = in.zero.data();
  return g;
}

struct Named { std::string op; uint64_t hash; };

// What surrounds integer products. The array is a matrix with rows of `inner` values, which are on a grid.
uint64_t integer_products(const Shape& shape) {
  Digest d;
  const int64_t columns = shape.inner, rows = shape.size() / columns, n = shape.size();
  Random rng;
  std::vector<float> scale(static_cast<size_t>(rows)), x(static_cast<size_t>(n)), levels(x), y(x),
      column_scale(static_cast<size_t>(columns), 0.3f);
  std::vector<float> bias(static_cast<size_t>(std::max(rows, columns)));
  std::vector<double> codes_of_bias(bias.size()), doubles(static_cast<size_t>(n));
  std::vector<int32_t> zero(static_cast<size_t>(rows)), totals(zero), magnitudes(zero), row_totals(zero),
      column_zero(static_cast<size_t>(columns)), column_totals(column_zero), sums(static_cast<size_t>(n));
  std::vector<int8_t> codes(static_cast<size_t>(n));
  for (auto& v : scale) v = float(rng.uniform()) + 0.01f;
  for (auto& v : column_scale) v = float(rng.uniform()) + 0.01f;
  for (auto& v : bias) v = float(rng.uniform()) - 0.5f;
  for (auto& v : codes_of_bias) v = double(int64_t(rng.next() % (1u << 30)));
  for (auto& v : zero) v = int32_t(rng.next() % 256);
  for (auto& v : column_zero) v = int32_t(rng.next() % 256) - 128;
  for (auto& v : column_totals) v = int32_t(rng.next() % 9999) - 5000;
  // Not those of encode_levels, which writes only some, as its threads happen to, where it finds no levels.
  for (auto& v : row_totals) v = int32_t(rng.next() % 9999) - 5000;
  for (auto& v : sums) v = int32_t(rng.next() % (1u << 30)) - (1 << 29);
  for (bool per_row : {false, true}) {
    for (int64_t i = 0; i < n; ++i) {
      const size_t k = per_row ? size_t(i / columns) : 0;
      x[size_t(i)] = float(int32_t(rng.next() % 256) - zero[k]) * scale[k];
    }
    for (bool off_grid : {false, true}) {
      if (off_grid) x[size_t(n / 2)] *= 1.001f;
      for (bool as_codes : {false, true}) {
        const EncodeLevelsArgs encode{x.data(),
                                      rows,
                                      columns,
                                      per_row ? rows : 1,
                                      scale.data(),
                                      zero.data(),
                                      0,
                                      255,
                                      128,
                                      as_codes ? codes.data() : nullptr,
                                      as_codes ? nullptr : levels.data(),
                                      totals.data(),
                                      magnitudes.data()};
        const int reason = encode_levels(encode);
        d.add(&reason, sizeof reason);
        if (reason) continue;
        if (as_codes)
          d.add(codes.data(), codes.size());
        else
          d.add(levels.data(), levels.size() * 4);
        d.add(totals.data(), totals.size() * 4);
        d.add(magnitudes.data(), magnitudes.size() * 4);
      }
    }
    for (SumKind kind : {SumKind::codes, SumKind::i32, SumKind::f32, SumKind::f64}) {
      for (int with = 0; with < 3; ++with) {
        std::vector<float> floats(sums.begin(), sums.end());
        doubles.assign(sums.begin(), sums.end());
        const void* given = kind == SumKind::f32   ? floats.data()
                            : kind == SumKind::f64 ? (const void*)doubles.data()
                                                   : sums.data();
        scale_sums({kind, rows, columns, 77, given, y.data(), per_row ? rows : 1, per_row ? columns : 1, scale.data(),
                    column_scale.data(), zero.data(), column_zero.data(), 128, 0, row_totals.data(), column_totals.data(),
                    with == 1 ? bias.data() : nullptr, with == 2 ? codes_of_bias.data() : nullptr, 8.0});
        d.add_floats(DType::f32, y.data(), n);
        if (kind < SumKind::f32) continue;
        for (bool last : {false, true}) {  // as many channels as rows, or as columns
          scale_planes({kind, 1, last ? columns : rows, last ? rows : columns, last, given, y.data(),
                        per_row ? (last ? columns : rows) : 1, &scale[0], last ? column_scale.data() : scale.data(),
                        with == 1 ? bias.data() : nullptr, with == 2 ? codes_of_bias.data() : nullptr, 8.0});
          d.add_floats(DType::f32, y.data(), n);
        }
      }
    }
  }
  return d.hash;
}

// Returns a bfloat16 next to v, or up to two away.
uint16_t near_bf16(float v, Random& rng) { return uint16_t(to_bf16(v) + int(rng.next() % 5) - 2); }

// Blocks in bfloat16 with values at and next to the ties of e2m1, under scales of all kinds: powers of two, and those of
// which a tie is almost a bfloat16. On the baseline they are divided by their scales.
uint64_t e2m1_blocks(int64_t length) {
  static const float kTies[] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f, 7.0f};
  Digest d;
  Random rng;
  const int64_t blocks = 1 << 12, n = blocks * length;
  std::vector<float> scale(static_cast<size_t>(blocks));
  std::vector<uint16_t> x(static_cast<size_t>(n)), y(x);
  std::vector<uint8_t> bits(static_cast<size_t>(n) / 8);
  for (int64_t b = 0; b < blocks; ++b) {
    // A set of blocks with a scale that integers cannot deal with is divided everywhere.
    const uint64_t field = b / 64 % 8 == 7 ? rng.next() % 255 : 28 + rng.next() % 199;
    const uint64_t kind = b / 32 % 4 == 3 ? 0 : rng.next() % 3;  // sets of only powers of two have a kernel of their own
    const uint32_t mantissa = uint32_t(rng.next()) & (kind == 0 ? 0u : kind == 1 ? 0x7FFFFFu : 0x7F0000u);
    uint32_t word = uint32_t(field) << 23 | mantissa;
    float s;
    std::memcpy(&s, &word, 4);
    if (kind == 2) {  // so that a tie is next to a bfloat16
      s /= kTies[rng.next() % 8];
      std::memcpy(&word, &s, 4);
      word += uint32_t(rng.next() % 5) - 2;
      std::memcpy(&s, &word, 4);
    }
    scale[size_t(b)] = s;
    for (int64_t i = 0; i < length; ++i) {
      static const uint16_t kSpecial[] = {0x0000, 0x0001, 0x7F7F, 0x7F80, 0x7FC0};
      const uint64_t k = rng.next() % 64;
      const uint16_t v = k < 5 ? kSpecial[k] : near_bf16(s * kTies[k % 8], rng);
      x[size_t(b * length + i)] = uint16_t(v ^ (rng.next() & 1) << 15);
    }
  }
  Grid g;
  g.numerics = Numerics::e2m1;
  g.qmax = 15;
  g.scale_f32 = scale.data();
  for (MaskKind kind : {MaskKind::packed, MaskKind::none}) {
    fake_quantize({DType::bf16, {1, 1, blocks, length}, g, x.data(), y.data(), kind,
                   kind == MaskKind::none ? nullptr : bits.data()});
    d.add_floats(DType::bf16, y.data(), n);
    d.add(bits.data(), bits.size());
  }
  return d.hash;
}

// Returns a scale for which a level times it is a bfloat16, almost one, or halfway between two.
float scale_near_bf16(uint64_t kind, Random& rng) {
  const uint32_t mantissa = uint32_t(rng.next()) & (kind == 2 ? 0x7F8000u : kind == 3 ? 0 : 0x7F0000u);
  const uint32_t word = uint32_t(rng.next() % 250 + 1) << 23 | mantissa;
  float s;
  std::memcpy(&s, &word, 4);
  if (kind != 1) return s;
  // A number at a tie, which the product with the reciprocal rounds to the other side.
  const float number = s;
  for (int i = 0; i < 100; ++i) {
    s = number / (float(rng.next() % 100) + 0.5f);
    if (std::nearbyintf(number * (1 / s)) != std::nearbyintf(number / s)) break;
  }
  return s;
}

// All bfloat16 numbers, or many near ties, with integer codes and one scale or one for each row. The baseline divides.
uint64_t bf16_integers() {
  static const int64_t kRanges[][2] = {{-128, 127}, {0, 255}, {-8, 7}};
  Digest d;
  Random rng;
  const int64_t n = 1 << 16;
  std::vector<uint16_t> x(static_cast<size_t>(n)), y(x);
  std::vector<uint8_t> bits(static_cast<size_t>(n) / 8);
  std::vector<float> scale(static_cast<size_t>(n / 32));
  std::vector<int32_t> zero(scale.size());
  for (int64_t length : {n, int64_t(32), int64_t(48), int64_t(128)}) {
    for (int round = 0; round < 120; ++round) {
      Grid g;
      g.numerics = round % 5 || length < n ? Numerics::onnx : Numerics::torch_tensor;
      g.qmin = kRanges[round % 3][0];
      g.qmax = kRanges[round % 3][1];
      g.scale_f32 = scale.data();
      g.zero_i32 = zero.data();
      const int64_t rows = n / length;
      for (int64_t i = 0; i < rows * length; ++i) {
        float& s = scale[size_t(i / length)];
        if (i % length == 0) {
          // Most sets of rows have only scales that integers can deal with.
          do s = scale_near_bf16(uint64_t(round) % 4, rng);
          while ((length < n ? i / 256 : round) % 8 != 0 && !(s >= 0x1p-60f && s <= 0x1p60f));
          zero[size_t(i / length)] = int32_t(g.qmin + int64_t(rng.next() % uint64_t(g.qmax - g.qmin + 1)));
        }
        uint16_t v = uint16_t(i * 40503);  // all, without an order
        if ((round / 8 % 2 || length < n) && rng.next() % 8) {
          v = uint16_t(near_bf16(s * (float(rng.next() % 130) + 0.5f), rng) ^ (rng.next() & 1) << 15);
        }
        const bool keep_nan = round / 4 % 2 && i % 4096 < 64;
        x[size_t(i)] = (v & 0x7FFF) > 0x7F80 && !keep_nan ? uint16_t(v & 0xBFFF) : v;
      }
      fake_quantize({DType::bf16, {1, 1, rows, length}, g, x.data(), y.data(), MaskKind::packed, bits.data()});
      d.add_floats(DType::bf16, y.data(), rows * length);
      d.add(bits.data(), size_t(rows * length) / 8);
    }
  }
  return d.hash;
}

// The product of a bfloat16 with the reciprocal of a scale, corrected once, is the quotient: for all mantissas, so that
// no data is needed to show it. Returns the number of those for which it is not.
#if defined(__x86_64__)
__attribute__((target("avx2,fma")))
#endif
int64_t wrong_quotients(uint32_t step) {
  int64_t wrong = 0;
  for (uint32_t m = 0; m < 1u << 23; m += step) {
    float s, numbers[128];
    const uint32_t word = 0x3F800000u + m;
    std::memcpy(&s, &word, 4);
    for (uint32_t i = 0; i < 128; ++i) numbers[i] = 1 + float(i) / 128;
    const float inverse = 1 / s;
    int32_t found = 0;
    for (int i = 0; i < 128; ++i) {
      const float q = numbers[i] * inverse, corrected = __builtin_fmaf(__builtin_fmaf(-q, s, numbers[i]), inverse, q);
      found += corrected != numbers[i] / s;
    }
    wrong += found;
  }
  return wrong;
}

std::vector<Named> run_case(const Case& c) {
  const Inputs in = make_inputs(c);
  const int64_t n = c.shape.size(), parameters = c.shape.parameters();
  std::vector<Named> results;
  std::vector<uint8_t> y(size_t(n * bytes_of(c.dtype))), bits(size_t(n + 7) / 8), bytes(static_cast<size_t>(n));
  const Grid g = make_grid(c, in, false);
  {
    Digest d;
    fake_quantize({c.dtype, c.shape, g, in.x.data(), y.data(), MaskKind::packed, bits.data()});
    d.add_floats(c.dtype, y.data(), n);
    d.add(bits.data(), bits.size());
    fake_quantize({c.dtype, c.shape, g, in.x.data(), y.data(), MaskKind::bytes, bytes.data()});
    d.add_floats(c.dtype, y.data(), n);
    for (int64_t i = 0; i < n; ++i) {
      if (bytes[size_t(i)] != (bits[size_t(i / 8)] >> (i % 8) & 1)) {
        std::fprintf(stderr, "packed and byte mask differ at %lld\n", (long long)i);
        std::exit(1);
      }
    }
    fake_quantize({c.dtype, c.shape, g, in.x.data(), y.data(), MaskKind::none, nullptr});
    d.add_floats(c.dtype, y.data(), n);
    results.push_back({"fake_quantize", d.hash});
  }
  {
    Digest d;
    for (bool multiply : {false, true}) {
      mask_backward({c.dtype, n, MaskKind::packed, multiply, in.dy.data(), bits.data(), y.data()});
      d.add_floats(c.dtype, y.data(), n);
      mask_backward({c.dtype, n, MaskKind::bytes, multiply, in.dy.data(), bytes.data(), y.data()});
      d.add_floats(c.dtype, y.data(), n);
    }
    results.push_back({"mask_backward", d.hash});
  }
  if (c.numerics != Numerics::q8_0_input && c.numerics != Numerics::q8_k_input) {  // these are not learned
    Digest d;
    std::vector<double> ds(static_cast<size_t>(parameters)), dz(static_cast<size_t>(parameters));
    learned_backward({c.dtype, c.dtype, c.shape, make_grid(c, in, true), 0.5, in.dy.data(), in.x.data(), y.data(),
                      ds.data(), dz.data()});
    d.add_floats(c.dtype, y.data(), n);
    d.add_floats(DType::f64, ds.data(), parameters);
    d.add_floats(DType::f64, dz.data(), parameters);
    results.push_back({"learned_backward", d.hash});
  }
  {
    Digest d;
    const bool is_signed = c.qmin < 0;
    const int float_bits = is_float_format(c.numerics) ? float_format(c.numerics).bits : 0;
    std::vector<CodeType> codes{float_bits ? CodeType::u8 : is_signed ? CodeType::i32 : CodeType::u32};
    if (is_ggml(c.numerics)) codes.clear();  // of 8 bits or less
    if (float_bits == 6) codes.push_back(CodeType::u6x4);
    if (float_bits == 4) codes.push_back(CodeType::u4x2);
    if (c.qmax <= 127) codes.push_back(is_signed ? CodeType::i8 : CodeType::u8);
    if (c.qmax <= 7 && c.qmin >= -8) codes.push_back(is_signed ? CodeType::i4x2 : CodeType::u4x2);
    std::vector<uint8_t> q(size_t(n) * 4);
    for (CodeType code : codes) {
      std::fill(q.begin(), q.end(), 0);
      quantize({c.dtype, code, c.shape, make_grid(c, in, false), in.x.data(), q.data()});
      d.add(q.data(), q.size());
      dequantize({c.dtype, code, c.shape, make_grid(c, in, true), q.data(), y.data()});
      d.add_floats(c.dtype, y.data(), n);
    }
    results.push_back({"quantize", d.hash});
  }
  if (c.numerics >= Numerics::onnx) {
    Digest d;
    std::vector<float> lo(static_cast<size_t>(parameters)), hi(lo), scale(lo);
    std::vector<int32_t> zero(static_cast<size_t>(parameters));
    for (ScaleRule rule : {ScaleRule::floor, ScaleRule::ceil, ScaleRule::even, ScaleRule::rceil, ScaleRule::e4m3fn,
                           ScaleRule::e4m3fn_divided, ScaleRule::float16, ScaleRule::bfloat16, ScaleRule::even_e2m1,
                           ScaleRule::q4_0, ScaleRule::q4_1, ScaleRule::q8_0, ScaleRule::q8_0_input,
                           ScaleRule::q8_k_input, ScaleRule::q4_k, ScaleRule::q6_k}) {
      std::fill(bits.begin(), bits.end(), 0);
      const ObserveArgs o{RangeRule::own, RangeUpdate::dynamic, true, true, true, rule, 0, 1,
                          lo.data(), hi.data(), scale.data(), zero.data()};
      const ObserveResult seen =
          observe_fake_quantize(o, {c.dtype, c.shape, g, in.x.data(), y.data(), MaskKind::packed, bits.data()});
      d.add(&seen.nan_count, sizeof seen.nan_count);
      d.add_floats(c.dtype, y.data(), n);
      d.add(bits.data(), bits.size());
      d.add(scale.data(), scale.size() * 4);
      d.add(lo.data(), lo.size() * 4);
    }
    results.push_back({"observe_blocks", d.hash});
  }
  {
    Digest d;
    std::vector<double> range(size_t(2 * parameters));
    std::vector<int64_t> count(size_t(3 * parameters));
    min_max({c.dtype, c.shape, in.x.data(), range.data(), range.data() + parameters, count.data(),
             count.data() + parameters, count.data() + 2 * parameters});
    d.add(range.data(), range.size() * 8);
    d.add(count.data(), count.size() * 8);
    results.push_back({"min_max", d.hash});
  }
  if (c.dtype == DType::f32 && c.numerics == Numerics::onnx) {
    results.push_back({"integer_products", integer_products(c.shape)});
  }
  if (c.dtype == DType::bf16 && c.numerics == Numerics::e2m1 && c.shape.inner <= 32 && c.shape.inner % 8 == 0 &&
      c.shape.size() == c.shape.inner) {
    results.push_back({"e2m1_blocks", e2m1_blocks(c.shape.inner)});
  }
  if (c.dtype == DType::bf16 && c.numerics == Numerics::onnx && c.shape.size() == 1) {
    results.push_back({"bf16_integers", bf16_integers()});
  }
  return results;
}

std::vector<Case> all_cases() {
  std::vector<Shape> shapes;
  for (int64_t n : {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 257, 5000}) shapes.push_back({1, 1, 1, n});
  shapes.insert(shapes.end(), {{1, 1, 5, 9}, {1, 3, 4, 17}, {1, 7, 33, 1}, {1, 40, 13, 1}, {3, 4, 5, 1},
                               {1, 1, 64, 32}, {1, 9, 3, 100}, {1, 2, 70000, 1}, {1, 1, 1, 140000}, {1, 300, 2, 150}});
  std::vector<Case> cases;
  for (int dtype = 0; dtype < 4; ++dtype) {
    for (int numerics = int(Numerics::e4m3fn); numerics <= int(Numerics::e2m1); ++numerics) {
      const int64_t codes = int64_t(1) << float_format(Numerics(numerics)).bits;
      for (const Shape& shape : shapes) cases.push_back({DType(dtype), Numerics(numerics), shape, 0, codes - 1});
    }
    for (int numerics = int(Numerics::q4_0); numerics <= int(Numerics::q6_k); ++numerics) {
      const int64_t end = Numerics(numerics) == Numerics::tq2_0 ? 1 : Numerics(numerics) <= Numerics::q4_1 ? 7 : 127;
      const bool is_unsigned = has_offset(Numerics(numerics));
      for (const Shape& shape : shapes) {
        cases.push_back({DType(dtype), Numerics(numerics), shape, is_unsigned ? 0 : -end - (end == 7), is_unsigned ? 15 : end});
      }
    }
    for (int numerics = 0; numerics <= int(Numerics::half_away); ++numerics) {
      for (const Shape& shape : shapes) cases.push_back({DType(dtype), Numerics(numerics), shape, -128, 127});
      for (auto [lo, hi] : {std::pair<int64_t, int64_t>{-8, 7}, {0, 15}, {0, 65535}, {-2147483648LL, 2147483647LL}}) {
        cases.push_back({DType(dtype), Numerics(numerics), {1, 3, 4, 67}, lo, hi});
      }
    }
  }
  return cases;
}

std::string name_of(const Case& c, const std::string& op) {
  char text[200];
  std::snprintf(text, sizeof text, "%s %s %s (%lld, %lld, %lld, %lld) [%lld, %lld]", op.c_str(), kDTypes[int(c.dtype)],
                kNumerics[int(c.numerics)], (long long)c.shape.batch, (long long)c.shape.outer,
                (long long)c.shape.blocks, (long long)c.shape.inner, (long long)c.qmin, (long long)c.qmax);
  return text;
}

}  // namespace

int main(int argc, char** argv) {
  const bool print_digest = argc > 1 && std::string(argv[1]) == "--digest";
  auto targets = supported_targets();
  if (print_digest) targets = {targets.back()};
  const std::vector<int> thread_counts = print_digest ? std::vector{1} : std::vector{1, 3};
  int passed = 0, failed = 0;
  const bool has_fma = targets.back() != "baseline";
  if (has_fma && wrong_quotients(targets.back() == "neon" ? 1013 : 1) != 0) {
    std::fprintf(stderr, "the corrected product of a bfloat16 with a reciprocal is not always the quotient\n");
    ++failed;
  }
  for (const Case& c : all_cases()) {
    std::vector<Named> expected;
    for (const auto& target : targets) {
      select_target(target);
      for (int threads : thread_counts) {
        set_num_threads(threads);
        const auto actual = run_case(c);
        if (expected.empty()) {
          expected = actual;
          continue;
        }
        for (size_t i = 0; i < actual.size(); ++i) {
          const bool same = actual[i].hash == expected[i].hash;
          (same ? passed : failed)++;
          if (!same) {
            std::fprintf(stderr, "%s on %d threads differs from %s: %s\n", target.c_str(), threads, targets[0].c_str(),
                         name_of(c, actual[i].op).c_str());
          }
        }
      }
    }
    if (print_digest) {
      for (const auto& r : expected) std::printf("%016llx %s\n", (unsigned long long)r.hash, name_of(c, r.op).c_str());
    }
  }
  if (!print_digest) {
    std::printf("targets:");
    for (const auto& target : targets) std::printf(" %s", target.c_str());
    std::printf("\n%d passed, %d failed\n", passed, failed);
  }
  return failed ? 1 : 0;
}
