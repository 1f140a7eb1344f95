"""The block types of ggml: the reference against libggml, and all other paths against the reference."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from shared import libggml
from shared.thoroughness import ALL
from torch.func import vmap

import fakequant as fq
from fakequant import presets, reference, reference_ggml
from fakequant._backends.ggml_blocks import factors_of, ggml_blocks
from fakequant._backends.torch import formula, tensor_kernels
from fakequant._export.gguf.blocks import Blocks, grid_of_blocks, pack, unpack
from fakequant._kernels import MASK_BYTES
from fakequant.formats import GGML_TYPES, SUPER_BLOCKS
from fakequant.testing import cases
from fakequant.testing.assertions import assert_same_bits

SPECS = {name: getattr(presets, name)() for name in GGML_TYPES}
WEIGHTS = ("q4_0", "q4_1", "q8_0", "tq2_0")
K_QUANTS = tuple(SUPER_BLOCKS)
NAN, INF = np.nan, np.inf
FLOAT32_MAX = np.finfo(np.float32).max
by_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
by_dtype = pytest.mark.parametrize("dtype", cases.DTYPES.values(), ids=cases.DTYPES)


@functools.cache
def hard_rows(elements=1 << (20 if ALL else 16)):
    """Returns rows of 256 float32 values: ties of codes and of magnitudes, zeros, and scales of every size."""
    rng = np.random.default_rng(0)
    shape = (elements // 256, 256)
    normal = rng.standard_normal(shape).astype(np.float32)
    sizes = np.float32(2.0) ** rng.integers(-30, 13, (len(normal), 1)).astype(np.float32)
    halves = rng.integers(-16, 17, shape).astype(np.float32) / 2
    ends = np.where(rng.random(shape) < 0.1, rng.choice(np.float32([-8, 8, -127, 127, 15, 7.5]), shape), halves)
    parts = [
        normal * sizes,
        normal.astype("float16").astype(np.float32),
        (normal.view(np.uint32) & 0xFFF00000).view(np.float32),  # few bits: many equal magnitudes
        halves * sizes,
        ends * np.float32(0.1),
        rng.integers(-254, 255, shape).astype(np.float32) / 2,
        np.where(rng.random(shape) < 0.99, 0, normal),
        np.tile(np.float32([-1, 1, 0.5, -0.5, -0.0, 0.49999997, -0.49999997, 0.0]), (1, 32)),
        np.zeros((1, 256), np.float32),
        np.full((1, 256), 3.25, np.float32),
    ]
    return np.concatenate(parts)


def values_in_ggml(x, block_type, suffix):
    return libggml.dequantize(libggml.quantize(x, block_type, suffix), block_type).reshape(x.shape)


@pytest.mark.parametrize("suffix", ["_ref", ""])
@pytest.mark.parametrize("name", WEIGHTS)
def test_the_reference_has_the_bits_of_libggml(name, suffix):
    """With every kind of tie, also where a scale is subnormal in float16 or rounds to 0."""
    if (name, suffix) == ("q8_0", ""):
        pytest.skip("this kernel of libggml rounds inputs, not weights; another test compares it")
    x = hard_rows()
    assert_same_bits(reference_ggml.fake_quantize_blocks(x, SPECS[name]).y, values_in_ggml(x, name, suffix))


def test_inputs_have_the_bytes_of_the_kernels_of_libggml():
    x = hard_rows()
    blocks = libggml.quantize(x, "q8_0", "")
    ours = reference_ggml.fake_quantize_blocks(x, SPECS["q8_0_input"])
    assert_same_bits(ours.codes.reshape(-1, 32), blocks[:, 2:].copy().view(np.int8))
    scales = reference_ggml.stored_scale(ours.scale, SPECS["q8_0_input"]).astype(np.float16)
    assert_same_bits(scales.reshape(-1, 1), blocks[:, :2].copy().view(np.float16))

    blocks = libggml.quantize(x, "q8_K")
    ours = reference_ggml.fake_quantize_blocks(x, SPECS["q8_k_input"])
    assert_same_bits(ours.codes, blocks[:, 4:260].copy().view(np.int8))
    stored = reference_ggml.stored_scale(ours.scale, SPECS["q8_k_input"])
    assert_same_bits(stored, blocks[:, :4].copy().view(np.float32))


def test_where_libggml_differs():
    """Where 1 / d is infinite, C leaves codes undefined; where float16(d) is infinite, values are not numbers."""
    tiny, huge = np.zeros((2, 32), np.float32)
    tiny[:2] = 2.0**-130, 2.0**-140
    huge[:2] = -1e6, 1.0
    for spec in (SPECS["q4_0"], SPECS["q8_0"]):
        assert not reference_ggml.fake_quantize_blocks(tiny, spec).y.any()
    y = reference_ggml.fake_quantize_blocks(huge, SPECS["q4_0"]).y
    assert_same_bits(y[:2], np.float32([-524032, 0]))
    assert not np.isfinite(values_in_ggml(huge, "q4_0", "_ref")).all()


def test_libggml_reads_codes_and_scales_of_mxfp4():
    x, spec = hard_rows(), presets.mxfp4()
    codes, qparams = fq.quantize_dynamic(x, spec)
    low, high = np.split(codes.reshape(-1, 32), 2, axis=1)
    scales = fq.encode_scales(qparams.scale, spec).codes.reshape(-1, 1)
    values = libggml.dequantize(np.concatenate([scales, low | high << 4], axis=1), "mxfp4")
    # ggml's -0 is +0.
    assert_same_bits(values.reshape(x.shape) + np.float32(0), fq.fake_quantize_dynamic(x, spec) + np.float32(0))


# --- K-quants -------------------------------------------------------------------------------------


def parts_of(blocks, name):
    """Returns codes, scales and offsets of libggml's super-blocks, in the shape of `hard_rows`."""
    found = unpack(name.upper(), blocks)
    grid = grid_of_blocks(name.upper(), found)
    scale, offset = (
        grid.scale.numpy(),
        np.zeros_like(grid.scale) if grid.zero_point is None else grid.zero_point.numpy(),
    )
    codes = found.codes.astype(np.int16) - (32 if name == "q6_k" else 0)
    return codes.astype(SPECS[name].storage), scale, offset if SPECS[name].has_offset else 0


