// Observes a range, chooses scale and zero point, and fake-quantizes, in one call.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "core.h"
#include "memory.h"
#include "parallel.h"

namespace fakequant {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kMax = std::numeric_limits<float>::max();

// Copies x to y and sets the whole mask.
void pass_through(const FakeQuantizeArgs& a) {
  const size_t size = size_t(a.shape.size());
  if (size == 0) return;
  std::memcpy(a.y, a.x, size * size_t(bytes_of(a.dtype)));
  if (a.mask_kind == MaskKind::bytes) std::memset(a.mask, 1, size);
  if (a.mask_kind == MaskKind::packed) {
    std::memset(a.mask, 0xFF, size / 8);
    if (size % 8) a.mask[size / 8] = uint8_t((1u << (size % 8)) - 1);
  }
}

// A copy of the running range, so that the caller's is changed only if the whole call succeeds.
struct RunningRange {
  std::vector<float> lo, hi;
};

// moving_average(), but without overflow: value - running may exceed float32 although the average does not.
float finite_average(float running, float value, float c) {
  const float moved = moving_average(running, value, c);
  return std::isfinite(moved) ? moved : float(double(running) + double(c) * (double(value) - double(running)));
}

void update_range(const ObserveArgs& o, float lo, float hi, float& running_min, float& running_max) {
  const auto average = o.rule == RangeRule::own ? finite_average : moving_average;
  switch (o.update) {
    case RangeUpdate::moving_average:
      running_min = average(running_min, lo, o.averaging_constant);
      running_max = average(running_max, hi, o.averaging_constant);
      return;
    case RangeUpdate::min_max:
      running_min = std::min(running_min, lo);
      running_max = std::max(running_max, hi);
      return;
    case RangeUpdate::dynamic:
      running_min = lo;
      running_max = hi;
      return;
  }
}

// Returns the running range after observing x, and adds x's counts of non-finite values to `result`.
RunningRange observed(const ObserveArgs& o, const FakeQuantizeArgs& a, ObserveResult& result) {
  const int64_t n = a.shape.parameters();
  RunningRange r{{o.running_min, o.running_min + n}, {o.running_max, o.running_max + n}};
  if (!o.observe || a.shape.size() == 0) return r;
  std::vector<double> range(size_t(2 * n));
  std::vector<int64_t> count(size_t(3 * n));
  const MinMaxArgs m{a.dtype, a.shape, a.x, range.data(), range.data() + n,
                     count.data(), count.data() + n, count.data() + 2 * n};
  min_max(m);
  for (int64_t i = 0; i < n; ++i) {
    result.nan_count += m.nan_count[i];
    result.posinf_count += m.posinf_count[i];
    result.neginf_count += m.neginf_count[i];
    float lo = float(m.lo[i]), hi = float(m.hi[i]);
    if (o.rule == RangeRule::torch_fused) {
      if (m.posinf_count[i]) hi = kInf;
      if (m.neginf_count[i]) lo = -kInf;
      if (m.nan_count[i]) lo = hi = std::numeric_limits<float>::quiet_NaN();
    } else {
      if (m.lo[i] > m.hi[i]) {  // the block has no finite values
        if (o.update == RangeUpdate::dynamic) r.lo[size_t(i)] = r.hi[size_t(i)] = 0;
        continue;
      }
      // Ranges are stored in float32, and float64 values may exceed it.
      lo = std::clamp(lo, -kMax, kMax);
      hi = std::clamp(hi, -kMax, kMax);
    }
    update_range(o, lo, hi, r.lo[size_t(i)], r.hi[size_t(i)]);
  }
  return r;
}

ObserveResult observe_at_once(const ObserveArgs& o, FakeQuantizeArgs a) {
  ObserveResult result;
  const size_t n = size_t(a.shape.parameters());
  const RunningRange running = observed(o, a, result);
  if (o.quantize && o.rule == RangeRule::own) {
    for (size_t i = 0; i < n; ++i) {
      const float lo = running.lo[i], hi = running.hi[i];
      result.unseen += !(lo <= hi && std::isfinite(lo) && std::isfinite(hi));
    }
    if (result.unseen) return result;
  }
  std::copy_n(running.lo.data(), n, o.running_min);
  std::copy_n(running.hi.data(), n, o.running_max);
  if (!o.quantize && a.y != nullptr) {
    pass_through(a);
    return result;
  }
  for (size_t i = 0; i < n; ++i) {
    const float lo = running.lo[i], hi = running.hi[i];
    if (!o.quantize && !(lo <= hi)) {
      o.scale[i] = std::numeric_limits<float>::quiet_NaN();
      o.zero_point[i] = 0;
      continue;
    }
    const QParam p = o.rule == RangeRule::torch_fused
                         ? choose_qparams_fused(lo, hi, int32_t(a.grid.qmin), int32_t(a.grid.qmax), o.symmetric)
                         : choose_qparams(lo, hi, a.grid, o.symmetric, o.scale_rule, o.eps);
    o.scale[i] = p.scale;
    o.zero_point[i] = p.zero_point;
  }
  if (!o.quantize) return result;
  a.grid.scale_f32 = o.scale;
  a.grid.zero_i32 = o.zero_point;
  fake_quantize(a);
  return result;
}

// Few enough elements to still be in the cache when they are quantized after being observed.
constexpr int64_t kChunkElements = 1 << 14;

// Returns the number of rows per chunk, such that chunks start at a whole byte of a packed mask, or 0 if the array
// cannot or need not be divided into chunks of rows.
int64_t rows_per_chunk(const FakeQuantizeArgs& a) {
  const Shape& s = a.shape;
  if (s.batch != 1 || s.outer != 1) return 0;
  if (s.inner == 0 || s.inner > kChunkElements || s.size() <= 2 * kChunkElements) return 0;
  const int64_t step = a.mask_kind == MaskKind::packed ? kRangeAlignment / std::gcd(s.inner, kRangeAlignment) : 1;
  const int64_t rows = kChunkElements / s.inner / step * step;
  return rows < s.blocks ? rows : 0;
}

// Every row has its own range, so each chunk of rows can be observed and quantized while it is in the cache.
ObserveResult observe_by_rows(const ObserveArgs& o, const FakeQuantizeArgs& a, int64_t rows) {
  const Shape& s = a.shape;
  const int64_t chunks = (s.blocks + rows - 1) / rows;
  // Copies, because nothing may change if a later chunk has a row without a range.
  std::vector<float> lo(o.running_min, o.running_min + s.blocks), hi(o.running_max, o.running_max + s.blocks);
  std::vector<float> scale(size_t(s.blocks));
  std::vector<int32_t> zero_point(size_t(s.blocks));
  std::vector<ObserveResult> results(static_cast<size_t>(chunks));
  prepare_output(a.y, size_t(s.size() * bytes_of(a.dtype)));
  run_tasks(chunks, [&](int64_t c) {
    const int64_t row = c * rows, element = row * s.inner;
    ObserveArgs part = o;
    part.running_min = lo.data() + row;
    part.running_max = hi.data() + row;
    part.scale = scale.data() + row;
    part.zero_point = zero_point.data() + row;
    FakeQuantizeArgs piece = a;
    piece.shape.blocks = std::min(rows, s.blocks - row);
    piece.x = static_cast<const char*>(a.x) + element * bytes_of(a.dtype);
    piece.y = static_cast<char*>(a.y) + element * bytes_of(a.dtype);
    if (a.mask_kind != MaskKind::none) piece.mask += a.mask_kind == MaskKind::packed ? element / 8 : element;
    results[size_t(c)] = observe_at_once(part, piece);
  });
  ObserveResult total;
  for (const ObserveResult& r : results) {
    total.nan_count += r.nan_count;
    total.posinf_count += r.posinf_count;
    total.neginf_count += r.neginf_count;
    total.unseen += r.unseen;
  }
  if (total.unseen == 0) {
    std::copy(lo.begin(), lo.end(), o.running_min);
    std::copy(hi.begin(), hi.end(), o.running_max);
    std::copy(scale.begin(), scale.end(), o.scale);
    std::copy(zero_point.begin(), zero_point.end(), o.zero_point);
  }
  return total;
}

}  // namespace

ObserveResult observe_fake_quantize(const ObserveArgs& o, FakeQuantizeArgs a) {
  if (!is_per_block(o.scale_rule)) return observe_blocks(o, a);
  const int64_t rows = o.observe && o.quantize ? rows_per_chunk(a) : 0;
  return rows > 0 ? observe_by_rows(o, a, rows) : observe_at_once(o, a);
}

}  // namespace fakequant
