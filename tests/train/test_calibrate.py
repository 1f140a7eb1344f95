"""`calibrate` runs data through a model, finds ranges, and changes nothing else."""

import copy
import re
import threading
import warnings

import pytest

import fakequant as fq
from calibration_cases import BATCHES, calibrate, calibrated, make
from fakequant.testing.assertions import assert_same_bits, assert_same_state

torch = pytest.importorskip("torch")
nn = torch.nn
fqnn = pytest.importorskip("fakequant.nn")
recipes = pytest.importorskip("fakequant.recipes")
data_utils = pytest.importorskip("torch.utils.data")

LABELS = torch.zeros(6, dtype=torch.long)


def state(model):
    return copy.deepcopy(model.state_dict())


def modes(model):
    return {name: module.training for name, module in model.named_modules()}


def switches(model):
    return {
        path: (q.observing, q.quantizing, q.frozen, q.switches.tolist()) for path, q in fqnn.named_quantizers(model)
    }


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 2)

    def forward(self, x, *, scale=1.0):
        return self.fc(x * scale)


# --- data -------------------------------------------------------------------------------------------


class Stream(data_utils.IterableDataset):
    def __iter__(self):
        return (row for batch in BATCHES for row in batch)


def run_all(model):
    for batch in BATCHES:
        model(batch)


DATA = {
    "tuple of tensors": lambda: tuple(BATCHES),
    "tuples with labels": lambda: [(x, LABELS) for x in BATCHES],
    "lists with labels": lambda: [[x, LABELS, None] for x in BATCHES],
    "tuples of one": lambda: [(x,) for x in BATCHES],
    "dicts": lambda: [{"input": x} for x in BATCHES],
    "generator": lambda: (x for x in BATCHES),
    "iterator": lambda: iter(BATCHES),
    "function": lambda: run_all,
    "DataLoader": lambda: data_utils.DataLoader(torch.cat(BATCHES), batch_size=6),
    "DataLoader with labels": lambda: data_utils.DataLoader(
        data_utils.TensorDataset(torch.cat(BATCHES), LABELS.repeat(3)), batch_size=6
    ),
    "DataLoader of a stream": lambda: data_utils.DataLoader(Stream(), batch_size=6),
}


@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
@pytest.mark.parametrize("config", [recipes.int8(), recipes.lsq(4)], ids=["observed", "learned"])
def test_calibrate_accepts_every_form_of_data(data, config):
    assert_same_state(calibrated(config).state_dict(), calibrate(make(config), data()).state_dict())


@pytest.mark.parametrize("progress", [True, False])
def test_calibrate_returns_the_model_with_or_without_a_progress_bar(progress, capsys):
    model = make()
    assert fq.calibrate(model, BATCHES, progress=progress) is model
    assert bool(capsys.readouterr().err) is progress


def test_dict_batch_passes_keyword_arguments():
    model = calibrate(
        fq.prepare(Keywords(), recipes.int8(), {"x": BATCHES[0], "scale": 4.0}), [{"x": BATCHES[0], "scale": 4.0}]
    )
    other = calibrate(fq.prepare(Keywords(), recipes.int8(), BATCHES[0] * 4.0), [BATCHES[0] * 4.0])
    assert_same_state(other.state_dict(), model.state_dict())


def test_calibrated_ranges_are_those_of_the_float_model():
    model = make()
    with torch.no_grad():
        floats = copy.deepcopy(model).eval()
        fq.unprepare(floats)
        before_last = floats[:-1](BATCHES[0])
    calibrate(model, BATCHES[:1])
    assert_same_bits(BATCHES[0].amin(), model[0].input_quantizer.running_min)
    assert_same_bits(BATCHES[0].amax(), model[0].input_quantizer.running_max)
    assert_same_bits(before_last.amin(), model[4].input_quantizer.running_min)
    assert_same_bits(before_last.amax(), model[4].input_quantizer.running_max)


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_calibrate_runs_at_most_the_given_steps(steps):
    assert_same_state(calibrate(make(), BATCHES[:steps]).state_dict(), calibrate(make(), BATCHES, steps).state_dict())


