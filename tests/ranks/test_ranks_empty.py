"""Ranks whose batch is empty or not finite take part in observing and change nothing."""

import warnings

import pytest

from fakequant import QuantSpec, presets
from fakequant.testing.assertions import assert_same_state
from rank_quantizers import INF, NAN, OBSERVERS, SHAPE, SPECS, assert_all_joined, batches, state_of, steps
from straight_through import torch
from two_ranks import RANKS, Checks

fqnn = pytest.importorskip("fakequant.nn")
nn = torch.nn

CHECKS = check = Checks()


def nonfinite_batches(seat, poor_rank, observer, kind):
    """One rank has no finite value in the first and third step, and no rank has one in the fourth."""
    first, second, *_ = batches()
    poor_first, poor_second = first.clone(), second.clone()
    half = slice(4, 7) if poor_rank == 1 else slice(0, 4)
    poor_first[half] = poor_second[half] = NAN
    poor_second[half.start] = INF
    quantizer = fqnn.FakeQuantize(SPECS[kind], observer, shape=SHAPE)
    seen = []
    with warnings.catch_warnings(action="ignore"):  # about values that are not finite
        for x in (poor_first, second, poor_second, torch.full_like(first, NAN), second):
            y = quantizer(seat.part(x))
            seen.append({"y": y, **state_of(quantizer)})
    return {"seen": seen, "nonfinite": quantizer.nonfinite}


for _name in OBSERVERS:
    check(_name, "tensor", poor_rank=1, observer=OBSERVERS[_name], kind="tensor")(nonfinite_batches)
    check(_name, "channel", poor_rank=0, observer=OBSERVERS[_name], kind="channel")(nonfinite_batches)


def empty_batches(seat, observer, kind, quantizing=True):
    """Rank 1 has no rows in the first step, rank 0 none in the third, and both none in the fourth."""
    first, second, third, *_ = batches()
    rows = [(first[:4], first[4:4]), (second[:4], second[4:]), (third[:0], first[4:]), (third[:0], third[:0])]
    quantizer = fqnn.FakeQuantize(SPECS[kind], observer, shape=SHAPE)
    quantizer.quantizing = quantizing
    seen = []
    for pair in rows:
        x = (torch.cat(pair) if seat.rank is None else pair[seat.rank]).clone().requires_grad_()
        y = quantizer(x)
        (dx,) = torch.autograd.grad(y.sum(), x, materialize_grads=True)
        seen.append({"y": y.detach(), "dx": dx, **state_of(quantizer)})
    return seen


for _name in OBSERVERS:
    for _kind in ("tensor", "channel"):
        check(_name, _kind, observer=OBSERVERS[_name], kind=_kind)(empty_batches)
check("only observing", observer=OBSERVERS["Histogram"], kind="tensor", quantizing=False)(empty_batches)


@check()
def empty_learned(seat):
    first = batches()[0]
    quantizer = fqnn.LearnedFakeQuantize(QuantSpec(bits=4))
    quantizer.observing = True
    pair = first[:4], first[4:4]
    quantizer(first[:4] if seat.rank is None else pair[seat.rank])
    quantizer.observing = False
    return state_of(quantizer) | {"scale": quantizer.scale}


@check()
def nothing_on_any_rank(seat):
    """Raises on every rank instead of hanging or giving a meaningless scale."""
    quantizer = fqnn.FakeQuantize(presets.uint8(), path="layer.act")
    with warnings.catch_warnings(action="ignore"), pytest.raises((RuntimeError, ValueError), match=r"layer\.act"):
        quantizer(seat.part(torch.full((7, 6), NAN)))
    return steps(quantizer, [seat.part(batches()[0])])


@check()
def one_warning_on_the_rank_that_saw_them(seat):
    x = batches()[0].clone()
    x[6, 0], x[6, 1], x[5, 5] = NAN, INF, -INF  # rows of rank 1
    quantizer = fqnn.FakeQuantize(presets.uint8(), path="layer.act")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            quantizer(seat.part(x))
    return {"told": [str(w.message) for w in told], "nonfinite": quantizer.nonfinite, **state_of(quantizer)}


@CHECKS.names(nonfinite_batches)
@pytest.mark.filterwarnings("ignore:.*NaN or infinite:RuntimeWarning")
def test_a_rank_without_finite_values_does_not_affect_ranges(ranks, name):
    whole, parts = CHECKS.alone(name), ranks(name)
    assert_all_joined(whole["seen"], [part["seen"] for part in parts])
    assert sum(part["nonfinite"] for part in parts) == whole["nonfinite"]


@CHECKS.names(nonfinite_batches)
def test_nonfinite_values_are_counted_on_the_rank_that_has_them(ranks, name):
    rows, poor_rank = [4, 3], CHECKS[name].keywords["poor_rank"]
    expected = [rows[rank] * 6 * (3 if rank == poor_rank else 1) for rank in range(RANKS)]
    if "Fixed" in name:
        expected = [0, 0]  # Fixed does not look at data
    assert [part["nonfinite"] for part in ranks(name)] == expected


def test_all_ranks_raise_if_none_has_a_finite_value_and_can_continue(ranks):
    assert_all_joined(CHECKS.alone("nothing_on_any_rank"), ranks("nothing_on_any_rank"))


@CHECKS.names(empty_batches)
def test_a_rank_without_rows_takes_part_in_observing(ranks, name):
    assert_all_joined(CHECKS.alone(name), ranks(name))


def test_a_rank_without_rows_takes_part_in_initializing_a_learned_scale(ranks):
    for part in ranks("empty_learned"):
        assert_same_state(CHECKS.alone("empty_learned"), part)


def test_only_the_rank_with_nonfinite_values_warns_of_them(ranks):
    first, second = ranks("one_warning_on_the_rank_that_saw_them")
    assert first.pop("told") == []
    (told,) = second.pop("told")
    assert told.startswith("FakeQuantize at layer.act has observed 3 values")
    assert (first.pop("nonfinite"), second.pop("nonfinite")) == (0, 6)
    assert_same_state(first, second)
