"""Ranges, qparams, observing and `FakeQuantizer` have the same bits on tensors as on NumPy arrays."""

import itertools

import numpy as np
import pytest

import fakequant as fq
from fakequant import reference
from fakequant._backends.blocks import blocks_of
from fakequant._backends.checks import EPS
from fakequant.testing import cases
from fakequant.testing.assertions import assert_same_bits
from tensor_data import (
    BLOCKS,
    DENSE,
    LAYOUTS,
    SHAPE,
    array,
    assert_like,
    data,
    elements,
    few_rules,
    gradient,
    rules,
    unchanged as unchanged,
)
from thoroughness import pairs_of
from torch_bridge import to_numpy, to_torch, torch

pytestmark = pytest.mark.usefixtures("torch_on_one_thread")
by_layout = pytest.mark.parametrize("layout", LAYOUTS)
by_blocks = pytest.mark.parametrize("where", BLOCKS.values(), ids=BLOCKS)
KINDS = {
    "int8": dict(bits=8),
    "int4": dict(bits=4),
    "uint2": dict(bits=2, signed=False),
    "uint16": dict(bits=16, signed=False),
    "int24": dict(bits=24),
}


def packbits(inside):
    return np.packbits(inside, bitorder="little")


@by_blocks
@by_layout
def test_min_max_of_tensors_equals_that_of_arrays(layout, where, unchanged):
    for dtype in cases.DTYPES.values():
        spec = fq.QuantSpec(**where)
        (x,) = unchanged(data(layout, dtype))
        expected, actual = fq.min_max(array(x), spec), fq.min_max(x, spec)
        for name in (*expected._fields, "absmax"):
            assert_same_bits(getattr(expected, name), array(getattr(actual, name)), name, dtype)
            assert not getattr(actual, name).requires_grad
        zeros = LAYOUTS[layout](torch.full(SHAPE, -0.0 if layout != "lazily negated" else 0.0, dtype=x.dtype))
        assert not np.signbit(array(fq.min_max(zeros, spec).min)).any()


NARROW = dict(narrow_range=True)


@pytest.mark.parametrize("kind", [{}, NARROW, *({"symmetric": False, **k} for k in KINDS.values())], ids=str)
def test_choose_qparams_of_tensors_equals_that_of_arrays(kind):
    spec = fq.QuantSpec(**kind)
    pool = np.concatenate([np.float32([0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38]), elements((300,), np.float32).numpy()])
    ends = np.random.default_rng(6).choice(pool[np.isfinite(pool)], (2, 40, 10))
    ends[:, 0, 0] = -3e38, 3e38  # wider than float32
    lo, hi = ends.min(0), ends.max(0)
    for low, high in (
        (lo, hi),
        (lo.T, hi.T),
        (lo[0], hi.max(0)),
        (lo[:1], np.maximum(hi, lo[:1])),
        (lo[0, 0], hi[0, 0]),
    ):
        for eps in (EPS, 1e-30, 0.5):
            expected = fq.choose_qparams(low, high, spec, eps=eps)
            tensors = [torch.from_numpy(np.asarray(v)) for v in (low, high)]
            for form in (tensors, (tensors[0].double(), high), (low, tensors[1].clone().requires_grad_())):
                for e, a in zip(expected, fq.choose_qparams(*form, spec, eps=eps), strict=True):
                    assert_same_bits(e, array(a))
                    assert not a.requires_grad


@pytest.mark.parametrize("spec", [fq.QuantSpec(), fq.QuantSpec(symmetric=False, axis=-1, group_size=2)], ids=str)
def test_choose_qparams_takes_a_range_for_both_ends(spec):
    x = elements(SHAPE, np.float32)
    x = torch.where(x.isfinite(), x, 0)
    for values, kind in ((x, torch.Tensor), (x.numpy(), np.ndarray)):
        seen = fq.min_max(values, spec)
        expected = fq.choose_qparams(seen.min, seen.max, spec, eps=1e-3)
        for found in (fq.choose_qparams(seen, spec, eps=1e-3), fq.choose_qparams(seen, spec=spec, eps=1e-3)):
            for e, a in zip(expected, found, strict=True):
                assert type(a) is kind
                assert_same_bits(np.asarray(e), np.asarray(a))
        with pytest.raises(TypeError, match="A Range has both ends"):
            fq.choose_qparams(seen, seen.max, spec)
        for arguments in ((seen,), (seen, 8), (seen.min, spec), (seen.min, seen.max)):
            with pytest.raises(TypeError, match="`spec` must be a QuantSpec"):
                fq.choose_qparams(*arguments)


