"""The ranges of zeros, constants, one-sided, tiny and huge values, in every dtype."""

import copy
import math

import numpy as np
import pytest

from fakequant.testing.assertions import assert_same_state
from observer_cases import (
    ALL,
    BINNED,
    INT4,
    INT8,
    LARGEST,
    OBSERVING,
    RUNNING,
    SEARCHES,
    UINT4,
    UINT8,
    assert_same_range,
    bell,
    by,
    range_of,
    state_after,
)

torch = pytest.importorskip("torch")

from fakequant import QuantSpec, choose_qparams, observe_fake_quantize  # noqa: E402
from fakequant._backends.blocks import blocks_of  # noqa: E402
from fakequant.observers import MSE, Dynamic, Entropy, Histogram, MinMax, MovingAverage, Percentile  # noqa: E402

INF, NAN = math.inf, math.nan

# --- zeros, constants, one-sided data ---------------------------------------------------------------

SPECS = (INT8, QuantSpec(narrow_range=True), QuantSpec(symmetric=False), UINT8)


# 32 candidates fill whole vector registers, on which torch's maximum of +0 and -0 depends.
@by({**OBSERVING, "Histogram": Histogram(steps=32, bins=64), "Entropy": Entropy(32, bins=64), "MSE": MSE(32)})
@pytest.mark.parametrize("zeros", [[0.0] * 5, [-0.0] * 5, [0.0, -0.0, 0.0]], ids=["+0", "-0", "both"])
def test_range_of_zeros_is_from_positive_zero_to_positive_zero(observer, zeros):
    for spec in SPECS:
        assert_same_range((0.0, 0.0), range_of(observer, zeros, spec=spec), spec)


CONSTANTS = {str(c): c for c in (5.0, -5.0, 0.3, -0.3, 1e30, -1e30)}


@by({**RUNNING, "Percentile": Percentile()})
@by(CONSTANTS, "c")
def test_range_of_a_constant_is_that_constant(observer, c):
    for spec in SPECS:
        assert_same_range((c, c), range_of(observer, [c] * 7, [c], spec=spec), spec)


@by({"Histogram": Histogram(steps=25, bins=1024), "Entropy": Entropy(25, bins=1024), "MSE": MSE(25)})
@by(CONSTANTS, "c")
def test_searched_range_of_a_constant_reaches_from_zero_to_it(observer, c):
    """This holds for eight bits. With fewer, a narrower range may have a nearer code."""
    for spec in SPECS:
        assert_same_range((min(c, 0.0), max(c, 0.0)), range_of(observer, [c] * 7, [c], spec=spec), spec)
    for spec in (INT4, UINT4, QuantSpec(bits=2)):
        lo, hi = range_of(observer, [c] * 7, [c], spec=spec)
        assert min(c, 0) <= lo <= hi <= max(c, 0)


ONE_SIDED = {"from near zero": (1e-3, 1.0), "from far": (2.0, 10.0), "far away": (1000.0, 1001.0)}


@by(OBSERVING)
@by(ONE_SIDED, "ends")
@pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative"])
def test_range_of_one_sided_data_is_one_sided_and_within_the_data(observer, ends, sign):
    x = torch.linspace(*ends, 101) * sign
    for spec in SPECS:
        lo, hi = range_of(observer, x, spec=spec)
        assert lo <= hi
        inner, outer = (lo, hi) if sign > 0 else (-hi, -lo)
        assert inner == 0 if observer in SEARCHES.values() else inner >= np.float32(ends[0])
        assert 0 < outer <= np.float32(ends[1])
        choose_qparams(lo, hi, spec)


@by({"Histogram": Histogram(), "MSE": MSE()})
@pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative"])
def test_search_cuts_a_one_sided_outlier_of_data_far_from_zero(observer, sign):
    x = sign * torch.cat([torch.linspace(1, 2, 5000), torch.tensor([12.0])])
    lo, hi = range_of(observer, x, spec=UINT4)
    assert 1.5 < (hi if sign > 0 else -lo) < 12


@by(RUNNING)
@pytest.mark.parametrize(("lo", "hi"), [(0.25, 3.0), (-3.0, -0.25), (-0.5, 0.125)])
def test_running_range_of_one_tensor_is_its_minimum_and_maximum(observer, lo, hi):
    assert_same_range((lo, hi), range_of(observer, [lo, hi, (lo + hi) / 2]))


# --- running ranges ---------------------------------------------------------------------------------

BATCHES = ([-1.0, 2.0], [0.5, 0.75], [-4.0, 1.0], [-0.1, 3.0])


