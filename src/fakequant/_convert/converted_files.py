"""`save_converted` and `load_converted`: converted models as safetensors files.

The tensors are those of the model's state_dict, with scales of few bits (MX, NVFP4) as bytes. The metadata describes
every tensor as JSON and has a checksum.
"""

import copy
import dataclasses
import hashlib
import json
import os
import warnings
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fakequant._convert.convert import conversion
from fakequant._convert.golden.integer_layer import IntegerLayer, Integers
from fakequant._convert.golden.quantizer import GoldenQuantizer
from fakequant._convert.rebuilt_model import (
    AGAIN,
    CODES,
    SCALE,
    TENSOR_SCALE,
    Description,
    File,
    State,
    WrongModelError,
    layers_with_block_scales,
    rebuild,
)
from fakequant._model.running import check_module
from fakequant._prepare.repeated_calls import describe_repeated
from fakequant._util.files import writing
from fakequant._util.packages import require
from fakequant._util.text import shortened
from fakequant.nn._call_quantizers import CallQuantizers
from fakequant.nn._function_calls import CallingModule
from fakequant.nn._input_factors import has_factors
from fakequant.nn._owners import OwnerKind
from fakequant.nn._records import LayerRecord, find_record
from fakequant.qparams import encode_scales

_FORMAT = 2
# The format before files had checksums.
_OLD_FORMAT = 1


def save_converted(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Writes a converted model to a file: codes, scales, specs, and the tensors that stay in float.

    The file is written atomically and has a checksum. Needs safetensors (`pip install "fakequant[onnx]"`).

    >>> import tempfile, fakequant as fq
    >>> def make():
    ...     return nn.Sequential(nn.Linear(4, 2))
    >>> x = torch.ones(3, 4)
    >>> model = fq.calibrate(fq.prepare(make(), fq.recipes.int8(), example=x), [x], progress=False)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_converted(fq.convert(model), f"{folder}/model.safetensors")
    ...     loaded = load_converted(make(), f"{folder}/model.safetensors")
    >>> torch.equal(loaded(torch.ones(1, 4)), fq.convert(model)(torch.ones(1, 4)))
    True
    """
    check_module(model)
    made = _describe(model)
    safetensors = require("safetensors.torch", "safetensors")
    with writing(path) as unfinished:
        state = model.state_dict()
        tensors = {name: value.detach().contiguous() for name, value in state.items() if isinstance(value, Tensor)}
        _encode_scales_of(model, tensors)
        described = json.dumps({**made, "tied": _separate(tensors)})
        metadata = {"fakequant": described, "checksum": checksum(described, tensors)}
        safetensors.save_file(tensors, unfinished, metadata=metadata)


def load_converted(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Turns a float model into the converted model that was saved, in place, and returns it.

    The float model must have the same architecture. The values of its parameters do not matter. If the file is
    damaged or does not fit, the model is left unchanged. Files without a checksum, from older versions, load with a
    warning.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is damaged or does not fit the model.

    >>> import tempfile, fakequant as fq
    >>> model = fq.prepare(nn.Sequential(nn.Linear(4, 2)), fq.recipes.int4_weight_only(4))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_converted(fq.convert(model), f"{folder}/model.safetensors")
    ...     loaded = load_converted(nn.Sequential(nn.Linear(4, 2)), f"{folder}/model.safetensors")
    >>> loaded[0].weight_codes.shape  # two in a byte
    torch.Size([4])
    """
    check_module(model)
    described, state = _read(path)
    with _unchanged_on_failure(model, described["layers"]):
        try:
            rebuild(model, described, state, path)
        except WrongModelError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError, AssertionError, RecursionError) as error:
            words = shortened(str(error).partition("\n")[0].rstrip("."), 500)
            raise ValueError(
                f"{path} is damaged: its description of the model is not valid ({type(error).__name__}: {words}).\n"
                f"{AGAIN}"
            ) from error
    return model


