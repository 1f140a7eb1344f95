// The kernels as a table of functions, for other modules of this package, so that a process has one copy of the kernels
// and one selected instruction set. The functions run on torch's threads.
#pragma once

#include "kernels.h"

namespace fakequant {

struct KernelApi {
  void (*fake_quantize)(const FakeQuantizeArgs&);
  void (*mask_backward)(const MaskBackwardArgs&);
  void (*learned_backward)(const LearnedBackwardArgs&);
  ObserveResult (*observe_fake_quantize)(const ObserveArgs&, FakeQuantizeArgs);
  int (*encode_levels)(const EncodeLevelsArgs&);
  void (*scale_sums)(const ScaleSumsArgs&);
  void (*scale_planes)(const ScalePlanesArgs&);
  bool (*has_int8_products)();
};

}  // namespace fakequant
