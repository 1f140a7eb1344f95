"""`save_converted` and `load_converted`: converted models as safetensors files.

The tensors are those of the model's state_dict, with scales of few bits (MX, NVFP4) as bytes. The metadata describes
every tensor as JSON and has a checksum.
"""

import copy
import dataclasses
import json
import os
import warnings
from collections.abc import Container, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor, nn

from fakequant import _targets
from fakequant._backends.blocks import blocks_of
from fakequant._backends.checks import can_be_packed
from fakequant._backends.torch.torch_private import EXTRA_STATE_SUFFIX
from fakequant._convert.convert import Conversion, conversion, find_conversion, return_tensors
from fakequant._convert.file_checks import check_eps, check_grid, check_same_dtype, check_weight, checksum
from fakequant._convert.file_scales import decode_scales_of, encode_scales_of
from fakequant._convert.folded_norm import Folded, remove_norm
from fakequant._convert.golden.arithmetics import ARITHMETICS
from fakequant._convert.golden.fixed_grid import Grid
from fakequant._convert.golden.integer_layer import IntegerLayer, Integers, has_call_grids
from fakequant._prepare.attach import (
    attach_functions,
    attach_layer,
    attach_output,
    close_shortcuts,
    find_preparation,
    record_of,
    watch_callees,
)
from fakequant._prepare.flow_graph import Repeated
from fakequant._prepare.repeated_calls import RepeatedCalls, describe_repeated
from fakequant._train.running import check_module
from fakequant._util.optional_packages import require, writing
from fakequant.nn._call_quantizers import CallQuantizers
from fakequant.nn._function_calls import CHILD, CallingModule, FunctionQuantizers
from fakequant.nn._layer_kinds import find_kind
from fakequant.nn._owned_product import OwnedProduct, release_from_owner
from fakequant.nn._owners import OwnerKind, is_owner, owner_record, products_of
from fakequant.nn._quantized_layer import ATTENTION_QUANTIZERS, input_grids_of
from fakequant.nn._records import LayerRecord, find_record
from fakequant.spec import QuantSpec, shortened

File: TypeAlias = str | os.PathLike[str]
# A part of the metadata: what JSON can hold.
Description: TypeAlias = dict[str, Any]
# A state_dict: tensors, and extra states of any type.
State: TypeAlias = dict[str, Any]

_FORMAT = 2
# The format before files had checksums.
_OLD_FORMAT = 1


def save_converted(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Writes a converted model to a file: codes, scales, specs, and the tensors that stay in float.

    The file is written atomically and has a checksum. Needs safetensors (`pip install "fakequant[onnx]"`).

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
    with writing(path) as unfinished:
        state = model.state_dict()
        tensors = {n: v.detach().contiguous().clone() for n, v in state.items() if isinstance(v, Tensor)}
        encode_scales_of(model, tensors)
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
            _apply(model, described, state, path)
        except _WrongModelError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError, AssertionError, RecursionError) as error:
            words = shortened(str(error).partition("\n")[0].rstrip("."), 500)
            raise ValueError(
                f"{path} is damaged: its description of the model is not valid ({type(error).__name__}: {words}).\n"
                f"{_AGAIN}"
            ) from error
    return model


class _WrongModelError(ValueError):
    """A file was saved from another model."""


_AGAIN = "Write it again with fakequant.save_converted."


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
        raise ValueError(f"{path} is damaged, or is not a safetensors file: {error}.\n{_AGAIN}") from error
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
            f"{path} is damaged: the description of its tensors is not JSON ({error}).\n{_AGAIN}"
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
    described.setdefault("owners", {})  # files of older versions have none
    missing = [name for name, kind in _PARTS.items() if not isinstance(described.get(name), kind)]
    if missing:
        raise ValueError(f"{path} is damaged: its description lacks {', '.join(missing)}.\n{_AGAIN}")
    return described, {**state, **described["extra_states"]}


_PARTS = {
    "target": str, "folded": list, "notes": list, "layers": dict, "grids": dict, "inputs_from": dict,
    "functions": dict, "extra_states": dict, "owners": dict,
}  # fmt: skip


