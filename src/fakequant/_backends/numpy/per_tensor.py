"""Per-tensor fake quantization under torch's names. `fakequant.torch_names` has the formulas."""

import numpy as np

from fakequant._backends.argument_types import Unchecked
from fakequant._backends.numpy import strided_arrays, torch_checks
from fakequant._backends.numpy.float_arrays import KERNEL_DTYPES
from fakequant._backends.results import OutputAndMask

KERNEL = "fake_quantize_tensor_cachemask_kernel_type_handling"
_TENSORS = (
    ("Tensor", "input"),
    ("Tensor", "scale"),
    ("Tensor", "zero_point"),
    ("int", "quant_min"),
    ("int", "quant_max"),
)
_NUMBERS = (("Tensor", "input"), ("float", "scale"), ("int", "zero_point"), ("int", "quant_min"), ("int", "quant_max"))


def checked_numbers(
    scale: Unchecked, zero_point: Unchecked, quant_min: Unchecked, quant_max: Unchecked
) -> tuple[float, int, int, int]:
    """Returns scale, zero point and range. Raises torch's error if the range is empty or the zero point outside it."""
    quant_min, quant_max, zero_point = map(torch_checks.as_int64, (quant_min, quant_max, zero_point))
    torch_checks.check(quant_min <= quant_max, torch_checks.RANGE)
    torch_checks.check(quant_min <= zero_point <= quant_max, torch_checks.ZERO_POINT)
    return torch_checks.as_float(scale), zero_point, quant_min, quant_max


def _checked_tensors(
    scale: Unchecked, zero_point: Unchecked, quant_min: Unchecked, quant_max: Unchecked
) -> tuple[float, int, int, int]:
    quant_min, quant_max = torch_checks.as_int64(quant_min), torch_checks.as_int64(quant_max)
    torch_checks.check(quant_min <= quant_max, torch_checks.RANGE)
    zero_point = torch_checks.item_as_int(zero_point)
    return torch_checks.item_as_float(scale), zero_point, quant_min, quant_max


# The usual argument types. Matching signatures takes longer than the rest of a small call, so they skip it.
_PLAIN = (np.ndarray, float, int, int, int)


def fake_quantize_per_tensor_affine(
    input: np.ndarray, scale: object, zero_point: object, quant_min: int, quant_max: int
) -> np.ndarray:
    """See `fakequant.fake_quantize_per_tensor_affine`."""
    x = torch_checks.as_tensor(input)
    values = (x, scale, zero_point, quant_min, quant_max)
    tensors = tuple(map(type, values)) != _PLAIN and (
        torch_checks.choose_signature("fake_quantize_per_tensor_affine", values, (_TENSORS, _NUMBERS)) == 0
    )
    numbers = (_checked_tensors if tensors else checked_numbers)(scale, zero_point, quant_min, quant_max)
    return strided_arrays.per_tensor_value(x, torch_checks.kernel_dtype(x, KERNEL), *numbers)


def fake_quantize_per_tensor_affine_cachemask(
    input: np.ndarray, scale: float, zero_point: int, quant_min: int, quant_max: int
) -> OutputAndMask[np.ndarray]:
    """See `fakequant.fake_quantize_per_tensor_affine_cachemask`."""
    x = torch_checks.as_tensor(input)
    values = (x, scale, zero_point, quant_min, quant_max)
    if tuple(map(type, values)) != _PLAIN:
        torch_checks.check_types("fake_quantize_per_tensor_affine_cachemask", values, _NUMBERS)
    numbers = checked_numbers(scale, zero_point, quant_min, quant_max)
    return strided_arrays.per_tensor(x, torch_checks.kernel_dtype(x, KERNEL), *numbers)


def fake_quantize_per_tensor_affine_cachemask_tensor_qparams(
    input: np.ndarray,
    scale: np.ndarray,
    zero_point: np.ndarray,
    fake_quant_enabled: np.ndarray,
    quant_min: int,
    quant_max: int,
) -> OutputAndMask[np.ndarray]:
    """See `fakequant.fake_quantize_per_tensor_affine_cachemask_tensor_qparams`."""
    x = torch_checks.as_tensor(input)
    values = (x, scale, zero_point, fake_quant_enabled, quant_min, quant_max)
    signature = (*_TENSORS[:3], ("Tensor", "fake_quant_enabled"), *_TENSORS[3:])
    torch_checks.check_types("fake_quantize_per_tensor_affine_cachemask_tensor_qparams", values, signature)
    numbers = _checked_tensors(scale, zero_point, quant_min, quant_max)
    enabled = torch_checks.item_as_int(fake_quant_enabled)
    dtype = torch_checks.kernel_dtype(x, KERNEL)
    if not enabled:
        return strided_arrays.unchanged(x)
    return strided_arrays.per_tensor(x, dtype, *numbers)


def fake_quantize_per_tensor_affine_cachemask_backward(grad: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """See `fakequant.fake_quantize_per_tensor_affine_cachemask_backward`."""
    return masked_backward("fake_quantize_per_tensor_affine_cachemask_backward", grad, mask)


def masked_backward(function: str, grad: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Returns `grad * mask` after torch's checks, which compare sizes, not shapes."""
    grad, mask = torch_checks.as_tensor(grad), torch_checks.as_tensor(mask)
    torch_checks.check_types(function, (grad, mask), (("Tensor", "grad"), ("Tensor", "mask")))
    torch_checks.expect(mask.dtype == np.bool_, "mask.scalar_type() == ScalarType::Bool")
    torch_checks.check(
        mask.size == grad.size,
        f"`mask` and `dY` are not the same size: `mask` is size {mask.size} and `dY` is size {grad.size}",
    )
    if grad.size == 0:
        return grad
    grad, mask = torch_checks.broadcast(grad, mask)
    return strided_arrays.masked_gradient(grad, mask, KERNEL_DTYPES.get(grad.dtype))
