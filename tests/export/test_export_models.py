"""An exported CNN and perceptron: bits of the golden model, integer kernels, contents of the file."""

import copy
import sys

import numpy as np
import pytest

import fakequant as fq
from fakequant.testing.assertions import assert_same_bits
from onnx_models import (
    X86,
    calibrated,
    code_tensors,
    evaluate,
    exported,
    initializers,
    randn,
    run,
    same,
    session,
    with_trained_norms,
)

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
recipes = pytest.importorskip("fakequant.recipes")
values = pytest.importorskip("fakequant._convert.golden.tracked_codes")
integer = pytest.importorskip("fakequant._convert.golden.integer_layer")
IntegerLayer = integer.IntegerLayer
nn = torch.nn
F = torch.nn.functional
Fixed = fq.observers.Fixed

INTEGER_KERNELS = {"QLinearConv", "QGemm", "QLinearMatMul", "MatMulIntegerToFloat"}
FLOAT_KERNELS = {"Conv", "Gemm", "MatMul", "FusedConv", "FusedGemm", "FusedMatMul", "ConvTranspose"}


# --- a CNN for x86 ----------------------------------------------------------------------------------


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.depthwise = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.ReLU())
        self.pointwise = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.act = nn.ReLU()
        self.twice = nn.Conv2d(8, 8, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.left, self.right = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.act2 = nn.ReLU()
        self.mean = nn.AdaptiveAvgPool2d(1)
        self.hidden, self.head = nn.Linear(8, 16), nn.Linear(16, 5)
        self.tokens = nn.Linear(8, 3)

    def forward(self, x):
        x = self.stem(x)
        x = self.act(x + self.pointwise(self.depthwise(x)))
        x = self.pool(F.relu(self.twice(F.relu(self.twice(x)))))
        x = self.act2(self.left(x) + self.right(x))  # two consumers of one tensor
        tokens = self.tokens(x.permute(0, 2, 3, 1).flatten(1, 2))
        return self.head(F.relu(self.hidden(self.mean(x).flatten(1)))), tokens


def make_cnn():
    torch.manual_seed(0)
    # The range of `head` contains negative values, so its zero point is not the lowest code.
    config = recipes.int8(target=X86).rule("head", activation_observer=Fixed(-0.5, 1.5))
    return calibrated(with_trained_norms(Cnn()), config, randn(64, 3, 16, 16))


@pytest.fixture(scope="module")
def cnn(folder):
    model = make_cnn()
    return model, exported(model, folder, randn(1, 3, 16, 16), "cnn.onnx")


def check_equal_to_golden(model, proto, *inputs):
    expected = fq.convert(model)(*inputs)
    expected = expected if isinstance(expected, tuple) else (expected,)
    found = run(proto, *inputs)
    for (name, y), known in zip(found.items(), expected, strict=True):
        same(known, y, name)


def test_cnn_in_onnxruntime_has_the_bits_of_the_golden_model(cnn):
    model, proto = cnn
    golden = fq.convert(model)
    assert (
        golden.stem[0].weight_scale != model.stem[0].weight_quantizer.qparams()[0]
    ).all()  # the batch norm is folded
    assert any(bool((m.weight < 0).any()) for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    assert int(golden.head.input_quantizer.zero_point) > 0
    check_equal_to_golden(model, proto, randn(256, 3, 16, 16, seed=1))
    check_equal_to_golden(model, proto, 100 * randn(3, 3, 16, 16, seed=2))  # everything is clipped


def test_cnn_layers_all_run_as_integer_kernels(cnn, tmp_path):
    _, proto = cnn
    session(proto, save_to=tmp_path / "optimized.onnx")
    operations = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert sum(op in INTEGER_KERNELS for op in operations) == 10
    assert not FLOAT_KERNELS & set(operations)
    assert operations.count("QLinearAdd") == 2
    assert operations.count("QLinearGlobalAveragePool") == 1


def test_consumers_behind_reshapes_share_a_grid_and_run_as_integer_kernels(tmp_path):
    """Both consumers have the same grid, because they observe the same values."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.conv = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
            self.other, self.head = nn.Linear(4, 3), nn.Linear(36, 3)

        def forward(self, x):
            x = F.max_pool2d(F.relu(self.stem(x)), 2)
            return self.other(self.conv(x).flatten(1)), self.head(x.flatten(1))

    torch.manual_seed(0)
    x = randn(16, 3, 8, 8)
    model = calibrated(Net(), recipes.int8(target=X86), x)
    golden = fq.convert(model)
    assert golden.conv.input_quantizer.scale == golden.head.input_quantizer.scale
    proto = exported(model, tmp_path, x)
    check_equal_to_golden(model, proto, x)
    session(proto, save_to=tmp_path / "optimized.onnx")
    assert not FLOAT_KERNELS & {node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node}


def test_cnn_is_close_without_optimizations_and_in_the_reference_evaluator(cnn):
    """A code may be one step off where sums are rounded differently; nearly all are equal."""
    model, proto = cnn
    x = randn(8, 3, 16, 16, seed=3)
    for y in (run(proto, x, optimized=False), evaluate(proto, x)):
        for expected, found in zip(fq.convert(model)(x), y.values(), strict=True):
            difference = np.abs(values.plain(expected).numpy() - found)
            assert np.median(difference) < 1e-5
            assert difference.max() < 0.05


def test_cnn_file_stores_integer_weights_and_no_batch_norm(cnn):
    model, proto = cnn
    golden = fq.convert(model)
    assert "BatchNormalization" not in {node.op_type for node in proto.graph.node}
    stored = initializers(proto)
    layers = {path: m for path, m in golden.named_modules() if isinstance(m, IntegerLayer)}
    assert len(layers) == 9
    for path, layer in layers.items():
        np.testing.assert_array_equal(
            stored[f"{path}.weight_codes"], integer.weight_levels(layer).numpy(), err_msg=path
        )
        assert stored[f"{path}.weight_codes"].dtype == np.int8
        assert np.abs(stored[f"{path}.weight_codes"].astype(int)).max() <= 64
        same(layer.weight_scale, stored[f"{path}.weight_scale"], path)
        names = [f"{path}.bias"] if path != "twice" else ["twice.bias[0]", "twice.bias[1]"]
        for name, (codes, scale) in zip(names, integer.biases(layer), strict=True):
            assert stored[f"{name}_codes"].dtype == np.int32
            np.testing.assert_array_equal(stored[f"{name}_codes"], codes.numpy(), err_msg=name)
            assert_same_bits(scale, stored[f"{name}_scale"], name)
    # No float tensor in the file is as large as a weight.
    floats = {name: array.size for name, array in stored.items() if array.dtype == np.float32}
    assert max(floats.values()) <= 16
    assert all(name.endswith(("_scale", "_low", "_high")) for name in floats), floats


def test_exported_tensors_are_named_after_their_modules(cnn):
    model, proto = cnn
    paths = [path for path, _ in model.named_modules() if path]
    for name, array in initializers(proto).items():
        if array.dtype != np.int64:  # a shape
            assert any(name.startswith((f"{path}.", f"{path}_")) for path in paths), name
    names = {name for node in proto.graph.node for name in node.output}
    assert {"stem.0.weight_dequantized", "stem.2.output_quantizer_quantized", "head.input_quantizer_quantized"} <= names
    assert {"twice.input_quantizer.0_quantized", "twice.input_quantizer.1_quantized"} <= names
    assert [i.name for i in proto.graph.input] == ["x"]
    assert not any(p.key.startswith("pkg.") for node in proto.graph.node for p in node.metadata_props)
    assert b"/site-packages/" not in proto.SerializeToString()


def test_exported_activation_scales_are_those_of_training(cnn):
    model, proto = cnn
    stored = initializers(proto)
    known = {path: q for path, q in fq.nn.named_quantizers(model) if not path.endswith("weight_quantizer")}
    assert set(known) <= set(code_tensors(proto))
    for path in known:
        if f"{path}_scale" not in stored:  # two equal grids of one tensor are stored once
            assert path in ("left.input_quantizer", "right.input_quantizer")
            continue
        scale, zero_point = known[path].qparams()
        same(scale, stored[f"{path}_scale"], path)
        assert int(stored[f"{path}_zero_point"]) == int(zero_point)


# --- a perceptron -----------------------------------------------------------------------------------


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


@pytest.fixture(scope="module")
def mlp(folder):
    model = calibrated(perceptron(), recipes.int8(target=X86), randn(64, 16)).train()
    model(randn(8, 16)).square().sum().backward()
    before = copy.deepcopy(model)
    for old, new in zip(before.parameters(), model.parameters(), strict=True):
        old.grad = new.grad.clone()
    proto = exported(model, folder, randn(1, 16), "mlp.onnx")
    return model, before, proto


def test_perceptron_has_the_bits_of_the_golden_model_for_every_batch_size(mlp, tmp_path):
    model, _, proto = mlp
    assert proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert proto.graph.output[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    for n in (1, 2, 1000):
        check_equal_to_golden(model, proto, randn(n, 16, seed=n))
    session(proto, save_to=tmp_path / "optimized.onnx")
    operations = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert operations.count("QGemm") == 3
    assert set(operations) <= {"QuantizeLinear", "QGemm", "DequantizeLinear"}


def test_export_leaves_the_model_unchanged_and_trainable(mlp):
    model, before, _ = mlp
    assert set(model.state_dict()) == set(before.state_dict())
    for name, value in before.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    assert [m.training for m in model.modules()] == [m.training for m in before.modules()]
    assert model.__dict__.keys() == before.__dict__.keys()
    for (name, old), (_, new) in zip(before.named_parameters(), model.named_parameters(), strict=True):
        assert new.requires_grad == old.requires_grad, name
        assert torch.equal(new.grad, old.grad), name
    trained = copy.deepcopy(model)
    trained.zero_grad()
    trained(randn(8, 16)).square().sum().backward()
    assert all(p.grad is not None for p in trained.parameters())


def test_converted_model_exports_the_same_file_without_onnxruntime(mlp, folder, tmp_path, monkeypatch):
    model, _, _ = mlp
    golden = fq.convert(model)
    before = {name: value.clone() for name, value in golden.state_dict().items()}
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    exported(golden, tmp_path, randn(1, 16))
    assert (tmp_path / "model.onnx").read_bytes() == (folder / "mlp.onnx").read_bytes()
    assert {name: v.tolist() for name, v in golden.state_dict().items()} == {k: v.tolist() for k, v in before.items()}


def test_existing_file_is_replaced_and_export_is_deterministic(mlp, folder, tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"old")
    fq.export_onnx(mlp[0], str(tmp_path / "model.onnx"), randn(5, 16))  # another batch size
    assert (tmp_path / "model.onnx").read_bytes() == (folder / "mlp.onnx").read_bytes()


def test_padding_before_a_max_pool_takes_part_in_the_maximum(tmp_path):
    """ONNX Runtime merges a Pad with a MaxPool, which then ignores the padded zeros."""
    torch.manual_seed(0)
    pooled = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ConstantPad2d(1, 0.0), nn.MaxPool2d(3, 2), nn.GroupNorm(1, 4))
    x = torch.randn(4, 2, 9, 9)
    with torch.no_grad():
        pooled[0].bias.fill_(-3.0)  # so that most results are negative
    model = fq.calibrate(fq.prepare(pooled, recipes.int8(target=X86), x), [x], progress=False)
    fq.export_onnx(model, tmp_path / "model.onnx", x)
    found = fq.verify(model, tmp_path / "model.onnx", [x])
    assert found.ok, found.verdict()


class Attention(nn.Module):
    """Attention of three axes, with one mask for each sequence, and of five axes."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(6, 18)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v, (q @ k.transpose(1, 2)).sigmoid(), scale=0.3)
        q, k, v = (part.unflatten(1, (1, 2, -1)) for part in (q, k, v))
        return y, F.scaled_dot_product_attention(q, k, v, is_causal=True)


# Torch's exporter has no translation of these calls, or OpenVINO refuses the one that it has.
FORMS = {
    "attention": (Attention, torch.randn(3, 4, 6), "onnxruntime-vnni"),
    "adaptive max pool 1-d": (
        lambda: nn.Sequential(nn.Conv1d(2, 4, 1), nn.AdaptiveMaxPool1d(3), nn.Conv1d(4, 4, 1)),
        torch.randn(3, 2, 7),
        "onnxruntime-vnni",
    ),
    "adaptive max pool 2-d": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 1), nn.AdaptiveMaxPool2d((3, None)), nn.Conv2d(4, 4, 1)),
        torch.randn(3, 2, 8, 5),
        "openvino-vnni",
    ),
    "adaptive max pool 3-d": (
        lambda: nn.Sequential(nn.AdaptiveMaxPool3d((2, 6, 2)), nn.Conv3d(2, 4, 1)),
        torch.randn(3, 2, 3, 5, 4),
        "onnxruntime-vnni",
    ),
    "bags": (lambda: nn.Sequential(nn.EmbeddingBag(9, 4)), torch.randint(9, (3, 5)), "openvino-vnni"),
}


@pytest.mark.parametrize(("make", "x", "target"), FORMS.values(), ids=FORMS)
def test_calls_that_the_exporter_cannot_translate_have_another_form(make, x, target, tmp_path):
    pytest.importorskip(target.partition("-")[0])
    torch.manual_seed(0)
    model = fq.calibrate(fq.prepare(make(), recipes.int8(target=target), x), [x], progress=False)
    fq.export_onnx(model, tmp_path / "model.onnx", x)
    found = fq.verify(model, tmp_path / "model.onnx", [x, x[:1], torch.cat([x, x])])
    assert found.ok, found.problem
    assert found.first_difference is None
