"""Layers whose quantizers are switched on and off together."""

import dataclasses
from contextlib import ExitStack

from torch import nn

from fakequant._diagnosis.inputs import changed_inputs
from fakequant._diagnosis.watching import Args, Kwargs, Result
from fakequant._prepare.prepare import preparation
from fakequant.nn._call_quantizers import CallQuantizers, quantizers_in
from fakequant.nn._function_calls import CallingModule
from fakequant.nn._quantized_layer import QuantizedLayer, input_grid_of, input_grids_of
from fakequant.nn._quantizer import Quantizer
from fakequant.nn._records import float_class_of


@dataclasses.dataclass(frozen=True, eq=False)
class Unit:
    """A quantized layer, or another module that quantizes its result or results of functions in its code."""

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


def find_units(model: nn.Module) -> list[Unit]:
    """Returns all units of a prepared model, in its order."""
    outputs = set(preparation(model).outputs)
    attentions = {
        module.out_proj: path for path, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)
    }
    return [
        _unit(path, module, attentions.get(module))
        for path, module in model.named_modules()
        if isinstance(module, QuantizedLayer) or path in outputs or _quantizers_of_functions(module)
    ]


def _unit(path: str, module: nn.Module, part_of: str | None) -> Unit:
    if not isinstance(module, QuantizedLayer):
        found = [*_quantizers_of_functions(module), *quantizers_in(module._modules.get("output_quantizer"))]
        return Unit(path, float_class_of(module).__name__, module, found, 0, found[0].spec.bits, 0, part_of)
    children = [child for child in module._modules.values() if isinstance(child, (Quantizer, CallQuantizers))]
    own = [quantizer for child in children for quantizer in quantizers_in(child)]
    weight = getattr(module, module._fakequant.kind.weight_name)
    float_bits = 8 * weight.element_size()
    bits = float_bits if module.weight_quantizer is None else module.weight_quantizer.spec.bits
    return Unit(path, module._fakequant.float_class.__name__, module, own, weight.numel(), bits, float_bits, part_of)


def _quantizers_of_functions(module: nn.Module) -> list[Quantizer]:
    found = module.function_quantizers.values() if isinstance(module, CallingModule) else ()
    return [quantizer for slot in found for quantizer in quantizers_in(slot)]


class Switches:
    """Switches the quantizers of units on and off.

    If another module quantizes the input of a layer, that quantizer is also applied while the layer quantizes, even if
    the other module is off. Without that module the layer would have had its own input quantizer.
    """

    def __init__(self, units: list[Unit]) -> None:
        self._units = units
        self._on: set[nn.Module] = set()
        self._undo = ExitStack()
        # Input quantizers of other modules that are on during the call of a layer.
        self._borrowed: dict[nn.Module, Quantizer] = {}

    def set(self, units: list[Unit]) -> None:
        """Switches these units on and all others off."""
        self._on = {unit.module for unit in units}
        for unit in self._units:
            for quantizer in unit.quantizers:
                if quantizer.quantizing != (unit.module in self._on):  # setting a switch is slow
                    quantizer.quantizing = not quantizer.quantizing

    def set_weights(self, units: list[Unit]) -> None:
        """Switches the quantizers of these units' weights on and all others off, also those of inputs and results."""
        self.set([])
        for unit in units:
            if unit.weight_quantizer is not None:
                unit.weight_quantizer.quantizing = True

    def __enter__(self) -> "Switches":
        for unit in self._units:
            grids = input_grids_of(unit.module) if isinstance(unit.module, QuantizedLayer) else []
            if any(grid is not None and grid not in unit.quantizers for grid in grids):
                before = unit.module.register_forward_pre_hook(self._borrow, with_kwargs=True)
                after = unit.module.register_forward_hook(self._give_back, always_call=True)
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