def _separate(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Removes tensors that are the same as an earlier one, and copies those that only share memory with one.

    Returns the names of the earlier ones by the names of those that were removed.
    """
    tied: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    memory: set[int] = set()
    for name, value in list(tensors.items()):
        if not value.numel():
            continue
        place = (value.data_ptr(), value.dtype, value.shape)
        if place in first:
            tied[name] = first[place]
            del tensors[name]
            continue
        first[place] = name
        start = value.untyped_storage().data_ptr()
        if start in memory:
            tensors[name] = value.clone()
        memory.add(start)
    return tied


def _encode_scales_of(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Replaces the scales of few bits among the tensors of a converted model by bytes."""
    for start, layer in layers_with_block_scales(model):
        codes, tensor_scale = encode_scales(tensors.pop(start + SCALE), layer._fakequant.weight_spec)
        tensors[start + CODES] = codes
        if tensor_scale is not None:
            tensors[start + TENSOR_SCALE] = tensor_scale


def _read(path: File) -> tuple[Description, State]:
    """Returns the description of a file and its state_dict."""
    safetensors = require("safetensors", "safetensors")
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"There is no file {str(path)!r} to load.\nPass a file that fakequant.save_converted wrote."
        )
    try:
        with safetensors.safe_open(Path(path), framework="pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is damaged, or is not a safetensors file: {error}.\n{AGAIN}") from error
    text = metadata.get("fakequant")
    if text is None:
        raise ValueError(
            f"{path} was not written by fakequant.save_converted: it has no description of quantized tensors.\n"
            "Pass a file that was, or load this one with model.load_state_dict."
        )
    try:
        described = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged: the description of its tensors is not JSON ({error}).\n{AGAIN}"
        ) from error
    if not isinstance(described, dict) or described.get("format") not in (_OLD_FORMAT, _FORMAT):
        found = shortened(repr(described.get("format") if isinstance(described, dict) else described))
        raise ValueError(
            f"{path} has format {found}; this version of fakequant reads {_OLD_FORMAT} and {_FORMAT}.\n"
            "Use the version that wrote it, or write it again with this one."
        )
    _compare_checksum(path, described["format"], metadata.get("checksum"), checksum(text, state))
    described.setdefault("extra_states", {})
    described.setdefault("functions", {})
    described.setdefault("tied", {})
    described.setdefault("owners", {})  # files of older versions have none
    missing = [name for name, kind in _PARTS.items() if not isinstance(described.get(name), kind)]
    if missing:
        raise ValueError(f"{path} is damaged: its description lacks {', '.join(missing)}.\n{AGAIN}")
    return described, {**state, **described["extra_states"]}


_PARTS = {
    "target": str, "folded": list, "notes": list, "layers": dict, "grids": dict, "inputs_from": dict,
    "functions": dict, "extra_states": dict, "owners": dict, "tied": dict,
}  # fmt: skip


def checksum(described: str, tensors: Mapping[str, Tensor]) -> str:
    """Returns the SHA-256, in hexadecimal, of a description and of tensors with their names, dtypes and shapes.

    >>> len(checksum("{}", {"x": torch.ones(2)}))
    64
    """
    found = hashlib.sha256(described.encode())
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        found.update(f"\0{name}\0{value.dtype}\0{tuple(value.shape)}\0".encode())
        found.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _compare_checksum(path: File, version: int, saved: str | None, found: str) -> None:
    if version == _OLD_FORMAT and saved is None:
        warnings.warn(
            f"{path} has no checksum, because an older version wrote it: damage cannot be detected.\n{AGAIN}",
            UserWarning,
            stacklevel=4,
        )
    elif saved != found:
        raise ValueError(f"{path} is damaged: its checksum does not match its contents.\n{AGAIN}")


