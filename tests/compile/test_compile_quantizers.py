"""Compiled quantizers are one graph in every state, with eager's bits in results, gradients and buffers."""

import copy
import dataclasses
import itertools
import shutil
import warnings

import pytest

import fakequant as fq
from fakequant import presets
from fakequant.testing.assertions import assert_same_bits, assert_same_model
from straight_through import torch
from thoroughness import only_in_test_all, sampled

fqnn = pytest.importorskip("fakequant.nn")
observers = pytest.importorskip("fakequant.observers")
CompileCounter = pytest.importorskip("torch._dynamo.testing").CompileCounterWithBackend

pytestmark = [
    # Raised by dynamo for every autograd function, and by inductor.
    pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning"),
]
torch.manual_seed(0)
X = torch.randn(4, 8)
AFFINE = presets.uint4()
LAST = fq.QuantSpec(bits=4, symmetric=False, axis=-1)
SHORT = dataclasses.replace(presets.mxfp4(), group_size=3)
SHORT_NVFP4 = dataclasses.replace(presets.nvfp4(), group_size=5)
OBSERVED = {
    "MovingAverage": lambda: fqnn.FakeQuantize(AFFINE, observers.MovingAverage(0.3)),
    "MinMax channel": lambda: fqnn.FakeQuantize(LAST, observers.MinMax(), shape=(None, 8)),
    "Dynamic group": lambda: fqnn.FakeQuantize(presets.int4(group_size=4), observers.Dynamic(), shape=(4, 8)),
    "token": lambda: fqnn.FakeQuantize(presets.int8_per_token()),
    "Percentile": lambda: fqnn.FakeQuantize(AFFINE, observers.Percentile(90.0, bins=64), gradient="pass"),
    "Histogram": lambda: fqnn.FakeQuantize(LAST, observers.Histogram(bins=64, steps=8), shape=(None, 8)),
    "MSE": lambda: fqnn.FakeQuantize(AFFINE, observers.MSE(steps=8)),
    "Entropy": lambda: fqnn.FakeQuantize(AFFINE, observers.Entropy(bins=64, steps=8)),
    "Fixed": lambda: fqnn.FakeQuantize(AFFINE, observers.Fixed(-0.5, 1.0)),
    "FP8": lambda: fqnn.FakeQuantize(presets.fp8_e4m3()),
    "FP8 MSE": lambda: fqnn.FakeQuantize(presets.fp8_e5m2(), observers.MSE(steps=8)),
    "MXFP6": lambda: fqnn.FakeQuantize(presets.mxfp6()),
    "MXFP8 weight": lambda: fqnn.FakeQuantize(presets.mxfp8(axis=0), shape=(4, 8)),
    "short blocks": lambda: fqnn.FakeQuantize(SHORT),
    "NVFP4, short blocks": lambda: fqnn.FakeQuantize(SHORT_NVFP4, shape=(4, 8)),
}
LEARNED = {
    "LSQ group": lambda: fqnn.LearnedFakeQuantize(presets.int4(group_size=4), shape=(4, 8)),
    "LSQ FP8 channel": lambda: fqnn.LearnedFakeQuantize(presets.fp8_e4m3(axis=0), shape=(4, 8)),
    "LSQ+ channel": lambda: fqnn.LearnedFakeQuantize(LAST, shape=(None, 8)),
    "fixed offset": lambda: fqnn.LearnedFakeQuantize(AFFINE, learn_zero_point=False, grad_factor=0.3),
    "PACT": lambda: fqnn.PACT(4, 0.7),
}
# (training, observing, quantizing, frozen) for all states that differ. Learned quantizers do not quantize while
# they observe.
STATES = [
    (True, True, True, False),
    (True, True, False, False),
    (True, False, True, False),
    (True, False, True, True),
    (False, True, True, False),
    (False, False, False, False),
]


def compiled(module, backend="aot_eager", **options):
    return torch.compile(module, fullgraph=True, backend=backend, **options)


def ready(make):
    module = make()
    if isinstance(module, fqnn.LearnedFakeQuantize):
        module.initialize(X)
    module(X)
    return module


def assert_same_module(expected, actual):
    assert_same_model(expected, actual)
    assert expected.nonfinite == actual.nonfinite


