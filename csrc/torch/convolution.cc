// Convolutions with exact integer sums.
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/full.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "torch/functions.h"
#include "torch/levels.h"
#include "torch/node.h"
#include "torch/plain_tensors.h"
#include "torch/reused_memory.h"
#include "torch/run_kernels.h"

namespace fakequant::autograd {
namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::dynamo::autograd::CompiledNodeArgs;
using torch::dynamo::autograd::SwapSavedVariables;

// How a kernel moves, with one number per axis of space.
struct Geometry {
  std::vector<int64_t> stride, padding, dilation;
  int64_t groups;

  Tensor convolve(const Tensor& x, const Tensor& weight) const {
    const std::vector<int64_t> nothing(stride.size());
    return at::convolution(x, weight, std::nullopt, stride, padding, dilation, false, nothing, groups);
  }
};

struct ConvolutionBackward : Node {
  SavedVariable x_, weight_;
  Geometry geometry_;
  int64_t channels_;

  std::string name() const override { return "ConvolutionBackward"; }
  void release_variables() override {
    x_.reset_data();
    weight_.reset_data();
  }

  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined()) return {Tensor(), Tensor(), Tensor()};
    const std::vector<int64_t> nothing(geometry_.stride.size()), channels{channels_};
    const std::array<bool, 3> needed{task_should_compute_output(0), task_should_compute_output(1),
                                     task_should_compute_output(2)};
    auto [dx, dweight, dbias] = at::convolution_backward(
        gradients[0], x_.unpack(), weight_.unpack(), at::OptionalIntArrayRef(channels), geometry_.stride,
        geometry_.padding, geometry_.dilation, false, nothing, geometry_.groups, needed);
    return {dx, dweight, dbias};
  }

  void compiled_args(CompiledNodeArgs& args) const override {
    args.collect(x_, false);
    args.collect(weight_, false);
    args.collect(geometry_.stride);
    args.collect(geometry_.padding);
    args.collect(geometry_.dilation);
    args.collect(geometry_.groups);
    args.collect(channels_);
  }
  variable_list apply_with_saved(const variable_list& inputs, SwapSavedVariables& saved) override {
    saved.before(x_);
    saved.before(weight_);
    variable_list result = apply(variable_list(inputs));
    saved.after(x_);
    saved.after(weight_);
    return result;
  }
};

// --- products of 8-bit integers ------------------------------------------------------------------

// oneDNN's convolution of 8-bit integers, through the operators that torch's compiler calls for quantized models.
struct Int8Convolution {
  std::optional<c10::OperatorHandle> prepare, run;

  Int8Convolution() {
    auto& dispatcher = c10::Dispatcher::singleton();
    const auto found = dispatcher.findSchema({"onednn::qconv_prepack", ""}),
               other = dispatcher.findSchema({"onednn::qconv2d_pointwise", ""});
    // Other releases may have other arguments.
    if (found && other && found->schema().arguments().size() == 9 && other->schema().arguments().size() == 17) {
      prepare = found, run = other;
    }
  }
};

const Int8Convolution& int8_convolution() {
  static const Int8Convolution found;
  return found;
}

// Smaller convolutions take as long with floats.
constexpr int64_t kSmallestForInt8 = 1 << 14;

