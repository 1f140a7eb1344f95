"""`LitertExport`: which operators of an exported file are computed in integers, and why others are not."""

import dataclasses
from math import prod

import numpy as np

from fakequant._export.litert.graph import Graph, Operator, Tensor
from fakequant._util.shown import Shown
from fakequant._util.text import table

_LAYERS = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "TRANSPOSE_CONV", "CONV_3D")
# Operators that are computed on codes between quantizers, and those that move or limit codes. Why they are not.
_BETWEEN_GRIDS = {"ADD", "MUL", "MEAN"}
_NO_GRIDS = "its operands or its result are not quantized, or LiteRT has no kernel for their scales or types"
_OF_CODES = {
    "MAX_POOL_2D", "PAD", "PADV2", "CONCATENATION", "STRIDED_SLICE", "GATHER", "TILE", "BROADCAST_TO", "REVERSE_V2",
    "RESIZE_NEAREST_NEIGHBOR", "RELU", "RELU6", "MAXIMUM", "MINIMUM",
}  # fmt: skip
_NO_INPUT = "its input is not quantized"
# Why all others are computed in float. LiteRT has integer kernels for some.
_NO_CODES = "the target computes it in float, whatever kernels LiteRT has"
# Operators that only move elements, or change how they are stored.
_FREE = {"RESHAPE", "TRANSPOSE", "QUANTIZE", "DEQUANTIZE", "SLICE", "CAST"}


@dataclasses.dataclass(frozen=True)
class LitertOperator:
    """An operator of a file."""

    # The path of the module whose code calls it, and its name in LiteRT.
    path: str
    name: str
    # The type of the codes of activations, "int8" or "int16"; "dynamic" if the kernel computes the scales of its input,
    # or "float".
    how: str
    multiplications: int = 0
    # Why it is computed in float. Empty if it is not.
    why: str = ""


@dataclasses.dataclass(frozen=True, repr=False)
class LitertExport(Shown):
    """How the operators of an exported file are computed.

    Attributes:
        layers: Linear layers and convolutions.
        products: Products of two activations.
        others: Further operators on floats.
        transposes: The modules whose code needs axes in another order than the operator before it.
        operators: The names of all operators of the file, with how often each occurs.
        bytes: The size of the file.
        tensor_bytes: The most memory that inputs, results and tensors between operators take at a time. An arena of
            LiteRT for Microcontrollers must be larger.
        has_any_batch: Whether the file takes batches of any length.
    """

    layers: tuple[LitertOperator, ...]
    products: tuple[LitertOperator, ...]
    others: tuple[LitertOperator, ...]
    transposes: tuple[str, ...]
    operators: dict[str, int]
    bytes: int
    tensor_bytes: int
    has_any_batch: bool

    @property
    def share(self) -> float:
        """The share of the multiplications of layers that are computed in integers, from 0 to 1."""
        return _share(self.layers)

    def __str__(self) -> str:
        """Returns the numbers, and a table of what is computed in float."""
        total = sum(one.multiplications for one in (*self.layers, *self.products))
        layers = sum(one.how != "float" for one in self.layers)
        lines = [
            f"{total:,} multiplications: {100 * _share((*self.layers, *self.products)):.1f}% in integers",
            f"layers in integers: {layers} of {len(self.layers)}",
            f"transposes: {len(self.transposes)}",
            f"bytes: {self.bytes:,} of the file, {self.tensor_bytes:,} of tensors at a time",
            f"batches: {'any length' if self.has_any_batch else 'the length of the example'}",
        ]
        rest = [one for one in (*self.layers, *self.products, *self.others) if one.how == "float"]
        if rest:
            rows = [(one.path or "the model", one.name, one.why) for one in rest]
            lines += ["", table(["module", "operator in float", "why"], list(dict.fromkeys(rows)))]
        return "\n".join(lines)


def _share(operators: tuple[LitertOperator, ...]) -> float:
    total = sum(one.multiplications for one in operators)
    return sum(one.multiplications for one in operators if one.how != "float") / total if total else 0.0


def report_of(graph: Graph, size: int, *, has_any_batch: bool) -> LitertExport:
    """Returns the report of a graph."""
    layers, products, others, counts = [], [], [], dict[str, int]()
    makers = {id(tensor): operator for operator in graph.operators for tensor in operator.outputs}
    for operator in graph.operators:
        counts[operator.code] = counts.get(operator.code, 0) + 1
        how = how_computed(operator)
        made = LitertOperator(operator.path, operator.code, how, operator.products, operator.why_float)
        if operator.code in _LAYERS:
            layers.append(made)
        elif operator.products:
            products.append(made)
        elif how == "float" and operator.code not in _FREE and not operator.is_conversion:
            others.append(dataclasses.replace(made, why=_why_float(operator, makers)))
    moves = tuple(operator.path for operator in graph.operators if operator.code == "TRANSPOSE")
    parts = tuple(layers), tuple(products), tuple(others)
    return LitertExport(*parts, moves, counts, size, _most_bytes(graph), has_any_batch)


def _why_float(operator: Operator, makers: dict[int, Operator]) -> str:
    """Returns why an operator is computed in float. `makers` has the operators that compute tensors."""
    if operator.code in _BETWEEN_GRIDS:
        return _NO_GRIDS
    floats = [tensor for tensor in operator.inputs if tensor is not None and tensor.dtype == "float32"]
    has_codes = all(_was_codes(tensor, makers) for tensor in floats if tensor.data is None)
    return _NO_INPUT if operator.code in _OF_CODES and not has_codes else _NO_CODES


def _was_codes(tensor: Tensor, makers: dict[int, Operator]) -> bool:
    maker = makers.get(id(tensor))
    while maker is not None and maker.code in _FREE - {"DEQUANTIZE"}:
        maker = makers.get(id(maker.inputs[0]))
    return maker is not None and maker.code == "DEQUANTIZE"


def _most_bytes(graph: Graph) -> int:
    """Returns the most bytes of tensors that are needed at a time.

    Inputs are needed from the start, results until the end, and others from the operator that computes them to the last
    one that reads them.
    """
    first = {id(tensor): 0 for _, tensor in graph.inputs}
    last = dict(first)
    for number, operator in enumerate(graph.operators):
        for tensor in (*filter(None, operator.inputs), *operator.outputs):
            first.setdefault(id(tensor), number)
            last[id(tensor)] = number
    last |= {id(tensor): len(graph.operators) for _, tensor in graph.outputs}
    totals = np.zeros(len(graph.operators), np.int64)
    for tensor in graph.tensors():
        if tensor.data is None:
            size = int(prod(tensor.shape)) * np.dtype(tensor.dtype).itemsize
            totals[first[id(tensor)] : last[id(tensor)] + 1] += size
    return int(totals.max(initial=0))


def how_computed(operator: Operator) -> str:
    """Returns how an operator is computed, as `LitertOperator` has it. Integers that are no codes count as "int8"."""
    tensors = [*filter(None, operator.inputs), *operator.outputs]
    codes = [tensor.dtype for tensor in operator.outputs if tensor.is_codes]
    if codes or all(tensor.dtype != "float32" for tensor in tensors):
        return codes[0] if codes else "int8"
    weight = operator.inputs[1] if len(operator.inputs) > 1 and operator.code in _LAYERS else None
    return "dynamic" if weight is not None and weight.dtype in ("int8", "int4") else "float"
