"""What the functions accept: tensors of floats, and scales and zero points that fit them."""

from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fakequant import _kernels
from fakequant._backends.blocks import blocks_of
from fakequant._backends.numpy.array_grid import refuse_zero_point
from fakequant._backends.torch.plain_memory import is_eager, is_memory
from fakequant._backends.torch.tensor_kernels import KERNEL_DTYPES, Grid, check_values, scale_dtype
from fakequant._kernels import _native
from fakequant.spec import QuantSpec


def check_data(x: Any, name: str = "x") -> None:
    """A strided tensor of floats."""
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
    raise TypeError(
        f"`{name}` must be a tensor of float32, float64, bfloat16 or float16, got {str(x.dtype)[6:]}.\n"
        f"Convert it first, e.g. `{name}.float()`."
    )


def check_device(x: Tensor, name: str, value: Tensor) -> None:
    """Everything on the device of `x`; numbers on the CPU with one element are not moved silently either."""
    if value.device != x.device:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but `x` is on {x.device} and `{name}` on {value.device}.\n"
            f"Move it: `{name}.to(x.device)`."
        )


def block_shape(shape: tuple[int, ...], spec: QuantSpec) -> tuple[int, ...]:
    """The shape of a scale that broadcasts by blocks: () per tensor, (1, C, 1, 1) per channel."""
    blocks = blocks_of(shape, spec).parameters
    if spec.axis is None or spec.group_size is not None:
        return blocks
    axis = spec.axis % len(shape)
    return tuple(blocks[0] if a == axis else 1 for a in range(len(shape)))


def kernel_numerics(spec: QuantSpec) -> str:
    """The kernels' name for the spec's numerics. torch has two rules, by granularity."""
    if spec.numerics != "torch":
        return spec.numerics
    return "torch_tensor" if spec.axis is None else "torch_channel"


def make_grid(x: Tensor, scale: Any, zero_point: Any, spec: QuantSpec, *, learned: bool = False) -> Grid:
    """Scale and zero point as tensors with one entry per block, on the device of `x`."""
    numerics = kernel_numerics(spec)
    shape = tuple(x.shape)
    scales = _parameter("scale", scale, x, shape, spec, scale_dtype(x.dtype, numerics))
    grid = Grid(scales, _zero_points(zero_point, scales, x, shape, spec, learned), spec.qmin, spec.qmax, numerics)
    if spec.numerics == "torch" and x.numel() and not torch.compiler.is_compiling() and is_eager(x):
        check_values(torch.empty_like(x, device="meta"), grid._replace(zero_point=_integers(grid.zero_point)))
    return grid


def _integers(zero_point: Any) -> Any:
    """A learned zero point is rounded and clamped wherever it is used."""
    return None if zero_point is not None and zero_point.is_floating_point() else zero_point


def _parameter(name: str, value: Any, x: Tensor, shape: tuple[int, ...], spec: QuantSpec, dtype: torch.dtype) -> Tensor:
    if isinstance(value, Tensor):
        check_device(x, name, value)
        if value.is_complex() or value.dtype == torch.bool:
            raise TypeError(f"`{name}` must hold real numbers, got {str(value.dtype)[6:]}.")
        tensor = value.to(dtype)
    elif isinstance(value, (Real, np.ndarray)) and not isinstance(value, bool):
        tensor = torch.as_tensor(value, dtype=dtype, device=x.device)
    else:
        raise TypeError(f"`{name}` must be a number or a tensor, got {type(value).__name__}.")
    return _in_block_shape(name, tensor, shape, spec)


def _in_block_shape(name: str, tensor: Tensor, shape: tuple[int, ...], spec: QuantSpec) -> Tensor:
    given = tuple(tensor.shape)
    if spec.axis is None:
        if given in ((), (1,)):
            return tensor
        wanted: tuple[int, ...] = ()
    else:
        wanted = blocks_of(shape, spec).parameters
        fits = given == wanted  # not `in`, which a compiler does not see through for sizes
        if spec.granularity == "token":
            axis = spec.axis % len(wanted)
            fits = fits or given == wanted[:axis] + wanted[axis + 1 :]
        if fits:
            return tensor.reshape(block_shape(shape, spec))
    raise ValueError(
        f"`{name}` must have shape {wanted} for a tensor of shape {shape} quantized per {spec.granularity}"
        f"{f' on axis {spec.axis}' if spec.axis is not None else ''}, got shape {given}."
    )


def _zero_points(
    value: Any, scale: Tensor, x: Tensor, shape: tuple[int, ...], spec: QuantSpec, learned: bool
) -> Tensor | None:
    if type(value) is int or isinstance(value, Integral):
        _check_zero_point(int(value), spec)
        if value == 0 and spec.qmin <= 0:
            return None
        return torch.full_like(scale, int(value), dtype=torch.int32, requires_grad=False)
    if isinstance(value, np.ndarray):
        value = torch.as_tensor(value, device=x.device)
    if not isinstance(value, Tensor):
        raise TypeError(f"`zero_point` must be an int or a tensor, got {type(value).__name__}.")
    check_device(x, "zero_point", value)
    if value.is_floating_point():
        if not learned:
            raise TypeError(
                f"`zero_point` must hold integers, got {str(value.dtype)[6:]}.\n"
                "Round it first, `round_zero_point(zero_point, spec)`, or use `fake_quantize_learned`."
            )
        if spec.symmetric:
            raise ValueError(
                "A symmetric spec has no zero point to learn: pass 0.\nUse QuantSpec(symmetric=False) to learn one."
            )
        zeros = value.to(torch.float32)
    elif value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"`zero_point` must hold integers, got {str(value.dtype)[6:]}.")
    else:
        zeros = value.to(torch.int32) if value.dtype != torch.int64 else value
    if spec.symmetric and not torch.compiler.is_compiling() and is_memory(zeros):
        zeros = zeros.contiguous()
        kind = _kernels.ZERO_I64 if zeros.dtype == torch.int64 else _kernels.ZERO_I32
        bad = _native.first_outside(zeros.data_ptr(), kind, zeros.numel(), 0, 0) if zeros.numel() else -1
        if bad >= 0:
            refuse_zero_point(int(zeros.flatten()[bad]), spec)
        return None
    if zeros.dim() == 0 and spec.axis is not None:
        return zeros.expand(scale.shape)
    return _in_block_shape("zero_point", zeros, shape, spec)


def _check_zero_point(value: int, spec: QuantSpec) -> None:
    if value != 0 and (spec.symmetric or not spec.qmin <= value <= spec.qmax):
        refuse_zero_point(value, spec)
