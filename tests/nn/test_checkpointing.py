"""Gradient checkpointing: the same state and the same gradients, to the bit, as without it."""

import copy
import dataclasses
import pickle
import warnings
from functools import partial

import pytest

import fakequant as fq
from fakequant import observers, recipes
from fakequant.testing.assertions import assert_same_state
from thoroughness import ALL

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional
checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint
sac = pytest.importorskip("torch.utils.checkpoint").create_selective_checkpoint_contexts


def PLAIN(function, *args):
    """Runs a function without a checkpoint."""
    return function(*args)


RECIPES = {
    "int8": recipes.int8(),
    "int8 xnnpack": recipes.int8(target="xnnpack"),
    "int8 openvino": recipes.int8(target="openvino"),
    "w4a8": recipes.w4a8(),
    "lsq 2": recipes.lsq(2),
    "lsq 4": recipes.lsq(4),
    "mxfp4_weight_only": recipes.mxfp4_weight_only(),
    "lsq": recipes.lsq(3),
    "int8_dynamic": recipes.int8_dynamic(),
    "int4_weight_only": recipes.int4_weight_only(8),
    "fp8": recipes.fp8(),
    "mxfp8": recipes.mxfp8(),
    "nvfp4": recipes.nvfp4(),
}


class Block(nn.Module):
    """Layers, a module that is called twice, functions, dropout and a residual connection."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.relu = nn.ReLU()
        self.drop = nn.Dropout(0.25)

    def forward(self, x):
        h = self.relu(self.first(x))
        h = self.relu(self.second(self.drop(h)) - 0.1)
        return x + torch.softmax(h, -1)


class Net(nn.Module):
    """Blocks that run in `run`, between layers that do not."""

    def __init__(self, width=8, run=PLAIN):
        super().__init__()
        self.stem, self.act = nn.Linear(width, width), nn.ReLU()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 3)
        self.run = run

    def forward(self, x):
        x = self.act(self.stem(x))
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x)


def nested(function, *args):
    """The function in a checkpoint in a checkpoint."""
    inner = partial(checkpoint, function, use_reentrant=False)
    return checkpoint(inner, *args, use_reentrant=False)


PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
RUNS = {
    "not reentrant": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "to the end": partial(checkpoint, use_reentrant=False, early_stop=False),
    "nested": nested,
    "reentrant in another": lambda f, *x: checkpoint(RUNS["reentrant"], f, *x, use_reentrant=True),
    "selective": partial(checkpoint, use_reentrant=False, context_fn=lambda: sac(PRODUCTS)),
}


def prepared(recipe, make=Net, width=8, **options):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = fq.prepare(make(width, **options), recipe, torch.randn(4, width))
        return fq.calibrate(model, [torch.randn(4, width)], progress=False).train()


def everything(model):
    """State, gradients and counters of a model."""
    found = dict(model.state_dict())
    found.update({f"{name}.grad": p.grad for name, p in model.named_parameters()})
    for path, quantizer in fq.nn.named_quantizers(model):
        found.update({f"{path}.{name}": value for name, value in quantizer.named_buffers()})
        found[f"{path}._nonfinite"] = quantizer._nonfinite
    return {name: None if value is None else value.detach().clone() for name, value in found.items()}


def steps(model, run, *, at_once=2, number=2, width=8, change=lambda x: x, wrap=lambda f: f):
    """Trains for some steps with `at_once` forward passes before the backward pass. Returns everything."""
    model.run = run
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(number):
        optimizer.zero_grad()
        losses = []
        for part in range(at_once):
            x = change(torch.randn(4, width) * (1 + step + part)).requires_grad_()
            losses.append(wrap(model)(x).square().mean())
        for loss in reversed(losses):  # so that the first batch is the last to run again
            loss.backward()
        optimizer.step()
    return everything(model)


PAIRS = [(recipe, run) for recipe in RECIPES for run in RUNS]


# One in five: every recipe, and every way, occurs several times.
@pytest.mark.parametrize(("recipe", "run"), PAIRS if ALL else PAIRS[::5])
def test_state_and_gradients_are_those_without_checkpoints(recipe, run):
    model = prepared(RECIPES[recipe])
    expected = steps(copy.deepcopy(model), PLAIN)
    assert_same_state(steps(model, RUNS[run]), expected)


def of(recipe, run, make=Net, **options):
    """Returns everything after training without and with checkpoints."""
    model = prepared(recipe, make)
    return steps(copy.deepcopy(model), PLAIN, **options), steps(model, run, **options)


KINDS = [RUNS["not reentrant"], RUNS["reentrant"]]
BOTH = pytest.mark.parametrize("run", KINDS, ids=["not reentrant", "reentrant"])
OBSERVERS = [observers.MinMax(), observers.Dynamic(), observers.Percentile(bins=64), observers.MSE(steps=4)]


@BOTH
@pytest.mark.parametrize("observer", OBSERVERS, ids=str)
def test_observers_see_each_tensor_once(observer, run):
    config = recipes.int8()
    config = dataclasses.replace(config, default=dataclasses.replace(config.default, activation_observer=observer))
    assert_same_state(*of(config, run))


@BOTH
def test_autocast_is_the_same_in_both_runs(run):
    wrap = lambda model: torch.autocast("cpu", torch.bfloat16)(model)  # noqa: E731
    assert_same_state(*of(recipes.int8(), run, wrap=wrap))


@BOTH
def test_ranges_do_not_depend_on_random_numbers_of_the_second_run(run):
    plain, found = of(recipes.int8(), partial(run, preserve_rng_state=False), number=1)
    assert_same_state(
        {n: v for n, v in found.items() if "running" in n}, {n: v for n, v in plain.items() if "running" in n}
    )


@BOTH
def test_values_that_are_not_finite_are_counted_once(run):
    def with_nan(x):
        x[0, 0] = torch.nan
        return x

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, found = of(recipes.int8(), run, change=with_nan)
        assert any(int(v) for n, v in plain.items() if "blocks" in n and n.endswith("_nonfinite"))
    assert_same_state(found, plain)


@BOTH
def test_hooks_and_copies_see_what_they_would_see_without_checkpoints(run):
    model = prepared(recipes.int8())
    model.extra = fq.nn.FakeQuantize(fq.presets.uint8())
    for block in model.blocks:
        block.first.register_forward_hook(partial(quantized_twice, model.extra))
    model = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    expected = steps(copy.deepcopy(model), PLAIN)
    assert_same_state(steps(model, run), expected)


def quantized_twice(quantizer, module, args, result):
    """A forward hook. The quantizer is shared by two checkpoints, and called twice in each."""
    return quantizer(result) + quantizer(result * 0.5)


@BOTH
def test_a_graph_can_run_backward_twice(run):
    model = prepared(recipes.int8())
    found = []
    for choice in (PLAIN, run):
        made = copy.deepcopy(model)
        made.run = choice
        torch.manual_seed(3)
        loss = made(torch.randn(4, 8)).square().mean()
        for _ in range(2):
            loss.backward(retain_graph=True)
        found.append(everything(made))
    assert_same_state(*found)


class Observing(Net):
    """Learned quantizers that still look for their first scale, and a clipped activation."""

    def __init__(self, width=8):
        super().__init__(width)
        for block in self.blocks:
            block.relu = nn.Sequential(fq.nn.LearnedFakeQuantize(fq.QuantSpec(bits=4)), fq.nn.PACT(4, 2.0))


@BOTH
def test_learned_quantizers_start_from_each_tensor_once(run):
    torch.manual_seed(0)
    model = Observing()
    for block in model.blocks:
        block.relu[0].observing = True
    expected = steps(copy.deepcopy(model), PLAIN)
    assert_same_state(steps(model, run), expected)
    found = []
    for choice in (PLAIN, run):
        made = copy.deepcopy(model)
        for block in made.blocks:
            block.relu[0].observing = False
        found.append(steps(made, choice))
    assert_same_state(*found)


class Large(nn.Module):
    """Keeps codes for the backward pass. The quantizer of a layer's input is outside of its checkpoint."""

    def __init__(self, width=8):
        super().__init__()
        self.stem, self.act, self.inside = nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 512)
        self.second = nn.Linear(512, 8)
        self.run = PLAIN

    def forward(self, x):
        x = self.act(self.stem(x.repeat(128, 1)))
        return self.second(x + self.run(self.inside, x))


