"""Prepared models on two ranks are what one process with all the data makes of them, where the mathematics is the same.

It is where sums are exact, so that nobody can tell in which order they were added: all scales of `exact_model` are
powers of two and stay so while it trains. Elsewhere the ranks agree with each other, to the bit.
"""

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import pytest

import fakequant as fq
from fakequant import observers, presets, recipes
from straight_through import torch
from two_ranks import OWN_BUFFERS, RANKS, Checks, Seat, assert_same_tensors, dist, outcomes_of, results_of

fqnn = pytest.importorskip("fakequant.nn")
nn = torch.nn
F = nn.functional

CHECKS = check = Checks()
RECIPES = {
    "int8": recipes.int8,
    "w4a8": partial(recipes.w4a8, first_last_bits=None),  # the same grid everywhere: its sums are exact
    "int8_dynamic": recipes.int8_dynamic,
    "int4_weight_only": partial(recipes.int4_weight_only, 4),
    "lsq": partial(recipes.lsq, 4, first_last_bits=None),
}
OBSERVED = [name for name in RECIPES if name != "lsq"]


# --- models whose sums are exact ------------------------------------------------------------------

WIDTH, ROWS, BATCHES = 8, 16, 4
FULL, EMPTY = 0, [1, 5]  # inputs of a layer that are always the largest value, and always 0; one per group of 4


def reach(spec):
    """The largest magnitude of a range whose scale is 1."""
    return (spec.qmax - spec.qmin) / (2 if spec.symmetric else 1)


def exact_layer(layer, spec):
    """Weights of sixteenths whose largest stay as they are, because what they are multiplied with is 0."""
    largest = reach(spec)
    while largest > 8:
        largest /= 2
    weight = (torch.randn(layer.weight.shape) * 4 * largest).round().clamp(-12 * largest, 12 * largest) / 16
    weight[:, FULL] = 0
    weight[:, EMPTY] = largest
    if layer.out_features == WIDTH:
        weight[[FULL, *EMPTY]] = 0
        weight[[FULL, *EMPTY], 1] = weight[[FULL, *EMPTY], 5] = largest
        weight[FULL, FULL], weight[EMPTY, FULL] = largest, -largest
    layer.weight.data.copy_(weight)


def exact_model(config):
    """The clamps give every layer an input with a full and two empty columns, through which no gradient passes."""
    torch.manual_seed(6)
    top = reach(config.default.input or presets.uint8())
    layers = [nn.Linear(WIDTH, outputs, bias=False) for outputs in (WIDTH, WIDTH, 4)]
    for layer in layers:
        exact_layer(layer, config.default.weight)
    return nn.Sequential(layers[0], nn.Hardtanh(0, top), layers[1], nn.Hardtanh(0, top), layers[2])


def exact_data(config):
    generator = torch.Generator().manual_seed(7)
    made = []
    for _ in range(BATCHES):
        x = torch.randint(0, 256, (ROWS, WIDTH), generator=generator) / 16
        x[:, FULL], x[:, EMPTY] = reach(config.default.input or presets.uint8()), 0
        made.append((x, torch.randint(-99, 99, (ROWS, 4), generator=generator).float()))
    return made


def power_of_two_scales(model, data):
    """Learned scales that exact sums begin with, and a factor that does not depend on the number of rows here."""
    fq.calibrate(model, [x for x, _ in data], progress=False)
    for path, quantizer in fqnn.quantizers(model):
        with torch.no_grad():
            quantizer.step_size.fill_(0.5 if "weight" in path else 16.0)
        quantizer.grad_factor = 2.0**-6


# --- wrapping -------------------------------------------------------------------------------------


def ddp(model, **options):
    return nn.parallel.DistributedDataParallel(model, **options) if dist.is_initialized() else model


def fsdp(model, **options):
    if not dist.is_initialized():
        return model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    options["mesh"] = init_device_mesh("cpu", (RANKS,))
    for module in model.modules():
        if any(name.endswith("weight_quantizer") for name, _ in module.named_children()):
            fully_shard(module, **options)
    return fully_shard(model, **options)


WRAPPERS = {"ddp": ddp, "fsdp": fsdp}


def whole(value):
    value = value.detach()
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


