"""Reads a folder of compressed-tensors as the layers of a model."""

import os

import torch
from torch import Tensor, nn

from fakequant._export.checkpoint_names import PreTrainedModel, Stored, stored_in_checkpoints
from fakequant._export.compressed_tensors.cache import stored_cache
from fakequant._export.compressed_tensors.layer_tensors import values_of
from fakequant._export.compressed_tensors.reading import Folder
from fakequant._export.compressed_tensors.schemes import Scheme
from fakequant._export.loaded_grids import LoadedGrid, LoadedLayer, LoadedModel
from fakequant._export.prepared_layers import own_tensors, path_of_layer
from fakequant.spec import QuantSpec


def read_folder(model: PreTrainedModel, path: str | os.PathLike[str]) -> LoadedModel:
    """Returns the layers and tensors of a folder for a transformers model, float or prepared.

    Raises ValueError if the folder is for another model.
    """
    folder = Folder(path)
    _require_architecture(model, folder)
    names = set(model.state_dict())
    state = {name: value.detach() for name, value in own_tensors(model) if name in names}
    matrices = {name: value for name, value in state.items() if value.dim() >= 2 and value.is_floating_point()}
    stored = stored_in_checkpoints(model, state, matrices)
    pieces: dict[str, list[tuple[str, Tensor]]] = {}
    for name, (own, rows) in stored.rows.items():
        if rows is not None:
            pieces.setdefault(own, []).append((name, rows))
    quantized = set(folder.layers())
    layers, tensors = {}, {}
    for own, parts in pieces.items():
        paths = [name.removesuffix(".weight") for name, _ in parts]
        if not quantized.intersection(paths):
            tensors[own] = _assembled(folder, matrices[own], parts)
            continue
        missing = next((path for path in paths if path not in quantized), None)
        if missing is not None:
            raise ValueError(
                f"{path} stores some parts of {own} as codes, but not {missing}, so they have no common grid."
            )
        layers[path_of_layer(model, own)] = _stored_layer(folder, model, own, parts, matrices[own].shape)
    for name in stored.tensors:
        if name not in folder.files:
            raise ValueError(f"{folder.path} does not belong to this {type(model).__name__}: it has no {name}.")
        tensors[name] = folder.tensor(name)
    _require_all_used(model, folder, stored)
    return LoadedModel(
        source=str(path),
        target="compressed-tensors",
        layers=layers,
        tensors=tensors,
        cache=stored_cache(folder, model),
    )


def _require_architecture(model: PreTrainedModel, folder: Folder) -> None:
    known = folder.config.get("model_type")
    own = getattr(getattr(model, "config", None), "model_type", None)
    if own is None:
        raise TypeError(
            f"{folder.path} is the folder of a transformers model, but the model is a {type(model).__name__}.\n"
            "Pass a transformers.PreTrainedModel with the folder's config."
        )
    if known != own:
        raise ValueError(
            f"{folder.path} is for a model of type {known!r}, and the model is {own!r}.\n"
            "Create the model from the folder's config: AutoConfig.from_pretrained(folder)."
        )


def _require_all_used(model: PreTrainedModel, folder: Folder, stored: Stored) -> None:
    """Raises ValueError if a folder has codes that the model has no layer for."""
    unknown = [path for path in folder.layers() if f"{path}.weight" not in stored.rows]
    if unknown:
        raise ValueError(
            f"{folder.path} does not belong to this {type(model).__name__}, which has no layer {unknown[0]}.\n"
            "Create the model from the folder's config: AutoConfig.from_pretrained(folder)."
        )


def _assembled(folder: Folder, like: Tensor, parts: list[tuple[str, Tensor]]) -> Tensor:
    """Returns a float tensor of the model from its parts in the folder."""
    whole = torch.empty(like.shape, dtype=like.dtype)
    rows = whole.flatten(0, -2)
    for name, numbers in parts:
        if name not in folder.files:
            raise ValueError(f"{folder.path} does not belong to this model: it has no {name}.")
        value = folder.tensor(name)
        if value.numel() != len(numbers) * like.shape[-1]:
            raise ValueError(
                f"{name} in {folder.path} has the shape {tuple(value.shape)}, which the model has no place for."
            )
        rows[numbers] = value.reshape(len(numbers), -1).to(like.dtype)
    return whole


def _stored_layer(
    folder: Folder, model: nn.Module, own: str, parts: list[tuple[str, Tensor]], shape: torch.Size
) -> LoadedLayer:
    """Returns a layer of the model from its parts in the folder, which have one scheme."""
    module = model.get_submodule(own.rpartition(".")[0])
    found = [
        (rows, *folder.weight(name.removesuffix(".weight"), is_linear=not isinstance(module, nn.Embedding)))
        for name, rows in parts
    ]
    schemes = {scheme for _, _, scheme in found}
    if len(schemes) > 1:
        raise ValueError(f"{folder.path} has several schemes for the parts of {own}.")
    scheme: Scheme = schemes.pop()
    spec = scheme.weight
    if len(found) > 1 and spec.granularity == "tensor":
        spec = QuantSpec(bits=spec.bits, symmetric=spec.symmetric, format=spec.format, axis=0)
    number, length = shape.numel() // shape[-1], shape[-1]
    values = torch.empty(number, length)
    scales: list[Tensor | None] = [None, None]
    for rows, weight, _ in found:
        if tuple(weight.codes.shape) != (len(rows), length):
            raise ValueError(
                f"{own} in {folder.path} has the shape {tuple(weight.codes.shape)}, and in the model "
                f"{(len(rows), length)}."
            )
        try:
            values[rows] = values_of(weight, scheme.weight)
        except ValueError as error:
            raise ValueError(f"The tensors of {own} in {folder.path} do not fit each other: {error}") from error
        for place, value in enumerate((weight.scale.float(), weight.zero_point)):
            if value is None or (len(found) == 1 and value.dim() == 0):
                scales[place] = value
                continue
            per_row = value.expand(len(rows)) if value.dim() == 0 else value
            numbers, total = rows, number
            if spec.group_rows is not None and len(found) > 1:
                numbers, total = rows[:: spec.group_rows] // spec.group_rows, number // spec.group_rows
                if len(rows) % spec.group_rows or len(numbers) != len(value):
                    raise ValueError(f"{own} in {folder.path} has parts that are not whole blocks of rows.")
            elif spec.group_rows is not None:
                numbers, total = torch.arange(len(value)), len(value)
            whole = scales[place]
            if whole is None:
                whole = scales[place] = torch.empty(total, *per_row.shape[1:], dtype=value.dtype)
            whole[numbers] = per_row
    scale, zero_point = scales
    return LoadedLayer(
        values=values.reshape(shape),
        weight=LoadedGrid(spec=spec, scale=scale, zero_point=zero_point),
        input=_stored_input(folder, parts[0][0].removesuffix(".weight"), scheme),
    )


def _stored_input(folder: Folder, layer: str, scheme: Scheme) -> LoadedGrid | None:
    if scheme.input is None:
        return None
    is_local = scheme.input.scale_format == "e4m3fn"
    if scheme.input.granularity != "tensor" and not is_local:
        return LoadedGrid(spec=scheme.input)
    tensors, name = folder.tensors_of(layer), "input_global_scale" if is_local else "input_scale"
    if name not in tensors:
        raise ValueError(f"{folder.path} has no {name} for {layer}, although its scheme has a fixed one.")
    zero_point = tensors.get("input_zero_point")
    return LoadedGrid(
        spec=scheme.input,
        scale=tensors[name].float().reshape(()),
        zero_point=None if zero_point is None else zero_point.to(torch.int32).reshape(()),
    )
