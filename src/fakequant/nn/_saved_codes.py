"""What a quantized layer keeps for the backward pass: no floats.

A layer's operator saves its quantized input and weight. The input is `(q - zero_point) * scale`: its codes
`q` say the same in 1 byte per element instead of 4, or less below 8 bits, and give the same bits back.
The weight is there anyway, in the model: it is quantized again. What has a NaN in it, which no code
stands for, is saved as it is.
"""

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fakequant._backends.torch import tensor_functions
from fakequant._backends.torch.plain_memory import is_eager
from fakequant._backends.torch.torch_private import saved_tensor_hooks
from fakequant.nn._quantizer import Quantizer
from fakequant.spec import QuantSpec

# Fewer elements are not worth another pass: 1 MB. Of a weight whose input is smaller, 4 MB.
_SMALLEST = 1 << 18
_View = tuple[tuple[int, ...], tuple[int, ...], int]


class _Codes(NamedTuple):
    """A tensor that lies on a grid, and how the operator looked at its memory."""

    codes: Tensor
    scale: Tensor
    zero_point: Any
    spec: QuantSpec
    shape: tuple[int, ...] | None  # of packed codes
    dtype: torch.dtype
    view: _View

    def restore(self) -> Tensor:
        y = tensor_functions.dequantize(
            self.codes, self.scale, self.zero_point, self.spec, shape=self.shape, dtype=self.dtype
        )
        return y.as_strided(*self.view)


class _Again(NamedTuple):
    """A weight that can be quantized once more, as long as it is what it was."""

    weight: Tensor
    version: int
    scale: Tensor
    zero_point: Any
    spec: QuantSpec
    view: _View

    def restore(self) -> Tensor:
        if self.weight._version != self.version:
            raise RuntimeError(
                "A weight needed for gradient computation has been modified by an inplace operation: it is at version "
                f"{self.weight._version}, expected version {self.version}.\n"
                "Run the backward pass before the optimizer step, or prepare the model with save_codes=False."
            )
        y = tensor_functions.fake_quantize(self.weight.detach(), self.scale, self.zero_point, self.spec)
        return y.as_strided(*self.view)


class _Saving(threading.local):
    """How many `saved_as_codes` are active in this thread."""

    depth = 0


_saving = _Saving()


class saved_as_codes(torch.autograd.graph.saved_tensors_hooks):
    """While it is active, an operator saves of some tensors not their memory but what stands for it.

    `known` has, by the address of their memory, the tensors and what makes something to save of a view.
    """

    def __init__(self, known: dict[int, Any]) -> None:
        def pack(saved: Tensor) -> Any:
            tensor, save = known.get(saved.untyped_storage().data_ptr(), (None, None))
            if save is None or saved.numel() != tensor.numel() or saved.dtype != tensor.dtype:
                return saved
            return save((tuple(saved.shape), tuple(saved.stride()), saved.storage_offset())) or saved

        self._known = known
        super().__init__(pack, _unpack)

    def __enter__(self) -> None:
        super().__enter__()
        _saving.depth += 1

    def __exit__(self, *exception: Any) -> None:
        _saving.depth -= 1
        super().__exit__(*exception)
        self._known.clear()  # what is saved must not keep the tensors themselves


def _unpack(saved: Any) -> Tensor:
    return saved.restore() if isinstance(saved, (_Codes, _Again)) else saved


def saving_codes(
    x: Tensor, x_quantizer: Quantizer | None, weight: Tensor, quantizer: Quantizer | None, source: Tensor
) -> AbstractContextManager[Any]:
    """The context in which an operator saves the codes of `x`, and of `weight` how to compute it from `source`.

    Both are results of quantizers, given with them; a quantizer that is None was not there. Where there is
    nothing to gain, or other hooks decide what is saved, it does nothing.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return nullcontext()
    known: dict[int, Any] = {}
    large = x.numel() >= _SMALLEST
    if large and _fits(x, x_quantizer):
        known[x.untyped_storage().data_ptr()] = (x, lambda view: _encode(x, x_quantizer, view))
    if weight.numel() >= (_SMALLEST if large else 4 * _SMALLEST) and _fits(weight, quantizer):
        known[weight.untyped_storage().data_ptr()] = (weight, lambda view: _again(source, quantizer, view))
    if not known or saved_tensor_hooks() is not None:
        return nullcontext()
    return saved_as_codes(known)


def is_saving() -> bool:
    """Whether an operator called now would save codes."""
    return _saving.depth > 0


def _fits(x: Tensor, quantizer: Quantizer | None) -> bool:
    if quantizer is None or not quantizer.quantizing or quantizer.spec.bits > 8 or quantizer._blocks is None:
        return False
    return x.dtype != torch.float64 and x.is_contiguous() and is_eager(x)


def _parameters(quantizer: Any) -> tuple[Tensor, Any]:
    """Scale and zero point, which the next step may change."""
    spec = quantizer.spec
    return quantizer.scale.clone(), 0 if spec.symmetric else quantizer.zero_point.clone()


def _encode(x: Tensor, quantizer: Any, view: _View) -> _Codes | None:
    x = x.detach()
    if not quantizer.saw_only_finite and bool(x.sum().isnan()):  # NaN, or too large to tell
        return None
    spec = quantizer.spec
    scale, zero_point = _parameters(quantizer)
    packed = spec.bits in (2, 4)
    codes = tensor_functions.quantize(x, scale, zero_point, spec, packed=packed)
    return _Codes(codes, scale, zero_point, spec, tuple(x.shape) if packed else None, x.dtype, view)


def _again(weight: Tensor, quantizer: Any, view: _View) -> _Again:
    return _Again(weight, weight._version, *_parameters(quantizer), quantizer.spec, view)
