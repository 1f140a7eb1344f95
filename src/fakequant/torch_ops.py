"""Functions with torch's names, arguments, results and errors.

They return what torch 2.13's CPU operators return, bit for bit, including their oddities, which docs/numerics.md
lists. For new code use `fake_quantize` with a `QuantSpec`, which has one rule for all special values.

Per tensor, with `inv = 1 / float32(scale)`:

    code = zero_point + rint(x * inv)                      (in float64 for float64 input, otherwise in float32)
    q    = clamp(code, quant_min, quant_max)               (NaN becomes quant_min)
    y    = (q - zero_point) * scale                        (float32, also for float64 input)
    mask = quant_min <= code <= quant_max

Per channel, with one scale and zero point per index on an axis:

    int zero point      code = int64(zero_point + rint(x * inv))
    float zero point    code = int64(rint(fma(x, inv, zero_point)))       (float16: without the fma)
    y    = (clamp(code, quant_min, quant_max) - zero_point) * scale       (in float64, then rounded)
    mask = quant_min <= code <= quant_max

Per channel, the conversion to int64 comes before the clamp. NaN, infinities and codes that do not fit int64 become
the smallest int64, so all of them, including +inf, end at quant_min.

Learnable (these names have a leading `_` in torch). The forward rounds the zero point half to even. The per-tensor
backward truncates `zero_point + 0.5` instead. Both backwards add the zero point before rounding:

    code = rint(fma(x, 1 / scale, z))
    inside     dx = dy       dscale += ((dy * fma(q - z, scale, -x)) * inv) * grad_factor      dz += 0
    outside    dx = dy * 0   dscale += (dy * (quant_min - z or quant_max - z)) * grad_factor
                             dz     += (-dy * scale) * grad_factor

The terms have torch's bits. They are summed in float64, in an order that depends only on the shape, and rounded
once. torch's own sums depend on its number of threads.

Fused, with a moving average of the range. NaN and infinities enter the running range and stay there:

    running = value if running is infinite, otherwise running + averaging_const * (value - running)

Scale and zero point follow `fakequant.reference.choose_qparams_fused`, not the rule of torch's observers.
"""

import numpy as np  # noqa: F401 - for the examples

from fakequant._backends import torch_names_of
from fakequant._backends.types import Array, FusedArguments, LearnedGradients, OutputAndMask

__all__ = [
    "fake_quantize_learnable_per_channel_affine",
    "fake_quantize_learnable_per_channel_affine_backward",
    "fake_quantize_learnable_per_tensor_affine",
    "fake_quantize_learnable_per_tensor_affine_backward",
    "fake_quantize_per_channel_affine",
    "fake_quantize_per_channel_affine_cachemask",
    "fake_quantize_per_channel_affine_cachemask_backward",
    "fake_quantize_per_tensor_affine",
    "fake_quantize_per_tensor_affine_cachemask",
    "fake_quantize_per_tensor_affine_cachemask_backward",
    "fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
    "fused_moving_avg_obs_fake_quant",
    "fused_moving_avg_obs_fq_helper",
]


def __dir__() -> list[str]:
    return __all__


def fake_quantize_per_tensor_affine(
    input: Array, scale: object, zero_point: object, quant_min: int, quant_max: int
) -> Array:
    """Fake-quantizes with one scale and zero point, given as numbers or as one-element arrays.

        y = (clamp(zero_point + rint(x * (1 / scale)), quant_min, quant_max) - zero_point) * scale

    Args:
        input: The data, a float array or tensor.
        scale: A number, or an array with one element.
        zero_point: A number, or an array with one element.
        quant_min: The lowest code.
        quant_max: The highest code.

    >>> fake_quantize_per_tensor_affine(np.float32([-0.3, 0.05, 0.15, 9.0]), 0.1, 0, -8, 7)
    array([-0.3,  0. ,  0.2,  0.7], dtype=float32)
    """
    return torch_names_of(input).fake_quantize_per_tensor_affine(input, scale, zero_point, quant_min, quant_max)


def fake_quantize_per_tensor_affine_cachemask(
    input: Array, scale: float, zero_point: int, quant_min: int, quant_max: int
) -> OutputAndMask[Array]:
    """Returns `fake_quantize_per_tensor_affine` and its mask. Scale and zero point are numbers.

    >>> y, mask = fake_quantize_per_tensor_affine_cachemask(np.float32([0.15, 9.0]), 0.1, 0, -8, 7)
    >>> mask
    array([ True, False])
    """
    return torch_names_of(input).fake_quantize_per_tensor_affine_cachemask(
        input, scale, zero_point, quant_min, quant_max
    )


