"""The fused observer has torch's bits in its results and its state after every step."""

import functools

import numpy as np
import pytest

from fakequant import torch_ops
from fakequant.testing import cases
from fakequant.testing.assertions import assert_same_bits
from torch_bridge import torch

pytestmark = pytest.mark.usefixtures("machine")
TORCH, OURS = torch._fused_moving_avg_obs_fq_helper, torch_ops.fused_moving_avg_obs_fq_helper
RANGES = [r for r in cases.ranges(31) if r[0] < r[1]] + [(5, 300), (-300, -5), (3, 3), (-(2**31), -1)]


def outcome(function, arguments):
    """Returns the results of a call as arrays, or the message of its exception."""
    try:
        results = function(*arguments)
    except RuntimeError as error:
        return str(error)
    return [np.asarray(r) for r in (results if isinstance(results, tuple) else (results,))]


def to_torch(arguments):
    return [torch.from_numpy(a.copy()) if isinstance(a, np.ndarray) else a for a in arguments]


def assert_same(expected, actual, *what):
    if isinstance(expected, str) or isinstance(actual, str):
        assert actual == expected, what
        return
    for i, (e, a) in enumerate(zip(expected, actual, strict=True)):
        try:
            assert_same_bits(e, a, f"result {i}")
        except AssertionError as error:
            raise AssertionError(f"{error} for {what}") from None


def fresh_state(n):
    infinite = np.full(n, np.inf, np.float32)
    return [infinite, -infinite, np.ones(n, np.float32), np.zeros(n, np.int32)]


def awkward_rows(rng, rows, levels):
    """Returns rows with ordinary, one-sided, zero or extreme ends, or a scale near the smallest, 6.1e-5."""
    with np.errstate(all="ignore"):
        wild = (np.exp(rng.uniform(-103, 88, (rows, 2))) * rng.choice([-1, 1], (rows, 2))).astype(np.float32)
        ordinary = (rng.standard_normal((rows, 2)) * 10.0 ** rng.integers(-8, 4, (rows, 1))).astype(np.float32)
        landmarks = rng.choice(np.float32([0.0, -0.0, 1e-45, -1e-45, 3.4e38, 1, np.inf, -np.inf]), (rows, 2))
        factor = rng.choice([1, 0.5, 2, 0.999, 1.001, 1e-3, 1e-30], rows)
        width = (6.1e-5 * max(levels, 1) * factor).astype(np.float32)
        part = rng.choice(np.float32([0, 1, 0.5, 0.25, 1 / 3]), rows)
        tiny = np.stack([-width * part, cases.neighbours(width * (1 - part), rng.integers(-3, 4))], axis=1)
        tiny[~np.isfinite(tiny)] = 0
    x = np.choose(rng.choice(4, (rows, 1), p=[0.2, 0.4, 0.2, 0.2]), [wild, ordinary, landmarks, tiny])
    one_sided = rng.random(rows) < 0.2
    x[one_sided] = np.abs(x[one_sided])
    return np.where(rng.random((rows, 1)) < 0.2, -x, x).astype(np.float32)


@functools.cache
def torch_steps(bounds, symmetric, per_row):
    """Returns steps (x and switches, options, torch's outcome, the state after it)."""
    rng = np.random.default_rng(abs(bounds[0]) % 1000 + symmetric)
    n = 24 if per_row else 1
    state, steps = to_torch(fresh_state(n)), []
    for step in range(8):
        x = awkward_rows(rng, n, bounds[1] - bounds[0])
        if step == 7:
            x[rng.integers(n), 0] = np.nan  # in the last step, because NaN stays in the state
        x = np.concatenate([x, x * np.float32(0.3)], axis=1)
        switches = [np.int64([on]) for on in ((1, 0) if step == 5 else (0, 1) if step == 6 else (1, 1))]
        constant = (0.01, 0.1, 1 / 3, 1.0, 0.5)[step % 5]
        options = constant, *bounds, 0 if per_row else -1, per_row, symmetric
        expected = outcome(TORCH, [*to_torch([x, *switches]), *state, *options])
        steps.append(((x, *switches), options, expected, [s.numpy().copy() for s in state]))
    return steps