def test_calibrate_takes_no_more_batches_than_it_uses():
    data = iter(BATCHES)
    calibrate(make(), data, 2)
    assert len(list(data)) == 1


def test_calibrated_moving_average_is_the_mean_over_the_batches():
    model = calibrate(make(), [torch.full((3, 4), value) for value in (1.0, 2.0, 6.0)])
    quantizer = model[0].input_quantizer
    assert quantizer.running_max.item() == 3.0
    assert quantizer.observer == fq.observers.MovingAverage(0.01)
    quantizer.train()(torch.full((3, 4), 103.0))  # in training the average moves slowly again
    assert quantizer.running_max.item() == 4.0


def test_calibrating_again_replaces_a_moving_average():
    model = calibrate(make(), [100 * x for x in BATCHES])
    assert_same_state(calibrated().state_dict(), calibrate(model, BATCHES).state_dict())


def test_calibrating_again_continues_a_min_max_range():
    config = recipes.int8().rule(activation_observer=fq.observers.MinMax())
    model = calibrate(make(config), BATCHES[:1])
    assert_same_state(calibrated(config).state_dict(), calibrate(model, BATCHES[1:]).state_dict())


# --- errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("data", "steps"), [([], None), (iter(()), None), (BATCHES, 0)], ids=["[]", "iterator", "0"])
def test_calibrate_without_data_is_an_error_and_changes_nothing(data, steps):
    model = make()
    before = state(model), modes(model), switches(model)
    with pytest.raises(ValueError, match="nothing to calibrate with"):
        calibrate(model, data, steps)
    assert_same_state(before[0], model.state_dict())
    assert (modes(model), switches(model)) == before[1:]


def test_calibrate_refuses_a_float_model_with_the_fix():
    with pytest.raises(ValueError, match=r"fakequant\.prepare"):
        calibrate(nn.Linear(4, 2), BATCHES)


@pytest.mark.parametrize("batch", ["text", 3, None, {1, 2}], ids=repr)
def test_batch_of_an_unsupported_type_is_a_type_error(batch):
    model = make()
    before = modes(model), switches(model)
    with pytest.raises(TypeError, match="A batch must be"):
        calibrate(model, [batch])
    assert (modes(model), switches(model)) == before


def test_calibrate_leaves_frozen_quantizers_unchanged():
    model = calibrated()
    fqnn.switch_quantizers(model, frozen=True)
    model[4].input_quantizer.frozen = False
    before = state(model)
    calibrate(model, [100 * x for x in BATCHES])
    for name, value in model.state_dict().items():
        if name.startswith("4.input_quantizer.") and name.endswith(("running_max", "scale")):
            assert not torch.equal(before[name], value), name
        elif not name.startswith("4.input_quantizer."):
            assert_same_bits(before[name], value, name)


# --- what calibrate keeps ---------------------------------------------------------------------------


def odd_modes(model):
    model.train()
    model[1].eval()
    model[4].eval()
    model[0].input_quantizer.eval()


def odd_switches(model):
    model[0].input_quantizer.observing = False
    model[4].input_quantizer.quantizing = False
    model[4].weight_quantizer.quantizing = False


@pytest.mark.parametrize("prepare_modes", [nn.Module.train, nn.Module.eval, odd_modes], ids=["train", "eval", "mixed"])
@pytest.mark.parametrize("config", [recipes.int8(), recipes.lsq(4)], ids=["observed", "learned"])
def test_calibrate_restores_modes_and_switches(prepare_modes, config):
    model = make(config)
    prepare_modes(model)
    if config.default.learned:
        model[4].input_quantizer.quantizing = False
    else:
        odd_switches(model)
    before = modes(model), switches(model)
    calibrate(model, BATCHES)
    assert (modes(model), switches(model)) == before


class Boom(Exception):
    pass


def breaks():
    yield BATCHES[0]
    raise Boom


HALFWAY = {
    "wrong shape": (lambda: [BATCHES[0], torch.randn(3, 7)], RuntimeError),
    "generator raises": (breaks, Boom),
    "no tensor": (lambda: [BATCHES[0], ("text",)], TypeError),
}


