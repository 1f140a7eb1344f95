"""Layers of a prepared model whose quantizers are switched on and off together, and the bit widths of their weights."""

import dataclasses
from collections.abc import Iterable
from contextlib import ExitStack
from math import prod

import torch
from torch import Tensor, nn

from fakequant import _runtimes
from fakequant._paired_models.calls import Args, Kwargs, Result, changed_inputs
from fakequant._prepare.attach import Preparation, preparation
from fakequant._prepare.bit_widths import give_spec, weight_at
from fakequant._prepare.plan import config_of, read_weight
from fakequant._runtimes.target import Target
from fakequant.config import LayerConfig
from fakequant.nn._call_quantizers import CallQuantizers, quantizers_in
from fakequant.nn._fake_quantize import FakeQuantize
from fakequant.nn._function_calls import CallingModule
from fakequant.nn._kv_cache import CACHE_QUANTIZERS, has_cache_quantizers
from fakequant.nn._layer_kinds import LayerKind
from fakequant.nn._owners import stored_weight
from fakequant.nn._quantized_layer import QuantizedLayer, input_grid_of, input_grids_of, kind_of
from fakequant.nn._quantizer import Quantizer
from fakequant.nn._records import float_class_of
from fakequant.spec import QuantSpec

# The widest grid of a weight that is worth a search.
_WIDEST = 16


@dataclasses.dataclass(frozen=True, eq=False)
class SwitchedLayer:
    """A quantized layer, or another module that quantizes its output, results of functions in its code, or a cache."""

    path: str
    kind: str
    module: nn.Module
    quantizers: list[Quantizer]
    weights: int
    bits: int
    float_bits: int
    # The path of the attention that contains the layer, if any.
    part_of: str | None

    @property
    def weight_quantizer(self) -> Quantizer | None:
        """The quantizer of the weight. None if the weight stays in float or there is none."""
        return self.module.weight_quantizer if isinstance(self.module, QuantizedLayer) else None


def find_switched_layers(model: nn.Module) -> list[SwitchedLayer]:
    """Returns all layers of a prepared model, in its order."""
    outputs = set(preparation(model).outputs)
    attentions = {
        module.out_proj: path for path, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)
    }
    return [
        _switched_layer(path, module, attentions.get(module))
        for path, module in model.named_modules()
        if isinstance(module, QuantizedLayer)
        or path in outputs
        or _quantizers_of_functions(module)
        or has_cache_quantizers(module)
    ]


def _switched_layer(path: str, module: nn.Module, part_of: str | None) -> SwitchedLayer:
    if not isinstance(module, QuantizedLayer):
        found = [*_quantizers_of_functions(module), *quantizers_in(module._modules.get("output_quantizer"))]
        found += [getattr(module, name) for name in CACHE_QUANTIZERS if has_cache_quantizers(module)]
        kind, bits = float_class_of(module).__name__, found[0].spec.bits
        return SwitchedLayer(
            path=path, kind=kind, module=module, quantizers=found, weights=0, bits=bits, float_bits=0, part_of=part_of
        )
    children = [child for child in module._modules.values() if isinstance(child, (Quantizer, CallQuantizers))]
    own = [quantizer for child in children for quantizer in quantizers_in(child)]
    weight = getattr(module, module._fakequant.kind.weight_name)
    float_bits = 8 * weight.element_size()
    bits = float_bits if module.weight_quantizer is None else module.weight_quantizer.spec.bits
    return SwitchedLayer(
        path=path,
        kind=module._fakequant.float_class.__name__,
        module=module,
        quantizers=own,
        weights=weight.numel(),
        bits=bits,
        float_bits=float_bits,
        part_of=part_of,
    )


def _quantizers_of_functions(module: nn.Module) -> list[Quantizer]:
    found = module.function_quantizers.values() if isinstance(module, CallingModule) else ()
    return [quantizer for slot in found for quantizer in quantizers_in(slot)]