def state_of(model):
    """Parameters and buffers by their names in the model that was wrapped."""
    return {name.removeprefix("module."): whole(value) for name, value in model.state_dict().items()}


def distance(y, target):
    """Its gradients are 1, 0 and -1, divided by a power of two."""
    return (y - target).abs().mean()


def train(seat, model, data, optimizer=None, loss=distance, after=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=2.0**-9)
    for x, target in data:
        optimizer.zero_grad()
        loss(model(seat.part(x)), seat.part(target)).backward()
        optimizer.step()
        if after is not None:
            after()
    return state_of(model)


# --- the same as one process ----------------------------------------------------------------------


def exact(seat, recipe, wrapper, turn=False, **options):
    """Four training steps, in the second with the rows from the last to the first if they `turn`."""
    config = RECIPES[recipe]()
    model, data = exact_model(config), exact_data(config)
    if turn:
        data = [(x.flip(0), target.flip(0)) for x, target in data]
    model = WRAPPERS[wrapper](fq.prepare(model, config), **options)
    return train(seat, model, data)


for _recipe in OBSERVED:
    for _wrapper in WRAPPERS:
        check(_recipe, _wrapper, recipe=_recipe, wrapper=_wrapper)(exact)
check("int8 ddp static", recipe="int8", wrapper="ddp", static_graph=True)(exact)
check("int8 ddp views", recipe="int8", wrapper="ddp", gradient_as_bucket_view=True, **OWN_BUFFERS)(exact)
check("int8 fsdp unsharded", recipe="int8", wrapper="fsdp", reshard_after_forward=False)(exact)


def exact_learned(seat, wrapper, frozen):
    """With scales that stay, all steps; with scales that learn the first, after which they are no powers of two."""
    config = recipes.lsq(4, first_last_bits=None)
    model, data = fq.prepare(exact_model(config), config), exact_data(config)
    power_of_two_scales(model, [(seat.part(x), target) for x, target in data])
    fqnn.switch_quantizers(model, frozen=frozen)
    return train(seat, WRAPPERS[wrapper](model), data if frozen else data[:1])


for _wrapper in WRAPPERS:
    check(_wrapper, "learning", wrapper=_wrapper, frozen=False)(exact_learned)
    check(_wrapper, "frozen", wrapper=_wrapper, frozen=True)(exact_learned)


def accumulate(seat, wrapper):
    """Gradients of two batches are exchanged once."""
    config = recipes.int8()
    model = WRAPPERS[wrapper](fq.prepare(exact_model(config), config))
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
    """Another part of the data on each rank."""
    model = fq.prepare(exact_model(config), config)
    model = model if wrapper is None else WRAPPERS[wrapper](model)
    data = [(seat.part(x + number), seat.part(target)) for number, (x, target) in enumerate(exact_data(config))]
    return state_of(fq.calibrate(model, data, progress=False))


for _name, _config in CALIBRATIONS.items():
    check(_name, config=_config)(calibrate)
for _name in ("int8", "lsq"):
    for _wrapper in WRAPPERS:
        check(_name, _wrapper, config=CALIBRATIONS[_name], wrapper=_wrapper)(calibrate)


# --- the same on both ranks -----------------------------------------------------------------------


class Residual(nn.Module):
    """With a sum in its own code, in place as many have it, and a layer that is not always in use."""

    def __init__(self, channels=6, checkpointed=False, in_place=False):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
        self.branch = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
        self.head = nn.Linear(channels, 5)
        self.spare = nn.Linear(channels, 5)
        self.use_spare = True
        self.checkpointed = checkpointed
        self.in_place = in_place

    def forward(self, x):
        x = self.stem(x)
        if self.checkpointed:
            x = x + torch.utils.checkpoint.checkpoint(self.branch, x, use_reentrant=False)
        else:
            x = x + self.branch(x)
        x = x.mean((2, 3))
        y = self.head(x)
        if not self.use_spare:
            return y
        if self.in_place:
            y += self.spare(x)
            return y
        return y + self.spare(x)


def images(number=4):
    generator = torch.Generator().manual_seed(8)
    return [
        (torch.randn(6, 3, 8, 8, generator=generator) * (1 + n), torch.randint(5, (6,), generator=generator))
        for n in range(number)
    ]


