"""`summary`: which tensors of a prepared model are quantized, why the other ones are not, and how much of it is.

The size of a part is the number of its parameters, and the number of multiplications in layers and in products of
matrices on the example.
"""

import dataclasses
from collections.abc import Container
from math import prod
from typing import Any, NamedTuple

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from fakequant._model.unfit_ranges import find_problem
from fakequant._prepare.attach import FLOW_BUFFER, preparation
from fakequant._prepare.bit_widths import notes_on_formats, weight_bytes
from fakequant._util.shown import Shown
from fakequant._util.text import table
from fakequant.nn._call_quantizers import CallQuantizers
from fakequant.nn._function_calls import FunctionQuantizers
from fakequant.nn._integer_sums import sums_in_words
from fakequant.nn._kv_cache import CACHE_QUANTIZERS, has_cache_quantizers
from fakequant.nn._model_quantizers import named_quantizers, unreached_layers, weight_quantizers
from fakequant.nn._owners import stored_weight
from fakequant.nn._quantized_layer import QuantizedLayer, input_grids_of
from fakequant.nn._quantizer import Quantizer
from fakequant.nn._records import float_class_of


class Amount(NamedTuple):
    """A part of a model: its multiplications on the example of `prepare`, and its parameters."""

    multiplications: int
    parameters: int


@dataclasses.dataclass(frozen=True)
class LayerSummary:
    """A quantized layer or result, with its specs as text. "-" stands for a tensor that stays in float."""

    path: str
    kind: str
    weight: str
    input: str
    output: str


@dataclasses.dataclass(frozen=True, repr=False)
class Summary(Shown):
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
    # How layers with a quantized weight and a quantized input add up products here: "float", or how exact sums are
    # computed on this CPU. By path.
    sums: dict[str, str] = dataclasses.field(default_factory=dict)

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
        if self.sums:
            exact = sum(how != "float" for how in self.sums.values())
            parts.append(f"sums of products are exact in {exact} of {len(self.sums)} layers")
        parts.append(
            f"{self.parameters:,} parameters, {self.bytes_before:,} bytes in float, {self.bytes_after:,} with "
            f"quantized weights ({self.bytes_after / max(self.bytes_before, 1):.0%})"
        )
        return "\n\n".join(parts)