def test_min_max_range_never_shrinks():
    assert_same_range((-4, 3), range_of(MinMax(), *BATCHES))
    assert_same_range((0.5, 0.75), range_of(MinMax(), BATCHES[1]))


def test_dynamic_returns_the_range_of_the_latest_tensor():
    assert_same_range((np.float32(-0.1), 3), range_of(Dynamic(), *BATCHES))


@pytest.mark.parametrize("constant", [0.01, 0.1, 1 / 3, 0.5, 1.0])
def test_moving_average_is_float32_and_starts_with_the_first_batch(constant):
    lo, hi = (np.float32(v) for v in BATCHES[0])
    c = np.float32(constant)
    for batch in BATCHES[1:]:
        lo, hi = lo + c * (np.float32(batch[0]) - lo), hi + c * (np.float32(batch[1]) - hi)
    assert_same_range((lo, hi), range_of(MovingAverage(constant), *BATCHES))


def test_moving_average_of_a_channel_starts_with_its_first_finite_value():
    spec = QuantSpec(axis=0)
    lo, hi = range_of(MovingAverage(0.5), [[1.0, 3.0], [NAN, NAN]], [[1.0, 5.0], [7.0, 9.0]], spec=spec)
    assert (lo.tolist(), hi.tolist()) == ([1, 7], [4, 9])


@pytest.mark.parametrize("constant", [0.01, 0.5, 1.0])
def test_moving_average_of_huge_values_is_finite(constant):
    for batches in (([-3e38], [3e38]), ([3e38], [-3e38]), ([-3e38, 3e38], [3e38])):
        lo, hi = range_of(MovingAverage(constant), *batches)
        assert np.isfinite([lo, hi]).all()
        assert -3.0001e38 <= lo <= hi <= 3.0001e38


