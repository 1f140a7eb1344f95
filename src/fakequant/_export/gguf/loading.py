"""Reads a GGUF file as the layers of a model."""

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fakequant import presets
from fakequant._export.checkpoint_names import PreTrainedModel
from fakequant._export.gguf.architectures import Architecture, architecture_of, metadata_of
from fakequant._export.gguf.blocks import TYPES, Grid, grid_of_blocks, unpack
from fakequant._export.gguf.file import FLOATS, FileTensor, GgufFile, field, gguf
from fakequant._export.gguf.file_tensors import ModelTensors, Place, order_of
from fakequant._export.loaded_grids import LoadedGrid, LoadedLayer, LoadedModel
from fakequant._export.prepared_layers import path_of_layer
from fakequant._runtimes.llama_cpp.target import TARGET

_MAGIC = b"GGUF"
# Metadata that must be the model's.
_SIZES = ("block_count", "embedding_length", "attention.head_count", "attention.head_count_kv")


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Returns True if a file is a GGUF file, by its name or its first bytes."""
    file = Path(path)
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return opened.read(len(_MAGIC)) == _MAGIC or file.suffix == TARGET.runtime.suffix


def read_gguf(model: PreTrainedModel, path: str | os.PathLike[str]) -> LoadedModel:
    """Returns the layers and tensors of a file for a transformers model, float or prepared.

    Tensors in types that fakequant has no grid for are dequantized. Raises ValueError if the file is for another model.
    """
    file = GgufFile(path)
    if getattr(model, "config", None) is None:
        raise TypeError(
            f"{file.path} is a file of a transformers model, but the model is a {type(model).__name__}.\n"
            "Pass a transformers.PreTrainedModel with the sizes of the file."
        )
    known = architecture_of(model.config)
    _require_sizes(file, model, known)
    tensors = ModelTensors(model, (), known.name, known.leaves_out)
    layers: dict[str, LoadedLayer] = {}
    floats: dict[str, Tensor] = {}
    dequantized: dict[str, str] = {}
    pieces: dict[str, list[Place]] = {}
    for place in tensors.places:
        pieces.setdefault(tensors.source(place), []).append(place)
    for source, places in pieces.items():
        stored = [_tensor(file, place, tensors.values[source]) for place in places]
        orders = [
            order_of(place, model.config, tensor.shape, known) for place, tensor in zip(places, stored, strict=True)
        ]
        if all(tensor.type in TYPES for tensor in stored):
            layer = _layer(file, source, tensors.values[source], stored, orders)
            layers |= {path: _for_module(model, path, layer) for path in _users(model, source)}
        else:
            floats[source] = _floats(tensors.values[source], stored, orders, known)
            kinds = {tensor.type for tensor in stored} - set(FLOATS)
            dequantized |= {source: " and ".join(sorted(kinds))} if kinds else {}
    return LoadedModel(source=str(path), target=TARGET.name, layers=layers, tensors=floats, dequantized=dequantized)


def _require_sizes(file: GgufFile, model: PreTrainedModel, known: Architecture) -> None:
    if file.architecture != known.name:
        raise ValueError(
            f"{file.path} is for the architecture {file.architecture!r}, and the model is {known.name!r}.\n"
            "Create the model from the config of the checkpoint that the file was made from."
        )
    values = metadata_of(model.config)
    for name in _SIZES:
        there = file.metadata.get(f"{known.name}.{name}")
        if name in values and there is not None and there.value != field(values[name]).value:
            raise ValueError(f"{name} is {there.value} in {file.path}, and {values[name]} in the model.")


def _tensor(file: GgufFile, place: Place, like: Tensor) -> FileTensor:
    found = file.tensors.get(place.name)
    if found is None:
        raise ValueError(f"{file.path} does not belong to this model: it has no {place.name}, for {place.stored}.")
    if found.shape != place.shape(like):
        raise ValueError(
            f"{place.name} in {file.path} has the shape {found.shape}, and {place.stored} {place.shape(like)} in the "
            "model."
        )
    return found


def _layer(
    file: GgufFile, source: str, like: Tensor, stored: list[FileTensor], orders: list[Tensor | None]
) -> LoadedLayer:
    """Returns a quantized weight of the model from the tensors of the file that have its rows."""
    kinds = {tensor.type for tensor in stored}
    if len(kinds) > 1:
        raise ValueError(
            f"{file.path} has the parts of {source} as {' and '.join(sorted(kinds))}, so they have no common grid."
        )
    grids = [_grid(tensor) for tensor in stored]
    rows = like.numel() // like.shape[-1]
    found = [
        _assembled([getattr(grid, name) for grid in grids], orders, rows) for name in ("scale", "zero_point", "values")
    ]
    scale, zero_point, values = found
    assert values is not None
    rounded = presets.q8_k_input() if TYPES[stored[0].type].length == 256 else presets.q8_0_input()
    return LoadedLayer(
        values=values.reshape(like.shape),
        weight=LoadedGrid(spec=grids[0].spec, scale=scale, zero_point=zero_point),
        input=LoadedGrid(spec=rounded),
    )


def _grid(tensor: FileTensor) -> Grid:
    data = tensor.read()
    return grid_of_blocks(tensor.type, unpack(tensor.type, data.reshape(-1, data.shape[-1])))


def _assembled(parts: list[Tensor | None], orders: list[Tensor | None], rows: int) -> Tensor | None:
    """Returns rows in the order of the model."""
    if parts[0] is None:
        return None
    whole = torch.empty(rows, *parts[0].shape[1:])
    for part, order in zip(parts, orders, strict=True):
        assert part is not None
        whole[slice(None) if order is None else order] = part
    return whole


def _floats(like: Tensor, stored: list[FileTensor], orders: list[Tensor | None], known: Architecture) -> Tensor:
    """Returns a float tensor of the model."""
    whole = torch.empty(like.shape)
    rows = whole.flatten(0, -2) if whole.dim() >= 2 else whole
    for tensor, order in zip(stored, orders, strict=True):
        package = gguf()
        kind = package.GGMLQuantizationType[tensor.type]
        values = torch.from_numpy(np.array(package.quants.dequantize(tensor.read(), kind), np.float32))
        if known.adds_one_to_norms and tensor.name.endswith("norm.weight"):
            values = values - 1
        rows[slice(None) if order is None else order] = values.reshape(-1, *rows.shape[1:])
    return whole.to(like.dtype)


def _users(model: nn.Module, source: str) -> list[str]:
    """Returns the paths of all layers that use a weight: an embedding and an output layer may share one."""
    weight = model.get_parameter(source)
    shared = [
        path
        for path, module in model.named_modules()
        if any(name == "weight" and value is weight for name, value in module._parameters.items())
    ]
    return shared or [path_of_layer(model, source)]


def _for_module(model: nn.Module, path: str, layer: LoadedLayer) -> LoadedLayer:
    """Returns the layer without an input if it is an embedding."""
    module = model.get_submodule(path) if path in dict(model.named_modules()) else None
    if not isinstance(module, nn.Embedding):
        return layer
    return LoadedLayer(values=layer.values, weight=layer.weight)
