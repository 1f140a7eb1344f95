"""Per-channel fake quantization under torch's names. `fakequant.torch_names` has the formulas."""

import numpy as np

from fakequant._backends.numpy import strided_arrays, torch_checks
from fakequant._backends.numpy.float_arrays import BFLOAT16
from fakequant._backends.numpy.per_tensor import masked_backward
from fakequant._backends.results import OutputAndMask

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


def check_parameters(
    x: np.ndarray, scale: np.ndarray, zero_point: np.ndarray, axis: int, quant_min: int, quant_max: int
) -> None:
    """Raises torch's error for wrong dtypes, lengths or ranges. Does not check the values of the zero points.

    Args:
        x: The data.
        scale: One scale per channel.
        zero_point: One zero point per channel.
        axis: The axis of the channels.
        quant_min: The lowest code.
        quant_max: The highest code.
    """
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


def check_lengths(x: np.ndarray, scale: np.ndarray, zero_point: np.ndarray, axis: int) -> None:
    """Raises torch's error unless there is one scale and one zero point per index on `axis`."""
    torch_checks.check(scale.ndim == 1, "scale should be a 1-D tensor")
    torch_checks.check(zero_point.ndim == 1, "zero point should be a 1-D tensor")
    torch_checks.check(scale.size == zero_point.size, "scale and zero-point need to have the same dimensions")
    torch_checks.check(
        scale.size == torch_checks.axis_length(x, axis),
        "dimensions of scale and zero-point are not consistent with input tensor",
    )


def check_zero_points(zero_point: np.ndarray, quant_min: int, quant_max: int) -> None:
    """Raises torch's error if a zero point is outside the range. torch checks only integers."""
    torch_checks.check(
        zero_point.size > 0,
        "min(): Expected reduction dim to be specified for input.numel() == 0. "
        "Specify the reduction dim with the 'dim' argument.",
    )
    torch_checks.check(quant_min <= zero_point.min() and zero_point.max() <= quant_max, torch_checks.ZERO_POINT)


def fake_quantize_per_channel_affine(
    input: np.ndarray, scale: np.ndarray, zero_point: np.ndarray, axis: int, quant_min: int, quant_max: int
) -> np.ndarray:
    """See `fakequant.fake_quantize_per_channel_affine`."""
    return fake_quantize_per_channel_affine_cachemask(input, scale, zero_point, axis, quant_min, quant_max).output


def fake_quantize_per_channel_affine_cachemask(
    input: np.ndarray, scale: np.ndarray, zero_point: np.ndarray, axis: int, quant_min: int, quant_max: int
) -> OutputAndMask[np.ndarray]:
    """See `fakequant.fake_quantize_per_channel_affine_cachemask`."""
    x = torch_checks.as_tensor(input)
    values = (x, scale, zero_point, axis, quant_min, quant_max)
    torch_checks.check_types("fake_quantize_per_channel_affine", values, _SIGNATURE)
    axis, quant_min, quant_max = map(torch_checks.as_int64, (axis, quant_min, quant_max))
    return checked_forward(x, scale, zero_point, axis, quant_min, quant_max)


def checked_forward(
    x: np.ndarray, scale: np.ndarray, zero_point: np.ndarray, axis: int, quant_min: int, quant_max: int
) -> OutputAndMask[np.ndarray]:
    """Runs the forward after all checks except those of argument types.

    Args:
        x: The data.
        scale: One scale per channel.
        zero_point: One zero point per channel.
        axis: The axis of the channels.
        quant_min: The lowest code.
        quant_max: The highest code.
    """
    check_parameters(x, scale, zero_point, axis, quant_min, quant_max)
    if zero_point.dtype == np.int32:
        check_zero_points(zero_point, quant_min, quant_max)
    torch_checks.check(axis >= 0, AXIS)
    dtype = torch_checks.kernel_dtype(x, KERNEL)
    return strided_arrays.per_channel(x, dtype, scale, zero_point, axis, quant_min, quant_max)


def fake_quantize_per_channel_affine_cachemask_backward(grad: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """See `fakequant.fake_quantize_per_channel_affine_cachemask_backward`."""
    return masked_backward("fake_quantize_per_channel_affine_cachemask_backward", grad, mask)