def _compare_checksum(path: File, version: int, saved: str | None, found: str) -> None:
    if version == _OLD_FORMAT and saved is None:
        warnings.warn(
            f"{path} has no checksum, because an older version wrote it: damage cannot be detected.\n{_AGAIN}",
            UserWarning,
            stacklevel=4,
        )
    elif saved != found:
        raise ValueError(f"{path} is damaged: its checksum does not match its contents.\n{_AGAIN}")


@contextmanager
def _unchanged_on_failure(model: nn.Module, layers: Container[str]) -> Iterator[None]:
    """Context that restores all modules and tensors of a model if the body raises.

    Tensors of modules in `layers`, which holds paths, are not copied, because loading replaces them instead of
    writing to them.
    """
    modules = [(module, module.__class__, _shallow(module.__dict__)) for module in model.modules()]
    others = [module for path, module in model.named_modules() if path not in layers]
    values = [(t, t.detach().clone()) for module in others for t in _tensors_of(module)]
    extra = [(m, copy.deepcopy(m.get_extra_state())) for m in model.modules() if _has_extra_state(m)]
    try:
        yield
    except BaseException:
        for module, kind, fields in modules:
            module.__class__ = kind
            module.__dict__.clear()
            module.__dict__.update(fields)
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)
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


def _describe(model: nn.Module) -> Description:
    """Returns everything that is needed to rebuild the model and is not a tensor of its state_dict."""
    grids = {module: path for path, module in model.named_modules() if isinstance(module, Grid)}
    layers, sources = {}, {}
    for path, module in model.named_modules():
        if isinstance(module, IntegerLayer):
            record = module._fakequant
            layers[path] = {"kind": record.float_class.__name__, "weight": _describe_weight(record)}
            if record.takes_vectors:
                layers[path]["takes_vectors"] = True
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


def _describe_slots(model: nn.Module, grids: dict[Grid, str]) -> Description:
    """Returns, by path, what `CallQuantizers` are made of: their own grids and borrowed ones."""
    found = {}
    for path, slot in model.named_modules():
        if isinstance(slot, CallQuantizers):
            own = {turn: grids[grid] for turn, grid in slot._modules.items() if isinstance(grid, Grid)}
            borrowed = {str(turn): grids[grid] for turn, grid in slot.borrowed.items()}
            found[path] = {"own": own, "borrowed": borrowed}
    return found


def _make_slots(described: Description, grids: dict[str, Grid], repeated: RepeatedCalls) -> dict[str, nn.Module]:
    """Returns the grids by path, with one `CallQuantizers` for all that belong to the same tensor of a module."""
    found = {path: grid for path, grid in grids.items() if path.rpartition(".")[0] not in described}
    slots = {
        path: CallQuantizers(
            repeated.of(_owner_of(path)),
            *({int(turn): grids[grid] for turn, grid in slot[which].items()} for which in ("own", "borrowed")),
        )
        for path, slot in described.items()
    }
    return {**found, **slots}


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


def _apply(model: nn.Module, described: Description, state: State, file: File) -> None:
    _add_products(model, described["owners"], file)
    _require_same_model(model, described, file)
    target = _targets.find(described["target"]).name
    modules = dict(model.named_modules())
    for path in described["folded"]:
        remove_norm(model, path)
    for path, layer in described["layers"].items():
        _make_layer(modules[path], path, layer)
    grids = {path: _make_grid(path, grid, state) for path, grid in described["grids"].items()}
    repeated = RepeatedCalls({path: Repeated(*found) for path, found in described["repeated"].items()})
    slots = _make_slots(described["slots"], grids, repeated)
    of_functions = {path for path in slots if path.split(".")[-2:-1] == [CHILD]}
    for path, slot in slots.items():
        if path in of_functions:
            continue
        parent, _, name = path.rpartition(".")
        module = model.get_submodule(parent)
        if isinstance(module, (IntegerLayer, Folded)) or name in module._modules:
            module._modules[name] = slot
        else:
            attach_output(module, slot)
    for path, functions in described["functions"].items():
        _make_functions(model, path, functions, slots)
    repeated.attach(model)
    watch_callees(model)
    for path, grid_path in described["inputs_from"].items():
        model.get_submodule(path)._fakequant.input_grid = grids[grid_path]  # type: ignore[union-attr]
    close_shortcuts(model)
    decode_scales_of(model, state)
    _fill(model, state, file)
    model.eval().requires_grad_(False)
    record_of(model).conversion = Conversion(target, described["folded"], described["notes"])
    return_tensors(model)


