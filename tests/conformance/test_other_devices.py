"""`formula`, which runs on other devices, has the bits of the CPU kernels, compared on CPU tensors."""

import inspect
import itertools

import numpy as np
import pytest

from fakequant import QuantSpec, _kernels
from fakequant.testing import cases
from fakequant.testing.assertions import assert_same_bits
from tensor_data import DY_LAYOUTS, LAYOUTS, SCALES, SHAPE, array, assert_same, data, elements, gradient
from thoroughness import pairs_of
from torch_bridge import to_torch, torch

formula = pytest.importorskip("fakequant._backends.torch.formula")
kernels = pytest.importorskip("fakequant._backends.torch.tensor_kernels")

pytestmark = pytest.mark.usefixtures("torch_on_one_thread")
NUMERICS = ("torch_tensor", "torch_channel", "onnx", "half_away")
BOUNDS = {"int8": cases.INT8, "uint4": (0, 15), "int24": (-(2**23), 2**23 - 1), "int32": (-(2**31), 2**31 - 1)}
# The axes along which x is split into blocks with one scale each.
CUTS = {
    "one": None,
    "first": (0,),
    "middle": (1,),
    "last": (3,),
    "all but one": (0, 1, 2),
    "tiles": "tiles",
}
MASKS = (_kernels.MASK_NONE, _kernels.MASK_PACKED, _kernels.MASK_BYTES)
by_numerics = pytest.mark.parametrize("numerics", NUMERICS)
by_cut = pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
by_bounds = pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)


