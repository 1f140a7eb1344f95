"""What a forward pass does besides returning a result: state that it changes, and random numbers that it draws.

A dropout with probability 1e-4 may change nothing in two passes. In a pass with extreme random numbers it drops
everything.
"""

import collections
import contextlib
import hashlib
import random
import types
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fakequant._backends.torch.torch_private import TorchDispatchMode
from fakequant._convert.golden.quantizer import GoldenQuantizer
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
        if isinstance(module, (Quantizer, GoldenQuantizer)):
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


# --- random numbers -----------------------------------------------------------------------------

Extreme = Literal["low", "high"]

aten: Any = torch.ops.aten
_UNIFORM = {aten.rand, aten.rand_like, aten.uniform, aten.uniform_}
_BERNOULLI = {aten.bernoulli, aten.bernoulli_}
# The words of a Mersenne Twister that are extreme. All others are random, because algorithms that reject numbers
# would never end on a sequence of extreme ones.
_WORDS = 624
_EXTREME_WORDS = 312
# Words that are output as 0 and 2^32 - 1.
_RAW = {"low": 0, "high": 0x12DD9BB3}


class Draws(TorchDispatchMode):
    """A mode that notes which operations draw random numbers, and may replace these by extreme ones.

    `extreme` is the end of the range at which uniform numbers are. If it is None, they are as they are drawn.
    """

    def __init__(self, model: nn.Module, extreme: Extreme | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._extreme = extreme
        self._model = model
        self._paths: list[str] = []
        self._handles: list[Any] = []
        self._before: dict[str, object] = {}
        # Operators by name and place, each with the states of the generator before each draw.
        self.found: dict[str, list[bytes]] = {}
        # Other generators that the pass has used.
        self.others: list[str] = []

    def __enter__(self) -> "Draws":
        for path, module in self._model.named_modules():
            self._handles += [
                module.register_forward_pre_hook(lambda *_, path=path: self._paths.append(path)),
                module.register_forward_hook(lambda *_: (self._paths.pop(), None)[1]),
            ]
        self._before = _states()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        after = _states()
        self.others = [name for name, state in self._before.items() if state != after[name]]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        generator = next(
            (x for x in (*args, *kwargs.values()) if isinstance(x, torch.Generator)), torch.default_generator
        )
        before = generator.get_state()
        result = func(*args, **kwargs)
        if torch.equal(before, generator.get_state()):
            return result  # such as attention without dropout
        path = self._paths[-1] if self._paths else ""
        name = f"{func.overloadpacket.__name__} in {path}" if path else func.overloadpacket.__name__
        self.found.setdefault(name, []).append(hashlib.sha256(before.numpy().tobytes()).digest())
        return self._replaced(func, args, kwargs, result) if self._extreme is not None else result

    def _replaced(self, func: Any, args: Any, kwargs: Any, drawn: Tensor) -> Tensor:
        packet, is_high = func.overloadpacket, self._extreme == "high"
        if packet in _BERNOULLI:
            return drawn.fill_(float(is_high))
        if packet in _UNIFORM:
            ends = {"from": 0.0, "to": 1.0, **kwargs}
            if packet in (aten.uniform, aten.uniform_):
                ends.update(zip(("from", "to"), args[1:3], strict=False))
            # The upper end itself is never drawn.
            return drawn.fill_(ends["from"] + (ends["to"] - ends["from"]) * (1 - 2.0**-24 if is_high else 0.0))
        return drawn


def _states() -> dict[str, object]:
    """Returns the states of the global generators that are not torch's."""
    return {"Python's module random": random.getstate(), "numpy.random": repr(_numpy_state())}


def _numpy_state() -> Any:
    name, words, *rest = np.random.get_state()  # the generator that models use
    return name, np.asarray(words).tolist(), *rest


@contextlib.contextmanager
def extreme_draws(model: nn.Module, extreme: Extreme) -> Iterator[None]:
    """Context in which a model draws extreme numbers from all global generators. Restores their states."""
    python, numpys, torchs = random.getstate(), np.random.get_state(), torch.get_rng_state()
    words = [_RAW[extreme]] * _EXTREME_WORDS + random.Random(0).choices(range(1, 2**32), k=_WORDS - _EXTREME_WORDS)
    try:
        # At position 0 the words themselves are output.
        random.setstate((python[0], (*words, 0), None))
        np.random.set_state(("MT19937", np.array(words, np.uint32), 0, 0, 0.0))
        with Draws(model, extreme):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpys)
        torch.set_rng_state(torchs)
