"""Converted models on disk: safetensors, with a description of every tensor as JSON."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fakequant.integer.grid import Grid
from fakequant.integer.layer import IntegerLayer, integer_class
from fakequant.spec import QuantSpec
from fakequant.workflow.convert import Conversion, conversion, quantize_output_with, take_out
from fakequant.workflow.fold import Folded
from fakequant.workflow.optional import require, writing
from fakequant.workflow.prepare import close_shortcuts
from fakequant.workflow.running import check_module

_FORMAT = 1


def save_converted(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Writes a converted model: codes, scales, what stays in float, and the spec of every tensor.

    The file is complete or not there. Needs safetensors (`pip install "fakequant[export]"`).

    >>> import tempfile, fakequant as fq
    >>> def make():
    ...     return nn.Sequential(nn.Linear(4, 2))
    >>> model = fq.calibrate(fq.prepare(make(), fq.recipes.int8()), [torch.ones(3, 4)], progress=False)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_converted(fq.convert(model), f"{folder}/model.safetensors")
    ...     loaded = load_converted(make(), f"{folder}/model.safetensors")
    >>> torch.equal(loaded(torch.ones(1, 4)), fq.convert(model)(torch.ones(1, 4)))
    True
    """
    check_module(model)
    described = json.dumps(_describe(model))
    safetensors = require("safetensors.torch", "safetensors")
    tensors = {name: value.detach().contiguous().clone() for name, value in model.state_dict().items()}
    with writing(path) as unfinished:
        safetensors.save_file(tensors, unfinished, metadata={"fakequant": described})


def load_converted(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Makes a float model of the same architecture, in place, the converted one that was saved; returns it.

    What the float model's parameters were does not matter.

    >>> import tempfile, fakequant as fq
    >>> model = fq.prepare(nn.Sequential(nn.Linear(4, 2)), fq.recipes.int4_weight_only(4))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_converted(fq.convert(model), f"{folder}/model.safetensors")
    ...     loaded = load_converted(nn.Sequential(nn.Linear(4, 2)), f"{folder}/model.safetensors")
    >>> loaded[0].weight_codes.shape  # two in a byte
    torch.Size([4])
    """
    check_module(model)
    safetensors = require("safetensors", "safetensors")
    with safetensors.safe_open(Path(path), framework="pt") as file:
        metadata = (file.metadata() or {}).get("fakequant")
        if metadata is None:
            raise ValueError(f"{path} was not written by fakequant.save_converted: it describes no quantized tensors.")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    _apply(model, json.loads(metadata), tensors, path)
    return model


def _describe(model: nn.Module) -> dict[str, Any]:
    """Everything that is not in the state."""
    grids = {module: path for path, module in model.named_modules() if isinstance(module, Grid)}
    layers, sources = {}, {}
    for path, module in model.named_modules():
        if isinstance(module, IntegerLayer):
            spec = module.weight_spec
            layers[path] = {
                "kind": module.float_class.__name__,
                "weight": None if spec is None else {"spec": spec.to_dict(), "shape": list(module.weight_shape)},
            }
            if module.input_grid is not None:
                sources[path] = grids[module.input_grid]  # type: ignore[index]
    return {
        "format": _FORMAT,
        **dataclasses.asdict(conversion(model)),
        "layers": layers,
        "grids": {
            path: {"spec": grid.spec.to_dict(), "arithmetic": grid.arithmetic, "eps": grid.eps}
            for grid, path in grids.items()
        },
        "inputs_from": sources,
    }


def _apply(model: nn.Module, described: dict[str, Any], tensors: dict[str, Tensor], file: Any) -> None:
    if described.get("format") != _FORMAT:
        raise ValueError(f"{file} has format {described.get('format')!r}; this version of fakequant reads {_FORMAT}.")
    modules = dict(model.named_modules())
    wrong = [
        path
        for path, layer in described["layers"].items()
        if path not in modules or type(modules[path]).__name__ != layer["kind"]
    ]
    if wrong:
        kind, there = described["layers"][wrong[0]]["kind"], modules.get(wrong[0])
        raise ValueError(
            f"{file} does not belong to the model: {wrong[0]!r} is {kind} there and "
            f"{'absent' if there is None else type(there).__name__} here.\n"
            "Pass a float model of the architecture that was converted."
        )
    for path in described["folded"]:
        take_out(model, path)
    for path, layer in described["layers"].items():
        _make_layer(modules[path], layer["weight"])
        modules[path].path = path
    grids = {path: _make_grid(path, grid, tensors) for path, grid in described["grids"].items()}
    for path, grid in grids.items():
        parent, _, name = path.rpartition(".")
        module = model.get_submodule(parent)
        if isinstance(module, (IntegerLayer, Folded)):
            module._modules[name] = grid
        else:
            quantize_output_with(module, grid)
    for path, grid_path in described["inputs_from"].items():
        model.get_submodule(path).__dict__["input_grid"] = grids[grid_path]
    for module in model.modules():
        close_shortcuts(module)
    _fill(model, tensors)
    model.eval().requires_grad_(False)
    model.__dict__["_fakequant_conversion"] = Conversion(described["target"], described["folded"], described["notes"])


def _make_layer(layer: Any, weight: dict[str, Any] | None) -> None:
    layer.__class__ = integer_class(type(layer))
    for name in ("input_quantizer", "output_quantizer", "projection_quantizer"):
        layer.register_module(name, None)
    layer.register_buffer("bias_codes", None)
    layer.weight_spec = None
    if weight is None:
        return
    layer._parameters.pop(layer.weight_name, None)
    layer.weight_spec = QuantSpec.from_dict(weight["spec"])
    layer.weight_shape = tuple(weight["shape"])
    for name in ("weight_codes", "weight_scale", "weight_zero_point"):
        layer.register_buffer(name, None)
    if layer.bias_name in layer._parameters:
        layer._parameters[layer.bias_name] = None


def _make_grid(path: str, grid: dict[str, Any], tensors: dict[str, Tensor]) -> Grid:
    values = (tensors.get(f"{path}.{name}") for name in ("scale", "zero_point"))
    spec = QuantSpec.from_dict(grid["spec"])
    return Grid(spec, *values, arithmetic=grid["arithmetic"], eps=grid["eps"], path=path)


def _fill(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Every tensor to its place, with the shape it has in the file."""
    for name, value in tensors.items():
        parent, _, last = name.rpartition(".")
        module = model.get_submodule(parent)
        if isinstance(module, IntegerLayer):
            if last in module._buffers:
                module._buffers[last] = value
            elif last in module._parameters:
                module._parameters[last] = nn.Parameter(value, requires_grad=False)
    with torch.no_grad():
        model.load_state_dict(tensors)
