"""Compares the state of a model before and after a forward pass, to say what the pass has changed."""

import collections
import hashlib
import random
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fakequant._convert.golden.fixed_grid import Grid
from fakequant.nn._quantizer import Quantizer
from fakequant.nn._records import NAME

_CONTAINERS = (list, tuple, set, frozenset, dict, collections.deque)
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None))
# What every module has: hooks, parameters, buffers and modules, which are looked at by themselves.
_OF_MODULES = {*vars(nn.Module()), NAME}
# How deep objects in attributes are looked at, and how many elements of each.
_DEPTH, _LENGTH = 3, 256


def state_of(model: nn.Module) -> dict[str, object]:
    """Returns the state that the model's code can change, in a form that can be compared, by a description of it.

    These are buffers, parameters and attributes of modules, and variables of their classes and files.
    """
    found: dict[str, object] = {}
    shared: dict[int, object] = {}  # objects that many modules refer to, such as a config
    for path, module in model.named_modules():
        if isinstance(module, (Quantizer, Grid)):
            continue
        place = path or "the model"
        for name, tensor in module._buffers.items():
            found[f"buffer {name} of {place}"] = _frozen(tensor, 1)
        for name, parameter in module._parameters.items():  # which are too large to be copied
            found[f"parameter {name} of {place}"] = None if parameter is None else (id(parameter), parameter._version)
        for name, value in vars(module).items():
            if name not in _OF_MODULES:
                if id(value) not in shared:
                    shared[id(value)] = _frozen(value, _DEPTH)
                found[f"attribute {name} of {place}"] = shared[id(value)]
    for cls in {type(module) for module in model.modules()}:
        found |= _variables(cls)
    return found


def changed_state(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """Returns the descriptions of what differs between two states."""
    names = dict.fromkeys([*before, *after])
    return [name for name in names if name not in before or name not in after or before[name] != after[name]]


def _variables(cls: type) -> dict[str, object]:
    """Returns the variables of a class, and of the file with its forward pass."""
    found: dict[str, object] = {}
    for base in cls.__mro__:
        if base is nn.Module:
            break
        if base.__module__.partition(".")[0] in ("torch", "fakequant"):
            continue
        for name, value in _simple(vars(base)):
            found[f"class variable {base.__name__}.{name}"] = _frozen(value, 1)
        forward = vars(base).get("forward")
        if isinstance(forward, types.FunctionType):
            for name, value in _simple(forward.__globals__):
                found[f"global variable {name} of {base.__module__}"] = _frozen(value, 1)
            found[f"variables in the forward pass of {base.__name__}"] = _frozen(forward, 2)
    return found


def _simple(variables: Any) -> Iterator[tuple[str, Any]]:
    kinds = (*_CONSTANTS, *_CONTAINERS, Tensor, np.ndarray, torch.Generator, random.Random, np.random.Generator)
    for name, value in list(variables.items()):
        if not name.startswith("__") and isinstance(value, kinds):
            yield name, value


def _frozen(value: Any, depth: int) -> object:
    """Returns something that is equal as long as a value does not change."""
    if isinstance(value, _CONSTANTS):
        return repr(value)  # in which NaN equals NaN, and 1 does not equal True
    if isinstance(value, Tensor):
        if value.is_meta or value.numel() == 0:
            return tuple(value.shape)
        data = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return tuple(value.shape), str(value.dtype), hashlib.sha256(data.numpy().tobytes()).digest()
    if isinstance(value, np.ndarray):
        return value.shape, str(value.dtype), value.tobytes()
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, (nn.Module, type, types.ModuleType)) or depth == 0:
        return len(value) if isinstance(value, _CONTAINERS) else type(value)
    if isinstance(value, types.FunctionType):
        cells = [_content(cell) for cell in value.__closure__ or ()]
        return [_frozen(content, depth - 1) for content in cells]
    if isinstance(value, dict):
        pairs = list(value.items())[:_LENGTH]
        return len(value), [(repr(key)[:_LENGTH], _frozen(one, depth - 1)) for key, one in pairs]
    if isinstance(value, _CONTAINERS):
        return len(value), [_frozen(one, depth - 1) for one in list(value)[:_LENGTH]]
    if hasattr(value, "__dict__"):
        return [(name, _frozen(one, depth - 1)) for name, one in vars(value).items()]
    return repr(value)[:_LENGTH]  # such as itertools.count(3)


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return None
