"""`OnnxExport`: what `export_onnx` has written."""

import dataclasses
from pathlib import Path

from torch import nn

from fakequant._convert.golden.integer_layer import IntegerLayer, is_integer
from fakequant._convert.golden.quantizer import GoldenQuantizer
from fakequant._export.layers import reason_for_float
from fakequant._export.onnx.exported_modules import has_dynamic_kernel
from fakequant._util.shown import Shown
from fakequant._util.text import table
from fakequant.nn._layer_kinds import find_kind
from fakequant.nn._quantized_layer import input_grid_of


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class OnnxExport(Shown):
    """The result of `export_onnx`. Prints as a table.

    Attributes:
        path: The file.
        external_data: The second file, with the large tensors. None if they are in the first.
        target: The target that it was written for.
        opset: Its opset.
        bytes: Its size, with the second file.
        inputs: The shapes of its inputs, by name. An axis that may have any length has a name.
        outputs: The same for its outputs.
        integers: The layers whose codes allow integer kernels. `verify` finds out which ones the runtime uses.
        floats: The layers that are computed in float in any case, each with the reason.
    """

    path: str
    external_data: str | None
    target: str
    opset: int
    bytes: int
    inputs: dict[str, tuple[int | str, ...]]
    outputs: dict[str, tuple[int | str, ...]]
    integers: tuple[str, ...]
    floats: dict[str, str]

    def __str__(self) -> str:
        names = " and ".join(Path(file).name for file in (self.path, self.external_data) if file is not None)
        lines = [f"{names}: {self.bytes:,} bytes, target {self.target}, opset {self.opset}"]
        for word, shapes in (("inputs", self.inputs), ("outputs", self.outputs)):
            named = (f"{name} of shape {' x '.join(map(str, shape)) or '()'}" for name, shape in shapes.items())
            lines.append(f"{word}: {', '.join(named)}")
        lines.append(f"layers in integers: {len(self.integers)} of {len(self.integers) + len(self.floats)}")
        if self.floats:
            rows = [[path or "the model", reason] for path, reason in self.floats.items()]
            lines += ["", table(["in float", "reason"], rows)]
        return "\n".join(lines)


def layers_of(golden: nn.Module) -> tuple[tuple[str, ...], dict[str, str]]:
    """Returns the layers of a golden model that integer kernels can compute, and the others with the reason.

    Embeddings are neither, because they compute no products.
    """
    integers, floats = [], {}
    for path, module in golden.named_modules():
        kind = module._fakequant.kind if isinstance(module, IntegerLayer) else find_kind(type(module))
        if kind is None or not kind.has_input:
            continue
        reason: str | None = "it is not quantized"
        if isinstance(module, IntegerLayer):
            grid, weight = input_grid_of(module), module._fakequant.weight_spec
            reason = "its weight is not quantized"
            if weight is not None:
                reason = reason_for_float(weight, grid if isinstance(grid, GoldenQuantizer) else None)
            if is_integer(module) or has_dynamic_kernel(module):
                reason = None
        if reason is None:
            integers.append(path)
        else:
            floats[path] = reason
    return tuple(integers), floats
