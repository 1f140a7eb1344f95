// The instruction sets compiled into the library. Each has a namespace with one copy of every kernel; dispatch.cc
// selects one at run time.
#pragma once

#include "kernels.h"

#define FQ_DECLARE_KERNELS(target)                                                     \
  namespace target {                                                                   \
  void fake_quantize(const FakeQuantizeArgs&, int64_t begin, int64_t end);             \
  void mask_backward(const MaskBackwardArgs&, int64_t begin, int64_t end);             \
  void quantize(const QuantizeArgs&, int64_t begin, int64_t end);                      \
  void dequantize(const DequantizeArgs&, int64_t begin, int64_t end);                  \
  void learned_backward(const LearnedBackwardArgs&, const Tile&, const LearnedTile&);  \
  void min_max(const MinMaxArgs&, const Tile&, const MinMaxTile&);                     \
  int64_t magnitudes(const MagnitudeArgs&, int64_t begin, int64_t end);                \
  float mirrored(const float* absmax, int64_t n, float* lowest);                       \
  void block_scales(const BlockScaleArgs&);                                            \
  int encode_levels(const EncodeLevelsArgs&, int64_t begin, int64_t end);              \
  void scale_sums(const ScaleSumsArgs&, int64_t begin, int64_t end);                   \
  void scale_planes(const ScalePlanesArgs&, int64_t begin, int64_t end);               \
  }

namespace fakequant {
#if defined(__aarch64__)
FQ_DECLARE_KERNELS(neon)
#elif defined(__x86_64__) || defined(_M_X64)
FQ_DECLARE_KERNELS(baseline)
FQ_DECLARE_KERNELS(avx2)
FQ_DECLARE_KERNELS(avx512)
#else
FQ_DECLARE_KERNELS(baseline)
#endif
}  // namespace fakequant