def _describe(model: nn.Module) -> Description:
    """Returns everything that is needed to rebuild the model and is not a tensor of its state_dict."""
    grids = {module: path for path, module in model.named_modules() if isinstance(module, GoldenQuantizer)}
    layers, sources = {}, {}
    for path, module in model.named_modules():
        if isinstance(module, IntegerLayer):
            record = module._fakequant
            layers[path] = {"kind": record.float_class.__name__, "weight": _describe_weight(record)}
            if record.takes_vectors:
                layers[path]["takes_vectors"] = True
            if has_factors(module):
                layers[path]["multiplies_input"] = True
            if record.input_grid is not None:
                sources[path] = grids[record.input_grid]
    return {
        "format": _FORMAT,
        **dataclasses.asdict(conversion(model)),
        "layers": layers,
        "owners": {
            path: record.float_class.__name__
            for path, module in model.named_modules()
            for record in (find_record(module),)
            if isinstance(record, LayerRecord) and issubclass(record.kind, OwnerKind)
        },
        "grids": {
            path: {"spec": grid.spec.to_dict(), "arithmetic": grid.arithmetic, "eps": grid.eps}
            for grid, path in grids.items()
        },
        "inputs_from": sources,
        "repeated": describe_repeated(model),
        "slots": _describe_slots(model, grids),
        "functions": _describe_functions(model),
        "extra_states": _extra_states(model),
    }


def _describe_functions(model: nn.Module) -> Description:
    """Returns, by the path of a module, what `FunctionQuantizers` are made of, and which modules its code calls."""
    paths = {module: path for path, module in model.named_modules()}
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, CallingModule):
            own = module.function_quantizers
            found[path] = {
                "keys": [key for key, grid in own.items() if grid is not None],
                "layers": {key: paths[layer] for key, layer in own.layers.items()},
                "counts": own.counts,
                "callees": own.callees,
            }
    return found


def _describe_slots(model: nn.Module, grids: dict[GoldenQuantizer, str]) -> Description:
    """Returns, by path, what `CallQuantizers` are made of: their own grids and borrowed ones."""
    found = {}
    for path, slot in model.named_modules():
        if isinstance(slot, CallQuantizers):
            own = {turn: grids[grid] for turn, grid in slot._modules.items() if isinstance(grid, GoldenQuantizer)}
            borrowed = {str(turn): grids[grid] for turn, grid in slot.borrowed.items()}
            found[path] = {"own": own, "borrowed": borrowed}
    return found


def _describe_weight(record: Integers) -> Description | None:
    if record.weight_spec is None:
        return None
    return {
        "spec": record.weight_spec.to_dict(),
        "shape": list(record.weight_shape),
        "shift": record.weight_shift,
    }


def _extra_states(model: nn.Module) -> State:
    """Returns the entries of the state_dict that are not tensors. Raises TypeError if JSON cannot hold one."""
    found = {name: value for name, value in model.state_dict().items() if not isinstance(value, Tensor)}
    for name, value in found.items():
        try:
            same = json.loads(json.dumps(value)) == value
        except (TypeError, ValueError, RecursionError):
            same = False
        if not same:
            raise TypeError(
                f"{name} is {type(value).__name__}, which cannot be written: a file holds tensors, numbers, strings, "
                "None, and lists and dicts of them.\nReturn one of these from get_extra_state."
            )
    return found


# --- undoing --------------------------------------------------------------------------------------


@contextmanager
def _unchanged_on_failure(model: nn.Module, layers: Container[str]) -> Iterator[None]:
    """Context that restores all modules and tensors of a model if the body raises.

    Tensors are not copied: loading gives tensors other memory instead of writing to them, and replaces those of modules
    in `layers`, which holds paths.
    """
    modules = [(module, module.__class__, _shallow(module.__dict__)) for module in model.modules()]
    others = [module for path, module in model.named_modules() if path not in layers]
    values = [(tensor, tensor.data) for module in others for tensor in _tensors_of(module)]
    extra = [(m, copy.deepcopy(m.get_extra_state())) for m in model.modules() if _has_extra_state(m)]
    try:
        yield
    except BaseException:
        for module, kind, fields in modules:
            module.__class__ = kind
            module.__dict__.clear()
            module.__dict__.update(fields)
        for tensor, value in values:
            tensor.data = value
        for module, state in extra:
            module.set_extra_state(state)
        raise


def _tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _shallow(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy in which the dicts of parameters, buffers, children and hooks are copies too."""
    return {name: copy.copy(value) if isinstance(value, (dict, set)) else value for name, value in fields.items()}


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state
