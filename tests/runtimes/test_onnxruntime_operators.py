"""Operators between quantizers: what ONNX Runtime's optimizer makes of them has the codes of the golden model.

The optimizer replaces operators between quantizers by others that compute with codes. Each of these is modelled in the
golden model, or equals the operators of the graph, or is prevented by the form of the file. `MADE` lists them. If a new
release of ONNX Runtime makes another one, it has to be looked at.
"""

import dataclasses
import platform

import pytest

import fakequant as fq
from thoroughness import sampled

torch = pytest.importorskip("torch")
pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
runtimes = pytest.importorskip("fakequant._runtimes.onnxruntime.session")
nn, F = torch.nn, torch.nn.functional
Fixed = fq.observers.Fixed

pytestmark = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="the formulas are those of the x86 kernels"
)

# Functions of two results of convolutions, of shape (batch, 4, 6, 6). Their result is the input of a convolution.
OPERATORS = {
    "softmax": lambda a, b: a.softmax(1),
    "softmax of a slice": lambda a, b: a[:, :, ::2].softmax(3),
    "sigmoid": lambda a, b: a.sigmoid(),
    "leaky relu": lambda a, b: F.leaky_relu(a, 0.1),
    "add": lambda a, b: a + b,
    "add, relu": lambda a, b: F.relu(b + a),
    "add, repeated": lambda a, b: a + b.mean((2, 3), keepdim=True),
    "mul": lambda a, b: a * b,
    "mul, relu": lambda a, b: F.relu(b * a),
    "mul, repeated": lambda a, b: a[:, :, :1, :1] * b,
    "where": lambda a, b: torch.where(a > 0.1, a, b),
    "masked fill": lambda a, b: a.masked_fill(a > 0.1, 0.25),
    "cat": lambda a, b: torch.cat([a, b], 2),
    "stack": lambda a, b: torch.stack([a, b], 2).flatten(2, 3),
    "average pool": lambda a, b: F.avg_pool2d(a, 2),
    "average pool, padded": lambda a, b: F.avg_pool2d(a, 3, 1, 1),
    "average pool, padding not counted": lambda a, b: F.avg_pool2d(a, 3, 1, 1, count_include_pad=False),
    "average pool, 1d": lambda a, b: F.avg_pool1d(a.flatten(2), 3, stride=2).unsqueeze(3),
    "average pool, 3d": lambda a, b: F.avg_pool3d(a.unsqueeze(4), (2, 3, 1)).squeeze(4),
    "mean": lambda a, b: F.adaptive_avg_pool2d(a, 1),
    "amax, amin": lambda a, b: a.amax((2, 3), keepdim=True) + b.amin((2, 3), keepdim=True),
    "max pool": lambda a, b: F.max_pool2d(a, 2),
    "nearest": lambda a, b: F.interpolate(a, scale_factor=2, mode="nearest"),
    "pixel shuffle": lambda a, b: F.pixel_shuffle(a, 2).repeat(1, 4, 1, 1) + b[:, :, :1, :1],
    "transpose": lambda a, b: a.transpose(2, 3) + b,
    "reshape": lambda a, b: a.reshape(-1, 4, 3, 12),
    "unsqueeze": lambda a, b: a.unsqueeze(1).squeeze(1),
    "slice": lambda a, b: a[:, :, ::2],
    "gather": lambda a, b: a.index_select(2, torch.tensor([2, 0, 1])) + b[:, :, :3],
    "expand": lambda a, b: b + a[:, :, :1].expand(-1, -1, 6, -1),
    "split": lambda a, b: a.split(3, 2)[0] + a.split(3, 2)[1],
    "pad": lambda a, b: F.pad(a, (1, 1, 1, 1)),
    "roll": lambda a, b: a.roll(1, 2),
    "argmax": lambda a, b: a + a.argmax(1, keepdim=True).float(),
    "matmul": lambda a, b: a @ b.transpose(2, 3),
}
# Operators that the optimizer makes. Those that move elements keep their names, and are given codes.
MADE = {
    "QLinearAdd", "QLinearAveragePool", "QLinearConcat", "QLinearConv", "QLinearGlobalAveragePool", "QLinearLeakyRelu",
    "QLinearMatMul", "QLinearMul", "QLinearSigmoid", "QLinearWhere", "NhwcMaxPool",
}  # fmt: skip
# Operators before which it moves quantizers.
PASSED = ("stack", "max pool", "transpose", "reshape", "unsqueeze", "slice", "matmul")


