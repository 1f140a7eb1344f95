"""Every observer on data that is empty, not finite, zero, constant, one-sided, tiny, huge or spread over ranks."""

import copy
import dataclasses
import json
import math
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fakequant import QuantSpec, choose_qparams, observe_fake_quantize, observers  # noqa: E402
from fakequant._backends.blocks import blocks_of  # noqa: E402
from fakequant._backends.torch.process_ranks import ALONE, Ranks  # noqa: E402
from fakequant.observers import (  # noqa: E402
    MSE,
    Dynamic,
    Entropy,
    Fixed,
    Histogram,
    MinMax,
    MovingAverage,
    Observer,
    Percentile,
    from_dict,
)
from fakequant.testing.assertions import assert_same_bits  # noqa: E402

INT8 = QuantSpec()
UINT8 = QuantSpec(signed=False, symmetric=False)
INT4 = QuantSpec(bits=4)
UINT4 = QuantSpec(bits=4, signed=False, symmetric=False)
LARGEST = np.finfo(np.float32).max.item()
INF, NAN = math.inf, math.nan

RUNNING = {"MinMax": MinMax(), "MovingAverage": MovingAverage(0.3), "Dynamic": Dynamic()}
BINNED = {
    "Percentile": Percentile(99.0, bins=256),
    "Histogram": Histogram(steps=10, bins=256),
    "Entropy": Entropy(steps=10, bins=256),
}
SEARCHES = {"Histogram": BINNED["Histogram"], "Entropy": BINNED["Entropy"], "MSE": MSE(steps=10)}
WATCHING = {**RUNNING, **BINNED, "MSE": MSE(steps=10)}
REMEMBERING = {name: o for name, o in WATCHING.items() if name != "Dynamic"}
ALL = {**WATCHING, "Fixed": Fixed(-0.5, 2.0)}


def by(table, name="observer"):
    return pytest.mark.parametrize(name, table.values(), ids=table)


def each(*batches, dtype=torch.float32):
    return [torch.tensor(b, dtype=dtype) if not isinstance(b, torch.Tensor) else b for b in batches]


def watch(observer, *batches, spec=INT8, ranks=ALONE):
    """The state after the batches."""
    batches = each(*batches)
    state = observer.init(blocks_of(tuple(batches[0].shape), spec).parameters)
    for x in batches:
        observer.update(state, x, spec, ranks)
    return state


def range_of(observer, *batches, spec=INT8):
    """The range after the batches, as arrays."""
    return tuple(end.numpy() for end in observer.range(watch(observer, *batches, spec=spec), spec))


def assert_same_range(expected, actual, *names):
    for end, e, a in zip(("lo", "hi"), expected, actual, strict=True):
        assert_same_bits(np.asarray(e, np.float32), a, end, *names)


def assert_same_state(expected, actual, *names):
    assert list(expected) == list(actual)
    for name in expected:
        assert_same_bits(expected[name].numpy(), actual[name].numpy(), name, *names)


def bell(*shape, seed=0, dtype=torch.float32):
    """Values around zero with a few outliers, all of which every dtype can hold."""
    x = np.random.default_rng(seed).standard_normal(shape)
    x[abs(x) > 2] *= 3
    return torch.from_numpy(x).to(torch.bfloat16).to(torch.float16).to(dtype)


# --- nothing seen -----------------------------------------------------------------------


@by(WATCHING)
@pytest.mark.parametrize("blocks", [(), (3,), (2, 4), (0,)], ids=str)
def test_before_anything_was_seen_the_range_is_the_empty_one(observer, blocks):
    assert observer.needs_data
    for spec in (INT8, UINT8):
        lo, hi = observer.range(observer.init(blocks), spec)
        assert_same_range((np.full(blocks, INF), np.full(blocks, -INF)), (lo.numpy(), hi.numpy()))


@by(ALL)
@pytest.mark.parametrize("where", [{}, dict(axis=0), dict(axis=1, group_size=2)], ids=["tensor", "channel", "group"])
def test_the_tensors_of_a_state_stay_where_they_are(observer, where):
    spec = QuantSpec(bits=4, **where)
    state = observer.init(blocks_of((3, 8), spec).parameters)
    before = {name: (v.data_ptr(), v.shape, v.dtype, v.stride()) for name, v in state.items()}
    for factor in (1, 1000, 0.1):
        count = observer.update(state, bell(3, 8) * factor, spec)
        assert (count.dtype, count.shape, int(count)) == (torch.int64, (), 0)
        observer.range(state, spec)
    assert before == {name: (v.data_ptr(), v.shape, v.dtype, v.stride()) for name, v in state.items()}


@by(ALL)
def test_reading_the_range_changes_nothing(observer):
    state = watch(observer, bell(200))
    before = copy.deepcopy(state)
    first = observer.range(state, UINT4)
    for end, again in zip(first, observer.range(state, UINT4), strict=True):
        assert_same_bits(end.numpy(), again.numpy())
        assert end.dtype == torch.float32
    assert_same_state(before, state)


EMPTY = {"tensor": ({}, (0,)), "rows": (dict(axis=1), (0, 3)), "features": (dict(axis=0), (3, 0))}


@by(REMEMBERING)
@pytest.mark.parametrize(("where", "shape"), EMPTY.values(), ids=EMPTY)
def test_an_empty_tensor_changes_nothing(observer, where, shape):
    spec = QuantSpec(**where)
    some = bell(*(max(n, 5) if n == 0 else n for n in shape))
    state = observer.init(blocks_of(tuple(some.shape), spec).parameters)
    before = copy.deepcopy(state)
    assert observer.update(state, torch.empty(shape), spec) == 0
    assert_same_state(before, state, "first")
    observer.update(state, some, spec)
    before = copy.deepcopy(state)
    assert observer.update(state, torch.empty(shape), spec) == 0
    assert_same_state(before, state, "later")


@pytest.mark.parametrize(("where", "shape"), EMPTY.values(), ids=EMPTY)
def test_the_range_of_an_empty_tensor_at_hand_is_zero(where, shape):
    spec = QuantSpec(**where)
    state = Dynamic().init(blocks_of(shape, spec).parameters)
    for value in state.values():
        value.fill_(7)
    Dynamic().update(state, torch.empty(shape), spec)
    for value in state.values():
        assert_same_bits(np.zeros(value.shape, np.float32), value.numpy())


# --- not finite -------------------------------------------------------------------------

NONFINITE = {"NaN": [NAN], "+inf": [INF], "-inf": [-INF], "all three": [NAN, INF, -INF, NAN, -INF]}


