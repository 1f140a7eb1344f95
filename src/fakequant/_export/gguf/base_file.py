"""Blocks in a float file that llama.cpp's converter has made: each tensor is found by its name and by its values.

The converter may reorder rows, such as those of q and k for rotary embeddings, transpose a matrix, or add 1 to a norm.
The rows of a quantized layer are put in the order of the converter's rows, which are recognized by their values.
"""

import hashlib

import numpy as np
import torch
from torch import Tensor

from fakequant._export.checkpoint_names import PreTrainedModel
from fakequant._export.gguf.blocks import Array, blocks_of, pack, type_of
from fakequant._export.gguf.file import FLOATS, FileTensor, GgufFile
from fakequant._export.gguf.file_tensors import ModelTensors, Place, bytes_of, quantized_tensor
from fakequant._export.prepared_layers import PreparedLayer

_HEAD = "output.weight"
_MAKE = "Make it from this model with llama.cpp's convert_hf_to_gguf.py (--outtype f32, or bf16 for a bfloat16 model)"


def tensors_over_base(
    model: PreTrainedModel, layers: list[PreparedLayer], base: GgufFile
) -> tuple[ModelTensors, list[FileTensor], dict[str, str]]:
    """Returns the tensors of a model, the tensors of a file over `base`, and hashes of what the model cannot determine.

    Hashed are tensors whose rows the converter has reordered, and tensors that it has added.

    Raises ValueError if `base` is quantized, or belongs to another model.
    """
    tensors = ModelTensors(model, layers, base.architecture, is_strict=False)
    replaced, hashes = {}, {}
    for place in tensors.places:
        found, layer = base.tensors.get(place.name), tensors.layer(place)
        if found is None:
            raise _of_other_model(base, f"it has no {place.name}, for {place.stored}")
        if found.type not in FLOATS:
            raise ValueError(f"{place.name} in {base.path} is already quantized, as {found.type}.\n{_MAKE}.")
        shape = place.shape(tensors.values[tensors.source(place)])
        if layer is None:
            if not _is_float_of(tensors, place, found):
                raise _of_other_model(base, f"{place.name} has other values than {place.stored}")
            continue
        if found.shape != shape:
            raise _of_other_model(base, f"{place.name} has the shape {found.shape}, and {place.stored} {shape}")
        order = _order_in(found, _float_rows(tensors, place, found.type))
        if order is None:
            raise _of_other_model(base, f"{place.name} has other rows than {place.stored}, in whatever order")
        rows = place.rows()
        replaced[place.name] = quantized_tensor(place.name, layer, shape, order if rows is None else rows[order])
    written = [replaced.get(name, tensor) for name, tensor in base.tensors.items()]
    places = {place.name: place for place in tensors.places}
    if _HEAD in base.tensors and _HEAD not in places:
        raise _of_other_model(base, f"it has {_HEAD}, and the model's output layer shares the weight of the embedding")
    for tensor in written:
        if tensor.name not in places or not _is_in_order(tensors, places[tensor.name], tensor):
            hashes[tensor.name] = hash_of(tensor)
    return tensors, written, hashes


def _of_other_model(base: GgufFile, reason: str) -> ValueError:
    return ValueError(f"{base.path} does not belong to the model: {reason}.\n{_MAKE}.")


def differing_tensor(tensors: ModelTensors, file: GgufFile, hashes: dict[str, str]) -> str | None:
    """Returns which tensor of a file over a base is not the model's. None if all are.

    Tensors that the model alone does not determine must have the rows of the model in some order, and their hash.
    """
    places = {place.name: place for place in tensors.places}
    for name, tensor in file.tensors.items():
        place = places.get(name)
        if place is not None and tensors.layer(place) is not None:
            rows = _quantized_rows(tensors, place)
            is_known = tensor.type == type_of(tensors.layers[tensors.source(place)].spec)
            is_known = is_known and tensor.read().reshape(-1).shape == rows.reshape(-1).shape
            if not is_known or _order_in(tensor, rows) is None:
                return name
        elif place is not None and not _is_float_of(tensors, place, tensor):
            return name
        if (place is None or not _is_in_order(tensors, place, tensor)) and hashes.get(name) != hash_of(tensor):
            return name
    missing = [place for place in tensors.places if place.name not in file.tensors]
    return missing[0].name if missing else None


def hash_of(tensor: FileTensor) -> str:
    """Returns the SHA-256 of a tensor's type, shape and bytes."""
    found = hashlib.sha256(f"{tensor.type} {tensor.shape} ".encode())
    found.update(np.ascontiguousarray(tensor.read()).data)
    return found.hexdigest()


def _is_in_order(tensors: ModelTensors, place: Place, tensor: FileTensor) -> bool:
    """Returns True if a tensor has exactly the rows of the model, in its order."""
    layer = tensors.layer(place)
    rows = _quantized_rows(tensors, place) if layer is not None else _float_rows(tensors, place, tensor.type)
    data = tensor.read()
    return data.size == rows.size and bool(np.array_equal(data.reshape(-1), rows.reshape(-1)))


def _quantized_rows(tensors: ModelTensors, place: Place) -> Array:
    layer = tensors.layer(place)
    assert layer is not None
    kind = type_of(layer.spec)
    assert kind is not None
    data, rows = pack(kind, blocks_of(layer)), place.rows()
    return data if rows is None else data[rows.numpy()]


def _values(tensors: ModelTensors, place: Place) -> Tensor:
    value, rows = tensors.values[tensors.source(place)], place.rows()
    return value if rows is None else value.flatten(0, -2)[rows]


def _float_rows(tensors: ModelTensors, place: Place, kind: str) -> Array:
    return bytes_of(_values(tensors, place), kind)


def _is_float_of(tensors: ModelTensors, place: Place, tensor: FileTensor) -> bool:
    """Returns True if a float tensor has exactly the model's values: with reordered rows, transposed, or plus 1."""
    if tensor.type not in FLOATS:
        return False
    value = _values(tensors, place)
    if value.numel() != int(np.prod(tensor.shape, dtype=np.int64)) or not torch.equal(
        torch.from_numpy(bytes_of(value, tensor.type).copy()).view(_dtype(tensor.type)).to(value.dtype), value
    ):
        return False
    forms = [value, value.float() + 1]
    if value.dim() == 2:
        forms.append(value.T)
    data = np.ascontiguousarray(tensor.read()).reshape(-1)
    if any(np.array_equal(bytes_of(form, tensor.type).reshape(-1), data) for form in forms):
        return True
    rows = value.reshape(-1, 1) if value.dim() < 2 else value
    return _order_in(tensor, bytes_of(rows, tensor.type)) is not None


def _dtype(kind: str) -> torch.dtype:
    return {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]


def _order_in(tensor: FileTensor, rows: Array) -> Tensor | None:
    """Returns which of `rows` each row of a tensor is. None if one is missing. Equal rows are taken in their order."""
    data = np.ascontiguousarray(tensor.read()).reshape(rows.shape)
    if np.array_equal(data, rows):
        return torch.arange(len(rows))
    places: dict[bytes, list[int]] = {}
    for number in range(len(rows) - 1, -1, -1):
        places.setdefault(rows[number].tobytes(), []).append(number)
    order = []
    for row in data:
        numbers = places.get(row.tobytes())
        if not numbers:
            return None
        order.append(numbers.pop())
    return torch.tensor(order)
