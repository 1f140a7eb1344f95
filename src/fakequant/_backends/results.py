"""What the functions return, and the array type they return it in."""

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

# What goes in comes out: arrays for arrays, tensors for tensors.
Array = TypeVar("Array", np.ndarray, "Tensor")


class OutputAndMask(NamedTuple, Generic[Array]):
    """The fake-quantized values, and which elements were inside the range."""

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


class Range(NamedTuple, Generic[Array]):
    """The smallest and largest finite value of every block, and how many values were not finite."""

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
    """What `observe_fake_quantize` returns."""

    y: Array
    mask: Array | None
    scale: Array
    zero_point: Array
    # How many elements of x were not finite: a number, for tensors as a tensor.
    nonfinite: Any
