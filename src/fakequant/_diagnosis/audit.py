"""`audit`: how far the weights of a file are from those that were trained, layer by layer.

A converter may choose scales again, use another format or leave layers in float. Here V are the values of a
layer in the file, Q those of the prepared model on its grid with the step s, and W its float weights:

    moved     elements with |V - Q| > s / 4
    steps     the largest |V - Q| / s
    error     the added error over the error of rounding: rms(V - Q) / rms(W - Q)
"""

import dataclasses
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fakequant._backends.torch import tensor_functions
from fakequant._convert.convert import convert
from fakequant._convert.golden.integer_layer import IntegerLayer, float_weight
from fakequant._export.compressed_tensors.loading import read_folder
from fakequant._export.gguf.loading import is_gguf, read_gguf
from fakequant._export.loaded_grids import LoadedModel
from fakequant._export.onnx.reading import FileWeight, file_weights
from fakequant._export.prepared_layers import grid_of
from fakequant._model.running import check_module, evaluating
from fakequant._prepare.attach import preparation
from fakequant._util.shown import Shown
from fakequant._util.text import table
from fakequant.nn._owners import stored_weight
from fakequant.nn._quantized_layer import QuantizedLayer
from fakequant.spec import QuantSpec

_QUARTER = 0.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerAudit:
    """A layer of the model and what a file has for it.

    Attributes:
        path: The path of the layer.
        trained: Its spec in the model.
        stored: What the file has: a spec, a type, or "nothing".
        elements: The number of its weights.
        moved: The number of weights that are more than a quarter of a step away from where they were trained.
        differing: The number of weights whose bits differ.
        steps: The largest distance, in steps.
        error: The added error over the error of rounding. None if rounding has no error.
    """

    path: str
    trained: str
    stored: str
    elements: int
    moved: int
    differing: int
    steps: float
    error: float | None

    @property
    def is_equal(self) -> bool:
        """Whether the file has the trained values, bit by bit."""
        return self.differing == 0


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Audit(Shown):
    """The result of `audit`. Prints as a table.

    Attributes:
        file: The file or folder.
        layers: The quantized layers of the model, in its order.
    """

    file: str
    layers: list[LayerAudit]

    @property
    def ok(self) -> bool:
        """Whether the file has every trained weight, bit by bit."""
        return all(layer.is_equal for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as dicts, lists, numbers and strings. `steps` is None for a layer that is not in the
        file."""
        layers = [
            {**dataclasses.asdict(layer), "steps": layer.steps if math.isfinite(layer.steps) else None}
            for layer in self.layers
        ]
        return {"file": self.file, "layers": layers, "ok": self.ok}

    def __str__(self) -> str:
        rows = [
            [
                layer.path,
                layer.trained,
                layer.stored,
                f"{layer.moved / max(layer.elements, 1):.1%}",
                f"{layer.steps:.2g}",
                "-" if layer.error is None else f"{layer.error:.3g}",
            ]
            for layer in self.layers
        ]
        moved, elements = (sum(getattr(layer, name) for layer in self.layers) for name in ("moved", "elements"))
        equal = sum(layer.is_equal for layer in self.layers)
        return "\n\n".join(
            [
                table(["layer", "trained", "in the file", "moved", "steps", "added error"], rows),
                f"{Path(self.file).name}: {equal} of {len(self.layers)} layers have the trained values; "
                f"{moved:,} of {elements:,} weights have moved by more than a quarter of a step",
            ]
        )


@torch.no_grad()
def audit(model: nn.Module, file: str | os.PathLike[str]) -> Audit:
    """Compares the weights of a file with those that a prepared model computes with, layer by layer.

    The file may come from any converter. Layers are found by name, or else by their shape and values.

    Args:
        model: A prepared model.
        file: An ONNX file; for a transformers model also a folder of compressed-tensors or a GGUF file.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is damaged, or of another format.

    >>> import tempfile, fakequant as fq
    >>> model = fq.prepare(nn.Sequential(nn.Linear(64, 8)), fq.recipes.int4_weight_only())
    >>> path = tempfile.mkdtemp() + "/model.onnx"
    >>> written = fq.export_onnx(model, path, torch.ones(1, 64))
    >>> found = audit(model, path)
    >>> found.ok, found.layers[0].moved
    (True, 0)
    """
    check_module(model)
    preparation(model)  # raises if the model is not prepared
    if not Path(file).exists():
        raise FileNotFoundError(f"There is no file or folder {str(file)!r}.")
    with evaluating(model):
        trained = list(_trained(model))
        if Path(file).is_dir():
            find = _from_checkpoint(model, read_folder(model, file))
        elif is_gguf(file):
            find = _from_checkpoint(model, read_gguf(model, file))
        else:
            trained, find = _folded(model, trained), _Weights(list(file_weights(file)))
        layers = [_audited(layer, *find(layer)) for layer in trained]
    return Audit(file=str(file), layers=layers)


@dataclasses.dataclass(frozen=True)
class _Trained:
    path: str
    spec: str
    # The weight in float and on its grid, and the step of each element.
    weight: Tensor
    values: Tensor
    step: Tensor


def _trained(model: nn.Module) -> Iterator[_Trained]:
    for path, layer in model.named_modules():
        if (
            isinstance(layer, QuantizedLayer)
            and layer.weight_quantizer is not None
            and layer.weight_quantizer.quantizing
        ):
            quantizer = layer.weight_quantizer
            weight = layer._fakequant.kind.read_weight(layer).detach()
            values = layer._fakequant.quantized_weight(layer).detach()
            scale = grid_of(quantizer, weight).scale
            yield _Trained(
                path, str(quantizer.spec), weight.float(), values.float(), _steps(values, scale, quantizer.spec)
            )


def _steps(values: Tensor, scale: Tensor, spec: QuantSpec) -> Tensor:
    """Returns the distance from each value to the next one on its grid. Steps of a float format grow with the value."""
    one = torch.ones(values.shape, dtype=getattr(torch, spec.storage))
    if spec.float_format is None:
        return tensor_functions.dequantize(one, scale, 0, spec)
    known = spec.float_format
    unit = tensor_functions.dequantize(one, scale, 0, spec) / known.smallest  # code 1 is the smallest value
    exponent = torch.frexp(values.float() / unit).exponent - 1
    return unit * torch.ldexp(torch.ones_like(unit), exponent.clamp(min=1 - known.bias) - known.mantissa_bits)


def _folded(model: nn.Module, layers: list[_Trained]) -> list[_Trained]:
    """Returns the layers with the batch norms that converters fold into them, as in the golden model."""
    golden, found = convert(model), []
    for layer in layers:
        integer = golden.get_submodule(layer.path)
        assert isinstance(integer, IntegerLayer)
        values = float_weight(integer)
        axes = [axis for axis in range(values.dim()) if axis != integer._fakequant.kind.channel_axis % values.dim()]
        # The factor of each output channel, 1 without a batch norm.
        factor = (values * layer.values).sum(axes, keepdim=True) / layer.values.square().sum(axes, keepdim=True)
        factor = torch.where(factor.isfinite(), factor, 1.0)
        found.append(_Trained(layer.path, layer.spec, layer.weight * factor, values, layer.step * factor.abs()))
    return found


def _audited(layer: _Trained, values: Tensor | None, stored: str) -> LayerAudit:
    elements = layer.values.numel()
    if values is None:
        return LayerAudit(
            path=layer.path, trained=layer.spec, stored="nothing", elements=elements, moved=elements,
            differing=elements, steps=float("inf"), error=None,
        )  # fmt: skip
    # A block of zeros has no steps.
    away = ((values.reshape(layer.values.shape).float() - layer.values) / layer.step).nan_to_num(
        0, torch.inf, torch.inf
    )
    rounding = (layer.weight - layer.values).square().mean().sqrt()
    added = (values.reshape(layer.values.shape).float() - layer.values).square().mean().sqrt()
    return LayerAudit(
        path=layer.path,
        trained=layer.spec,
        stored=stored,
        elements=elements,
        moved=int((away.abs() > _QUARTER).sum()),
        differing=int((values.reshape(layer.values.shape).float() != layer.values).sum()),
        steps=float(away.abs().max()) if elements else 0.0,
        error=float(added / rounding) if rounding > 0 else None,
    )


# --- files -----------------------------------------------------------------------------------------


class _Weights:
    """The weights of an ONNX file, by layer: with its name, or else with its shape and the nearest values."""

    def __init__(self, weights: list[FileWeight]) -> None:
        self.weights = weights

    def __call__(self, layer: _Trained) -> tuple[Tensor | None, str]:
        named = [
            w for w in self.weights if w.name == f"{layer.path}.weight" or w.name.startswith(f"{layer.path}.weight_")
        ]
        best: tuple[float, Tensor, str] | None = None
        for weight in named or self.weights:
            for values in (weight.values, weight.values.swapaxes(-1, -2)):
                if values.size != layer.values.numel() or (values.shape != tuple(layer.values.shape) and not named):
                    continue
                found = torch.from_numpy(np.ascontiguousarray(values)).reshape(layer.values.shape)
                distance = float((found - layer.values).square().mean())
                if best is None or distance < best[0]:
                    best = distance, found, weight.kind
        # Values that have nothing to do with the layer's are farther away than zeros are.
        if best is None or best[0] > float(layer.values.square().mean()):
            return None, "nothing"
        return best[1], best[2]


def _from_checkpoint(model: nn.Module, stored: LoadedModel) -> Any:
    def find(layer: _Trained) -> tuple[Tensor | None, str]:
        own = stored_weight(model.get_submodule(layer.path), "weight")
        if layer.path in stored.layers:
            found = stored.layers[layer.path]
            # Engines dequantize in float32 and round to the dtype of the model.
            return found.values.to(own.dtype), str(found.weight.spec)
        name = next((name for name, value in model.named_parameters() if value is own), None)
        kind = stored.dequantized.get(name or "", "float")
        return (stored.tensors[name], kind) if name in stored.tensors else (None, "nothing")

    return find
