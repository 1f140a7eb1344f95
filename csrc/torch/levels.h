// Tensors on grids of at most 8 bits as integers, whose sums of products are exact.
#pragma once

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <utility>

#include "torch/plain_tensors.h"
#include "torch/run_kernels.h"

namespace fakequant::autograd {

// Partial sums of integers are exact in float32 up to here.
inline constexpr int64_t kExactInFloat32 = 1 << 24;
// Sums of as many products of levels, and of a bias, fit in 32 bits.
inline constexpr int64_t kLongestSum = 1 << 15;

// Whether products of float32 are set to round their operands first.
inline bool rounds_operands(at::Float32Op op) {
  const auto precision = at::globalContext().float32Precision(at::Float32Backend::MKLDNN, op);
  return precision == at::Float32Precision::TF32 || precision == at::Float32Precision::BF16;
}

// The levels of a tensor on a grid of at most 8 bits, as codes or as floats.
struct Levels {
  Tensor scale, zero, values, totals, magnitudes;
  int64_t qmin, qmax, count;
  int32_t shift;

  // Returns false for arguments that are not handled.
  bool set_grid(nb::handle scale_object, nb::handle zero_object, int64_t low, int64_t high, int64_t rows) {
    if (!is_tensor(scale_object)) return false;
    scale = tensor(scale_object);
    count = scale.numel();
    if (count != 1 && count != rows) return false;
    if (!buffer<float>(scale_object, count, at::kFloat)) return false;
    if (!zero_object.is_none()) {
      if (!buffer<int32_t>(zero_object, count, at::kInt)) return false;
      zero = tensor(zero_object);
      const int32_t* z = zero.const_data_ptr<int32_t>();
      for (int64_t i = 0; i < count; ++i) {
        if (z[i] < low || z[i] > high) return false;
      }
    }
    qmin = low, qmax = high;
    shift = low < 0 ? 0 : 128;
    return high - low <= 255 && low >= -128 && high - shift <= 127;
  }
  int32_t* zeros() const { return zero.defined() ? zero.mutable_data_ptr<int32_t>() : nullptr; }

  // Writes the levels of `x` to `to`, as codes if that has bytes, both seen as a matrix with this number of rows.
  // Returns 0 or a reason why there are no levels.
  int encode(const Tensor& x, int64_t rows, Tensor to) {
    values = std::move(to);
    totals = at::empty({rows}, x.options().dtype(at::kInt));
    magnitudes = at::empty_like(totals);
    const bool as_codes = values.element_size() == 1;
    const EncodeLevelsArgs args{x.const_data_ptr<float>(),
                                rows,
                                x.numel() / rows,
                                count,
                                scale.const_data_ptr<float>(),
                                zeros(),
                                qmin,
                                qmax,
                                shift,
                                as_codes ? static_cast<int8_t*>(values.mutable_data_ptr()) : nullptr,
                                as_codes ? nullptr : values.mutable_data_ptr<float>(),
                                totals.mutable_data_ptr<int32_t>(),
                                magnitudes.mutable_data_ptr<int32_t>()};
    return without_gil_if_large(x.numel(), [&] { return g_kernels->encode_levels(args); });
  }

  // The largest sum of magnitudes of a row.
  int64_t norm() const {
    const int32_t* found = magnitudes.const_data_ptr<int32_t>();
    return *std::max_element(found, found + magnitudes.numel());
  }

  // The largest magnitude that a level can have.
  int64_t largest() const {
    int64_t found = 0;
    for (int64_t i = 0; i < (zero.defined() ? count : 1); ++i) {
      const int64_t z = zero.defined() ? zero.const_data_ptr<int32_t>()[i] : 0;
      found = std::max({found, qmax - z, z - qmin});
    }
    return found;
  }
};

}  // namespace fakequant::autograd