def fake_quantize_per_tensor_affine_cachemask_tensor_qparams(
    input: Array, scale: Array, zero_point: Array, fake_quant_enabled: Array, quant_min: int, quant_max: int
) -> OutputAndMask[Array]:
    """Returns `fake_quantize_per_tensor_affine` and its mask, with parameters in one-element arrays.

    If `fake_quant_enabled` is 0, returns a copy of the input and a mask of ones. Here the zero point may lie
    outside the range.

    >>> one = np.ones(1, np.int64)
    >>> x, s, z = np.float32([0.26]), np.float32([0.1]), np.int32([0])
    >>> fake_quantize_per_tensor_affine_cachemask_tensor_qparams(x, s, z, one * 0, -8, 7).output
    array([0.26], dtype=float32)
    """
    return torch_names_of(input).fake_quantize_per_tensor_affine_cachemask_tensor_qparams(
        input, scale, zero_point, fake_quant_enabled, quant_min, quant_max
    )


def fake_quantize_per_tensor_affine_cachemask_backward(grad: Array, mask: Array) -> Array:
    """Returns the gradient of `fake_quantize_per_tensor_affine`.

        dx = grad * mask      (a product: inf and NaN do not become 0, and 0 keeps the sign of grad)

    >>> fake_quantize_per_tensor_affine_cachemask_backward(np.float32([2, -2]), np.array([True, False]))
    array([ 2., -0.], dtype=float32)
    """
    return torch_names_of(grad).fake_quantize_per_tensor_affine_cachemask_backward(grad, mask)


def fake_quantize_per_channel_affine(
    input: Array, scale: Array, zero_point: Array, axis: int, quant_min: int, quant_max: int
) -> Array:
    """Fake-quantizes with one scale and zero point per index on `axis`.

    Args:
        input: The data, a float array or tensor.
        scale: One scale per index on `axis`.
        zero_point: One zero point per index on `axis`.
        axis: The axis along which scales differ.
        quant_min: The lowest code.
        quant_max: The highest code.

    >>> x = np.float32([[0.26, 9.0], [0.26, 9.0]])
    >>> fake_quantize_per_channel_affine(x, np.float32([0.1, 1.0]), np.int32([0, 0]), 0, -8, 7)
    array([[0.3, 0.7],
           [0. , 7. ]], dtype=float32)
    """
    return torch_names_of(input).fake_quantize_per_channel_affine(input, scale, zero_point, axis, quant_min, quant_max)


def fake_quantize_per_channel_affine_cachemask(
    input: Array, scale: Array, zero_point: Array, axis: int, quant_min: int, quant_max: int
) -> OutputAndMask[Array]:
    """Returns `fake_quantize_per_channel_affine` and its mask.

    >>> x, z = np.float32([[0.26, 9.0]]), np.int32([0])
    >>> fake_quantize_per_channel_affine_cachemask(x, np.float32([0.1]), z, 0, -8, 7).mask
    array([[ True, False]])
    """
    return torch_names_of(input).fake_quantize_per_channel_affine_cachemask(
        input, scale, zero_point, axis, quant_min, quant_max
    )


def fake_quantize_per_channel_affine_cachemask_backward(grad: Array, mask: Array) -> Array:
    """Returns the gradient of `fake_quantize_per_channel_affine`, `grad * mask`.

    >>> fake_quantize_per_channel_affine_cachemask_backward(np.float32([2, 3]), np.array([True, False]))
    array([2., 0.], dtype=float32)
    """
    return torch_names_of(grad).fake_quantize_per_channel_affine_cachemask_backward(grad, mask)


def fake_quantize_learnable_per_tensor_affine(
    input: Array, scale: Array, zero_point: Array, quant_min: int, quant_max: int, grad_factor: float = 1.0
) -> Array:
    """Fake-quantizes with `scale[0]` and the zero point `clamp(rint(zero_point[0]), quant_min, quant_max)`.

    Args:
        input: The data, a float array or tensor.
        scale: One scale, as an array with one element.
        zero_point: One zero point, as an array with one element.
        quant_min: The lowest code.
        quant_max: The highest code.
        grad_factor: Multiplies the gradients of scale and zero point. The forward ignores it.

    >>> x, s, z = np.float32([0.26, 9.0]), np.float32([0.1]), np.float32([0.5])
    >>> fake_quantize_learnable_per_tensor_affine(x, s, z, -8, 7)
    array([0.3, 0.7], dtype=float32)
    """
    return torch_names_of(input).fake_quantize_learnable_per_tensor_affine(
        input, scale, zero_point, quant_min, quant_max, grad_factor
    )


def fake_quantize_learnable_per_tensor_affine_backward(
    grad: Array, input: Array, scale: Array, zero_point: Array, quant_min: int, quant_max: int, grad_factor: float = 1.0
) -> LearnedGradients[Array]:
    """Returns the gradients of `fake_quantize_learnable_per_tensor_affine`; dscale and dzero_point have shape (1,).

    16-bit input is computed in float32, and dx is float32, as torch returns it for bfloat16. `grad` is the gradient of
    the result. The others are the arguments of the forward call.

    >>> x, s, z = np.float32([9.0]), np.float32([0.1]), np.float32([0.0])
    >>> fake_quantize_learnable_per_tensor_affine_backward(np.float32([2.0]), x, s, z, -8, 7).dscale
    array([14.], dtype=float32)
    """
    return torch_names_of(input).fake_quantize_learnable_per_tensor_affine_backward(
        grad, input, scale, zero_point, quant_min, quant_max, grad_factor
    )