def steps(layout, dtype):
    """Yields finite values first, to give every block a range, then NaN, infinities and huge values."""
    for seed in range(4):
        x = elements(SHAPE, dtype, seed)
        if seed < 2:
            x = torch.where(x.abs() < 1e4, x, torch.tensor(seed + 0.3, dtype=x.dtype))
        yield LAYOUTS[layout](x)


@pytest.mark.parametrize(
    ("update", "layout", "blocks"), pairs_of(["moving_average", "min_max", "dynamic"], LAYOUTS, BLOCKS)
)
def test_observe_fake_quantize_of_tensors_equals_that_of_arrays_after_every_step(update, layout, blocks, unchanged):
    where = BLOCKS[blocks]
    for spec, dtype in itertools.chain(rules(where), few_rules(where, symmetric=True, bits=4)):
        for i, x in enumerate(steps(layout, dtype)):
            unchanged(x)
            if i == 0:
                parameters = blocks_of(tuple(x.shape), spec).parameters or (1,)
                state = [np.full(parameters, v, np.float32) for v in (np.inf, -np.inf)]
                tensors = [to_torch(v) for v in state]
                addresses = [t.data_ptr() for t in tensors]
            form = None if i == 2 else "packed"
            expected = fq.observe_fake_quantize(
                array(x), spec, *state, update=update, averaging_constant=0.3, mask="bool"
            )

            actual = fq.observe_fake_quantize(x, spec, *tensors, update=update, averaging_constant=0.3, mask=form)

            assert_like(expected.y, actual.y, x, "y", i, spec, dtype)
            assert (actual.mask is None) == (form is None)
            if form is not None:
                assert_same_bits(packbits(expected.mask), to_numpy(actual.mask), "mask", i, spec, dtype)
            assert_same_bits(expected.scale, array(actual.scale), "scale", i, spec, dtype)
            assert_same_bits(expected.zero_point, array(actual.zero_point), "zero point", i, spec, dtype)
            assert actual.nonfinite == expected.nonfinite
            for e, a in zip(state, tensors, strict=True):
                assert_same_bits(e, to_numpy(a), "running range", i, spec, dtype)
        assert addresses == [t.data_ptr() for t in tensors]


def test_observe_fake_quantize_updates_a_running_range_that_is_a_view():
    spec = fq.QuantSpec(axis=1, symmetric=False)
    x = next(steps("channels last", np.float32))
    plain = torch.full((6,), np.inf), torch.full((6,), -np.inf)
    table = torch.stack(plain, dim=1)
    fq.observe_fake_quantize(x, spec, *plain)
    fq.observe_fake_quantize(x, spec, table[:, 0], table[:, 1])
    assert table.tolist() == torch.stack(plain, dim=1).tolist()


@pytest.mark.parametrize("layout", [*DENSE, pytest.param("lazily negated")])
def test_observe_fake_quantize_increments_the_version_of_the_running_range(layout):
    state = torch.full((1,), np.inf), torch.full((1,), -np.inf)
    for x in steps(layout, np.float32):
        before = [t._version for t in state]
        fq.observe_fake_quantize(x, fq.QuantSpec(), *state)
        assert all(t._version > b for t, b in zip(state, before, strict=True))


