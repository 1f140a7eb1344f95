"""`verify` refuses models that do not repeat themselves, and accepts those whose state has no effect."""

import collections
import itertools
import random
import time

import pytest

import fakequant as fq

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional
np = pytest.importorskip("numpy")
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
recipes = pytest.importorskip("fakequant.recipes")
fingerprint = pytest.importorskip("fakequant._export.notes")
notes = pytest.importorskip("fakequant._export.notes")
verifying = pytest.importorskip("fakequant._verify.verify")


class Changed(nn.Module):
    """Two layers, with an operation of another module between them that can be replaced after the export."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)
        self.noise = nn.Identity()

    def forward(self, x):
        return self.noise(self.b(F.relu(self.a(x))))


class Noise(nn.Module):
    """Calls a function with itself and the tensor. It can keep state in itself."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.n, self.seen, self.parts = 0, [], {"count": 0}
        self.factor = torch.ones(())
        self.register_buffer("total", torch.zeros(()))
        self.drop = nn.Dropout(0.5)
        self.generator, self.numbers = torch.Generator().manual_seed(0), np.random.default_rng(0)

    def forward(self, x):
        return self.function(self, x)


class Counter(Changed):
    """Has a factor that depends on the number of calls. A file has one of its values."""

    n = 0

    def forward(self, x):
        self.n += 1
        return super().forward(x) * (2.0 if self.n % 2 else 1.0)


COUNT = 0


def every(period, start=0):
    """Doubles every result of a `period`-th call. The counter is an attribute."""

    def function(module, x):
        module.n += 1
        return x * (2.0 if module.n % period == start else 1.0)

    return function


def dropout_in_training_mode(module, x):
    module.drop.train()
    return module.drop(x)


def growing_list(module, x):
    module.seen.append(1)
    return x + len(module.seen)


def buffer(module, x):
    module.total += 1
    return x + module.total


def running_mean(module, x):
    module.total = 0.9 * module.total + 0.1 * x.mean()
    return x - module.total


def tensor_in_place(module, x):
    return x * module.factor.add_(0.5)


def dict_entry(module, x):
    module.parts["count"] += 1
    return x + module.parts["count"]


def global_variable(module, x):
    global COUNT
    COUNT += 1
    return x * (2.0 if COUNT % 5 == 0 else 1.0)


def class_variable(module, x):
    type(module).calls = getattr(type(module), "calls", 0) + 1
    return x + type(module).calls


def closure():
    numbers = itertools.count()
    return lambda module, x: x + next(numbers)


def stochastic_depth(module, x):
    return x if random.random() < 0.9999 else x * 0


def address(module, x):
    made = object()
    module.seen.append(made)  # so that the next object has another address
    return x + (id(made) % 65537) / 65537


# What changes results, and words of the reason that is named.
REFUSED = {
    "counter": (every(2), "attribute n of noise"),
    "period 3": (every(3), "attribute n of noise"),
    "period 7": (every(7), "attribute n of noise"),
    "F.dropout": (lambda module, x: F.dropout(x, 0.5), r"random numbers \(bernoulli_ in noise"),
    "rare dropout": (lambda module, x: F.dropout(x, 1e-7), r"random numbers \(bernoulli_ in noise"),
    "nn.Dropout in training mode": (dropout_in_training_mode, r"random numbers \(bernoulli_ in noise\.drop"),
    "rand": (lambda module, x: x + torch.rand(4), r"random numbers \(rand "),
    "rare rand": (lambda module, x: x * 2 if torch.rand(()) > 0.9999 else x, r"random numbers \(rand "),
    "randn": (lambda module, x: x * torch.randn_like(x), r"random numbers \(randn_like"),
    "bernoulli": (lambda module, x: x * torch.bernoulli(torch.full_like(x, 0.5)), "random numbers"),
    "randperm": (lambda module, x: x[:, torch.randperm(4)], r"random numbers \(randperm"),
    "randperm of two": (lambda module, x: x[:, [*torch.randperm(2).tolist(), 2, 3]], r"random numbers \(randperm"),
    "random": (lambda module, x: x * random.random(), "Python's module random"),
    "stochastic depth": (stochastic_depth, "Python's module random"),
    "numpy.random": (lambda module, x: x * float(np.random.rand()), r"numpy\.random"),
    "rare numpy.random": (lambda module, x: x * 2 if np.random.rand() < 1e-6 else x, r"numpy\.random"),
    "NumPy generator": (lambda module, x: x * module.numbers.random(), "attribute numbers of noise"),
    "own generator": (lambda module, x: x + torch.rand(4, generator=module.generator), r"random numbers \(rand "),
    "gumbel_softmax": (lambda module, x: F.gumbel_softmax(x), r"random numbers \(exponential_"),
    "rrelu": (lambda module, x: F.rrelu(x, training=True), r"random numbers \(rrelu_with_noise"),
    "time": (lambda module, x: x + (time.perf_counter_ns() % 65537) / 65537, "the time"),
    "growing list": (growing_list, "attribute seen of noise"),
    "buffer": (buffer, "buffer total of noise"),
    "buffer as a result": (lambda module, x: module.total.add_(1), "buffer total of noise"),
    "running mean": (running_mean, "buffer total of noise"),
    "tensor in place": (tensor_in_place, "attribute factor of noise"),
    "dict": (dict_entry, "attribute parts of noise"),
    "global variable": (global_variable, "global variable COUNT"),
    "class variable": (class_variable, r"class variable Noise\.calls"),
    "closure": (closure(), "attribute function of noise"),
    "address": (address, "attribute seen of noise"),
}