@pytest.mark.parametrize(("data", "error"), HALFWAY.values(), ids=HALFWAY)
@pytest.mark.parametrize("config", [recipes.int8(), recipes.lsq(4)], ids=["observed", "learned"])
def test_exception_halfway_restores_modes_and_switches(data, error, config):
    model = make(config)
    odd_modes(model)
    before = modes(model), switches(model)
    with pytest.raises(error):
        calibrate(model, data())
    assert modes(model) == before[0]
    assert {path: s[:3] for path, s in switches(model).items()} == {path: s[:3] for path, s in before[1].items()}


@pytest.mark.parametrize("config", [recipes.int8(), recipes.lsq(4)], ids=["observed", "learned"])
@pytest.mark.parametrize("already", [False, True], ids=["fresh", "calibrated"])
def test_exception_halfway_restores_the_ranges(config, already):
    model = calibrated(config) if already else make(config)
    before = state(model)
    with pytest.raises(ValueError if already and config.default.learned else RuntimeError):
        calibrate(model, [9 * BATCHES[0], torch.randn(3, 7)])
    assert_same_state(before, model.state_dict())
    if not already:  # the failed calibration left nothing behind
        assert_same_state(calibrated(config).state_dict(), calibrate(model, BATCHES).state_dict())


@pytest.mark.parametrize("config", [recipes.int8(), recipes.lsq(4)], ids=["observed", "learned"])
def test_calibrate_leaves_parameters_and_statistics_unchanged(config):
    model = make(config)
    before = state(model)
    calibrate(model, BATCHES)
    for name, value in model.state_dict().items():
        if "quantizer" not in name:
            assert_same_bits(before[name], value, name)
    assert all(p.grad is None for p in model.parameters())
    assert model(BATCHES[0]).requires_grad


def test_calibrate_runs_without_dropout_and_draws_no_random_numbers():
    rng = torch.get_rng_state()
    calibrated_state = state(calibrated())
    after_make = make() and torch.get_rng_state()
    calibrate(make(), BATCHES)
    assert_same_bits(after_make, torch.get_rng_state(), "rng")
    torch.set_rng_state(rng)
    assert_same_state(calibrated_state, calibrated().state_dict())


def test_evaluation_after_calibration_does_not_move_ranges():
    model = make().eval()
    calibrate(model, BATCHES)
    before = state(model)
    model(100 * BATCHES[0])
    assert_same_state(before, model.state_dict())


def test_model_prepared_in_evaluation_mode_stays_in_it():
    model = fq.prepare(nn.Sequential(nn.Linear(4, 4)).eval(), recipes.int8(), BATCHES[0])
    assert not any(module.training for module in model.modules())
    calibrate(model, BATCHES)
    before = state(model)
    model(100 * BATCHES[0])
    assert_same_state(before, model.state_dict())


# --- learned scales ---------------------------------------------------------------------------------


def test_calibrate_initializes_learned_activations_and_keeps_weight_scales():
    model = make(recipes.lsq(4))
    weights = {
        path: q.step_size.clone() for path, q in fqnn.named_quantizers(model) if path.endswith("weight_quantizer")
    }
    identities = [id(p) for p in model.parameters()]
    assert not model[0].input_quantizer.is_initialized
    calibrate(model, BATCHES)
    for path, quantizer in fqnn.named_quantizers(model):
        assert quantizer.is_initialized, path
        assert not quantizer.observing, path
        if path in weights:
            assert_same_bits(weights[path], quantizer.step_size, path)
    assert [id(p) for p in model.parameters()] == identities
    model.train()
    model(BATCHES[0]).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_second_calibration_of_learned_scales_is_refused():
    model = calibrated(recipes.lsq(4))
    before = state(model)
    with pytest.raises(ValueError, match=r"have a learned scale(.|\n)*reset_parameters"):
        calibrate(model, [50 * x for x in BATCHES])
    assert_same_state(before, model.state_dict())