@by(WATCHING)
@by(NONFINITE, "bad")
@pytest.mark.parametrize("spec", [INT8, UINT8], ids=str)
def test_a_value_that_is_not_finite_does_not_change_the_range(observer, bad, spec):
    first, second = bell(300), bell(301, seed=1)
    for place in ([], [0], [-1]):  # at the front and at the back: nothing starts or ends with it
        dirty = torch.cat([first, torch.tensor(bad)]) if place != [0] else torch.cat([torch.tensor(bad), first])
        dirty = dirty[torch.randperm(len(dirty), generator=torch.Generator().manual_seed(0))] if not place else dirty
        state = observer.init(())
        assert observer.update(state, dirty, spec) == len(bad)
        assert observer.update(state, second, spec) == 0
        assert_same_state(watch(observer, first, second, spec=spec), state)


@by(WATCHING)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_nor_in_another_dtype(observer, dtype):
    bad = torch.tensor([NAN, INF, -INF], dtype=dtype)
    clean = bell(100, dtype=dtype)
    state = observer.init(())
    assert observer.update(state, torch.cat([clean, bad]), INT8) == 3
    assert_same_state(watch(observer, clean), state)


@by(WATCHING)
def test_nor_in_a_channel(observer):
    spec = QuantSpec(axis=0)
    clean = bell(3, 40)
    dirty = torch.cat([clean, torch.tensor([[NAN, INF], [-INF, NAN], [INF, -INF]])], dim=1)
    state = observer.init((3,))
    assert observer.update(state, dirty, spec) == 6
    assert_same_state(watch(observer, clean, spec=spec), state)


@by(REMEMBERING)
@by(NONFINITE, "bad")
def test_a_tensor_with_nothing_finite_changes_nothing(observer, bad):
    state = observer.init(())
    before = copy.deepcopy(state)
    assert observer.update(state, torch.tensor(bad), INT8) == len(bad)
    assert_same_state(before, state, "first")
    observer.update(state, bell(50), INT8)
    before = copy.deepcopy(state)
    assert observer.update(state, torch.tensor(bad), INT8) == len(bad)
    assert_same_state(before, state, "later")


@by(NONFINITE, "bad")
def test_the_range_of_a_tensor_at_hand_with_nothing_finite_is_zero(bad):
    assert_same_range((0, 0), range_of(Dynamic(), [1.0, 2.0], bad))


@by(REMEMBERING)
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_channel_with_nothing_finite_has_no_range_and_the_others_have_theirs(observer, symmetric):
    spec = QuantSpec(axis=0, symmetric=symmetric)
    x = bell(3, 60)
    x[1] = torch.tensor([NAN, INF, -INF]).repeat(20)
    lo, hi = range_of(observer, x, spec=spec)
    assert (lo[1], hi[1]) == (INF, -INF)
    expected = range_of(observer, x[[0, 2]], spec=spec)
    assert_same_range(expected, (lo[[0, 2]], hi[[0, 2]]))


def test_a_fixed_range_looks_at_nothing():
    for x in ([NAN, INF], [5.0], [-1e30], []):
        state = Fixed(-0.5, 2.0).init((2,))
        assert Fixed(-0.5, 2.0).update(state, torch.tensor(x), INT8) == 0
        assert_same_range(([-0.5] * 2, [2.0] * 2), [v.numpy() for v in Fixed(-0.5, 2.0).range(state, INT8)])
    assert not Fixed(0, 1).needs_data


# --- zeros, constants, one side -----------------------------------------------------------

SPECS = (INT8, QuantSpec(narrow_range=True), QuantSpec(symmetric=False), UINT8)


# As many candidates as fill whole vector registers: torch's maximum of two zeros depends on that.
@by({**WATCHING, "Histogram": Histogram(steps=32, bins=64), "Entropy": Entropy(32, bins=64), "MSE": MSE(32)})
@pytest.mark.parametrize("zeros", [[0.0] * 5, [-0.0] * 5, [0.0, -0.0, 0.0]], ids=["+0", "-0", "both"])
def test_zeros_have_the_range_of_zero_to_zero_and_both_are_positive_zeros(observer, zeros):
    for spec in SPECS:
        assert_same_range((0.0, 0.0), range_of(observer, zeros, spec=spec), spec)


CONSTANTS = {str(c): c for c in (5.0, -5.0, 0.3, -0.3, 1e30, -1e30)}


@by({**RUNNING, "Percentile": Percentile()})
@by(CONSTANTS, "c")
def test_a_constant_is_its_range(observer, c):
    for spec in SPECS:
        assert_same_range((c, c), range_of(observer, [c] * 7, [c], spec=spec), spec)


@by({"Histogram": Histogram(steps=25, bins=1024), "Entropy": Entropy(25, bins=1024), "MSE": MSE(25)})
@by(CONSTANTS, "c")
def test_a_searched_range_of_a_constant_is_from_zero_to_it(observer, c):
    """With eight bits; with few of them a narrower range may have a code that is nearer."""
    for spec in SPECS:
        assert_same_range((min(c, 0.0), max(c, 0.0)), range_of(observer, [c] * 7, [c], spec=spec), spec)
    for spec in (INT4, UINT4, QuantSpec(bits=2)):
        lo, hi = range_of(observer, [c] * 7, [c], spec=spec)
        assert min(c, 0) <= lo <= hi <= max(c, 0)


ONE_SIDED = {"from near zero": (1e-3, 1.0), "from far": (2.0, 10.0), "far away": (1000.0, 1001.0)}


@by(WATCHING)
@by(ONE_SIDED, "ends")
@pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative"])
def test_the_range_of_one_sided_data_is_on_that_side_and_within_the_data(observer, ends, sign):
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
def test_an_outlier_on_one_side_is_cut_also_where_zero_is_far_away(observer, sign):
    x = sign * torch.cat([torch.linspace(1, 2, 5000), torch.tensor([12.0])])
    lo, hi = range_of(observer, x, spec=UINT4)
    assert 1.5 < (hi if sign > 0 else -lo) < 12


@by(RUNNING)
@pytest.mark.parametrize(("lo", "hi"), [(0.25, 3.0), (-3.0, -0.25), (-0.5, 0.125)])
def test_the_ends_of_one_tensor_are_its_own(observer, lo, hi):
    assert_same_range((lo, hi), range_of(observer, [lo, hi, (lo + hi) / 2]))


# --- what the running ones do --------------------------------------------------------------

BATCHES = ([-1.0, 2.0], [0.5, 0.75], [-4.0, 1.0], [-0.1, 3.0])


