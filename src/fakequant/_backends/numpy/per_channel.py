"""Per-channel fake quantization with torch's names.

    int zero point      code = int64(zero_point + rint(x * inv))
    float zero point    code = int64(rint(fma(x, inv, zero_point)))       (float16: without the fma)
    y    = (clamp(code, quant_min, quant_max) - zero_point) * scale       (in float64, then rounded)
    mask = quant_min <= code <= quant_max

The conversion to int64 comes before the clamp: NaN, infinities and codes that do not fit become the
smallest int64, so all of them, +inf included, end at quant_min.
"""

import numpy as np

from fakequant._backends import Array, aten_on_tensors, is_tensor
from fakequant._backends.numpy import strided_arrays, torch_checks
from fakequant._backends.numpy.float_arrays import BFLOAT16
from fakequant._backends.numpy.per_tensor import masked_backward
from fakequant._backends.numpy.strided_arrays import OutputAndMask

AXIS = "`axis` must be between 0 and number of dimensions of input"
KERNEL = "fake_quantize_channel_cachemask_cpu_type_handling"
_SIGNATURE = (
    ("Tensor", "input"),
    ("Tensor", "scale"),
    ("Tensor", "zero_point"),
    ("int", "axis"),
    ("int", "quant_min"),
    ("int", "quant_max"),
)


def check_parameters(x, scale, zero_point, axis, quant_min, quant_max) -> None:
    """Everything but the values of the zero points."""
    torch_checks.check(
        scale.dtype in (np.float32, BFLOAT16),
        f"Scale must be Float or BFloat16, found {torch_checks.type_name(scale.dtype)}",
    )
    torch_checks.check(
        zero_point.dtype in (np.int32, np.float32, np.float16),
        f"Zero-point must be Int32, Float or Half, found {torch_checks.type_name(zero_point.dtype)}",
    )
    check_lengths(x, scale, zero_point, axis)
    torch_checks.check(quant_min <= quant_max, torch_checks.RANGE)


def check_lengths(x, scale, zero_point, axis) -> None:
    """One scale and one zero point per index on `axis`."""
    torch_checks.check(scale.ndim == 1, "scale should be a 1-D tensor")
    torch_checks.check(zero_point.ndim == 1, "zero point should be a 1-D tensor")
    torch_checks.check(scale.size == zero_point.size, "scale and zero-point need to have the same dimensions")
    torch_checks.check(
        scale.size == torch_checks.axis_length(x, axis),
        "dimensions of scale and zero-point are not consistent with input tensor",
    )


def check_zero_points(zero_point, quant_min, quant_max) -> None:
    """Only integers have to be inside the range."""
    torch_checks.check(
        zero_point.size > 0,
        "min(): Expected reduction dim to be specified for input.numel() == 0. "
        "Specify the reduction dim with the 'dim' argument.",
    )
    torch_checks.check(quant_min <= zero_point.min() and zero_point.max() <= quant_max, torch_checks.ZERO_POINT)


def fake_quantize_per_channel_affine(
    input: Array, scale: Array, zero_point: Array, axis: int, quant_min: int, quant_max: int
) -> Array:
    """Fake-quantizes with one scale and zero point per index on `axis`.

    >>> x = np.float32([[0.26, 9.0], [0.26, 9.0]])
    >>> fake_quantize_per_channel_affine(x, np.float32([0.1, 1.0]), np.int32([0, 0]), 0, -8, 7)
    array([[0.3, 0.7],
           [0. , 7. ]], dtype=float32)
    """
    if is_tensor(input):
        return aten_on_tensors().fake_quantize_per_channel_affine(input, scale, zero_point, axis, quant_min, quant_max)
    return fake_quantize_per_channel_affine_cachemask(input, scale, zero_point, axis, quant_min, quant_max).output


def fake_quantize_per_channel_affine_cachemask(
    input: Array, scale: Array, zero_point: Array, axis: int, quant_min: int, quant_max: int
) -> OutputAndMask[Array]:
    """`fake_quantize_per_channel_affine` together with its mask.

    >>> x, z = np.float32([[0.26, 9.0]]), np.int32([0])
    >>> fake_quantize_per_channel_affine_cachemask(x, np.float32([0.1]), z, 0, -8, 7).mask
    array([[ True, False]])
    """
    if is_tensor(input):
        return aten_on_tensors().fake_quantize_per_channel_affine_cachemask(
            input, scale, zero_point, axis, quant_min, quant_max
        )
    x = torch_checks.as_tensor(input)
    values = (x, scale, zero_point, axis, quant_min, quant_max)
    torch_checks.check_types("fake_quantize_per_channel_affine", values, _SIGNATURE)
    axis, quant_min, quant_max = map(torch_checks.as_int64, (axis, quant_min, quant_max))
    return checked_forward(x, scale, zero_point, axis, quant_min, quant_max)


def checked_forward(x, scale, zero_point, axis, quant_min, quant_max) -> OutputAndMask:
    """All checks but those of argument types, then the forward."""
    check_parameters(x, scale, zero_point, axis, quant_min, quant_max)
    if zero_point.dtype == np.int32:
        check_zero_points(zero_point, quant_min, quant_max)
    torch_checks.check(axis >= 0, AXIS)
    dtype = torch_checks.kernel_dtype(x, KERNEL)
    return strided_arrays.per_channel(x, dtype, scale, zero_point, axis, quant_min, quant_max)


def fake_quantize_per_channel_affine_cachemask_backward(grad: Array, mask: Array) -> Array:
    """The gradient of `fake_quantize_per_channel_affine`: `grad * mask`.

    >>> fake_quantize_per_channel_affine_cachemask_backward(np.float32([2, 3]), np.array([True, False]))
    array([2., 0.], dtype=float32)
    """
    if is_tensor(grad):
        return aten_on_tensors().fake_quantize_per_channel_affine_cachemask_backward(grad, mask)
    return masked_backward("fake_quantize_per_channel_affine_cachemask_backward", grad, mask)
