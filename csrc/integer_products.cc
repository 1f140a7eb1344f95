// What surrounds the integer products of a layer: codes from values on a grid, and results from sums.
//
// Loops are written for the compiler's vectorizer. No order of additions can change an integer.
#include "kernels.h"
#include "simd.h"

namespace fakequant::FQ_TARGET {
namespace {

// Large enough to amortise the checks at the end of a chunk, small enough to stay in the first cache.
constexpr int64_t kChunk = 1024;

// Writes the level of every value, x / scale, as a float or as a code. Adds up the levels and their magnitudes.
template <bool kCodes>
int encode_row(const float* x, int64_t n, float scale, float inverse, float lowest, float highest, float zero,
               int8_t* __restrict codes, float* __restrict levels, int32_t* total, int32_t* magnitude) {
  int32_t off_grid = 0, nan = 0, sum = 0, absolute = 0;
  for (int64_t begin = 0; begin < n; begin += kChunk) {
    const int64_t end = n - begin < kChunk ? n : begin + kChunk;
    for (int64_t i = begin; i < end; ++i) {
      const float value = x[i];
      // Adding and subtracting 1.5 * 2^23 rounds to an integer. x is an integer times the scale, rounded once, so that
      // the product is closer to this integer than to any other.
      float level = (value * inverse + 12582912.0f) - 12582912.0f;
      nan |= value != value;
      off_grid |= (level * scale != value) | (level < lowest) | (level > highest);
      const bool usable = level >= lowest && level <= highest;
      level = usable ? level : 0.0f;
      const int32_t integer = int32_t(level);
      sum += integer;
      absolute += integer < 0 ? -integer : integer;
      if constexpr (kCodes) {
        codes[i] = int8_t(int32_t(level + zero));
      } else {
        levels[i] = level;
      }
    }
    if (off_grid) return nan ? kHasNaN : kOffGrid;
  }
  *total = sum;
  *magnitude = absolute;
  return 0;
}

// y may be the memory of the sums.
template <class T> struct Aliased { typedef T type __attribute__((may_alias)); };

enum class Bias { none, floats, codes };

template <class Sum, bool kCodes, bool kPerColumn, Bias kBias>
void scale_row(const ScaleSumsArgs& a, int64_t row, float x_scale, uint32_t x_zero, uint32_t x_total) {
  const auto* sums = static_cast<const typename Aliased<Sum>::type*>(a.sums) + row * a.columns;
  auto* y = static_cast<typename Aliased<float>::type*>(a.y) + row * a.columns;
  const int64_t columns = a.columns;
  const int32_t *totals = a.weight_totals, *zeros = a.weight_zero;
  const float *scales = a.weight_scale, *bias = a.bias;
  const double *bias_codes = a.bias_codes, factor = a.code_factor;
  const uint32_t shift = uint32_t(a.weight_shift), x_levels = x_total - uint32_t(a.inner) * x_zero;
#pragma GCC ivdep
  for (int64_t n = 0; n < columns; ++n) {
    const int64_t k = kPerColumn ? n : 0;
    Sum sum = sums[n];
    if constexpr (kCodes) {  // subtracts the zero points; unsigned, because a part may overflow where the sum does not
      const uint32_t zero = (zeros ? uint32_t(zeros[k]) : 0) - shift;
      sum = Sum(uint32_t(sum) - x_zero * uint32_t(totals[n]) - zero * x_levels);
    }
    if constexpr (kBias == Bias::codes) {
      // In doubles, which hold sums and codes without rounding. The sum is rounded once.
      const float step = x_scale * (scales[k] / float(factor));
      y[n] = float(double(sum) * factor + bias_codes[n]) * step;
    } else {
      const float value = float(sum) * (x_scale * scales[k]);
      y[n] = kBias == Bias::floats ? value + bias[n] : value;
    }
  }
}

template <class Sum, bool kCodes>
void scale_row(const ScaleSumsArgs& a, int64_t row, float x_scale, uint32_t x_zero, uint32_t x_total) {
  const auto with_bias = [&]<bool kPerColumn>() FQ_INLINE_LAMBDA {
    const auto run = a.bias_codes ? scale_row<Sum, kCodes, kPerColumn, Bias::codes>
                     : a.bias     ? scale_row<Sum, kCodes, kPerColumn, Bias::floats>
                                  : scale_row<Sum, kCodes, kPerColumn, Bias::none>;
    run(a, row, x_scale, x_zero, x_total);
  };
  a.weight_scales > 1 ? with_bias.template operator()<true>() : with_bias.template operator()<false>();
}

// What one channel of a convolution's result is computed with.
template <class Sum, Bias kBias> struct Channel {
  float step, bias;
  double code, factor;

  Channel(const ScalePlanesArgs& a, int64_t channel) : step(0), bias(0), code(0), factor(a.code_factor) {
    const float scale = a.weight_scale[a.weight_scales > 1 ? channel : 0];
    step = kBias == Bias::codes ? *a.x_scale * (scale / float(factor)) : *a.x_scale * scale;
    if (kBias == Bias::floats) bias = a.bias[channel];
    if (kBias == Bias::codes) code = a.bias_codes[channel];
  }
  float operator()(Sum sum) const {
    if constexpr (kBias == Bias::codes) return float(double(sum) * factor + code) * step;
    const float value = float(sum) * step;
    return kBias == Bias::floats ? value + bias : value;
  }
};

template <class Sum, Bias kBias> void scale_planes(const ScalePlanesArgs& a, int64_t begin, int64_t end) {
  const auto* sums = static_cast<const typename Aliased<Sum>::type*>(a.sums);
  auto* y = static_cast<typename Aliased<float>::type*>(a.y);
  if (!a.channels_last) {
    for (int64_t plane = begin; plane < end; ++plane) {
      const Channel<Sum, kBias> channel(a, plane % a.channels);
      const int64_t first = plane * a.pixels;
#pragma GCC ivdep
      for (int64_t p = first; p < first + a.pixels; ++p) y[p] = channel(sums[p]);
    }
    return;
  }
  const int64_t parts = (a.pixels + kPixelsPerPart - 1) / kPixelsPerPart;
  for (int64_t part = begin; part < end; ++part) {
    const int64_t image = part / parts, first = part % parts * kPixelsPerPart;
    const int64_t last = first + kPixelsPerPart < a.pixels ? first + kPixelsPerPart : a.pixels;
    for (int64_t c = 0; c < a.channels; ++c) {
      const Channel<Sum, kBias> channel(a, c);
      const auto* from = sums + image * a.pixels * a.channels + c;
      auto* to = y + (image * a.channels + c) * a.pixels;
#pragma GCC ivdep
      for (int64_t p = first; p < last; ++p) to[p] = channel(from[p * a.channels]);
    }
  }
}

template <class Sum> void scale_planes_of(const ScalePlanesArgs& a, int64_t begin, int64_t end) {
  const auto run = a.bias_codes ? scale_planes<Sum, Bias::codes>
                   : a.bias     ? scale_planes<Sum, Bias::floats>
                                : scale_planes<Sum, Bias::none>;
  run(a, begin, end);
}

}  // namespace

int encode_levels(const EncodeLevelsArgs& a, int64_t begin, int64_t end) {
  int found = 0;
  for (int64_t row = begin; row < end && !found; ++row) {
    const int64_t k = a.scales > 1 ? row : 0;
    const float scale = a.scale[k];
    // Beyond these, the scale, its inverse or a value may be subnormal or infinite.
    if (!(scale >= 0x1p-100f && scale <= 0x1p100f)) return kOffGrid;
    const int32_t zero = a.zero ? a.zero[k] : 0;
    const float lowest = float(a.qmin - zero), highest = float(a.qmax - zero), shifted = float(zero - a.shift);
    const int64_t at = row * a.columns;
    found = a.codes ? encode_row<true>(a.x + at, a.columns, scale, 1.0f / scale, lowest, highest, shifted,
                                       a.codes + at, nullptr, a.totals + row, a.magnitudes + row)
                    : encode_row<false>(a.x + at, a.columns, scale, 1.0f / scale, lowest, highest, shifted, nullptr,
                                        a.levels + at, a.totals + row, a.magnitudes + row);
    // The sum of codes, which are levels plus the shifted zero point.
    if (a.codes) a.totals[row] += int32_t(a.columns) * (zero - a.shift);
  }
  return found;
}

void scale_sums(const ScaleSumsArgs& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t k = a.x_scales > 1 ? row : 0;
    const uint32_t zero = a.x_zero ? uint32_t(a.x_zero[k] - a.x_shift) : uint32_t(-a.x_shift);
    const float scale = a.x_scale[k];
    switch (a.kind) {
      case SumKind::codes: scale_row<int32_t, true>(a, row, scale, zero, uint32_t(a.x_totals[row])); break;
      case SumKind::i32: scale_row<int32_t, false>(a, row, scale, 0, 0); break;
      case SumKind::f32: scale_row<float, false>(a, row, scale, 0, 0); break;
      case SumKind::f64: scale_row<double, false>(a, row, scale, 0, 0); break;
    }
  }
}

void scale_planes(const ScalePlanesArgs& a, int64_t begin, int64_t end) {
  a.kind == SumKind::f64 ? scale_planes_of<double>(a, begin, end) : scale_planes_of<float>(a, begin, end);
}

}  // namespace fakequant::FQ_TARGET
