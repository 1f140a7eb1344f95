"""The type of a backend, for type checkers."""

from typing import Protocol, overload

import numpy as np

from fakequant._backends.argument_types import DType, Numbers
from fakequant._backends.kernel_enums import Gradient, MaskForm, Update
from fakequant._backends.results import (
    Array,
    EncodedScales,
    LearnedGradients,
    ObservedFakeQuantize,
    OutputAndMask,
    QParams,
    Range,
)
from fakequant.spec import QuantSpec


class Backend(Protocol[Array]):
    """The functions of a backend. `fakequant.functional`, `qparams` and `torch_names` document them."""

    # --- fakequant.FakeQuantizer ---

    def as_data(self, x: object, name: str = "x") -> Array: ...

    def as_float32_array(self, x: object, name: str) -> np.ndarray: ...

    def copy(self, x: Array, name: str) -> Array: ...

    def overwrite(self, y: Array, where: Array, value: float) -> None: ...

    def zero_outside(self, dy: Array, x: Array, lo: np.float32, hi: np.float32) -> Array: ...

    # --- fakequant.functional and fakequant.qparams ---

    @overload
    def fake_quantize(
        self,
        x: Array,
        scale: Numbers,
        zero_point: Numbers,
        spec: QuantSpec,
        *,
        mask: None = None,
        gradient: Gradient = "clipped",
    ) -> Array: ...

    @overload
    def fake_quantize(
        self,
        x: Array,
        scale: Numbers,
        zero_point: Numbers,
        spec: QuantSpec,
        *,
        mask: MaskForm,
        gradient: Gradient = "clipped",
    ) -> tuple[Array, Array]: ...

    def fake_quantize_backward(self, dy: Array, mask: Array, spec: QuantSpec) -> Array: ...

    def round_zero_point(self, zero_point: Numbers, spec: QuantSpec) -> Array: ...

    def fake_quantize_learned(
        self, x: Array, scale: Numbers, zero_point: Numbers, spec: QuantSpec, *, grad_factor: float | None = 1.0
    ) -> Array: ...

    def fake_quantize_learned_backward(
        self, dy: Array, x: Array, scale: Numbers, zero_point: Numbers, spec: QuantSpec, *, grad_factor: float = 1.0
    ) -> LearnedGradients[Array]: ...

    def quantize(
        self, x: Array, scale: Numbers, zero_point: Numbers, spec: QuantSpec, *, packed: bool = False
    ) -> Array: ...

    def dequantize(
        self,
        q: Array,
        scale: Numbers,
        zero_point: Numbers,
        spec: QuantSpec,
        *,
        shape: tuple[int, ...] | None = None,
        dtype: DType = None,
    ) -> Array: ...

    def fake_quantize_dynamic(self, x: Array, spec: QuantSpec, *, gradient: Gradient = "pass", eps: float) -> Array: ...

    def quantize_dynamic(
        self, x: Array, spec: QuantSpec, *, packed: bool = False, eps: float
    ) -> tuple[Array, QParams[Array]]: ...

    def observe_fake_quantize(
        self,
        x: Array,
        spec: QuantSpec,
        running_min: Array,
        running_max: Array,
        *,
        update: Update,
        averaging_constant: float,
        eps: float,
        mask: MaskForm | None = None,
        gradient: Gradient = "clipped",
    ) -> ObservedFakeQuantize[Array]: ...

    def min_max(self, x: Array, spec: QuantSpec | None = None) -> Range[Array]: ...

    def choose_qparams(self, lo: Numbers, hi: Numbers, spec: QuantSpec, *, eps: float) -> QParams[Array]: ...

    def encode_scales(self, scale: Array, spec: QuantSpec) -> EncodedScales[Array]: ...

    def decode_scales(self, codes: Array, tensor_scale: Numbers | None, spec: QuantSpec) -> Array: ...

    # --- fakequant.torch_names ---

    def fake_quantize_per_tensor_affine(
        self, input: Array, scale: object, zero_point: object, quant_min: int, quant_max: int
    ) -> Array: ...

    def fake_quantize_per_tensor_affine_cachemask(
        self, input: Array, scale: float, zero_point: int, quant_min: int, quant_max: int
    ) -> OutputAndMask[Array]: ...

    def fake_quantize_per_tensor_affine_cachemask_tensor_qparams(
        self,
        input: Array,
        scale: Array,
        zero_point: Array,
        fake_quant_enabled: Array,
        quant_min: int,
        quant_max: int,
    ) -> OutputAndMask[Array]: ...

    def fake_quantize_per_tensor_affine_cachemask_backward(self, grad: Array, mask: Array) -> Array: ...

    def fake_quantize_per_channel_affine(
        self, input: Array, scale: Array, zero_point: Array, axis: int, quant_min: int, quant_max: int
    ) -> Array: ...

    def fake_quantize_per_channel_affine_cachemask(
        self, input: Array, scale: Array, zero_point: Array, axis: int, quant_min: int, quant_max: int
    ) -> OutputAndMask[Array]: ...

    def fake_quantize_per_channel_affine_cachemask_backward(self, grad: Array, mask: Array) -> Array: ...

    def fake_quantize_learnable_per_tensor_affine(
        self,
        input: Array,
        scale: Array,
        zero_point: Array,
        quant_min: int,
        quant_max: int,
        grad_factor: float = 1.0,
    ) -> Array: ...

    def fake_quantize_learnable_per_tensor_affine_backward(
        self,
        grad: Array,
        input: Array,
        scale: Array,
        zero_point: Array,
        quant_min: int,
        quant_max: int,
        grad_factor: float = 1.0,
    ) -> LearnedGradients[Array]: ...

    def fake_quantize_learnable_per_channel_affine(
        self,
        input: Array,
        scale: Array,
        zero_point: Array,
        axis: int,
        quant_min: int,
        quant_max: int,
        grad_factor: float = 1.0,
    ) -> Array: ...

    def fake_quantize_learnable_per_channel_affine_backward(
        self,
        grad: Array,
        input: Array,
        scale: Array,
        zero_point: Array,
        axis: int,
        quant_min: int,
        quant_max: int,
        grad_factor: float = 1.0,
    ) -> LearnedGradients[Array]: ...

    def fused_moving_avg_obs_fake_quant(
        self,
        input: Array,
        observer_on: Array,
        fake_quant_on: Array,
        running_min: Array,
        running_max: Array,
        scale: Array,
        zero_point: Array,
        averaging_const: float,
        quant_min: int,
        quant_max: int,
        ch_axis: int,
        per_row_fake_quant: bool = False,
        symmetric_quant: bool = False,
    ) -> Array: ...

    def fused_moving_avg_obs_fq_helper(
        self,
        input: Array,
        observer_on: Array,
        fake_quant_on: Array,
        running_min: Array,
        running_max: Array,
        scale: Array,
        zero_point: Array,
        averaging_const: float,
        quant_min: int,
        quant_max: int,
        ch_axis: int,
        per_row_fake_quant: bool = False,
        symmetric_quant: bool = False,
    ) -> OutputAndMask[Array]: ...
