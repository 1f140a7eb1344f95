"""Quantized experts: modules that hold the weights of all experts of a mixture as 3-D parameters.

A prepared module has two children, both an `ExpertProduct`:

    gate_up_product    the tokens of every expert           with gate_up_proj and gate_up_proj_bias
    up_product         the same, without a gate             with up_proj and up_proj_bias
    down_product       what the activation function returns with down_proj and down_proj_bias

Inputs and weights of the products are quantized. The activation function, the weights of the router and the sum over
the experts of a token stay in float.
"""

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor

from fakequant._backends.torch.grouped_linear import Groups
from fakequant._backends.torch.tensor_kernels import dtype_name
from fakequant.nn._layer_kinds import AnyLayer, LayerKind, register_layer_kind, register_layer_kind_if
from fakequant.nn._owners import OwnedProduct, OwnerKind
from fakequant.nn._quantized_layer import quantize_output
from fakequant.nn._records import DerivedModule, LayerRecord


class ExpertProduct(OwnedProduct):
    """The products of rows, each with the matrix of its expert, plus the bias.

    `weight` is a matrix: the weights of all experts, one after the other, with the shape (experts * outputs, inputs).
    So scales per channel are scales per expert and output. `bias` has the shape (experts * outputs,).
    """

    def read(self, name: str) -> Tensor | None:
        """Returns the weight of the owner as a matrix, or its bias as a vector."""
        value = super().read(name)
        if value is None or name == "bias":
            return None if value is None else value.flatten()
        return (value.transpose(1, 2) if self.owner.is_transposed else value).flatten(0, 1)

    def forward(self, input: Tensor, groups: Groups) -> Tensor:
        """Returns the products in float. `input` has the rows of all experts, in the order that `groups` says."""
        return groups.linear(input, self.weight, self.bias)


@register_layer_kind(ExpertProduct)
class QuantizedExpertProduct(LayerKind):
    """A product of all experts with quantized rows and weights. All rows of a call are observed as one tensor."""

    can_sum_exactly: ClassVar[bool] = True

    @staticmethod
    def forward(layer: AnyLayer, input: Tensor, groups: Groups) -> Tensor:
        """Takes and returns the same as `ExpertProduct`."""
        return quantize_output(layer, layer._fakequant.compute_groups(layer, input, groups))


# What a module must have; see `Experts`.
_ATTRIBUTES = ("num_experts", "is_transposed", "has_bias", "has_gate")


class QuantizedExpertsLayer(DerivedModule):
    """The base of prepared and converted experts. Their products are the quantized layers."""

    _fakequant: Any


@dataclasses.dataclass(eq=False, kw_only=True)
class ExpertsRecord(LayerRecord):
    """The record of prepared or converted experts: `layer._fakequant`."""

    base = QuantizedExpertsLayer


