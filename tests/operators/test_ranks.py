"""Quantizers of processes that train together hold the same ranges: those of one process with all the batches."""

import copy
import io
import pickle
import warnings
from datetime import timedelta
from functools import partial

import pytest

from fakequant import QuantSpec, observers, presets
from fakequant.testing.assertions import assert_same_bits
from straight_through import torch
from two_ranks import (
    OWN_BUFFERS,
    PATIENCE,
    RANKS,
    Checks,
    Seat,
    array,
    assert_same_tensors,
    dist,
    outcomes_of,
    results_of,
)

fqnn = pytest.importorskip("fakequant.nn")
nn = torch.nn

NAN, INF = float("nan"), float("inf")


# --- data -----------------------------------------------------------------------------------------


def batches(dtype=torch.float32):
    """Seven rows of six channels: four rows for rank 0, three for rank 1. The last is much like the first."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(7, 6, generator=generator) * factor for factor in (1.0, 3.0, 0.01, 1.1)]
    made[1][:4], made[1][4:] = made[1][:4].abs(), -made[1][4:].abs()  # one sign per rank
    halves = (torch.arange(42.0) - 20.5).reshape(7, 6)  # ties of a grid with scale 1
    zeros = torch.zeros(7, 6)
    zeros[4:] = -0.0
    return [x.to(dtype) for x in (made[0], made[1], zeros, halves, made[2], made[3])]


WIDE = [torch.tensor([[-3e38, 1.0], [3e38, -1.0]]), torch.tensor([[1.0, 2e38], [-2e38, 5.0]])]
BEYOND_FLOAT32 = [
    torch.tensor([[-1e300, 0.1], [2, 1e300]], dtype=torch.float64),
    torch.tensor([[0.1], [1 / 3]], dtype=torch.float64),
]

OBSERVERS = {
    "MinMax": observers.MinMax(),
    "MovingAverage": observers.MovingAverage(0.3),
    "Dynamic": observers.Dynamic(),
    "Percentile": observers.Percentile(90.0, bins=64),
    "Histogram": observers.Histogram(bins=64, steps=8),
    "MSE": observers.MSE(8),
    "Entropy": observers.Entropy(bins=64, steps=8),
    "Fixed": observers.Fixed(-0.5, 2.0),
}
SPECS = {
    "tensor": presets.uint8(),
    "tensor, symmetric": QuantSpec(bits=4),
    "channel": QuantSpec(symmetric=False, axis=1),
    "channel, symmetric": QuantSpec(bits=3, narrow_range=True, axis=-1),
    "half_away": QuantSpec(symmetric=False, numerics="half_away"),
    "torch": QuantSpec(symmetric=False, numerics="torch"),
}
SHAPE = (None, 6)


# --- what is run on both ranks, and in one process ------------------------------------------------

CHECKS = check = Checks()


def state_of(quantizer):
    """Every buffer: ranges, scale, zero point, histograms."""
    return {name: value.detach().clone() for name, value in quantizer.named_buffers()}


def steps(quantizer, parts):
    """Forward and backward, with the state after each: what y was quantized with."""
    seen = []
    for x in parts:
        x = x.clone().requires_grad_()
        y = quantizer(x)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        seen.append({"y": y.detach(), "dx": dx, **state_of(quantizer)})
    return seen


def follow(seat, observer, spec, data=None, **options):
    quantizer = fqnn.FakeQuantize(spec, observer, shape=SHAPE, **options)
    return steps(quantizer, [seat.part(x) for x in (data or batches())])


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


# --- batches that hold nothing --------------------------------------------------------------------


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


# --- groups ---------------------------------------------------------------------------------------


def new_group(ranks):
    return dist.new_group(ranks, timeout=timedelta(seconds=PATIENCE)) if dist.is_initialized() else None


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


# --- learned --------------------------------------------------------------------------------------


def exact_batches():
    """Sixteenths, whose sums are exact: no order of adding them matters."""
    return [(x * 16).round() / 16 for x in batches()]


def learned(spec, **options):
    return fqnn.LearnedFakeQuantize(spec, shape=SHAPE, **options)


def initialize(seat, spec, data, init=None):
    first = learned(spec, init=init).initialize(seat.part(data()[0]))
    later = learned(spec, init=init)
    later.observing = True
    for x in data():
        later(seat.part(x))
    later.observing = False
    return {
        f"{name} {field}": value
        for name, quantizer in (("first", first), ("later", later))
        for field, value in zip(("scale", "zero_point"), quantizer.qparams(), strict=True)
    }


check("lsq tensor", spec=QuantSpec(bits=4), data=exact_batches)(initialize)
check("lsq channel", spec=QuantSpec(bits=2, axis=1), data=exact_batches)(initialize)
check("lsq random", spec=QuantSpec(bits=4, axis=1), data=batches)(initialize)
for _name in OBSERVERS:
    check(_name, spec=SPECS["channel"], data=batches, init=OBSERVERS[_name])(initialize)


@check()
def initialize_a_weight(seat):
    """The same everywhere: as many times as there are ranks is once."""
    weight = torch.randn(5, 7, generator=torch.Generator().manual_seed(3))
    return fqnn.LearnedFakeQuantize(QuantSpec(bits=3, axis=0), shape=(5, 7)).initialize(weight).scale


# --- DistributedDataParallel ----------------------------------------------------------------------


class Layer(nn.Linear):
    def __init__(self, inputs, outputs, quantizer):
        super().__init__(inputs, outputs)
        self.quantizer = quantizer

    def forward(self, x):
        return nn.functional.linear(x, self.quantizer(self.weight), self.bias)


def parallel(model, **options):
    if not dist.is_initialized():
        return model
    return nn.parallel.DistributedDataParallel(model, **options)


def train(seat, model, optimizer, data):
    """Training steps; what went into every quantizer, and what it held afterwards."""
    seen = []
    quantizers = dict(fqnn.quantizers(model))
    inputs, outputs = {}, {}

    def watch(name, module, args, y):
        inputs[name], outputs[name] = args[0].detach().clone(), y.detach().clone()

    hooks = [q.register_forward_hook(partial(watch, name)) for name, q in quantizers.items()]
    for x in data:
        optimizer.zero_grad()
        model(seat.part(x)).square().mean().backward()
        optimizer.step()
        seen.append({name: {"x": inputs[name], "y": outputs[name], **state_of(q)} for name, q in quantizers.items()})
    for hook in hooks:
        hook.remove()
    return seen


def parallel_model(observer):
    torch.manual_seed(4)
    return nn.Sequential(
        fqnn.FakeQuantize(presets.uint8(), observer),
        Layer(6, 8, fqnn.FakeQuantize(presets.int8(), observers.Dynamic(), shape=(8, 6))),
        nn.ReLU(),
        fqnn.FakeQuantize(QuantSpec(symmetric=False, axis=-1), observer, shape=(None, 8)),
        nn.Linear(8, 4),
    )


def ddp(seat, observer, **options):
    model = parallel(parallel_model(observer), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = train(seat, model, optimizer, batches())
    return {"seen": seen, "parameters": [p.detach() for p in model.parameters()]}


for _name in OBSERVERS:
    check(_name, observer=OBSERVERS[_name])(ddp)
check("own buffers", observer=OBSERVERS["MovingAverage"], **OWN_BUFFERS)(ddp)


def learned_model():
    torch.manual_seed(5)
    return nn.Sequential(
        fqnn.LearnedFakeQuantize(QuantSpec(symmetric=False)),  # its input needs no gradient
        Layer(6, 8, fqnn.LearnedFakeQuantize(QuantSpec(bits=4, axis=0), shape=(8, 6))),
        fqnn.PACT(4, alpha=2.0),
        fqnn.LearnedFakeQuantize(QuantSpec(bits=4, signed=False, symmetric=False), init="lsq", learn_zero_point=False),
        fqnn.FakeQuantize(presets.uint8()),
        nn.Linear(8, 4),
    )


def scales_of(model):
    return [value.clone() for _, q in fqnn.quantizers(model) for value in (q.scale, q.zero_point)]


PHASES = {
    "observing": dict(observing=True),
    "learning": dict(observing=False),
    "frozen": dict(frozen=True),
    "learning again": dict(frozen=False),
    "off": dict(quantizing=False),
    "frozen and off": dict(frozen=True),
    "frozen and observing": dict(observing=True, quantizing=True),
}


@check()
def ddp_learned(seat):
    """Through every state, two steps each: parameters without a gradient would be an error in the second."""
    model = parallel(learned_model())
    optimizer = torch.optim.AdamW(fqnn.param_groups(model), lr=0.01)
    seen = {}
    for phase, switches in PHASES.items():
        fqnn.switch_quantizers(model, **switches)
        before = scales_of(model)
        train(seat, model, optimizer, batches()[:2])
        seen[phase] = {
            "before": before,
            "after": scales_of(model),
            "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
            "parameters": [p.detach().clone() for p in model.parameters()],
            "state": {k: v.clone() for k, v in model.state_dict().items()},
        }
    return seen


# --- compiled -------------------------------------------------------------------------------------


def compiled(module):
    torch._dynamo.reset()
    return torch.compile(module, fullgraph=True, backend="aot_eager")


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


LEARNED_STATES = {
    "learning": {},
    "frozen": dict(frozen=True),
    "off": dict(quantizing=False),
    "observing": dict(observing=True),
}


def compile_learned(seat, switches, wrap=compiled):
    quantizer = learned(SPECS["channel"]).initialize(seat.part(batches()[0]))
    fqnn.switch_quantizers(quantizer, **switches)
    x = seat.part(batches()[1]).clone().requires_grad_()
    y = wrap(quantizer)(x)
    y.sum().backward()
    gradients = [quantizer.step_size.grad, quantizer.offset.grad]
    return {"y": y.detach(), "dx": x.grad, "gradients": gradients, **state_of(quantizer)}


for _name, _switches in LEARNED_STATES.items():
    check(_name, switches=_switches)(compile_learned)
    check(_name, "eager", switches=_switches, wrap=lambda module: module)(compile_learned)


# --- running them ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_of(__name__, tmp_path_factory)


@pytest.fixture
def ranks(outcomes):
    return partial(results_of, outcomes)


def alone(name):
    return CHECKS[name](Seat())


OF_THE_BATCH = ("x", "y", "dx")  # the rows of a rank; everything else is the same on all


def assert_joined(whole, parts, *where):
    """What every rank has is what one process has, except for the rows."""
    for name, expected in whole.items():
        found = [part[name] for part in parts]
        if name in OF_THE_BATCH:
            assert_same_bits(array(expected), array(torch.cat(found)), *where, name)
        else:
            for rank, value in enumerate(found):
                assert_same_bits(array(expected), array(value), *where, f"rank {rank}", name)


def assert_all_joined(whole, parts):
    for number, (expected, *found) in enumerate(zip(whole, *parts, strict=True)):
        assert_joined(expected, found, f"step {number}")


# --- tests ----------------------------------------------------------------------------------------


@CHECKS.names(follow)
def test_ranges_and_results_are_those_of_one_process_in_every_step(ranks, name):
    """For MSE too: here the least error is far enough from the next for the rounding of sums."""
    assert_all_joined(alone(name), ranks(name))


@pytest.mark.parametrize(
    "name",
    [
        "fused_as_in_torch_ao symmetric",
        "fused_as_in_torch_ao affine",
        "observe_then_quantize Histogram",
        "observe_then_quantize MovingAverage",
        "tokens",
        "the_group_of_all",
        "nothing_on_any_rank",
    ],
)
def test_other_ways_are_those_of_one_process(ranks, name):
    assert_all_joined(alone(name), ranks(name))


def test_groups_of_a_weight_that_is_the_same_on_all_ranks(ranks):
    whole = alone("groups")
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
    for expected, found in zip(alone("evaluate"), evaluated, strict=True):
        assert_same_bits(array(expected), array(found))


def test_a_rank_that_saves_alone_waits_for_nobody(ranks):
    saved, nothing = ranks("save")
    assert nothing is None
    assert_same_tensors(alone("save"), saved)
    assert saved["scale"].isfinite().all()


@CHECKS.names(poor)
@pytest.mark.filterwarnings("ignore:.*NaN or infinite:RuntimeWarning")
def test_a_rank_with_nothing_finite_changes_nothing(ranks, name):
    whole, parts = alone(name), ranks(name)
    assert_all_joined(whole["seen"], [part["seen"] for part in parts])
    assert sum(part["nonfinite"] for part in parts) == whole["nonfinite"]


@CHECKS.names(poor)
def test_values_that_are_not_finite_are_counted_by_the_rank_that_has_them(ranks, name):
    rows, poor_rank = [4, 3], CHECKS[name].keywords["here"]
    expected = [rows[rank] * 6 * (3 if rank == poor_rank else 1) for rank in range(RANKS)]
    if "Fixed" in name:
        expected = [0, 0]  # it never looks
    assert [part["nonfinite"] for part in ranks(name)] == expected


@CHECKS.names(empty)
def test_a_rank_without_rows_takes_part(ranks, name):
    assert_all_joined(alone(name), ranks(name))


def test_a_rank_without_rows_takes_part_in_the_initialization(ranks):
    for part in ranks("empty_learned"):
        assert_same_tensors(alone("empty_learned"), part)


def test_the_warning_is_of_the_rank_that_saw_them(ranks):
    first, second = ranks("one_warning_on_the_rank_that_saw_them")
    assert first.pop("told") == []
    (told,) = second.pop("told")
    assert told.startswith("FakeQuantize at layer.act has observed 3 values")
    assert (first.pop("nonfinite"), second.pop("nonfinite")) == (0, 6)
    assert_same_tensors(first, second)


def test_a_group_of_one_rank_and_a_rank_outside_it_are_alone(ranks):
    for rank, part in enumerate(ranks("a_group_of_one")):
        own = [Seat(rank).part(x) for x in batches()]
        expected = steps(fqnn.FakeQuantize(SPECS["tensor"], OBSERVERS["MovingAverage"]), own)
        for one, other in zip(expected, part, strict=True):
            assert_same_tensors(one, other)


@CHECKS.names(duplicated)
def test_a_module_with_a_group_can_be_copied_and_goes_on(ranks, name):
    whole, parts = alone(name), ranks(name)
    assert_all_joined(whole, parts)
    for part in parts:
        assert_same_tensors(*part)


def test_a_copy_stays_in_its_group(ranks):
    copied, nothing = ranks("a_copy_stays_in_its_group")
    assert nothing is None
    quantizer = fqnn.FakeQuantize(presets.uint8())
    for expected, found in zip(steps(quantizer, map(Seat(0).part, batches())), copied, strict=True):
        assert_same_tensors(expected, found)


# --- learned --------------------------------------------------------------------------------------

# Sums in float64 of another order may end in another bit, and a float32 made from them in the next one.
ONE_ULP = 2.0**-23


@CHECKS.names(initialize)
def test_learned_scales_start_from_the_data_of_all_ranks(ranks, name):
    whole, (first, second) = alone(name), ranks(name)
    assert_same_tensors(first, second)
    if name == "initialize lsq random":
        for field, value in whole.items():
            torch.testing.assert_close(first[field], value, rtol=ONE_ULP, atol=0)
    else:
        assert_same_tensors(whole, first)
    assert not all(torch.equal(whole[f"first {f}"], whole[f"later {f}"]) for f in ("scale", "zero_point")) or (
        "Fixed" in name
    )


def test_a_weight_that_all_ranks_have_counts_once(ranks):
    for scale in ranks("initialize_a_weight"):
        assert_same_bits(array(alone("initialize_a_weight")), array(scale))


# --- DistributedDataParallel ----------------------------------------------------------------------


def replay(quantizer, seen):
    """One process that is shown what all ranks were shown, joined."""
    made = []
    for step in zip(*seen, strict=True):
        x = torch.cat([rank["x"] for rank in step])
        y = quantizer(x)
        made.append({"y": y.detach(), **state_of(quantizer)})
    return made


@CHECKS.names(ddp)
def test_in_parallel_training_ranges_are_those_of_the_joined_batch(ranks, name):
    parts = ranks(name)
    model = parallel_model(CHECKS[name].keywords["observer"])
    for path, quantizer in fqnn.quantizers(model):
        seen = [[step[f"module.{path}"] for step in part["seen"]] for part in parts]
        if path == "1.quantizer":  # of a weight, which is the same on all ranks
            for first, second in zip(*seen, strict=True):
                assert_same_tensors(first, second)
                expected = steps(copy.deepcopy(quantizer), [first["x"]])[0]
                expected.pop("dx")
                assert_same_tensors(expected, {k: v for k, v in first.items() if k != "x"})
        else:
            expected = replay(quantizer, seen)
            found = [[{k: v for k, v in step.items() if k != "x"} for step in part] for part in seen]
            assert_all_joined(expected, found)


@CHECKS.names(ddp)
def test_parallel_training_keeps_the_parameters_of_all_ranks_the_same(ranks, name):
    first, second = (part["parameters"] for part in ranks(name))
    start = list(parallel_model(observers.MinMax()).parameters())
    for one, other, before in zip(first, second, start, strict=True):
        assert_same_bits(array(one), array(other))
        assert not torch.equal(one, before)


@pytest.mark.parametrize("phase", PHASES)
def test_parallel_training_of_learned_scales_works_in_every_state(ranks, phase):
    first, second = (part[phase] for part in ranks("ddp_learned"))
    assert_same_tensors(first["state"], second["state"])
    for one, other in zip(first["parameters"], second["parameters"], strict=True):
        assert_same_bits(array(one), array(other))
    assert all(g is not None and g.isfinite().all() for g in first["gradients"])
    moved = [not torch.equal(*pair) for pair in zip(first["before"], first["after"], strict=True)]
    learned_ones = [moved[i] for i in (0, 2, 6)]  # scales: input, weight, activation
    if phase in ("observing", "learning", "learning again"):
        assert all(learned_ones)
    if "frozen" in phase:
        assert not any(moved)


@pytest.mark.parametrize("phase", ["frozen", "off", "frozen and off", "frozen and observing"])
def test_learned_scales_that_are_not_in_use_have_gradients_of_zero(ranks, phase):
    parameters = [name for name, _ in learned_model().named_parameters()]
    for part in ranks("ddp_learned"):
        for name, gradient in zip(parameters, part[phase]["gradients"], strict=True):
            if name.endswith(("step_size", "offset", "alpha")):
                assert not gradient.any(), name


# --- compiled -------------------------------------------------------------------------------------


@CHECKS.names(compile_observing)
def test_compiled_quantizers_have_the_ranges_of_one_process(ranks, name):
    options = CHECKS[name].keywords
    quantizer = fqnn.FakeQuantize(SPECS["channel"], options["observer"], shape=SHAPE)
    quantizer.quantizing = options.get("quantizing", True)
    assert_all_joined(steps(quantizer, [batches()[i] for i in (0, 1, 3)]), ranks(name))


@pytest.mark.parametrize("state", LEARNED_STATES)
def test_compiled_learned_quantizers_have_the_bits_of_eager_ones(ranks, state):
    for found, expected in zip(ranks(f"compile_learned {state}"), ranks(f"compile_learned {state} eager"), strict=True):
        for one, other in zip(expected.pop("gradients"), found.pop("gradients"), strict=True):
            assert_same_bits(array(one), array(other))
        assert_same_tensors(expected, found)