@by(RUNNING)
@pytest.mark.parametrize("where", [{}, dict(axis=0), dict(axis=1, group_size=4)], ids=["tensor", "channel", "group"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_update_gives_the_range_of_the_fused_kernel(observer, where, dtype):
    spec = QuantSpec(**where)
    batches = [bell(4, 8, seed=i, dtype=dtype) * (1, 30, 0.01)[i] for i in range(3)]
    if dtype == torch.float64:
        batches[0][0, :2] = torch.tensor([-1e300, 1e-320])
        batches += [torch.full((4, 8), v, dtype=dtype) for v in (-1e-320, 1e300)]
    if dtype != torch.float16:  # the step from one end of float32 to the other overflows, but its result does not
        batches += [torch.full((4, 8), v, dtype=dtype) for v in (-3e38, 3e38, -3e38, 1.0)]
    state = observer.init(blocks_of((4, 8), spec).parameters)
    fused = copy.deepcopy(state)
    for step, x in enumerate(batches):
        x[:, -1] = NAN
        count = observer.update(state, x, spec)
        result = observe_fake_quantize(
            x, spec, *fused.values(), update=observer._in_kernel.update, averaging_constant=observer._in_kernel.constant
        )
        assert_same_state(fused, state, step)
        assert count == result.nonfinite


# --- dtypes -----------------------------------------------------------------------------------------


@by(ALL)
@pytest.mark.parametrize("spec", [INT4, UINT4], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_range_does_not_depend_on_the_dtype_of_the_data(observer, spec, dtype):
    """The values are exact in every dtype. MSE computes errors in the dtype, so halves are not compared."""
    if isinstance(observer, MSE) and dtype != torch.float64:
        assert np.isfinite(range_of(observer, bell(300, dtype=dtype), spec=spec)).all()
        return
    batches = [bell(300), bell(300, seed=1) * 4]
    expected = state_after(observer, *batches, spec=spec)
    actual = state_after(observer, *(x.to(dtype) for x in batches), spec=spec)
    assert_same_state(expected, actual)
    assert_same_range(*([v.numpy() for v in observer.range(s, spec)] for s in (expected, actual)))


@by(OBSERVING)
@pytest.mark.parametrize(
    ("values", "lo", "hi"),
    [
        ([-1e300, 1e300], -LARGEST, LARGEST),
        ([-1e39, 2.0], -LARGEST, 2.0),
        ([1.0, 1e308], 1.0, LARGEST),
        ([1e300, 1e300], LARGEST, LARGEST),
        ([1e300, 1e301], LARGEST, LARGEST),
        ([-1e300, -1e300], -LARGEST, -LARGEST),
        ([-3.4028235677973366e38, 0.0], -LARGEST, 0.0),
    ],
    ids=str,
)
def test_float64_values_beyond_float32_count_as_the_largest_float32(observer, values, lo, hi):
    x = torch.tensor(values, dtype=torch.float64)
    for spec in SPECS:
        state = observer.init(())
        assert observer.update(state, x, spec) == 0
        found = [end.numpy() for end in observer.range(state, spec)]
        assert -LARGEST <= found[0] <= found[1] <= LARGEST
        if observer in SEARCHES.values():  # a search may prefer a range whose last code is finite
            assert max(-found[0], found[1]) > LARGEST / 2
        else:
            assert_same_range((lo, hi), found, spec)
        choose_qparams(*found, spec)


@by({**RUNNING, "Percentile": Percentile(100.0)})
def test_range_of_float64_data_is_rounded_to_float32(observer):
    x = torch.tensor([-0.1, 0.7], dtype=torch.float64)
    assert_same_range((np.float32(-0.1), np.float32(0.7)), range_of(observer, x))


@by(OBSERVING)
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spec", [INT4, UINT4], ids=str)
def test_range_does_not_depend_on_torchs_default_dtype(observer, default, spec):
    x = bell(500)
    expected = range_of(observer, x, x * 1.7, spec=spec)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        actual = range_of(observer, x, x * 1.7, spec=spec)
    finally:
        torch.set_default_dtype(before)
    assert_same_range(expected, actual)


# --- tiny and huge values ---------------------------------------------------------------------------


@by(OBSERVING)
@pytest.mark.parametrize(
    "values",
    [
        [1e-45, -1e-45], [1e-45], [-1e-45], [1e-45, 1e-38], [1e-39, -2e-39], [1e-45, 3e38], [-3e38, 1e-45],
        [3e38, -3e38], [LARGEST, -LARGEST], [LARGEST], [-LARGEST], [-LARGEST, 1.0], [2.0**127, -(2.0**127)],
    ],
    ids=str,
)  # fmt: skip
def test_tiny_and_huge_values_have_a_range_within_them_and_a_usable_scale(observer, values):
    top = np.float32(max(map(abs, values)))
    for spec in SPECS:
        lo, hi = range_of(observer, values, spec=spec)
        assert -top <= lo <= hi <= top, spec
        if observer not in SEARCHES.values():
            assert np.float32(min(values)) <= lo <= hi <= np.float32(max(values)), spec
        scale, zero_point = choose_qparams(lo, hi, spec)
        assert 0 < scale < INF
        assert spec.qmin <= zero_point <= spec.qmax


@by(OBSERVING)
@pytest.mark.parametrize("spec", [INT4, UINT4], ids=str)
@pytest.mark.parametrize("power", [-12, 20, 100, 122])
def test_scaling_data_by_a_power_of_two_scales_the_range(observer, spec, power):
    """Powers of two are exact, so the same candidate wins. At 2^-12 the scale is still above its minimum."""
    x = bell(400)
    factor = np.float32(2.0**power)
    lo, hi = range_of(observer, x, x * 0.5, spec=spec)
    with np.errstate(over="ignore"):
        assert_same_range((lo * factor, hi * factor), range_of(observer, x * factor, x * 0.5 * factor, spec=spec))


@by(SEARCHES)
@pytest.mark.parametrize("spec", [INT8, INT4, UINT8, UINT4, QuantSpec(narrow_range=True)], ids=str)
@pytest.mark.parametrize("top", [3.2e38, 3.4e38, LARGEST], ids=str)
def test_search_keeps_the_range_where_outer_codes_overflow(observer, spec, top):
    """A candidate whose last code overflows has infinite error, even in empty bins."""
    lo, hi = range_of(observer, [-top, top], spec=spec)
    assert lo <= -top / 2
    assert hi >= top / 2


@pytest.mark.parametrize("norm", [1.0, 2.4, 4.0, 12.0])
def test_histogram_range_scales_with_the_data_for_every_norm(norm):
    x, factor = bell(400), np.float32(2.0**100)
    observer = Histogram(norm, steps=20, bins=256)
    lo, hi = range_of(observer, x, spec=INT4)
    assert_same_range((lo * factor, hi * factor), range_of(observer, x * factor, spec=INT4))


@by({**RUNNING, "Percentile": Percentile(97.0, bins=256), "Histogram": BINNED["Histogram"], "MSE": SEARCHES["MSE"]})
def test_negated_data_has_the_negated_range(observer):
    spec = QuantSpec(bits=4, narrow_range=True)
    x = torch.cat([bell(400), torch.tensor([7.0, 3.0])])
    lo, hi = range_of(observer, x, spec=spec)
    assert_same_range((-hi, -lo), range_of(observer, -x, spec=spec))
