"""The kernels' formulas in torch operations, for tensors that are not in CPU memory.

The functions have the names and arguments of those in `tensor_kernels`. They run on any device. They never read
values back to the CPU, so they do not check scales. Results have the kernels' bits on every device whose float32
arithmetic follows IEEE 754, except that the device chooses the order of sums.
"""

from math import prod

import torch
from torch import Tensor

from fakequant import _kernels
from fakequant._backends.torch import ggml_formula
from fakequant._backends.torch.float_formula import (
    block_scales,
    codes_of_values,
    divided,
    round_to_format,
    values_of_codes,
)
from fakequant._backends.torch.fused_multiply_add import fma
from fakequant._backends.torch.tensor_kernels import (
    Grid,
    Observed,
    ObserverOptions,
    Order,
    empty_gradient,
    order_of,
    scale_dtype,
    updated_range,
)
from fakequant._kernels import SIGNED_RULES, is_ggml, is_own, is_per_block, largest_level
from fakequant.formats import FLOAT_FORMATS

# In ranges up to this bound, every sum of a code and a zero point is exact in float32.
_EXACT_IN_F32 = 2**22


def wide_dtype(x: Tensor) -> torch.dtype:
    """Returns float64, or float32 on devices without float64."""
    return torch.float32 if x.device.type == "mps" else torch.float64