@pytest.mark.parametrize("per_row", [False, True], ids=["per_tensor", "per_row"])
@pytest.mark.parametrize("symmetric", [False, True], ids=["affine", "symmetric"])
def test_the_fused_observer_has_torchs_results_and_state_after_every_step(symmetric, per_row):
    refused = 0
    for bounds in RANGES:
        state = fresh_state(24 if per_row else 1)
        for arrays, options, expected, expected_state in torch_steps(bounds, symmetric, per_row):
            actual = outcome(OURS, [*arrays, *state, *options])
            assert_same(expected, actual, bounds, arrays[0])
            assert_same(expected_state, state, bounds, arrays[0])
            refused += isinstance(expected, str)
    # A row with NaN gets a zero point that is refused, after the state was written.
    assert (refused > 0) == per_row


@pytest.mark.parametrize("per_row", [False, True], ids=["per_tensor", "per_row"])
def test_the_fused_observer_has_torchs_results_on_large_inputs(per_row):
    rng = np.random.default_rng(4)
    for shape in ((3, 4096), (70, 1000), (2, 40_000), (40_000, 2)):
        x = (rng.standard_normal(shape) * 3).astype(np.float32)
        n, on = len(x) if per_row else 1, np.int64([1])
        state = fresh_state(n)
        expected_state = to_torch(state)
        for step in range(2):
            options = 0.1, -128, 127, 0, per_row, True
            flags = [on, on * step]  # the first step only observes
            expected = outcome(TORCH, [*to_torch([x, *flags]), *expected_state, *options])
            assert_same(expected, outcome(OURS, [x, *flags, *state, *options]))
            assert_same([s.numpy() for s in expected_state], state, shape)
            x = x * np.float32(1.7)


@pytest.mark.parametrize("per_row", [False, True], ids=["per_tensor", "per_row"])
def test_the_fused_observer_keeps_the_sign_of_the_first_zero_as_torch_does(per_row):
    """Beyond 32768 elements torch's choice between zeros of both signs depends on its threads."""
    rng = np.random.default_rng(9)
    flags = np.int64([1]), np.int64([0])
    options = 0.01, 0, 255, 0 if per_row else -1, per_row, False
    for n in [*range(1, 70), 255, 256, 1000, 32767, 32768]:
        for share in (0.03, 0.9):
            x = rng.uniform(1, 2, (2, n)).astype(np.float32) * rng.choice(np.float32([1, -1]))
            x[:, rng.integers(n)] = -0.0
            zeros = rng.random((2, n)) < share
            x[zeros] = rng.choice(np.float32([0.0, -0.0]), zeros.sum())
            x = x if per_row else x[0]
            for a in (x, np.asfortranarray(x)):  # the order of the axes counts, not that of the memory
                state = fresh_state(len(a) if per_row else 1)
                expected = to_torch(state)
                TORCH(*to_torch([a, *flags]), *expected, *options)
                OURS(a, *flags, *state, *options)
                assert_same([s.numpy() for s in expected], state, n, share)


def test_ranges_beyond_int32_wrap_in_the_fused_observer_as_in_torch():
    x, on = np.float32([-1.5, 0.25, 3.0]), np.int64([1])
    for bounds in ((-(2**31), 2**31 - 1), (0, 2**32 - 1), (-(2**40), 2**40 + 5), (-5, 2**31 - 1), (-(2**31), 5)):
        for symmetric in (False, True):
            state = fresh_state(1)
            expected_state = to_torch(state)
            options = 0.01, *bounds, -1, False, symmetric
            expected = outcome(TORCH, [*to_torch([x, on, on]), *expected_state, *options])
            actual = outcome(OURS, [x, on, on, *state, *options])
            assert_same(expected, actual, bounds)
            if not isinstance(expected, str):
                assert_same([s.numpy() for s in expected_state], state, bounds)