def assert_same_step(module, run, x):
    """Asserts that a step of `run`, which is `module` compiled, equals one of an eager copy."""
    eager = copy.deepcopy(module)
    expected, actual = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = eager(expected), run(actual)
    assert_same_bits(y, z, "y")
    assert y.requires_grad == z.requires_grad
    dy = torch.linspace(-1, 1, x.numel()).view(x.shape)
    y.backward(dy)
    z.backward(dy)
    assert_same_bits(expected.grad, actual.grad, "dx")
    assert_same_module(eager, module)
    module.zero_grad()


def batches(shape=(4, 8)):
    """Yields batches, each with a wider range than the last."""
    for width in itertools.count(1):
        yield torch.randn(shape) * width


def switch(module, training, observing, quantizing, frozen):
    module.train(training)
    fqnn.switch_quantizers(module, observing=observing, quantizing=quantizing, frozen=frozen)


ALL = OBSERVED | LEARNED


TRIED = sampled(
    ALL,
    "MovingAverage",
    "token",
    "Histogram",
    "NVFP4, short blocks",
    "LSQ+ channel",
)


@pytest.mark.parametrize("make", TRIED.values(), ids=TRIED)
def test_a_compiled_quantizer_has_eager_bits_in_every_state_and_compiles_each_once(make):
    module = ready(make)
    counter, data, counts = CompileCounter("aot_eager"), batches(), []
    run = compiled(module, counter)
    for _ in range(2):  # the second round must not compile anything
        for state in STATES:
            switch(module, *state)
            assert_same_step(module, run, next(data))
        counts.append(counter.frame_count)
    assert 1 < counts[0] <= len(STATES)
    assert counts[1] == counts[0]


DYNAMIC = ("MovingAverage", "MinMax channel", "token", "Histogram", "LSQ+ channel", "PACT")
DYNAMIC = sampled({name: ALL[name] for name in DYNAMIC}, "MovingAverage", "token", "LSQ+ channel")


@pytest.mark.parametrize("make", DYNAMIC.values(), ids=DYNAMIC)
def test_quantizers_are_not_recompiled_for_other_batch_sizes(make):
    module = ready(make)
    counter, counts = CompileCounter("aot_eager"), []
    run = compiled(module, counter, dynamic=True)
    for batch in (2, 3, 17, 64):
        assert_same_step(module, run, torch.randn(batch, 8) * batch)
        counts.append(counter.frame_count)
    assert counts == counts[:1] * 4


# --- values that are not finite -------------------------------------------------------------------

COUNTING = {name: OBSERVED[name] for name in ("MovingAverage", "Dynamic group", "token", "Percentile")}


@pytest.mark.parametrize("make", COUNTING.values(), ids=COUNTING)
def test_a_compiled_quantizer_counts_nonfinite_values_and_warns_once(make):
    module, eager = ready(make), ready(make)
    module.path = "blocks.0"
    run = compiled(module)
    for _ in range(2):
        x = torch.randn(4, 8)
        x[0, 0], x[1, 3], x[2, 5] = torch.nan, torch.inf, -torch.inf
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            y = eager(x)
        assert_same_bits(y, run(x), "y")
    assert module.nonfinite == eager.nonfinite == 6
    with pytest.warns(RuntimeWarning, match=r"FakeQuantize at blocks\.0 has observed 6 values that are NaN or inf"):
        module.eval()
    module.train()
    eager.train()
    assert_same_module(eager, module)


@pytest.mark.parametrize("numerics", ["onnx", "torch", "half_away"])
def test_a_compiled_quantizer_without_a_scale_raises_or_returns_nan(numerics):
    module = fqnn.FakeQuantize(fq.QuantSpec(numerics=numerics)).eval()
    try:
        y = compiled(module)(X)
    except (ValueError, RuntimeError) as error:
        assert "finite" in str(error)  # noqa: PT017
    else:
        assert y.isnan().all()


@pytest.mark.parametrize("make", [OBSERVED["MovingAverage"], OBSERVED["MinMax channel"]], ids=["tensor", "channel"])
def test_a_compiled_quantizer_refuses_a_first_batch_of_nan_and_stays_unchanged(make):
    module, new = make(), make()
    with pytest.raises(ValueError, match="have not seen a finite value"):
        compiled(module)(torch.full((4, 8), torch.nan))
    assert_same_module(new, module)