class _Split:
    """Reshapes a tensor so that scales broadcast: every axis is split into (block, position within the block)."""

    def __init__(self, x: Tensor, scale: Tensor):
        self.shape = x.shape
        self.one = scale.numel() == 1
        blocks = (1,) * x.dim() if self.one else scale.shape
        self.pairs = [n for total, b in zip(x.shape, blocks, strict=True) for n in (b, total // b if b else 0)]
        self.ones = [n for b in blocks for n in (b, 1)]

    def data(self, x: Tensor) -> Tensor:
        return x if self.one else x.reshape(self.pairs)

    def parameter(self, p: Tensor) -> Tensor:
        return p.reshape(()) if self.one else p.reshape(self.ones)

    def join(self, x: Tensor) -> Tensor:
        return x if self.one else x.reshape(self.shape)

    def block_sums(self, x: Tensor, like: Tensor) -> Tensor:
        wide = self.data(x).to(wide_dtype(x))
        return (wide.sum() if self.one else wide.sum(list(range(1, len(self.pairs), 2)))).reshape(like.shape)


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _scale_and_zero(x: Tensor, grid: Grid, split: _Split) -> tuple[Tensor, Tensor | int]:
    assert isinstance(grid.scale, Tensor)
    scale = split.parameter(grid.scale.to(scale_dtype(x.dtype, grid.numerics)))
    z = grid.zero_point
    return scale, split.parameter(z) if isinstance(z, Tensor) else (z or 0)


def _bounds(grid: Grid) -> tuple[float, float]:
    """Returns the ends of the range: codes, or values of a float format."""
    float_format = FLOAT_FORMATS.get(grid.numerics)
    return (grid.qmin, grid.qmax) if float_format is None else (-float_format.largest, float_format.largest)


def _is_exact_in_f32(grid: Grid) -> bool:
    return max(-grid.qmin, grid.qmax) <= _EXACT_IN_F32


def onnx_steps(x: Tensor, scale: Tensor) -> Tensor:
    """Returns the number of steps of the grid from 0 to `x`, by ONNX's rule: divide, and round ties to even."""
    return torch.round(x / scale)


def _code(x: Tensor, scale: Tensor, z: Tensor | int, grid: Grid) -> Tensor:
    """Returns the code before clamping, in a float dtype that represents it exactly. NaN stays NaN.

    With a float format, returns the value in units of the scale instead.
    """
    compute = _compute_dtype(x)
    wide = compute if _is_exact_in_f32(grid) else wide_dtype(x)
    x = x.to(compute)
    if grid.numerics in FLOAT_FORMATS:
        return round_to_format(x / scale, FLOAT_FORMATS[grid.numerics])
    if is_ggml(grid.numerics):
        return ggml_formula.codes(x, scale, z, grid.numerics)
    if grid.numerics == "onnx":
        return onnx_steps(x, scale).to(wide) + z
    if is_own(grid.numerics):
        v = x / scale + (z.to(compute) if isinstance(z, Tensor) else z)
        whole = torch.trunc(v)
        away = (v - whole).abs() >= 0.5
        return torch.where(away, whole + torch.copysign(torch.ones_like(v), v), whole).to(wide)
    inverse = (1.0 / scale).to(compute)
    if isinstance(z, Tensor):
        if z.is_floating_point():  # float32: one rounding; float16: the product is rounded first
            total = (x * inverse + z.to(compute)) if z.dtype == torch.float16 else fma(x, inverse, z.to(compute))
            code = torch.round(total.float()).to(compute)
        else:
            code = z.to(compute) + torch.round(x * inverse)
    else:
        code = z + torch.round(x * inverse)
    if grid.numerics == "torch_channel":
        code = torch.where(code.abs() < 2.0**63, code, -torch.inf)
    return code


def with_positive_zeros(x: Tensor) -> Tensor:
    """Returns `x` with 0.0 instead of -0.0. Not `x + 0.0`, which compilers simplify to `x`."""
    return torch.where(x == 0, 0.0, x)


def fake_quantize(x: Tensor, grid: Grid, mask_kind: int) -> tuple[Tensor, Tensor | None]:
    """Returns the fake-quantized values, and a mask unless `mask_kind` is MASK_NONE."""
    assert isinstance(grid.scale, Tensor)
    split = _Split(x, grid.scale)
    scale, z = _scale_and_zero(x, grid, split)
    code = _code(split.data(x), scale, z, grid)
    low, high = _bounds(grid)
    if grid.numerics in FLOAT_FORMATS:
        y = code.clamp(low, high) * scale
    elif is_ggml(grid.numerics):
        y = ggml_formula.values(with_positive_zeros(code.clamp(low, high)), scale, z, grid.numerics)
    elif is_own(grid.numerics):
        compute = _compute_dtype(x)
        steps = with_positive_zeros(code.clamp(grid.qmin, grid.qmax) - z)
        y = steps.to(compute) * scale
    else:
        bounded = torch.where(code.isnan(), grid.qmin, code.clamp(grid.qmin, grid.qmax))
        if grid.numerics == "torch_tensor":
            y = (bounded.to(torch.int64) - z).float() * scale
        else:
            wide = wide_dtype(x)
            y = ((bounded.to(wide) - z) * scale.to(wide)).to(_compute_dtype(x))
    y = _like(split.join(y.to(x.dtype)), x)
    if mask_kind == _kernels.MASK_NONE:
        return y, None
    mask = split.join((code >= low) & (code <= high))
    if mask_kind == _kernels.MASK_BYTES:
        return y, _like(mask, x)
    return y, pack_bits(mask, order_of(x))


def _like(values: Tensor, x: Tensor) -> Tensor:
    """Returns `values` with the strides of `torch.empty_like(x)`."""
    out = torch.empty_like(x, dtype=values.dtype)
    return values if values.stride() == out.stride() else out.copy_(values)


def pack_bits(mask: Tensor, order: Order) -> Tensor:
    """Packs a bool mask into bytes: element 8*i + j goes to bit j of byte i. `order` is the order of the axes.

    >>> pack_bits(torch.tensor([True, False, True, True, False, False, False, False, True]), None)
    tensor([13,  1], dtype=torch.uint8)
    """
    flat = mask.permute(order or tuple(range(mask.dim()))).reshape(-1).to(torch.uint8)
    flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(-1, 8)
    return (flat << torch.arange(8, device=flat.device, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, shape: torch.Size, order: Order) -> Tensor:
    """Returns the bool mask of `shape` whose bits are packed in the given order of axes.

    Leading axes of `packed` are a batch of masks.

    >>> unpack_bits(torch.tensor([13, 1], dtype=torch.uint8), torch.Size([9]), None).int().tolist()
    [1, 0, 1, 1, 0, 0, 0, 0, 1]
    """
    bits = (packed[..., None] >> torch.arange(8, device=packed.device, dtype=torch.uint8)) & 1
    rows = packed.shape[:-1]
    order = order or tuple(range(len(shape)))
    mask = bits.flatten(-2)[..., : prod(shape)].reshape(*rows, *(shape[a] for a in order)).bool()
    front = range(len(rows))
    return mask.permute(*front, *(len(rows) + order.index(a) for a in range(len(order))))


def mask_backward(dy: Tensor, mask: Tensor, order: Order, multiply: bool) -> Tensor:
    """Returns `dy` where the mask is set, otherwise 0. With `multiply`, returns `dy * mask`."""
    dx = empty_gradient(dy, mask, order)
    if mask.dtype == torch.uint8:
        mask = unpack_bits(mask, dy.shape, order)
    result = dy * mask if multiply else torch.where(mask, dy, 0)
    return result if result.stride() == dx.stride() else dx.copy_(result)


def learned_terms(x: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the derivatives of y with respect to x, scale and zero point, per element.

                dy/dx    dy/dscale                  dy/dzero_point
    inside      True     (q - z) - x / scale        0
    outside     False    qmin - z or qmax - z       -scale

    For ggml's types, see `reference_ggml.learned_backward`.
    """
    inside, ds, factor, dz = _learned_factors(x, grid)
    return inside, ds if factor is None else ds * factor, dz


def _learned_factors(x: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Returns dy/dx, dy/dscale as two factors, and dy/dzero_point; see `learned_terms`.

    Like the kernels, the caller multiplies dy by one factor and then by the other. The second is None if it is 1.
    """
    assert isinstance(grid.scale, Tensor)
    split = _Split(x, grid.scale)
    scale, z = _scale_and_zero(x, grid, split)
    compute = _compute_dtype(x)
    wide_x = split.data(x).to(compute)
    low, high = _bounds(grid)
    factor = None
    if is_own(grid.numerics):
        code = _code(wide_x, scale, z, grid)
        finite = wide_x.isfinite()
        below, above = finite & (code < low), finite & (code > high)
        inside = finite & ~(below | above)
        if is_ggml(grid.numerics):
            ds_inside = code.to(compute) - ggml_formula.steps(wide_x, scale, z, grid.numerics).to(compute)
        else:
            ds_inside = (code - z).to(compute) - wide_x / scale
    else:
        s, inverse = scale.to(compute), (1.0 / scale).to(compute)
        z = z.to(compute) if isinstance(z, Tensor) else torch.full_like(s, float(z))
        code = torch.round(fma(wide_x, inverse, z))
        code = torch.where(code.abs() < 2.0**63, code, -torch.inf)
        below, above = code < low, code > high
        inside = ~(below | above)
        ds_inside = fma(code - z, s, -wide_x)
        factor = split.join(torch.where(inside, inverse, 1))
    bound = torch.where(below, low, high)
    zero = torch.zeros((), dtype=compute, device=x.device)
    level, dz_outside = (bound, torch.ones_like(scale)) if is_ggml(grid.numerics) else (bound - z, -scale)
    ds = torch.where(inside, ds_inside, torch.where(below | above, level.to(compute), zero))
    dz = torch.where(below | above, dz_outside.to(compute), zero)
    return split.join(inside), split.join(ds), factor, split.join(dz)


def block_sums(values: Tensor, like: Tensor) -> Tensor:
    """Returns the sum of every block, in the shape and dtype of the scales `like`."""
    return _Split(values, like).block_sums(values, like).to(like.dtype)


def spread(values: Tensor, x: Tensor) -> Tensor:
    """Repeats one value per block for every element of `x`. A single value stays 0-d."""
    split = _Split(x, values)
    return split.parameter(values) if split.one else split.join(split.parameter(values).expand(split.pairs))


def learned_backward(dy: Tensor, x: Tensor, grid: Grid, grad_factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dx, dscale and dzero_point."""
    assert isinstance(grid.scale, Tensor)
    inside, ds, factor, dz = _learned_factors(x, grid)
    multiply = not is_own(grid.numerics)
    wide = dy.to(ds.dtype)
    dx = _like(dy * inside if multiply else torch.where(inside, dy, 0), x)
    keep = ds != 0  # not multiplied: an infinite dy times 0 would be NaN
    dscale = torch.where(keep, wide * ds if factor is None else (wide * ds) * factor, 0) * grad_factor
    dzero_point = torch.where(dz != 0, wide * dz, 0) * grad_factor
    return dx, block_sums(dscale, grid.scale), block_sums(dzero_point, grid.scale)


def _codes(x: Tensor, grid: Grid) -> Tensor:
    """Returns the codes of `x` as int32, or as int64 for a wide range."""
    assert isinstance(grid.scale, Tensor)
    split = _Split(x, grid.scale)
    scale, z = _scale_and_zero(x, grid, split)
    code = _code(split.data(x), scale, z, grid)
    if grid.numerics in FLOAT_FORMATS:
        return split.join(codes_of_values(code.clamp(*_bounds(grid)), FLOAT_FORMATS[grid.numerics]))
    nan_code = grid.qmin if grid.numerics != "half_away" else min(max(0, grid.qmin), grid.qmax)
    narrow = _is_exact_in_f32(grid)
    if not narrow:  # float32 may round the end of a wide range to a number outside it
        code = code.to(wide_dtype(x))
    bounded = torch.where(code.isnan(), nan_code, code.clamp(grid.qmin, grid.qmax))
    return split.join(bounded.to(torch.int32 if narrow else torch.int64))


def quantize(x: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    """Returns the codes of `x`."""
    return _like(_codes(x, grid).to(dtype), x)


def quantize_packed(x: Tensor, grid: Grid, bits: int) -> Tensor:
    """Returns the codes of `x` in C order, two or four to a byte, or four codes of 6 bits to three bytes."""
    codes = (_codes(x, grid) & ((1 << bits) - 1)).reshape(-1)
    if bits == 6:
        return _pack_6_bits(codes)
    per_byte = 8 // bits
    codes = torch.nn.functional.pad(codes, (0, -codes.numel() % per_byte)).view(-1, per_byte)
    return (codes << (bits * torch.arange(per_byte, device=x.device))).sum(1).to(torch.uint8)


def _pack_6_bits(codes: Tensor) -> Tensor:
    size = (codes.numel() * 6 + 7) // 8
    four = torch.nn.functional.pad(codes, (0, -codes.numel() % 4)).view(-1, 4).to(torch.int64)
    words = (four << (6 * torch.arange(4, device=codes.device))).sum(1)
    return (words[:, None] >> (8 * torch.arange(3, device=codes.device)) & 0xFF).to(torch.uint8).reshape(-1)[:size]


def _unpack_6_bits(q: Tensor) -> Tensor:
    three = torch.nn.functional.pad(q, (0, -q.numel() % 3)).view(-1, 3).to(torch.int64)
    words = (three << (8 * torch.arange(3, device=q.device))).sum(1)
    return words[:, None] >> (6 * torch.arange(4, device=q.device)) & 0x3F


def dequantize(q: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    """Returns the values of the codes `q`."""
    assert isinstance(grid.scale, Tensor)
    split = _Split(q, grid.scale)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    scale = split.parameter(grid.scale.to(scale_dtype(dtype, grid.numerics)))
    if grid.numerics in FLOAT_FORMATS:
        levels = values_of_codes(split.data(q), FLOAT_FORMATS[grid.numerics]).to(compute)
        return _like(split.join((levels * scale.to(compute)).to(dtype)), q)
    z = grid.zero_point
    if is_ggml(grid.numerics):
        offset = split.parameter(z) if isinstance(z, Tensor) else 0
        return _like(split.join(ggml_formula.values(split.data(q).float(), scale, offset, grid.numerics).to(dtype)), q)
    integer = torch.int32 if _is_exact_in_f32(grid) else torch.int64
    zero = split.parameter(z).to(integer) if isinstance(z, Tensor) else (z or 0)
    steps = split.data(q).to(integer) - zero
    return _like(split.join((steps.to(compute) * scale.to(compute)).to(dtype)), q)


def dequantize_packed(q: Tensor, grid: Grid, shape: tuple[int, ...], bits: int, dtype: torch.dtype) -> Tensor:
    """Returns the values of the packed codes of a tensor of `shape`."""
    if bits == 6:
        codes = _unpack_6_bits(q)
    else:
        codes = (q.to(torch.int64)[:, None] >> (bits * torch.arange(8 // bits, device=q.device))) & ((1 << bits) - 1)
    codes = codes.reshape(-1)[: prod(shape)].reshape(shape)
    if grid.qmin < 0:
        codes = torch.where(codes >= 1 << (bits - 1), codes - (1 << bits), codes)
    return dequantize(codes, grid, dtype)


def min_max(x: Tensor, blocks: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the lowest and highest finite value of every block, and the numbers of NaN, +inf and -inf."""
    compute = _compute_dtype(x)
    if x.numel() == 0:
        lo = torch.full(blocks, torch.inf, dtype=compute, device=x.device)
        return lo, -lo, torch.zeros((3, *blocks), dtype=torch.int64, device=x.device)
    split = _Split(x, torch.empty(blocks, device="meta"))
    data = split.data(x).to(compute)
    within = tuple(range(data.dim())) if split.one else tuple(range(1, len(split.pairs), 2))
    finite = data.isfinite()
    lo = with_positive_zeros(torch.where(finite, data, torch.inf).amin(within).reshape(blocks))
    hi = with_positive_zeros(torch.where(finite, data, -torch.inf).amax(within).reshape(blocks))
    counts = [found.sum(within).reshape(blocks) for found in (data.isnan(), data == torch.inf, data == -torch.inf)]
    return lo, hi, torch.stack(counts)


def choose_qparams(
    lo: Tensor, hi: Tensor, qmin: int, qmax: int, numerics: str, symmetric: bool, scale_rule: str, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns scale and zero point of every range. See `fakequant.choose_qparams` for the formulas."""
    if is_ggml(scale_rule):
        return ggml_formula.choose_qparams(lo.float(), hi.float(), scale_rule)
    lo, hi = lo.float().clamp(max=0.0), hi.float().clamp(min=0.0)
    if not is_per_block(scale_rule):
        scale = block_scales(torch.maximum(-lo, hi).abs(), qmax, numerics, scale_rule)
        return scale, torch.zeros_like(scale, dtype=torch.int32)
    is_float = numerics in FLOAT_FORMATS
    levels = largest_level(qmax, numerics) if is_float else (qmax - qmin) / (2 if symmetric else 1)
    if symmetric:
        scale = rounded_scale(divided(torch.maximum(-lo, hi), levels).clamp(min=eps), scale_rule)
        return scale, torch.zeros_like(scale, dtype=torch.int32)
    width = hi - lo
    wide = wide_dtype(lo)
    # The width of a range may overflow float32 although the scale does not.
    beyond = divided(hi.to(wide) - lo.to(wide), float(torch.tensor(levels, dtype=torch.float32))).float()
    scale = rounded_scale(torch.where(width.isinf(), beyond, divided(width, levels)).clamp(min=eps), scale_rule)
    zero_point = (qmin - torch.round(lo / scale).to(torch.int64)).clamp(qmin, qmax)
    return scale, zero_point.to(torch.int32)


def rounded_scale(scale: Tensor, scale_rule: str) -> Tensor:
    """Returns positive scales rounded to 16 bits if the rule says so, within the range of the type."""
    if scale_rule == "any":
        return scale
    dtype, smallest = (torch.float16, 2.0**-24) if scale_rule == "float16" else (torch.bfloat16, 2.0**-133)
    return scale.clamp(max=torch.finfo(dtype).max).to(dtype).float().clamp(min=smallest)


def observe_fake_quantize(x: Tensor, running_min: Tensor, running_max: Tensor, options: ObserverOptions) -> Observed:
    """Updates the running range in place, chooses scales and fake-quantizes."""
    lo, hi, counts = min_max(x, tuple(running_min.shape))
    if options.scale_rule in SIGNED_RULES:
        lo, hi = ggml_formula.range_to_largest(lo, hi, x)
    new_min, new_max = updated_range(running_min, running_max, lo, hi, options.how)
    running_min.copy_(new_min)
    running_max.copy_(new_max)
    qmin, qmax, numerics, symmetric, scale_rule, *_ = options
    scale, zero_point = choose_qparams(
        running_min, running_max, qmin, qmax, numerics, symmetric, scale_rule, options.eps
    )
    y, mask = fake_quantize(x, Grid(scale, zero_point, qmin, qmax, numerics), options.mask_kind)
    return Observed(y, mask, scale, zero_point, counts.sum())