class Experts(OwnerKind):
    """A module that computes, for every token and each of its experts e with the routing weight r,

        y = sum over e of  r * (down[e] @ gate(up[e] @ x + up_bias[e]) + down_bias[e])

    with the products of x and of the gated tensor quantized. The module has these attributes:

        num_experts      the number of experts
        is_transposed    False if weights have the shape (experts, outputs, inputs), True if (experts, inputs, outputs)
        has_bias         whether there are biases, of the shape (experts, outputs)
        has_gate         whether the first weight has the gate and the values: `gate_up_proj`, else it is `up_proj`
        gate_up_proj or up_proj, down_proj      the weights, which are parameters
        gate_up_proj_bias and so on             the biases
        _apply_gate(y)   with a gate: what is computed from the first product
        act_fn(y)        without a gate: the same

    Its forward pass takes `hidden_states` of the shape (tokens, features), `top_k_index` with the experts of each
    token, and `top_k_weights` with their routing weights. The last two have the shape (tokens, experts per token).

    >>> import fakequant as fq
    >>> kind = fq.nn.register_layer_kind("package.module.Experts")(Experts)
    """

    record = ExpertsRecord

    @classmethod
    def products(cls, module: AnyLayer) -> dict[str, OwnedProduct]:
        """Returns the first and the second product."""
        return {
            f"{name.removesuffix('_proj')}_product": ExpertProduct(module, name, f"{name}_bias")
            for name in _weight_names(module)
        }

    @classmethod
    def unsupported_reason(cls, module: AnyLayer) -> str | None:
        """Returns why `module` does not have the attributes of experts, or computes more than they say."""
        missing = [name for name in _ATTRIBUTES if not hasattr(module, name)]
        if missing:
            return f"{type(module).__name__} has no attribute `{missing[0]}`"
        if getattr(module, "has_post_expert_norm", False):
            return "the results of its experts are normalized (has_post_expert_norm)"
        if getattr(module, "_is_expert_parallel", False):
            return "its experts are distributed over several processes"
        function = "_apply_gate" if module.has_gate else "act_fn"
        if not callable(getattr(module, function, None)):
            return f"{type(module).__name__} has no function `{function}`"
        return _wrong_shape(module)

    @staticmethod
    def forward(layer: AnyLayer, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Takes and returns the same as the module in float."""
        tokens, top_k = top_k_index.shape
        groups, order = sorted_by_expert(top_k_index.reshape(-1), layer.num_experts)
        first, last = (getattr(layer, name) for name in _product_names(layer))
        y = first(hidden_states[order // top_k], groups)
        y = last(layer._apply_gate(y) if layer.has_gate else layer.act_fn(y), groups)
        y = y[torch.argsort(order)] * top_k_weights.reshape(-1, 1)
        y = y.reshape(tokens, top_k, y.shape[-1]).sum(1)
        return quantize_output(layer, y.to(hidden_states.dtype))


def sorted_by_expert(index: Tensor, experts: int) -> tuple[Groups, Tensor]:
    """Returns the groups of rows that are sorted by expert, and the order that sorts them. Equal rows keep their order.

    >>> groups, order = sorted_by_expert(torch.tensor([1, 0, 1]), 2)
    >>> groups.experts, order
    (tensor([0, 1, 1]), tensor([1, 0, 2]))
    """
    # All keys are different, because a stable sort cannot be exported to ONNX.
    rows = index.shape[0]
    order = torch.argsort(index * rows + torch.arange(rows, device=index.device))
    return Groups(index[order], experts), order


def _weight_names(module: AnyLayer) -> tuple[str, str]:
    return ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"


def _product_names(module: AnyLayer) -> tuple[str, str]:
    return ("gate_up_product" if module.has_gate else "up_product"), "down_product"


def _wrong_shape(module: AnyLayer) -> str | None:
    """Returns which weight or bias is not a parameter of the expected shape, or None if all are."""
    for name in _weight_names(module):
        weight = module._parameters.get(name)
        if weight is None:
            return f"`{name}` is not a parameter"
        if weight.dim() != 3 or len(weight) != module.num_experts or not weight.is_floating_point():
            kind = f"{dtype_name(weight.dtype)} of shape {tuple(weight.shape)}"
            return f"`{name}` must be one float matrix for each of {module.num_experts} experts, got {kind}"
        outputs = weight.shape[2 if module.is_transposed else 1]
        bias = module._parameters.get(f"{name}_bias")
        if module.has_bias and (bias is None or bias.shape != (module.num_experts, outputs)):
            kind = "no parameter" if bias is None else f"shape {tuple(bias.shape)}"
            return f"`{name}_bias` must have the shape ({module.num_experts}, {outputs}), got {kind}"
    return None


def _is_of_transformers(cls: type) -> bool:
    """Returns True for classes with transformers' decorator `use_experts_implementation`, which replaces `forward`."""
    forward = cls.__dict__.get("forward")
    return getattr(forward, "__globals__", {}).get("__name__") == "transformers.integrations.moe"


register_layer_kind_if(_is_of_transformers, Experts)