// Returns sums of products of levels as float32, with the channels last in memory. Images have one or two axes of
// space.
Tensor int8_sums(const Levels& x, const Levels& weight, const Geometry& geometry) {
  const bool is_row = geometry.stride.size() == 1;
  const auto as_image = [&](const Tensor& t) { return is_row ? t.unsqueeze(2) : t; };
  const auto both = [&](std::vector<int64_t> along, int64_t fill) {
    if (is_row) along.insert(along.begin(), fill);
    return along;
  };
  const auto stride = both(geometry.stride, 1), padding = both(geometry.padding, 0),
             dilation = both(geometry.dilation, 1);
  const int64_t zero = (x.zero.defined() ? *x.zero.const_data_ptr<int32_t>() : 0) - x.shift,
                channels = weight.values.size(0);
  const Tensor image = as_image(x.values), kernel = as_image(weight.values);
  const Tensor ones = at::full({channels}, 1.0, x.scale.options()),
               zeros = at::full({channels}, 0, weight.totals.options());
  const Int8Convolution& op = int8_convolution();
  c10::Stack stack{kernel, ones, 1.0, zero, stride, padding, dilation, geometry.groups, image.sizes().vec()};
  op.prepare->callBoxed(&stack);
  const Tensor prepared = stack[0].toTensor();
  stack = {image,
           1.0,
           zero,
           prepared,
           ones,
           zeros,
           c10::IValue(),
           stride,
           padding,
           dilation,
           geometry.groups,
           1.0,
           int64_t(0),
           int64_t(at::kFloat),
           "none",
           c10::IValue(c10::List<std::optional<at::Scalar>>()),
           "none"};
  op.run->callBoxed(&stack);
  const Tensor y = stack[0].toTensor();
  return is_row ? y.squeeze(2) : y;
}

// --- products of floats --------------------------------------------------------------------------

// Returns sums of products of levels as float32, or as float64.
Tensor float_sums(const Levels& x, const Levels& weight, const Geometry& geometry) {
  const int64_t products = weight.values.numel() / weight.values.size(0);
  const bool is_exact = !rounds_operands(at::Float32Op::CONV) && at::globalContext().userEnabledMkldnn();
  if (is_exact && products <= kLongestSum) {
    if (weight.norm() * x.largest() < kExactInFloat32) return geometry.convolve(x.values, weight.values);
    // Some channels at a time, as many as give exact sums.
    const int64_t channels = x.values.size(1), per_channel = products * geometry.groups / channels;
    const int64_t part = kExactInFloat32 / (per_channel * x.largest() * weight.largest() + 1);
    if (geometry.groups == 1 && part > 0) {
      Tensor sums;
      for (int64_t first = 0; first < channels; first += part) {
        const int64_t number = std::min(part, channels - first);
        const Tensor some =
            geometry.convolve(x.values.narrow(1, first, number), weight.values.narrow(1, first, number));
        sums = sums.defined() ? sums.add_(some) : some.to(at::kDouble);
      }
      return sums;
    }
  }
  return geometry.convolve(x.values.to(at::kDouble), weight.values.to(at::kDouble));
}

bool is_dense_image(const Tensor& t) {
  return t.is_contiguous() || (t.dim() == 4 && t.is_contiguous(at::MemoryFormat::ChannelsLast)) ||
         (t.dim() == 5 && t.is_contiguous(at::MemoryFormat::ChannelsLast3d));
}

}  // namespace