@BOTH
def test_saved_codes_have_the_scale_of_the_first_run(run):
    model = prepared(recipes.int8(target="onnxruntime-x86"), Large)
    assert model.inside.input_quantizer is None
    expected = steps(copy.deepcopy(model), PLAIN)
    assert_same_state(steps(model, run), expected)


class Normed(nn.Module):
    """Batch norms, which are frozen while ranges still move: the deployed bias depends on the scale of the input."""

    def __init__(self, width=8):
        super().__init__()
        self.stem, self.act = nn.Linear(width, width), nn.ReLU()
        self.inside = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.LSTM(width, width))
        self.head = nn.Linear(width, 3)
        self.run = PLAIN

    def forward(self, x):
        return self.head(self.run(self.inside, self.act(self.stem(x)))[0])


@BOTH
def test_deployed_biases_are_rounded_as_in_the_first_run(run):
    model = prepared(recipes.int8(target="onnxruntime-x86"), Normed)
    model.inside[1].eval()
    for module in model.modules():
        if getattr(module, "_fakequant", None) is not None and hasattr(module._fakequant, "deploys_bias"):
            module._fakequant.deploys_bias = True
    expected = steps(copy.deepcopy(model), PLAIN)
    assert_same_state(steps(model, run), expected)


def test_a_gradient_inside_a_checkpoint_is_not_observed_either():
    class Penalty(Net):
        def forward(self, x):
            return self.run(self.part, x)

        def part(self, x):
            y = checkpoint(self.blocks[0], x, use_reentrant=False)
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return self.head(self.blocks[1](self.blocks[0](y + slope)))

    class Plain(Penalty):
        def part(self, x):
            y = self.blocks[0](x)
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return self.head(self.blocks[1](self.blocks[0](y + slope)))

    model = prepared(recipes.int8())
    found = []
    for made, run in ((Plain(), PLAIN), (Penalty(), PLAIN), (Penalty(), RUNS["to the end"])):
        made.__dict__.update(copy.deepcopy(model).__dict__)
        found.append(steps(made, run))
    assert_same_state(found[1], found[0])
    assert_same_state(found[2], found[0])


