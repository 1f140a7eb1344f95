"""Observed ranges on two ranks are those of one process with all the batches."""

import copy
import io
import pickle

import pytest

from fakequant import QuantSpec, observers, presets
from fakequant.testing.assertions import assert_same_bits, assert_same_state
from rank_quantizers import (
    OBSERVERS,
    SHAPE,
    SPECS,
    assert_all_joined,
    batches,
    compiled,
    new_group,
    observe,
    state_of,
    steps,
)
from straight_through import torch
from thoroughness import ALL
from two_ranks import Checks, Seat

fqnn = pytest.importorskip("fakequant.nn")
nn = torch.nn

CHECKS = check = Checks()


WIDE = [torch.tensor([[-3e38, 1.0], [3e38, -1.0]]), torch.tensor([[1.0, 2e38], [-2e38, 5.0]])]
BEYOND_FLOAT32 = [
    torch.tensor([[-1e300, 0.1], [2, 1e300]], dtype=torch.float64),
    torch.tensor([[0.1], [1 / 3]], dtype=torch.float64),
]


for _name, _observer in OBSERVERS.items():
    for _kind, _spec in SPECS.items():
        check(_name, _kind, observer=_observer, spec=_spec)(observe)
for _dtype in (torch.float64, torch.bfloat16, torch.float16):
    for _name in ("MovingAverage", "Dynamic", "Histogram", "Percentile"):
        check(_name, str(_dtype), observer=OBSERVERS[_name], spec=SPECS["channel"], data=batches(_dtype))(observe)
for _name in ("MinMax", "MovingAverage", "Dynamic", "Histogram"):
    check(_name, "wide", observer=OBSERVERS[_name], spec=SPECS["tensor"], data=WIDE)(observe)
    check(_name, "beyond float32", observer=OBSERVERS[_name], spec=SPECS["tensor"], data=BEYOND_FLOAT32)(observe)
check("gradient pass", observer=OBSERVERS["MovingAverage"], spec=SPECS["tensor"], gradient="pass")(observe)
check("other eps", observer=OBSERVERS["MinMax"], spec=SPECS["channel"], eps=0.05)(observe)


@check("symmetric", symmetric=True)
@check("affine", symmetric=False)
def fused_as_in_torch_ao(seat, symmetric):
    spec = QuantSpec(symmetric=False, numerics="torch")
    return steps(fqnn.FusedFakeQuantize(spec, symmetric=symmetric), map(seat.part, batches()))


@check("Histogram", observer=OBSERVERS["Histogram"])
@check("MovingAverage", observer=OBSERVERS["MovingAverage"])
def observe_then_quantize(seat, observer):
    """The scale is needed only after the last step, in evaluation."""
    quantizer = fqnn.FakeQuantize(SPECS["channel"], observer, shape=SHAPE)
    quantizer.quantizing = False
    seen = steps(quantizer, map(seat.part, batches()))
    assert all(torch.equal(s["y"], seat.part(x)) for s, x in zip(seen, batches(), strict=True))
    quantizer.quantizing = True
    return steps(quantizer.eval(), [seat.part(batches()[0])])


@check()
def groups(seat):
    """Groups of a weight that is equal on all ranks."""
    weight = torch.randn(4, 8, generator=torch.Generator().manual_seed(2))
    return steps(fqnn.FakeQuantize(presets.int4(group_size=4), observers.MSE(8), shape=(4, 8)), [weight, weight * 0.7])


@check()
def tokens(seat):
    return steps(fqnn.FakeQuantize(presets.int8_per_token()), map(seat.part, batches()))


# --- ranks alone ------------------------------------------------------------------------------------------


@check()
def without_sync(seat):
    return observe(seat, OBSERVERS["MovingAverage"], SPECS["tensor"], sync=False)


@check()
def evaluate(seat):
    """Only rank 0 evaluates, as in many training scripts."""
    quantizers = [fqnn.FakeQuantize(spec, observers.Dynamic(), shape=SHAPE) for spec in SPECS.values()]
    quantizers += [fqnn.FakeQuantize(presets.uint8()), fqnn.FakeQuantize(presets.int8_per_token())]
    for quantizer in quantizers:
        quantizer(seat.part(batches()[0]))
        quantizer.eval()
    return [quantizer(batches()[1]) for quantizer in quantizers] if seat.rank != 1 else None


@check()
def save(seat):
    """Only rank 0 saves, which runs the range search."""
    quantizer = fqnn.FakeQuantize(presets.uint8(), OBSERVERS["Histogram"])
    quantizer.quantizing = False
    for x in batches():
        quantizer(seat.part(x))
    return quantizer.state_dict() if seat.rank != 1 else None


# --- process groups ---------------------------------------------------------------------------------------


@check()
def the_group_of_all(seat):
    return observe(seat, OBSERVERS["Histogram"], SPECS["channel"], process_group=new_group([0, 1]))


@check()
def a_group_of_one(seat):
    return observe(seat, OBSERVERS["MovingAverage"], SPECS["tensor"], process_group=new_group([0]))


def duplicated(seat, duplicate):
    """Steps of a quantizer with a process group and of a duplicate in the same group."""
    quantizer = fqnn.FakeQuantize(presets.uint8(), process_group=new_group([0, 1]))
    quantizer(seat.part(batches()[0]))
    other = duplicate(quantizer)
    return [*steps(quantizer, [seat.part(batches()[1])]), *steps(other, [seat.part(batches()[1])])]


