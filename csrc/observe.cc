// Observe -> choose parameters -> fake-quantize, one call for what is otherwise five.
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core.h"

namespace fakequant {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

size_t bytes_of(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }

void pass_through(const FakeQuantizeArgs& a) {
  const size_t size = size_t(a.shape.size());
  if (size == 0) return;
  std::memcpy(a.y, a.x, size * bytes_of(a.dtype));
  if (a.mask_kind == MaskKind::bytes) std::memset(a.mask, 1, size);
  if (a.mask_kind == MaskKind::packed) {
    std::memset(a.mask, 0xFF, size / 8);
    if (size % 8) a.mask[size / 8] = uint8_t((1u << (size % 8)) - 1);
  }
}

}  // namespace

ObserveResult observe_fake_quantize(const ObserveArgs& o, FakeQuantizeArgs a) {
  ObserveResult result;
  const int64_t n = a.shape.parameters();
  if (o.observe && a.shape.size() > 0) {
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
        // Only infinities of one sign: they are the smallest value as well as the largest.
        if (lo == kInf && hi == kInf) lo = kInf;
        if (lo == -kInf && hi == -kInf) hi = -kInf;
        if (m.nan_count[i]) lo = hi = std::numeric_limits<float>::quiet_NaN();
      } else if (lo > hi) {
        continue;  // nothing finite in this block: nothing to learn
      }
      o.running_min[i] = moving_average(o.running_min[i], lo, o.averaging_constant);
      o.running_max[i] = moving_average(o.running_max[i], hi, o.averaging_constant);
    }
  }
  if (!o.quantize) {
    pass_through(a);
    return result;
  }
  for (int64_t i = 0; i < n; ++i) {
    const float lo = o.running_min[i], hi = o.running_max[i];
    QParam p;
    if (o.rule == RangeRule::torch_fused) {
      p = choose_qparams_fused(lo, hi, int32_t(a.grid.qmin), int32_t(a.grid.qmax), o.symmetric);
    } else if (lo <= hi && std::isfinite(lo) && std::isfinite(hi)) {
      p = choose_qparams(lo, hi, a.grid.qmin, a.grid.qmax, o.symmetric, o.eps);
    } else {
      ++result.unseen;
      continue;
    }
    o.scale[i] = p.scale;
    o.zero_point[i] = p.zero_point;
  }
  if (result.unseen) return result;
  a.grid.scale_f32 = o.scale;
  a.grid.zero_i32 = o.zero_point;
  fake_quantize(a);
  return result;
}

}  // namespace fakequant
