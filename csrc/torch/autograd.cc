// The Python module `fakequant._autograd_<torch version>`: a fast path from Python to a kernel and back through torch's
// autograd engine.
//
// Checking arguments in Python takes longer than a kernel does for a few thousand elements, and a backward node written
// in Python takes as long again. This module does the work of fakequant/_backends/torch for the common case; see
// functions.h. Its nodes pass gradients that they do not handle to the operators `torch.ops.fakequant`, so that each
// gradient has one definition.
//
// torch's C++ interface changes between releases. The module is therefore compiled once per release, and its name
// contains the release. Without a module for the installed release, the Python nodes are used.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <torch/csrc/Exceptions.h>

#include "torch/functions.h"
#include "torch/reused_memory.h"
#include "torch/run_kernels.h"

namespace fakequant::autograd {
namespace {

void use_kernels(size_t address) { g_kernels = reinterpret_cast<const KernelApi*>(address); }

}  // namespace
}  // namespace fakequant::autograd

NB_MODULE(FAKEQUANT_AUTOGRAD_MODULE, m) {
  namespace nb = nanobind;
  using namespace nb::literals;
  using namespace fakequant::autograd;
  m.doc() = "Compiled fast path to the kernels and back through autograd. Private: use the functions of `fakequant`.";
  // Passes on Python exceptions raised by saved-tensor hooks, such as the one that ends a checkpoint's recomputation.
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (python_error& error) {
      error.restore();
    }
  });
  m.def("use_kernels", &use_kernels, "address"_a, "Sets the kernels: the address that `_native.kernel_api()` returns.");
  m.def("fake_quantize", &fake_quantize, "x"_a.none(), "scale"_a.none(), "zero_point"_a.none(), "qmin"_a,
        "qmax"_a, "numerics"_a, "axis"_a.none(), "group"_a.none(), "lowest_zero"_a, "highest_zero"_a,
        "has_torchs_name"_a, "clipped"_a);
  m.def("observe", &observe, "x"_a, "running_min"_a, "running_max"_a, "scale"_a, "zero_point"_a, "qmin"_a, "qmax"_a,
        "numerics"_a, "symmetric"_a, "scale_rule"_a, "update"_a, "averaging_constant"_a, "eps"_a, "axis"_a.none(),
        "group"_a.none(), "quantize"_a, "clipped"_a);
  m.def("fake_quantize_learned", &fake_quantize_learned, "x"_a.none(), "scale"_a.none(),
        "zero_point"_a.none(), "qmin"_a, "qmax"_a, "numerics_name"_a, "numerics"_a, "axis"_a.none(),
        "has_torchs_name"_a, "grad_factor"_a);
  m.def("keep_within", &keep_within, "value"_a, "before"_a, "low"_a, "high"_a);
  m.def("empty_floats", &empty_floats, "sizes"_a);
  m.def("release_memory", &release_memory,
        "Frees the memory that is kept for results to come, and gives free memory back to the system.");
  m.def("linear", &linear, "x"_a, "weight"_a, "bias"_a.none(), "Returns None if torch's linear must be used.");
  m.def("integer_linear", &integer_linear, "x"_a, "x_scale"_a, "x_zero"_a.none(), "x_low"_a, "x_high"_a, "weight"_a,
        "weight_scale"_a, "weight_zero"_a.none(), "weight_low"_a, "weight_high"_a, "bias"_a.none(), "bias_codes"_a.none(),
        "code_factor"_a, "with_int8"_a, "kept"_a.none() = nb::none());
  m.def("weight_levels", &weight_levels, "weight"_a, "scale"_a, "zero"_a.none(), "low"_a, "high"_a, "with_int8"_a);
  m.def("integer_convolution", &integer_convolution, "x"_a, "x_scale"_a, "x_zero"_a.none(), "x_low"_a, "x_high"_a, "weight"_a,
        "weight_scale"_a, "weight_zero"_a.none(), "weight_low"_a, "weight_high"_a, "bias"_a.none(), "bias_codes"_a.none(),
        "code_factor"_a, "stride"_a, "padding"_a, "dilation"_a, "groups"_a, "with_int8"_a);
  m.def("clipped", &clipped, "x"_a, "y"_a, "mask"_a, "order"_a.none(), "multiply"_a,
        "Gives y, computed from x without autograd, a clipped gradient.");
  m.def("pass_through", &pass_through, "x"_a, "y"_a,
        "Gives y, computed from x without autograd, a gradient that passes through unchanged.");
}
