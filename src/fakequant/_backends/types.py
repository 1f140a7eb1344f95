"""The types of arguments, results and backends, generic in the array type."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

# Functions return arrays for arrays and tensors for tensors.
Array = TypeVar("Array", np.ndarray, "Tensor")

# These are open on purpose: to type checkers they are all `Any`.
# A number, a list, or an array of either library.
Numbers: TypeAlias = Any
# A dtype of either library. They have no common type.
DType: TypeAlias = Any
# An argument before its checks. It may be anything that a user passes.
Unchecked: TypeAlias = Any

MaskForm = Literal["packed", "bool"]
# The straight-through gradient: 0 outside the range, or passed everywhere.
Gradient = Literal["clipped", "pass"]
# How an observed range changes the running range.
Update = Literal["moving_average", "min_max", "dynamic"]


class OutputAndMask(NamedTuple, Generic[Array]):
    """The fake-quantized values, and the mask of the elements inside the range."""

    output: Array
    mask: Array


class LearnedGradients(NamedTuple, Generic[Array]):
    """Gradients with respect to the input, the scale and the zero point."""

    dx: Array
    dscale: Array
    dzero_point: Array


class QParams(NamedTuple, Generic[Array]):
    """Scale (float32) and zero point (int32) of every block."""

    scale: Array
    zero_point: Array


class EncodedScales(NamedTuple, Generic[Array]):
    """Block scales as bytes.

    >>> from fakequant import encode_scales, presets
    >>> encode_scales(np.float32([[0.5, 1.0]]), presets.mxfp4()).codes
    array([[126, 127]], dtype=uint8)
    """

    # The codes of the scales (uint8), in their shape.
    codes: Array
    # The scale of the whole tensor (float32, no axes) for NVFP4. None for MX.
    tensor_scale: Array | None


class Range(NamedTuple, Generic[Array]):
    """The smallest and largest finite value of every block, and the numbers of NaN, +inf and -inf."""

    min: Array
    max: Array
    nan: Array
    posinf: Array
    neginf: Array

    @property
    def absmax(self) -> Array:
        """The largest magnitude of every block."""
        return self.max.clip(-self.min)


class ObservedFakeQuantize(NamedTuple, Generic[Array]):
    """The result of `observe_fake_quantize`."""

    y: Array
    mask: Array | None
    scale: Array
    zero_point: Array
    # The number of non-finite elements: an int for arrays, a 0-d tensor for tensors.
    nonfinite: Any


class FusedArguments(NamedTuple):
    """The arguments of torch's fused observer after the data. They are not checked yet."""

    observer_on: Unchecked
    fake_quant_on: Unchecked
    running_min: Unchecked
    running_max: Unchecked
    scale: Unchecked
    zero_point: Unchecked
    averaging_const: Unchecked
    quant_min: Unchecked
    quant_max: Unchecked
    ch_axis: Unchecked
    per_row: Unchecked = False
    symmetric: Unchecked = False

    @property
    def state(self) -> tuple[Unchecked, Unchecked, Unchecked, Unchecked]:
        """What the call updates in place: running_min, running_max, scale and zero_point."""
        return self.running_min, self.running_max, self.scale, self.zero_point


# --- backends -------------------------------------------------------------------------------------


class Backend(Protocol[Array]):
    """What the library's own functions return. tests/backends/test_backends.py compares their parameters."""

    # fakequant.functional and fakequant.qparams
    fake_quantize: Callable[..., Array]
    fake_quantize_and_mask: Callable[..., tuple[Array, Array]]
    fake_quantize_backward: Callable[..., Array]
    round_zero_point: Callable[..., Array]
    fake_quantize_learned: Callable[..., Array]
    fake_quantize_learned_backward: Callable[..., LearnedGradients[Array]]
    quantize: Callable[..., Array]
    dequantize: Callable[..., Array]
    fake_quantize_dynamic: Callable[..., Array]
    quantize_dynamic: Callable[..., tuple[Array, QParams[Array]]]
    observe_fake_quantize: Callable[..., ObservedFakeQuantize[Array]]
    min_max: Callable[..., Range[Array]]
    choose_qparams: Callable[..., QParams[Array]]
    encode_scales: Callable[..., EncodedScales[Array]]
    decode_scales: Callable[..., Array]

    # fakequant.FakeQuantizer
    as_data: Callable[..., Array]
    as_float32_array: Callable[..., np.ndarray]
    copy: Callable[..., Array]
    overwrite: Callable[..., None]
    zero_outside: Callable[..., Array]


class TorchNames(Protocol[Array]):
    """What the functions with torch's names return."""

    fake_quantize_per_tensor_affine: Callable[..., Array]
    fake_quantize_per_tensor_affine_cachemask: Callable[..., OutputAndMask[Array]]
    fake_quantize_per_tensor_affine_cachemask_tensor_qparams: Callable[..., OutputAndMask[Array]]
    fake_quantize_per_tensor_affine_cachemask_backward: Callable[..., Array]
    fake_quantize_per_channel_affine: Callable[..., Array]
    fake_quantize_per_channel_affine_cachemask: Callable[..., OutputAndMask[Array]]
    fake_quantize_per_channel_affine_cachemask_backward: Callable[..., Array]
    fake_quantize_learnable_per_tensor_affine: Callable[..., Array]
    fake_quantize_learnable_per_tensor_affine_backward: Callable[..., LearnedGradients[Array]]
    fake_quantize_learnable_per_channel_affine: Callable[..., Array]
    fake_quantize_learnable_per_channel_affine_backward: Callable[..., LearnedGradients[Array]]
    fused_moving_avg_obs_fake_quant: Callable[..., Array]
    fused_moving_avg_obs_fq_helper: Callable[..., OutputAndMask[Array]]
