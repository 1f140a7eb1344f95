"""Layers with another number of bits: `QuantConfig.first_last_bits`, and weights of a given width.

First and last refer to the order in which the model calls its layers.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from fakequant import _runtimes
from fakequant._prepare.attach import Preparation
from fakequant._prepare.flow_graph import FlowGraph
from fakequant._prepare.plan import Plan, config_of, read_weight
from fakequant._runtimes.target import Target
from fakequant.config import QuantConfig
from fakequant.formats import ScaleFormat
from fakequant.nn._call_quantizers import quantizers_in
from fakequant.nn._learned_fake_quantize import LearnedFakeQuantize
from fakequant.nn._model_quantizers import change_spec
from fakequant.nn._owners import OwnedProduct
from fakequant.nn._quantized_layer import input_grids_of, is_layer, kind_of
from fakequant.nn._quantizer import Quantizer
from fakequant.spec import QuantSpec

# The size of a scale.
_SCALE_BYTES: dict[ScaleFormat, int] = {"float32": 4, "e8m0": 1, "e4m3fn": 1, "float16": 2, "bfloat16": 2}


# --- the first and the last layer -------------------------------------------------------------------


def first_and_last(model: nn.Module, config: QuantConfig, plan: Plan, graph: FlowGraph) -> list[str]:
    """Returns the paths of the layers that get `first_last_bits`: first and last, except those that a rule matches.

    Layers that a rule leaves in float can be first or last too.
    """
    if config.first_last_bits is None:
        return []
    planned = {layer.path for layer in plan.layers}
    layers, without_rule = [], set()
    for path, module in _with_products(model, plan):
        use, rule = config_of(path, module, config)
        left_in_float = use is None and rule is not None and is_layer(module)
        if path in planned or left_in_float:
            layers.append(path)
        if path in planned and rule is None:
            without_rule.add(path)
    # A call of an attention module also counts as a call of its layers.
    called = [path for call in graph.modules() for path in layers if f"{path}.".startswith(f"{call.path}.")]
    return [path for path in dict.fromkeys(called[:1] + called[-1:]) if path in without_rule]


def _with_products(model: nn.Module, plan: Plan) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules of a float model by path, and after each layer that owns products those that are planned."""
    products = [layer for layer in plan.layers if isinstance(layer.module, OwnedProduct)]
    for path, module in model.named_modules():
        yield path, module
        for product in products:
            if product.module.owner is module:
                yield product.path, product.module


def widen(layer: nn.Module, quantizers: Mapping[str, nn.Module | None], config: QuantConfig) -> None:
    """Gives the weight and the input of a layer at least `first_last_bits`, if the target allows it.

    `quantizers` has the quantizers of the layer by the names of the children.
    """
    for name in ("weight_quantizer", "input_quantizer"):
        for quantizer in quantizers_in(quantizers.get(name)):
            give_spec(quantizer, _wider(quantizer.spec, name, config), layer, name)


def _wider(spec: QuantSpec, name: str, config: QuantConfig) -> QuantSpec:
    bits, target = config.first_last_bits, _runtimes.find(config.target)
    assert bits is not None
    if bits <= spec.bits or spec.granularity == "token" or not spec.is_integer:
        return spec
    if name == "input_quantizer":
        return target.fit_activation(dataclasses.replace(spec, bits=bits))
    wide = weight_at(spec, bits, target)
    return wide if wide.bits > spec.bits else spec


def notes_on_formats(model: nn.Module, made: Preparation) -> list[str]:
    """Returns notes on first and last layers with fewer bits than `first_last_bits`, because of their formats."""
    bits, notes = made.config.first_last_bits or 0, []
    for path in made.first_last:
        layer: Any = model.get_submodule(path)
        for name, quantizer in (("weight", layer.weight_quantizer), ("input", input_grids_of(layer)[0])):
            if quantizer is not None and quantizer.spec.bits < bits and not quantizer.spec.is_integer:
                where = f"{path}.{name}_quantizer" if path else f"{name}_quantizer"
                notes.append(
                    f"{where} stays in {quantizer.spec}: `first_last_bits` does not widen float formats and block "
                    f"scales. Use a rule, such as config.rule({path!r}, weight=..., input=...)"
                )
    return notes


# --- any layer --------------------------------------------------------------------------------------


def give_spec(quantizer: Quantizer, spec: QuantSpec, layer: nn.Module, name: str) -> None:
    """Gives the quantizer `name` of a layer another spec. The learned scale of a weight is initialized again."""
    if quantizer.spec == spec:
        return
    change_spec(quantizer, spec)
    if name == "weight_quantizer" and isinstance(quantizer, LearnedFakeQuantize):
        kind = kind_of(layer)
        assert kind is not None
        quantizer.initialize(read_weight(layer, kind))


def weight_at(spec: QuantSpec, bits: int, target: Target) -> QuantSpec:
    """Returns the spec of a weight with another number of bits, if the target allows it.

    Everything else stays, except the narrow range. As in the presets, symmetric weights get one from 8 bits on, so that
    a batch norm with negative factors can be folded, and weights that had at least 8 bits lose it below, where every
    code counts. Weights in a float format, or with block scales, have no other width and stay as they are.

    >>> from fakequant import _runtimes
    >>> print(weight_at(QuantSpec(bits=4, axis=0), 8, _runtimes.find("generic")))
    int8 narrow, per channel on axis 0
    """
    if not spec.is_integer:
        return spec
    narrow = spec.narrow_range
    if bits != spec.bits:
        narrow = narrow or spec.symmetric if bits >= 8 else narrow and spec.bits < 8
    return target.fit_weight(dataclasses.replace(spec, bits=bits, narrow_range=narrow))


def weight_bytes(weights: int, bits: int, scales: int, scale_format: ScaleFormat = "float32") -> int:
    """Returns the size of a quantized weight: its codes, packed, and its scales.

    >>> weight_bytes(10, 4, 2), weight_bytes(64, 4, 2, "e8m0")
    (13, 34)
    """
    above = 4 if scale_format == "e4m3fn" else 0  # the scale of the whole tensor
    return -(-weights * bits // 8) + _SCALE_BYTES[scale_format] * scales + above
