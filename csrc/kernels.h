// The interface of the numeric core: enums and plain structs of pointers and sizes, without Python or torch.
//
// Arrays are dense in memory. Callers check arguments; the kernels do not.
//
// One shape serves every granularity. An array of `batch * outer * blocks * inner` elements has one scale and zero
// point per (batch, block):
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
  torch_channel,        // z + rint(x * (1/s)); NaN, infinities and codes beyond int64 -> qmin
  torch_channel_float,  // rint(fma(x, 1/s, z)) with a float32 zero point, value in double
  torch_channel_half,   // rint(z + x * (1/s)) with a float16 zero point, value in double
  onnx,                 // rint(x / s) + z; NaN stays NaN
  half_away,            // round_half_away(x / s + z); NaN stays NaN
  // The nearest value of a float format to x / s, half to even; see formats.h. Codes are bit patterns, z is 0.
  e4m3fn, e5m2, e4m3fnuz, e5m2fnuz, e2m3, e3m2, e2m1,
  // The block types of ggml; see ggml-inl.h. The zero points of q4_1 and q4_k are floats.
  q4_0, q4_1, q8_0, tq2_0, q8_0_input, q8_k_input, q4_k, q6_k,
};

constexpr bool is_ggml(Numerics n) { return n >= Numerics::q4_0; }
constexpr bool has_offset(Numerics n) { return n == Numerics::q4_1 || n == Numerics::q4_k; }

// What scales may be.
enum class ScaleRule : int {
  any,                      // every float32 from eps on
  floor, ceil, even, rceil, // powers of two, chosen by these rules (E8M0 scales)
  e4m3fn,                   // e4m3fn values times one float32 per tensor
  e4m3fn_divided,           // e4m3fn values divided by one float32 per tensor
  float16, bfloat16,        // as `any`, rounded to these formats
  even_e2m1,                // as `even` with the mantissa of e2m1
  q4_0, q4_1, q8_0, tq2_0, q8_0_input, q8_k_input,  // as ggml chooses the scales of these block types
  q4_k, q6_k,               // products of few bits and a float16 per 256 elements; see block_scales.cc
};

constexpr bool is_ggml(ScaleRule rule) { return rule >= ScaleRule::q4_0; }
constexpr bool has_offset(ScaleRule rule) { return rule == ScaleRule::q4_1 || rule == ScaleRule::q4_k; }

enum class MaskKind : int {
  none,
  packed,  // one bit per element, element 8*i + j in bit j of byte i
  bytes,   // one byte per element, 0 or 1
};

// Integer types of codes in memory. i4x2 and u4x2 hold two codes per byte, i2x4 and u2x4 four; u6x4 holds four codes in
// three bytes.
enum class CodeType : int { i8, u8, i16, u16, i32, u32, i4x2, u4x2, i2x4, u2x4, u6x4 };

inline int64_t bytes_of(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }

inline int bits_of(CodeType code) {
  switch (code) {
    case CodeType::i8: case CodeType::u8: return 8;
    case CodeType::i16: case CodeType::u16: return 16;
    case CodeType::i32: case CodeType::u32: return 32;
    case CodeType::i4x2: case CodeType::u4x2: return 4;
    case CodeType::u6x4: return 6;
    default: return 2;
  }
}

struct Shape {
  int64_t batch = 1, outer = 1, blocks = 1, inner = 0;
  int64_t size() const { return batch * outer * blocks * inner; }
  int64_t parameters() const { return batch * blocks; }
};

// The integer grid: shape.parameters() scales and zero points, and one range of codes for all of them.
struct Grid {
  Numerics numerics = Numerics::onnx;
  int64_t qmin = 0, qmax = 0;
  // Exactly one scale pointer is set, and at most one zero-point pointer. Without any, all zero points are 0.
  const float* scale_f32 = nullptr;
  const double* scale_f64 = nullptr;
  const int32_t* zero_i32 = nullptr;
  const int64_t* zero_i64 = nullptr;
  const float* zero_f32 = nullptr;
};

// y = fake_quantize(x). The mask has a 1 for every element inside the range.
struct FakeQuantizeArgs {
  DType dtype;
  Shape shape;
  Grid grid;
  const void* x;
  void* y;
  MaskKind mask_kind;
  uint8_t* mask;  // nullptr if mask_kind is none
};

// dx = the gradient dy where the mask is 1, 0 elsewhere.
struct MaskBackwardArgs {
  DType dtype;
  int64_t size;
  MaskKind mask_kind;  // packed or bytes
  bool multiply;       // dy * mask, as in torch, instead of mask ? dy : 0
  const void* dy;
  const uint8_t* mask;
  void* dx;
};

