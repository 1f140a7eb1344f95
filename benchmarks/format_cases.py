"""The rows of bench_kernels.py for float formats: FP8, MX and NVFP4.

The peers are what torch itself offers, a clamp and a cast to FP8 and back, and torchao's functions if torchao is
installed. They run on the same data; before a row is timed, their results must have our bits.
"""

import importlib.util
from collections.abc import Callable

import numpy as np
import torch

import fakequant as fq
from fakequant import presets
from fakequant.testing.assertions import assert_same_bits

FP8, BLOCKS = presets.fp8_e4m3(), 32
Make = Callable[..., object]


def has_torchao() -> bool:
    return importlib.util.find_spec("torchao") is not None


def cast_fp8(t: torch.Tensor, scale: float) -> torch.Tensor:
    """Static FP8 by torch's casts."""
    steps = (t.float() / scale).clamp(-448.0, 448.0)
    return (steps.to(torch.float8_e4m3fn).float() * scale).to(t.dtype)


def cast_mxfp8(t: torch.Tensor) -> torch.Tensor:
    """MXFP8 by torch's casts, with the scale rule "floor" on the bits of the largest magnitude."""
    blocks = t.float().reshape(-1, BLOCKS)
    field = (blocks.abs().amax(1, keepdim=True).view(torch.int32) >> 23) - 8
    scale = torch.where(field > 0, field << 23, 1 << 22).to(torch.int32).view(torch.float32)
    steps = (blocks / scale).clamp(-448.0, 448.0)
    return (steps.to(torch.float8_e4m3fn).float() * scale).reshape(t.shape).to(t.dtype)


def torchao_mx(t: torch.Tensor, element: object) -> torch.Tensor:
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

    scale, codes = to_mx(t, element, BLOCKS)
    return to_dtype(codes, scale, element, BLOCKS, t.dtype)


def torchao_nvfp4(t: torch.Tensor) -> torch.Tensor:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    return NVFP4Tensor.to_nvfp4(t, per_tensor_scale=per_tensor_amax_to_scale(t.abs().max())).dequantize(t.dtype)


def rows(x: np.ndarray, t: torch.Tensor, dtype: str) -> list[tuple[str, int, Callable, Callable | None, bool]]:
    """Returns (operation, bytes moved, ours, the peer or None, whether the peer has our bits) for each row."""
    size, width = x.size, x.dtype.itemsize
    moved = 2 * size * width
    scale = 0.02
    codes = fq.quantize(x, scale, 0, FP8)
    mx, nv = presets.mxfp4(), presets.nvfp4()
    mx_codes, mx_params = fq.quantize_dynamic(x, mx, packed=True)
    found = [
        ("FP8, static (cast)", moved, lambda: fq.fake_quantize(x, scale, 0, FP8), lambda: cast_fp8(t, scale), True),
        ("FP8, static + packed mask", moved + size // 8, lambda: fq.fake_quantize(x, scale, 0, FP8, mask="packed"),
         None, True),
        ("MXFP8 (cast)", moved, lambda: fq.fake_quantize_dynamic(x, presets.mxfp8()), lambda: cast_mxfp8(t), True),
        ("MXFP6", moved, lambda: fq.fake_quantize_dynamic(x, presets.mxfp6()), None, True),
        ("MXFP4", moved, lambda: fq.fake_quantize_dynamic(x, mx), None, True),
        ("MXINT8", moved, lambda: fq.fake_quantize_dynamic(x, presets.mxint8()), None, True),
        ("NVFP4", moved, lambda: fq.fake_quantize_dynamic(x, nv), None, True),
        ("Q4_0 of ggml", moved, lambda: fq.fake_quantize_dynamic(x, presets.q4_0()), None, True),
        ("Q8_0 of ggml, inputs", moved, lambda: fq.fake_quantize_dynamic(x, presets.q8_0_input()), None, True),
        ("quantize to FP8", size * (width + 1), lambda: fq.quantize(x, scale, 0, FP8), None, True),
        ("dequantize FP8", size * (width + 1), lambda: fq.dequantize(codes, scale, 0, FP8, dtype=x.dtype), None, True),
        ("quantize to packed MXFP4", size * width + size // 2,
         lambda: fq.quantize(x, *mx_params, mx, packed=True), None, True),
        ("dequantize packed MXFP4", size * width + size // 2,
         lambda: fq.dequantize(mx_codes, *mx_params, mx, shape=x.shape, dtype=x.dtype), None, True),
    ]  # fmt: skip
    if has_torchao() and dtype in ("float32", "bfloat16"):
        found += [
            ("MXFP8 (torchao)", moved, lambda: fq.fake_quantize_dynamic(x, presets.mxfp8()),
             lambda: torchao_mx(t, torch.float8_e4m3fn), True),
            ("MXFP4 (torchao)", moved, lambda: fq.fake_quantize_dynamic(x, mx),
             lambda: torchao_mx(t, torch.float4_e2m1fn_x2), True),
            # torchao multiplies by a rounded reciprocal, so a value next to a tie may differ.
            ("NVFP4 (torchao)", moved, lambda: fq.fake_quantize_dynamic(x, nv), lambda: torchao_nvfp4(t), False),
        ]  # fmt: skip
    return found


def compare(ours: Callable, peer: Callable, to_numpy: Callable[[torch.Tensor], np.ndarray]) -> Callable[[], None]:
    """Returns the function that checks that both have the same bits."""
    return lambda: assert_same_bits(to_numpy(peer()), ours())