def statistics(module, x):
    module.n += 1
    module.seen.append(float(x.mean()))
    module.total += x.detach().abs().sum()
    return x


def cache(module, x):
    if "table" not in module.parts:
        module.parts["table"] = torch.ones(4)
    return x * module.parts["table"]


def unused_draws(module, x):
    torch.rand(()), random.random(), np.random.rand()
    return F.dropout(x, 0.5, training=module.training)


def seeded(module, x):
    generator = torch.Generator().manual_seed(0)
    return x * (torch.rand(4, generator=generator) >= 0)


def attention_without_dropout(module, x):
    y = x.view(-1, 1, 2, 2)
    return x + 0 * F.scaled_dot_product_attention(y, y, y, dropout_p=0.0).view(x.shape)


def history(module, x):
    module.parts.setdefault("last", collections.deque(maxlen=2)).append(x.shape[0])
    return x


ACCEPTED = {
    "statistics": statistics,
    "cache": cache,
    "unused random numbers": unused_draws,
    "seeded in every pass": seeded,
    "attention without dropout": attention_without_dropout,
    "history": history,
    "time that is not used": lambda module, x: (time.time(), x)[1],
}
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model and the file of it, without noise."""
    torch.manual_seed(0)
    model = fq.prepare(Changed(), recipes.int8(target="onnxruntime-x86"), X)
    model = fq.calibrate(model, [X], progress=False).eval()
    path = tmp_path_factory.mktemp("exported") / "model.onnx"
    fq.export_onnx(model, path, X)
    assert fq.verify(model, path, [X]).ok
    return model, path


@pytest.mark.parametrize(("function", "reason"), REFUSED.values(), ids=REFUSED)
def test_verify_refuses_models_that_do_not_repeat_themselves(function, reason, exported):
    model, path = exported
    model.noise = Noise(function).eval()
    with pytest.raises(ValueError, match=rf"is not deterministic(.|\n)*{reason}"):
        fq.verify(model, path, [X])


@pytest.mark.parametrize("function", ACCEPTED.values(), ids=ACCEPTED)
def test_verify_accepts_models_whose_state_has_no_effect(function, exported):
    model, path = exported
    model.noise = Noise(function).eval()
    states = random.getstate(), torch.get_rng_state()
    assert fq.verify(model, path, [X]).ok
    if function is not unused_draws:
        assert states[0] == random.getstate()
        assert torch.equal(states[1], torch.get_rng_state())


@pytest.mark.parametrize("rows", [4, 64])
def test_verify_refuses_a_model_whose_counter_is_a_constant_of_the_file(rows, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(rows, 8)
    model = fq.calibrate(fq.prepare(Counter(), recipes.int8(), x), [x], progress=False).eval()
    fq.export_onnx(model, tmp_path / "model.onnx", x)
    with pytest.raises(ValueError, match=r"is not deterministic.*attribute n of the model"):
        fq.verify(model, tmp_path / "model.onnx", [x])


def with_noise(file, scale):
    """Returns a file that adds a random number to its result, with a matching fingerprint."""
    made = onnx.ModelProto()
    made.CopyFrom(file)
    last = next(node for node in made.graph.node if "output" in node.output)
    last.output[:] = ["before"]
    make = onnx.helper.make_node
    made.graph.node.append(make("RandomNormalLike", ["before"], ["noise"], scale=scale))
    made.graph.node.append(make("Add", ["before", "noise"], ["output"]))
    for note in made.metadata_props:
        if note.key == notes.GRAPH:
            note.value = fingerprint.digest_of_graph(made)
    return made


@pytest.mark.parametrize(("scale", "words"), [(1.0, "not deterministic: its results"), (1e-30, r"not deterministic\.")])
def test_verify_refuses_a_file_that_draws_random_numbers(scale, words, exported, tmp_path):
    model, path = exported
    model.noise = nn.Identity()
    onnx.save(with_noise(onnx.load(path), scale), tmp_path / "noisy.onnx")
    with pytest.raises(ValueError, match=rf"The file is {words}(.|\n)*RandomNormalLike"):
        fq.verify(model, tmp_path / "noisy.onnx", [X])


def test_verify_refuses_state_that_only_shows_when_rounding_is_measured(exported, monkeypatch):
    """The golden model changes after its first passes, and nothing that `verify` looks at says so."""
    model, path = exported
    model.noise = nn.Identity()
    monkeypatch.setattr(verifying, "require_repeating", lambda *args: None)
    calls = itertools.count()
    run = verifying.Passes.run_golden_on

    def changing(self, codes, inputs, whose):
        with monkeypatch.context() as patch:
            if next(calls) == 0:
                patch.setattr(type(self.golden), "forward", lambda module, x: 2 * original(module, x))
            return run(self, codes, inputs, whose)

    original = Changed.forward
    monkeypatch.setattr(verifying.Passes, "run_golden_on", changing)
    with pytest.raises(ValueError, match="The golden model is not deterministic"):
        fq.verify(model, path, [X])