class Operators(nn.Module):
    """Operators between convolutions."""

    def __init__(self, names, *, share):
        super().__init__()
        self.last = nn.ModuleDict({name: nn.Conv2d(4, 4, 1) for name in names})
        self.a, self.b = (nn.ModuleDict({name: nn.Conv2d(4, 4, 1) for name in names if not share}) for _ in range(2))
        self.same = nn.ModuleList([nn.Conv2d(4, 4, 1) for _ in range(2) if share])

    def forward(self, x):
        same = [conv(x) for conv in self.same]
        operands = {name: same or [self.a[name](x), self.b[name](x)] for name in self.last}
        return [last(OPERATORS[name](*operands[name])) for name, last in self.last.items()]


def quantized(config, *, has_ties=False, **spec):
    """Returns the config with all results of convolutions quantized, and with grids on which ties are frequent."""
    spec = dataclasses.replace(config.default.input, **spec)
    layer = dataclasses.replace(config.default, input=spec)
    last = layer
    if has_ties:  # steps of 1 and of 2; odd zero points
        layer = dataclasses.replace(layer, activation_observer=Fixed(-127.0, 128.0))
        last = dataclasses.replace(layer, activation_observer=Fixed(-254.0, 256.0))
    rules = (("last.*", last), ("*", dataclasses.replace(layer, output=spec)))
    rules = tuple(fq.Rule(path=path, use=use) for path, use in rules)
    return dataclasses.replace(config, default=layer, operands=spec, rules=rules)


def verified(model, config, folder, factor):
    """Returns the result of `verify`, and the operators that the optimizer makes."""
    torch.manual_seed(0)
    x = factor * torch.randn(8, 4, 6, 6)
    model = fq.calibrate(fq.prepare(model, config, x), [x], progress=False)
    fq.export_onnx(model, folder / "model.onnx", x)
    file = runtimes.OnnxRuntimeSession(folder / "model.onnx")
    optimized = file._optimized()
    made = {node.op_type for node in optimized.node} - {node.op_type for node in file.model.graph.node}
    return fq.verify(model, folder / "model.onnx", [factor * 1.2 * torch.randn(8, 4, 6, 6)]), made


SIGNED = {"signed": True, "symmetric": True}
CONFIGS = {
    "generic": (quantized(fq.recipes.int8()), MADE),
    "onnxruntime-x86, ties": (quantized(fq.recipes.int8(target="onnxruntime-x86"), has_ties=True), MADE),
    "onnxruntime-vnni, signed, ties": (
        quantized(fq.recipes.int8(target="onnxruntime-vnni"), has_ties=True, **SIGNED),
        MADE,
    ),
    "fp8": (quantized(fq.recipes.fp8()), set()),
}


@pytest.mark.parametrize("name", sampled(CONFIGS, "onnxruntime-x86, ties"))
def test_operators_between_quantizers_have_the_codes_of_the_golden_model(name, tmp_path):
    config, known = CONFIGS[name]
    found, made = verified(Operators(OPERATORS, share=True), config, tmp_path, 20 if "ties" in name else 1)
    assert made == known
    wrong = {t.path: (t.runtime_differ, t.why_runtime) for t in found.tensors if t.runtime_differ > t.runtime_ties}
    assert not wrong
    if "ties" in name:
        assert not [t.path for t in found.tensors if t.runtime_differ]
        assert sum(t.prepared_differ for t in found.tensors) > 100  # ties are frequent
    else:
        assert found.ok, found.problem


def test_signed_codes_can_be_moved(tmp_path):
    """The optimizer stores signed codes as unsigned ones, and must not insert quantizers of its own."""
    found, made = verified(Operators(PASSED, share=False), quantized(fq.recipes.int8(), **SIGNED), tmp_path, 1)
    assert made <= MADE
    assert found.ok, found.problem
