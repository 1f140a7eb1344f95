// Scales of few bits, one per block, which follow the data: the largest magnitude of a block, its scale, and
// fake quantization with it, in one call.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "core.h"
#include "formats.h"
#include "memory.h"
#include "parallel.h"

namespace fakequant {
namespace {

uint32_t bits_of_float(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  return bits;
}

float float_of_bits(uint32_t bits) {
  float v;
  std::memcpy(&v, &bits, 4);
  return v;
}

struct GridEnd {
  float largest;
  int exponent;       // of `largest`
  int mantissa_bits;  // of the values of the highest binade
};

GridEnd grid_end(const Grid& g) {
  if (is_float_format(g.numerics)) {
    const FloatFormat f = float_format(g.numerics);
    return {f.largest, std::ilogb(f.largest), f.mantissa_bits};
  }
  const float largest = float(g.qmax);
  return {largest, std::ilogb(double(g.qmax)), std::ilogb(double(g.qmax))};
}

// Whether the sign of the largest magnitude matters.
bool has_sign(ScaleRule rule) {
  return rule == ScaleRule::q4_0 || rule == ScaleRule::q8_k_input || rule == ScaleRule::q6_k;
}

// Returns a or b without a branch, which would be mispredicted half of the time: signs are random.
float select(bool first, float a, float b) {
  const uint32_t mask = -uint32_t(first);
  return float_of_bits((bits_of_float(a) & mask) | (bits_of_float(b) & ~mask));
}

// Rounds to float16, ties to even, at most its largest value: the sum has as many mantissa bits.
float as_float16(float v) {
  const float a = std::min(std::fabs(v), 65504.0f);
  const float above = std::max(float_of_bits(bits_of_float(a) & 0x7F800000), 0x1p-14f) * 0x1p13f;
  return std::copysign((a + above) - above, v);
}

// Replaces the scales of a super-block by multiples of d, from `lowest` to `highest` times.
void to_multiples(float* scale, int64_t n, float d, float lowest, float highest) {
  for (int64_t i = 0; i < n; ++i) {
    const float times = d == 0 ? 0.0f : std::clamp(std::nearbyint(scale[i] / d), lowest, highest);
    scale[i] = d * (times + 0.0f);  // not -0.0 times
  }
}

// The scales and offsets of K-quants, in super-blocks of 256 elements; see reference_ggml.py.
void k_quant_scales(const float* lo, const float* hi, int64_t n, ScaleRule rule, float* scale, int32_t* zero_point) {
  const int64_t size = rule == ScaleRule::q4_k ? 8 : 16;
  for (int64_t i = 0; i < n; i += size) {
    const int64_t here = std::min(size, n - i);
    float *s = scale + i, offset[16];
    float largest = 0, lowest = 0, deepest = 0;
    for (int64_t k = 0; k < here; ++k) {
      const float l = lo[i + k], h = hi[i + k];
      offset[k] = std::max(0.0f, -l);
      s[k] = rule == ScaleRule::q4_k ? std::min((h + offset[k]) / 15.0f, __FLT_MAX__) : (-l >= h ? l : h) / -32.0f;
      largest = std::max(largest, s[k]);
      lowest = std::min(lowest, s[k]);
      deepest = std::max(deepest, offset[k]);
    }
    if (rule == ScaleRule::q6_k) {
      to_multiples(s, here, as_float16((-lowest >= largest ? lowest : largest) / -128.0f), -128, 127);
      std::fill_n(zero_point + i, here, 0);
      continue;
    }
    to_multiples(s, here, as_float16(largest / 63.0f), 0, 63);
    to_multiples(offset, here, as_float16(deepest / 63.0f), 0, 63);
    for (int64_t k = 0; k < here; ++k) offset[k] = -offset[k];
    std::memcpy(zero_point + i, offset, size_t(here) * sizeof(float));
  }
}

// The scales and offsets of blocks of ggml with these ranges; see reference_ggml.py.
void ggml_scales(const float* lo, const float* hi, int64_t n, ScaleRule rule, float* scale, int32_t* zero_point) {
  if (rule >= ScaleRule::q4_k) return k_quant_scales(lo, hi, n, rule, scale, zero_point);
  const auto for_each = [&](auto&& scale_of) {
    for (int64_t i = 0; i < n; ++i) scale[i] = scale_of(lo[i], hi[i]);
  };
  const auto with_sign = [](float l, float h) { return select(-l >= h, l, h); };
  const auto absmax = [](float l, float h) { return std::max(0.0f, std::max(-l, h)); };
  switch (rule) {
    case ScaleRule::q4_0: for_each([&](float l, float h) { return with_sign(l, h) / -8.0f; }); break;
    case ScaleRule::q4_1: for_each([](float l, float h) { return std::min((h - l) / 15.0f, __FLT_MAX__); }); break;
    case ScaleRule::q8_0: for_each([&](float l, float h) { return absmax(l, h) / 127.0f; }); break;
    case ScaleRule::q8_k_input: for_each(with_sign); break;
    default: for_each(absmax);
  }
  if (rule == ScaleRule::q4_1) std::memcpy(zero_point, lo, size_t(n) * sizeof(float));
  else std::fill_n(zero_point, n, 0);
}

bool has_tensor_scale(ScaleRule rule) { return rule == ScaleRule::e4m3fn || rule == ScaleRule::e4m3fn_divided; }

// The scale of an NVFP4 tensor with this largest magnitude, under which the scales of its blocks are at most 448, or what
// they are divided by.
float tensor_scale(float absmax, ScaleRule rule) {
  if (rule == ScaleRule::e4m3fn_divided) {
    const float divisor = (1.0f / std::max(absmax, __FLT_MIN__)) * 2688.0f;  // as torch divides a number by a tensor
    return std::isinf(divisor) ? 1.0f : divisor;
  }
  const float scale = absmax / 2688.0f;
  return scale == 0 ? 1.0f : scale;
}

// Few enough bytes to still be in the cache when they are quantized after their scales were chosen.
constexpr int64_t kPartBytes = 1 << 14;

// A part of an array with whole blocks.
struct Chunk {
  Shape shape;
  int64_t parameter, element;  // the first
};

// Divides an array into chunks of blocks that are together in memory, each starting at a whole byte of a packed mask.
struct Chunks {
  Shape shape;
  int64_t blocks, size;  // of a unit that cannot be divided: a row, or a batch if blocks are columns
  int64_t units, per_chunk;