CONFIGS = [fq.FakeQuantConfig.of(bits=b, symmetric=s) for b, s in ((4, True), (8, False), (24, False))]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@by_layout
def test_fake_quantizer_on_tensors_equals_that_on_arrays(layout, config, unchanged):
    for numerics, dtype in itertools.product(reference.NUMERICS, cases.DTYPES.values()):
        (x,) = unchanged(data(layout, dtype))
        on_arrays, on_tensors = (fq.FakeQuantizer(config, numerics=numerics) for _ in range(2))
        for quantizer, values in ((on_arrays, array(x)), (on_tensors, x.resolve_neg())):
            quantizer.calibrate(values[(values > -30) & (values < 20)])
        assert repr(on_tensors) == repr(on_arrays)
        expected, y = on_arrays.forward(array(x)), on_tensors.forward(x)
        assert_like(expected, y, x, "y", numerics, dtype)
        assert_like(expected, on_tensors.forward_with_calibration(x), x, "y", numerics, dtype)
        assert_same_bits(array(x), array(on_tensors.backward(x)), "dy")
        if x.requires_grad:
            dy = gradient(x, "channels last", dtype)
            (dx,) = torch.autograd.grad(y, x, dy)
            assert_same_bits(array(dy), array(dx), "dx")


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype(np.float32),
        np.dtype(np.float64),
        *(pytest.param(cases.DTYPES[d]) for d in ("bfloat16", "float16")),
    ],
    ids=str,
)
def test_backward_clamped_of_fake_quantizer_equals_that_on_arrays(dtype):
    for config, layout in itertools.product(CONFIGS, LAYOUTS):
        quantizer = fq.FakeQuantizer(config)
        quantizer.calibrate(np.float32([-7.3, 12.7]))
        bounds = [np.float32(q - quantizer.zero_point) * quantizer.scale for q in (config.qmin, config.qmax)]
        ends = np.array([*bounds, 0, 1, np.nan, np.inf, -np.inf]).astype(dtype)
        pool = np.concatenate([ends, cases.neighbours(ends, 1), cases.neighbours(ends, -1)])
        x = LAYOUTS[layout](to_torch(np.resize(pool, SHAPE)))
        dy = gradient(x, "sliced", dtype)
        assert_same_bits(quantizer.backward_clamped(array(dy), array(x)), array(quantizer.backward_clamped(dy, x)))


@pytest.mark.parametrize("x", [0.4, pytest.param(np.nan)])
def test_fake_quantizer_with_a_range_without_zero_equals_that_on_arrays(x):
    quantizer = fq.FakeQuantizer(fq.FakeQuantConfig(4, False, 3, 9))
    quantizer.calibrate(np.float32([-7.3, 12.7]))
    assert_same_bits(quantizer.forward(np.float32([x])), array(quantizer.forward(torch.tensor([x]))))


def test_fake_quantizer_calibrates_on_a_lazily_negated_tensor():
    on_arrays, on_tensors = fq.FakeQuantizer.q8(), fq.FakeQuantizer.q8()
    x = torch._neg_view(torch.tensor([1.0, -5.0]))
    on_arrays.calibrate(array(x))
    on_tensors.calibrate(x)
    assert repr(on_tensors) == repr(on_arrays)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_round_zero_point_of_tensors_equals_that_of_arrays(kind):
    spec = fq.QuantSpec(symmetric=False, **kind)
    values = np.float32([-0.5, 0.5, 1.5, 2.5, 1e9, -1e9, np.inf, -np.inf, spec.qmax + 0.5, spec.qmin - 0.5, 3])
    expected = fq.round_zero_point(values, spec)
    assert_same_bits(expected, to_numpy(fq.round_zero_point(torch.tensor(values, requires_grad=True), spec)))
    assert_same_bits(expected[-1], to_numpy(fq.round_zero_point(torch.tensor(3), spec)))


@pytest.mark.parametrize(("bits", "dtype"), [(32, "float32"), (16, "float16"), (12, "bfloat16")])
def test_round_zero_point_clamps_values_beyond_the_precision_of_their_dtype_as_for_arrays(bits, dtype):
    spec = fq.QuantSpec(bits=bits, symmetric=False)
    values = np.array([6e4, -6e4] if dtype == "float16" else [3e9, -3e9]).astype(cases.DTYPES[dtype])
    assert_same_bits(fq.round_zero_point(values, spec), to_numpy(fq.round_zero_point(to_torch(values), spec)))


def test_observe_fake_quantize_accepts_tensors_without_channels():
    empty = np.empty(0, np.float32)
    expected = fq.observe_fake_quantize(np.empty((0, 3), np.float32), fq.QuantSpec(axis=0), empty, empty)
    running = torch.empty(0), torch.empty(0)
    x = torch.empty(0, 3)
    assert_like(expected.y, fq.observe_fake_quantize(x, fq.QuantSpec(axis=0), *running).y, x)
