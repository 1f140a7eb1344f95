"""Per-tensor fake quantization with torch's names.

    inv  = 1 / float32(scale)
    code = zero_point + rint(x * inv)
    q    = clamp(code, quant_min, quant_max)          (NaN becomes quant_min)
    y    = (q - zero_point) * scale                   (float32, also for float64 input)
    mask = quant_min <= code <= quant_max

The code is computed in float64 for float64 input, else in float32.
"""

import numpy as np

from fakequant._backends import Array, aten_on_tensors, is_tensor
from fakequant._backends.numpy import strided_arrays, torch_checks
from fakequant._backends.numpy.float_arrays import KERNEL_DTYPES
from fakequant._backends.numpy.strided_arrays import OutputAndMask

KERNEL = "fake_quantize_tensor_cachemask_kernel_type_handling"
_TENSORS = (
    ("Tensor", "input"),
    ("Tensor", "scale"),
    ("Tensor", "zero_point"),
    ("int", "quant_min"),
    ("int", "quant_max"),
)
_NUMBERS = (("Tensor", "input"), ("float", "scale"), ("int", "zero_point"), ("int", "quant_min"), ("int", "quant_max"))


def checked_numbers(scale, zero_point, quant_min, quant_max):
    """The four numbers of the forward, refused if the range is empty or the zero point outside."""
    quant_min, quant_max, zero_point = map(torch_checks.as_int64, (quant_min, quant_max, zero_point))
    torch_checks.check(quant_min <= quant_max, torch_checks.RANGE)
    torch_checks.check(quant_min <= zero_point <= quant_max, torch_checks.ZERO_POINT)
    return torch_checks.as_float(scale), zero_point, quant_min, quant_max


def _checked_tensors(scale, zero_point, quant_min, quant_max):
    quant_min, quant_max = torch_checks.as_int64(quant_min), torch_checks.as_int64(quant_max)
    torch_checks.check(quant_min <= quant_max, torch_checks.RANGE)
    zero_point = torch_checks.item_as_int(zero_point)
    return torch_checks.item_as_float(scale), zero_point, quant_min, quant_max


# The usual types of arguments, recognised at once: working out a signature takes longer than the
# rest of a small call.
_PLAIN = (np.ndarray, float, int, int, int)


def fake_quantize_per_tensor_affine(
    input: Array, scale: object, zero_point: object, quant_min: int, quant_max: int
) -> Array:
    """Fake-quantizes with one scale and zero point, given as numbers or as one-element arrays.

        y = (clamp(zero_point + rint(x * (1 / scale)), quant_min, quant_max) - zero_point) * scale

    >>> fake_quantize_per_tensor_affine(np.float32([-0.3, 0.05, 0.15, 9.0]), 0.1, 0, -8, 7)
    array([-0.3,  0. ,  0.2,  0.7], dtype=float32)
    """
    if is_tensor(input):
        return aten_on_tensors().fake_quantize_per_tensor_affine(input, scale, zero_point, quant_min, quant_max)
    x = torch_checks.as_tensor(input)
    values = (x, scale, zero_point, quant_min, quant_max)
    tensors = tuple(map(type, values)) != _PLAIN and (
        torch_checks.choose_signature("fake_quantize_per_tensor_affine", values, (_TENSORS, _NUMBERS)) == 0
    )
    numbers = (_checked_tensors if tensors else checked_numbers)(scale, zero_point, quant_min, quant_max)
    return strided_arrays.per_tensor_value(x, torch_checks.kernel_dtype(x, KERNEL), *numbers)


def fake_quantize_per_tensor_affine_cachemask(
    input: Array, scale: float, zero_point: int, quant_min: int, quant_max: int
) -> OutputAndMask[Array]:
    """`fake_quantize_per_tensor_affine` together with its mask.

    >>> y, mask = fake_quantize_per_tensor_affine_cachemask(np.float32([0.15, 9.0]), 0.1, 0, -8, 7)
    >>> mask
    array([ True, False])
    """
    if is_tensor(input):
        return aten_on_tensors().fake_quantize_per_tensor_affine_cachemask(
            input, scale, zero_point, quant_min, quant_max
        )
    x = torch_checks.as_tensor(input)
    values = (x, scale, zero_point, quant_min, quant_max)
    if tuple(map(type, values)) != _PLAIN:
        torch_checks.check_types("fake_quantize_per_tensor_affine_cachemask", values, _NUMBERS)
    numbers = checked_numbers(scale, zero_point, quant_min, quant_max)
    return strided_arrays.per_tensor(x, torch_checks.kernel_dtype(x, KERNEL), *numbers)


def fake_quantize_per_tensor_affine_cachemask_tensor_qparams(
    input: Array,
    scale: Array,
    zero_point: Array,
    fake_quant_enabled: Array,
    quant_min: int,
    quant_max: int,
) -> OutputAndMask[Array]:
    """The same with one-element arrays; `fake_quant_enabled` 0 returns a copy and a mask of ones.

    The zero point may lie outside the range here.

    >>> one = np.ones(1, np.int64)
    >>> x, s, z = np.float32([0.26]), np.float32([0.1]), np.int32([0])
    >>> fake_quantize_per_tensor_affine_cachemask_tensor_qparams(x, s, z, one * 0, -8, 7).output
    array([0.26], dtype=float32)
    """
    if is_tensor(input):
        return aten_on_tensors().fake_quantize_per_tensor_affine_cachemask_tensor_qparams(
            input, scale, zero_point, fake_quant_enabled, quant_min, quant_max
        )
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


def fake_quantize_per_tensor_affine_cachemask_backward(grad: Array, mask: Array) -> Array:
    """The gradient of `fake_quantize_per_tensor_affine`.

        dx = grad * mask      (a product: inf and NaN do not become 0, and 0 keeps the sign of grad)

    >>> fake_quantize_per_tensor_affine_cachemask_backward(np.float32([2, -2]), np.array([True, False]))
    array([ 2., -0.], dtype=float32)
    """
    if is_tensor(grad):
        return aten_on_tensors().fake_quantize_per_tensor_affine_cachemask_backward(grad, mask)
    return masked_backward("fake_quantize_per_tensor_affine_cachemask_backward", grad, mask)


def masked_backward(function: str, grad: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """`grad * mask` after torch's checks, which compare the sizes, not the shapes."""
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
