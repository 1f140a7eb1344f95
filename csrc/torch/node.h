// Backward nodes for torch's autograd engine, across torch releases.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/headeronly/version.h>

#include <memory>
#include <utility>

namespace fakequant::autograd {

// NodePointer is the smart pointer in which this torch release keeps nodes.
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13

template <class Node>
using NodePointer = std::shared_ptr<Node>;

// torch's deleter frees long chains of nodes in a loop; the default one would recurse.
template <class Node>
NodePointer<Node> make_node() {
  return NodePointer<Node>(new Node(), torch::autograd::deleteNode);
}

#else

template <class Node>
using NodePointer = c10::intrusive_ptr<Node>;

template <class Node>
NodePointer<Node> make_node() {
  return c10::make_intrusive<Node>();
}

#endif

// Records `node` as the function that computed `y` from `inputs`. `y` must have been computed without autograd.
// An undefined tensor is a valid input.
template <class... Inputs>
void set_result(const at::Tensor& y, const NodePointer<torch::autograd::Node>& node, const Inputs&... inputs) {
  node->set_next_edges(torch::autograd::collect_next_edges(inputs...));
  torch::autograd::set_history(y, node);
}

// Calls the operator `name` ("fakequant::...") through the dispatcher and returns its results. Nodes call it for
// gradients they do not handle themselves: second derivatives, transforms, other devices, other strides.
template <class... Args>
c10::Stack call_operator(const char* name, Args&&... args) {
  c10::Stack stack;
  (stack.emplace_back(std::forward<Args>(args)), ...);
  c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(&stack);
  return stack;
}

}  // namespace fakequant::autograd
