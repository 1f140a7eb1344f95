// What callers use: the kernels of `kernels.h` over whole arrays, on the chosen instruction set and
// on several threads. Nothing here checks its arguments; that is the front ends' work.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace fakequant {

void fake_quantize(const FakeQuantizeArgs&);
void mask_backward(const MaskBackwardArgs&);
void quantize(const QuantizeArgs&);
void dequantize(const DequantizeArgs&);
void learned_backward(const LearnedBackwardArgs&);
void min_max(const MinMaxArgs&);

// --- observe, choose parameters, fake-quantize in one call (observe.cc) --------------------------

// The grid's scale and zero point are taken from ObserveArgs.
ObserveResult observe_fake_quantize(const ObserveArgs&, FakeQuantizeArgs);

// --- histograms (histogram.cc) -------------------------------------------------------------------

struct HistogramArgs {
  Shape shape;
  int64_t half;  // bins for each sign
  const float* x;
  const float* inverse_width;  // one per parameter
  int64_t* counts;             // 2 * half per parameter, from the lowest bin to the highest; added to
};

void histogram(const HistogramArgs&);

// --- instruction sets (dispatch.cc) --------------------------------------------------------------

const KernelTable& kernels();
std::vector<std::string> compiled_targets();
std::vector<std::string> supported_targets();  // compiled in, and this CPU can run them; best last
// False if there is no such target or this CPU cannot run it.
bool select_target(const std::string& name);

// --- quantization parameters (qparams.cc) --------------------------------------------------------

struct QParam {
  float scale;
  int32_t zero_point;
};

// Observed range to parameters, by the rule of torch's observers.
QParam choose_qparams(float lo, float hi, int64_t qmin, int64_t qmax, bool symmetric, float eps);
// The same by the rule of torch's fused moving-average operator, which is another one.
QParam choose_qparams_fused(float lo, float hi, int32_t qmin, int32_t qmax, bool symmetric);
// running + c * (value - running); an infinite `running` has seen nothing yet.
float moving_average(float running, float value, float c);

}  // namespace fakequant
