"""Ranks whose batch is empty or not finite take part in observing and change nothing."""

import warnings

import pytest

from fakequant import QuantSpec, presets
from rank_quantizers import INF, NAN, OBSERVERS, SHAPE, SPECS, assert_all_joined, batches, state_of, steps
from straight_through import torch
from two_ranks import RANKS, Checks, assert_same_tensors

fqnn = pytest.importorskip("fakequant.nn")
nn = torch.nn

CHECKS = check = Checks()


def poor(seat, here, observer, kind):
    """In the second step a rank has nothing to say, in the third neither has: three times the same quantizer."""
    first, second, *_ = batches()
    poor_first, poor_second = first.clone(), second.clone()
    half = slice(4, 7) if here == 1 else slice(0, 4)
    poor_first[half] = poor_second[half] = NAN
    poor_second[half.start] = INF
    quantizer = fqnn.FakeQuantize(SPECS[kind], observer, shape=SHAPE)
    seen = []
    with warnings.catch_warnings(action="ignore"):  # that there were such values
        for x in (poor_first, second, poor_second, torch.full_like(first, NAN), second):
            y = quantizer(seat.part(x))
            seen.append({"y": y, **state_of(quantizer)})
    return {"seen": seen, "nonfinite": quantizer.nonfinite}


for _name in OBSERVERS:
    check(_name, "tensor", here=1, observer=OBSERVERS[_name], kind="tensor")(poor)
    check(_name, "channel", here=0, observer=OBSERVERS[_name], kind="channel")(poor)


def empty(seat, observer, kind, quantizing=True):
    """Rank 1 has no rows in the first step, rank 0 none in the third, neither any in the fourth."""
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
        check(_name, _kind, observer=OBSERVERS[_name], kind=_kind)(empty)
check("only observing", observer=OBSERVERS["Histogram"], kind="tensor", quantizing=False)(empty)


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
    """Is an error on every rank, not a hang and not a scale of nothing."""
    quantizer = fqnn.FakeQuantize(presets.uint8(), path="layer.act")
    with warnings.catch_warnings(action="ignore"), pytest.raises((RuntimeError, ValueError), match=r"layer\.act"):
        quantizer(seat.part(torch.full((7, 6), NAN)))
    return steps(quantizer, [seat.part(batches()[0])])


@check()
def one_warning_on_the_rank_that_saw_them(seat):
    x = batches()[0].clone()
    x[6, 0], x[6, 1], x[5, 5] = NAN, INF, -INF  # rank 1's
    quantizer = fqnn.FakeQuantize(presets.uint8(), path="layer.act")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            quantizer(seat.part(x))
    return {"told": [str(w.message) for w in told], "nonfinite": quantizer.nonfinite, **state_of(quantizer)}


@CHECKS.names(poor)
@pytest.mark.filterwarnings("ignore:.*NaN or infinite:RuntimeWarning")
def test_a_rank_with_nothing_finite_changes_nothing(ranks, name):
    whole, parts = CHECKS.alone(name), ranks(name)
    assert_all_joined(whole["seen"], [part["seen"] for part in parts])
    assert sum(part["nonfinite"] for part in parts) == whole["nonfinite"]


@CHECKS.names(poor)
def test_values_that_are_not_finite_are_counted_by_the_rank_that_has_them(ranks, name):
    rows, poor_rank = [4, 3], CHECKS[name].keywords["here"]
    expected = [rows[rank] * 6 * (3 if rank == poor_rank else 1) for rank in range(RANKS)]
    if "Fixed" in name:
        expected = [0, 0]  # it never looks
    assert [part["nonfinite"] for part in ranks(name)] == expected


def test_an_error_on_all_ranks_leaves_the_quantizer_usable(ranks):
    assert_all_joined(CHECKS.alone("nothing_on_any_rank"), ranks("nothing_on_any_rank"))


@CHECKS.names(empty)
def test_a_rank_without_rows_takes_part(ranks, name):
    assert_all_joined(CHECKS.alone(name), ranks(name))


def test_a_rank_without_rows_takes_part_in_the_initialization(ranks):
    for part in ranks("empty_learned"):
        assert_same_tensors(CHECKS.alone("empty_learned"), part)


def test_the_warning_is_of_the_rank_that_saw_them(ranks):
    first, second = ranks("one_warning_on_the_rank_that_saw_them")
    assert first.pop("told") == []
    (told,) = second.pop("told")
    assert told.startswith("FakeQuantize at layer.act has observed 3 values")
    assert (first.pop("nonfinite"), second.pop("nonfinite")) == (0, 6)
    assert_same_tensors(first, second)
