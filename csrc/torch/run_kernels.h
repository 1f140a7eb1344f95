// Access to the kernels, which are compiled into `fakequant._native`.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <utility>

#include "kernel_api.h"

namespace fakequant::autograd {

// Set once by use_kernels(), before any other function of the module is called.
inline const KernelApi* g_kernels = nullptr;

// Reacquiring the GIL can take longer than the whole computation on a smaller tensor.
inline constexpr int64_t kReleaseGilFrom = 4096;

// Calls run(), without the GIL if it works on many elements.
template <class F>
auto without_gil_if_large(int64_t elements, F&& run) {
  if (elements < kReleaseGilFrom) return run();
  const nanobind::gil_scoped_release without_gil;
  return run();
}

inline void run_fake_quantize(const FakeQuantizeArgs& args) {
  if (args.shape.size() == 0) return;
  without_gil_if_large(args.shape.size(), [&] { g_kernels->fake_quantize(args); });
}

}  // namespace fakequant::autograd
