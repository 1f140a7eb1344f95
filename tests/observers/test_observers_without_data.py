"""Observers that have seen nothing, or values that are not finite."""

import copy
import math

import numpy as np
import pytest

from observer_cases import (
    ALL,
    INT8,
    OBSERVING,
    STATEFUL,
    UINT4,
    UINT8,
    assert_same_range,
    bell,
    by,
    range_of,
    state_after,
)

torch = pytest.importorskip("torch")

from fakequant import QuantSpec  # noqa: E402
from fakequant._backends.blocks import blocks_of  # noqa: E402
from fakequant.observers import Dynamic, Fixed  # noqa: E402
from fakequant.testing.assertions import assert_same_bits, assert_same_state  # noqa: E402

INF, NAN = math.inf, math.nan

# --- before any data --------------------------------------------------------------------------------


@by(OBSERVING)
@pytest.mark.parametrize("blocks", [(), (3,), (2, 4), (0,)], ids=str)
def test_range_before_any_data_is_empty(observer, blocks):
    assert observer.needs_data
    for spec in (INT8, UINT8):
        lo, hi = observer.range(observer.init(blocks), spec)
        assert_same_range((np.full(blocks, INF), np.full(blocks, -INF)), (lo.numpy(), hi.numpy()))


@by(ALL)
@pytest.mark.parametrize("where", [{}, dict(axis=0), dict(axis=1, group_size=2)], ids=["tensor", "channel", "group"])
def test_updates_keep_memory_shape_and_dtype_of_the_state(observer, where):
    spec = QuantSpec(bits=4, **where)
    state = observer.init(blocks_of((3, 8), spec).parameters)
    before = {name: (v.data_ptr(), v.shape, v.dtype, v.stride()) for name, v in state.items()}
    for factor in (1, 1000, 0.1):
        count = observer.update(state, bell(3, 8) * factor, spec)
        assert (count.dtype, count.shape, int(count)) == (torch.int64, (), 0)
        observer.range(state, spec)
    assert before == {name: (v.data_ptr(), v.shape, v.dtype, v.stride()) for name, v in state.items()}


@by(ALL)
def test_reading_the_range_leaves_the_state_unchanged(observer):
    state = state_after(observer, bell(200))
    before = copy.deepcopy(state)
    first = observer.range(state, UINT4)
    for end, again in zip(first, observer.range(state, UINT4), strict=True):
        assert_same_bits(end, again)
        assert end.dtype == torch.float32
    assert_same_state(before, state)


EMPTY = {"tensor": ({}, (0,)), "rows": (dict(axis=1), (0, 3)), "features": (dict(axis=0), (3, 0))}


@by(STATEFUL)
@pytest.mark.parametrize(("where", "shape"), EMPTY.values(), ids=EMPTY)
def test_empty_tensor_leaves_the_state_unchanged(observer, where, shape):
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
def test_dynamic_range_of_an_empty_tensor_is_zero(where, shape):
    spec = QuantSpec(**where)
    state = Dynamic().init(blocks_of(shape, spec).parameters)
    for value in state.values():
        value.fill_(7)
    Dynamic().update(state, torch.empty(shape), spec)
    for value in state.values():
        assert_same_bits(np.zeros(value.shape, np.float32), value)


# --- NaN and infinities -----------------------------------------------------------------------------

NONFINITE = {"NaN": [NAN], "+inf": [INF], "-inf": [-INF], "all three": [NAN, INF, -INF, NAN, -INF]}


@by(OBSERVING)
@by(NONFINITE, "bad")
@pytest.mark.parametrize("spec", [INT8, UINT8], ids=str)
def test_nonfinite_values_do_not_change_the_range(observer, bad, spec):
    first, second = bell(300), bell(301, seed=1)
    for place in ([], [0], [-1]):  # shuffled in, at the front, and at the back
        dirty = torch.cat([first, torch.tensor(bad)]) if place != [0] else torch.cat([torch.tensor(bad), first])
        dirty = dirty[torch.randperm(len(dirty), generator=torch.Generator().manual_seed(0))] if not place else dirty
        state = observer.init(())
        assert observer.update(state, dirty, spec) == len(bad)
        assert observer.update(state, second, spec) == 0
        assert_same_state(state_after(observer, first, second, spec=spec), state)


@by(OBSERVING)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_nonfinite_values_of_other_dtypes_do_not_change_the_state(observer, dtype):
    bad = torch.tensor([NAN, INF, -INF], dtype=dtype)
    clean = bell(100, dtype=dtype)
    state = observer.init(())
    assert observer.update(state, torch.cat([clean, bad]), INT8) == 3
    assert_same_state(state_after(observer, clean), state)


@by(OBSERVING)
def test_nonfinite_values_in_channels_do_not_change_the_state(observer):
    spec = QuantSpec(axis=0)
    clean = bell(3, 40)
    dirty = torch.cat([clean, torch.tensor([[NAN, INF], [-INF, NAN], [INF, -INF]])], dim=1)
    state = observer.init((3,))
    assert observer.update(state, dirty, spec) == 6
    assert_same_state(state_after(observer, clean, spec=spec), state)


@by(STATEFUL)
@by(NONFINITE, "bad")
def test_tensor_without_finite_values_leaves_the_state_unchanged(observer, bad):
    state = observer.init(())
    before = copy.deepcopy(state)
    assert observer.update(state, torch.tensor(bad), INT8) == len(bad)
    assert_same_state(before, state, "first")
    observer.update(state, bell(50), INT8)
    before = copy.deepcopy(state)
    assert observer.update(state, torch.tensor(bad), INT8) == len(bad)
    assert_same_state(before, state, "later")


@by(NONFINITE, "bad")
def test_dynamic_range_of_a_tensor_without_finite_values_is_zero(bad):
    assert_same_range((0, 0), range_of(Dynamic(), [1.0, 2.0], bad))


@by(STATEFUL)
@pytest.mark.parametrize("symmetric", [True, False])
def test_channel_without_finite_values_has_an_empty_range_beside_normal_ones(observer, symmetric):
    spec = QuantSpec(axis=0, symmetric=symmetric)
    x = bell(3, 60)
    x[1] = torch.tensor([NAN, INF, -INF]).repeat(20)
    lo, hi = range_of(observer, x, spec=spec)
    assert (lo[1], hi[1]) == (INF, -INF)
    expected = range_of(observer, x[[0, 2]], spec=spec)
    assert_same_range(expected, (lo[[0, 2]], hi[[0, 2]]))


def test_fixed_range_ignores_data():
    for x in ([NAN, INF], [5.0], [-1e30], []):
        state = Fixed(-0.5, 2.0).init((2,))
        assert Fixed(-0.5, 2.0).update(state, torch.tensor(x), INT8) == 0
        assert_same_range(([-0.5] * 2, [2.0] * 2), [v.numpy() for v in Fixed(-0.5, 2.0).range(state, INT8)])
    assert not Fixed(0, 1).needs_data