def _add_products(model: nn.Module, owners: Description, file: File) -> None:
    """Gives the layers of a float model that own products these products. Raises ValueError if a type differs."""
    modules = dict(model.named_modules())
    for path, there in owners.items():
        module = modules.get(path)
        if module is None or _kind(module) != there:
            _refuse(file, path, there, _kind(module))
        if not is_owner(module):
            raise TypeError(f"{there} is not a supported layer type")
        attach_layer(module, owner_record(module), {**products_of(module), "output_quantizer": None})


def _require_same_model(model: nn.Module, described: Description, file: File) -> None:
    """Raises ValueError if a layer or module in the file is missing in the model or has another type or shape."""
    if find_conversion(model) is not None or find_preparation(model) is not None:
        raise _WrongModelError("The model is prepared or converted already.\nPass the float model.")
    modules = dict(model.named_modules())
    for path, layer in described["layers"].items():
        here, there = _kind(modules.get(path)), layer["kind"]
        if here == there and layer["weight"] is not None:
            kind = find_kind(type(modules[path]))
            weight = getattr(modules[path], kind.weight_name) if kind is not None else None
            here = f"{here} of shape {None if weight is None else tuple(weight.shape)}"
            there = f"{there} of shape {tuple(layer['weight']['shape'])}"
        if here != there:
            _refuse(file, path, there, here)
    slots = described["slots"]
    alone = [path for path in described["grids"] if path.rpartition(".")[0] not in slots]
    parents = map(_owner_of, (*alone, *slots))
    for path in (*described["folded"], *parents, *described["inputs_from"], *described["functions"]):
        if path not in modules:
            _refuse(file, path, "a module", "absent")


def _kind(module: nn.Module | None) -> str:
    return "absent" if module is None else type(module).__name__


def _refuse(file: File, path: str, there: str, here: str) -> NoReturn:
    raise _WrongModelError(
        f"{file} does not fit the model: {path!r} is {there} in the file but {here} in the model.\n"
        "Pass a float model of the architecture that was converted."
    )


def _make_layer(layer: nn.Module, path: str, described: Description) -> None:
    cls, weight = type(layer), described["weight"]
    kind = find_kind(cls)
    if kind is None:
        raise TypeError(f"{cls.__name__} is not a supported layer type")
    takes_vectors = bool(described.get("takes_vectors", False))
    record = Integers(kind=kind, float_class=cls, path=path, takes_vectors=takes_vectors)
    attach_layer(layer, record, dict.fromkeys(("input_quantizer", "output_quantizer", *ATTENTION_QUANTIZERS)))
    layer.register_buffer("bias_codes", None)
    if weight is None:
        return
    layer._parameters.pop(kind.weight_name, None)
    release_from_owner(layer, kind.weight_name)
    record.weight_spec = QuantSpec.from_dict(weight["spec"])
    record.weight_shape, record.weight_shift = tuple(weight["shape"]), int(weight.get("shift", 0))
    for name in ("weight_codes", "weight_scale", "weight_zero_point"):
        layer.register_buffer(name, None)
    if kind.bias_name in layer._parameters or isinstance(layer, OwnedProduct):
        layer._parameters[kind.bias_name] = None
        release_from_owner(layer, kind.bias_name)


def _owner_of(slot: str) -> str:
    """Returns the path of the module to which a quantizer or grid at a path belongs.

    >>> _owner_of("block.relu.output_quantizer"), _owner_of("block.function_quantizers.add_0")
    ('block.relu', 'block')
    """
    return slot.rpartition(".")[0].removesuffix(CHILD).rstrip(".")


def _make_functions(model: nn.Module, path: str, described: Description, slots: dict[str, nn.Module]) -> None:
    """Adds the `FunctionQuantizers` of the module at `path`."""
    own = {key: slots[".".join(part for part in (path, CHILD, key) if part)] for key in described["keys"]}
    layers = {key: model.get_submodule(layer) for key, layer in described["layers"].items()}
    callees = [str(callee) for callee in described["callees"]]
    quantizers = FunctionQuantizers(own, layers, described["counts"], callees)
    attach_functions(model.get_submodule(path), quantizers)


