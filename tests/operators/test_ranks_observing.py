"""Observed ranges on two ranks are those of one process with all the batches."""

import copy
import io
import pickle

import pytest

from fakequant import QuantSpec, observers, presets
from fakequant.testing.assertions import assert_same_bits
from rank_quantizers import (
    OBSERVERS,
    SHAPE,
    SPECS,
    assert_all_joined,
    batches,
    compiled,
    follow,
    new_group,
    state_of,
    steps,
)
from straight_through import torch
from two_ranks import Checks, Seat, array, assert_same_tensors

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
        check(_name, _kind, observer=_observer, spec=_spec)(follow)
for _dtype in (torch.float64, torch.bfloat16, torch.float16):
    for _name in ("MovingAverage", "Dynamic", "Histogram", "Percentile"):
        check(_name, str(_dtype), observer=OBSERVERS[_name], spec=SPECS["channel"], data=batches(_dtype))(follow)
for _name in ("MinMax", "MovingAverage", "Dynamic", "Histogram"):
    check(_name, "wide", observer=OBSERVERS[_name], spec=SPECS["tensor"], data=WIDE)(follow)
    check(_name, "beyond float32", observer=OBSERVERS[_name], spec=SPECS["tensor"], data=BEYOND_FLOAT32)(follow)
check("pass", observer=OBSERVERS["MovingAverage"], spec=SPECS["tensor"], gradient="pass")(follow)
check("eps", observer=OBSERVERS["MinMax"], spec=SPECS["channel"], eps=0.05)(follow)


@check("symmetric", symmetric=True)
@check("affine", symmetric=False)
def fused_as_in_torch_ao(seat, symmetric):
    spec = QuantSpec(symmetric=False, numerics="torch")
    return steps(fqnn.FusedFakeQuantize(spec, symmetric=symmetric), map(seat.part, batches()))


@check("Histogram", observer=OBSERVERS["Histogram"])
@check("MovingAverage", observer=OBSERVERS["MovingAverage"])
def observe_then_quantize(seat, observer):
    """The scale is first needed after the last step, in evaluation."""
    quantizer = fqnn.FakeQuantize(SPECS["channel"], observer, shape=SHAPE)
    quantizer.quantizing = False
    seen = steps(quantizer, map(seat.part, batches()))
    assert all(torch.equal(s["y"], seat.part(x)) for s, x in zip(seen, batches(), strict=True))
    quantizer.quantizing = True
    return steps(quantizer.eval(), [seat.part(batches()[0])])


@check()
def groups(seat):
    """Of a weight that is the same everywhere."""
    weight = torch.randn(4, 8, generator=torch.Generator().manual_seed(2))
    return steps(fqnn.FakeQuantize(presets.int4(group=4), observers.MSE(8), shape=(4, 8)), [weight, weight * 0.7])


@check()
def tokens(seat):
    return steps(fqnn.FakeQuantize(presets.int8_per_token()), map(seat.part, batches()))


# --- ranks on their own ---------------------------------------------------------------------------


@check()
def without_sync(seat):
    return follow(seat, OBSERVERS["MovingAverage"], SPECS["tensor"], sync=False)


@check()
def evaluate(seat):
    """Only rank 0 does, as in many training scripts."""
    quantizers = [fqnn.FakeQuantize(spec, observers.Dynamic(), shape=SHAPE) for spec in SPECS.values()]
    quantizers += [fqnn.FakeQuantize(presets.uint8()), fqnn.FakeQuantize(presets.int8_per_token())]
    for quantizer in quantizers:
        quantizer(seat.part(batches()[0]))
        quantizer.eval()
    return [quantizer(batches()[1]) for quantizer in quantizers] if seat.rank != 1 else None


@check()
def save(seat):
    """Only rank 0 does; searches are then due."""
    quantizer = fqnn.FakeQuantize(presets.uint8(), OBSERVERS["Histogram"])
    quantizer.quantizing = False
    for x in batches():
        quantizer(seat.part(x))
    return quantizer.state_dict() if seat.rank != 1 else None


# --- groups ---------------------------------------------------------------------------------------


