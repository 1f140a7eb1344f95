"""Specs, observers, data and comparisons that the tests of `nn.FakeQuantize` share."""

from contextlib import contextmanager, nullcontext

import pytest

import fakequant as fq
from fakequant import presets
from fakequant.testing.assertions import assert_same_bits

torch = pytest.importorskip("torch")
observers = pytest.importorskip("fakequant.observers")
nodes = pytest.importorskip("fakequant._backends.torch.compiled_nodes")
TorchDispatchMode = pytest.importorskip("torch.utils._python_dispatch").TorchDispatchMode

NAN, INF = float("nan"), float("inf")
AFFINE = presets.uint4()
# Each spec with its `shape` argument; all tensors are 6 x 8.
SPECS = {
    "tensor": (AFFINE, None),
    "channel": (presets.int8(), (6, None)),
    "last channel": (fq.QuantSpec(bits=4, symmetric=False, axis=-1, numerics="half_away"), (None, 8)),
    "group": (presets.int4(group_size=4), (6, 8)),
    "block": (fq.QuantSpec(bits=4, axis=-1, group_size=4, group_rows=3), (6, 8)),
    "shorter blocks": (fq.QuantSpec(bits=4, symmetric=False, axis=-1, group_size=3, group_rows=4), (6, 8)),
    "torch": (fq.QuantSpec(symmetric=False, numerics="torch"), None),
    "torch channel": (fq.QuantSpec(axis=1, numerics="torch"), (None, 8)),
}
RUNNING = {
    "MinMax": observers.MinMax(),
    "MovingAverage": observers.MovingAverage(0.3),
    "Dynamic": observers.Dynamic(),
}
OBSERVERS = RUNNING | {
    "Percentile": observers.Percentile(90.0, bins=64),
    "Histogram": observers.Histogram(bins=64, steps=8),
    "MSE": observers.MSE(steps=8),
    "Entropy": observers.Entropy(bins=64, steps=8),
    "Fixed": observers.Fixed(-0.75, 1.5),
}
each_observer = pytest.mark.parametrize("observer", OBSERVERS.values(), ids=OBSERVERS)
each_running = pytest.mark.parametrize("observer", RUNNING.values(), ids=RUNNING)
each_spec = pytest.mark.parametrize(("spec", "shape"), SPECS.values(), ids=SPECS)
each_gradient = pytest.mark.parametrize("gradient", ["clipped", "pass"])


class NoOpMode(TorchDispatchMode):
    """A mode that changes nothing, but sends every call through the dispatcher."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@contextmanager
def without_compiled_nodes():
    before, nodes.compiled = nodes.compiled, None
    yield
    nodes.compiled = before


WAYS = {"nodes": nullcontext, "Python": without_compiled_nodes, "operators": NoOpMode}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)

# Values on codes, between codes and beyond the range.
torch.manual_seed(0)
BATCHES = [torch.randn(6, 8) * width for width in (1.0, 0.25, 3.0)]
BATCHES[0][0, :4] = torch.tensor([0.5, -0.5, 0.0, -0.0])
DY = torch.randn(6, 8)
WIDE = torch.linspace(-20, 20, 48).view(6, 8)


def state_of(module):
    """Returns copies of the state and of the nonfinite count, which is not a buffer."""
    values = {name: value.clone() for name, value in module.state_dict().items()}
    return values | {"nonfinite": torch.tensor(module.nonfinite)}


def changed(before, module):
    return {k for k, v in state_of(module).items() if not torch.equal(torch.nan_to_num(v), torch.nan_to_num(before[k]))}


def assert_unchanged(before, module):
    for name, value in state_of(module).items():
        assert_same_bits(before[name], value, name)


def leaf(x):
    return x.detach().clone().requires_grad_()


def run(module, x, dy=DY, way=nullcontext):
    """Returns the output and the gradient of the input."""
    x = leaf(x)
    with way():
        y = module(x)
        (dx,) = torch.autograd.grad(y, x, dy.to(y.dtype))
    return y, dx


def ways_of(observer):
    """Returns the code paths of an observer: only running ranges have more than one."""
    return WAYS.values() if observer in RUNNING.values() else [nullcontext]