  Chunks(const Shape& s, DType dtype, bool has_packed_mask) : shape(s) {
    const bool rows = s.outer == 1;
    blocks = rows ? 1 : s.blocks;
    size = std::max<int64_t>(rows ? s.inner : s.outer * s.blocks * s.inner, 1);
    units = s.parameters() / std::max<int64_t>(blocks, 1);
    const int64_t step = has_packed_mask ? kRangeAlignment / std::gcd(size, kRangeAlignment) : 1;
    per_chunk = std::max(kPartBytes / bytes_of(dtype) / size / step, int64_t(1)) * step;
  }
  int64_t count() const { return (units + per_chunk - 1) / per_chunk; }
  Chunk operator[](int64_t c) const {
    const int64_t first = c * per_chunk, here = std::min(per_chunk, units - first);
    const Shape rows{1, 1, here, shape.inner}, batches{here, shape.outer, blocks, shape.inner};
    return {shape.outer == 1 ? rows : batches, first * blocks, first * size};
  }
};

// Writes the ranges of the blocks of a chunk, 0 to 0 without finite values, and returns the number of values that are
// not finite.
int64_t chunk_min_max(DType dtype, const Chunk& chunk, const void* here, float* lo, float* hi) {
  constexpr double kLimit = std::numeric_limits<float>::max();
  const int64_t n = chunk.shape.parameters();
  std::vector<double> range(size_t(2 * n));
  std::vector<int64_t> count(size_t(3 * n));
  min_max({dtype, chunk.shape, here, range.data(), range.data() + n, count.data(), count.data() + n,
           count.data() + 2 * n});
  for (int64_t i = 0; i < n; ++i) {
    const double low = range[size_t(i)], high = range[size_t(n + i)];
    lo[i] = low > high ? 0.0f : float(std::clamp(low, -kLimit, kLimit));
    hi[i] = low > high ? 0.0f : float(std::clamp(high, -kLimit, kLimit));
  }
  return std::accumulate(count.begin(), count.end(), int64_t(0));
}

struct ChunkRanges {
  int64_t nonfinite;  // number of values
  float largest;      // magnitude, if the ranges are symmetric
};

// Writes the ranges of the blocks of a chunk, as ObserveArgs describes them.
ChunkRanges chunk_ranges(DType dtype, const Chunk& chunk, const void* x, ScaleRule rule, float* running_min,
                         float* running_max) {
  const void* here = static_cast<const char*>(x) + chunk.element * bytes_of(dtype);
  const Shape& s = chunk.shape;
  const int64_t n = s.parameters();
  float *lo = running_min + chunk.parameter, *hi = running_max + chunk.parameter;
  if (s.outer != 1 && s.inner != 1) {  // no group of neighbours has this shape, so signs need no care
    const int64_t nonfinite = chunk_min_max(dtype, chunk, here, lo, hi);
    if (has_offset(rule)) return {nonfinite, 0};
    for (int64_t i = 0; i < n; ++i) hi[i] = std::max({0.0f, -lo[i], hi[i]});
    return {nonfinite, kernels().mirrored(hi, n, lo)};
  }
  if (has_sign(rule) || has_offset(rule)) {
    return {kernels().magnitudes({dtype, s, here, hi, lo, has_sign(rule)}, 0, n), 0};
  }
  const int64_t nonfinite = kernels().magnitudes({dtype, s, here, hi}, 0, n);
  return {nonfinite, kernels().mirrored(hi, n, lo)};
}

void quantize_chunk(FakeQuantizeArgs a, const Chunk& chunk, const float* scale, bool alone) {
  a.shape = chunk.shape;
  a.x = static_cast<const char*>(a.x) + chunk.element * bytes_of(a.dtype);
  a.y = static_cast<char*>(a.y) + chunk.element * bytes_of(a.dtype);
  if (a.mask_kind != MaskKind::none) a.mask += a.mask_kind == MaskKind::packed ? chunk.element / 8 : chunk.element;
  a.grid.scale_f32 = scale + chunk.parameter;
  if (a.grid.zero_f32) a.grid.zero_f32 += chunk.parameter;
  if (alone) fake_quantize(a);  // the only task, so all threads are free
  else fake_quantize_on_one_thread(a);
}

}  // namespace

void block_scales(const float* absmax, int64_t n, ScaleRule rule, const Grid& grid, float under, float* scale) {
  const GridEnd end = grid_end(grid);
  kernels().block_scales({rule, n, absmax, under, end.largest, end.exponent, end.mantissa_bits, scale});
}

void choose_block_scales(const float* lo, const float* hi, int64_t n, ScaleRule rule, const Grid& grid, float* scale,
                         int32_t* zero_point) {
  if (is_ggml(rule)) return ggml_scales(lo, hi, n, rule, scale, zero_point);
  std::fill_n(zero_point, n, 0);
  std::vector<float> absmax(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) absmax[size_t(i)] = std::max({0.0f, -lo[i], hi[i]});  // never -0.0
  const float largest = n ? *std::max_element(absmax.begin(), absmax.end()) : 0.0f;
  block_scales(absmax.data(), n, rule, grid, has_tensor_scale(rule) ? tensor_scale(largest, rule) : 1, scale);
}

ObserveResult observe_blocks(const ObserveArgs& o, FakeQuantizeArgs a) {
  const int64_t n = a.shape.parameters();
  const Chunks chunks(a.shape, a.dtype, a.mask_kind == MaskKind::packed);
  float* absmax = o.running_max;
  std::vector<ChunkRanges> ranges(size_t(chunks.count()));
  if (o.quantize) prepare_output(a.y, size_t(a.shape.size() * bytes_of(a.dtype)));
  const bool at_once = !has_tensor_scale(o.scale_rule);
  if (has_offset(o.scale_rule)) a.grid.zero_f32 = reinterpret_cast<const float*>(o.zero_point);
  else std::fill_n(o.zero_point, n, 0);
  const auto quantize = [&](const Chunk& chunk, float under) {
    const int64_t p = chunk.parameter, count = chunk.shape.parameters();
    if (is_ggml(o.scale_rule)) {
      ggml_scales(o.running_min + p, o.running_max + p, count, o.scale_rule, o.scale + p, o.zero_point + p);
    } else {
      block_scales(absmax + p, count, o.scale_rule, a.grid, under, o.scale + p);
    }
    if (o.quantize) quantize_chunk(a, chunk, o.scale, chunks.count() == 1);
  };
  run_tasks(chunks.count(), [&](int64_t c) {
    ranges[size_t(c)] = chunk_ranges(a.dtype, chunks[c], a.x, o.scale_rule, o.running_min, absmax);
    if (at_once) quantize(chunks[c], 1);
  });
  if (!at_once) {
    float largest = 0;
    for (const ChunkRanges& r : ranges) largest = std::max(largest, r.largest);
    const float under = tensor_scale(largest, o.scale_rule);
    run_tasks(chunks.count(), [&](int64_t c) { quantize(chunks[c], under); });
  }
  ObserveResult result;
  for (const ChunkRanges& r : ranges) result.nan_count += r.nonfinite;
  return result;
}

}  // namespace fakequant
