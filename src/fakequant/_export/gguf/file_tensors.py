"""The tensors of a model as a GGUF file has them: which rows of which weight, in which order, under which name."""

import dataclasses
import re
from collections.abc import Callable, Container, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fakequant._export.checkpoint_names import PreTrainedModel, stored_in_checkpoints
from fakequant._export.gguf.architectures import Architecture, interleaved, rope_tensors
from fakequant._export.gguf.blocks import TYPES, Array, Blocks, blocks_of, pack, type_of
from fakequant._export.gguf.file import FileTensor, gguf
from fakequant._export.prepared_layers import PreparedLayer, own_tensors

_EXPERT = re.compile(r"(\.experts)\.(\d+)\.")
# Parts of the names of matrices that are float32 in every file.
_ALWAYS_FLOAT32 = ("ffn_gate_inp", "position_embd", "token_types")
_FLOAT_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclasses.dataclass(frozen=True)
class Part:
    """Rows of a tensor of the model that stand together in a tensor of the file."""

    # The name of the tensor in the model, and the numbers of its rows. None for a tensor without rows.
    source: str
    rows: Tensor | None
    # Which expert of the file's tensor it is.
    expert: int | None = None


@dataclasses.dataclass
class Place:
    """A tensor of the file, and where its rows come from."""

    name: str
    # Its name in checkpoints of the model.
    stored: str
    parts: list[Part]

    def rows(self) -> Tensor | None:
        """Returns the numbers of the rows in the model's tensor, in the order of the file."""
        found = [part.rows for part in sorted(self.parts, key=lambda part: part.expert or 0)]
        return None if found[0] is None else torch.cat([rows for rows in found if rows is not None])

    def shape(self, like: Tensor) -> tuple[int, ...]:
        """Returns the shape of the tensor in the file. `like` is the model's tensor."""
        rows = self.rows()
        if rows is None:
            return tuple(like.shape)
        experts = (len(self.parts),) if self.parts[0].expert is not None else ()
        return (*experts, len(rows) // max(len(self.parts), 1), like.shape[-1])


class ModelTensors:
    """The tensors of a prepared model, with the names of a file.

    Args:
        model: A transformers model.
        layers: Its quantized layers.
        architecture: The name of its architecture in llama.cpp.
        leaves_out: The ends of the names of tensors that have no place in the file.
        is_strict: Whether all other tensors, and not only those of quantized layers, need a place.

    Raises ValueError if a tensor has no name there, or if layers that share a weight have not the same codes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Iterable[PreparedLayer],
        architecture: str,
        leaves_out: tuple[str, ...] = (),
        *,
        is_strict: bool = True,
    ) -> None:
        names = set(model.state_dict())
        state = {name: value.detach() for name, value in own_tensors(model) if name in names}
        self.values = {name: value for name, value in state.items() if not name.endswith(leaves_out)}
        self.layers = _by_weight(model, layers, self.values)
        self.places = list(_places(model, self.values, architecture, self.layers if not is_strict else self.values))

    def source(self, place: Place) -> str:
        """Returns the name of the model's tensor that a tensor of the file comes from."""
        return place.parts[0].source

    def layer(self, place: Place) -> PreparedLayer | None:
        """Returns the quantized layer of a tensor of the file, or None if it is in float."""
        return self.layers.get(self.source(place))


def _by_weight(
    model: nn.Module, layers: Iterable[PreparedLayer], values: dict[str, Tensor]
) -> dict[str, PreparedLayer]:
    """Returns the quantized layers by the name of their weight. Layers that share a weight need the same codes."""
    names = {id(model.get_parameter(name)): name for name in values if name in dict(model.named_parameters())}
    users: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and name == "weight":
                users.setdefault(id(parameter), []).append(path)
    found: dict[str, PreparedLayer] = {}
    quantized: dict[int, list[PreparedLayer]] = {}
    for layer in layers:
        quantized.setdefault(id(model.get_parameter(layer.name)), []).append(layer)
    for key, several in quantized.items():
        first = several[0]
        if key not in names:
            raise ValueError(
                f"{first.path} has no place in the file: llama.cpp has no tensor for {first.name}.\n"
                f"Leave it in float with config.skip({first.path!r})."
            )
        paths = {layer.path for layer in several}
        in_float = [path for path in users.get(key, ()) if path not in paths]
        if in_float:
            raise ValueError(
                f"{first.path} and {in_float[0]} share a weight, which is one tensor in the file, but only "
                f"{first.path} is quantized.\nQuantize both with the same spec, or leave {first.path} in float."
            )
        for other in several[1:]:
            if not _is_same(blocks_of(first), blocks_of(other)):
                raise ValueError(
                    f"{first.path} and {other.path} share a weight, which is one tensor in the file, but they have "
                    "different codes.\nQuantize both with the same spec."
                )
        found[names[key]] = first
    return found


def _is_same(a: Blocks, b: Blocks) -> bool:
    return all(
        (x is None and y is None) or (x is not None and y is not None and np.array_equal(x, y))
        for x, y in zip(a, b, strict=True)
    )


def _places(
    model: PreTrainedModel, values: dict[str, Tensor], architecture: str, needed: Container[str]
) -> Iterable[Place]:
    """Returns the tensors of the file, in the order of the model. Those that are not needed may have no place."""
    matrices = [name for name, value in values.items() if value.dim() >= 2 and value.is_floating_point()]
    stored = stored_in_checkpoints(model, values, matrices)
    name_of = _names(architecture, model.config.num_hidden_layers)
    parts: dict[str, Place] = {}
    for name, (source, rows) in stored.rows.items():
        if rows is None:
            raise ValueError(
                f"{source} has no place in the file: checkpoints have it as {name!r}, in a form without its rows."
            )
        matched = _EXPERT.search(name)
        merged = _EXPERT.sub(r"\1.", name)
        there = name_of(merged, is_needed=source in needed)
        if there is None:
            continue
        place = parts.setdefault(there, Place(there, merged, []))
        place.parts.append(Part(source, rows, int(matched[2]) if matched else None))
    for name in stored.tensors:
        there = name_of(name, is_needed=name in needed)
        if there is not None:
            parts[there] = Place(there, name, [Part(name, None)])
    for place in parts.values():
        if len({part.source for part in place.parts}) > 1:
            raise ValueError(
                f"{place.name} is one tensor in the file, and several in the model: {place.parts[0].source}."
            )
    return parts.values()


def _names(architecture: str, layers: int) -> Callable[..., str | None]:
    """Returns a function from names in checkpoints to names in files. It raises ValueError for needed ones without."""
    package = gguf()
    known = {name: arch for arch, name in package.MODEL_ARCH_NAMES.items()}
    if architecture not in known:
        raise ValueError(f"gguf {package.__name__} does not know the architecture {architecture!r}.")
    names = package.get_tensor_name_map(known[architecture], layers)

    def name_of(name: str, *, is_needed: bool) -> str | None:
        for given in (name, f"{name}.weight", re.sub(r"^(bert|roberta)\.", "", name)):
            found = names.get_name(given, try_suffixes=(".weight", ".bias"))
            if found is not None:
                return str(found)
        if is_needed:
            raise ValueError(
                f"{name} has no place in the file: llama.cpp has no tensor for it in its architecture {architecture!r}."
            )
        return None

    return name_of


# --- tensors of a file without a base --------------------------------------------------------------


def file_tensors(model: PreTrainedModel, tensors: ModelTensors, architecture: Architecture) -> list[FileTensor]:
    """Returns the tensors of a file, in the order of the model."""
    found = [_file_tensor(model, tensors, place, architecture) for place in tensors.places]
    extra = [
        FileTensor(name, "F32", tuple(value.shape), partial(bytes_of, value, "F32"))
        for name, value in rope_tensors(model.config)
    ]
    return [*extra, *found]


def _file_tensor(model: Any, tensors: ModelTensors, place: Place, architecture: Architecture) -> FileTensor:
    source = tensors.source(place)
    value, layer, shape = tensors.values[source], tensors.layer(place), place.shape(tensors.values[source])
    order = order_of(place, model.config, shape, architecture)
    if layer is not None:
        return quantized_tensor(place.name, layer, shape, order)
    is_matrix = value.dim() >= 2 and not any(part in place.name for part in _ALWAYS_FLOAT32)
    kind = _FLOAT_TYPES.get(value.dtype, "F32") if is_matrix else "F32"

    def read() -> Array:
        floats = value.flatten(0, -2) if value.dim() >= 2 else value
        floats = (floats if order is None else floats[order]).reshape(shape)
        if architecture.adds_one_to_norms and place.name.endswith("norm.weight"):
            floats = floats.float() + 1
        return bytes_of(floats, kind)

    return FileTensor(place.name, kind, shape, read)


def quantized_tensor(name: str, layer: PreparedLayer, shape: tuple[int, ...], order: Tensor | None) -> FileTensor:
    """Returns a tensor of the file with the blocks of a layer, its rows in this order."""
    kind = type_of(layer.spec)
    assert kind is not None
    if shape[-1] % TYPES[kind].length:
        raise ValueError(
            f"{layer.path} cannot be stored as {kind}: its rows have {shape[-1]} weights, no multiple of "
            f"{TYPES[kind].length}.\nLeave it in float with config.skip({layer.path!r}), or use another type."
        )

    def read() -> Array:
        data = pack(kind, blocks_of(layer))
        return (data if order is None else data[order.numpy()]).reshape(*shape[:-1], -1)

    return FileTensor(name, kind, shape, read)


def order_of(place: Place, config: Any, shape: tuple[int, ...], architecture: Architecture) -> Tensor | None:
    """Returns the order of the model's rows in the file. None if it is the model's."""
    rows = place.rows()
    if architecture.interleaves_heads:
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
        for letter, number in heads.items():
            if place.stored.endswith((f".{letter}_proj.weight", f".{letter}_proj.bias")):
                order = interleaved(shape[0], number)
                return order if rows is None else rows[order]
    return rows


def bytes_of(value: Tensor, kind: str) -> Array:
    """Returns the bytes of a tensor in a type without blocks, one row per row."""
    dtype = {name: dtype for dtype, name in _FLOAT_TYPES.items()}[kind]
    stored = value.detach().to(dtype).contiguous()
    data: Array = stored.view(torch.uint8).numpy()
    return data
