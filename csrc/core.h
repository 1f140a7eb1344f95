// The kernels of `kernels.h` over whole arrays, on the selected instruction set and on several threads. Arguments are
// not checked; bindings.cc and the Python front ends do that.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace fakequant {

void fake_quantize(const FakeQuantizeArgs&);
// The same on the calling thread alone, for tasks that are themselves parts of a call.
void fake_quantize_on_one_thread(const FakeQuantizeArgs&);
void mask_backward(const MaskBackwardArgs&);
void quantize(const QuantizeArgs&);
void dequantize(const DequantizeArgs&);
void learned_backward(const LearnedBackwardArgs&);
void min_max(const MinMaxArgs&);
// Returns 0, or a reason why the values have no levels; the outputs are then undefined.
int encode_levels(const EncodeLevelsArgs&);
void scale_sums(const ScaleSumsArgs&);
void scale_planes(const ScalePlanesArgs&);

// --- observe, choose parameters, fake-quantize in one call (observe.cc) --------------------------

// The scale and zero-point pointers of the grid are ignored; those of ObserveArgs are used.
ObserveResult observe_fake_quantize(const ObserveArgs&, FakeQuantizeArgs);

// --- scales of few bits (block_scales.cc) --------------------------------------------------------

// Writes the scales of blocks with these largest magnitudes. `under` is the scale of the tensor (e4m3fn only). Of the
// grid, only the numerics and the range are used. `rule` is not `any`.
void block_scales(const float* absmax, int64_t n, ScaleRule rule, const Grid& grid, float under, float* scale);
// Writes the scales and zero points of the blocks of one tensor with these ranges.
void choose_block_scales(const float* lo, const float* hi, int64_t n, ScaleRule rule, const Grid& grid, float* scale,
                         int32_t* zero_point);
// observe_fake_quantize() for a scale rule that is not `any`.
ObserveResult observe_blocks(const ObserveArgs&, FakeQuantizeArgs);

// --- histograms (histogram.cc) -------------------------------------------------------------------

// Counts the finite values of each block in bins of equal width around zero.
struct HistogramArgs {
  Shape shape;
  int64_t half;  // number of bins on each side of zero
  const float* x;
  const float* inverse_width;  // one per parameter
  int64_t* counts;             // 2 * half per parameter, from the lowest bin to the highest; incremented
};

void histogram(const HistogramArgs&);

// --- instruction sets (dispatch.cc) --------------------------------------------------------------

// The kernels of the selected target; by default, of the best one this CPU supports.
const KernelTable& kernels();
// Whether the selected target may use the CPU's instructions for exact products of 8-bit integers (AVX-512 VNNI).
bool has_int8_products();
std::vector<std::string> compiled_targets();
std::vector<std::string> supported_targets();  // the compiled targets that this CPU can run, best last
// Returns false if the target is not compiled in or this CPU cannot run it.
bool select_target(const std::string& name);

// --- quantization parameters (qparams.cc) --------------------------------------------------------

struct QParam {
  float scale;
  int32_t zero_point;
};

// Returns the parameters for an observed range, by the rule of torch's observers. Of the grid, only the numerics and the
// range are used.
QParam choose_qparams(float lo, float hi, const Grid& grid, bool symmetric, ScaleRule rule, float eps);
// Returns the parameters for an observed range, by the different rule of torch's fused moving-average operator.
QParam choose_qparams_fused(float lo, float hi, int32_t qmin, int32_t qmax, bool symmetric);
// Returns running + c * (value - running), or `value` if `running` is infinite, as it is before the first update.
float moving_average(float running, float value, float c);

}  // namespace fakequant