def summary(model: nn.Module) -> Summary:
    """Returns a printable summary of a prepared model: the specs of its layers, and why other modules stay in float.

    >>> import torch, fakequant as fq
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    >>> model = fq.prepare(model, fq.recipes.int8(), example=torch.ones(1, 4))
    >>> print(summary(model))
    quantized: 100.0% of 32 multiplications, 57.1% of 56 parameters
    <BLANKLINE>
    quantized | kind   | weight                             | input             | output
    ----------+--------+------------------------------------+-------------------+-------
    0         | Linear | int8 narrow, per channel on axis 0 | uint8, per tensor | -
    <BLANKLINE>
    in float | why
    ---------+--------------------------------------------------------
    1        | batch norm; it folds into 0 when the model is converted
    <BLANKLINE>
    sums of products are exact in 1 of 1 layers
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
        elif has_cache_quantizers(module):
            layers += [
                LayerSummary(f"{path}.{name}", "cache", "-", "-", _words(slot))
                for name in CACHE_QUANTIZERS
                for slot in (module._modules[name],)
                if isinstance(slot, Quantizer)
            ]
            continue
        else:
            continue
        weight, input, output = (getattr(module, f"{name}_quantizer", None) for name in ("weight", "input", "output"))
        lent = module._fakequant.input_grid if isinstance(module, QuantizedLayer) and input is None else None
        layers.append(LayerSummary(path, kind, _words(weight), _words(input, lent), _words(output)))
    before, after = _bytes(model)
    modules = dict(model.named_modules())
    floats = dict(made.floats)
    floats |= {
        norm: f"{floats[norm]}; it folds into {layer} when the model is converted"
        for norm, layer in folded.items()
        if norm in floats
    }
    if FLOW_BUFFER not in model._buffers:
        norms = [path for path in floats if isinstance(modules.get(path), nn.modules.batchnorm._BatchNorm)]
        floats |= {norm: f"{floats[norm]}; it does not fold, because `prepare` had no example" for norm in norms}
    return Summary(
        layers=layers,
        floats=floats,
        unmatched=made.unmatched,
        notes=made.notes + notes_on_formats(model, made) + _unreached(model) + _unfit(model),
        parameters=sum(p.numel() for p in _float_parameters(model)),
        bytes_before=before,
        bytes_after=after,
        multiplications=sum(made.multiplications.values()),
        quantized_multiplications=sum(
            number
            for call, number in made.multiplications.items()
            if call in made.products or _has_quantized_product(modules.get(call))
        ),
        quantized_parameters=quantized_parameters(model),
        sums={
            path: sums_in_words(module, input_grids_of(module)[0])
            for path, module in model.named_modules()
            if _has_quantized_product(module)
        },
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
    """Returns notes on quantizers of activations whose range does not fit, if the range alone shows it."""
    weights = weight_quantizers(model)
    return [
        f"the range of {path} does not fit: {problem.words}"
        for path, quantizer in named_quantizers(model)
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
    own = {id(p) for _, quantizer in named_quantizers(model) for p in quantizer.parameters()}
    return [p for p in model.parameters() if id(p) not in own and not nn.parameter.is_lazy(p)]


def _bytes(model: nn.Module) -> tuple[int, int]:
    """Returns the size of all parameters in float, and with quantized weights stored as codes and scales."""
    sizes = {id(p): p.numel() * p.element_size() for p in _float_parameters(model)}
    before = sum(sizes.values())
    for module in model.modules():
        quantizer = getattr(module, "weight_quantizer", None)
        if isinstance(module, QuantizedLayer) and isinstance(quantizer, Quantizer):
            name = module._fakequant.kind.weight_name
            weight = stored_weight(module, name)
            stored = id(weight)
            if is_parametrized(module, name):  # codes replace what the weight is computed from
                stored = id(module)
                for p in module.get_submodule(f"parametrizations.{name}").parameters():
                    sizes.pop(id(p), None)
            scales, spec = prod(quantizer._blocks or ()), quantizer.spec
            sizes[stored] = weight_bytes(weight.numel(), spec.bits, scales, spec.scale_format)
    return before, sum(sizes.values())


# --- shares -----------------------------------------------------------------------------------------


def shares_in_words(everything: Amount, quantized: Amount, integer: Amount | None = None) -> str:
    """Returns the lines that open `summary`, `check`, `verify` and the report.

    Multiplications are left out if they are not known, because `prepare` had no example.

    Args:
        everything: The whole model.
        quantized: Multiplications with a quantized weight and a quantized input; parameters that are quantized.
        integer: The part of these that a runtime computes in integers. None if no runtime was asked.

    >>> print(shares_in_words(Amount(2000, 400), Amount(1900, 390), Amount(1800, 380)))
    quantized: 95.0% of 2,000 multiplications, 97.5% of 400 parameters
    in integers in this runtime: 90.0% of the multiplications, 95.0% of the parameters
    """
    parameters = f"{quantized.parameters / max(everything.parameters, 1):.1%} of {everything.parameters:,} parameters"
    number = f"{everything.multiplications:,}"
    if not everything.multiplications:
        words = parameters
    elif quantized.parameters and not quantized.multiplications:
        words = f"weights only, {parameters}; the inputs of {number} multiplications are floats"
    else:
        words = (
            f"{quantized.multiplications / everything.multiplications:.1%} of {number} multiplications, {parameters}"
        )
    return "\n".join([f"quantized: {words}", *_in_integers(everything, integer)])


def _in_integers(everything: Amount, integer: Amount | None) -> list[str]:
    if integer is None:
        return []
    words = [f"{integer.parameters / max(everything.parameters, 1):.1%} of the parameters"]
    if everything.multiplications:
        words.insert(0, f"{integer.multiplications / everything.multiplications:.1%} of the multiplications")
    return [f"in integers in this runtime: {', '.join(words)}"]


def quantized_parameters(model: nn.Module, without: Container[str] = ()) -> int:
    """Returns the number of parameters of a prepared model that are weights of quantized layers.

    A weight that several layers share counts once. Weights of the layers in `without` do not count, not even if another
    layer shares them.
    """
    sizes: dict[int, int] = {}
    left_out = set()
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, QuantizedLayer) and module.weight_quantizer is not None:
            name = module._fakequant.kind.weight_name
            own = module._parameters.get(name)
            key = id(module if own is None else own)  # a parametrized weight is computed whenever it is read
            sizes[key] = getattr(module, name).numel()
            left_out |= {key} if path in without else set()
    return sum(size for key, size in sizes.items() if key not in left_out)
