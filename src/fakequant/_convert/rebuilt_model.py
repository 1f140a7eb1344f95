"""Rebuilds the converted model of a file from its description, its tensors and the float model.

Everything that a file says is checked before it is used: names, shapes, dtypes and ranges.
"""

import math
import os
from collections.abc import Iterator
from math import prod
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor, nn

from fakequant import _runtimes
from fakequant._backends.blocks import blocks_of
from fakequant._backends.checks import can_be_packed
from fakequant._backends.torch import tensor_functions
from fakequant._backends.torch.tensor_kernels import dtype_name
from fakequant._backends.torch.torch_private import EXTRA_STATE_SUFFIX
from fakequant._convert.convert import Conversion, find_conversion, return_tensors
from fakequant._convert.fold_batch_norm import Folded, remove_norm
from fakequant._convert.golden.integer_layer import IntegerLayer, Integers, has_call_grids
from fakequant._convert.golden.quantizer import GoldenQuantizer
from fakequant._prepare.attach import (
    attach_cache,
    attach_functions,
    attach_layer,
    attach_output,
    close_shortcuts,
    find_preparation,
    record_of,
    watch_callees,
)
from fakequant._prepare.flow_graph import Repeated
from fakequant._prepare.repeated_calls import RepeatedCalls
from fakequant._runtimes.arithmetic import ARITHMETICS
from fakequant.nn._call_quantizers import CallQuantizers
from fakequant.nn._function_calls import CHILD, FunctionQuantizers
from fakequant.nn._input_factors import attach_factors
from fakequant.nn._kv_cache import CACHE_QUANTIZERS
from fakequant.nn._layer_kinds import find_kind
from fakequant.nn._owners import OwnedProduct, is_owner, owner_record, products_of, release_from_owner
from fakequant.nn._quantized_layer import ATTENTION_QUANTIZERS, input_grids_of
from fakequant.qparams import decode_scales
from fakequant.spec import QuantSpec

File: TypeAlias = str | os.PathLike[str]
# A part of the metadata: what JSON can hold.
Description: TypeAlias = dict[str, Any]
# A state_dict: tensors, and extra states of any type.
State: TypeAlias = dict[str, Any]
AGAIN = "Write it again with fakequant.save_converted."
# Scales of few bits (MX, NVFP4) are float32 in the model. In the file they are bytes, as `encode_scales` returns them,
# and for NVFP4 there is one more float32 scale per tensor.
SCALE, CODES, TENSOR_SCALE = "weight_scale", "weight_scale_codes", "weight_tensor_scale"


class WrongModelError(ValueError):
    """A file was saved from another model."""