def saved_whole(quantizer):
    file = io.BytesIO()
    torch.save(quantizer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


check("pickle", duplicate=lambda q: pickle.loads(pickle.dumps(q)))(duplicated)
check("deepcopy", duplicate=copy.deepcopy)(duplicated)
check("torch.save", duplicate=saved_whole)(duplicated)


@check()
def a_copy_stays_in_its_group(seat):
    """A copy, such as one for weight averaging, must not communicate with ranks outside its group."""
    quantizer = copy.deepcopy(fqnn.FakeQuantize(presets.uint8(), process_group=new_group([0])))
    return steps(quantizer, map(seat.part, batches())) if seat.rank != 1 else None


def compile_observing(seat, observer, group=False, quantizing=True):
    quantizer = fqnn.FakeQuantize(
        SPECS["channel"], observer, shape=SHAPE, process_group=new_group([0, 1]) if group else None
    )
    quantizer.quantizing = quantizing
    run = compiled(quantizer)
    seen = []
    for x in (batches()[i] for i in (0, 1, 3)):
        x = seat.part(x).clone().requires_grad_()
        y = run(x)
        y.sum().backward()
        seen.append({"y": y.detach(), "dx": x.grad, **state_of(quantizer)})
    return seen


for _name in ("Dynamic", "Histogram", "MSE") if ALL else ("Histogram",):
    check(_name, observer=OBSERVERS[_name])(compile_observing)
check("a group", observer=OBSERVERS["MovingAverage"], group=True)(compile_observing)
if ALL:
    check("only observing", observer=OBSERVERS["MinMax"], quantizing=False)(compile_observing)


# --- tests ------------------------------------------------------------------------------------------------


@CHECKS.names(observe)
def test_ranks_have_the_ranges_and_results_of_one_process_in_every_step(ranks, name):
    """MSE included: on this data the best range is clear despite the rounding of sums."""
    assert_all_joined(CHECKS.alone(name), ranks(name))


@pytest.mark.parametrize(
    "name",
    [
        "fused_as_in_torch_ao symmetric",
        "fused_as_in_torch_ao affine",
        "observe_then_quantize Histogram",
        "observe_then_quantize MovingAverage",
        "tokens",
        "the_group_of_all",
    ],
)
def test_fused_deferred_and_per_token_observing_on_ranks_equals_one_process(ranks, name):
    assert_all_joined(CHECKS.alone(name), ranks(name))


def test_ranks_quantize_groups_of_an_equal_weight_as_one_process_does(ranks):
    whole = CHECKS.alone("groups")
    for part in ranks("groups"):
        for expected, found in zip(whole, part, strict=True):
            assert_same_state(expected, found)


def test_a_rank_without_sync_has_the_range_of_its_own_batch(ranks):
    parts = ranks("without_sync")
    for rank, part in enumerate(parts):
        own = [Seat(rank).part(x) for x in batches()]
        quantizer = fqnn.FakeQuantize(SPECS["tensor"], OBSERVERS["MovingAverage"])
        for expected, found in zip(steps(quantizer, own), part, strict=True):
            assert_same_state(expected, found)
    assert not torch.equal(parts[0][0]["scale"], parts[1][0]["scale"])


def test_a_rank_can_evaluate_without_the_other(ranks):
    evaluated, nothing = ranks("evaluate")
    assert nothing is None
    for expected, found in zip(CHECKS.alone("evaluate"), evaluated, strict=True):
        assert_same_bits(expected, found)


def test_a_rank_can_save_without_the_other(ranks):
    saved, nothing = ranks("save")
    assert nothing is None
    assert_same_state(CHECKS.alone("save"), saved)
    assert saved["scale"].isfinite().all()


def test_a_process_group_of_one_rank_is_not_synchronized_with_the_other(ranks):
    for rank, part in enumerate(ranks("a_group_of_one")):
        own = [Seat(rank).part(x) for x in batches()]
        expected = steps(fqnn.FakeQuantize(SPECS["tensor"], OBSERVERS["MovingAverage"]), own)
        for one, other in zip(expected, part, strict=True):
            assert_same_state(one, other)


@CHECKS.names(duplicated)
def test_a_copied_quantizer_continues_in_its_process_group(ranks, name):
    whole, parts = CHECKS.alone(name), ranks(name)
    assert_all_joined(whole, parts)
    for part in parts:
        assert_same_state(*part)


def test_a_copy_of_a_quantizer_in_a_group_of_one_does_not_wait_for_the_other_rank(ranks):
    copied, nothing = ranks("a_copy_stays_in_its_group")
    assert nothing is None
    quantizer = fqnn.FakeQuantize(presets.uint8())
    for expected, found in zip(steps(quantizer, map(Seat(0).part, batches())), copied, strict=True):
        assert_same_state(expected, found)


@CHECKS.names(compile_observing)
def test_compiled_quantizers_on_ranks_have_the_ranges_of_one_process(ranks, name):
    options = CHECKS[name].keywords
    quantizer = fqnn.FakeQuantize(SPECS["channel"], options["observer"], shape=SHAPE)
    quantizer.quantizing = options.get("quantizing", True)
    assert_all_joined(steps(quantizer, [batches()[i] for i in (0, 1, 3)]), ranks(name))
