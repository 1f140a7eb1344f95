"""The rules of ggml's block types in torch operations. Part of `formula`; csrc/ggml-inl.h has the formulas."""

import torch
from torch import Tensor

from fakequant._backends.torch.float_formula import divided
from fakequant._kernels import OFFSET_RULES
from fakequant.formats import SUPER_BLOCKS

_LARGEST = torch.finfo(torch.float32).max
_LARGEST_F16 = torch.finfo(torch.float16).max


def codes(x: Tensor, scale: Tensor, offset: Tensor | int, rule: str) -> Tensor:
    """Returns codes before clamping, as float32. NaN stays NaN."""
    t = steps(x, scale, offset, rule)
    if rule == "q4_0":
        return torch.floor(t + 8.5) - 8
    if rule == "q4_1":
        return torch.floor(t + 0.5)
    if rule in ("q8_0", "tq2_0"):
        whole = torch.trunc(t)
        return torch.where((t - whole).abs() >= 0.5, whole + torch.copysign(torch.ones_like(t), t), whole)
    return torch.round(t)


def steps(x: Tensor, scale: Tensor, offset: Tensor | int, rule: str) -> Tensor:
    """Returns the distance from code 0 in steps, as float32."""
    t = x.float()
    if rule in OFFSET_RULES and isinstance(offset, Tensor):
        t = t - offset.float()
    if rule in SUPER_BLOCKS:
        s = scale.float()
        return t / torch.where(s == 0, _LARGEST, s)
    return t * _inverse(scale.float(), rule)


def values(codes: Tensor, scale: Tensor, offset: Tensor | int, rule: str) -> Tensor:
    """Returns the values of clamped codes as float32; the codes have no -0.0."""
    y = codes * _stored_scale(scale.float(), rule)
    if rule not in OFFSET_RULES or not isinstance(offset, Tensor):
        return y
    return y + (offset.float() if rule in SUPER_BLOCKS else _as_float16(offset.float()))


def _inverse(scale: Tensor, rule: str) -> Tensor:
    return divided({"q8_0_input": 127.0, "q8_k_input": -127.0}.get(rule, 1.0), scale).clamp(-_LARGEST, _LARGEST)


def _stored_scale(scale: Tensor, rule: str) -> Tensor:
    if rule in SUPER_BLOCKS:
        return scale
    if rule == "q8_k_input":
        return torch.where(scale == 0, 0.0, divided(1.0, _inverse(scale, rule)))
    return _as_float16(divided(scale, 127.0) if rule == "q8_0_input" else scale)


def _as_float16(value: Tensor) -> Tensor:
    return value.clamp(-_LARGEST_F16, _LARGEST_F16).half().float()


def choose_qparams(lo: Tensor, hi: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    """Returns the scales of blocks with these float32 ranges, and zero points or offsets."""
    absmax = torch.maximum(-lo, hi).clamp(min=0).abs()
    signed = torch.where(-lo >= hi, lo, hi)
    if rule == "q4_k":
        depth = (-lo).clamp(min=0).abs()  # not -0.0
        scale = divided(hi + depth, 15.0).clamp(max=_LARGEST)
        return to_super_blocks(scale, rule), -to_super_blocks(depth, rule)
    if rule == "q6_k":
        return to_super_blocks(signed / -32.0, rule), torch.zeros_like(lo, dtype=torch.int32)
    if rule == "q4_1":
        return divided(hi - lo, 15.0).clamp(max=_LARGEST), lo.clone()
    scale = {"q4_0": signed / -8.0, "q8_0": divided(absmax, 127.0), "q8_k_input": signed.clone()}.get(rule, absmax)
    return scale, torch.zeros_like(scale, dtype=torch.int32)


def to_super_blocks(scale: Tensor, rule: str) -> Tensor:
    """Returns the scales of K-quants next to given ones; see `reference_ggml.to_super_blocks`."""
    size = SUPER_BLOCKS[rule]
    flat = scale.reshape(-1)
    rows = torch.nn.functional.pad(flat, (0, -flat.numel() % size)).view(-1, size)
    low, high = rows.amin(-1, keepdim=True).clamp(max=0), rows.amax(-1, keepdim=True).clamp(min=0)
    first, last, one = (0.0, 63.0, 63.0) if rule == "q4_k" else (-128.0, 127.0, -128.0)
    d = _as_float16(divided(torch.where(-low >= high, low, high), one))
    times = torch.where(d == 0, 0.0, torch.round(rows / d).clamp(first, last))
    times = torch.where(times == 0, 0.0, times)  # not -0.0
    return (d * times).reshape(-1)[: flat.numel()].reshape(scale.shape)


def range_to_largest(lo: Tensor, hi: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ranges from 0 to the first value with the largest magnitude, for the ranges of the blocks of `x`.

    `lo` and `hi` have as many axes as `x`. A block without finite values keeps its range.
    """
    pairs = [n for length, b in zip(x.shape, lo.shape, strict=True) for n in (b, length // b if b else 1)]
    within = list(range(1, len(pairs), 2))
    data = x.detach().reshape(pairs).movedim(within, [*range(-len(within), 0)]).flatten(-len(within))
    low, high = lo.to(data.dtype), hi.to(data.dtype)
    absmax = torch.maximum(-low, high)
    is_it = data.abs() == absmax.unsqueeze(-1)
    first = data.gather(-1, is_it.to(torch.uint8).argmax(-1, keepdim=True)).squeeze(-1)
    is_negative, nothing = first < 0, lo > hi
    return torch.where(nothing | is_negative, lo, 0), torch.where(nothing | ~is_negative, hi, 0)
