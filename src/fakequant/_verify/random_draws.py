"""Finds the random numbers that a forward pass draws, and repeats the pass with extreme ones.

A dropout with probability 1e-4 may change nothing in two passes. In a pass with extreme numbers it drops everything.
"""

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fakequant._backends.torch.torch_private import TorchDispatchMode

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

    Args:
        model: The model that runs in the mode.
        extreme: Which end of the range uniform numbers are at. None for numbers as they are drawn.
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
