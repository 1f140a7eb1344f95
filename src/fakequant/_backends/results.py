"""The named tuples that the functions return, generic in the array type."""

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

# Functions return arrays for arrays and tensors for tensors.
Array = TypeVar("Array", np.ndarray, "Tensor")


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
    """Scales of few bits as bytes.

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
