"""Prepared models on two ranks keep the same weights and ranges on both."""

import dataclasses
import warnings

import pytest

import fakequant as fq
from fakequant import recipes
from fakequant.testing.assertions import assert_same_state
from rank_models import (
    BATCH_STATISTICS,
    FLOATS,
    RECIPES,
    WRAPPERS,
    Residual,
    ddp,
    exact_data,
    exact_model,
    images,
    of_the_model,
    residual,
    state_of,
    train,
)
from straight_through import torch
from thoroughness import ALL
from two_ranks import RANKS, Checks, Seat, dist

fully_shard = pytest.importorskip("torch.distributed.fsdp").fully_shard
init_device_mesh = pytest.importorskip("torch.distributed.device_mesh").init_device_mesh
fqnn = pytest.importorskip("fakequant.nn")
nn = torch.nn
F = nn.functional

CHECKS = check = Checks()
pytestmark = pytest.mark.usefixtures("torch_on_one_thread")  # as on the ranks


def random_training(seat, recipe, wrapper="ddp", unused=False, schedule=None, **options):
    """Trains on random numbers, where the order of sums matters."""
    model = residual(seat, (RECIPES | FLOATS)[recipe]())
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


# Every recipe in one wrapper; `make test-all` tries all pairs.
for _number, _recipe in enumerate(RECIPES):
    for _wrapper in WRAPPERS if ALL else [list(WRAPPERS)[_number % 2]]:
        check(_recipe, _wrapper, recipe=_recipe, wrapper=_wrapper)(random_training)
for _recipe in FLOATS:
    check(_recipe, "ddp", recipe=_recipe)(random_training)
for _recipe in ("int8", "lsq"):
    check(_recipe, "unused", recipe=_recipe, unused=True, find_unused_parameters=True)(random_training)
    check(_recipe, "static graph", recipe=_recipe, static_graph=True)(random_training)


@check("int8", recipe="int8")
@check("lsq", recipe="lsq")
def sum_in_place(seat, recipe):
    """Quantizers that are off return their input, so it may be changed in place."""
    model = residual(seat, RECIPES[recipe](), in_place=True)
    fqnn.switch_quantizers(model, quantizing=False)
    optimizer = torch.optim.SGD(fqnn.param_groups(model), lr=0.05)
    return train(seat, ddp(model), images(2), optimizer, F.cross_entropy)


SCHEDULE = {"quantize_from": 1, "freeze_ranges_at": 2, "freeze_norms_at": 3}


def scheduled(seat, recipe, wrapper):
    return random_training(seat, recipe, wrapper, schedule=SCHEDULE)


PAIRS = [("int8", "ddp"), ("lsq", "fsdp")] + ([("int8", "fsdp"), ("lsq", "ddp")] if ALL else [])
for _recipe, _wrapper in PAIRS:
    check(_recipe, _wrapper, recipe=_recipe, wrapper=_wrapper)(scheduled)


def checkpointing(seat, recipe, frozen, checkpointed, wrapper="ddp"):
    model = residual(seat, RECIPES[recipe](), checkpointed=checkpointed)
    if recipe != "lsq":  # lsq is calibrated already
        fq.calibrate(model, [seat.part(x) for x, _ in images()], progress=False)
    fqnn.switch_quantizers(model, frozen=frozen)
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.momentum = 0.0  # checkpointing updates running statistics twice
    optimizer = torch.optim.SGD(fqnn.param_groups(model), lr=0.05)
    return train(seat, WRAPPERS[wrapper](model), images(), optimizer, F.cross_entropy)


CHECKPOINTED = [("int8", "observing"), ("lsq", "frozen")] + ([("int8", "frozen"), ("lsq", "observing")] if ALL else [])
for _recipe, _ranges in CHECKPOINTED:
    for _how in ("plain", "checkpointed"):
        options = {"recipe": _recipe, "frozen": _ranges == "frozen", "checkpointed": _how == "checkpointed"}
        check(_recipe, _ranges, _how, **options)(checkpointing)


