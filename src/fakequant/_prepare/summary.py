"""`summary`: which tensors of a prepared model are quantized, and why the other ones are not."""

import dataclasses
from math import prod
from typing import Any

from torch import nn

from fakequant._convert.left_in_float import unreached_layers
from fakequant._prepare.first_last import notes_on_formats
from fakequant._prepare.prepare import preparation
from fakequant._prepare.shares import Amount, quantized_parameters, shares_in_words
from fakequant._prepare.weight_widths import weight_bytes
from fakequant._train.unfit_ranges import find_problem
from fakequant._util.text_table import table
from fakequant.nn._call_quantizers import CallQuantizers
from fakequant.nn._function_calls import FunctionQuantizers
from fakequant.nn._model_quantizers import quantizers
from fakequant.nn._owned_product import stored_weight
from fakequant.nn._quantized_layer import QuantizedLayer, input_grids_of
from fakequant.nn._quantizer import Quantizer
from fakequant.nn._records import float_class_of


@dataclasses.dataclass(frozen=True)
class LayerSummary:
    """A quantized layer or result, with its specs as text. "-" stands for a tensor that stays in float."""

    path: str
    kind: str
    weight: str
    input: str
    output: str


@dataclasses.dataclass(frozen=True)
class Summary:
    """The result of `summary`. It prints as tables."""

    layers: list[LayerSummary]
    # Why modules stay in float, by path.
    floats: dict[str, str]
    # Rules that matched nothing, each with similar paths.
    unmatched: list[tuple[str, list[str]]]
    # Operands that are not quantized, formats that `first_last_bits` does not widen, layers that no data has reached,
    # and ranges that do not fit.
    notes: list[str]
    # The number of parameters of the float model.
    parameters: int
    # The size of the parameters in float.
    bytes_before: int
    # The size of the parameters with quantized weights stored as codes and scales.
    bytes_after: int
    # Multiplications in layers and matrix products on the example of `prepare`, and how many of them have a quantized
    # weight and a quantized input. 0 without an example.
    multiplications: int = 0
    quantized_multiplications: int = 0
    # The number of parameters that are quantized weights.
    quantized_parameters: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields by name, as dicts, lists, numbers and strings."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        header = ["quantized", "kind", "weight", "input", "output"]
        parts = [
            shares_in_words(
                Amount(self.multiplications, self.parameters),
                Amount(self.quantized_multiplications, self.quantized_parameters),
            ),
            table(header, [dataclasses.astuple(layer) for layer in self.layers]),
        ]
        if self.floats:
            parts.append(table(["in float", "why"], list(self.floats.items())))
        if self.unmatched:
            rows = [[rule, ", ".join(near) or "-"] for rule, near in self.unmatched]
            parts.append(table(["rule that matches nothing", "similar paths"], rows))
        parts += self.notes
        parts.append(
            f"{self.parameters:,} parameters, {self.bytes_before:,} bytes in float, {self.bytes_after:,} with "
            f"quantized weights ({self.bytes_after / max(self.bytes_before, 1):.0%})"
        )
        return "\n\n".join(parts)


