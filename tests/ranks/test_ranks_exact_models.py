"""Prepared models on two ranks compute what one process with all the data computes.

This holds to the bit where sums are exact, so that their order does not matter: all scales of `exact_model` are powers
of two and stay so in training.
"""

import dataclasses
from contextlib import contextmanager, nullcontext

import pytest

import fakequant as fq
from fakequant import observers, recipes
from fakequant.testing.assertions import assert_same_state
from rank_models import (
    BATCHES,
    OBSERVED,
    RECIPES,
    WRAPPERS,
    ddp,
    distance,
    exact_data,
    exact_model,
    state_of,
    train,
)
from straight_through import torch
from two_ranks import OWN_BUFFERS, Checks, dist

fqnn = pytest.importorskip("fakequant.nn")
nn = torch.nn
F = nn.functional

CHECKS = check = Checks()
pytestmark = pytest.mark.usefixtures("torch_on_one_thread")  # as on the ranks


def power_of_two_scales(model, data):
    """Sets learned scales to powers of two, and a gradient factor independent of the number of rows."""
    fq.calibrate(model, [x for x, _ in data], progress=False)
    for path, quantizer in fqnn.named_quantizers(model):
        with torch.no_grad():
            quantizer.step_size.fill_(0.5 if "weight" in path else 16.0)
        quantizer.grad_factor = 2.0**-6


def exact_training(seat, recipe, wrapper, reverse=False, **options):
    """Four training steps, with the rows in reverse order if `reverse` is set."""
    config = RECIPES[recipe]()
    model, data = exact_model(config), exact_data(config)
    if reverse:
        data = [(x.flip(0), target.flip(0)) for x, target in data]
    model = WRAPPERS[wrapper](fq.prepare(model, config, data[0]), **options)
    return train(seat, model, data)


for _recipe in OBSERVED:
    for _wrapper in WRAPPERS:
        check(_recipe, _wrapper, recipe=_recipe, wrapper=_wrapper)(exact_training)
check("int8 ddp static", recipe="int8", wrapper="ddp", static_graph=True)(exact_training)
check("int8 ddp views", recipe="int8", wrapper="ddp", gradient_as_bucket_view=True, **OWN_BUFFERS)(exact_training)
check("int8 fsdp unsharded", recipe="int8", wrapper="fsdp", reshard_after_forward=False)(exact_training)


def exact_learned(seat, wrapper, frozen):
    """All steps with frozen scales; only the first with learning ones, which then stop being powers of two."""
    config = recipes.lsq(4, first_last_bits=None)
    model, data = fq.prepare(exact_model(config), config, exact_data(config)[0]), exact_data(config)
    power_of_two_scales(model, [(seat.part(x), target) for x, target in data])
    fqnn.switch_quantizers(model, frozen=frozen)
    return train(seat, WRAPPERS[wrapper](model), data if frozen else data[:1])


for _wrapper in WRAPPERS:
    check(_wrapper, "learning", wrapper=_wrapper, frozen=False)(exact_learned)
    check(_wrapper, "frozen", wrapper=_wrapper, frozen=True)(exact_learned)


