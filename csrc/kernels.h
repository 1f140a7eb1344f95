// The whole C++ interface of the numeric core: pointers, sizes and plain structs.
// No Python and no torch; `bindings.cc` is the only file that knows who is calling.
//
// One shape serves every granularity. An array of `batch * outer * blocks * inner` elements, dense
// in memory, has one scale and zero point per (batch, block):
//
//   element (b, o, k, j)  at  ((b * outer + o) * blocks + k) * inner + j   uses parameters  b * blocks + k
//
//   per tensor                        1, 1, 1, n
//   per channel on an axis            1, product before the axis, its length, product after it
//   per token                         1, 1, tokens, features
//   groups of g along the last axis   1, 1, groups, g
//   groups of g along another axis    groups in all dims up to the axis, g, product after it, 1
#pragma once

#include <cstdint>

namespace fakequant {

enum class DType : int { f32, f64, bf16, f16 };

// How an element becomes a code. `z` is the zero point, `s` the scale.
enum class Numerics : int {
  torch_tensor,         // z + rint(x * (1/s)); NaN -> qmin
  torch_channel,        // the same; NaN, infinities and codes beyond int64 -> qmin
  torch_channel_float,  // rint(fma(x, 1/s, z)) with a float32 zero point, value in double
  torch_channel_half,   // rint(z + x * (1/s)) with a float16 zero point, value in double
  onnx,                 // rint(x / s) + z; NaN stays NaN
  half_away,            // round_half_away(x / s + z); NaN stays NaN
};

enum class MaskKind : int {
  none,
  packed,  // one bit per element, element 8*i + j in bit j of byte i
  bytes,   // one byte per element, 0 or 1
};

enum class CodeType : int { i8, u8, i16, u16, i32, u32, i4x2, u4x2, i2x4, u2x4 };

inline int64_t bytes_of(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }

inline int bits_of(CodeType code) {
  switch (code) {
    case CodeType::i8: case CodeType::u8: return 8;
    case CodeType::i16: case CodeType::u16: return 16;
    case CodeType::i32: case CodeType::u32: return 32;
    case CodeType::i4x2: case CodeType::u4x2: return 4;
    default: return 2;
  }
}

struct Shape {
  int64_t batch = 1, outer = 1, blocks = 1, inner = 0;
  int64_t size() const { return batch * outer * blocks * inner; }
  int64_t parameters() const { return batch * blocks; }
};

// The integer grid: one scale and one zero point per parameter, one range for all.
struct Grid {
  Numerics numerics = Numerics::onnx;
  int64_t qmin = 0, qmax = 0;
  // Exactly one of each pair/triple is set; no zero point at all means 0 everywhere.
  const float* scale_f32 = nullptr;
  const double* scale_f64 = nullptr;
  const int32_t* zero_i32 = nullptr;
  const int64_t* zero_i64 = nullptr;
  const float* zero_f32 = nullptr;
};

struct FakeQuantizeArgs {
  DType dtype;
  Shape shape;
  Grid grid;
  const void* x;
  void* y;
  MaskKind mask_kind;
  uint8_t* mask;
};

struct MaskBackwardArgs {
  DType dtype;
  int64_t size;
  MaskKind mask_kind;  // packed or bytes
  bool multiply;       // dY * mask (as torch) instead of mask ? dY : 0
  const void* dy;
  const uint8_t* mask;
  void* dx;
};

struct LearnedBackwardArgs {
  DType dtype;     // of dy and x
  DType dx_dtype;  // equal to dtype, or f32 for the 16-bit types
  Shape shape;
  Grid grid;  // zero points already rounded to integers
  double grad_factor;
  const void* dy;
  const void* x;
  void* dx;
  double* dscale;  // shape.parameters() sums each
  double* dzero;   // nullptr: not requested
};

struct QuantizeArgs {
  DType dtype;
  CodeType code;
  Shape shape;
  Grid grid;
  const void* x;
  void* q;
};

struct DequantizeArgs {
  DType dtype;
  CodeType code;
  Shape shape;
  Grid grid;
  const void* q;
  void* y;
};

// Over the finite values only. A block without any has lo = +inf, hi = -inf.
struct MinMaxArgs {
  DType dtype;
  Shape shape;
  const void* x;
  double* lo;  // shape.parameters() each; float32 values are exact in a double
  double* hi;
  int64_t* nan_count;
  int64_t* posinf_count;
  int64_t* neginf_count;
};

// A tile is the unit of work of the kernels that reduce: rows [o0, o1), blocks [k0, k1) and
// positions [j0, j1) of one batch. How an array is cut into tiles depends on its shape alone, so
// the order of every addition, and with it every bit of the result, is the same for any number of
// threads.
struct Tile {
  int64_t batch, o0, o1, k0, k1, j0, j1;
};

// Results of one tile, one entry per block in [k0, k1).
struct LearnedTile {
  double* dscale;
  double* dzero;
};
struct MinMaxTile {
  double* lo;
  double* hi;
  int64_t* nan_count;
  int64_t* posinf_count;
  int64_t* neginf_count;
};

// The kernels of one instruction set. The elementwise ones take a range of elements that starts at
// a multiple of 64, so that no two ranges share a byte of a packed mask or of packed codes.
struct KernelTable {
  const char* name;
  void (*fake_quantize)(const FakeQuantizeArgs&, int64_t begin, int64_t end);
  void (*mask_backward)(const MaskBackwardArgs&, int64_t begin, int64_t end);
  void (*quantize)(const QuantizeArgs&, int64_t begin, int64_t end);
  void (*dequantize)(const DequantizeArgs&, int64_t begin, int64_t end);
  void (*learned_backward)(const LearnedBackwardArgs&, const Tile&, const LearnedTile&);
  void (*min_max)(const MinMaxArgs&, const Tile&, const MinMaxTile&);
};

inline constexpr int64_t kRangeAlignment = 64;

// --- observing ------------------------------------------------------------------------------------

enum class RangeRule : int {
  own,          // finite values only; parameters by choose_qparams
  torch_fused,  // NaN and infinities enter the statistics; parameters by choose_qparams_fused
};

// How the range of x changes the running one.
enum class RangeUpdate : int {
  moving_average,  // moves towards it by the averaging constant
  min_max,         // holds it and everything before
  dynamic,         // is replaced by it; a block of x without a finite value has the range 0 to 0
};

struct ObserveArgs {
  RangeRule rule;
  RangeUpdate update;
  bool observe;   // update the running range from x
  bool quantize;  // choose parameters from the running range and fake-quantize; else y = x, if there is a y
  bool symmetric;
  float averaging_constant;
  float eps;
  float* running_min;  // one per parameter; +inf / -inf: nothing seen yet
  float* running_max;
  float* scale;  // written if `quantize`, or if there is no y: then NaN where there is no range
  int32_t* zero_point;
};

struct ObserveResult {
  int64_t nan_count = 0, posinf_count = 0, neginf_count = 0;
  // Parameters that have no range yet. If there is any (own rule only), the running range is as it was.
  int64_t unseen = 0;
};

}  // namespace fakequant