def residual(seat, recipe, **options):
    torch.manual_seed(9)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Layers stay in float")  # groups of 4 do not divide 6 channels
        model = fq.prepare(Residual(**options), recipe)
    if any(isinstance(q, fqnn.LearnedFakeQuantize) for _, q in fqnn.quantizers(model)):
        fq.calibrate(model, [seat.part(x) for x, _ in images()], progress=False)
    return model


def random(seat, recipe, wrapper="ddp", unused=False, schedule=None, **options):
    """With random numbers, where the order of sums shows."""
    model = residual(seat, RECIPES[recipe]())
    model.use_spare = not unused
    wrapped = WRAPPERS[wrapper](model, **options)
    optimizer = torch.optim.SGD(fqnn.param_groups(model), lr=0.05, momentum=0.9)
    after = None
    if schedule is not None:
        plan, seen = fq.Schedule(wrapped, **schedule), []

        def after():
            seen.append(state_of(wrapped))
            plan.step()

    state = train(seat, wrapped, images(), optimizer, F.cross_entropy, after)
    return state if schedule is None else {"state": state, "seen": seen}


for _recipe in RECIPES:
    for _wrapper in WRAPPERS:
        check(_recipe, _wrapper, recipe=_recipe, wrapper=_wrapper)(random)
for _recipe in ("int8", "lsq"):
    check(_recipe, "unused", recipe=_recipe, unused=True, find_unused_parameters=True)(random)
    check(_recipe, "static graph", recipe=_recipe, static_graph=True)(random)


@check("int8", recipe="int8")
@check("lsq", recipe="lsq")
def sum_in_place(seat, recipe):
    """While quantizers are off their results are the layers' own."""
    model = residual(seat, RECIPES[recipe](), in_place=True)
    fqnn.switch_quantizers(model, quantizing=False)
    optimizer = torch.optim.SGD(fqnn.param_groups(model), lr=0.05)
    return train(seat, ddp(model), images(2), optimizer, F.cross_entropy)


SCHEDULE = {"quantize_from": 1, "freeze_ranges_at": 2, "freeze_norms_at": 3}


def scheduled(seat, recipe, wrapper):
    return random(seat, recipe, wrapper, schedule=SCHEDULE)


for _recipe in ("int8", "lsq"):
    for _wrapper in WRAPPERS:
        check(_recipe, _wrapper, recipe=_recipe, wrapper=_wrapper)(scheduled)


def checkpointing(seat, recipe, frozen, checkpointed, wrapper="ddp"):
    model = residual(seat, RECIPES[recipe](), checkpointed=checkpointed)
    if recipe != "lsq":  # whose scales are there already
        fq.calibrate(model, [seat.part(x) for x, _ in images()], progress=False)
    fqnn.switch_quantizers(model, frozen=frozen)
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.momentum = 0.0  # its running statistics are updated twice as well
    optimizer = torch.optim.SGD(fqnn.param_groups(model), lr=0.05)
    return train(seat, WRAPPERS[wrapper](model), images(), optimizer, F.cross_entropy)


for _recipe in ("int8", "lsq"):
    for _frozen in (False, True):
        for _checkpointed in (False, True):
            check(
                _recipe,
                "frozen" if _frozen else "observing",
                "checkpointed" if _checkpointed else "plain",
                recipe=_recipe,
                frozen=_frozen,
                checkpointed=_checkpointed,
            )(checkpointing)


@check("eager", backend=None)
@check("aot_eager", backend="aot_eager")
def compiled(seat, backend):
    """A wrapped model; torch cuts the graph where gradients are exchanged."""
    config = recipes.int8()
    model, data = fq.prepare(exact_model(config)[:1], config), exact_data(config)
    wrapped = ddp(model)
    with warnings.catch_warnings():
        # Of torch's own, where it goes on with a result after a cut.
        warnings.filterwarnings("ignore", ".*is not a leaf Tensor is being accessed", UserWarning)
        run = wrapped if backend is None else torch.compile(wrapped, backend=backend)
        train(seat, run, [(x, x) for x, _ in data])
    return state_of(model)