@check("eager", backend=None)
@check("aot_eager", backend="aot_eager")
def compiled(seat, backend):
    """A wrapped model, whose graph torch splits where gradients are exchanged."""
    config = recipes.int8()
    model, data = fq.prepare(exact_model(config)[:1], config, exact_data(config)[0]), exact_data(config)
    wrapped = ddp(model)
    with warnings.catch_warnings():
        # Raised by torch when it continues with a result after a split.
        warnings.filterwarnings("ignore", ".*is not a leaf Tensor is being accessed", UserWarning)
        run = wrapped if backend is None else torch.compile(wrapped, backend=backend)
        train(seat, run, [(x, x) for x, _ in data])
    return state_of(model)


class Attention(nn.Module):
    """Computes attention weights by a function, and uses the weight of a layer that it does not call."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        weights = torch.softmax(self.query(x) @ self.key(x).transpose(-1, -2), -1)
        return F.linear(weights @ self.value(x), self.out.weight, self.out.bias).tanh()


def functions(seat, recipe, wrapper):
    torch.manual_seed(12)
    data = [torch.randn(4, 3, 8) for _ in range(3)]
    model = fq.prepare(nn.Sequential(Attention(), Attention()), RECIPES[recipe](), data[0])
    fq.calibrate(model, [seat.part(x) for x in data], progress=False)
    optimizer = torch.optim.SGD(fqnn.param_groups(model), lr=0.05)
    # `fully_shard` gathers the weight of a layer when the layer or a module around it is called.
    wrapped = ddp(model) if wrapper == "ddp" else shard_blocks(model)
    state = train(seat, wrapped, [(x, x) for x in data], optimizer if wrapper == "ddp" else None, F.mse_loss)
    return {"state": state, "keys": [path for path, _ in fqnn.named_quantizers(model) if "function" in path]}


def shard_blocks(model):
    if not dist.is_initialized():
        return model
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


for _recipe, _wrapper in PAIRS:
    check(_recipe, _wrapper, recipe=_recipe, wrapper=_wrapper)(functions)


# --- codes for the backward pass ------------------------------------------------------------------


def saved_codes(seat, recipe, save_codes, wrapper):
    """Inputs and weights of 2 MB, large enough to be saved as codes and quantized again."""
    torch.manual_seed(10)
    config = dataclasses.replace(RECIPES[recipe](), save_codes=save_codes)
    model = fq.prepare(nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)), config, torch.ones(1, 512))
    x = torch.randn(2 * 512, 512, generator=torch.Generator().manual_seed(11))
    if recipe == "lsq":
        fq.calibrate(model, [seat.part(x)], progress=False)
    before = {path: value.clone() for path, value in model.named_parameters()}
    state = train(seat, WRAPPERS[wrapper](model), [(x, x), (-x, x)], loss=F.mse_loss)
    return {path: state[path] for path in before if not torch.equal(state[path], before[path])}


for _recipe, _wrapper in PAIRS:
    for _codes in (True, False):
        check(_recipe, _wrapper, str(_codes), recipe=_recipe, wrapper=_wrapper, save_codes=_codes)(saved_codes)


# --- synchronized batch norm ----------------------------------------------------------------------


@check()
def synchronized_norms(seat):
    """torch runs SyncBatchNorm on accelerators only; `prepare` must keep it as it is."""
    model = fq.prepare(nn.SyncBatchNorm.convert_sync_batchnorm(Residual()), recipes.int8(), images()[0][0])
    try:
        ddp(model)(seat.part(images()[0][0]))
    except (ValueError, RuntimeError) as error:
        return {"error": str(error), "kinds": [type(m).__name__ for m in model.stem]}
    return {"error": "", "kinds": [type(m).__name__ for m in model.stem]}


@CHECKS.names(random_training)
def test_training_keeps_weights_and_ranges_equal_on_both_ranks(ranks, name):
    first, second = map(of_the_model, ranks(name))
    assert_same_state(first, second)
    recipe = (RECIPES | FLOATS)[CHECKS[name].keywords["recipe"]]
    parameters = [path for path, _ in residual(Seat(), recipe()).named_parameters()]
    assert all(first[path].isfinite().all() for path in parameters)


@CHECKS.names(functions)
def test_results_of_functions_are_quantized_alike_on_both_ranks(ranks, name):
    first, second = ranks(name)
    assert first["keys"] == second["keys"] == [f"{block}.function_quantizers.softmax_0" for block in (0, 1)]
    assert_same_state(of_the_model(first["state"]), of_the_model(second["state"]))


@CHECKS.names(sum_in_place)
def test_results_on_ranks_may_be_changed_in_place_while_quantizers_are_off(ranks, name):
    assert_same_state(*map(of_the_model, ranks(name)))


@CHECKS.names(scheduled)
def test_a_schedule_switches_both_ranks_at_the_same_step(ranks, name):
    first, second = ranks(name)
    for one, other in zip(first["seen"], second["seen"], strict=True):
        assert_same_state(of_the_model(one), of_the_model(other))
    quantizing, frozen = ([bool(step["head.input_quantizer.switches"][i]) for step in first["seen"]] for i in (1, 2))
    assert (quantizing, frozen) == ([False, True, True, True], [False, False, True, True])


@CHECKS.names(scheduled)
def test_ranges_frozen_by_a_schedule_do_not_change_on_ranks(ranks, name):
    for part in ranks(name):
        _, before, *frozen = part["seen"]
        scales = [path for path in before if path.endswith(("input_quantizer.scale", "running_max"))]
        for path in scales:
            for step in frozen:
                assert torch.equal(before[path], step[path]), path


def test_batch_norms_frozen_by_a_schedule_do_not_change_on_ranks(ranks):
    """Only rank 0 is checked; torch sends its statistics to the other in the next forward pass."""
    *_, before, after = ranks("scheduled int8 ddp")[0]["seen"]
    for path in before:
        if path.endswith(BATCH_STATISTICS):
            assert torch.equal(before[path], after[path]), path


@CHECKS.names(checkpointing)
def test_activation_checkpointing_keeps_models_equal_on_both_ranks(ranks, name):
    first, second = map(of_the_model, ranks(name))
    assert_same_state(first, second)


@pytest.mark.parametrize(("recipe", "ranges"), CHECKPOINTED)
def test_activation_checkpointing_keeps_every_bit_on_ranks(ranks, recipe, ranges):
    plain, recomputed = (
        of_the_model(ranks(f"checkpointing {recipe} {ranges} {how}")[0]) for how in ("plain", "checkpointed")
    )
    counts = [path for path in plain if path.endswith("num_batches_tracked")]
    for state in (plain, recomputed):
        for path in counts:
            del state[path]
    assert_same_state(plain, recomputed)


def test_a_compiled_model_on_ranks_has_eager_bits(ranks):
    for eager, found in zip(ranks("compiled eager"), ranks("compiled aot_eager"), strict=True):
        assert_same_state(eager, found)


@pytest.mark.parametrize(("recipe", "wrapper"), PAIRS)
def test_saved_codes_keep_every_bit_of_training_on_ranks(ranks, recipe, wrapper):
    with_codes, without = (ranks(f"saved_codes {recipe} {wrapper} {on}") for on in (True, False))
    for one, other in zip(with_codes, without, strict=True):
        assert {"0.weight", "2.weight"} <= one.keys()  # the parameters that have changed
        assert_same_state(one, other)


def test_prepare_keeps_synchronized_batch_norms(ranks):
    for part in ranks("synchronized_norms"):
        assert part["kinds"] == ["QuantizedConv2d", "SyncBatchNorm", "ReLU"]
        assert "SyncBatchNorm" in part["error"]