def test_min_max_only_ever_widens():
    assert_same_range((-4, 3), range_of(MinMax(), *BATCHES))
    assert_same_range((0.5, 0.75), range_of(MinMax(), BATCHES[1]))


def test_dynamic_returns_the_range_of_the_latest_tensor():
    assert_same_range((np.float32(-0.1), 3), range_of(Dynamic(), *BATCHES))


@pytest.mark.parametrize("constant", [0.01, 0.1, 1 / 3, 0.5, 1.0])
def test_the_average_is_taken_in_float32_and_starts_with_the_first(constant):
    lo, hi = (np.float32(v) for v in BATCHES[0])
    c = np.float32(constant)
    for batch in BATCHES[1:]:
        lo, hi = lo + c * (np.float32(batch[0]) - lo), hi + c * (np.float32(batch[1]) - hi)
    assert_same_range((lo, hi), range_of(MovingAverage(constant), *BATCHES))


def test_the_average_of_a_channel_starts_when_that_channel_does():
    spec = QuantSpec(axis=0)
    lo, hi = range_of(MovingAverage(0.5), [[1.0, 3.0], [NAN, NAN]], [[1.0, 5.0], [7.0, 9.0]], spec=spec)
    assert (lo.tolist(), hi.tolist()) == ([1, 7], [4, 9])


@pytest.mark.parametrize("constant", [0.01, 0.5, 1.0])
def test_the_average_of_huge_values_is_never_infinite(constant):
    for batches in (([-3e38], [3e38]), ([3e38], [-3e38]), ([-3e38, 3e38], [3e38])):
        lo, hi = range_of(MovingAverage(constant), *batches)
        assert np.isfinite([lo, hi]).all()
        assert -3.0001e38 <= lo <= hi <= 3.0001e38


