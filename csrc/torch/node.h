// A backward node of torch's autograd engine, in the kind of pointer that the release at hand keeps it in.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/headeronly/version.h>

#include <memory>

namespace fakequant {

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13

template <class Node>
using NodePointer = std::shared_ptr<Node>;

// torch deletes long chains of nodes in a loop, not by recursion: that is what its own deleter is for.
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

}  // namespace fakequant