# --- codes for the backward pass ------------------------------------------------------------------


def saved_codes(seat, recipe, save_codes, wrapper):
    """Inputs and weights of 2 MB: large enough to be kept as codes, and to be quantized again."""
    torch.manual_seed(10)
    config = dataclasses.replace(RECIPES[recipe](), save_codes=save_codes)
    model = fq.prepare(nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)), config)
    x = torch.randn(2 * 512, 512, generator=torch.Generator().manual_seed(11))
    if recipe == "lsq":
        fq.calibrate(model, [seat.part(x)], progress=False)
    before = {path: value.clone() for path, value in model.named_parameters()}
    state = train(seat, WRAPPERS[wrapper](model), [(x, x), (-x, x)], loss=F.mse_loss)
    return {path: state[path] for path in before if not torch.equal(state[path], before[path])}


for _recipe in ("int8", "lsq"):
    for _wrapper in WRAPPERS:
        for _codes in (True, False):
            check(_recipe, _wrapper, str(_codes), recipe=_recipe, wrapper=_wrapper, save_codes=_codes)(saved_codes)


# --- messages -------------------------------------------------------------------------------------


@contextmanager
def counted_messages(counts, name):
    """Messages of the quantizers; those of DistributedDataParallel do not pass here."""
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
    model = fq.prepare(exact_model(config), config)
    data = [(seat.part(x), t) for x, t in exact_data(config)]
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


# --- ranks on their own ---------------------------------------------------------------------------


@check("int8", recipe="int8")
@check("int8_dynamic", recipe="int8_dynamic")
@check("lsq", recipe="lsq")
def first_rank_alone(seat, recipe):
    """Evaluates, looks at the health, and saves, as in many training scripts; then both go on."""
    model = residual(seat, RECIPES[recipe]())
    wrapped = ddp(model)
    optimizer = torch.optim.SGD(fqnn.param_groups(model), lr=0.05)
    train(seat, wrapped, images(2), optimizer, F.cross_entropy)
    found = None
    if seat.rank == 0:
        x = images()[0][0]
        model.eval()
        found = {"y": model(x).detach(), "health": fq.health(model, [x]).to_dict(), "state": state_of(model)}
        model.train()
    return {"found": found, "state": train(seat, wrapped, images(2), optimizer, F.cross_entropy)}


def health(seat, wrapper):
    config = recipes.int8()
    model = fq.prepare(exact_model(config), config)
    data = exact_data(config)
    fq.calibrate(model, [seat.part(x) for x, _ in data], progress=False)
    wrapped = WRAPPERS[wrapper](model)
    return fq.health(wrapped, [x * 2 for x, _ in data]).to_dict()


for _wrapper in WRAPPERS:
    check(_wrapper, wrapper=_wrapper)(health)


@check()
def uneven_batches_with_frozen_ranges(seat):
    """Rank 1 has one batch less; `join` answers for it. Quantizers that observe would ask it, too."""
    config = recipes.int8()
    model, data = fq.prepare(exact_model(config), config), exact_data(config)
    fq.calibrate(model, [seat.part(x) for x, _ in data], progress=False)
    fqnn.switch_quantizers(model, frozen=True)
    wrapped = ddp(model, **OWN_BUFFERS)
    with wrapped.join():
        train(seat, wrapped, data[: BATCHES - seat.rank])
    return state_of(wrapped)


# --- synchronized batch norm -------------------------------------------------------------


@check()
def synchronized_norms(seat):
    """torch has them for accelerators only. What matters here is that `prepare` leaves them what they are."""
    model = fq.prepare(nn.SyncBatchNorm.convert_sync_batchnorm(Residual()), recipes.int8())
    try:
        ddp(model)(seat.part(images()[0][0]))
    except (ValueError, RuntimeError) as error:
        return {"error": str(error), "kinds": [type(m).__name__ for m in model.stem]}
    return {"error": "", "kinds": [type(m).__name__ for m in model.stem]}


# --- checkpoints ----------------------------------------------------------------------------------


@contextmanager
def shared_folder(seat):
    names = [tempfile.mkdtemp() if seat.rank == 0 else None]
    dist.broadcast_object_list(names)
    try:
        yield names[0]
    finally:
        dist.barrier()
        if seat.rank == 0:
            shutil.rmtree(names[0])