def test_an_error_names_a_quantizer_that_is_called_more_often_when_it_runs_again():
    quantizer, calls = fq.nn.FakeQuantize(fq.presets.uint8(), path="act"), []

    def function(x):
        calls.append(1)
        for _ in calls:
            x = quantizer(x)
        return x * x

    y = checkpoint(function, torch.ones(2, requires_grad=True), use_reentrant=True)
    with pytest.raises(RuntimeError, match=r"FakeQuantize at act: a checkpoint calls the quantizer 1 times"):
        y.sum().backward()


def test_a_process_that_only_loads_quantizers_watches_checkpoints(monkeypatch):
    saved, seen = pickle.dumps(fq.nn.FakeQuantize(fq.presets.uint8())), []
    monkeypatch.setattr("fakequant.nn._quantizer_state.watch_checkpoints", lambda: seen.append(1))
    pickle.loads(saved)
    assert seen


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # which torch's compiler reads
@(BOTH if ALL else pytest.mark.parametrize("run", KINDS[:1]))
def test_compiled_code_in_a_checkpoint_is_not_observed_again(run):
    in_checkpoint = lambda f, *args: run(torch.compile(f, backend="aot_eager"), *args)  # noqa: E731
    assert_same_state(*of(recipes.int8(), in_checkpoint, WithoutDropout, at_once=1))


class WithoutDropout(Net):
    """Compiled code draws other random numbers."""

    def __init__(self, width=8):
        super().__init__(width)
        for block in self.blocks:
            block.drop = nn.Identity()