nb::object integer_convolution(nb::handle x_object, nb::handle x_scale, nb::handle x_zero, int64_t x_low,
                               int64_t x_high, nb::handle weight_object, nb::handle weight_scale,
                               nb::handle weight_zero, int64_t weight_low, int64_t weight_high, nb::handle bias_object,
                               nb::handle bias_codes, double code_factor, std::vector<int64_t> stride,
                               std::vector<int64_t> padding, std::vector<int64_t> dilation, int64_t groups,
                               bool with_int8) {
  const Tensor &x = tensor(x_object), &weight = tensor(weight_object);
  const Tensor bias = bias_object.is_none() ? Tensor() : tensor(bias_object);
  const Geometry geometry{std::move(stride), std::move(padding), std::move(dilation), groups};
  for (const Tensor& t : {x, weight, bias}) {
    if (t.defined() && (!is_simple_data(t) || t.scalar_type() != at::kFloat || t.numel() == 0)) return nb::none();
  }
  const auto space = int64_t(geometry.stride.size());
  if (x.dim() != space + 2 || weight.dim() != space + 2 || !is_dense_image(x) || !is_dense_image(weight))
    return nb::none();
  const int64_t channels = weight.size(0);
  if (x.size(1) != weight.size(1) * groups || channels % groups || (bias.defined() && bias.numel() != channels))
    return nb::none();
  Levels left, right;
  if (!left.set_grid(x_scale, x_zero, x_low, x_high, 1)) return nb::none();
  if (!right.set_grid(weight_scale, weight_zero, weight_low, weight_high, channels)) return nb::none();
  const double* codes = nullptr;
  if (!bias_codes.is_none() && !(codes = buffer<double>(bias_codes, channels, at::kDouble))) return nb::none();
  bool as_codes = with_int8 && space <= 2 && x.numel() >= kSmallestForInt8 && !right.zero.defined() &&
                  right.shift == 0 && weight.numel() / channels <= kLongestSum &&
                  at::globalContext().userEnabledMkldnn() && int8_convolution().run;
  Tensor y;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto encode = [&](Levels& levels, const Tensor& t, int64_t rows, at::ScalarType code) {
      return levels.encode(t, rows, reusable_empty_like(t, as_codes ? code : at::kFloat));
    };
    if (encode(right, weight, channels, at::kChar)) return nb::none();
    // Sums become float32 before bias codes are added, so they must be exact there.
    if (as_codes && codes && right.norm() * left.largest() >= kExactInFloat32) {
      as_codes = false;
      if (encode(right, weight, channels, at::kChar)) return nb::none();
    }
    if (as_codes) left.shift = x_low < 0 ? -128 : 0;  // unsigned codes
    if (encode(left, x, x.size(0) * x.size(1), at::kByte)) return nb::none();
    const nb::gil_scoped_release without_gil;
    const Tensor sums = as_codes ? int8_sums(left, right, geometry) : float_sums(left, right, geometry);
    const SumKind kind = sums.scalar_type() == at::kDouble ? SumKind::f64 : SumKind::f32;
    const int64_t images = sums.size(0), pixels = sums.numel() / (images * channels);
    const auto last = space == 3 ? at::MemoryFormat::ChannelsLast3d : at::MemoryFormat::ChannelsLast;
    // As torch's convolutions return it.
    const bool is_last = space > 1 && (x.suggest_memory_format() == last || weight.suggest_memory_format() == last);
    const bool sums_are_last = as_codes || !sums.is_contiguous();
    if (is_last && sums_are_last) {
      y = kind == SumKind::f32 ? sums : at::empty_like(sums, sums.options().dtype(at::kFloat));
      const ScaleSumsArgs args{kind,
                               images * pixels,
                               channels,
                               0,
                               sums.const_data_ptr(),
                               y.mutable_data_ptr(),
                               1,
                               right.count,
                               left.scale.const_data_ptr<float>(),
                               right.scale.const_data_ptr<float>(),
                               nullptr,
                               nullptr,
                               0,
                               0,
                               nullptr,
                               nullptr,
                               bias.defined() && !codes ? bias.const_data_ptr<float>() : nullptr,
                               codes,
                               code_factor};
      g_kernels->scale_sums(args);
    } else {
      const bool in_place = kind == SumKind::f32 && !sums_are_last;
      y = in_place ? sums : reusable_empty(sums.sizes(), at::kFloat);
      const ScalePlanesArgs args{kind,
                                 images,
                                 channels,
                                 pixels,
                                 sums_are_last,
                                 sums.const_data_ptr(),
                                 y.mutable_data_ptr(),
                                 right.count,
                                 left.scale.const_data_ptr<float>(),
                                 right.scale.const_data_ptr<float>(),
                                 bias.defined() && !codes ? bias.const_data_ptr<float>() : nullptr,
                                 codes,
                                 code_factor};
      g_kernels->scale_planes(args);
      if (is_last) y = y.contiguous(last);
    }
  }
  const bool differentiable = x.requires_grad() || weight.requires_grad() || (bias.defined() && bias.requires_grad());
  if (at::GradMode::is_enabled() && differentiable) {
    auto node = make_node<ConvolutionBackward>();
    node->x_ = SavedVariable(x, false);
    node->weight_ = SavedVariable(weight, false);
    node->geometry_ = geometry;
    node->channels_ = channels;
    set_result(y, node, x, weight, bias);
  }
  return wrap(std::move(y));
}

}  // namespace fakequant::autograd