@pytest.mark.parametrize("kinds", [("float32", "int64"), ("float64", "float32"), ("float16", "uint8")], ids=str)
def test_the_fused_observer_rounds_scale_and_zero_point_to_their_dtypes(kinds):
    x, on = (np.random.default_rng(2).standard_normal(50) * 3).astype(np.float32), np.int64([1])
    state = [a.astype(kind) for a, kind in zip(fresh_state(1), ("float32", "float32", *kinds), strict=True)]
    expected_state = to_torch(state)
    options = 0.01, 0, 255, -1, False, False
    expected = outcome(TORCH, [*to_torch([x, on, on]), *expected_state, *options])
    assert_same(expected, outcome(OURS, [x, on, on, *state, *options]))
    assert_same([s.numpy() for s in expected_state], state)
    # Per row a float zero point also rounds differently.
    for zero_dtype in ("float32", "float16"):
        state = [*fresh_state(5)[:3], np.zeros(5, zero_dtype)]
        expected_state = to_torch(state)
        arrays, options = [x.reshape(5, 10), on, on], (0.01, 0, 255, 0, True, False)
        expected = outcome(TORCH, [*to_torch(arrays), *expected_state, *options])
        assert_same(expected, outcome(OURS, [*arrays, *state, *options]))
        assert_same([s.numpy() for s in expected_state], state)


@pytest.mark.parametrize("kind", ["float64", "float16"])
def test_the_fused_observer_accepts_every_float_dtype_and_axis_when_off(kind):
    x = (np.random.default_rng(2).standard_normal((3, 4, 5)) * 3).astype(kind)
    flags = np.int64([0]), np.int64([1])
    for axis, per_row in ((-1, False), (0, True), (1, True), (2, True)):
        n = x.shape[axis] if per_row else 1
        state = [np.linspace(-1, -3, n), np.linspace(1, 5, n), np.ones(n), np.zeros(n)]
        state = [a.astype(k) for a, k in zip(state, ("float32",) * 3 + ("int32",), strict=True)]
        expected_state = to_torch(state)
        options = 0.01, -8, 7, axis, per_row, False
        expected = outcome(TORCH, [*to_torch([x, *flags]), *expected_state, *options])
        assert_same(expected, outcome(OURS, [x, *flags, *state, *options]), axis)
        assert_same([s.numpy() for s in expected_state], state, axis)


def empty_state():
    return [np.empty(0, t) for t in (np.float32, np.float32, np.float32, np.int32)]


@pytest.mark.parametrize("switches", [(1, 1), (1, 0), (0, 0)])
def test_the_fused_observer_accepts_empty_state_per_row(switches):
    x = np.linspace(-1, 2, 12, dtype=np.float32).reshape(3, 4)
    on = [np.array([s]) for s in switches]
    ours, theirs = empty_state(), [torch.from_numpy(a).clone() for a in empty_state()]
    expected = TORCH(torch.from_numpy(x), *map(torch.from_numpy, on), *theirs, 0.01, -128, 127, 0, True, True)

    actual = OURS(x, *on, *ours, 0.01, -128, 127, 0, True, True)

    for e, a in zip(expected, actual, strict=True):
        assert_same_bits(e, a)
    written = 4 if switches[1] else 2  # torch leaves the rest uninitialized
    for e, a in zip(theirs[:written], ours[:written], strict=True):
        assert_same_bits(e, a)


def test_a_refused_call_leaves_the_fused_observers_state_unchanged():
    x, on = np.ones((3, 4), np.float32), np.array([1])
    state = empty_state()
    with pytest.raises(RuntimeError, match="quant_min"):
        OURS(x, on, on, *state, 0.01, 127, -128, 0, True, False)
    assert [a.size for a in state] == [0] * 4

    # Arrays that are not empty cannot be resized, because views of them may exist.
    state[2] = np.ones(1, np.float32)
    with pytest.raises(RuntimeError, match=r"`scale` of shape \(1,\) cannot be resized"):
        OURS(x, on, on, *state, 0.01, -128, 127, 0, True, False)
    assert [a.size for a in state] == [0, 0, 1, 0]

    frozen = [
        np.full(1, np.inf, np.float32),
        np.full(1, -np.inf, np.float32),
        np.ones(1, np.float32),
        np.zeros(1, np.int32),
    ]
    frozen[2].flags.writeable = False
    with pytest.raises(RuntimeError, match="`scale` is updated in place and must be writeable"):
        OURS(x, on, on, *frozen, 0.01, -128, 127, -1, False, False)
    assert np.isinf(frozen[0]).all()