@check()
def the_group_of_all(seat):
    return follow(seat, OBSERVERS["Histogram"], SPECS["channel"], process_group=new_group([0, 1]))


@check()
def a_group_of_one(seat):
    return follow(seat, OBSERVERS["MovingAverage"], SPECS["tensor"], process_group=new_group([0]))


def duplicated(seat, duplicate):
    """A module with a group: whether its copy can be made, has its bits, and can go on in the same group."""
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
    """An average of a model's copies, for instance, must not start to talk with other ranks."""
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


for _name in ("Dynamic", "Histogram", "MSE"):
    check(_name, observer=OBSERVERS[_name])(compile_observing)
check("a group", observer=OBSERVERS["MovingAverage"], group=True)(compile_observing)
check("only observing", observer=OBSERVERS["MinMax"], quantizing=False)(compile_observing)


# --- tests ----------------------------------------------------------------------------------------


@CHECKS.names(follow)
def test_ranges_and_results_are_those_of_one_process_in_every_step(ranks, name):
    """For MSE too: here the least error is far enough from the next for the rounding of sums."""
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
def test_other_ways_are_those_of_one_process(ranks, name):
    assert_all_joined(CHECKS.alone(name), ranks(name))


def test_groups_of_a_weight_that_is_the_same_on_all_ranks(ranks):
    whole = CHECKS.alone("groups")
    for part in ranks("groups"):
        for expected, found in zip(whole, part, strict=True):
            assert_same_tensors(expected, found)


def test_without_sync_every_rank_has_the_range_of_its_own_batch(ranks):
    parts = ranks("without_sync")
    for rank, part in enumerate(parts):
        own = [Seat(rank).part(x) for x in batches()]
        quantizer = fqnn.FakeQuantize(SPECS["tensor"], OBSERVERS["MovingAverage"])
        for expected, found in zip(steps(quantizer, own), part, strict=True):
            assert_same_tensors(expected, found)
    assert not torch.equal(parts[0][0]["scale"], parts[1][0]["scale"])


def test_a_rank_that_evaluates_alone_waits_for_nobody(ranks):
    evaluated, nothing = ranks("evaluate")
    assert nothing is None
    for expected, found in zip(CHECKS.alone("evaluate"), evaluated, strict=True):
        assert_same_bits(array(expected), array(found))


def test_a_rank_that_saves_alone_waits_for_nobody(ranks):
    saved, nothing = ranks("save")
    assert nothing is None
    assert_same_tensors(CHECKS.alone("save"), saved)
    assert saved["scale"].isfinite().all()


def test_a_group_of_one_rank_and_a_rank_outside_it_are_alone(ranks):
    for rank, part in enumerate(ranks("a_group_of_one")):
        own = [Seat(rank).part(x) for x in batches()]
        expected = steps(fqnn.FakeQuantize(SPECS["tensor"], OBSERVERS["MovingAverage"]), own)
        for one, other in zip(expected, part, strict=True):
            assert_same_tensors(one, other)


@CHECKS.names(duplicated)
def test_a_module_with_a_group_can_be_copied_and_goes_on(ranks, name):
    whole, parts = CHECKS.alone(name), ranks(name)
    assert_all_joined(whole, parts)
    for part in parts:
        assert_same_tensors(*part)


def test_a_copy_stays_in_its_group(ranks):
    copied, nothing = ranks("a_copy_stays_in_its_group")
    assert nothing is None
    quantizer = fqnn.FakeQuantize(presets.uint8())
    for expected, found in zip(steps(quantizer, map(Seat(0).part, batches())), copied, strict=True):
        assert_same_tensors(expected, found)


@CHECKS.names(compile_observing)
def test_compiled_quantizers_have_the_ranges_of_one_process(ranks, name):
    options = CHECKS[name].keywords
    quantizer = fqnn.FakeQuantize(SPECS["channel"], options["observer"], shape=SHAPE)
    quantizer.quantizing = options.get("quantizing", True)
    assert_all_joined(steps(quantizer, [batches()[i] for i in (0, 1, 3)]), ranks(name))