def adam(model):
    return torch.optim.AdamW(fqnn.param_groups(model, lr=1e-3), lr=1e-2)


def sharded(seat, recipe, wrapper):
    model = WRAPPERS[wrapper](residual(seat, RECIPES[recipe]()))
    return model, adam(model)


def distributed_checkpoint(seat, recipe, wrapper):
    """Saved in the middle of training, and continued by a model that was prepared and sharded anew."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_state_dict,
        set_state_dict,
    )

    before, after = images()[:2], images()[2:]
    model, optimizer = sharded(seat, recipe, wrapper)
    train(seat, model, before, optimizer, F.cross_entropy)
    with shared_folder(seat) as folder:
        states = get_state_dict(model, optimizer)
        dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=folder)
        one_file = None
        if seat.rank == 0:
            dcp_to_torch_save(folder, f"{folder}/all.pt")
            one_file = torch.load(f"{folder}/all.pt")["model"]
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        full = {name: value.clone() for name, value in full.items()}
        saved = state_of(model)
        dist.barrier()
        expected = train(seat, model, after, optimizer, F.cross_entropy)

        model, optimizer = sharded(seat, recipe, wrapper)
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(states, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    loaded = state_of(model)
    continued = train(seat, model, after, optimizer, F.cross_entropy)
    return {
        "saved": saved,
        "loaded": loaded,
        "expected": expected,
        "continued": continued,
        "full": full,
        "one file": one_file,
    }


for _recipe in ("int8", "lsq", "int4_weight_only"):
    check(_recipe, "fsdp", recipe=_recipe, wrapper="fsdp")(distributed_checkpoint)
check("lsq", "ddp", recipe="lsq", wrapper="ddp")(distributed_checkpoint)


@check("ddp", wrapper="ddp")
@check("fsdp", wrapper="fsdp")
def frozen_learned_scales(seat, wrapper):
    """The optimizer's momentum goes on moving the parameters; what is in use, and saved, stays."""
    model, optimizer = sharded(seat, "lsq", wrapper)
    train(seat, model, images(2), optimizer, F.cross_entropy)
    fqnn.switch_quantizers(model, frozen=True)
    before = {path: q.scale.clone() for path, q in fqnn.quantizers(model)}
    state = train(seat, model, images(2), optimizer, F.cross_entropy)
    fresh = residual(seat, RECIPES["lsq"]())
    fresh.load_state_dict(state)
    return {
        "before": {path.removeprefix("module."): value for path, value in before.items()},
        "after": {path.removeprefix("module."): q.scale.clone() for path, q in fqnn.quantizers(model)},
        "loaded": {path: q.scale.clone() for path, q in fqnn.quantizers(fresh)},
    }


# --- running them ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_of(__name__, tmp_path_factory)


@pytest.fixture
def ranks(outcomes):
    return partial(results_of, outcomes)


@pytest.fixture(autouse=True)
def one_thread(torch_on_one_thread):
    """As on the ranks."""


def alone(name, **options):
    return CHECKS[name](Seat(), **options)


# --- tests ----------------------------------------------------------------------------------------


def start_of(recipe):
    config = RECIPES[recipe]()
    return fq.prepare(exact_model(config), config)


@CHECKS.names(exact)
def test_training_gives_the_weights_and_ranges_of_one_process(ranks, name):
    one_process = alone(name)
    for part in ranks(name):
        assert_same_tensors(one_process, part)
    before = dict(start_of(CHECKS[name].keywords["recipe"]).named_parameters())
    assert all(not torch.equal(value, one_process[path]) for path, value in before.items())


@pytest.mark.parametrize("recipe", OBSERVED)
def test_sums_in_the_exact_model_do_not_depend_on_the_order_of_rows(recipe):
    assert_same_tensors(alone(f"exact {recipe} ddp"), alone(f"exact {recipe} ddp", turn=True))


@pytest.mark.parametrize("recipe", OBSERVED)
def test_scales_of_the_exact_model_are_powers_of_two(recipe):
    scales = {path: v for path, v in alone(f"exact {recipe} ddp").items() if path.endswith(".scale")}
    assert len(scales) >= 3
    for path, scale in scales.items():
        assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5)), path


