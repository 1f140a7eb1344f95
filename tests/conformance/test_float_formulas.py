"""Float formats and block scales by `formula`, which runs on other devices, have the bits of the CPU kernels."""

import itertools

import numpy as np
import pytest

from fakequant import _kernels
from fakequant.formats import FLOAT_FORMATS
from fakequant.testing import cases
from fakequant.testing.assertions import assert_same_bits
from tensor_data import array, assert_same, data
from torch_bridge import torch

formula = pytest.importorskip("fakequant._backends.torch.formula")
kernels = pytest.importorskip("fakequant._backends.torch.tensor_kernels")

pytestmark = pytest.mark.usefixtures("torch_on_one_thread")
BOTH = (kernels, formula)
MASKS = (_kernels.MASK_NONE, _kernels.MASK_PACKED, _kernels.MASK_BYTES)
RULES = ("floor", "ceil", "even", "rceil", "e4m3fn", "even_e2m1")
by_format = pytest.mark.parametrize("name", FLOAT_FORMATS)
by_rule = pytest.mark.parametrize("rule", RULES)


def ties(name):
    """Returns grid points, ties between them, the floats next to both, and special values."""
    grid = torch.from_numpy(FLOAT_FORMATS[name].grid())
    points = torch.cat([grid, (grid[1:] + grid[:-1]) / 2, torch.tensor([2 * FLOAT_FORMATS[name].largest, 1e38, 1e-40])])
    near = [points.nextafter(torch.tensor(end)) for end in (-torch.inf, torch.inf)]
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, 1e-45])
    return torch.cat([points, *near, special])


def inputs(name):
    for dtype in cases.DTYPES.values():
        x = data("contiguous", dtype).detach()
        yield x, torch.full((), 0.03)
        yield x, torch.rand(1, x.shape[1], 1, 1, generator=torch.Generator().manual_seed(0)) + 0.01
        yield ties(name).to(x.dtype), torch.ones(())
    yield data("channels last", np.float32).detach(), torch.full((), 0.7)


def grid_of(name, scale):
    return kernels.Grid(scale, None, 0, (1 << FLOAT_FORMATS[name].bits) - 1, name)


@by_format
def test_formula_forward_and_masks_have_the_bits_of_the_kernels(name):
    for (x, scale), kind in itertools.product(inputs(name), MASKS):
        expected, actual = (m.fake_quantize(x, grid_of(name, scale), kind) for m in BOTH)
        assert_same(expected[0], actual[0], "y", x.dtype)
        assert (expected[1] is None) == (actual[1] is None)
        if expected[1] is not None:
            assert_same(expected[1], actual[1], "mask", x.dtype)


@by_format
def test_formula_codes_and_values_have_the_bits_of_the_kernels(name):
    bits = FLOAT_FORMATS[name].bits
    for x, scale in inputs(name):
        grid = grid_of(name, scale)
        q, same = (m.quantize(x, grid, torch.uint8) for m in BOTH)
        assert_same(q, same, "codes", x.dtype)
        assert_same(*(m.dequantize(q, grid, x.dtype) for m in BOTH), "values", x.dtype)
        if bits < 8:
            packed, same = (m.quantize_packed(x, grid, bits) for m in BOTH)
            assert_same(packed, same, "packed", x.dtype)
            values = (m.dequantize_packed(packed, grid, tuple(x.shape), bits, x.dtype) for m in BOTH)
            assert_same(*values, "values of packed codes", x.dtype)
    every = torch.arange(1 << bits).to(torch.uint8)
    assert_same(*(m.dequantize(every, grid_of(name, torch.ones(())), torch.float32) for m in BOTH), "every code")


@by_format
def test_formula_learned_gradients_of_single_elements_have_the_bits_of_the_kernels(name):
    """With one scale per element there are no sums, whose order differs."""
    x = ties(name)
    scale = torch.full_like(x, 0.3)
    dy = torch.linspace(-2, 3, len(x))
    expected, actual = (m.learned_backward(dy, x, grid_of(name, scale), 0.5) for m in BOTH)
    assert_same(expected[0], actual[0], "dx")
    assert_same(expected[1] + 0.0, actual[1] + 0.0, "dscale")  # zeros of either sign


@by_rule
@pytest.mark.parametrize("name", [*FLOAT_FORMATS, "onnx"])
def test_formula_block_scales_have_the_bits_of_the_kernels(name, rule):
    powers = torch.arange(-149, 128).double().exp2().float()
    values = torch.cat([powers, powers * 1.5, powers * 1.75, powers * 1.9999999, torch.tensor([0.0, -0.0])])
    near = [values.nextafter(torch.tensor(end)) for end in (-torch.inf, torch.inf)]
    hi = torch.cat([values, *near]).clamp(0, torch.finfo(torch.float32).max)
    bounds = (0, 255) if name in FLOAT_FORMATS else (-127, 127)
    arguments = (-hi, hi, *bounds, name, True, rule, 1.0)
    assert_same_bits(*(array(m.choose_qparams(*arguments)[0]) for m in BOTH), name, rule)
    tiny = hi[hi < 1e-38]
    arguments = (-tiny, tiny, *bounds, name, True, rule, 1.0)
    assert_same_bits(*(array(m.choose_qparams(*arguments)[0]) for m in BOTH), name, rule, "tiny")


@by_rule
@pytest.mark.parametrize("name", ["e4m3fn", "e2m1", "onnx"])
def test_formula_observing_of_blocks_has_the_bits_of_the_kernels(name, rule):
    bounds = (0, 255) if name in FLOAT_FORMATS else (-127, 127)
    options = kernels.ObserverOptions(*bounds, name, True, rule, "dynamic", 0.0, 1.0, True)
    for dtype, (axis, size) in itertools.product(cases.DTYPES.values(), ((-1, 2), (1, 3))):
        x = data("contiguous", dtype).detach()
        shape = list(x.shape)
        if shape[axis] % size:
            x = x.narrow(axis, 0, shape[axis] // size * size).contiguous()
            shape = list(x.shape)
        shape[axis] //= size
        states = [(torch.zeros(shape), torch.zeros(shape)) for _ in BOTH]
        expected, actual = (m.observe_fake_quantize(x, *state, options) for m, state in zip(BOTH, states, strict=True))
        for e, a in zip((*expected, *states[0]), (*actual, *states[1]), strict=True):
            assert_same_bits(array(e), array(a), dtype, axis)
