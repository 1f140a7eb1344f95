// A linear layer whose backward pass needs less memory if saved tensors are recomputed by hooks.
#include <ATen/ops/linear.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <vector>

#include "torch/functions.h"
#include "torch/node.h"
#include "torch/plain_tensors.h"

namespace fakequant::autograd {
namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::dynamo::autograd::CompiledNodeArgs;
using torch::dynamo::autograd::SwapSavedVariables;

// Computes the same products as torch's node. torch's unpacks x and weight together. This one unpacks them one after
// the other, so if hooks recompute them from something smaller, only one of them is in memory at a time.
struct LinearBackward : Node {
  SavedVariable x_, weight_;
  std::vector<int64_t> sizes_;  // of x

  std::string name() const override { return "LinearBackward"; }
  void release_variables() override {
    x_.reset_data();
    weight_.reset_data();
  }

  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined()) return {Tensor(), Tensor(), Tensor()};
    const Tensor dy = gradients[0].reshape({-1, gradients[0].size(-1)});
    gradients.clear();
    Tensor dx, dweight;
    if (task_should_compute_output(1)) dweight = dy.t().mm(x_.unpack().reshape({-1, sizes_.back()}));
    if (task_should_compute_output(0)) dx = dy.mm(weight_.unpack()).reshape(sizes_);
    return {dx, dweight, task_should_compute_output(2) ? dy : Tensor()};  // the engine sums dy to the bias's shape
  }

  void compiled_args(CompiledNodeArgs& args) const override {
    args.collect(x_, false);
    args.collect(weight_, false);
    args.collect(sizes_);
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

}  // namespace

nb::object linear(nb::handle x_object, nb::handle weight_object, nb::handle bias_object) {
  const Tensor &x = tensor(x_object), &weight = tensor(weight_object);
  const Tensor bias = bias_object.is_none() ? Tensor() : tensor(bias_object);
  if (!at::GradMode::is_enabled() || x.dim() < 2 || weight.dim() != 2 || x.numel() == 0) return nb::none();
  for (const Tensor& t : {x, weight, bias}) {
    if (!t.defined()) continue;
    if (!is_simple_data(t) || !t.is_contiguous() || t.scalar_type() != x.scalar_type()) return nb::none();
  }
  Tensor y;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    y = at::linear(x, weight, bias.defined() ? std::optional<Tensor>(bias) : std::nullopt);
  }
  auto node = make_node<LinearBackward>();
  node->x_ = SavedVariable(x, false);
  node->weight_ = SavedVariable(weight, false);
  node->sizes_ = x.sizes().vec();
  set_result(y, node, x, weight, bias);
  return wrap(std::move(y));
}

}  // namespace fakequant::autograd