@CHECKS.names(exact_learned)
def test_learned_scales_begin_as_in_one_process(ranks, name):
    one_process = alone(name)
    for part in ranks(name):
        assert_same_tensors(one_process, part)
    scales = [value for path, value in one_process.items() if path.endswith("step_size")]
    moved = [not torch.equal(torch.frexp(s).mantissa, torch.full_like(s, 0.5)) for s in scales]
    assert moved == [name.endswith("learning")] * len(scales)


@CHECKS.names(accumulate)
def test_accumulated_gradients_are_those_of_one_process(ranks, name):
    for part in ranks(name):
        assert_same_tensors(alone(name), part)


@CHECKS.names(calibrate)
def test_calibrating_with_another_part_of_the_data_on_each_rank_gives_the_ranges_of_all(ranks, name):
    for part in ranks(name):
        assert_same_tensors(alone(name), part)


BATCH_STATISTICS = ("running_mean", "running_var")


def of_the_model(state):
    """Without what a rank's batch norm has seen, which torch makes the same at the next forward pass."""
    return {path: value for path, value in state.items() if not path.endswith(BATCH_STATISTICS)}


@CHECKS.names(random)
def test_weights_and_ranges_are_the_same_on_both_ranks(ranks, name):
    first, second = map(of_the_model, ranks(name))
    assert_same_tensors(first, second)
    parameters = [path for path, _ in residual(Seat(), RECIPES[CHECKS[name].keywords["recipe"]]()).named_parameters()]
    assert all(first[path].isfinite().all() for path in parameters)


@CHECKS.names(sum_in_place)
def test_results_may_be_changed_in_place_while_nothing_is_quantized(ranks, name):
    assert_same_tensors(*map(of_the_model, ranks(name)))


@CHECKS.names(scheduled)
def test_a_schedule_switches_on_both_ranks(ranks, name):
    first, second = ranks(name)
    for one, other in zip(first["seen"], second["seen"], strict=True):
        assert_same_tensors(of_the_model(one), of_the_model(other))
    quantizing, frozen = ([bool(step["head.input_quantizer.switches"][i]) for step in first["seen"]] for i in (1, 2))
    assert (quantizing, frozen) == ([False, True, True, True], [False, False, True, True])


@CHECKS.names(scheduled)
def test_frozen_ranges_stay_as_they_are(ranks, name):
    for part in ranks(name):
        _, before, *frozen = part["seen"]
        scales = [path for path in before if path.endswith(("input_quantizer.scale", "running_max"))]
        for path in scales:
            for step in frozen:
                assert torch.equal(before[path], step[path]), path


def test_frozen_norms_stay_as_they_are(ranks):
    """On the first rank; torch gives the others its statistics with the next forward pass."""
    *_, before, after = ranks("scheduled int8 ddp")[0]["seen"]
    for path in before:
        if path.endswith(BATCH_STATISTICS):
            assert torch.equal(before[path], after[path]), path


@CHECKS.names(checkpointing)
def test_with_activation_checkpointing_the_ranks_agree(ranks, name):
    first, second = map(of_the_model, ranks(name))
    assert_same_tensors(first, second)


@pytest.mark.parametrize("recipe", ["int8", "lsq"])
def test_activation_checkpointing_with_frozen_ranges_changes_no_bit(ranks, recipe):
    plain, recomputed = (
        of_the_model(ranks(f"checkpointing {recipe} frozen {how}")[0]) for how in ("plain", "checkpointed")
    )
    counts = [path for path in plain if path.endswith("num_batches_tracked")]
    for state in (plain, recomputed):
        for path in counts:
            del state[path]
    assert_same_tensors(plain, recomputed)


def test_a_compiled_model_has_the_bits_of_an_eager_one(ranks):
    for eager, found in zip(ranks("compiled eager"), ranks("compiled aot_eager"), strict=True):
        assert_same_tensors(eager, found)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("recipe", ["int8", "lsq"])
