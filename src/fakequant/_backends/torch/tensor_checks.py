"""Checks of tensor arguments, and the conversion of scales and zero points to the form that the operators take."""

from numbers import Integral, Real

import numpy as np
import torch
from torch import Tensor

from fakequant import _kernels, _native
from fakequant._backends import checks
from fakequant._backends.blocks import blocks_of, group_length, has_short_block
from fakequant._backends.torch.plain_memory import is_direct, is_memory
from fakequant._backends.torch.tensor_kernels import KERNEL_DTYPES, Grid, check_values, dtype_name, scale_dtype
from fakequant._backends.types import Numbers
from fakequant._kernels import numerics_name as kernel_numerics
from fakequant.spec import QuantSpec

__all__ = ["block_shape", "check_data", "check_device", "kernel_numerics", "make_grid"]


def check_data(x: object, name: str = "x") -> None:
    """Raises TypeError or NotImplementedError unless `x` is a strided tensor of a dtype that has a kernel."""
    if not isinstance(x, Tensor):
        raise TypeError(f"`{name}` must be a tensor, like the other arguments, got {type(x).__name__}.")
    if x.dtype in KERNEL_DTYPES and x.layout == torch.strided and not x.is_nested:
        return
    if x.is_quantized:
        raise TypeError(
            f"`{name}` is a quantized tensor ({x.dtype}), which already holds codes.\nPass `{name}.dequantize()`."
        )
    if x.is_nested:
        raise NotImplementedError(
            f"`{name}` must be one tensor, got a nested one.\n"
            f"Pass its parts one by one (`{name}.unbind()`), or `torch.nested.to_padded_tensor({name}, 0.0)`."
        )
    if x.layout != torch.strided:
        raise NotImplementedError(f"`{name}` must be a strided tensor, got {x.layout}.\nPass `{name}.to_dense()`.")
    checks.refuse_data_dtype(name, dtype_name(x.dtype), "tensor")


def check_device(x: Tensor, name: str, value: Tensor) -> None:
    """Raises RuntimeError if `value` is not on the device of `x`. Not even one-element tensors are moved silently."""
    if value.device != x.device:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but `x` is on {x.device} and `{name}` on {value.device}.\n"
            f"Move it: `{name}.to(x.device)`."
        )


def block_shape(shape: tuple[int, ...], spec: QuantSpec) -> tuple[int, ...]:
    """Returns the shape of a scale with the axes of the data: () per tensor, (1, C, 1, 1) per channel."""
    blocks = blocks_of(shape, spec).parameters
    if spec.axis is None or spec.group_size is not None:
        return blocks
    axis = spec.axis % len(shape)
    return tuple(blocks[0] if a == axis else 1 for a in range(len(shape)))


def make_grid(x: Tensor, scale: Numbers, zero_point: Numbers, spec: QuantSpec, *, learned: bool = False) -> Grid:
    """Checks scale and zero point, and returns them as tensors with one entry per block, on the device of `x`.

    If it is `learned`, the zero point may be a float tensor.
    """
    numerics = kernel_numerics(spec)
    scales = _scales(scale, x, spec, scale_dtype(x.dtype, numerics))
    grid = Grid(scales, _zero_points(zero_point, scales, x, spec, learned), spec.qmin, spec.qmax, numerics)
    if spec.numerics == "torch" and x.numel() and is_direct(x):
        check_values(torch.empty_like(x, device="meta"), grid._replace(zero_point=_integers(grid.zero_point)))
    return grid


def _integers(zero_point: Tensor | int | None) -> Tensor | int | None:
    """Returns integer zero points, or None for learned ones, which are clamped to the range before use."""
    return None if isinstance(zero_point, Tensor) and zero_point.is_floating_point() else zero_point


def _is_not_real(value: Tensor) -> bool:
    return value.is_complex() or value.dtype == torch.bool


def _scales(value: Numbers, x: Tensor, spec: QuantSpec, dtype: torch.dtype) -> Tensor:
    if isinstance(value, Tensor):
        check_device(x, "scale", value)
        if _is_not_real(value):
            checks.refuse_scale_type("scale", dtype_name(value.dtype), "tensor")
        tensor = value.to(dtype)
    elif isinstance(value, (Real, np.ndarray)) and not isinstance(value, bool):
        tensor = torch.as_tensor(value, dtype=dtype, device=x.device)
    else:
        checks.refuse_scale_type("scale", type(value).__name__, "tensor")
    return _in_block_shape("scale", tensor, x, spec)


def _in_block_shape(name: str, tensor: Tensor, x: Tensor, spec: QuantSpec) -> Tensor:
    shape = tuple(x.shape)
    checks.check_parameter_shape(name, tuple(tensor.shape), shape, spec, "tensor")
    if spec.axis is not None and has_short_block(shape, spec):
        length = shape[spec.axis]
        return tensor.repeat_interleave(group_length(length, spec), spec.axis).narrow(spec.axis, 0, length)
    return tensor if spec.axis is None else tensor.reshape(block_shape(shape, spec))


def _zero_points(value: Numbers, scale: Tensor, x: Tensor, spec: QuantSpec, learned: bool) -> Tensor | None:
    if spec.has_offset:
        return _offsets(value, scale, x, spec)
    if type(value) is int or isinstance(value, Integral):
        checks.check_zero_point_number(int(value), spec)
        if value == 0 and spec.qmin <= 0:
            return None
        return torch.full_like(scale, int(value), dtype=torch.int32, requires_grad=False)
    if isinstance(value, np.ndarray):
        value = torch.as_tensor(value, device=x.device)
    if not isinstance(value, Tensor):
        checks.refuse_zero_point_type(type(value).__name__)
    check_device(x, "zero_point", value)
    if value.is_floating_point():
        if not learned:
            checks.refuse_zero_point_type(dtype_name(value.dtype))
        if spec.symmetric:
            raise ValueError(
                "A symmetric spec has no zero point to learn: pass 0.\nUse QuantSpec(symmetric=False) to learn one."
            )
        zeros = value.to(torch.float32)
    elif _is_not_real(value):
        checks.refuse_zero_point_type(dtype_name(value.dtype))
    else:
        zeros = value.to(torch.int32) if value.dtype != torch.int64 else value
    if spec.symmetric and not torch.compiler.is_compiling() and is_memory(zeros):
        zeros = zeros.contiguous()
        kind = _kernels.ZERO_I64 if zeros.dtype == torch.int64 else _kernels.ZERO_I32
        bad = _native.first_outside(zeros.data_ptr(), kind, zeros.numel(), 0, 0) if zeros.numel() else -1
        if bad >= 0:
            checks.refuse_zero_point(int(zeros.flatten()[bad]), spec.qmin, spec.qmax, symmetric=True)
        return None
    if zeros.dim() == 0 and spec.axis is not None:
        return zeros.expand(scale.shape)
    return _in_block_shape("zero_point", zeros, x, spec)


def _offsets(value: Numbers, scale: Tensor, x: Tensor, spec: QuantSpec) -> Tensor:
    if isinstance(value, (Real, np.ndarray)) and not isinstance(value, bool):
        value = torch.as_tensor(value, dtype=torch.float32, device=x.device)
    if not isinstance(value, Tensor) or _is_not_real(value):
        received = dtype_name(value.dtype) if isinstance(value, Tensor) else type(value).__name__
        checks.refuse_scale_type("zero_point", received, "tensor")
    check_device(x, "zero_point", value)
    offsets = value.float()
    return offsets.expand(scale.shape) if offsets.dim() == 0 else _in_block_shape("zero_point", offsets, x, spec)
