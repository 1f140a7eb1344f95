// Scalar kernels for ranges beyond float32's exact integers. Compiled once, without flags for an instruction set.
#pragma once

#include "kernels.h"

namespace fakequant {

// Bounds and zero points of at most this magnitude, and all their differences, are exact in float32.
inline constexpr int64_t kNarrowLimit = int64_t(1) << 23;

namespace wide {
void fake_quantize(const FakeQuantizeArgs&, int64_t begin, int64_t end);
void quantize(const QuantizeArgs&, int64_t begin, int64_t end);
void dequantize(const DequantizeArgs&, int64_t begin, int64_t end);
void learned_backward(const LearnedBackwardArgs&, const Tile&, const LearnedTile&);
}  // namespace wide

}  // namespace fakequant
