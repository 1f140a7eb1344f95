"""`Schedule` switches quantization, ranges and batch norms step by step."""

import copy

import pytest

import fakequant as fq
from calibration_cases import BATCHES, calibrated, make
from fakequant.testing.assertions import assert_same_bits

torch = pytest.importorskip("torch")
fqnn = pytest.importorskip("fakequant.nn")
recipes = pytest.importorskip("fakequant.recipes")


def seen(model):
    found = {(q.quantizing, q.frozen) for _, q in fqnn.named_quantizers(model)}
    assert len(found) == 1
    return *found.pop(), model[1].training


def run(model, schedule, steps):
    states = []
    for _ in range(steps):
        states.append(seen(model))
        schedule.step()
    return states


PLANS = {
    "all": (dict(quantize_from=1, freeze_ranges_at=2, freeze_norms_at=3), "f-t q-t qft qfe qfe"),
    "together": (dict(quantize_from=2, freeze_ranges_at=2, freeze_norms_at=2), "f-t f-t qfe qfe qfe"),
    "at once": (dict(quantize_from=0, freeze_ranges_at=0, freeze_norms_at=0), "qfe qfe qfe qfe qfe"),
    "nothing": (dict(), "q-t q-t q-t q-t q-t"),
    "quantize": (dict(quantize_from=3), "f-t f-t f-t q-t q-t"),
    "ranges": (dict(freeze_ranges_at=1), "q-t qft qft qft qft"),
    "norms": (dict(freeze_norms_at=1), "q-t q-e q-e q-e q-e"),
    "frozen in float": (dict(quantize_from=4, freeze_ranges_at=1), "f-t fft fft fft qft"),
}


def decode(states):
    return [(s[0] == "q", s[1] == "f", s[2] == "t") for s in states.split()]


@pytest.mark.parametrize(("plan", "states"), PLANS.values(), ids=PLANS)
def test_schedule_switches_at_the_given_steps(plan, states):
    model = calibrated().train()
    assert run(model, fq.Schedule(model, **plan), 5) == decode(states)


@pytest.mark.parametrize(("plan", "states"), PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("at", [0, 1, 2, 4])
@pytest.mark.parametrize("model_first", [True, False], ids=["model first", "schedule first"])
def test_schedule_loaded_from_a_saved_state_continues(plan, states, at, model_first):
    model = calibrated().train()
    schedule = fq.Schedule(model, **plan)
    run(model, schedule, at)
    saved = copy.deepcopy((model.state_dict(), schedule.state_dict()))
    model = make().train()
    schedule = fq.Schedule(model, **plan)
    if model_first:
        model.load_state_dict(saved[0], strict=True)
        schedule.load_state_dict(saved[1])
    else:
        schedule.load_state_dict(saved[1])
        model.load_state_dict(saved[0], strict=True)
    assert run(model, schedule, 5 - at) == decode(states)[at:]
    assert schedule.state_dict() == {"steps": 5}


def test_schedule_computes_in_float_and_observes_before_quantize_from():
    model = make().train()
    fq.Schedule(model, quantize_from=1)
    floats = fq.unprepare(copy.deepcopy(model))
    torch.manual_seed(1)
    y = model(BATCHES[0])
    torch.manual_seed(1)
    assert_same_bits(floats(BATCHES[0]), y)
    assert_same_bits(BATCHES[0].amax(), model[0].input_quantizer.running_max)


@pytest.mark.parametrize("config", [recipes.int8(), recipes.lsq(4)], ids=["observed", "learned"])
def test_frozen_ranges_survive_training_and_model_train(config):
    model = calibrated(config)
    schedule = fq.Schedule(model, freeze_ranges_at=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scales = None
    for step in range(4):
        model.train()
        optimizer.zero_grad()
        model((step + 1) * 5 * BATCHES[0]).square().mean().backward()
        optimizer.step()
        schedule.step()
        now = [q.qparams() for _, q in fqnn.named_quantizers(model)]
        for before, after in zip(scales or now, now, strict=True):
            assert_same_bits(before.scale, after.scale)
            assert_same_bits(before.zero_point, after.zero_point)
        scales = now


def norm_statistics(model):
    return [model[1].running_mean.clone(), model[1].running_var.clone(), model[1].num_batches_tracked.clone()]


def test_frozen_batch_norms_keep_their_statistics():
    model = calibrated().train()
    schedule = fq.Schedule(model, freeze_norms_at=1)
    model(BATCHES[0])
    schedule.step()
    before = norm_statistics(model)
    model(BATCHES[1])
    for expected, actual in zip(before, norm_statistics(model), strict=True):
        assert_same_bits(expected, actual)


def test_frozen_batch_norms_keep_their_statistics_after_model_train():
    model = calibrated().train()
    schedule = fq.Schedule(model, freeze_norms_at=1)
    schedule.step()
    before = norm_statistics(model)
    for _ in range(2):  # epochs
        model.eval()
        model.train()
        model(BATCHES[1])
        schedule.step()
    for expected, actual in zip(before, norm_statistics(model), strict=True):
        assert_same_bits(expected, actual)


def test_frozen_batch_norms_still_learn_their_factors():
    model = calibrated().train()
    fq.Schedule(model, freeze_norms_at=0)
    model(BATCHES[0]).square().mean().backward()
    assert torch.isfinite(model[1].weight.grad).all()


@pytest.mark.parametrize("name", ["quantize_from", "freeze_ranges_at", "freeze_norms_at"])
@pytest.mark.parametrize("value", [2.5, "3"], ids=repr)
def test_schedule_refuses_a_step_that_is_not_an_integer(name, value):
    with pytest.raises((TypeError, ValueError), match=name):
        fq.Schedule(make(), **{name: value})
