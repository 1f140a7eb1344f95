"""Converted layers are still layers: model code may read their weight, their bias and their sizes."""

import copy
import pickle

import pytest

import fakequant as fq
from fakequant import presets
from thoroughness import ALL

torch = pytest.importorskip("torch")
nn = torch.nn

LAYERS = {
    "linear": (lambda: nn.Linear(4, 3), (2, 4)),
    "convolution": (lambda: nn.Conv2d(2, 4, 3), (1, 2, 5, 5)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(2, 4, 3), (1, 2, 5, 5)),
}
by_layer = pytest.mark.parametrize(("make", "shape"), LAYERS.values(), ids=LAYERS)


def converted(layer, shape):
    torch.manual_seed(0)
    model = fq.prepare(nn.Sequential(layer), fq.recipes.int8(), torch.randn(shape))
    fq.calibrate(model, [torch.randn(shape)], progress=False)
    return model.eval(), fq.convert(model)


@by_layer
def test_the_weight_is_what_the_codes_stand_for(make, shape):
    model, golden = converted(make(), shape)
    expected = model[0].weight_quantizer(model[0].weight)
    assert torch.equal(golden[0].weight, expected)
    assert golden[0].weight.dtype == torch.float32
    assert "0.weight" not in golden.state_dict()


@by_layer
def test_the_bias_is_the_one_that_is_added(make, shape):
    model, golden = converted(make(), shape)
    expected = golden[0].bias_codes.float() * (model[0].input_quantizer.scale * golden[0].weight_scale)
    assert torch.equal(golden[0].bias, expected)
    assert "0.bias" not in golden.state_dict()


def test_a_layer_without_a_bias_has_none():
    assert converted(nn.Linear(4, 3, bias=False), (2, 4))[1][0].bias is None


def test_sizes_and_repr_are_those_of_the_layer():
    golden = converted(nn.Linear(4, 3), (2, 4))[1]
    assert (golden[0].in_features, golden[0].out_features) == (4, 3)
    assert "in_features=4, out_features=3, bias=True" in repr(golden)