# --- learned scales out of range ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["LSQ+ channel", "PACT"])
def test_compiled_learned_quantizers_correct_invalid_parameters_as_eager_ones_do(name):
    module = ready(LEARNED[name])
    eager, run = copy.deepcopy(module), compiled(module)
    assert_same_bits(eager(X), run(X), "before")
    for bad in (-1.0, 1e38, torch.inf, torch.nan, 0.0):
        for m in (eager, module):
            m.zero_grad()
            with torch.no_grad():
                next(m.parameters()).flatten()[0].fill_(bad)
        x = torch.randn(4, 8)
        expected, actual = eager(x), run(x)
        assert_same_bits(expected, actual, f"y, {bad}")
        assert actual.isfinite().all()
        for m, y in ((eager, expected), (module, actual)):
            y.sum().backward()
            assert (m.qparams().scale > 0).all()
        assert_same_bits(eager.qparams().scale, module.qparams().scale, f"scale, {bad}")
        for e, a in zip(eager.parameters(), module.parameters(), strict=True):
            assert_same_bits(e.grad, a.grad, f"gradient, {bad}")
        other = LEARNED[name]()
        other.load_state_dict(module.state_dict())
        assert_same_bits(eager.qparams().scale, other.qparams().scale, f"scale of a saved state, {bad}")


# --- in a model -----------------------------------------------------------------------------------


class Layer(torch.nn.Linear):
    def __init__(self, learned):
        super().__init__(8, 6)
        spec = presets.int4(group_size=None)
        self.input = fqnn.FakeQuantize(presets.uint8(), observers.MovingAverage(0.3))
        if learned:
            self.weights = fqnn.LearnedFakeQuantize(spec, shape=(6, 8)).initialize(self.weight)
        else:
            self.weights = fqnn.FakeQuantize(spec, observers.Dynamic(), shape=(6, 8))

    def forward(self, x):
        return torch.nn.functional.linear(self.input(x), self.weights(self.weight), self.bias)


def train(layer, run):
    optimizer = torch.optim.SGD(fqnn.param_groups(layer), lr=0.05)
    for x in torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(2)):
        optimizer.zero_grad()
        run(x).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("learned", [True, False], ids=["learned", "observed"])
def test_training_a_layer_with_compiled_quantizers_gives_eager_bits(learned):
    torch.manual_seed(3)
    layer = Layer(learned)
    eager = copy.deepcopy(layer)
    train(eager, eager)
    train(layer, compiled(layer))
    for (name, e), (_, a) in zip(eager.state_dict().items(), layer.state_dict().items(), strict=True):
        assert_same_bits(e, a, name)
    x = torch.randn(3, 8) * 5
    assert_same_bits(eager.eval()(x), compiled(layer.eval())(x), "y")


@only_in_test_all
@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("name", ["MinMax channel", "token", "LSQ+ channel"])
def test_quantizers_compiled_by_inductor_have_eager_bits(name):
    module = ready(ALL[name])
    run = compiled(module, "inductor")
    for x in (X, X * 3):
        assert_same_step(module, run, x)


OTHER_DTYPES = {
    "observed": (OBSERVED["MovingAverage"], torch.bfloat16),
    "token": (OBSERVED["token"], torch.double),
    "LSQ+": (LEARNED["LSQ+ channel"], torch.half),
}


@pytest.mark.parametrize(("make", "dtype"), OTHER_DTYPES.values(), ids=OTHER_DTYPES)
def test_compiled_quantizers_have_eager_bits_in_other_dtypes(make, dtype):
    module = ready(make).to(dtype)
    run = compiled(module)
    for training in (True, False):
        module.train(training)
        assert_same_step(module, run, (X * 3).to(dtype))


def test_a_compiled_quantizer_uses_a_state_loaded_later():
    module, other = ready(OBSERVED["MovingAverage"]), ready(OBSERVED["MovingAverage"])
    other(X * 50)
    counter = CompileCounter("aot_eager")
    run = compiled(module.eval(), counter)
    run(X)
    module.load_state_dict(other.state_dict())
    assert_same_bits(other.eval()(X * 9), run(X * 9), "y")
    assert counter.frame_count == 1