def rebuild(model: nn.Module, described: Description, state: State, file: File) -> None:
    """Turns a float model into the converted model that a file describes, in place.

    Raises WrongModelError if the model does not fit, and errors of several types if the file is damaged.
    """
    state.update({name: state[other] for name, other in described["tied"].items()})
    _add_products(model, described["owners"], file)
    _require_same_model(model, described, file)
    target = _runtimes.find(described["target"]).name
    modules = dict(model.named_modules())
    for path in described["folded"]:
        remove_norm(model, path)
    for path, layer in described["layers"].items():
        _make_layer(modules[path], path, layer)
    grids = {path: _make_grid(path, grid, state) for path, grid in described["grids"].items()}
    repeated = RepeatedCalls({path: Repeated(*found) for path, found in described["repeated"].items()})
    slots = _make_slots(described["slots"], grids, repeated)
    of_functions = {path for path in slots if path.split(".")[-2:-1] == [CHILD]}
    caches: dict[str, dict[str, Any]] = {}
    for path, slot in slots.items():
        if path in of_functions:
            continue
        parent, _, name = path.rpartition(".")
        if name in CACHE_QUANTIZERS:
            caches.setdefault(parent, {})[name] = slot
            continue
        module = model.get_submodule(parent)
        if isinstance(module, (IntegerLayer, Folded)) or name in module._modules:
            module._modules[name] = slot
        else:
            attach_output(module, slot)
    for path, quantizers in caches.items():
        attach_cache(model.get_submodule(path), quantizers)
        for quantizer in quantizers.values():
            quantizer.is_plain = True
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
        raise WrongModelError("The model is prepared or converted already.\nPass the float model.")
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
    raise WrongModelError(
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
    if described.get("multiplies_input", False):
        attach_factors(layer)
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


def _make_grid(path: str, grid: Description, state: State) -> GoldenQuantizer:
    values = [state.get(f"{path}.{name}") for name in ("scale", "zero_point")]
    if (values[0] is None) != (values[1] is None):
        raise KeyError(f"{path}.{'scale' if values[0] is None else 'zero_point'}")
    spec = QuantSpec.from_dict(grid["spec"])
    if grid["arithmetic"] not in ARITHMETICS:
        raise KeyError(grid["arithmetic"])
    check_eps(path, grid["eps"])
    check_grid(path, spec, *values)
    return GoldenQuantizer(spec, *values, arithmetic=grid["arithmetic"], eps=grid["eps"], path=path)


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
            if found.dtype != place.dtype:
                raise ValueError(
                    f"{name} is {dtype_name(found.dtype)} in the file but {dtype_name(place.dtype)} in the model"
                )
    _take(model, state)
    with torch.no_grad():
        model.load_state_dict(state)


def _take(model: nn.Module, state: State) -> None:
    """Gives the tensors of a model the memory of the file's, or else copies, so that nothing is written to theirs.

    They stay the same objects, which other code may hold. So there is no second copy of the model.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found = state.get(name)
        like = (tensor.shape, tensor.dtype, tensor.device)
        if isinstance(found, Tensor) and (found.shape, found.dtype, found.device) == like:
            tensor.data = found
        else:
            tensor.data = tensor.data.clone()


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
        raise ValueError(f"{file} is damaged: it has no {start}{missing[0]}.\n{AGAIN}")
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


def _make_slots(
    described: Description, grids: dict[str, GoldenQuantizer], repeated: RepeatedCalls
) -> dict[str, nn.Module]:
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


# --- scales of few bits ---------------------------------------------------------------------------


def decode_scales_of(model: nn.Module, state: dict[str, Any]) -> None:
    """Replaces bytes in the state of a file by scales. Raises an error if one is missing or has another form."""
    for start, layer in layers_with_block_scales(model):
        spec, shape = layer._fakequant.weight_spec, layer._fakequant.weight_shape
        codes = _taken(state, start + CODES, torch.uint8, blocks_of(shape, spec).parameters)
        factor = None
        if spec.scale_format == "e4m3fn":
            factor = _taken(state, start + TENSOR_SCALE, torch.float32, ())
        if start + SCALE in state:
            raise ValueError(f"{start}{SCALE} is there although the scales are bytes")
        state[start + SCALE] = decode_scales(codes, factor, spec)


def layers_with_block_scales(model: nn.Module) -> Iterator[tuple[str, IntegerLayer]]:
    """Yields the layers whose weights have scales of few bits, each with the start of its tensors' names."""
    for path, module in model.named_modules():
        if isinstance(module, IntegerLayer):
            spec = module._fakequant.weight_spec
            if spec is not None and spec.has_block_scales:
                yield f"{path}." if path else "", module


def _taken(state: dict[str, Any], name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    value = state.pop(name, None)
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is missing, or is not a tensor")
    if value.dtype != dtype or tuple(value.shape) != shape:
        found = f"{dtype_name(value.dtype)} of shape {tuple(value.shape)}"
        raise ValueError(f"{name} is {found}, but must be {dtype_name(dtype)} of shape {shape}")
    return value


# --- checks of tensors ----------------------------------------------------------------------------


def check_scale(name: str, scale: Tensor) -> None:
    """Raises ValueError unless scales are positive, finite and float32."""
    _require_dtype(name, scale, torch.float32)
    _require(name, scale, scale.isfinite() & (scale > 0), "positive and finite")


def check_zero_point(name: str, zero_point: Tensor, scale: Tensor, spec: QuantSpec) -> None:
    """Raises ValueError unless zero points are codes of the grid, one per scale."""
    _require_dtype(name, zero_point, torch.int32)
    if zero_point.shape != scale.shape:
        raise ValueError(f"{name} has shape {tuple(zero_point.shape)}, but its scale has {tuple(scale.shape)}")
    lowest, highest = (0, 0) if spec.symmetric else (spec.qmin, spec.qmax)
    _require(name, zero_point, (zero_point >= lowest) & (zero_point <= highest), f"from {lowest} to {highest}")


def check_codes(name: str, codes: Tensor, shape: tuple[int, ...], spec: QuantSpec) -> None:
    """Raises ValueError unless all codes of a weight are in the range of its spec, or are finite floats."""
    packed = tuple(codes.shape) != shape
    _require_dtype(name, codes, torch.uint8 if packed else getattr(torch, spec.storage))
    if spec.float_format is not None:
        if not packed:  # formats that are packed have neither NaN nor infinities
            values = torch.from_numpy(spec.float_format.values())[codes.long()]
            _require(name, values, values.isfinite(), "finite")
        return
    if packed:
        # A spec without narrow range, in which every packed code is valid.
        whole = QuantSpec(bits=spec.bits, signed=spec.signed, symmetric=spec.symmetric)
        zero_point = 0 if spec.symmetric else torch.zeros((), dtype=torch.int32)
        values = tensor_functions.dequantize(codes, torch.ones(()), zero_point, whole, shape=shape)
    else:
        values = codes.to(torch.int64)
    _require(name, values, (values >= spec.qmin) & (values <= spec.qmax), f"from {spec.qmin} to {spec.qmax}")


def check_eps(name: str, eps: object) -> None:
    """Raises ValueError unless `eps` is a positive, finite float."""
    if not isinstance(eps, float) or not 0 < eps < math.inf:
        raise ValueError(f"{name} has `eps` {eps!r}, but it must be a positive, finite number")


def check_grid(name: str, spec: QuantSpec, scale: Tensor | None, zero_point: Tensor | None) -> None:
    """Raises ValueError unless the scale and zero point of a grid are valid for its spec."""
    if scale is None or zero_point is None:
        return
    if spec.has_block_scales:
        raise ValueError(f"{name} has a fixed scale, but the scales of its spec ({spec}) follow the data")
    check_scale(f"{name}.scale", scale)
    check_zero_point(f"{name}.zero_point", zero_point, scale, spec)
    wanted = 0 if spec.axis is None else len(blocks_of((1,) * 8, spec).parameters)
    if spec.granularity in ("tensor", "channel") and scale.dim() != wanted:
        raise ValueError(f"{name}.scale has shape {tuple(scale.shape)}, which does not fit the spec ({spec})")


def check_weight(name: str, layer: IntegerLayer) -> None:
    """Raises ValueError unless the codes, scales, zero points and biases of an integer layer are valid."""
    record, bias_name = layer._fakequant, layer._fakequant.kind.bias_name
    spec = record.weight_spec
    start = f"{name}." if name else ""
    check_scale(f"{start}weight_scale", layer.weight_scale)
    if layer.weight_zero_point is not None:
        check_zero_point(f"{start}weight_zero_point", layer.weight_zero_point, layer.weight_scale, spec)
    elif not spec.symmetric:
        raise ValueError(f"{start}weight_zero_point is missing, but the spec ({spec}) needs it")
    check_codes(f"{start}weight_codes", layer.weight_codes, record.weight_shape, spec)
    if layer.bias_codes is not None:
        _require_dtype(f"{start}bias_codes", layer.bias_codes, torch.int32)
    bias = layer._parameters.get(bias_name)
    if bias is not None:
        if not bias.is_floating_point():
            _require_dtype(f"{start}{bias_name}", bias, torch.int32)
        _require(f"{start}{bias_name}", bias, bias.isfinite(), "finite")


def _require_dtype(name: str, value: Tensor, dtype: torch.dtype) -> None:
    if value.dtype != dtype:
        raise ValueError(f"{name} is {dtype_name(value.dtype)}, but must be {dtype_name(dtype)}")


def _require(name: str, value: Tensor, holds: Tensor, words: str) -> None:
    if not bool(holds.all()):
        bad = value.reshape(-1)[holds.reshape(-1).int().argmin()].item()
        raise ValueError(f"{name} has the value {bad:g}, but values must be {words}")