def accumulate(seat, wrapper):
    """Exchanges the gradients of two batches once."""
    config = recipes.int8()
    model = WRAPPERS[wrapper](fq.prepare(exact_model(config), config, exact_data(config)[0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-9)
    for number, (x, target) in enumerate(exact_data(config)):
        last = number % 2 == 1
        if dist.is_initialized() and wrapper == "fsdp":
            model.set_requires_gradient_sync(last)
        with model.no_sync() if dist.is_initialized() and wrapper == "ddp" and not last else nullcontext():
            distance(model(seat.part(x)), seat.part(target)).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return state_of(model)


for _wrapper in WRAPPERS:
    check(_wrapper, wrapper=_wrapper)(accumulate)

CALIBRATIONS = {
    "int8": recipes.int8(),
    "lsq": recipes.lsq(4),
    **{
        type(observer).__name__: dataclasses.replace(
            recipes.int8(), default=dataclasses.replace(recipes.int8().default, activation_observer=observer)
        )
        for observer in (observers.MinMax(), observers.Histogram(bins=64, steps=8), observers.Percentile(99, bins=64))
    },
}


def calibrate(seat, config, wrapper=None):
    """Calibrates on another part of the data on each rank."""
    model = fq.prepare(exact_model(config), config, exact_data(config)[0])
    model = model if wrapper is None else WRAPPERS[wrapper](model)
    data = [(seat.part(x + number), seat.part(target)) for number, (x, target) in enumerate(exact_data(config))]
    return state_of(fq.calibrate(model, data, progress=False))


for _name, _config in CALIBRATIONS.items():
    check(_name, config=_config)(calibrate)
for _name in ("int8", "lsq"):
    for _wrapper in WRAPPERS:
        check(_name, _wrapper, config=CALIBRATIONS[_name], wrapper=_wrapper)(calibrate)


@contextmanager
def counted_messages(counts, name):
    """Counts messages of quantizers; those of DistributedDataParallel do not use `all_reduce`."""
    original = dist.all_reduce

    def counting(*args, **options):
        counts[name] = counts.get(name, 0) + 1
        return original(*args, **options)

    dist.all_reduce, counts[name] = counting, 0
    try:
        yield
    finally:
        dist.all_reduce = original


@check("int8", recipe="int8", wrapper="ddp")
@check("lsq", recipe="lsq", wrapper="ddp")
@check("int8_dynamic", recipe="int8_dynamic", wrapper="ddp")
@check("int4_weight_only", recipe="int4_weight_only", wrapper="ddp")
def messages(seat, recipe, wrapper):
    config = RECIPES[recipe]()
    data = [(seat.part(x), t) for x, t in exact_data(config)]
    model = fq.prepare(exact_model(config), config, data[0])
    counts = {}
    with counted_messages(counts, "calibrate"):
        fq.calibrate(model, data, steps=1, progress=False)
    wrapped = ddp(model)
    with counted_messages(counts, "train"):
        wrapped(data[0][0]).sum().backward()
    with counted_messages(counts, "evaluate"):
        wrapped.eval()(data[0][0])
    fqnn.switch_quantizers(wrapped.train(), frozen=True)
    with counted_messages(counts, "frozen"):
        wrapped(data[0][0]).sum().backward()
    return counts


def health(seat, wrapper):
    config = recipes.int8()
    model = fq.prepare(exact_model(config), config, exact_data(config)[0])
    data = exact_data(config)
    fq.calibrate(model, [seat.part(x) for x, _ in data], progress=False)
    wrapped = WRAPPERS[wrapper](model)
    return fq.health(wrapped, [x * 2 for x, _ in data]).to_dict()


for _wrapper in WRAPPERS:
    check(_wrapper, wrapper=_wrapper)(health)


@check()
def uneven_batches_with_frozen_ranges(seat):
    """Rank 1 has one batch less, and `join` answers for it. Observing quantizers would wait for it."""
    config = recipes.int8()
    model, data = fq.prepare(exact_model(config), config, exact_data(config)[0]), exact_data(config)
    fq.calibrate(model, [seat.part(x) for x, _ in data], progress=False)
    fqnn.switch_quantizers(model, frozen=True)
    wrapped = ddp(model, **OWN_BUFFERS)
    with wrapped.join():
        train(seat, wrapped, data[: BATCHES - seat.rank])
    return state_of(wrapped)


def start_of(recipe):
    config = RECIPES[recipe]()
    return fq.prepare(exact_model(config), config, exact_data(config)[0])


@CHECKS.names(exact_training)
def test_training_on_ranks_gives_the_weights_and_ranges_of_one_process(ranks, name):
    one_process = CHECKS.alone(name)
    for part in ranks(name):
        assert_same_state(one_process, part)
    before = dict(start_of(CHECKS[name].keywords["recipe"]).named_parameters())
    assert all(not torch.equal(value, one_process[path]) for path, value in before.items())


@pytest.mark.parametrize("recipe", OBSERVED)
def test_sums_in_the_exact_model_do_not_depend_on_the_order_of_rows(recipe):
    assert_same_state(
        CHECKS.alone(f"exact_training {recipe} ddp"), CHECKS.alone(f"exact_training {recipe} ddp", reverse=True)
    )


@pytest.mark.parametrize("recipe", OBSERVED)
def test_scales_of_the_exact_model_are_powers_of_two(recipe):
    scales = {path: v for path, v in CHECKS.alone(f"exact_training {recipe} ddp").items() if path.endswith(".scale")}
    assert len(scales) >= 3
    for path, scale in scales.items():
        assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5)), path


@CHECKS.names(exact_learned)
def test_learned_scales_on_ranks_train_as_in_one_process(ranks, name):
    one_process = CHECKS.alone(name)
    for part in ranks(name):
        assert_same_state(one_process, part)
    scales = [value for path, value in one_process.items() if path.endswith("step_size")]
    moved = [not torch.equal(torch.frexp(s).mantissa, torch.full_like(s, 0.5)) for s in scales]
    assert moved == [name.endswith("learning")] * len(scales)


@CHECKS.names(accumulate)
def test_accumulated_gradients_on_ranks_equal_those_of_one_process(ranks, name):
    for part in ranks(name):
        assert_same_state(CHECKS.alone(name), part)


@CHECKS.names(calibrate)
def test_calibrating_on_parts_of_the_data_gives_the_ranges_of_all_data(ranks, name):
    for part in ranks(name):
        assert_same_state(CHECKS.alone(name), part)


QUANTIZERS_OF_ACTIVATIONS = {"int8": 3, "int8_dynamic": 0, "int4_weight_only": 0}


@pytest.mark.parametrize("recipe", QUANTIZERS_OF_ACTIVATIONS)
def test_each_observing_quantizer_sends_one_message_per_step(ranks, recipe):
    number = QUANTIZERS_OF_ACTIVATIONS[recipe]
    for counts in ranks(f"messages {recipe}"):
        assert counts == {"calibrate": number, "train": number, "evaluate": 0, "frozen": 0}


def test_learned_scales_send_messages_only_during_calibration(ranks):
    for counts in ranks("messages lsq"):
        assert counts.pop("calibrate") > 0
        assert counts == {"train": 0, "evaluate": 0, "frozen": 0}


@CHECKS.names(health)
def test_health_on_ranks_equals_that_of_one_process(ranks, name):
    expected = CHECKS.alone(name)
    for part in ranks(name):
        found = {path.removeprefix("module."): {**row, "path": expected_path(row)} for path, row in part.items()}
        assert found == expected
    assert expected["0.input_quantizer"]["clipped"] > 0


def expected_path(row):
    return row["path"].removeprefix("module.")


def test_uneven_batches_can_be_joined_when_ranges_are_frozen(ranks):
    assert_same_state(*ranks("uneven_batches_with_frozen_ranges"))
