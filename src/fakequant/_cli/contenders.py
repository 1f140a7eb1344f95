"""The operations that `fakequant bench` measures: fakequant's, torch's, and a copy of the same array."""

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

import fakequant as fq
from fakequant.testing.timing import Contender

Array = npt.NDArray[Any]

SCALE, ZERO, QMIN, QMAX = 0.05, 3, -128, 127
CHANNELS = 64


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation. If contenders return tuples, their first elements are compared."""

    operation: str
    ours: Contender
    copy: Contender
    torch: Contender | None

    def has_torchs_bits(self) -> bool | None:
        """Returns True if the results equal torch's bit by bit. None if torch is not installed."""
        if self.torch is None:
            return None
        ours, theirs = _first(self.ours()), _first(self.torch()).numpy()
        return bool(np.array_equal(ours.view(np.uint32), theirs.view(np.uint32)))


def make_cases(elements: int, torch: ModuleType | None) -> list[Case]:
    """Returns all cases, for float32 arrays with this number of elements. `torch` is the module or None.

    >>> [case.has_torchs_bits() for case in make_cases(1 << 10, None)]
    [None, None, None, None, None]
    """
    # About 3 % of the values lie outside the range.
    x = (np.random.default_rng(0).standard_normal(elements) * 3).astype(np.float32).reshape(CHANNELS, -1)
    dy = np.ascontiguousarray(x[::-1])
    spec = fq.QuantSpec(symmetric=False, numerics="torch")
    per_channel = dataclasses.replace(spec, axis=0)
    scales = (np.arange(CHANNELS) % 7 * 0.01 + 0.03).astype(np.float32)
    zeros = (np.arange(CHANNELS) % 11 - 5).astype(np.int32)
    one = np.full(1, SCALE, np.float32), np.full(1, 2.0, np.float32)
    many = np.full(CHANNELS, SCALE, np.float32), np.full(CHANNELS, 2.0, np.float32)
    _, mask = fq.fake_quantize(x, SCALE, ZERO, spec, mask="packed")
    theirs = _of_torch(torch, x, dy, scales, zeros, one, many)
    ours: dict[str, Contender] = {
        "forward + packed mask": lambda: fq.fake_quantize(x, SCALE, ZERO, spec, mask="packed"),
        "forward + packed mask, per channel": lambda: fq.fake_quantize(x, scales, zeros, per_channel, mask="packed"),
        "backward from packed mask": lambda: fq.fake_quantize_backward(dy, mask, spec),
        "learned backward, per tensor": lambda: fq.fake_quantize_learnable_per_tensor_affine_backward(
            dy, x, *one, QMIN, QMAX
        ),
        "learned backward, per channel": lambda: fq.fake_quantize_learnable_per_channel_affine_backward(
            dy, x, *many, 0, QMIN, QMAX
        ),
    }
    return [Case(name, run, x.copy, theirs.get(name)) for name, run in ours.items()]


def _of_torch(
    torch: ModuleType | None,
    x: Array,
    dy: Array,
    scales: Array,
    zeros: Array,
    one: tuple[Array, Array],
    many: tuple[Array, Array],
) -> dict[str, Contender]:
    """Returns torch's operators by the names of the operations, empty without torch.

    Args:
        torch: The module or None.
        x: The input.
        dy: The gradient of the output.
        scales: One scale per channel.
        zeros: One zero point per channel.
        one: A learned scale and zero point for the whole tensor.
        many: Learned scales and zero points per channel.
    """
    if torch is None:
        return {}
    aten, tensor = torch.ops.aten, torch.from_numpy
    t, g, s, z = tensor(x), tensor(dy), tensor(scales), tensor(zeros)
    limits = (QMIN, QMAX)
    _, mask = aten.fake_quantize_per_tensor_affine_cachemask(t, SCALE, ZERO, *limits)
    ones, manys = [*map(tensor, one)], [*map(tensor, many)]
    found: dict[str, Callable[[], object]] = {
        "forward + packed mask": lambda: aten.fake_quantize_per_tensor_affine_cachemask(t, SCALE, ZERO, *limits),
        "forward + packed mask, per channel": lambda: aten.fake_quantize_per_channel_affine_cachemask(
            t, s, z, 0, *limits
        ),
        "backward from packed mask": lambda: aten.fake_quantize_per_tensor_affine_cachemask_backward(g, mask),
        "learned backward, per tensor": lambda: aten._fake_quantize_learnable_per_tensor_affine_backward(
            g, t, *ones, *limits, 1.0
        ),
        "learned backward, per channel": lambda: aten._fake_quantize_learnable_per_channel_affine_backward(
            g, t, *manys, 0, *limits, 1.0
        ),
    }
    return found


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result