def test_progress_bar_leaves_no_thread_behind():
    before = set(threading.enumerate())
    fq.calibrate(
        fq.prepare(nn.Sequential(nn.Linear(4, 2)), recipes.int8(), torch.ones(3, 4)), [torch.ones(3, 4)], progress=True
    )
    assert set(threading.enumerate()) == before


# --- ranges that do not fit -------------------------------------------------------------------------


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def one_hot():
    return nn.functional.one_hot(torch.arange(512) % 16, 16).float()


NORMAL = numbers(512, 16)
FITTING = {
    "normal": NORMAL,
    "uniform": torch.special.ndtr(NORMAL),
    "exponential": -torch.special.ndtr(NORMAL).log(),
    "after a ReLU": NORMAL.relu(),
    "after a sparse ReLU": (NORMAL - 2).relu(),
    "softmax": NORMAL.softmax(-1),
    "peaked softmax": (30 * NORMAL).softmax(-1),
    "one-hot": one_hot(),
    "mask": (NORMAL > 0).float(),
    "pixels": (255 * torch.special.ndtr(NORMAL)).round(),
    "constant": torch.full((512, 16), 0.3),
    "ones with rounding errors": 1 + 1e-6 * NORMAL,
}
UNFIT = {
    "power spectrum": (2e-4 * (2.4 * NORMAL).exp(), "four of five values are within .* on one code of the range 0 to"),
    "few outliers": (torch.cat([NORMAL, 1000 * NORMAL[:1]]), "four of five values"),
    "far from 0": (100 + 0.1 * NORMAL, "four of five values"),
    "zeros": (torch.zeros(512, 16), "all values were 0"),
    "not finite": (torch.full((512, 16), torch.nan), "no value was finite"),
}


def ranges(data, config=None, steps=1):
    """Calibrates a linear layer, and returns the model and the warnings about its range."""
    model = fq.prepare(nn.Sequential(nn.Linear(16, 2)), config or recipes.int8(), torch.ones(1, 16))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        calibrate(model, [data] * steps)
    return model, [str(w.message) for w in caught if "do not fit" in str(w.message)]


@pytest.mark.parametrize("name", FITTING)
def test_ranges_that_fit_give_no_warning(name):
    model, found = ranges(FITTING[name])
    assert found == []
    assert fq.health(model, [FITTING[name]]).unfit == {}


@pytest.mark.parametrize("name", UNFIT)
def test_a_warning_names_quantizers_whose_range_does_not_fit(name):
    data, words = UNFIT[name]
    model, found = ranges(data, steps=2)
    assert len(found) == 1
    assert re.search(f"\n  0.input_quantizer: {words}", found[0])
    if name == "not finite":
        return
    assert re.fullmatch(f"{words}.*", fq.health(model, [data]).unfit["0.input_quantizer"])
    assert ("the range of 0.input_quantizer does not fit" in str(fq.summary(model))) == (name == "zeros")
    assert "the range of 0.input_quantizer does not fit" in str(fq.health(model, [data]))


def test_other_grids_are_judged_by_what_they_can_represent():
    data = UNFIT["power spectrum"][0]
    for config in (recipes.int8_dynamic(), recipes.fp8(), recipes.lsq(2, first_last_bits=None)):
        assert ranges(data, config)[1] == []
    assert len(ranges(UNFIT["zeros"][0], recipes.lsq(4))[1]) == 1


def test_one_warning_lists_all_ranges_that_do_not_fit():
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(7)])
    for layer in model:
        nn.init.zeros_(layer.weight)
    model = fq.prepare(model, recipes.int8(), NORMAL)
    with pytest.warns(
        UserWarning, match=r"do not fit(.|\n)*1.input_quantizer: all(.|\n)*and 1 more(.|\n)*calibrate again"
    ) as found:
        calibrate(model, [NORMAL])
    assert len(found) == 1


def test_learned_scales_of_weights_need_no_calibration():
    model = fq.prepare(nn.Sequential(nn.EmbeddingBag(10, 4)), recipes.lsq(4), torch.zeros(2, 3, dtype=torch.int64))
    before = state(model)
    assert_same_state(before, calibrate(model, [torch.zeros(2, 3, dtype=torch.int64)]).state_dict())