def blocks(shape, cut):
    if cut is None:
        return ()
    return tuple(n // 2 if cut == "tiles" else n if a in cut else 1 for a, n in enumerate(shape))


def grids(x, cut, numerics, bounds):
    """Yields grids with every kind of zero point and, in torch's numerics, invalid scales."""
    rng = np.random.default_rng(7)
    shape = blocks(x.shape, cut)
    own = numerics in ("onnx", "half_away")
    pool = np.float32(SCALES + (() if own else (0, -0.1, np.inf, np.nan)))
    low, high = max(bounds[0], -7), min(bounds[1], 5)
    for i, dtype in enumerate([None, torch.int32, torch.int64, torch.float32, torch.float16]):
        scale = to_torch(np.asarray(rng.choice(pool[: len(SCALES)] if i == 1 else pool, shape)))
        if dtype is None:
            zero_point = None
        else:
            zero_point = to_torch(np.asarray(rng.integers(low, high, shape, endpoint=True))).to(dtype)
        if dtype in (torch.float32, torch.float16):
            if numerics != "torch_channel":
                continue
            zero_point = zero_point + 0.3
        yield kernels.Grid(scale, zero_point, *bounds, numerics)


def integer_grids(x, cut, numerics, bounds):
    """Yields the grids that the library's own functions accept."""
    for grid in grids(x, cut, numerics, bounds):
        z = grid.zero_point
        if z is None or not z.is_floating_point():
            yield grid._replace(scale=torch.where(grid.scale > 0, grid.scale, 0.1).clamp(max=SCALES[2]))


def inputs(*layouts):
    for layout, dtype in itertools.product(layouts or LAYOUTS, cases.DTYPES.values()):
        yield data(layout, dtype).resolve_neg().detach()


def test_formula_functions_have_the_signatures_of_the_kernels():
    for name, function in vars(kernels).items():
        if inspect.isfunction(function) and hasattr(formula, name) and function.__module__ == kernels.__name__:
            assert inspect.signature(getattr(formula, name)) == inspect.signature(function), name
    assert {"fake_quantize", "learned_backward", "observe_fake_quantize"} <= vars(formula).keys()


@pytest.mark.parametrize(("bounds", "cut", "numerics"), pairs_of([*BOUNDS.values()], [*CUTS.values()], [*NUMERICS]))
def test_formula_forward_and_masks_have_the_bits_of_the_kernels(numerics, cut, bounds):
    for x in inputs("contiguous", "channels last", "expanded"):
        for grid, kind in itertools.product(grids(x, cut, numerics, bounds), MASKS):
            expected, actual = (m.fake_quantize(x, grid, kind) for m in (kernels, formula))
            assert_same(expected[0], actual[0], "y", x.dtype, grid)
            assert (expected[1] is None) == (actual[1] is None)
            if expected[1] is not None:
                assert_same(expected[1], actual[1], "mask", x.dtype, grid)


def masks_and_gradients(layout):
    """Yields gradients of every layout and dtype with a mask as bytes, and as bits in two orders."""
    like = LAYOUTS[layout](elements(SHAPE, np.float32)).resolve_neg().detach()
    mask = torch.empty_like(like, dtype=torch.bool).copy_(like > 0)
    order = kernels.order_of(mask)
    forms = (mask, None), (formula.pack_bits(mask, order), order), (formula.pack_bits(mask, None), None)
    for dtype, dy_layout, form in itertools.product(cases.DTYPES.values(), DY_LAYOUTS, forms):
        yield gradient(mask, dy_layout, dtype).resolve_neg(), *form


@pytest.mark.parametrize("layout", LAYOUTS)
def test_formula_backward_has_the_bits_of_the_kernels(layout):
    for dy, mask, order in masks_and_gradients(layout):
        for multiply in (True, False):
            expected, actual = (m.mask_backward(dy, mask, order, multiply) for m in (kernels, formula))
            assert_same_bits(array(expected), array(actual), dy.dtype, mask.dtype, order, multiply)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_formula_backward_has_the_strides_of_the_kernels(layout):
    for dy, mask, order in masks_and_gradients(layout):
        expected, actual = (m.mask_backward(dy, mask, order, True) for m in (kernels, formula))
        assert expected.stride() == actual.stride(), (dy.stride(), mask.dtype, order)


@by_cut
@by_numerics
def test_formula_learned_gradients_are_close_to_those_of_the_kernels(numerics, cut):
    """Sums are only close, because the three roundings of each term happen in another order."""
    for x, bounds in itertools.product(inputs("contiguous", "channels last"), (cases.INT8, BOUNDS["int24"])):
        hostile = gradient(x, "axes reversed", array(x).dtype)
        dy = torch.nan_to_num(hostile, 1, 2, -3)
        for grid in integer_grids(x, cut, numerics, bounds):
            expected, actual = (m.learned_backward(hostile, x, grid, 0.25) for m in (kernels, formula))
            assert_same(expected[0], actual[0], "dx", x.dtype, grid)
            expected, actual = (m.learned_backward(dy, x, grid, 0.25) for m in (kernels, formula))
            _, *terms = formula.learned_terms(x, grid)
            for name, e, a, term in zip(("dscale", "dzero_point"), expected[1:], actual[1:], terms, strict=True):
                assert (e.shape, e.dtype) == (a.shape, a.dtype)
                magnitude = formula.block_sums((dy.double() * term.double()).abs(), grid.scale.double())
                info = torch.finfo(term.dtype)
                slack = 3 * info.eps * magnitude + x.numel() * info.smallest_normal
                far = (e.double() - a.double()).abs() > slack
                assert not far.any(), (name, x.dtype, grid)


CODES = [(8, True), (4, True), (4, False), (2, True), (16, False), (24, True)]


def assert_same_codes(x, grid, bits, signed):
    dtype = getattr(torch, QuantSpec(bits=bits, signed=signed, symmetric=False).storage)
    q = kernels.quantize(x, grid, dtype)
    assert_same(q, formula.quantize(x, grid, dtype), "codes", x.dtype, grid)
    assert_same(*(m.dequantize(q, grid, x.dtype) for m in (kernels, formula)), "values", x.dtype, grid)
    if bits in (2, 4):
        packed, same = (m.quantize_packed(x, grid, bits) for m in (kernels, formula))
        assert_same(packed, same, "packed", x.dtype, grid)
        values = (m.dequantize_packed(packed, grid, x.shape, bits, x.dtype) for m in (kernels, formula))
        assert_same(*values, "values of packed codes", x.dtype, grid)


def code_bounds(bits, signed):
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)


