"""`TensorScaleFakeQuantize`: NVFP4 with a calibrated scale for the tensor, under which block scales follow the data."""

from typing import Any

import torch
from torch import Tensor

from fakequant._backends.torch import tensor_functions
from fakequant.functional import Gradient
from fakequant.nn._fake_quantize import FakeQuantize
from fakequant.nn._quantizer_state import encoded_spec
from fakequant.observers._observer import Observer
from fakequant.qparams import QParams
from fakequant.spec import QuantSpec

# 448 * 6, the largest value under a tensor scale of 1, and the smallest magnitude that counts.
_LARGEST, _SMALLEST = 2688.0, 2.0**-126
# What is observed: the range of the whole tensor.
_TENSOR = QuantSpec(format="e2m1")
_FP8 = QuantSpec(format="e4m3fn")


class TensorScaleFakeQuantize(FakeQuantize):
    """Fake-quantizes to NVFP4 as engines with a calibrated `input_global_scale` do.

        scale        = (1 / absmax of the tensors seen) * 2688            calibrated, then fixed
        block scale  = e4m3fn(min((absmax of the block / 6) * scale, 448))    of every tensor; 0.125 if that is 0
        y            = fake_quantize(x, block scale / scale)

    `absmax / 6` is rounded to the dtype of `x`. Blocks above the range that was seen saturate, and have no gradient
    there.

    Args:
        spec: NVFP4 with scale_rule="divided".
        observer: Finds the range of the tensor. It must not be dynamic.
        options: Those of `FakeQuantize`.
    """

    def __init__(self, spec: QuantSpec, observer: Observer | None = None, **options: Any) -> None:
        """Makes the buffers."""
        if spec.scale_rule != "divided":
            raise ValueError(f"A calibrated scale of the tensor divides block scales: use NVFP4 'divided', got {spec}.")
        if observer is not None and observer.dynamic:
            raise ValueError(
                f"The scale of the tensor is calibrated, but {observer} follows each tensor.\n"
                "Use an observer that keeps a range, such as MovingAverage() or MinMax()."
            )
        super().__init__(_TENSOR, observer, **options)
        self.spec = spec
        self.grid = torch.tensor(encoded_spec(spec), dtype=torch.int32, device=self.grid.device)

    @property
    def _observed(self) -> QuantSpec:
        return _TENSOR

    def _set_observer(self, observer: Observer) -> None:
        super()._set_observer(observer)
        self._in_kernel = None  # which would quantize per tensor

    def _check_blocks(self, x: Tensor) -> tuple[int, ...]:
        return ()

    @torch.no_grad()
    def refresh(self) -> None:
        """Computes the scale of the tensor from everything observed. It is NaN if nothing was observed."""
        lo, hi = self.observer.range(self._state(), _TENSOR)
        scale = torch.maximum(-lo, hi).clamp(min=_SMALLEST).reciprocal() * _LARGEST
        self.scale.copy_(torch.where(lo <= hi, torch.where(scale.isinf(), 1.0, scale), torch.nan))
        self._set_stale(False)

    @torch.no_grad()
    def set_qparams(self, scale: Tensor, zero_point: Tensor) -> None:
        """Sets the scale of the tensor, and freezes it."""
        absmax = _LARGEST / scale.reshape(())
        self.running_min.copy_(-absmax)
        self.running_max.copy_(absmax)
        self.frozen = True
        self.scale.copy_(scale.reshape(()))
        self._stale = False

    def qparams_for(self, x: Tensor) -> QParams[Tensor]:
        """Returns the scales of the blocks of `x`, and zeros."""
        if self._stale:
            self.refresh()
        self._require_range()
        seen = tensor_functions.min_max(x, self.spec)
        limit = torch.finfo(torch.float32).max
        absmax = torch.where(seen.min <= seen.max, torch.maximum(-seen.min, seen.max), 0).clamp(max=limit).float()
        sixth = absmax / 6
        if x.dtype in (torch.bfloat16, torch.float16):
            sixth = sixth.to(x.dtype).float()
        value = tensor_functions.fake_quantize(sixth * self.scale, 1.0, 0, _FP8)
        scale = torch.where(value == 0, 0.125, value) / self.scale
        return QParams(scale, torch.zeros_like(scale, dtype=torch.int32))

    def _quantize(self, x: Tensor, gradient: Gradient) -> Tensor:
        self.__dict__["_last"] = None
        with torch.no_grad():
            scale, _ = self.qparams_for(x)
        return tensor_functions.fake_quantize(x, scale, 0, self.spec, gradient=gradient)

    def _qparams_for(self, y: Tensor) -> QParams[Tensor] | None:
        return None  # the scales of its blocks are not kept