def fake_quantize_learnable_per_channel_affine(
    input: Array, scale: Array, zero_point: Array, axis: int, quant_min: int, quant_max: int, grad_factor: float = 1.0
) -> Array:
    """Fake-quantizes with one scale and one rounded and clamped zero point per index on `axis`.

    `grad_factor` multiplies the gradients of scale and zero point. The forward ignores it.

    >>> x, s, z = np.float32([[0.26], [0.26]]), np.float32([0.1, 1.0]), np.float32([0.0, 0.0])
    >>> fake_quantize_learnable_per_channel_affine(x, s, z, 0, -8, 7)
    array([[0.3],
           [0. ]], dtype=float32)
    """
    return torch_names_of(input).fake_quantize_learnable_per_channel_affine(
        input, scale, zero_point, axis, quant_min, quant_max, grad_factor
    )


def fake_quantize_learnable_per_channel_affine_backward(
    grad: Array,
    input: Array,
    scale: Array,
    zero_point: Array,
    axis: int,
    quant_min: int,
    quant_max: int,
    grad_factor: float = 1.0,
) -> LearnedGradients[Array]:
    """Returns the gradients of `fake_quantize_learnable_per_channel_affine`; dscale and dzero_point per channel.

    For 1-D input torch sums over all channels and returns 0-d gradients. This function does the same. `grad` is the
    gradient of the result. The others are the arguments of the forward call.

    >>> x, s, z = np.float32([[9.0], [9.0]]), np.float32([0.1, 10.0]), np.float32([0.0, 0.0])
    >>> fake_quantize_learnable_per_channel_affine_backward(np.ones_like(x), x, s, z, 0, -8, 7).dx
    array([[0.],
           [1.]], dtype=float32)
    """
    return torch_names_of(input).fake_quantize_learnable_per_channel_affine_backward(
        grad, input, scale, zero_point, axis, quant_min, quant_max, grad_factor
    )


def fused_moving_avg_obs_fake_quant(
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
) -> Array:
    """Updates `running_min`, `running_max`, `scale` and `zero_point` in place and fake-quantizes.

    An empty input changes nothing.

    Args:
        input: The data, a float array or tensor.
        observer_on: One element. 0 leaves the running range unchanged.
        fake_quant_on: One element. 0 returns a copy of the input and leaves scale and zero point unchanged.
        running_min: Float32, updated in place. Start it at +inf.
        running_max: Float32, updated in place. Start it at -inf.
        scale: Float32, updated in place.
        zero_point: Int32, updated in place.
        averaging_const: The weight of the input's range in the moving average.
        quant_min: The lowest code.
        quant_max: The highest code.
        ch_axis: The axis of the channels. Must be 0 with `per_row_fake_quant`.
        per_row_fake_quant: Whether every row has its own range.
        symmetric_quant: Whether the range is made symmetric around 0.

    >>> on, lo, hi = np.int64([1]), np.float32([np.inf]), np.float32([-np.inf])
    >>> s, z = np.float32([1]), np.int32([0])
    >>> x = np.float32([-1.0, 0.3, 1.55])
    >>> y = fused_moving_avg_obs_fake_quant(x, on, on, lo, hi, s, z, 0.01, 0, 255, -1)
    >>> s, z
    (array([0.01], dtype=float32), array([100], dtype=int32))
    """
    return torch_names_of(input).fused_moving_avg_obs_fake_quant(
        input,
        FusedArguments(
            observer_on, fake_quant_on, running_min, running_max, scale, zero_point, averaging_const,
            quant_min, quant_max, ch_axis, per_row_fake_quant, symmetric_quant,
        ),
    )  # fmt: skip


def fused_moving_avg_obs_fq_helper(
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
) -> OutputAndMask[Array]:
    """Returns `fused_moving_avg_obs_fake_quant` and its mask.

    >>> on, lo, hi = np.int64([1]), np.float32([np.inf]), np.float32([-np.inf])
    >>> s, z = np.float32([1]), np.int32([0])
    >>> fused_moving_avg_obs_fq_helper(np.float32([1.0]), on, on, lo, hi, s, z, 0.01, 0, 255, -1).mask
    array([ True])
    """
    return torch_names_of(input).fused_moving_avg_obs_fq_helper(
        input,
        FusedArguments(
            observer_on, fake_quant_on, running_min, running_max, scale, zero_point, averaging_const,
            quant_min, quant_max, ch_axis, per_row_fake_quant, symmetric_quant,
        ),
    )  # fmt: skip