// Gradients with respect to x, scale and zero point.
struct LearnedBackwardArgs {
  DType dtype;     // of dy and x
  DType dx_dtype;  // equal to dtype; may also be f32 if dtype is a 16-bit type
  Shape shape;
  Grid grid;  // zero points already rounded to integers
  double grad_factor;  // factor of dscale and dzero
  const void* dy;
  const void* x;
  void* dx;
  double* dscale;  // shape.parameters() sums
  double* dzero;   // shape.parameters() sums, or nullptr if not requested
};

// q = clamp(code(x), qmin, qmax), packed if `code` is a packed type.
struct QuantizeArgs {
  DType dtype;
  CodeType code;
  Shape shape;
  Grid grid;
  const void* x;
  void* q;
};

// y = (q - zero point) * scale.
struct DequantizeArgs {
  DType dtype;
  CodeType code;
  Shape shape;
  Grid grid;
  const void* q;
  void* y;
};

// Minimum and maximum of the finite values, and counts of the other values. A block without finite values has
// lo = +inf and hi = -inf.
struct MinMaxArgs {
  DType dtype;
  Shape shape;
  const void* x;
  double* lo;  // this and all following: shape.parameters() elements
  double* hi;
  int64_t* nan_count;
  int64_t* posinf_count;
  int64_t* neginf_count;
};

// The unit of work of kernels that reduce: rows [o0, o1), blocks [k0, k1) and positions [j0, j1) of one batch. Tiles
// depend on the shape alone. The order of additions, and with it every bit of the result, is therefore the same for any
// number of threads.
struct Tile {
  int64_t batch, o0, o1, k0, k1, j0, j1;
};

// The largest finite magnitude per block, or its range. The array is rows * inner elements with one block per row, or, if
// `outer` is not 1, batch * outer * blocks elements with one block per (batch, block).
struct MagnitudeArgs {
  DType dtype;
  Shape shape;  // outer == 1 or inner == 1
  const void* x;
  float* largest;  // shape.parameters() elements; 0 for a block without finite values
  // If not nullptr, the lowest value is written here and the highest to `largest`; 0 and 0 without finite values.
  float* lowest = nullptr;
  // With `lowest`: the range goes from 0 to the first value with the largest magnitude instead.
  bool with_sign = false;
};

// The scales of blocks with these largest magnitudes, by a rule for float formats.
struct BlockScaleArgs {
  ScaleRule rule;
  int64_t n;
  const float* absmax;
  float under;         // the scale of the tensor (e4m3fn), or its divisor (e4m3fn_divided)
  float largest;       // of the grid
  int exponent;        // of `largest`
  int mantissa_bits;   // of the values of the highest binade
  float* scale;
};

// --- integer products (integer_products.cc) -------------------------------------------------------

// Why the values of a matrix have no levels.
inline constexpr int kHasNaN = 1, kOffGrid = 2;

// level = x / scale, an integer from qmin - zero to qmax - zero, for every element of a matrix whose values are on a
// grid. Exactly one of `codes` and `levels` is set. Codes are level + zero - shift.
struct EncodeLevelsArgs {
  const float* x;
  int64_t rows, columns;
  int64_t scales;  // 1, or one per row
  const float* scale;
  const int32_t* zero;  // as many as scales, or nullptr
  int64_t qmin, qmax;
  int32_t shift;
  int8_t* codes;  // may hold unsigned codes, whose bytes are the same
  float* levels;
  int32_t* totals;      // of the codes (or levels) of each row
  int32_t* magnitudes;  // the sum of the magnitudes of the levels of each row
};

// In what sums of products are given: of codes, to be corrected for zero points, or of levels.
enum class SumKind : int { codes, i32, f32, f64 };

// y = sum of products of levels * (x scale * weight scale) + bias, or with the bias as codes at the scale of the sums.
// y may be `sums` itself if they have 32 bits.
struct ScaleSumsArgs {
  SumKind kind;
  int64_t rows, columns, inner;
  const void* sums;
  void* y;
  int64_t x_scales, weight_scales;  // 1, or one per row of x, or per column of the result
  const float *x_scale, *weight_scale;
  // For codes only. Zero points as in EncodeLevelsArgs.
  const int32_t *x_zero, *weight_zero;
  int32_t x_shift, weight_shift;
  const int32_t *x_totals, *weight_totals;
  // At most one of them is set. Codes belong to the scale divided by `code_factor`, a power of two.
  const float* bias;
  const double* bias_codes;
  double code_factor;
};

