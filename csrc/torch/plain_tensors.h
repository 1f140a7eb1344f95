// Which tensors the kernels can be called on, and the conversion between Python objects and tensors.
#pragma once

#include <nanobind/nanobind.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "kernels.h"

namespace fakequant::autograd {

namespace nb = nanobind;
using at::Tensor;

// --- Python objects ------------------------------------------------------------------------------

inline bool is_tensor(nb::handle object) { return THPVariable_Check(object.ptr()); }

// Throws TypeError if `object` is not a tensor.
inline const Tensor& tensor(nb::handle object) {
  if (!is_tensor(object)) throw nb::type_error("expected a torch.Tensor");
  return THPVariable_Unpack(object.ptr());
}

inline nb::object wrap(Tensor&& t) { return nb::steal(THPVariable_Wrap(std::move(t))); }

// --- supported tensors ---------------------------------------------------------------------------

// The dispatch keys of an ordinary CPU tensor: outside inference mode (kPlain) and inside it (kInference).
// fakequant/_backends/torch/plain_memory.py has the same sets.
inline constexpr c10::DispatchKeySet kInference({c10::DispatchKey::CPU, c10::DispatchKey::AutocastCPU});
inline constexpr c10::DispatchKeySet kPlain =
    kInference | c10::DispatchKeySet({c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::AutogradCPU});

// Whether `t` is ordinary CPU memory and no mode or transform is active.
inline bool is_eager(const Tensor& t) {
  const auto keys = t.key_set();
  if (keys != kPlain && keys != kInference) return false;
  return (c10::impl::tls_local_dispatch_key_set().included_ - c10::default_included_set).empty();
}

inline std::optional<DType> kernel_dtype(const Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat: return DType::f32;
    case at::kDouble: return DType::f64;
    case at::kBFloat16: return DType::bf16;
    case at::kHalf: return DType::f16;
    default: return std::nullopt;
  }
}

// Whether the kernels can compute on `x`, or on a dense copy of it.
inline bool is_readable_data(const Tensor& x) { return kernel_dtype(x) && is_eager(x) && !x._fw_grad(0).defined(); }

// Whether the kernels can compute on `x` in place.
inline bool is_simple_data(const Tensor& x) { return is_readable_data(x) && x.is_non_overlapping_and_dense(); }

// Whether a kernel can compute a first derivative from the gradient `dy`, and no second derivative is requested.
inline bool is_simple_gradient(const Tensor& dy) {
  return is_eager(dy) && kernel_dtype(dy) && !(at::GradMode::is_enabled() && dy.requires_grad());
}

// Returns x if it is dense, otherwise a dense copy with the strides that results computed from x have.
inline Tensor dense(const Tensor& x) {
  if (x.is_non_overlapping_and_dense()) return x;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return at::empty_like(x).copy_(x);
}

// Returns the memory of a contiguous tensor of `n` elements of `dtype`, or nullptr if `object` is anything else.
template <class T>
T* buffer(nb::handle object, int64_t n, at::ScalarType dtype) {
  if (!is_tensor(object)) return nullptr;
  const Tensor& t = tensor(object);
  if (t.scalar_type() != dtype || t.numel() != n || !t.is_contiguous() || !is_eager(t)) return nullptr;
  return t.mutable_data_ptr<T>();
}

// --- order in memory -----------------------------------------------------------------------------

using Order = std::optional<std::vector<int64_t>>;  // axes from outermost to innermost in memory; nullopt if C order

inline Order memory_order(const Tensor& x) {
  if (x.is_contiguous()) return std::nullopt;
  std::vector<int64_t> order(size_t(x.dim()));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return (x.size(a) > 1 ? x.stride(a) : 0) > (x.size(b) > 1 ? x.stride(b) : 0);
  });
  return order;
}

inline bool is_dense_in(const Tensor& t, const Order& order) {
  return order ? t.permute(*order).is_contiguous() : t.is_contiguous();
}

}  // namespace fakequant::autograd