def summary(model: nn.Module) -> Summary:
    """Returns a printable summary of a prepared model: the specs of its layers, and why other modules stay in float.

    >>> import fakequant as fq
    >>> model = fq.prepare(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), fq.recipes.int8())
    >>> print(summary(model))
    quantized: 57.1% of 56 parameters
    <BLANKLINE>
    quantized | kind   | weight                             | input             | output
    ----------+--------+------------------------------------+-------------------+-------
    0         | Linear | int8 narrow, per channel on axis 0 | uint8, per tensor | -
    <BLANKLINE>
    in float | why
    ---------+--------------------------------------------------------
    1        | batch norm; it folds into 0 when the model is converted
    <BLANKLINE>
    56 parameters, 224 bytes in float, 160 with quantized weights (71%)
    """
    made = preparation(model)
    folded = {norm: layer for layer, norm in made.norms.items()}
    layers = []
    for path, module in model.named_modules():
        if isinstance(module, QuantizedLayer):
            kind = module._fakequant.float_class.__name__
        elif path in made.outputs:
            kind = float_class_of(module).__name__
        elif isinstance(module, FunctionQuantizers):
            layers += [
                LayerSummary(f"{path}.{key}", "function", "-", "-", _words(slot))
                for key, slot in module.items()
                if isinstance(slot, (Quantizer, CallQuantizers))
            ]
            continue
        else:
            continue
        weight, input, output = (getattr(module, f"{name}_quantizer", None) for name in ("weight", "input", "output"))
        lent = module._fakequant.input_grid if isinstance(module, QuantizedLayer) and input is None else None
        layers.append(LayerSummary(path, kind, _words(weight), _words(input, lent), _words(output)))
    before, after = _bytes(model)
    modules = dict(model.named_modules())
    floats = {
        path: f"{reason}; it folds into {folded[path]} when the model is converted" if path in folded else reason
        for path, reason in made.floats.items()
    }
    return Summary(
        layers,
        floats,
        made.unmatched,
        made.notes + notes_on_formats(made.first_last, made.config) + _unreached(model) + _unfit(model),
        sum(p.numel() for p in _float_parameters(model)),
        before,
        after,
        sum(made.multiplications.values()),
        sum(
            n
            for call, n in made.multiplications.items()
            if call in made.products or _has_quantized_product(modules.get(call))
        ),
        quantized_parameters(model),
    )


def _has_quantized_product(module: nn.Module | None) -> bool:
    """Returns True for a layer with a quantized weight and a quantized input."""
    return isinstance(module, QuantizedLayer) and None not in (module.weight_quantizer, *input_grids_of(module))


def _unreached(model: nn.Module) -> list[str]:
    """Returns notes on layers whose input has no scale, although the inputs of other layers have one."""
    unreached = unreached_layers(model)
    layers = [m for m in model.modules() if isinstance(m, QuantizedLayer) and any(input_grids_of(m))]
    if len(unreached) == len(layers):
        return []  # the model is not calibrated
    return [
        f"no data has reached {path}: it computes in float, or other code uses its weight without quantizing it"
        for path in unreached
    ]


def _unfit(model: nn.Module) -> list[str]:
    """Returns notes on quantizers of activations whose range does not fit, as far as the range shows it."""
    weights = {module.weight_quantizer for module in model.modules() if isinstance(module, QuantizedLayer)}
    return [
        f"the range of {path} does not fit: {problem.words}"
        for path, quantizer in quantizers(model)
        if quantizer not in weights and (problem := find_problem(quantizer, None)) is not None
    ]


def _words(slot: Quantizer | CallQuantizers | None, lent: Quantizer | None = None) -> str:
    """Describes the quantizer of a tensor, or of each call. It may belong to another module (`lent`)."""
    if isinstance(slot, CallQuantizers):
        every = [_words(slot.own(turn), slot.borrowed.get(turn)) for turn in range(slot.calls.recorded)]
        if len(set(every)) == 1:
            return f"{every[0]}; {len(set(slot.all()))} quantizers for {len(every)} calls"
        return "; ".join(f"call {turn}: {words}" for turn, words in enumerate(every))
    if slot is None:
        return "-" if lent is None else f"that of {lent.path}"
    quantizer = slot
    learned = ", learned" if any(True for _ in quantizer.parameters()) else ""
    return f"{quantizer.spec}{learned}"


def _float_parameters(model: nn.Module) -> list[nn.Parameter]:
    own = {id(p) for _, quantizer in quantizers(model) for p in quantizer.parameters()}
    return [p for p in model.parameters() if id(p) not in own and not nn.parameter.is_lazy(p)]


def _bytes(model: nn.Module) -> tuple[int, int]:
    """Returns the size of all parameters in float, and with quantized weights stored as codes and scales."""
    sizes = {id(p): p.numel() * p.element_size() for p in _float_parameters(model)}
    before = sum(sizes.values())
    for module in model.modules():
        quantizer = getattr(module, "weight_quantizer", None)
        if isinstance(module, QuantizedLayer) and isinstance(quantizer, Quantizer):
            weight = stored_weight(module, module._fakequant.kind.weight_name)
            scales, spec = prod(quantizer._blocks or ()), quantizer.spec
            sizes[id(weight)] = weight_bytes(weight.numel(), spec.bits, scales, spec.scale_format)
    return before, sum(sizes.values())