@by(RUNNING)
@pytest.mark.parametrize("where", [{}, dict(axis=0), dict(axis=1, group_size=4)], ids=["tensor", "channel", "group"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_an_update_leaves_the_range_that_the_fused_call_leaves(observer, where, dtype):
    spec = QuantSpec(**where)
    batches = [bell(4, 8, seed=i, dtype=dtype) * (1, 30, 0.01)[i] for i in range(3)]
    if dtype == torch.float64:
        batches[0][0, :2] = torch.tensor([-1e300, 1e-320])
        batches += [torch.full((4, 8), v, dtype=dtype) for v in (-1e-320, 1e300)]
    if dtype != torch.float16:  # a step from one end of float32 to the other is not finite, its result is
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


# --- dtypes ------------------------------------------------------------------------------


@by(ALL)
@pytest.mark.parametrize("spec", [INT4, UINT4], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_dtype_changes_nothing_but_the_rounding_of_errors(observer, spec, dtype):
    """Values that every dtype holds. MSE is not compared in halves: its error is that of the dtype."""
    if isinstance(observer, MSE) and dtype != torch.float64:
        assert np.isfinite(range_of(observer, bell(300, dtype=dtype), spec=spec)).all()
        return
    batches = [bell(300), bell(300, seed=1) * 4]
    expected = watch(observer, *batches, spec=spec)
    actual = watch(observer, *(x.to(dtype) for x in batches), spec=spec)
    assert_same_state(expected, actual)
    assert_same_range(*([v.numpy() for v in observer.range(s, spec)] for s in (expected, actual)))


@by(WATCHING)
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
def test_float64_beyond_float32_counts_as_the_largest_float32(observer, values, lo, hi):
    x = torch.tensor(values, dtype=torch.float64)
    for spec in SPECS:
        state = observer.init(())
        assert observer.update(state, x, spec) == 0
        found = [end.numpy() for end in observer.range(state, spec)]
        assert -LARGEST <= found[0] <= found[1] <= LARGEST
        if observer in SEARCHES.values():  # which may prefer a range whose last code is no infinity
            assert max(-found[0], found[1]) > LARGEST / 2
        else:
            assert_same_range((lo, hi), found, spec)
        choose_qparams(*found, spec)


@by({**RUNNING, "Percentile": Percentile(100.0)})
def test_a_float64_range_is_rounded_to_float32(observer):
    x = torch.tensor([-0.1, 0.7], dtype=torch.float64)
    assert_same_range((np.float32(-0.1), np.float32(0.7)), range_of(observer, x))


@by(WATCHING)
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spec", [INT4, UINT4], ids=str)
def test_the_range_does_not_depend_on_the_default_dtype(observer, default, spec):
    x = bell(500)
    expected = range_of(observer, x, x * 1.7, spec=spec)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        actual = range_of(observer, x, x * 1.7, spec=spec)
    finally:
        torch.set_default_dtype(before)
    assert_same_range(expected, actual)


# --- granularity and layout ------------------------------------------------------------------

SHAPE = (4, 6, 2, 8)
PLACES = {
    "tensor": {},
    "channel 0": dict(axis=0),
    "channel 1": dict(axis=1),
    "channel -1": dict(axis=-1),
    "group on the last axis": dict(axis=-1, group_size=4),
    "group on axis 1": dict(axis=1, group_size=3),
    "group of the whole axis": dict(axis=3, group_size=8),
    "group of one": dict(axis=2, group_size=1),
}
LAYOUTS = {
    "transposed": lambda x: x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
    "every other": lambda x: torch.repeat_interleave(x, 2, -1)[..., ::2],
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "with an offset": lambda x: torch.cat([x.new_full((1, *x.shape[1:]), NAN), x])[1:],
    "padded": lambda x: torch.nn.functional.pad(x, (3, 2), value=INF)[..., 3:-2],
    "lazily negated": lambda x: torch._neg_view(-x),
    "requires a gradient": lambda x: x.clone().requires_grad_() * 1,
}


def blocks_in(x, spec):
    """The elements of every block, in the order of the parameters."""
    shape = blocks_of(tuple(x.shape), spec).parameters
    if spec.axis is None:
        return [x.flatten()]
    axis = spec.axis % x.dim()
    if spec.group_size is None:
        return [x.select(axis, i).flatten() for i in range(x.shape[axis])]
    size = x.shape[axis] if spec.group_size == -1 else spec.group_size
    return [
        x[tuple(slice(i * size, (i + 1) * size) if a == axis else i for a, i in enumerate(at))].flatten()
        for at in np.ndindex(*shape)
    ]


@by(WATCHING)
@by({k: v for k, v in PLACES.items() if k in ("channel 1", "group on the last axis", "group on axis 1")}, "where")
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_range_of_a_block_is_that_of_its_elements_alone(observer, where, symmetric):
    spec = QuantSpec(bits=4, symmetric=symmetric, **where)
    alone = QuantSpec(bits=4, symmetric=symmetric)
    batches = [bell(*SHAPE), bell(*SHAPE, seed=1) * 8]
    found = [end.flatten() for end in range_of(observer, *batches, spec=spec)]
    parts = list(zip(*(blocks_in(x, spec) for x in batches), strict=True))
    assert len(parts) == len(found[0])
    for i in range(0, len(parts), max(1, len(parts) // 5)):
        expected = range_of(observer, *parts[i], spec=alone)
        assert_same_range(expected, [end[i] for end in found], i)


def test_the_tensor_at_hand_per_token():
    spec = QuantSpec(axis=-1, group_size=-1)
    x = bell(3, 5, 7)
    lo, hi = range_of(Dynamic(), x * 9, x, spec=spec)
    assert lo.shape == (3, 5, 1)
    assert_same_range((x.numpy().min(-1, keepdims=True), x.numpy().max(-1, keepdims=True)), (lo, hi))


@by(WATCHING)
@by({**PLACES, "token": dict(axis=1, group_size=-1)}, "where")
def test_the_order_of_memory_does_not_matter(observer, where):
    spec = QuantSpec(bits=4, symmetric=False, **where)
    batches = bell(*SHAPE), bell(*SHAPE, seed=1) * 5
    expected = watch(observer, *batches, spec=spec)
    for name, layout in LAYOUTS.items():
        actual = watch(observer, *map(layout, batches), spec=spec)
        assert_same_state(expected, actual, name)
        assert not any(v.requires_grad for v in actual.values())


@by(WATCHING)
def test_elements_that_share_memory_count_each(observer):
    x = bell(1, 40).expand(5, 40)
    assert_same_state(watch(observer, x.contiguous()), watch(observer, x))


@by(WATCHING)
def test_a_number_without_axes(observer):
    assert_same_state(watch(observer, [0.3]), watch(observer, torch.tensor(0.3)))


@by(WATCHING)
@pytest.mark.parametrize(
    "x", [torch.arange(3), torch.tensor([True]), torch.tensor([1j])], ids=["int", "bool", "complex"]
)
def test_a_tensor_of_something_else_is_refused_and_nothing_is_learned(observer, x):
    state = watch(observer, [1.0, 2.0])
    before = copy.deepcopy(state)
    with pytest.raises(TypeError, match="must be a tensor of float32, float64, bfloat16 or float16"):
        observer.update(state, x, INT8)
    assert_same_state(before, state)


# --- tiny and huge -------------------------------------------------------------------------


@by(WATCHING)
@pytest.mark.parametrize(
    "values",
    [
        [1e-45, -1e-45], [1e-45], [-1e-45], [1e-45, 1e-38], [1e-39, -2e-39], [1e-45, 3e38], [-3e38, 1e-45],
        [3e38, -3e38], [LARGEST, -LARGEST], [LARGEST], [-LARGEST], [-LARGEST, 1.0], [2.0**127, -(2.0**127)],
    ],
    ids=str,
)  # fmt: skip
def test_tiny_and_huge_values_have_a_range_within_them_and_a_scale(observer, values):
    top = np.float32(max(map(abs, values)))
    for spec in SPECS:
        lo, hi = range_of(observer, values, spec=spec)
        assert -top <= lo <= hi <= top, spec
        if observer not in SEARCHES.values():
            assert np.float32(min(values)) <= lo <= hi <= np.float32(max(values)), spec
        scale, zero_point = choose_qparams(lo, hi, spec)
        assert 0 < scale < INF
        assert spec.qmin <= zero_point <= spec.qmax


@by(WATCHING)
@pytest.mark.parametrize("spec", [INT4, UINT4], ids=str)
@pytest.mark.parametrize("power", [-12, 20, 100, 122])
def test_data_twice_as_large_has_a_range_twice_as_large(observer, spec, power):
    """Powers of two are exact, so the same candidate is found; at 2^-12 the scale is still above its floor."""
    x = bell(400)
    factor = np.float32(2.0**power)
    lo, hi = range_of(observer, x, x * 0.5, spec=spec)
    with np.errstate(over="ignore"):
        assert_same_range((lo * factor, hi * factor), range_of(observer, x * factor, x * 0.5 * factor, spec=spec))


@by(SEARCHES)
@pytest.mark.parametrize("spec", [INT8, INT4, UINT8, UINT4, QuantSpec(narrow_range=True)], ids=str)
@pytest.mark.parametrize("top", [3.2e38, 3.4e38, LARGEST], ids=str)
def test_a_range_is_not_lost_where_codes_beyond_it_are_infinite(observer, spec, top):
    """Where the last code of a candidate is beyond float32, its error is infinite, also in bins without values."""
    lo, hi = range_of(observer, [-top, top], spec=spec)
    assert lo <= -top / 2
    assert hi >= top / 2


@pytest.mark.parametrize("norm", [1.0, 2.4, 4.0, 12.0])
def test_nor_does_the_norm_break_that(norm):
    x, factor = bell(400), np.float32(2.0**100)
    observer = Histogram(norm, steps=20, bins=256)
    lo, hi = range_of(observer, x, spec=INT4)
    assert_same_range((lo * factor, hi * factor), range_of(observer, x * factor, spec=INT4))


@by({**RUNNING, "Percentile": Percentile(97.0, bins=256), "Histogram": BINNED["Histogram"], "MSE": SEARCHES["MSE"]})
def test_the_mirror_image_has_the_mirrored_range(observer):
    spec = QuantSpec(bits=4, narrow_range=True)
    x = torch.cat([bell(400), torch.tensor([7.0, 3.0])])
    lo, hi = range_of(observer, x, spec=spec)
    assert_same_range((-hi, -lo), range_of(observer, -x, spec=spec))


# --- the histogram ----------------------------------------------------------------------------


def counted(values, bins):
    """Exponent and counts by exact arithmetic, one value after the other."""
    finite = [Fraction(float(np.float32(v))) for v in values if np.isfinite(v)]
    largest = max(map(abs, finite), default=0)
    exponent = next(e for e in range(-126, 129) if largest < bins // 2 * Fraction(2) ** e)
    counts = np.zeros(bins, np.int64)
    for value, given in zip(finite, (v for v in values if np.isfinite(v)), strict=True):
        distance = math.floor(abs(value) / Fraction(2) ** exponent)
        counts[bins // 2 - 1 - distance if given < 0 else bins // 2 + distance] += 1
    return exponent, counts


EDGES = [k * 2.0**-5 for k in range(-40, 41)]  # exactly on edges of bins, when the exponent allows
DATA = {
    "random": bell(200).tolist(),
    "on the edges": EDGES,
    "beside the edges": [float(np.nextafter(np.float32(v), np.float32(s))) for v in EDGES for s in (-INF, INF)],
    "powers of two": [s * 2.0**p for p in range(-10, 11) for s in (1, -1)],
    "zeros": [0.0, -0.0, -0.0, 1.0],
    "tiny": [1e-45, -1e-45, 1e-38, -1e-40, 0.0],
    "huge": [LARGEST, -LARGEST, 1e38, -1.0],
    "every magnitude": [s * 10.0**p for p in range(-44, 39, 3) for s in (1, -1)],
    "not finite": [NAN, 1.0, INF, -3.0, -INF, NAN],
    "nothing": [NAN],
}


@by(DATA, "values")
@pytest.mark.parametrize("bins", [4, 64, 4096])
def test_counts_are_those_of_exact_arithmetic(values, bins):
    exponent, counts = counted(values, bins)
    state = watch(Percentile(bins=bins), values)
    assert int(state["exponent"]) == exponent
    assert_same_bits(counts, state["counts"].numpy())


@by(DATA, "values")
@pytest.mark.parametrize("bins", [4, 1024])
def test_counts_depend_on_the_values_only(bins, values):
    observer = Percentile(bins=bins)
    joined = watch(observer, values)
    shuffled = np.random.default_rng(0).permutation(values).tolist()
    by_size = sorted(values, key=lambda v: (math.isnan(v), abs(v)))
    for name, order in {"shuffled": shuffled, "rising": by_size, "falling": by_size[::-1]}.items():
        size = max(1, len(order) // 20)
        batches = [order[i : i + size] for i in range(0, len(order), size)]
        assert_same_state(joined, watch(observer, *batches), name)


def test_counts_per_channel_depend_on_the_values_only():
    spec = QuantSpec(axis=0)
    x = bell(3, 60) * torch.tensor([[1.0], [1e20], [1e-20]])
    joined = watch(Percentile(bins=64), x, spec=spec)
    assert_same_state(joined, watch(Percentile(bins=64), *x.flip(1).split(7, dim=1), spec=spec))
    for row, exponent, counts in zip(x.tolist(), joined["exponent"], joined["counts"], strict=True):
        expected = counted(row, 64)
        assert int(exponent) == expected[0]
        assert_same_bits(expected[1], counts.numpy())


# --- several ranks ---------------------------------------------------------------------------


class Team:
    """Ranks that are threads: every reduction waits for all of them."""

    def __init__(self, size):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=30)
        self.values = [None] * size

    def exchange(self, rank, value):
        self.values[rank] = value.clone()
        self.barrier.wait()
        everyone = torch.stack(self.values)
        self.barrier.wait()
        return everyone


class Member(Ranks):
    def __init__(self, team, rank):
        super().__init__(None, several=True)
        self.team, self.rank = team, rank

    def range(self, lo, hi):
        return self.team.exchange(self.rank, lo).amin(0) + 0.0, self.team.exchange(self.rank, hi).amax(0)

    def highest(self, value):
        return self.team.exchange(self.rank, value).amax(0)

    def total(self, value):
        return self.team.exchange(self.rank, value).sum(0)


def on_ranks(observer, shards, spec):
    """The states of all ranks and their counts of what is not finite; `shards[rank]` are a rank's batches."""
    team = Team(len(shards))

    def run(rank):
        state = observer.init(blocks_of(tuple(shards[rank][0].shape), spec).parameters)
        try:
            counts = [int(observer.update(state, x, spec, Member(team, rank))) for x in shards[rank]]
        except BaseException:
            team.barrier.abort()
            raise
        return state, counts

    with ThreadPoolExecutor(len(shards)) as threads:
        return zip(*threads.map(run, range(len(shards))), strict=True)


@by(WATCHING)
@pytest.mark.parametrize("where", [{}, dict(axis=1), dict(axis=1, group_size=2)], ids=["tensor", "channel", "group"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_ranks_have_the_bits_of_one_process_on_the_joined_batch(observer, where, symmetric):
    if where.get("group_size"):  # a group has the rows of one rank only: there the ranks see the same rows
        where = dict(axis=0, group_size=2)
        shards = [[bell(4, 6, seed=10 * r + s) * (1 + 5 * s * r) for s in range(3)] for r in range(3)]
        joined = None
    else:
        rows = [(5, 3, 8), (1, 7, 0), (2, 2, 9)]  # of every rank at every step
        shards = [[bell(n, 6, seed=10 * r + s) * (1 + 5 * s * r) for s, n in enumerate(rows[r])] for r in range(3)]
        shards[0][1][0, 0], shards[2][0][1, 2], shards[2][0][0, 0] = NAN, INF, -INF
        joined = [torch.cat(step) for step in zip(*shards, strict=True)]
    spec = QuantSpec(bits=4, symmetric=symmetric, **where)
    states, counts = on_ranks(observer, shards, spec)
    for state in states[1:]:
        assert_same_state(states[0], state, "another rank")
    if joined is not None:
        assert_same_state(watch(observer, *joined, spec=spec), states[0])
        assert counts == ([0, 1, 0], [0, 0, 0], [2, 0, 0])
    for end in observer.range(states[0], spec):
        assert end.isfinite().all()


def test_ranges_per_token_are_those_of_the_ranks_own_tokens():
    spec = QuantSpec(axis=-1, group_size=-1)
    shards = [[bell(3, 8)], [bell(3, 8, seed=1) * 10]]
    states, _ = on_ranks(Dynamic(), shards, spec)
    for state, (x,) in zip(states, shards, strict=True):
        assert_same_state(watch(Dynamic(), x, spec=spec), state)


@by(REMEMBERING)
def test_a_rank_without_data_has_the_range_of_the_others(observer):
    shards = [[bell(40)], [torch.empty(0)], [torch.tensor([NAN])]]
    states, counts = on_ranks(observer, shards, INT4)
    for state in states:
        assert_same_state(watch(observer, bell(40), spec=INT4), state)
    assert counts == ([0], [0], [1])


# --- percentile ------------------------------------------------------------------------------


def percentile_range(values, percent):
    """The outermost values that are not in a tail of n * (100 - percent) / 100, by exact arithmetic."""
    ordered = sorted(values)
    cut = math.floor(len(ordered) * (100 - Fraction(str(percent))) / 100)
    return ordered[cut], ordered[len(ordered) - 1 - cut]


def assert_within_a_bin(values, percent, bins):
    lo, hi = percentile_range(values, percent)
    found = range_of(Percentile(percent, bins=bins), values)
    widest = 4 / bins * max(map(abs, values))
    assert lo - widest <= found[0] <= lo, percent
    assert hi <= found[1] <= hi + widest, percent
    assert min(values) <= found[0] <= found[1] <= max(values)


SORTED = {
    "both sides": bell(999).tolist(),
    "positive": bell(999).abs().add(0.5).tolist(),
    "negative": bell(999).abs().add(0.5).neg().tolist(),
    "with outliers": [*bell(997).tolist(), 1000.0, -300.0],
    "many the same": [0.5] * 500 + [-0.25] * 499,
    "one": [3.0],
    "two": [-1.0, 3.0],
    "three": [-1.0, 0.5, 3.0],
}


@by(SORTED, "values")
@pytest.mark.parametrize("percent", [50.0001, 75.0, 90.0, 99.0, 99.9, 99.99, 100.0])
@pytest.mark.parametrize("bins", [64, 4096])
def test_percentiles_are_those_of_the_sorted_values_up_to_the_width_of_a_bin(values, percent, bins):
    assert_within_a_bin([float(np.float32(v)) for v in values], percent, bins)


@pytest.mark.parametrize("percent", [*map(float, range(51, 101)), 99.5, 99.75, 62.5])
@pytest.mark.parametrize("count", [100, 200, 400])
def test_a_tail_of_a_whole_number_of_values_is_left_out_whole(percent, count):
    """Whole percents of round numbers of values are where a rounded product falls on the wrong side."""
    assert_within_a_bin([float(v) for v in range(1, count + 1)], percent, 4096)


@pytest.mark.parametrize(("percent", "count"), [(99.9, 1000), (99.9, 2000), (99.99, 10000), (99.7, 1000), (50.1, 1000)])
def test_so_is_one_of_a_part_of_a_percent(percent, count):
    """No binary number is 99.9, but one in a thousand is."""
    assert_within_a_bin([float(v) for v in range(1, count + 1)], percent, 1 << 17)


def test_a_hundred_percent_is_everything():
    x = bell(1000)
    assert_same_range((x.min().item(), x.max().item()), range_of(Percentile(100.0, bins=4), x))


# --- searches against brute force ---------------------------------------------------------------


def grid_of(lo, hi, spec):
    """Scale and zero point in float32."""
    lo, hi = min(np.float32(lo), np.float32(0)), max(np.float32(hi), np.float32(0))
    levels = np.float32(spec.qmax - spec.qmin)
    eps = np.finfo(np.float32).eps
    if spec.symmetric:
        return max(max(-lo, hi) / (levels / np.float32(2)), eps), 0
    scale = max((hi - lo) / levels, eps)
    return scale, int(np.clip(spec.qmin - np.rint(lo / scale), spec.qmin, spec.qmax))


def codes_of(x, lo, hi, spec):
    scale, zero = grid_of(lo, hi, spec)
    return np.clip(np.rint(x / scale) + np.float32(zero), spec.qmin, spec.qmax), scale, zero


def rounded(x, lo, hi, spec):
    codes, scale, zero = codes_of(x, lo, hi, spec)
    return ((codes - np.float32(zero)) * scale).astype(np.float32)


def candidates(lo, hi, steps):
    """Both ends cut at the same magnitude, from the largest down."""
    top = max(-lo, hi)
    cuts = [top * (np.float32(i) / np.float32(steps)) for i in range(steps, 0, -1)]
    return [(max(lo, -cut), min(hi, cut)) for cut in cuts]


def brute_force(error, lo, hi, steps, *, each_end):
    fractions = [np.float32(i) / np.float32(steps) for i in range(steps, 0, -1)]
    lo, hi = min(candidates(lo, hi, steps), key=lambda ends: error(*ends))
    if each_end:
        lo, hi = min(((lo * f, hi) for f in fractions), key=lambda ends: error(*ends))
        lo, hi = min(((lo, hi * f) for f in fractions), key=lambda ends: error(*ends))
    return lo, hi


def histogram_of(x, bins):
    """Counts, centers and width."""
    exponent, counts = counted(x.tolist(), bins)
    width = 2.0**exponent
    return counts, ((np.arange(-bins // 2, bins // 2) + 0.5) * width).astype(np.float32), width


SEARCHED = {
    "bell": bell(700).numpy(),
    "long tail": (bell(700, seed=4).numpy() ** 3).astype(np.float32),
    "lopsided": np.concatenate([bell(500).numpy(), np.float32([9, 11, 14])]),
    "from zero": np.abs(bell(700, seed=5).numpy()) * np.float32(3) - np.float32(1e-3),
    "few levels": np.random.default_rng(1).choice(np.float32([-3, -1, -0.5, 0, 0.5, 1, 2, 8]), 300),
}
by_searched = by(SEARCHED, "x")
GRIDS = INT4, QuantSpec(bits=4, narrow_range=True), UINT4, QuantSpec(bits=2), INT8, UINT8
by_grid = by({str(spec): spec for spec in GRIDS}, "spec")


@by_searched
@by_grid
@pytest.mark.parametrize("norm", [2.0, 2.4])
def test_the_histogram_finds_the_range_of_least_error_over_its_bins(x, spec, norm):
    counts, centers, _ = histogram_of(x, 256)

    def error(lo, hi):
        distance = np.abs(rounded(centers, lo, hi, spec) - centers).astype(np.float64)
        return math.fsum(counts * distance**norm)

    expected = brute_force(error, x.min(), x.max(), 20, each_end=not spec.symmetric)
    halves = [torch.from_numpy(part.copy()) for part in np.array_split(x, 2)]
    assert_same_range(expected, range_of(Histogram(norm, 20, bins=256), *halves, spec=spec))


@by_searched
@by_grid
def test_mse_finds_the_range_of_least_squared_error_on_the_latest_tensor(x, spec):
    def error(lo, hi):
        return math.fsum((rounded(x, lo, hi, spec) - x).astype(np.float64) ** 2)

    expected = brute_force(error, x.min(), x.max(), 20, each_end=not spec.symmetric)
    latest = torch.from_numpy(x)
    assert_same_range(expected, range_of(MSE(20), latest[:100] * 50, latest, spec=spec))


def divergence(counts, centers, lo, hi, spec):
    """Of the histogram clipped to the range from the one whose codes have evenly filled bins."""
    half = (centers[1] - centers[0]) / 2
    below, above = centers + half < lo, centers - half > hi
    inside = np.flatnonzero(~below & ~above)
    clipped = counts[inside].astype(np.float64)
    clipped[0] += counts[below].sum()
    clipped[-1] += counts[above].sum()
    codes = codes_of(centers[inside], lo, hi, spec)[0]
    spread = np.zeros(len(inside))
    for code in np.unique(codes):
        used = (codes == code) & (counts[inside] > 0)
        if used.any():
            spread[used] = counts[inside][used].sum() / used.sum()
    p, q = clipped / clipped.sum(), np.maximum(spread / max(spread.sum(), 1), 1e-12)
    return math.fsum(p[p > 0] * np.log(p[p > 0] / q[p > 0]))


# Candidates may have the same divergence, and then which is the least depends on how at most 1024 terms were added.
SUMMED_IN_ANOTHER_ORDER = 1e-12


@by({k: v for k, v in SEARCHED.items() if k != "few levels"}, "x")
@by({str(s): s for s in (INT4, UINT4, QuantSpec(bits=2), QuantSpec(bits=6))}, "spec")
@pytest.mark.parametrize("bins", [256, 1024])
def test_entropy_finds_the_range_of_least_divergence(x, spec, bins):
    counts, centers, width = histogram_of(x, bins)

    def error(ends):
        return math.fsum(counts * (rounded(centers, *ends, spec) - centers).astype(np.float64) ** 2)

    inner = tuple(range_of(Histogram(bins=bins), torch.from_numpy(x), spec=spec))
    tried = [(min(lo, inner[0]), max(hi, inner[1])) for lo, hi in candidates(x.min(), x.max(), 40)]
    tried = [tried[0], *((lo, hi) for lo, hi in tried[1:] if not (hi - lo) < spec.levels * width)]
    tried = [ends for ends in tried if error(ends) <= 2 * error(inner)]
    found = tuple(range_of(Entropy(40, bins=bins), torch.from_numpy(x), spec=spec))
    if not tried:
        assert found == inner
        return
    assert found in tried
    least = min(divergence(counts, centers, *ends, spec) for ends in tried)
    assert divergence(counts, centers, *found, spec) <= least + SUMMED_IN_ANOTHER_ORDER


@pytest.mark.parametrize("bits", [8, 12, 16, 32])
def test_with_more_levels_than_bins_entropy_takes_the_range_of_the_data(bits):
    x = torch.cat([bell(500), torch.tensor([40.0])])
    expected = (x.min().item(), x.max().item())
    assert_same_range(expected, range_of(Entropy(bins=256), x, spec=QuantSpec(bits=bits)))


def test_of_equal_errors_the_widest_range_is_taken():
    """Below the smallest scale every candidate has the same grid."""
    x = [-1e-9, 5e-10, 1e-9]
    for observer in (Histogram(), MSE()):
        for spec in (INT8, UINT8):
            assert_same_range((np.float32(-1e-9), np.float32(1e-9)), range_of(observer, x, spec=spec))


@pytest.mark.parametrize("numerics", ["torch", "onnx", "half_away"])
def test_a_search_works_in_every_numerics(numerics):
    for observer in SEARCHES.values():
        for where in ({}, dict(axis=0)):
            spec = QuantSpec(bits=4, symmetric=False, numerics=numerics, **where)
            lo, hi = range_of(observer, bell(3, 100), spec=spec)
            assert (lo < 0).all()
            assert (hi > 0).all()


@by(SEARCHES)
def test_one_step_is_the_range_of_the_data(observer):
    x = bell(200)
    one = dataclasses.replace(observer, steps=1)
    for spec in (INT4, UINT4):
        assert_same_range((x.min().item(), x.max().item()), range_of(one, x, spec=spec))


# --- as data --------------------------------------------------------------------------------

SETTINGS = {
    "MinMax": (MinMax(), {}),
    "MovingAverage": (MovingAverage(), dict(constant=0.01)),
    "MovingAverage, set": (MovingAverage(0.5), dict(constant=0.5)),
    "Dynamic": (Dynamic(), {}),
    "Percentile": (Percentile(), dict(bins=4096, percent=99.99)),
    "Percentile, set": (Percentile(99, bins=8), dict(bins=8, percent=99)),
    "Histogram": (Histogram(), dict(bins=4096, norm=2.0, steps=100)),
    "Histogram, set": (Histogram(2.4, 10, bins=64), dict(bins=64, norm=2.4, steps=10)),
    "MSE": (MSE(), dict(steps=100)),
    "Entropy": (Entropy(), dict(bins=4096, steps=128)),
    "Fixed": (Fixed(-1, 2.5), dict(lo=-1, hi=2.5)),
}


@pytest.mark.parametrize(("observer", "settings"), SETTINGS.values(), ids=SETTINGS)
def test_an_observer_is_its_kind_and_settings(observer, settings):
    as_dict = observer.to_dict()
    assert as_dict == {"kind": type(observer).__name__, **settings}
    for again in (
        from_dict(as_dict),
        from_dict(json.loads(json.dumps(as_dict))),
        pickle.loads(pickle.dumps(observer)),
        copy.deepcopy(observer),
        eval(repr(observer)),
        dataclasses.replace(observer),
    ):
        assert type(again) is type(observer)
        assert again == observer
        assert hash(again) == hash(observer)
    as_dict["kind"] = "changed"
    assert observer.to_dict()["kind"] == type(observer).__name__
    with pytest.raises(dataclasses.FrozenInstanceError):
        observer.constant = 1


def test_observers_with_other_settings_differ():
    every = [observer for observer, _ in SETTINGS.values()]
    assert len(set(every)) == len(every)
    assert MinMax() != Dynamic()
    assert MSE(100) != Entropy(100)


def test_every_observer_is_in_the_tables_above():
    public = {
        n
        for n in vars(observers)
        if isinstance(getattr(observers, n), type) and n not in ("Observer", "Ranks", "State")
    }
    assert public == set(ALL) == {n.split(",")[0] for n in SETTINGS}


def test_absent_settings_have_their_defaults():
    assert from_dict({"kind": "Histogram"}) == Histogram()
    assert from_dict({"kind": "Histogram", "steps": 3}) == Histogram(steps=3)


@pytest.mark.parametrize("fields", [{}, {"kind": None}, {"kind": "minmax"}, {"kind": "_Running"}, {"kind": "Observer"}])
def test_an_unknown_kind_is_refused_with_the_known_ones(fields):
    with pytest.raises(ValueError, match=r"`kind` must be one of .*Histogram.*MinMax.*MovingAverage"):
        from_dict(fields)


@pytest.mark.parametrize("kind", [["MinMax"], {"kind": "MinMax"}], ids=repr)
def test_a_kind_that_is_no_name_is_refused_as_such(kind):
    with pytest.raises((TypeError, ValueError), match="`kind` must be"):
        from_dict({"kind": kind})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "MinMax", "constant": 1}, "MinMax has no setting 'constant'; it has none."),
        ({"kind": "MovingAverage", "steps": 1}, "MovingAverage has no setting 'steps'; it has constant."),
        ({"kind": "Histogram", "step": 1}, "Histogram has no setting 'step'; it has bins, norm, steps."),
        ({"kind": "MovingAverage", "constant": 0}, "`constant` must be greater than 0"),
    ],
)
def test_an_unknown_or_impossible_setting_is_refused(fields, message):
    with pytest.raises(ValueError, match=r"setting|must be") as caught:
        from_dict(fields)
    assert message in str(caught.value)


BAD = {
    "constant": [(MovingAverage, dict(constant=c)) for c in (0, 0.0, -0.1, 1.0001, NAN, INF, -INF)],
    "percent": [(Percentile, dict(percent=p)) for p in (50, 50.0, 0, 100.5, -1, NAN, INF)],
    "bins": [
        (kind, dict(bins=b))
        for kind in (Percentile, Histogram, Entropy)
        for b in (0, 2, 3, -4, 100, True, 8.0, "8", None)
    ],
    "norm": [(Histogram, dict(norm=n)) for n in (0, -1, NAN, INF)],
    "steps": [(kind, dict(steps=s)) for kind in (Histogram, MSE, Entropy) for s in (0, -1, NAN, INF, 2.5, True)],
    "lo": [(Fixed, dict(lo=a, hi=b)) for a, b in ((1, 0), (NAN, 1), (0, NAN), (-INF, 0), (0, INF), (INF, INF))],
    "lo` and `hi": [(Fixed, dict(lo=a, hi=b)) for a, b in ((0, 1e39), (-1e39, 0), (1e300, 1e301))],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        pytest.param(name, kind, options, id=f"{kind.__name__}-{options}")
        for name, cases in BAD.items()
        for kind, options in cases
    ],
)
def test_a_setting_without_meaning_is_refused_by_name(name, kind, options):
    with pytest.raises((ValueError, TypeError), match=f"`{name}` "):
        kind(**options)


def test_the_ends_of_the_settings_are_allowed():
    MovingAverage(1.0), MovingAverage(1), MovingAverage(1e-6)
    Percentile(100), Percentile(50.001), Percentile(bins=4)
    Histogram(0.5, 1), MSE(1), Entropy(1), Fixed(0, 0), Fixed(-LARGEST, LARGEST)


@pytest.mark.parametrize("lo", [-LARGEST, -1, 0])
@pytest.mark.parametrize("hi", [LARGEST, 1, 0])
@pytest.mark.parametrize("blocks", [(), (3,), (2, 2)], ids=str)
def test_a_fixed_range_is_the_same_for_every_block(lo, hi, blocks):
    state = Fixed(lo, hi).init(blocks)
    expected = np.full(blocks, lo), np.full(blocks, hi)
    assert_same_range(expected, [end.numpy() for end in Fixed(lo, hi).range(state, INT8)])


# --- observers of one's own ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class MeanAndSpread(Observer):
    """The mean plus and minus some standard deviations of the latest tensor."""

    deviations: float = 3.0

    def init(self, blocks, device=None):
        return {"center": torch.full(blocks, NAN, device=device), "spread": torch.zeros(blocks, device=device)}

    def update(self, state, x, spec, ranks=ALONE):
        finite = x[x.isfinite()]
        state["center"].copy_(finite.mean())
        state["spread"].copy_(finite.std())
        return torch.tensor(x.numel() - finite.numel())

    def range(self, state, spec):
        reach = state["spread"] * self.deviations
        unseen = state["center"].isnan()
        low, high = state["center"] - reach, state["center"] + reach
        return low.masked_fill(unseen, INF), high.masked_fill(unseen, -INF)


def test_an_observer_of_ones_own_is_known_by_its_name():
    own = MeanAndSpread(2.0)
    assert own.to_dict() == {"kind": "MeanAndSpread", "deviations": 2.0}
    assert from_dict(own.to_dict()) == own
    with pytest.raises(ValueError, match="MeanAndSpread has no setting 'deviation'; it has deviations"):
        from_dict({"kind": "MeanAndSpread", "deviation": 1})
    assert (own.dynamic, own.searches, own.needs_data, own._in_kernel) == (False, False, True, None)


def test_an_observer_of_ones_own_works_in_a_quantizer():
    from fakequant.nn import FakeQuantize

    fq = FakeQuantize(INT8, MeanAndSpread(2.0))
    with pytest.raises(RuntimeError, match="has not observed a finite value"):
        fq.qparams()
    x = bell(500)
    fq(x)
    lo, hi = x.mean() - x.std() * 2, x.mean() + x.std() * 2
    expected = choose_qparams(lo, hi, INT8)
    assert_same_bits(expected.scale.numpy(), fq.qparams().scale.numpy())
    assert set(fq.state_dict()) >= {"center", "spread", "scale"}


def test_a_private_observer_is_not_known_by_its_name():
    class _Hidden(MinMax):
        pass

    with pytest.raises(ValueError, match="`kind` must be one of"):
        from_dict(_Hidden().to_dict())


def test_an_observer_has_to_say_all_three_things():
    class Half(MeanAndSpread.__base__):
        def init(self, blocks, device=None):
            return {}

    for kind in (Observer, Half):
        with pytest.raises(TypeError, match="abstract"):
            kind()


def test_a_refined_observer_inherits_what_it_does_not_change():
    class Doubled(MinMax):
        def range(self, state, spec):
            lo, hi = super().range(state, spec)
            return lo * 2, hi * 2

    assert_same_range((-2, 6), range_of(Doubled(), [-1.0, 3.0]))
    assert from_dict(Doubled().to_dict()) == Doubled()
    assert Doubled() != MinMax()


def test_histograms_for_too_many_scales_are_refused():
    with pytest.raises(ValueError, match=r"Use MSE\(\) or MinMax\(\) for that many"):
        observers.Histogram().init((512, 512))
    observers.Histogram(bins=16).init((512, 512))


def test_settings_are_numbers():
    assert observers.Fixed(np.float32(0), 1).to_dict() == {"kind": "Fixed", "lo": 0.0, "hi": 1.0}
    for make in (
        lambda: observers.MovingAverage("0.5"),
        lambda: observers.Fixed("0", 1),
        lambda: observers.Percentile("99"),
    ):
        with pytest.raises(TypeError, match="must be a number"):
            make()
    with pytest.raises(ValueError, match="Fixed needs the setting 'lo'"):
        observers.from_dict({"kind": "Fixed"})
