"""Measures the effect of rounding by repeating a computation with random rounding errors.

Two programs that compute the same function in float32 may differ, because they add in a different order or approximate
functions differently. The possible difference depends on the numbers that were added, so every element of a result has
its own bound. `Perturbed` finds it by experiment. While it is active, every operation that rounds returns

    y + _AMPLITUDE * 2^-24 * magnitude * (+1 or -1, at random)

where `magnitude` is |y|, or for a sum the sum of the magnitudes of its terms. Rounding explains a difference that is no
larger than those between repetitions. Elements that are selected, masked or filled with a constant do not change.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fakequant._backends.torch.torch_private import TorchDispatchMode

# In units of the rounding error of one float32 operation. Runtime kernels add thousands of numbers in blocks and
# approximate functions to a few units in the last place.
_AMPLITUDE = 32
# The same for torch's own kernels, which ran and are compared: a few units.
TORCHS_AMPLITUDE = 2
_UNIT = 2.0**-24
REPETITIONS = 4
# Results are within rounding if they differ by at most this factor times the largest change seen.
_MARGIN = 2

aten: Any = torch.ops.aten
# Sums of products. The sum of magnitudes is the same operation on the magnitudes of the arguments.
_SUMS = {
    aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.addbmm, aten.addmv, aten.mv, aten.dot, aten.linear, aten.matmul,
    aten.convolution, aten._convolution, aten.mkldnn_convolution, aten.convolution_overrideable, aten.sum, aten.mean,
    aten.cumsum, aten.avg_pool2d, aten.avg_pool3d, aten._adaptive_avg_pool2d, aten._adaptive_avg_pool3d,
    aten._embedding_bag, aten._embedding_bag_forward_only, torch.ops.fakequant.grouped_linear,
    aten.upsample_linear1d, aten.upsample_bilinear2d, aten.upsample_trilinear3d, aten.upsample_bicubic2d,
}  # fmt: skip
# Sums of their arguments.
_ADDITIONS = {aten.add, aten.sub, aten.rsub, aten.addcmul, aten.addcdiv, aten.lerp}
# Normalizations subtract numbers whose size is about one standard deviation. Their weight multiplies the difference.
_NORMS = {
    aten.native_layer_norm, aten.native_batch_norm, aten.native_group_norm, aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_no_training, aten.cudnn_batch_norm,
}  # fmt: skip
# Smooth functions that may be computed as differences of numbers as large as the input.
_STEPS = {
    aten.gelu, aten.silu, aten.mish, aten.elu, aten.celu, aten.selu, aten.softplus, aten.tanh, aten.sigmoid, aten.erf,
    aten.log_sigmoid_forward, aten.hardswish, aten.hardsigmoid, aten.erfc, aten.expm1, aten.log1p, aten.sin, aten.cos,
}  # fmt: skip
_STEP_SIZE = 8.0
# The signs for each byte of random bits.
_SIGNS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(np.float32) * 2 - 1
# Operations that only select, move or fill elements.
_EXACT = {
    aten.relu, aten.clamp, aten.clamp_min, aten.clamp_max, aten.hardtanh, aten.where, aten.masked_fill, aten.cat,
    aten.stack, aten.index, aten.index_select, aten.index_put, aten.gather, aten.scatter, aten.embedding, aten.abs,
    aten.neg, aten.sign, aten.round, aten.floor, aten.ceil, aten.trunc, aten.amax, aten.amin, aten.max, aten.min,
    aten.maximum, aten.minimum, aten.sort, aten.topk, aten.clone, aten._to_copy, aten.contiguous, aten.constant_pad_nd,
    aten.reflection_pad1d, aten.reflection_pad2d, aten.replication_pad1d, aten.replication_pad2d, aten.flip, aten.roll,
    aten.max_pool2d_with_indices, aten.max_pool3d_with_indices, aten.max_pool2d, aten.max_pool1d, aten.tril, aten.triu,
    aten.repeat, aten.leaky_relu, aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty, aten.zeros_like,
    aten.ones_like, aten.full_like, aten.empty_like, aten.fill, aten.masked_select, aten.take, aten.ldexp, aten.frexp,
    aten.native_dropout, aten.adaptive_max_pool2d, aten.pixel_shuffle, aten.upsample_nearest2d, aten.lift_fresh_copy,
    aten.copy, aten.zero, aten.set, aten.resize, aten.reflection_pad3d, aten.replication_pad3d,
    aten.upsample_nearest1d, aten.upsample_nearest3d, aten.adaptive_max_pool3d, aten.threshold, aten.index_fill,
    aten.index_copy, aten.masked_scatter, aten.slice_scatter, aten.select_scatter, aten.diagonal_scatter,
    aten.unbind_copy, aten.isnan,
}  # fmt: skip


class Perturbed(TorchDispatchMode):
    """A mode that adds a random rounding error to the result of every float operation."""

    def __init__(self, seed: int, amplitude: float = _AMPLITUDE) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._amplitude = amplitude
        self._generator = np.random.default_rng(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = _function_of(func)
        is_exact = packet in _EXACT or (func.namespace != "aten" and packet not in _SUMS)
        if is_exact or _moves_nothing(packet, func):
            return func(*args, **kwargs)
        # In-place operations overwrite what they compute from, and `out` holds no number that they compute with.
        is_in_place = _writes(func)
        given = [x.clone() if is_in_place and isinstance(x, Tensor) else x for x in args]
        result = func(*args, **kwargs)
        others = [value for name, value in kwargs.items() if name != "out"]
        inputs = [x for x in (*given, *others) if isinstance(x, Tensor) and x.is_floating_point()]
        if not inputs:
            return result
        first = result[0] if isinstance(result, (tuple, list)) and result else result
        if not isinstance(first, Tensor):
            return result
        moved = self._moved(packet, func, given, kwargs, inputs, first)
        if is_in_place:
            first.copy_(moved)
            return result
        # The first is the result, the rest are statistics or indices.
        return moved if first is result else type(result)([moved, *result[1:]])

    def _moved(self, packet: Any, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], y: Tensor) -> Tensor:
        if not y.is_floating_point() or y.numel() == 0:
            return y
        if packet in _SUMS:
            magnitude = _first(func(*_magnitudes(args), **_magnitudes(kwargs))).abs()
        elif packet in _ADDITIONS:
            tensors = {id(x): x for x in inputs}
            numbers = [*inputs, *(x for x in args[:2] if isinstance(x, (Tensor, int, float)) and id(x) not in tensors)]
            sizes = [torch.as_tensor(x).abs().to(y.dtype) for x in numbers]
            magnitude = reduce(torch.maximum, sizes).expand_as(y)
        elif packet in _STEPS:
            magnitude = torch.maximum(y.abs(), inputs[0].abs().clamp(max=_STEP_SIZE))
        elif packet in _NORMS:
            magnitude = y.abs() + _norm_magnitude(packet, args, y)
        else:
            magnitude = y.abs()
        moved = torch.addcmul(y, self._signs(y), magnitude.to(y.dtype), value=self._amplitude * _UNIT)
        if bool(moved.sum().isfinite()):  # all elements are
            return moved
        return torch.where(moved.isfinite() & y.isfinite(), moved, y)

    def _signs(self, y: Tensor) -> Tensor:
        """Returns +1 or -1 for each element of `y`, at random."""
        random = np.frombuffer(self._generator.bytes(-(-y.numel() // 8)), np.uint8)
        return torch.from_numpy(_SIGNS.take(random, 0)).view(-1)[: y.numel()].reshape(y.shape).to(y.dtype)


def _norm_magnitude(packet: Any, args: Any, y: Tensor) -> Tensor:
    """Returns |weight| + |bias| of a normalization, in a shape that broadcasts with its result."""
    weight, bias = args[2:4] if packet is aten.native_layer_norm else args[1:3]
    # Layer norms have a weight for each element of the last axes, others for each channel, which is axis 1.
    shape = args[1] if packet is aten.native_layer_norm else [-1, *[1] * (y.dim() - 2)]
    size = torch.ones(()) if weight is None else weight.detach().abs().reshape(shape)
    return size if bias is None else size + bias.detach().abs().reshape(shape)


def _function_of(func: Any) -> Any:
    """Returns the operation that an operator or its in-place form computes: `aten.silu` for `aten.silu_`."""
    packet = func.overloadpacket
    name = packet.__name__
    is_in_place = func.namespace == "aten" and name.endswith("_") and not name.endswith("__")
    return getattr(aten, name[:-1], packet) if is_in_place else packet


def _moves_nothing(packet: Any, func: Any) -> bool:
    """Whether an operator returns a view of an argument, makes the argument one, or fills it with random numbers."""
    if not _writes(func):
        return _returns_memory_of_arguments(func)
    if torch.Tag.nondeterministic_seeded in func.tags:
        return True
    forms = [getattr(packet, name) for name in packet.overloads()]
    return any(_returns_memory_of_arguments(form) and not _writes(form) for form in forms)


def _returns_memory_of_arguments(func: Any) -> bool:
    return any(value.alias_info is not None for value in func._schema.returns)


def _writes(func: Any) -> bool:
    """Whether an operator returns an argument that it has written into: its first one, or `out`."""
    return any(value.alias_info is not None and value.alias_info.is_write for value in func._schema.returns)


def _magnitudes(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.abs() if value.is_floating_point() else value
    if isinstance(value, (tuple, list)):
        return type(value)(_magnitudes(v) for v in value)
    if isinstance(value, dict):
        return {key: _magnitudes(v) for key, v in value.items()}
    return value


def _first(result: Tensor | Sequence[Tensor]) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


class Rounding:
    """The largest change of each result when a computation is repeated with rounding errors."""

    def __init__(
        self,
        compute: Callable[[], list[Tensor]],
        results: list[Tensor],
        amplitude: float = _AMPLITUDE,
        repetitions: int = REPETITIONS,
    ) -> None:
        """`compute` is repeated with errors of this amplitude; `results` are its results without errors."""
        self._amplitude = amplitude
        self._compute = compute
        self._exact = results
        self._seeds = count()
        self.changes = [torch.zeros(x.shape, dtype=torch.float64) for x in self._exact]
        # Integers and bools that changed in a repetition.
        self.unsteady = [torch.zeros(x.shape, dtype=torch.bool) for x in self._exact]
        self.repetitions = 0
        self.repeat(repetitions)

    def repeat(self, times: int) -> None:
        """Repeats the computation `times` times, each time with different errors. Tolerances only become larger."""
        self.repetitions += times
        for seed in islice(self._seeds, times):
            with Perturbed(seed, self._amplitude):
                again = self._compute()
            for number, (before, after) in enumerate(zip(self._exact, again, strict=True)):
                if not before.is_floating_point():
                    self.unsteady[number] |= before != after
                    continue
                change = (after.double() - before.double()).abs()
                change = torch.where(before == after, 0.0, change)  # infinities
                self.changes[number] = torch.maximum(self.changes[number], change.nan_to_num(0.0, torch.inf))

    def include(self, other: "Rounding") -> None:
        """Adds the changes of another program with the same results, which has rounding errors of its own."""
        self.changes = [a + b for a, b in zip(self.changes, other.changes, strict=True)]
        self.unsteady = [a | b for a, b in zip(self.unsteady, other.unsteady, strict=True)]

    def without_errors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the results without errors, from before and computed again."""
        return self._exact, self._compute()

    def tolerance(self, number: int) -> Tensor:
        """Returns how far another program's result may be from result `number`, element by element."""
        last_place = (self._exact[number].double().abs() * 4 * _UNIT).nan_to_num(0.0, 0.0, 0.0)
        return _MARGIN * self.changes[number] + last_place

    def beyond(self, number: int, a: Tensor, b: Tensor, *, times: int = 1) -> Tensor:
        """Returns a mask of the elements of two programs' results `number` that rounding does not explain.

        The tolerance is multiplied by `times`.
        """
        return beyond(a, b, times * self.tolerance(number), self.unsteady[number])


