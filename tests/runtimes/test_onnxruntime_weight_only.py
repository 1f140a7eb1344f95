"""Weight-only linear layers in ONNX Runtime: products of floats with codes, compared with float64."""

import numpy as np
import pytest

import fakequant as fq
from fakequant import QuantSpec
from fakequant.config import LayerConfig, QuantConfig
from thoroughness import ALL, only_in_test_all

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
nn = torch.nn

SPECS = {
    "4 bits": QuantSpec(bits=4, axis=0),
    "4 bits, groups of 16": QuantSpec(bits=4, axis=1, group_size=16),
    "4 bits, groups of 32": QuantSpec(bits=4, axis=1, group_size=32),
    "4 bits, affine": QuantSpec(bits=4, signed=False, symmetric=False, axis=1, group_size=32),
    "3 bits": QuantSpec(bits=3, axis=1, group_size=32),
    "8 bits": QuantSpec(bits=8, axis=0, narrow_range=True),
    "8 bits, groups of 32": QuantSpec(bits=8, axis=1, group_size=32),
    "2 bits, groups of 32": QuantSpec(bits=2, axis=1, group_size=32),
}
LEVEL = "session.qdq_matmulnbits_accuracy_level"


# Multiples of 4 and others: 2-bit matrices of other widths are multiplied wrongly unless they are stored in 4 bits.
OUTPUTS = (1, 7, 33, 34, 36, 64)


class Heads(nn.Module):
    """One layer for each number of outputs, on the same input."""

    def __init__(self, outputs, bias=True):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, number, bias=bias) for number in outputs)

    def forward(self, x):
        return tuple(layer(x) for layer in self.layers)


def heads(spec, outputs=OUTPUTS, bias=True):
    torch.manual_seed(0)
    return fq.prepare(Heads(outputs, bias), QuantConfig(default=LayerConfig(weight=spec))).eval()


def run(path, x, level=None):
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    if level is not None:
        options.add_session_config_entry(LEVEL, str(level))
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return [torch.from_numpy(y) for y in session.run(None, {session.get_inputs()[0].name: x.numpy()})]


def exact(layer, x):
    """Returns the products of float64 numbers, and the sums of their magnitudes."""
    weight = fq.nn.quantized_weight(layer).detach().double()
    y = x.double() @ weight.T
    return (y if layer.bias is None else y + layer.bias.double()), x.double().abs() @ weight.abs().T


def is_close(y, layer, x):
    """Returns whether only the rounding of 64 products and sums is between `y` and the exact result."""
    expected, magnitude = exact(layer, x)
    return bool(((y - expected).abs() <= 64 * 2.0**-24 * magnitude).all())


def rounded_in_blocks(x, block):
    """Returns `x` as the kernel rounds it at level 4: to 8 bits, with one scale per block."""
    blocks = x.unflatten(-1, (-1, block))
    largest = blocks.abs().amax(-1, keepdim=True)
    return (torch.round(blocks * (127 / largest)) * (largest / 127)).flatten(-2)


@pytest.mark.parametrize(
    ("shape", "bias"),
    [pytest.param((64,), True, marks=only_in_test_all), ((3, 64), False)],
    ids=["rows", "tokens without bias"],
)
@pytest.mark.parametrize("spec", [*SPECS.values()][0 if ALL else 1 :: 1 if ALL else 2], ids=str)
def test_products_equal_those_of_float64_up_to_rounding(spec, shape, bias, tmp_path):
    model, path = heads(spec, bias=bias), tmp_path / "model.onnx"
    batches = [torch.randn(number, *shape) for number in (1, 5)]
    fq.export_onnx(model, path, batches[1], opset=25 if spec.bits == 2 else 21)
    for x in batches:
        for layer, y, rounded in zip(model.layers, run(path, x, level=1), run(path, x), strict=True):
            assert is_close(y, layer, x)
            # At level 4 the inputs are rounded to 8 bits: by at most half of 1/127 of the largest of a block.
            expected, magnitude = exact(layer, x)
            assert bool(((rounded - expected).abs() <= magnitude.amax() / 127).all())


@pytest.mark.parametrize("spec", [SPECS["4 bits, groups of 16"], SPECS["4 bits, groups of 32"]], ids=str)
def test_level_4_multiplies_inputs_that_are_rounded_in_the_blocks_of_the_weight(spec, tmp_path):
    model, x = heads(spec, (32,)), torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    fq.export_onnx(model, tmp_path / "model.onnx", x)
    assert is_close(run(tmp_path / "model.onnx", x)[0], model.layers[0], rounded_in_blocks(x, spec.group_size))


@pytest.mark.parametrize("spec", [*SPECS.values()][:: 1 if ALL else 2], ids=[*SPECS][:: 1 if ALL else 2])
def test_every_weight_only_layer_is_computed_from_its_codes(spec, tmp_path):
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64, bias=False), nn.GELU(), nn.Linear(64, 8))
    model = fq.prepare(model, QuantConfig(default=LayerConfig(weight=spec))).eval()
    path, x = tmp_path / "model.onnx", torch.randn(4, 64)
    fq.export_onnx(model, path, x, opset=25 if spec.bits == 2 else 21)
    found = fq.verify(model, path, [x], accuracy_level=1)
    assert found.ok, found.verdict()
    assert set(found.kernels.values()) == {"MatMulNBits"}


def test_verify_says_what_the_default_accuracy_level_costs(tmp_path):
    model, x = heads(SPECS["4 bits, groups of 32"], (32,)), torch.randn(8, 64)
    path = tmp_path / "model.onnx"
    fq.export_onnx(model, path, x)
    found = fq.verify(model, path, [x])
    assert found.rounded == ["layers.0"]
    assert not found.ok
    difference = float((run(path, x)[0] - run(path, x, level=1)[0]).abs().max())
    assert found.outputs.level_difference == difference > 0
    assert f"differ by {difference:.3g}" in found.verdict()
    assert "session.qdq_matmulnbits_accuracy_level to 1" in found.verdict()
    assert fq.verify(model, path, [x], accuracy_level=1).ok


def test_accuracy_levels_that_round_are_refused(tmp_path):
    model, x = heads(SPECS["4 bits"], (8,)), torch.randn(2, 64)
    with pytest.raises(ValueError, match="`accuracy_level` must be 1, or None for the default of the runtime, got 4"):
        fq.verify(model, tmp_path / "model.onnx", [x], accuracy_level=4)


def test_a_changed_weight_of_a_weight_only_layer_is_refused(tmp_path):
    model, x = heads(SPECS["8 bits"], (8,)), torch.randn(4, 64)
    path = tmp_path / "model.onnx"
    fq.export_onnx(model, path, x)
    proto = onnx.load(path)
    codes = next(tensor for tensor in proto.graph.initializer if tensor.name == "layers.0.weight_codes")
    changed = onnx.numpy_helper.to_array(codes).copy()
    assert changed.shape == (64, 8)  # transposed
    changed[3, 2] ^= 1
    codes.CopyFrom(onnx.numpy_helper.from_array(np.ascontiguousarray(changed), codes.name))
    onnx.save(proto, path)
    with pytest.raises(ValueError, match=r"layers\.0\.weight_codes is different in the file"):
        fq.verify(model, path, [x], accuracy_level=1)
