"""Codes instead of floats, saved by a quantized layer for the backward pass.

A layer's operator saves its quantized input and weight. The input is `(q - zero_point) * scale`. Its codes `q` take
1 byte per element or less instead of 4, and restore the same bits. The weight is in the model anyway, so it is
quantized again in the backward pass. A tensor with a NaN, which has no code, is saved as floats.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from fakequant._backends.checks import can_be_packed
from fakequant._backends.torch import compiled_nodes, tensor_functions
from fakequant._backends.torch.plain_memory import is_eager
from fakequant._backends.torch.tensor_functions import fake_quantize
from fakequant._backends.torch.torch_private import saved_tensor_hooks
from fakequant.nn._quantizer import Quantizer
from fakequant.spec import QuantSpec

# Smaller tensors are not worth another pass: 1 MB in float32. For a weight whose input is smaller, 4 MB.
_SMALLEST = 1 << 18
# Shape, strides and offset of a view.
_View: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int]


class _Codes(NamedTuple):
    """A tensor on a grid, as codes, and the view of it that the operator saved."""

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | int
    spec: QuantSpec
    shape: tuple[int, ...] | None  # None if the codes are not packed
    dtype: torch.dtype
    view: _View

    def restore(self) -> Tensor:
        y = tensor_functions.dequantize(
            self.codes, self.scale, self.zero_point, self.spec, shape=self.shape, dtype=self.dtype
        )
        return y.as_strided(*self.view)


class _Again(NamedTuple):
    """A weight to quantize again, and the view of the result that the operator saved."""

    weight: Tensor
    version: int
    scale: Tensor
    zero_point: Tensor | int
    spec: QuantSpec
    view: _View

    def restore(self) -> Tensor:
        if self.weight._version != self.version:
            raise RuntimeError(
                "A weight needed for gradient computation has been modified by an inplace operation: it is at version "
                f"{self.weight._version}, expected version {self.version}.\n"
                "Run the backward pass before the optimizer step, or prepare the model with save_codes=False."
            )
        y = fake_quantize(self.weight.detach(), self.scale, self.zero_point, self.spec)
        return y.as_strided(*self.view)


class _Saving(threading.local):
    """The number of `saved_as_codes` contexts that are active in this thread."""

    depth = 0


_saving = _Saving()


class _Replaced(NamedTuple):
    """A tensor, and a function that returns what to save for a view of it, or None to save the view."""

    tensor: Tensor
    save: Callable[[_View], _Codes | _Again | None]


class saved_as_codes(torch.autograd.graph.saved_tensors_hooks):
    """A context in which operators do not save the tensors in `replaced`, but what their `save` returns.

    The keys of `replaced` are the addresses of the tensors' memory.
    """

    def __init__(self, replaced: dict[int, _Replaced]) -> None:
        def pack(saved: Tensor) -> Tensor | _Codes | _Again:
            found = replaced.get(saved.untyped_storage().data_ptr())
            if found is None or saved.numel() != found.tensor.numel() or saved.dtype != found.tensor.dtype:
                return saved
            return found.save((tuple(saved.shape), tuple(saved.stride()), int(saved.storage_offset()))) or saved

        self._replaced = replaced
        super().__init__(pack, _unpack)

    def __enter__(self) -> None:
        super().__enter__()
        _saving.depth += 1

    def __exit__(self, *exception: Any) -> None:
        _saving.depth -= 1
        super().__exit__(*exception)
        self._replaced.clear()  # `pack` stays alive with the graph, and must not keep the tensors alive


def _unpack(saved: Tensor | _Codes | _Again) -> Tensor:
    return saved.restore() if isinstance(saved, (_Codes, _Again)) else saved


def saving_codes(
    x: Tensor, x_quantizer: Quantizer | None, weight: Tensor, quantizer: Quantizer | None, source: Tensor
) -> AbstractContextManager[Any]:
    """Returns the context in which an operator saves codes of `x`, and `source` instead of `weight`.

    The context does nothing if that would not save memory, or if other hooks on saved tensors are active.

    `x_quantizer` and `quantizer` have returned `x` and `weight`, which was `source` before.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return nullcontext()
    replaced: dict[int, _Replaced] = {}
    is_large = x.numel() >= _SMALLEST
    if is_large and x_quantizer is not None and _can_save(x, x_quantizer):
        encoded = _Replaced(x, lambda view: _encode(x, x_quantizer, view))
        replaced[x.untyped_storage().data_ptr()] = encoded
    smallest = _SMALLEST if is_large else 4 * _SMALLEST
    if weight.numel() >= smallest and quantizer is not None and _can_save(weight, quantizer):
        recomputed = _Replaced(weight, lambda view: _again(source, weight, quantizer, view))
        replaced[weight.untyped_storage().data_ptr()] = recomputed
    if not replaced or saved_tensor_hooks() is not None:
        return nullcontext()
    return saved_as_codes(replaced)


def is_saving() -> bool:
    """Returns True if an operator called now would save codes."""
    return _saving.depth > 0


def _can_save(x: Tensor, quantizer: Quantizer) -> bool:
    if not quantizer.quantizing or quantizer.spec.bits > 8 or quantizer.is_own_class:
        return False  # the results of a class of the user need not repeat, nor be on the grid of its spec
    return x.dtype != torch.float64 and x.is_contiguous() and is_eager(x)


def _qparams_for(x: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor | int] | None:
    """Returns scale and zero point of `x`, which the next step does not change, or None if they are not known."""
    found = quantizer._qparams_for(x)
    if found is None:
        return None
    return found.scale, 0 if quantizer.spec.symmetric else found.zero_point


def _encode(x: Tensor, quantizer: Quantizer, view: _View) -> _Codes | None:
    qparams = _qparams_for(x, quantizer)
    x = x.detach()
    if qparams is None or (not quantizer.saw_only_finite and bool(x.sum().isnan())):  # a NaN, or an overflow
        return None
    spec = quantizer.spec
    packed = can_be_packed(spec)
    codes = tensor_functions.quantize(x, *qparams, spec, packed=packed)
    return _Codes(codes, *qparams, spec, tuple(x.shape) if packed else None, x.dtype, view)


def _again(source: Tensor, weight: Tensor, quantizer: Quantizer, view: _View) -> _Again | None:
    qparams = _qparams_for(weight, quantizer)
    return None if qparams is None else _Again(source, source._version, *qparams, quantizer.spec, view)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes `F.linear`. If codes are saved, the backward pass restores input and weight one after the other.

    >>> linear(torch.ones(1, 2), torch.ones(3, 2), None)
    tensor([[2., 2., 2.]])
    """
    if not torch.compiler.is_compiling() and compiled_nodes.compiled is not None and is_saving():
        y: Tensor | None = compiled_nodes.compiled.linear(x, weight, bias)
        if y is not None:
            return y
    return F.linear(x, weight, bias)


def transposed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns `x @ weight + bias`, as one product of matrices.

    >>> transposed_linear(torch.ones(1, 1, 2), torch.ones(2, 3), None)
    tensor([[[2., 2., 2.]]])
    """
    rows = x.reshape(-1, x.shape[-1])
    y = rows @ weight if bias is None else torch.addmm(bias, rows, weight)
    return y.reshape(*x.shape[:-1], -1)