def test_codes_for_the_backward_pass_change_no_bit(ranks, recipe, wrapper):
    with_codes, without = (ranks(f"saved_codes {recipe} {wrapper} {on}") for on in (True, False))
    for one, other in zip(with_codes, without, strict=True):
        assert {"0.weight", "2.weight"} <= one.keys()  # what has changed
        assert_same_tensors(one, other)


QUANTIZERS_OF_ACTIVATIONS = {"int8": 3, "int8_dynamic": 0, "int4_weight_only": 0}


@pytest.mark.parametrize("recipe", QUANTIZERS_OF_ACTIVATIONS)
def test_there_is_one_message_per_quantizer_that_observes_and_step(ranks, recipe):
    number = QUANTIZERS_OF_ACTIVATIONS[recipe]
    for counts in ranks(f"messages {recipe}"):
        assert counts == {"calibrate": number, "train": number, "evaluate": 0, "frozen": 0}


def test_learned_scales_send_messages_while_they_are_calibrated_only(ranks):
    for counts in ranks("messages lsq"):
        assert counts.pop("calibrate") > 0
        assert counts == {"train": 0, "evaluate": 0, "frozen": 0}


@CHECKS.names(first_rank_alone)
def test_a_rank_may_evaluate_and_save_alone(ranks, name):
    first, second = ranks(name)
    assert second["found"] is None
    assert_same_tensors(of_the_model(first["state"]), of_the_model(second["state"]))


@CHECKS.names(first_rank_alone)
def test_the_state_of_a_parallel_model_loads_strictly_into_one_without_ranks(ranks, name):
    found = ranks(name)[0]["found"]
    model = fq.prepare(Residual(), RECIPES[CHECKS[name].keywords["recipe"]]())
    model.load_state_dict(found["state"], strict=True)
    assert_same_tensors({"y": found["y"]}, {"y": model.eval()(images()[0][0])})
    assert_same_tensors(found["state"], state_of(model))


@CHECKS.names(health)
def test_health_is_that_of_one_process(ranks, name):
    expected = alone(name)
    for part in ranks(name):
        found = {path.removeprefix("module."): {**row, "path": expected_path(row)} for path, row in part.items()}
        assert found == expected
    assert expected["0.input_quantizer"]["clipped"] > 0


def expected_path(row):
    return row["path"].removeprefix("module.")


def test_uneven_batches_are_joined_when_ranges_are_frozen(ranks):
    assert_same_tensors(*ranks("uneven_batches_with_frozen_ranges"))


def test_synchronized_norms_are_left_alone(ranks):
    for part in ranks("synchronized_norms"):
        assert part["kinds"] == ["QuantizedConv2d", "SyncBatchNorm", "ReLU"]
        assert "SyncBatchNorm" in part["error"]


@CHECKS.names(distributed_checkpoint)
def test_a_distributed_checkpoint_continues_to_the_bit(ranks, name):
    first, second = ranks(name)
    for part in (first, second):
        for before, after in (("saved", "loaded"), ("expected", "continued")):
            assert_same_tensors(of_the_model(part[before]), of_the_model(part[after]))
    assert_same_tensors(of_the_model(first["continued"]), of_the_model(second["continued"]))


@CHECKS.names(distributed_checkpoint)
def test_a_distributed_checkpoint_loads_into_a_model_without_ranks(ranks, name):
    first, _ = ranks(name)
    for state in (first["full"], first["one file"]):
        model = fq.prepare(Residual(), RECIPES[CHECKS[name].keywords["recipe"]]())
        model.load_state_dict(state, strict=True)
        assert_same_tensors(of_the_model(first["saved"]), of_the_model(state_of(model)))


@CHECKS.names(frozen_learned_scales)
def test_frozen_learned_scales_are_saved_as_they_are_in_use(ranks, name):
    for part in ranks(name):
        assert_same_tensors(part["before"], part["after"])
        assert_same_tensors(part["before"], part["loaded"])


# --- the example ----------------------------------------------------------------------------------

EXAMPLE = Path(__file__).parents[2] / "examples" / "distributed.py"


def test_the_example_runs_with_torchrun(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [*torchrun, EXAMPLE, "--shard", "--checkpoint", tmp_path]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "71 scales, the same on 2 ranks"
    assert sorted(folder.name for folder in tmp_path.iterdir()) == [f"epoch{n}" for n in range(4)]