def _make_grid(path: str, grid: Description, state: State) -> Grid:
    values = [state.get(f"{path}.{name}") for name in ("scale", "zero_point")]
    if (values[0] is None) != (values[1] is None):
        raise KeyError(f"{path}.{'scale' if values[0] is None else 'zero_point'}")
    spec = QuantSpec.from_dict(grid["spec"])
    if grid["arithmetic"] not in ARITHMETICS:
        raise KeyError(grid["arithmetic"])
    check_eps(path, grid["eps"])
    check_grid(path, spec, *values)
    return Grid(spec, *values, arithmetic=grid["arithmetic"], eps=grid["eps"], path=path)


def _fill(model: nn.Module, state: State, file: File) -> None:
    """Loads the state_dict of the file into the rebuilt model. Raises an error if names, shapes or dtypes differ."""
    for path, module in model.named_modules():
        if isinstance(module, IntegerLayer):
            _fill_layer(module, f"{path}." if path else "", state, file)
    places = model.state_dict()
    for name in (*places, *state):
        if name not in state or name not in places:
            here, there = ("absent" if name not in where else "present" for where in (places, state))
            _refuse(file, name, there, here)
        found, place = state[name], places[name]
        if isinstance(place, Tensor) and isinstance(found, Tensor) and found.shape != place.shape:
            if name.endswith(EXTRA_STATE_SUFFIX):
                continue  # `set_extra_state` of the module decides what it accepts
            _refuse(file, name, f"of shape {tuple(found.shape)}", f"of {tuple(place.shape)}")
        if isinstance(place, Tensor) and not name.endswith(EXTRA_STATE_SUFFIX):
            if not isinstance(found, Tensor):
                raise TypeError(f"{name} is not a tensor")
            check_same_dtype(name, found, place)
    with torch.no_grad():
        model.load_state_dict(state)


def _fill_layer(layer: IntegerLayer, start: str, state: State, file: File) -> None:
    """Assigns the tensors of an integer layer. It may have a bias that the float layer does not, from a batch norm."""
    shapes = _shapes(layer)
    tensors: list[dict[str, Any]] = [layer._buffers, layer._parameters]
    for own in tensors:
        for last in own:
            value = state.get(start + last)
            if value is None:
                continue
            if not isinstance(value, Tensor):
                raise TypeError(f"{start}{last} is not a tensor")
            expected = shapes.get(last, None if own[last] is None else tuple(own[last].shape))
            if tuple(value.shape) != expected:
                _refuse(file, start + last, f"of shape {tuple(value.shape)}", f"of {expected}")
            own[last] = nn.Parameter(value, requires_grad=False) if own is layer._parameters else value
    if layer.bias_codes is not None:
        layer._parameters.pop(layer._fakequant.kind.bias_name, None)
    missing = [last for last in ("weight_codes", "weight_scale") if last in shapes and layer._buffers[last] is None]
    if missing:
        raise ValueError(f"{file} is damaged: it has no {start}{missing[0]}.\n{_AGAIN}")
    if layer._fakequant.weight_spec is not None:
        check_weight(start.rstrip("."), layer)


def _shapes(layer: IntegerLayer) -> dict[str, tuple[int, ...]]:
    """Returns the shapes that the tensors of an integer layer must have, by name."""
    record, kind = layer._fakequant, layer._fakequant.kind
    if record.weight_spec is None:
        return {}
    spec, shape = record.weight_spec, record.weight_shape
    scales = blocks_of(shape, spec).parameters
    codes = (-(-prod(shape) * spec.bits // 8),) if can_be_packed(spec) else shape
    outputs = (shape[kind.channel_axis] * (getattr(layer, "groups", 1) if kind.channel_axis == 1 else 1),)
    calls = (len(input_grids_of(layer)),) if has_call_grids(layer) else ()
    return {
        "weight_codes": codes,
        "weight_scale": scales,
        "weight_zero_point": scales,
        "bias_codes": (*calls, *outputs),
        kind.bias_name: outputs,
    }