@by_cut
@by_numerics
def test_formula_codes_and_values_have_the_bits_of_the_kernels(numerics, cut):
    for x in inputs("channels last"):
        for bits, signed in CODES:
            for grid in integer_grids(x, cut, numerics, code_bounds(bits, signed)):
                assert_same_codes(x, grid, bits, signed)


@pytest.mark.parametrize(("bits", "signed"), [(31, False), (32, True)])
@by_numerics
def test_formula_codes_of_wide_ranges_have_the_bits_of_the_kernels(numerics, bits, signed):
    for x in inputs("contiguous"):
        for grid in integer_grids(x, None, numerics, code_bounds(bits, signed)):
            assert_same_codes(x, grid, bits, signed)


def assert_same_values(expected, actual, *names):
    """Compares parameters without strides, which are arbitrary for axes of length 1."""
    for e, a in zip(expected, actual, strict=True):
        assert_same_bits(array(e), array(a), *names)


by_place = pytest.mark.parametrize(
    "cut", [c for c in CUTS.values() if c != "tiles"], ids=[c for c in CUTS if c != "tiles"]
)


@by_place
def test_formula_ranges_have_the_bits_of_the_kernels(cut):
    for x in inputs():
        for values in (x + 0.0, x[:, :0]):
            shape = blocks(values.shape, cut)
            assert_same_values(*(m.min_max(values, shape) for m in (kernels, formula)), x.dtype)


def test_formula_ranges_end_in_positive_zeros_as_in_the_kernels():
    zeros = torch.full((4,), -0.0)
    assert_same_values(*(m.min_max(zeros, ()) for m in (kernels, formula)))


@by_bounds
@pytest.mark.parametrize("symmetric", [False, True])
def test_formula_qparams_have_the_bits_of_the_kernels(bounds, symmetric):
    pool = elements((4000,), np.float32)
    pool = torch.cat([pool[pool.isfinite()], torch.tensor([0.0, -0.0, 3.4e38, -3.4e38, 1e-45])])
    ends = pool[torch.randint(len(pool), (2, 50, 40), generator=torch.Generator().manual_seed(0))]
    ends[:, 0, 0] = torch.tensor([-3e38, 3e38])  # wider than float32
    for eps in (1.1920929e-07, 1e-30, 0.5):
        arguments = ends.amin(0), ends.amax(0), *bounds, "onnx", symmetric, "any", eps
        assert_same(*(m.choose_qparams(*arguments) for m in (kernels, formula)), eps)


@pytest.mark.parametrize(
    ("update", "cut", "numerics"),
    pairs_of(["moving_average", "min_max", "dynamic"], [c for c in CUTS.values() if c != "tiles"], [*NUMERICS]),
)
def test_formula_observing_has_the_bits_of_the_kernels_after_every_step(update, numerics, cut):
    for layout, dtype in itertools.product(("contiguous", "channels last", "sliced"), cases.DTYPES.values()):
        states = []
        for step in range(3):
            x = data(layout, dtype, seed=step)
            if step == 0:
                x = torch.where(x.abs() < 1e4, x, torch.tensor(0.3, dtype=x.dtype))
                inf = torch.full(blocks(x.shape, cut), np.inf)
                states = [(inf.clone(), -inf) for _ in range(2)]
            is_symmetric = numerics == "onnx"
            options = kernels.ObserverOptions(*cases.INT8, numerics, is_symmetric, "any", update, 0.3, 1e-7, True)
            expected, actual = (
                m.observe_fake_quantize(x, *state, options) for m, state in zip((kernels, formula), states, strict=True)
            )
            assert_same(expected[:2], actual[:2], layout, dtype, step)
            assert_same_values(expected[2:], actual[2:], layout, dtype, step)
            assert_same_values(*states, "state", layout, dtype, step)