# --- differences between results -------------------------------------------------------------------


def is_same(a: Tensor, b: Tensor) -> bool:
    """Returns True if all elements are equal. NaN equals NaN."""
    if a.is_floating_point():
        return bool(((a == b) | (a.isnan() & b.isnan())).all())
    return torch.equal(a.to(b.dtype), b)


def beyond(a: Tensor, b: Tensor, tolerance: Tensor, unsteady: Tensor) -> Tensor:
    """Returns a mask of the elements that differ by more than the tolerance.

    Unsteady integers may differ, and so may subnormal numbers, which runtimes replace by 0.

    >>> a, b, nothing = torch.tensor([1e-40, 1e-37]), torch.zeros(2), torch.zeros(2)
    >>> beyond(a, b, nothing, nothing.bool())
    tensor([False,  True])
    """
    if not a.is_floating_point():
        return (a != b) & ~unsteady
    tiny = torch.finfo(torch.float32).tiny
    differ = (a != b) & ~(a.isnan() & b.isnan()) & ~((a.abs() < tiny) & (b.abs() < tiny))
    far = (a.double() - b.double()).abs()
    return differ & ~(far <= tolerance)  # also True if only one side is finite: `far` is inf or NaN


def bits_of(value: Tensor) -> Tensor:
    """Returns the bits of a tensor as integers, so that NaN equals NaN and 0 is not -0."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return value.detach().contiguous().view(sizes[value.element_size()])


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Returns the largest difference, infinity if only one side is NaN."""
    if not a.numel():
        return 0.0
    a, b = a.double(), b.double()
    far = torch.where(a.isnan() != b.isnan(), torch.inf, (a - b).abs().nan_to_num(0, torch.inf))
    return float(torch.where(a == b, 0, far).max())
