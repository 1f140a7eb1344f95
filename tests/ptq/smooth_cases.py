"""Models whose channels have different ranges, and comparisons, for the tests of `smooth` and `equalize`."""

import copy
import pickle

import pytest

from fakequant.testing.assertions import assert_same_bits, assert_same_state
from prepare_cases import randn

torch = pytest.importorskip("torch")
nn = torch.nn
fq = pytest.importorskip("fakequant")


class RMSNorm(nn.Module):
    """As in transformers: a weight, and nothing else that would tell what the module is."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        wide = x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Encoder(nn.Module):
    """A pre-norm transformer block, with RMSNorm before a gated MLP."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), RMSNorm(8)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.o(torch.softmax(self.q(h) @ self.k(h).mT, -1) @ self.v(h))
        h = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def encoder():
    torch.manual_seed(0)
    model = Encoder().eval()
    with torch.no_grad():
        for norm in (model.norm1, model.norm2):
            norm.weight.copy_(torch.logspace(-1, 1, 8)[torch.randperm(8)])
        model.norm1.bias.normal_()
    return model


def convolution(inputs, outputs, kernel=3, groups=1):
    conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=False)
    norm = nn.BatchNorm2d(outputs)
    nn.init.uniform_(norm.weight, -2, 2)
    nn.init.uniform_(norm.bias, -1, 1)
    nn.init.uniform_(norm.running_var, 0.5, 2)
    return [conv, norm, nn.ReLU()]


def network():
    """A depthwise-separable CNN; its head sees every channel at four places."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *convolution(3, 8),
        *convolution(8, 8, groups=8),
        *convolution(8, 6, kernel=1, groups=2),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(24, 4),
    ).eval()
    with torch.no_grad():
        for layer in (model[3], model[6]):
            layer.weight.mul_(torch.logspace(-2, 0, len(layer.weight)).reshape(-1, 1, 1, 1))
    return model


TOKENS = [randn(2, 5, 8, seed=seed) for seed in (1, 2)]
IMAGES = [randn(2, 3, 8, 8, seed=seed) for seed in (1, 2)]
MODELS = {"encoder": (encoder, TOKENS), "network": (network, IMAGES)}
each_model = pytest.mark.parametrize(("make", "data"), MODELS.values(), ids=MODELS)
PER_TENSOR = fq.QuantConfig(
    default=fq.LayerConfig(weight=fq.QuantSpec(bits=8, narrow_range=True), input=fq.presets.uint8()),
    operands=fq.presets.uint8(),
)


def prepared(model, data, config=None, *, calibrated=True):
    model = fq.prepare(copy.deepcopy(model), config or fq.recipes.int8(), data[0]).eval()
    return fq.calibrate(model, data, progress=False) if calibrated else model


def state(model):
    """Returns everything that an error must leave unchanged."""
    switches = [(q.observing, q.quantizing, q.frozen, q.training, q._stale) for _, q in fq.nn.named_quantizers(model)]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), m.training) for m in model.modules()]
    return {name: value.clone() for name, value in model.state_dict().items()}, switches, hooks


def assert_unchanged(before, model):
    after = state(model)
    assert before[1:] == after[1:]
    assert_same_state(before[0], after[0])


def assert_travels(model, fresh, x):
    """Asserts that copies, pickles and states of a model compute its bits, and that it trains."""
    expected = model(x)
    assert_same_bits(expected, copy.deepcopy(model)(x))
    assert_same_bits(expected, pickle.loads(pickle.dumps(model))(x))
    fresh.load_state_dict(model.state_dict())
    assert_same_bits(expected, fresh.eval()(x))
    assert_same_bits(fq.convert(model)(x), fq.convert(fresh)(x))
    trained = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(fq.nn.param_groups(trained), lr=1e-3)
    trained(x).square().mean().backward()
    optimizer.step()
    assert all(bool(p.isfinite().all()) for p in trained.parameters())


def failing(batches, time):
    """Returns batches that can be iterated several times. The given time fails after the first batch."""

    class Batches(list):
        passes = 0

        def __iter__(self):
            self.passes += 1
            yield self[0]
            if self.passes == time:
                raise RuntimeError("no more data")
            yield from self[1:]

    return Batches(batches)