class Switches:
    """Switches the quantizers of layers on and off.

    If another module quantizes the input of a layer, that quantizer is also applied while the layer quantizes, even if
    the other module is off. Without that module the layer would have had its own input quantizer.
    """

    def __init__(self, layers: list[SwitchedLayer]) -> None:
        self._layers = layers
        self._on: set[nn.Module] = set()
        self._undo = ExitStack()
        # Input quantizers of other modules that are on during the call of a layer.
        self._borrowed: dict[nn.Module, Quantizer] = {}

    def set(self, layers: list[SwitchedLayer]) -> None:
        """Switches these layers on and all others off."""
        self._on = {layer.module for layer in layers}
        for layer in self._layers:
            for quantizer in layer.quantizers:
                if quantizer.quantizing != (layer.module in self._on):  # setting a switch is slow
                    quantizer.quantizing = not quantizer.quantizing

    def set_weights(self, layers: list[SwitchedLayer]) -> None:
        """Switches the quantizers of these layers' weights on and all others off, including inputs and outputs."""
        self.set([])
        for layer in layers:
            if layer.weight_quantizer is not None:
                layer.weight_quantizer.quantizing = True

    def __enter__(self) -> "Switches":
        for layer in self._layers:
            grids = input_grids_of(layer.module) if isinstance(layer.module, QuantizedLayer) else []
            if any(grid is not None and grid not in layer.quantizers for grid in grids):
                before = layer.module.register_forward_pre_hook(self._borrow, with_kwargs=True)
                after = layer.module.register_forward_hook(self._give_back, always_call=True)
                self._undo.callback(before.remove)
                self._undo.callback(after.remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def _borrow(self, layer: QuantizedLayer, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        grid = input_grid_of(layer)  # if it is the layer's own, it is on
        if layer not in self._on or grid is None or grid.quantizing:
            return None
        grid.quantizing = True
        self._borrowed[layer] = grid
        return changed_inputs(layer, args, kwargs, grid)

    def _give_back(self, layer: nn.Module, args: Args, result: Result) -> None:
        grid = self._borrowed.pop(layer, None)
        if grid is not None:
            grid.quantizing = False


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """A weight whose width can be chosen. Layers that share the weight share the choice."""

    layers: list[SwitchedLayer]
    # The specs of the layers' weights: as configured, and for each width.
    own: list[QuantSpec]
    specs: dict[int, list[QuantSpec]]

    @torch.no_grad()
    def set(self, bits: int | None) -> None:
        """Gives the weight a grid of this width, or the grid of the config if it is None, with a new scale."""
        for layer, spec in zip(self.layers, self.own if bits is None else self.specs[bits], strict=True):
            quantizer = quantizer_of(layer)
            give_spec(quantizer, spec, layer.module, "weight_quantizer")
            if isinstance(quantizer, FakeQuantize) and not quantizer.is_dynamic:
                quantizer.train()  # in which it observes
                quantizer(weight_of(layer))
                quantizer.eval()


def checked_candidates(candidates: object) -> list[int]:
    """Returns the widths in ascending order. Raises an error that says what is allowed."""
    if isinstance(candidates, (str, bytes)) or not isinstance(candidates, Iterable):
        raise TypeError(f"`candidates` must be numbers of bits, such as (2, 4, 8), got {candidates!r}.")
    widths = list(candidates)
    if not widths or any(type(bits) is not int or not 1 <= bits <= _WIDEST for bits in widths):
        raise ValueError(
            f"`candidates` must be numbers of bits from 1 to {_WIDEST}, such as (2, 4, 8), got {candidates!r}."
        )
    return sorted(set(widths))


def find_choices(model: nn.Module, layers: list[SwitchedLayer], candidates: list[int]) -> list[Choice]:
    """Returns the choices of a prepared model, in its order, with the widths that each can have.

    A width that the target does not support is replaced by one that it does. Layers with `first_last_bits` keep at
    least this width; if no candidate is as wide, they keep the width that they have. So do weights in float formats and
    with block scales. Raises ValueError if there are no others.
    """
    made = preparation(model)
    target = _runtimes.find(made.config.target)
    tied: dict[int, list[SwitchedLayer]] = {}
    for layer in layers:
        if layer.weight_quantizer is not None:
            weight = stored_weight(layer.module, _kind(layer).weight_name)
            # A weight that is computed whenever it is read is tied to no other.
            tied.setdefault(id(weight if isinstance(weight, nn.Parameter) else layer), []).append(layer)
    if tied and not any(quantizer_of(layer).spec.is_integer for group in tied.values() for layer in group):
        raise ValueError(
            f"`candidates` are widths of integer grids, and no weight is on one, got {candidates} for weights in "
            f"{quantizer_of(next(iter(tied.values()))[0]).spec}.\n"
            "The width of a float format, of MX and of NVFP4 follows from the format. Leave out `candidates`, and "
            "compare configs with different formats instead."
        )
    return [_choice(group, candidates, target, made) for group in tied.values()]


def _choice(layers: list[SwitchedLayer], candidates: list[int], target: Target, made: Preparation) -> Choice:
    fewest = 0
    for layer in layers:
        spec = quantizer_of(layer).spec
        if spec.signed and candidates[0] < 2:
            raise ValueError(
                f"{layer.path or 'The model'} has signed weights ({spec}), which need at least 2 bits, got the "
                f"candidate {candidates[0]}.\nUse candidates from 2 on, or an unsigned, affine grid."
            )
        if layer.path in made.first_last:
            assert made.config.first_last_bits is not None
            fewest = max(fewest, min(made.config.first_last_bits, spec.bits))
    specs: dict[int, list[QuantSpec]] = {}
    for bits in candidates:
        found = [weight_at(quantizer_of(layer).spec, bits, target) for layer in layers]
        if found[0].bits >= fewest:
            specs.setdefault(found[0].bits, found)
    if not specs:
        widest = max(quantizer_of(layer).spec.bits for layer in layers)
        specs = {widest: [weight_at(quantizer_of(layer).spec, widest, target) for layer in layers]}
    return Choice(layers, [quantizer_of(layer).spec for layer in layers], dict(sorted(specs.items())))


def quantizer_of(layer: SwitchedLayer) -> Quantizer:
    """Returns the quantizer of the weight of a layer that has one."""
    assert layer.weight_quantizer is not None
    return layer.weight_quantizer


def weight_of(layer: SwitchedLayer) -> Tensor:
    """Returns the weight of a layer that it multiplies by, in float."""
    return read_weight(layer.module, _kind(layer))


def _kind(layer: SwitchedLayer) -> type[LayerKind]:
    kind = kind_of(layer.module)
    assert kind is not None
    return kind


def scales_of(layer: SwitchedLayer) -> int:
    """Returns the number of scales of the weight."""
    return prod(quantizer_of(layer)._blocks or ())


def layer_config(model: nn.Module, layer: SwitchedLayer) -> LayerConfig:
    """Returns the config of a layer with a quantized weight, with the grids that the target and `first_last_bits` gave.

    A rule with this config leaves the layer as it is.
    """
    made = preparation(model)
    use, _ = config_of(layer.path, layer.module, made.config)
    assert use is not None
    assert use.weight is not None
    # `prepare` turns axis 0 into the axis of the output channels.
    use = dataclasses.replace(use, weight=dataclasses.replace(quantizer_of(layer).spec, axis=use.weight.axis))
    assert isinstance(layer.module, QuantizedLayer)
    wide = input_grids_of(layer.module)[0]
    if layer.path not in made.first_last or use.input is None or wide is None:
        return use
    # Layers that a rule matches do not get `first_last_bits`, so the rule must have the bits of the input.
    return dataclasses.replace(use, input=dataclasses.replace(use.input, bits=wide.spec.bits))