@pytest.mark.parametrize("travel", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_the_weight_can_be_read_from_a_copy(travel):
    golden = converted(nn.Linear(4, 3), (2, 4))[1]
    assert torch.equal(travel(golden)[0].weight, golden[0].weight)


def test_the_bias_can_be_read_from_a_loaded_model(tmp_path):
    golden = converted(nn.Linear(4, 3), (2, 4))[1]
    fq.save_converted(golden, tmp_path / "model.safetensors")
    loaded = fq.load_converted(nn.Sequential(nn.Linear(4, 3)), tmp_path / "model.safetensors")
    assert torch.equal(loaded[0].bias, golden[0].bias)


def test_other_names_are_still_missing():
    with pytest.raises(AttributeError, match="no attribute 'scales'"):
        converted(nn.Linear(4, 3), (2, 4))[1][0].scales  # noqa: B018


class ReadsItsWeight(nn.Module):
    """As many models of transformers do."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x.to(self.fc.weight.dtype))


def test_a_model_that_reads_a_weight_exports(tmp_path):
    pytest.importorskip("onnxruntime")
    x = torch.ones(2, 4)
    config = fq.recipes.int8(target="onnxruntime-x86")  # weights that saturate on no CPU
    model = fq.calibrate(fq.prepare(ReadsItsWeight(), config, x), [x], progress=False)
    fq.export_onnx(model, tmp_path / "model.onnx", x)
    assert fq.verify(model, tmp_path / "model.onnx", [x]).ok


TABLES = {
    "per row": presets.int8(),
    "per tensor": fq.QuantSpec(bits=8),
    "per column": fq.QuantSpec(bits=8, axis=1),
    "per group": fq.QuantSpec(bits=8, axis=1, group_size=4),
    "affine per row": fq.QuantSpec(bits=8, signed=False, symmetric=False, axis=0),
    "16 bits": fq.QuantSpec(bits=16, axis=0),
    "4 bits, per row": presets.int4(group_size=None),
    "4 bits, per tensor": fq.QuantSpec(bits=4),
    "4 bits, per column": fq.QuantSpec(bits=4, axis=1),
    "4 bits, per group": fq.QuantSpec(bits=4, axis=1, group_size=3),
    "4 bits, affine per group": fq.QuantSpec(bits=4, signed=False, symmetric=False, axis=1, group_size=3),
    "3 bits, per group": fq.QuantSpec(bits=3, axis=1, group_size=9),
    "groups of rows": fq.QuantSpec(bits=4, axis=0, group_size=5),
}
# ONNX Runtime needs all rows as floats.
WHOLE = ("16 bits", "groups of rows")


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("shape", [(5,), (2, 3), (1, 2, 2)] if ALL else [(2, 3)], ids=str)
def test_an_embedding_gathers_codes_and_returns_the_same_bits(name, shape, tmp_path):
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    spec, width = TABLES[name], 9 if name.startswith(("3", "4")) else 8  # an odd number of codes of 4 bits
    config = fq.QuantConfig(default=fq.LayerConfig(weight=spec))
    model = fq.prepare(nn.Sequential(nn.Embedding(20, width)), config).eval()
    x = torch.randint(0, 20, shape)
    path = str(tmp_path / "model.onnx")
    fq.export_onnx(model, path, x)
    nodes = onnx.load(path).graph.node
    first = next(node.op_type for node in nodes if node.op_type in ("Gather", "DequantizeLinear"))
    assert first == ("DequantizeLinear" if name in WHOLE else "Gather")
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert torch.equal(torch.from_numpy(y), model(x))
    found = fq.verify(model, path, [x])
    assert found.ok
    assert list(found.floats) == (["0"] if name in WHOLE else [])


def test_a_changed_code_of_an_embedding_with_4_bits_is_noticed(tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    x = torch.arange(6).reshape(2, 3)
    model = fq.prepare(nn.Sequential(nn.Embedding(20, 8)), fq.recipes.int4_weight_only(group_size=4)).eval()
    fq.export_onnx(model, tmp_path / "model.onnx", x)
    written = onnx.load(tmp_path / "model.onnx")
    for name in ("0.weight_codes_packed", "0.weight_codes_pairs", "0.weight_scale"):
        changed = onnx.ModelProto()
        changed.CopyFrom(written)
        (tensor,) = (one for one in changed.graph.initializer if one.name == name)
        values = onnx.numpy_helper.to_array(tensor).copy()
        values.reshape(-1)[-1:] += 1
        tensor.CopyFrom(onnx.numpy_helper.from_array(values, name))
        onnx.save(changed, tmp_path / "changed.onnx")
        with pytest.raises(ValueError, match="is different in the file"):
            fq.verify(model, tmp_path / "changed.onnx", [x])


def test_a_linear_layer_with_a_transposed_weight_is_known_by_its_name(tmp_path):
    Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    x = torch.randn(2, 5, 4)
    model = nn.Sequential(Conv1D(6, 4), Conv1D(3, 6))
    expected = model(x)
    fq.calibrate(fq.prepare(model, fq.recipes.int8(target="onnxruntime-x86"), x), [x], progress=False)
    assert model[0].weight_quantizer.spec.axis == 1
    assert (model(x) - expected).abs().max() < 0.02 * expected.abs().max()
    fq.export_onnx(model, tmp_path / "model.onnx", x)
    found = fq.verify(model, tmp_path / "model.onnx", [x])
    assert found.ok
    assert found.kernels == {"0": "QGemm", "1": "QGemm"}
    assert type(fq.unprepare(model)[0]) is Conv1D


def test_a_converted_model_shares_no_memory_with_the_prepared_one():
    """Although weights are not copied before they become codes."""
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 8))
    model[3].weight = model[0].weight  # both stay in float, and stay one parameter
    config = fq.recipes.int4_weight_only(group_size=4).skip("0").skip("3")
    golden = fq.convert(fq.prepare(model, config))
    x = torch.arange(8)
    expected = golden(x)
    assert golden[3].weight is golden[0].weight
    assert all(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert torch.equal(golden(x), expected)


class Listed(nn.Module):
    """Has its parameter in a list too."""

    def __init__(self):
        super().__init__()
        self.fc, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.all = [self.scale]

    def forward(self, x):
        return self.fc(x) * self.all[0]


def test_parameters_in_lists_are_copied_once():
    model = fq.prepare(Listed(), fq.recipes.int4_weight_only(group_size=4))
    golden, x = fq.convert(model), torch.ones(2, 4)
    expected = golden(x)
    assert golden.all[0] is golden.scale
    with torch.no_grad():
        model.scale.mul_(3)
    assert torch.equal(golden(x), expected)
