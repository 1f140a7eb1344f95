"""Prepared models compile to one graph if the float model does, with eager's bits, once per state."""

import copy
import dataclasses
import shutil
from functools import partial

import pytest

import fakequant as fq
import model_zoo as zoo
from fakequant.testing.assertions import assert_same_bits, assert_same_model
from thoroughness import ALL, only_in_test_all

torch = pytest.importorskip("torch")
nn = torch.nn
fqnn = pytest.importorskip("fakequant.nn")
recipes = pytest.importorskip("fakequant.recipes")
saved_codes = pytest.importorskip("fakequant.nn._saved_codes")
CompileCounter = pytest.importorskip("torch._dynamo.testing").CompileCounterWithBackend

ZOO, RECIPES = zoo.ZOO, zoo.RECIPES
# Dynamo does not compile these in float: a branch on data, and a recurrent layer.
UNCOMPILED = ("branches", "LSTM")

pytestmark = [
    # Raised by dynamo for every autograd function, and by inductor.
    pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning"),
]


@pytest.fixture(autouse=True)
def one_thread(torch_on_one_thread):
    """One thread is fastest for small models."""


class SmallResidual(nn.Module):
    """A small model with a batch norm and an addition, quick to compile."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.act, self.head = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.act(x + self.norm(self.fc(x))))


MODELS = {
    **ZOO,
    # All layers are alike, so one is enough.
    "TransformerEncoder": (partial(zoo.transformer_encoder, layers=1), ZOO["TransformerEncoder"][1]),
    "small residual": (SmallResidual, zoo.randn(3, 4)),
}


def compiled(model, backend="aot_eager"):
    return torch.compile(model, fullgraph=True, backend=backend)


def ready(name, recipe="int8", save_codes=True):
    make, x = MODELS[name]
    config = dataclasses.replace(RECIPES[recipe], save_codes=save_codes)
    return fq.calibrate(fq.prepare(zoo.build(make, x), config, x), [x], progress=False).train(), x


def other_batch(x, number):
    """Returns a batch of the same shape with values beyond the range of earlier ones."""
    return x * (1 + number) if x.is_floating_point() else x.roll(number, 0)


def assert_same_model_and_switches(expected, actual, *names):
    assert_same_model(expected, actual, *names)
    for (path, e), (_, a) in zip(fqnn.named_quantizers(expected), fqnn.named_quantizers(actual), strict=True):
        assert (e.observing, e.quantizing, e.frozen, e.nonfinite) == (
            a.observing,
            a.quantizing,
            a.frozen,
            a.nonfinite,
        ), path


def run_seeded(run, x):
    torch.manual_seed(5)  # dropout
    return run(x)


def assert_same_step(eager, model, run, x, *names):
    """Asserts that a step of `run`, which is `model` compiled, equals one of its copy `eager`."""
    expected, actual = run_seeded(eager, x), run_seeded(run, x)
    assert_same_bits(expected, actual, *names, "y")
    for y in (expected, actual):
        y.square().mean().backward()
    assert_same_model_and_switches(eager, model, *names)
    for m in (eager, model):
        m.zero_grad()


# --- the bits of eager --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", UNCOMPILED)
def test_models_left_out_do_not_compile_in_float_either(name):
    make, x = ZOO[name]
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(zoo.build(make, x), "eager")(x)


# Every model and every recipe occurs, but not every combination, because compiling is slow.
PAIRS = [
    ("residual", "int8"),
    ("depthwise-separable", "int8_dynamic"),
    ("U-Net", "int4_weight_only"),
    ("TransformerEncoder", "int8"),
    ("GPT", "lsq"),
    ("a module used twice", "lsq"),
    ("lists and dicts", "int8_dynamic"),
    ("parametrized", "int8"),
    ("weight-normed", "w4a8"),
    ("depthwise-separable", "fp8"),
    ("TransformerEncoder", "mxfp8"),
    ("U-Net", "nvfp4"),
]
# Observed and learned scales.
TRIED = PAIRS if ALL else [PAIRS[i] for i in (0, 5)]


def test_pairs_cover_every_model_that_compiles_and_every_recipe():
    assert {name for name, _ in PAIRS} == ZOO.keys() - set(UNCOMPILED)
    assert {recipe for _, recipe in PAIRS} == RECIPES.keys()


@pytest.mark.parametrize(("name", "recipe"), TRIED, ids=map(", ".join, TRIED))
def test_a_compiled_model_has_eager_bits_in_training_and_evaluation(name, recipe):
    model, x = ready(name, recipe)
    eager, run = copy.deepcopy(model), compiled(model)
    for training in (True, False):
        for m in (eager, model):
            m.train(training)
        for number in range(2):
            batch = other_batch(x, number)
            assert_same_step(eager, model, run, batch, "train" if training else "eval", number)


@pytest.mark.parametrize(
    ("recipe", "save_codes"),
    [("int8", True), pytest.param("int8", False, marks=only_in_test_all), ("lsq", True)],
    ids=["codes", "floats", "codes of learned scales"],
)
def test_saved_codes_give_the_same_gradients_compiled_and_eager(recipe, save_codes, monkeypatch):
    monkeypatch.setattr(saved_codes, "_SMALLEST", 1)
    model, x = ready("weight-normed", recipe, save_codes)
    eager, run = copy.deepcopy(model), compiled(model)
    for number in range(2):
        assert_same_step(eager, model, run, other_batch(x, number), number)


@pytest.mark.parametrize("recipe", [pytest.param("int8", marks=only_in_test_all), "lsq"])
def test_training_a_compiled_model_gives_the_eager_parameters(recipe):
    model, x = ready("a module used twice", recipe)
    eager, run = copy.deepcopy(model), compiled(model)
    for m, forward in ((eager, eager), (model, run)):
        optimizer = torch.optim.SGD(fqnn.param_groups(m), lr=0.05, momentum=0.9)
        for number in range(4):
            m.train()  # makes compiled code correct learned values out of range, which eager code does in every pass
            optimizer.zero_grad()
            forward(other_batch(x, number)).square().mean().backward()
            optimizer.step()
    assert_same_model_and_switches(eager, model)


@only_in_test_all
@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
@pytest.mark.parametrize(("name", "recipe"), [("parametrized", "int8"), ("a module used twice", "lsq")])
def test_a_model_compiled_by_inductor_has_eager_scales(name, recipe):
    model, x = ready(name, recipe)
    eager, run = copy.deepcopy(model), compiled(model, "inductor")
    expected, actual = eager(x), run(x)
    layers = [module for module in eager.modules() if isinstance(module, nn.Linear)]
    # Inductor sums in another order, after which a value may be rounded to the code next to eager's.
    code = layers[-1].input_quantizer.scale.detach() * layers[-1].weight.detach().abs().sum(1).max()
    torch.testing.assert_close(actual, expected, rtol=0, atol=float(code))
    for (path, e), (_, a) in zip(fqnn.named_quantizers(eager), fqnn.named_quantizers(model), strict=True):
        if e is layers[0].input_quantizer or path.endswith("weight_quantizer"):  # observes no sums
            for (field, value), (_, found) in zip(e.named_buffers(), a.named_buffers(), strict=True):
                assert_same_bits(value, found, path, field)


# --- compiled once for each state ---------------------------------------------------------------------

PLAN = dict(quantize_from=1, freeze_ranges_at=2, freeze_norms_at=3)
STATES = ["observe", "quantize", "frozen ranges", "frozen norms"]


class Training:
    """An ordinary training loop that counts compilations."""

    def __init__(self, name, recipe, **plan):
        self.model, self.x = ready(name, recipe)
        self.counter = CompileCounter("eager")  # only dynamo's graphs are counted; any backend will do
        self.run = compiled(self.model, self.counter)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.schedule = fq.Schedule(self.model, **plan)
        self.number = 0

    @property
    def compilations(self):
        return self.counter.frame_count

    def train(self):
        self.model.train()
        for _ in range(2):
            self.number += 1
            self.optimizer.zero_grad()
            self.run(other_batch(self.x, self.number % 3)).square().mean().backward()
            self.optimizer.step()

    def evaluate(self):
        self.model.eval()
        with torch.no_grad():
            self.run(self.x)


@only_in_test_all  # test_compile_quantizers.py counts the compilations of each quantizer
@pytest.mark.parametrize(("name", "recipe"), [("small residual", "int8"), ("a module used twice", "lsq")])
def test_each_state_of_a_schedule_is_compiled_once_in_training_and_once_in_evaluation(name, recipe):
    training, counts = Training(name, recipe, **PLAN), []
    for again in range(2):
        training.schedule.load_state_dict({"steps": 0})
        for number, state in enumerate(STATES):
            training.train()
            training.evaluate()
            counts.append(training.compilations)
            if not again:
                assert training.compilations <= 2 * (number + 1), state
            for _ in range(2):
                training.train()
                training.evaluate()
            assert training.compilations == counts[-1], f"{state}: recompiled"
            training.schedule.step()
    # Each of the first three states needs another program; otherwise the switches would have no effect.
    assert len(set(counts[:3])) == 3
    assert counts[len(STATES) :] == counts[len(STATES) - 1 : len(STATES)] * len(STATES)


def test_a_whole_schedule_stays_below_dynamos_recompile_limit():
    """Beyond the limit, a model compiled with fullgraph=True fails."""
    assert 2 * len(STATES) <= torch._dynamo.config.recompile_limit


@pytest.mark.parametrize("recipe", ["int8", pytest.param("lsq", marks=only_in_test_all)])
def test_health_summary_and_state_dicts_cause_no_recompilation(recipe):
    training = Training("a module used twice", recipe)
    training.train()
    training.evaluate()
    before = training.compilations
    for look in (
        lambda: fq.health(training.model),
        lambda: fq.health(training.model, [training.x]),
        lambda: fq.summary(training.model),
        lambda: copy.deepcopy(training.model.state_dict()),
        lambda: training.model.load_state_dict(training.model.state_dict()),
        # Learned scales are not calibrated again.
        lambda: recipe == "lsq" or fq.calibrate(training.model, [training.x], progress=False),
    ):
        look()
        training.train()
        training.evaluate()
        assert training.compilations == before


# --- the schedule in compiled code --------------------------------------------------------------------


def test_a_schedule_switches_compiled_code_as_it_switches_eager_code():
    """Frozen ranges and statistics stay frozen after `model.train()`."""
    model, x = ready("residual" if ALL else "small residual")
    eager, run = copy.deepcopy(model), compiled(model, "eager")
    schedules = [fq.Schedule(m, **PLAN) for m in (eager, model)]
    for number, state in enumerate((*STATES, "later")):
        for m in (eager, model):
            m.train()
        assert_same_step(eager, model, run, other_batch(x, number), state)
        for schedule in schedules:
            schedule.step()


def test_batch_norms_frozen_after_compilation_keep_their_statistics():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    fq.prepare(model, recipes.int8(), torch.ones(2, 4))
    schedule, run = fq.Schedule(model, freeze_norms_at=1), compiled(model, "eager")
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    run(x)
    schedule.step()
    before = model[1].running_mean.clone()
    model.train()  # the next epoch
    run(x)
    assert_same_bits(before, model[1].running_mean, "running_mean")


@pytest.mark.parametrize("in_place", [True, False], ids=["model.compile()", "torch.compile(model)"])
@pytest.mark.parametrize("ran_before", [True, False], ids=["compiled before", "not yet compiled"])
def test_health_of_a_compiled_model_equals_that_of_the_eager_model(in_place, ran_before):
    model, x = ready("a module used twice")
    expected = fq.health(copy.deepcopy(model), [x]).to_dict()
    if in_place:
        model.compile(fullgraph=True, backend="eager")
        run = model
    else:
        run = compiled(model, "eager")
    if ran_before:
        run.eval()
        with torch.no_grad():
            run(x)
    found = fq.health(run, [x]).to_dict()
    assert [q["clipped"] for q in found.values()] == [q["clipped"] for q in expected.values()]