// The same for a convolution: sums of levels, and a result that has the pixels of a channel next to each other.
struct ScalePlanesArgs {
  SumKind kind;  // f32 or f64
  int64_t images, channels, pixels;
  bool channels_last;  // of the sums. If not, y may be the memory of sums of float32
  const void* sums;
  void* y;
  int64_t weight_scales;  // 1, or one per channel
  const float *x_scale, *weight_scale;
  // As in ScaleSumsArgs.
  const float* bias;
  const double* bias_codes;
  double code_factor;
};

// Results of one tile: one element per block in [k0, k1).
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

// The kernels of one instruction set. Elementwise kernels process the elements [begin, end), where `begin` is a
// multiple of kRangeAlignment, so that no two ranges share a byte of a packed mask or of packed codes.
struct KernelTable {
  const char* name;
  void (*fake_quantize)(const FakeQuantizeArgs&, int64_t begin, int64_t end);
  void (*mask_backward)(const MaskBackwardArgs&, int64_t begin, int64_t end);
  void (*quantize)(const QuantizeArgs&, int64_t begin, int64_t end);
  void (*dequantize)(const DequantizeArgs&, int64_t begin, int64_t end);
  void (*learned_backward)(const LearnedBackwardArgs&, const Tile&, const LearnedTile&);
  void (*min_max)(const MinMaxArgs&, const Tile&, const MinMaxTile&);
  // Processes the parameters [begin, end), which are whole batches if `outer` is not 1. Returns the number of values
  // that are not finite.
  int64_t (*magnitudes)(const MagnitudeArgs&, int64_t begin, int64_t end);
  // Writes the lower ends of the ranges from -absmax to absmax, never -0.0, and returns the largest absmax.
  float (*mirrored)(const float* absmax, int64_t n, float* lowest);
  void (*block_scales)(const BlockScaleArgs&);
  // Process the rows [begin, end). The first returns 0, or a reason why it did not finish.
  int (*encode_levels)(const EncodeLevelsArgs&, int64_t begin, int64_t end);
  void (*scale_sums)(const ScaleSumsArgs&, int64_t begin, int64_t end);
  // Processes the parts [begin, end) of `scale_planes_parts`.
  void (*scale_planes)(const ScalePlanesArgs&, int64_t begin, int64_t end);
};

inline constexpr int64_t kRangeAlignment = 64;

// The parts of a convolution's result: channels of an image, or pixels of all channels if the channels are last.
inline constexpr int64_t kPixelsPerPart = 64;
inline int64_t scale_planes_parts(const ScalePlanesArgs& a) {
  return a.images * (a.channels_last ? (a.pixels + kPixelsPerPart - 1) / kPixelsPerPart : a.channels);
}

// --- observing ------------------------------------------------------------------------------------

enum class RangeRule : int {
  own,          // range of the finite values; choose_qparams
  torch_fused,  // NaN and infinities are part of the range; choose_qparams_fused
};

// How the range of x updates the running range.
enum class RangeUpdate : int {
  moving_average,  // running += averaging_constant * (range - running)
  min_max,         // the union of both
  dynamic,         // the range of x; [0, 0] for a block without finite values
};

// Returns true for scales that are chosen for one block after the other, from a range with two ends.
inline bool is_per_block(ScaleRule rule) {
  return rule == ScaleRule::any || rule == ScaleRule::float16 || rule == ScaleRule::bfloat16;
}

// Updates the running range from x, chooses scale and zero point from it, and fake-quantizes x. The output of
// FakeQuantizeArgs may be nullptr if `quantize` is false.
struct ObserveArgs {
  RangeRule rule;
  RangeUpdate update;
  bool observe;   // update the running range from x
  bool quantize;  // choose parameters and fake-quantize; otherwise y = x, if y is not nullptr
  bool symmetric;
  // Unless is_per_block: `update` is dynamic, and the running range becomes -absmax to absmax. In q4_0, q8_k_input and
  // q6_k it goes from 0 to the first value with the largest magnitude, in q4_1 and q4_k it is the range of the values.
  ScaleRule scale_rule;
  float averaging_constant;
  float eps;
  float* running_min;  // one per parameter; +inf (and -inf for running_max) before the first update
  float* running_max;
  // Written if `quantize`, or if y is nullptr. In the latter case the scale of a block without a range is NaN.
  float* scale;
  int32_t* zero_point;  // floats if has_offset
};

struct ObserveResult {
  int64_t nan_count = 0, posinf_count = 0, neginf_count = 0;
  // Number of blocks without a range. If not 0 (RangeRule::own only), the range, scale and zero_point are as before.
  int64_t unseen = 0;
};

}  // namespace fakequant
