"""DistributedDataParallel with observed and with learned quantizers."""

import copy
from functools import partial

import pytest

from fakequant import QuantSpec, observers, presets
from fakequant.testing.assertions import assert_same_bits, assert_same_state
from rank_quantizers import (
    OBSERVERS,
    assert_all_joined,
    batches,
    state_of,
    steps,
)
from straight_through import torch
from two_ranks import OWN_BUFFERS, Checks, dist

fqnn = pytest.importorskip("fakequant.nn")
nn = torch.nn

CHECKS = check = Checks()


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
    """Trains and returns the input, output and state of every quantizer after each step."""
    seen = []
    quantizers = dict(fqnn.named_quantizers(model))
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
        fqnn.LearnedFakeQuantize(QuantSpec(symmetric=False)),  # input without a gradient
        Layer(6, 8, fqnn.LearnedFakeQuantize(QuantSpec(bits=4, axis=0), shape=(8, 6))),
        fqnn.PACT(4, alpha=2.0),
        fqnn.LearnedFakeQuantize(QuantSpec(bits=4, signed=False, symmetric=False), init="lsq", learn_zero_point=False),
        fqnn.FakeQuantize(presets.uint8()),
        nn.Linear(8, 4),
    )


def scales_of(model):
    return [value.clone() for _, q in fqnn.named_quantizers(model) for value in (q.scale, q.zero_point)]


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
    """Two steps in every state. A parameter without a gradient would raise in the second."""
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


def replay(quantizer, seen):
    """Returns what one quantizer gives for the joined inputs of all ranks."""
    made = []
    for step in zip(*seen, strict=True):
        x = torch.cat([rank["x"] for rank in step])
        y = quantizer(x)
        made.append({"y": y.detach(), **state_of(quantizer)})
    return made


@CHECKS.names(ddp)
def test_ddp_training_has_the_ranges_of_the_joined_batch(ranks, name):
    parts = ranks(name)
    model = parallel_model(CHECKS[name].keywords["observer"])
    for path, quantizer in fqnn.named_quantizers(model):
        seen = [[step[f"module.{path}"] for step in part["seen"]] for part in parts]
        if path == "1.quantizer":  # quantizes a weight, which is equal on all ranks
            for first, second in zip(*seen, strict=True):
                assert_same_state(first, second)
                expected = steps(copy.deepcopy(quantizer), [first["x"]])[0]
                expected.pop("dx")
                assert_same_state(expected, {k: v for k, v in first.items() if k != "x"})
        else:
            expected = replay(quantizer, seen)
            found = [[{k: v for k, v in step.items() if k != "x"} for step in part] for part in seen]
            assert_all_joined(expected, found)


@CHECKS.names(ddp)
def test_ddp_training_keeps_parameters_equal_on_all_ranks(ranks, name):
    first, second = (part["parameters"] for part in ranks(name))
    start = list(parallel_model(observers.MinMax()).parameters())
    for one, other, before in zip(first, second, start, strict=True):
        assert_same_bits(one, other)
        assert not torch.equal(one, before)


@pytest.mark.parametrize("phase", PHASES)
def test_ddp_training_of_learned_scales_works_in_every_state(ranks, phase):
    first, second = (part[phase] for part in ranks("ddp_learned"))
    assert_same_state(first["state"], second["state"])
    for one, other in zip(first["parameters"], second["parameters"], strict=True):
        assert_same_bits(one, other)
    assert all(g is not None and g.isfinite().all() for g in first["gradients"])
    moved = [not torch.equal(*pair) for pair in zip(first["before"], first["after"], strict=True)]
    learned_ones = [moved[i] for i in (0, 2, 6)]  # scales: input, weight, activation
    if phase in ("observing", "learning", "learning again"):
        assert all(learned_ones)
    if "frozen" in phase:
        assert not any(moved)


@pytest.mark.parametrize("phase", ["frozen", "off", "frozen and off", "frozen and observing"])
def test_unused_learned_scales_have_zero_gradients_in_ddp(ranks, phase):
    parameters = [name for name, _ in learned_model().named_parameters()]
    for part in ranks("ddp_learned"):
        for name, gradient in zip(parameters, part[phase]["gradients"], strict=True):
            if name.endswith(("step_size", "offset", "alpha")):
                assert not gradient.any(), name