def random_blocks(name, number):
    """Returns any super-blocks with finite numbers: subnormal, zero and the largest scales, and every code."""
    rng = np.random.default_rng(3)
    _, size = libggml.BLOCKS[name[:3] + "K"]
    blocks = rng.integers(0, 256, (number, size), dtype=np.uint8)
    halves = rng.integers(0, 0x7C00, (number, 2), dtype=np.uint16)
    halves[: number // 8] %= 8
    halves[number // 8 : number // 4] = 0x7BFF - halves[number // 8 : number // 4] % 16
    if name == "q6_k":
        blocks[:, -2:] = (halves[:, :1] | rng.integers(0, 2, (number, 1), dtype=np.uint16) << 15).view(np.uint8)
        blocks[: number // 8, 192:196] = 0x80  # -128
    else:
        blocks[:, :4] = halves.view(np.uint8)
    return blocks


@pytest.mark.parametrize("name", K_QUANTS)
def test_k_quants_have_the_values_of_libggml(name):
    blocks = random_blocks(name, 4096)  # a million values
    codes, scale, offset = parts_of(blocks, name)
    ours = fq.dequantize(codes, scale, offset, SPECS[name])
    assert_same_bits(ours, libggml.dequantize(blocks, name[:3] + "K").reshape(ours.shape))


@pytest.mark.parametrize("name", K_QUANTS)
def test_k_quants_have_the_codes_of_libggml_for_its_scales(name):
    """Except where the scale is 0, and libggml leaves the codes of its search, and where int overflows there."""
    x, spec = hard_rows(), SPECS[name]
    blocks = libggml.quantize(x, name[:3] + "K")
    codes, scale, offset = parts_of(blocks, name)
    s, z = (np.repeat(v, spec.group_size, -1) if np.ndim(v) else v for v in (scale, offset))
    same = (s != 0) & (np.abs(reference_ggml.steps(x, s, z, spec)) < 4e6)
    assert same.mean() > 0.5
    ours = fq.quantize(x, scale, offset, spec)
    assert_same_bits(ours[same], codes[same])
    assert_same_bits(reference_ggml.quantize(x, s, z, spec)[1].astype(spec.storage), ours)
    found = unpack(name.upper(), blocks)
    stored = [
        (scale, found.scale, found.scales),
        *([(0 - offset, found.offset, found.offsets)] if spec.has_offset else []),
    ]
    for products, d, integers in stored:  # integers mean nothing where float16(d) is 0
        ours = factors_of(products[d[:, 0] != 0], spec)
        assert_same_bits(ours[0], d[d[:, 0] != 0])
        assert_same_bits(ours[1], integers[d[:, 0] != 0])


@pytest.mark.parametrize("name", K_QUANTS)
def test_k_quants_divide_at_ties(name):
    """Next to every tie between two codes, a multiplication by the inverse would move codes."""
    spec, rng = SPECS[name], np.random.default_rng(5)
    integers = rng.integers(1, 64, (64, SUPER_BLOCKS[name])).astype(np.float32)
    scale = integers * np.float32(np.float16(0.1))
    offset = -integers[:, ::-1] * np.float32(np.float16(0.003)) if spec.has_offset else np.zeros_like(scale)
    s, z = (np.repeat(v, spec.group_size, -1) for v in (scale, offset))
    x = (rng.integers(spec.qmin - 1, spec.qmax + 1, s.shape).astype(np.float32) + np.float32(0.5)) * s + z
    _, wanted = reference_ggml.quantize(x, s, z, spec)
    exact = np.clip(np.rint((x - z).astype(np.float64) / s), spec.qmin, spec.qmax)
    near = np.abs(np.abs((x - z).astype(np.float64) / s % 1) - 0.5) < 1e-6
    assert_same_bits(wanted[~near], exact[~near].astype(np.float32))
    assert_same_bits(fq.quantize(x, scale, offset if spec.has_offset else 0, spec), wanted.astype(spec.storage))
    zero = torch.from_numpy(offset.copy()) if spec.has_offset else None
    grid = tensor_kernels.Grid(torch.from_numpy(scale), zero, spec.qmin, spec.qmax, name)
    found = formula.quantize(torch.from_numpy(x), grid, getattr(torch, spec.storage))
    assert_same_bits(found.numpy(), wanted.astype(spec.storage))


@pytest.mark.parametrize("name", K_QUANTS)
def test_libggml_reads_the_values_of_k_quants(name):
    """Scales that follow the data are stored exactly."""
    x, spec = hard_rows(), SPECS[name]
    blocks = ggml_blocks(x, spec)
    values = libggml.dequantize(pack(name.upper(), Blocks(*blocks)), name[:3] + "K").reshape(x.shape)
    assert_same_bits(values, fq.fake_quantize_dynamic(x, spec))
    error = np.square(values - x).sum(-1)
    theirs = np.square(values_in_ggml(x, name[:3] + "K", "_ref").reshape(x.shape) - x).sum(-1)
    normal = np.isfinite(theirs) & (np.abs(x).max(-1) > 1e-3)
    assert error[normal].sum() < 2 * theirs[normal].sum()


@pytest.mark.parametrize("name", K_QUANTS)
def test_every_scale_of_a_super_block_is_found_again(name):
    """All integers as the largest one, with common divisors too."""
    spec, rng = SPECS[name], np.random.default_rng(4)
    low, high = (-128, 127) if name == "q6_k" else (0, 63)
    largest = np.repeat(np.arange(low, high + 1), 50)[:, None]
    part = rng.integers(-1000, 1001, (len(largest), SUPER_BLOCKS[name])) * np.abs(largest) // 1000
    integers = np.clip(part // (step := rng.choice([1, 2, 7], largest.shape)) * step, low, high)
    integers[:, 3:4] = largest
    d = rng.integers(0, 0x7C00, largest.shape, dtype=np.uint16)
    d = (
        (d | rng.integers(0, 2, d.shape, dtype=np.uint16) << 15).view(np.float16)
        if name == "q6_k"
        else d.view(np.float16)
    )
    scale = d.astype(np.float32) * integers.astype(np.float32)
    found, times = factors_of(scale, spec)
    assert_same_bits(found.astype(np.float32) * times.astype(np.float32), scale)
    with pytest.raises(ValueError, match="cannot store"):
        factors_of(scale + np.float32([0, 1e-3] * (SUPER_BLOCKS[name] // 2)), spec)


def test_k_quants_need_rows_of_whole_super_blocks():
    for shape, spec in (((4, 128), presets.q4_k()), ((256, 4), dataclasses.replace(presets.q6_k(), axis=0))):
        with pytest.raises(ValueError, match="super-blocks of 256 along the last axis"):
            fq.fake_quantize_dynamic(np.ones(shape, np.float32), spec)


# --- all paths ------------------------------------------------------------------------------------


@functools.cache
def hard_array(spec, dtype, shape, axis):
    """Returns hard values with NaN, infinities and the largest floats, in another order of axes."""
    rng = np.random.default_rng(1)
    rows = hard_rows()
    x = np.array(rows[rng.permutation(len(rows))[: -(-np.prod(shape) // 256)]].reshape(-1)[: np.prod(shape)])
    where = rng.random(x.size)
    for value, low in ((NAN, 0.01), (INF, 0.02), (-INF, 0.03), (FLOAT32_MAX, 0.032), (-FLOAT32_MAX, 0.034)):
        x[(where < low) & (where > low - 0.01) & (rng.random(x.size) < 0.3)] = value
    with np.errstate(over="ignore"):
        x = x.reshape(shape).astype(dtype)
    if dtype == np.float64:  # magnitudes that are different, but equal in float32, or beyond it
        x[rng.random(shape) < 0.1] *= 1 + 1e-12
        x[rng.random(shape) < 0.002] *= 1e39
    return x, presets_along(spec, axis)


def presets_along(spec, axis):
    return spec if spec.ggml_type in SUPER_BLOCKS else getattr(presets, spec.ggml_type)(axis=axis)


def shapes_of(spec):
    size = spec.group_size
    if spec.ggml_type in SUPER_BLOCKS:
        return [((5, 768), -1), ((3, 2, 256), -1), ((0, 256), -1), ((512,), -1)]
    return [((5, 7 * size), -1), ((2 * size, 9), 0), ((2, size, 5), 1), ((0, size), 1), ((size,), 0)]


def check_all(spec, dtype, run):
    for shape, axis in shapes_of(spec):
        x, here = hard_array(spec, dtype, shape, axis)
        run(x, here, reference_ggml.fake_quantize_blocks(x, here))


@by_dtype
@by_spec
def test_arrays(spec, dtype):
    def run(x, spec, wanted):
        assert_same_bits(fq.fake_quantize_dynamic(x, spec), wanted.y)
        codes, qparams = fq.quantize_dynamic(x, spec)
        assert_same_bits(codes, wanted.codes)
        assert_same_bits(qparams.scale, wanted.scale)
        if spec.has_offset:
            assert_same_bits(qparams.zero_point, wanted.offset)
        y, mask = fq.fake_quantize(x, *qparams, spec, mask="bool")
        assert_same_bits(y, wanted.y)
        assert_same_bits(mask, wanted.mask)
        expected = np.where(np.isnan(x), fq.dequantize(codes, *qparams, spec, dtype=dtype), wanted.y)
        assert_same_bits(fq.dequantize(codes, *qparams, spec, dtype=dtype), expected.astype(dtype))
        lo, hi = reference_ggml.block_ranges(x, spec)
        running = np.empty((2, *lo.shape), np.float32)
        seen = fq.observe_fake_quantize(x, spec, *running, update="dynamic", mask="bool")
        for ours, theirs in zip(
            (seen.y, seen.mask, seen.scale, *running), (y, mask, qparams.scale, lo, hi), strict=True
        ):
            assert_same_bits(ours, theirs)

    check_all(spec, dtype, run)


def as_tensor(x):
    return (
        torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16) if x.dtype.name == "bfloat16" else torch.from_numpy(x)
    )


def as_array(x):
    return x.view(torch.uint16).numpy().view(cases.DTYPES["bfloat16"]) if x.dtype == torch.bfloat16 else x.numpy()


@by_dtype
@by_spec
def test_tensors_in_every_layout_and_under_vmap(spec, dtype):
    def run(x, spec, wanted):
        tensor = as_tensor(x)
        assert_same_bits(as_array(fq.fake_quantize_dynamic(tensor, spec)), wanted.y)
        if x.ndim > 1:
            swapped = tensor.transpose(0, 1).contiguous().transpose(0, 1)
            assert_same_bits(as_array(fq.fake_quantize_dynamic(swapped, spec).contiguous()), wanted.y)
        if x.size:
            codes, qparams = fq.quantize_dynamic(tensor, spec)
            assert_same_bits(codes.numpy(), wanted.codes)
            assert_same_bits(qparams.scale.numpy(), wanted.scale)
            both = vmap(lambda one: fq.fake_quantize_dynamic(one, spec))(torch.stack([tensor, tensor]))
            assert_same_bits(as_array(both[1]), wanted.y)

    check_all(spec, dtype, run)


@by_dtype
@by_spec
def test_the_formula_for_other_devices_has_the_same_bits(spec, dtype):
    def run(x, spec, wanted):
        tensor = as_tensor(x)
        rule = spec.ggml_type
        options = tensor_kernels.ObserverOptions(
            spec.qmin, spec.qmax, rule, spec.symmetric, rule, "dynamic", 0, 1, True
        )
        running = torch.empty((2, *wanted.scale.shape))
        seen = formula.observe_fake_quantize(tensor, *running, options)
        for ours, theirs in ((as_array(seen.y), wanted.y), (seen.scale.numpy(), wanted.scale)):
            assert_same_bits(ours, theirs)
        grid = tensor_kernels.Grid(seen.scale, seen.zero_point if spec.has_offset else None, spec.qmin, spec.qmax, rule)
        mask = formula.fake_quantize(tensor, grid, MASK_BYTES)[1]
        assert_same_bits(mask.numpy(), wanted.mask)
        assert_same_bits(formula.quantize(tensor, grid, getattr(torch, spec.storage)).numpy(), wanted.codes)
        kernels = tensor_kernels.dequantize(torch.from_numpy(wanted.codes), grid, tensor.dtype)
        formulas = formula.dequantize(torch.from_numpy(wanted.codes), grid, tensor.dtype)
        assert_same_bits(as_array(formulas), as_array(kernels))

    check_all(spec, dtype, run)


def learned_case(name, dtype, dense=True):
    """Returns hard data, its gradient, learned scales and offsets next to those of the data, and the terms wanted."""
    spec = SPECS[name]
    rng = np.random.default_rng(2)
    x, _ = hard_array(spec, dtype, (6, 512), -1)
    with np.errstate(over="ignore"):
        dy = rng.standard_normal(x.shape).astype(np.float32).astype(dtype)
    found = reference_ggml.fake_quantize_blocks(x, spec)
    scale = np.where(found.scale == 0, np.float32(0.25), found.scale * np.float32(0.75)).astype(np.float32)
    if name in K_QUANTS:
        scale = np.where(found.scale == 0, np.float32(0.25), found.scale)  # any are allowed here
    offset = (found.offset * np.float32(0.875)).astype(np.float32)
    s, z = (np.repeat(v, spec.group_size, axis=-1) for v in (scale, offset))
    terms = reference_ggml.learned_backward(dy, x, s, z, spec, grad_factor=0.5)
    _, q = reference_ggml.quantize(x, s, z, spec)
    return spec, x, dy, scale, offset, reference_ggml.dequantize(q, s, z, spec).astype(dtype), terms


def sums(terms, spec):
    blocks = terms.reshape(len(terms), -1, spec.group_size)
    return np.array([[reference.exact_sum(block) for block in row] for row in blocks])


@by_dtype
@pytest.mark.parametrize("name", [*WEIGHTS, *K_QUANTS])
def test_learned_scales_and_offsets(name, dtype):
    """Kernel, tensors and the formula for other devices have the values and gradients of the reference."""
    spec, x, dy, scale, offset, y, (dx, ds, dz) = learned_case(name, dtype)
    zero = offset if spec.has_offset else 0
    assert_same_bits(fq.fake_quantize_learned(x, scale, zero, spec), y)
    found = fq.fake_quantize_learned_backward(dy, x, scale, zero, spec, grad_factor=0.5)
    assert_same_bits(found.dx, dx.astype(dtype))
    wanted = [sums(terms, spec) for terms in (ds, dz)]
    size = np.abs(ds).reshape(*scale.shape, -1).sum(-1)
    assert (np.abs(found.dscale - wanted[0]) <= size * 1e-6).all()
    assert (np.abs(found.dzero_point - wanted[1]) <= np.abs(dz).reshape(*scale.shape, -1).sum(-1) * 1e-6).all()

    tensors = [as_tensor(v) for v in (x, scale)]
    leaves = [v.clone().requires_grad_() for v in (*tensors, *((as_tensor(offset),) if spec.has_offset else ()))]
    result = fq.fake_quantize_learned(*leaves[:2], leaves[2] if spec.has_offset else 0, spec, grad_factor=0.5)
    assert_same_bits(as_array(result.detach()), y)
    result.backward(as_tensor(dy))
    assert_same_bits(as_array(leaves[0].grad), found.dx)
    for leaf, sum_ in zip(leaves[1:], (found.dscale, found.dzero_point), strict=False):
        assert_same_bits(leaf.grad.numpy(), sum_.astype(np.float32))

    grid = tensor_kernels.Grid(tensors[1], as_tensor(offset) if spec.has_offset else None, spec.qmin, spec.qmax, name)
    theirs = formula.learned_backward(as_tensor(dy), tensors[0], grid, 0.5)
    assert_same_bits(as_array(theirs[0]), found.dx)
    assert (np.abs(theirs[1].numpy() - wanted[0]) <= size * 1e-5).all()
    ours = formula.learned_terms(tensors[0], grid)
    unit = reference_ggml.learned_backward(
        np.ones_like(x), x, *(np.repeat(v, spec.group_size, -1) for v in (scale, offset)), spec
    )
    for term, one in zip(ours[1:], unit[1:], strict=True):
        assert_same_bits(term.numpy() + 0, one + 0)


def test_learned_scales_of_inputs_are_refused():
    x = np.ones((1, 32), np.float32)
    with pytest.raises(ValueError, match="cannot be learned"):
        fq.fake_quantize_learned(x, np.ones((1, 1), np.float32), 0, SPECS["q8_0_input"])


@pytest.mark.parametrize("name", WEIGHTS)
def test_stored_blocks_have_the_values_of_fake_quantization(name):
    spec, x = SPECS[name], hard_rows()[:600]
    blocks = ggml_blocks(torch.from_numpy(x), spec)
    added = {"q4_0": 8, "tq2_0": 1}.get(name, 0)
    levels = blocks.codes.astype(np.int32) - added
    d = np.repeat(blocks.d.astype(np.float32), spec.group_size, axis=-1)
    y = levels.astype(np.float32) * d
    if blocks.m is not None:
        y = y + np.repeat(blocks.m.astype(np.float32), spec.group_size, axis=-1)
    assert_same_bits(y, fq.fake_quantize_dynamic(x, spec))
    frozen = ggml_blocks(x, spec, fq.quantize_dynamic(x, spec)[1])
    assert_same_bits(frozen.codes, blocks.codes)
    assert_same_bits(frozen.d, blocks.d)
