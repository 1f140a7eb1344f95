"""`smooth(insert=True)`: layers of a post-norm transformer multiply their inputs, as no norm can take the factors."""

import copy

import pytest

from fakequant.testing.assertions import assert_same_bits
from prepare_cases import randn
from smooth_cases import assert_travels, assert_unchanged, failing, prepared, state

torch = pytest.importorskip("torch")
nn = torch.nn
fq = pytest.importorskip("fakequant")
_runtimes = pytest.importorskip("fakequant._runtimes")
prepared_layers = pytest.importorskip("fakequant._export.prepared_layers").prepared_layers

DATA = [randn(2, 5, 8, seed=seed) for seed in (1, 2)]
TARGETS = ("generic", "onnxruntime-vnni", "openvino-vnni")


class PostNorm(nn.Module):
    """One layer of BERT, with outliers in some channels of the norms."""

    def __init__(self):
        super().__init__()
        self.norm0, self.norm1, self.norm2 = (nn.LayerNorm(8) for _ in range(3))
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        x = self.norm0(x)
        y = torch.softmax(self.q(x) @ self.k(x).mT, -1) @ self.v(x)
        x = self.norm1(x + self.o(y))
        return self.norm2(x + self.down(nn.functional.gelu(self.up(x))))


def post_norm():
    torch.manual_seed(0)
    model = PostNorm().eval()
    with torch.no_grad():
        for norm, channel, layers in ((model.norm0, 3, (model.q, model.k, model.v)), (model.norm1, 5, (model.up,))):
            norm.weight[channel] = 40.0
            for layer in layers:
                layer.weight[:, channel] /= 40.0
    return model


def smoothed(target="generic", **options):
    model = prepared(post_norm(), DATA, fq.recipes.int8(target=target))
    changes = fq.ptq.smooth(model, DATA, insert=True, progress=False, **options)
    return model, changes


@pytest.mark.parametrize("target", TARGETS)
def test_post_norm_layers_gain(target):
    float_model = post_norm()
    before = prepared(float_model, DATA, fq.recipes.int8(target=target))
    assert fq.ptq.smooth(before, DATA, progress=False).changed == []
    model, changes = smoothed(target, alpha="search")
    assert {"q", "k", "v", "up"} <= set(changes.changed)
    assert "Inserted multiplications of inputs" in str(changes)
    for row in changes.layers:
        assert row.reason or row.after > row.before
    expected = [float_model(x) for x in DATA]
    noise = [sum((m(x) - y).square().sum() for x, y in zip(DATA, expected, strict=True)) for m in (before, model)]
    assert noise[1] < noise[0] / 2
    shown = fq.compare(float_model, model, DATA, progress=False)  # sees the float model's inputs and weights
    assert all(
        layer.weight_sqnr > 25 and (layer.isolated.sqnr or 99) > 20 for layer in shown.layers if layer.weight_sqnr
    )


@pytest.mark.parametrize("target", TARGETS)
def test_the_float_model_keeps_its_bits(target):
    float_model = post_norm()
    expected, weights = float_model(DATA[0]), float_model.state_dict()
    model, _ = smoothed(target)
    fq.nn.switch_quantizers(model, quantizing=False)
    assert_same_bits(expected, model(DATA[0]))
    model = fq.unprepare(model)
    assert type(model) is PostNorm
    assert all(type(layer) is nn.Linear and not layer._forward_pre_hooks for layer in (model.q, model.up))
    for name, value in weights.items():
        assert_same_bits(value, model.state_dict()[name])
    assert list(weights) == list(model.state_dict())


@pytest.mark.parametrize("target", TARGETS)
def test_models_travel(target, tmp_path):
    model, _ = smoothed(target)
    config = fq.recipes.int8(target=target)
    assert_travels(model, fq.prepare(post_norm(), config, DATA[0]), DATA[0])
    assert_travels(model, smoothed(target, alpha="search")[0], DATA[0])
    golden = fq.convert(model)
    fq.save_converted(golden, tmp_path / "model.safetensors")
    loaded = fq.load_converted(post_norm(), tmp_path / "model.safetensors")
    assert_same_bits(golden(DATA[0]), loaded(DATA[0]))


def test_attention_and_compiled_models():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True).eval()  # norms behind the residuals
    data = [x * torch.tensor([1.0, 30.0, *[1.0] * 6]) for x in DATA]
    expected = model(data[0])
    model = prepared(model, data, fq.recipes.int8_dynamic())
    assert "self_attn" in fq.ptq.smooth(model, data, insert=True, progress=False).changed
    y = model(data[0])
    torch.testing.assert_close(torch.compile(model, backend="aot_eager")(data[0]), y)
    fq.nn.switch_quantizers(model, quantizing=False)
    torch.testing.assert_close(model(data[0]), expected)


def test_a_float_state_ends_the_multiplication():
    model, _ = smoothed("onnxruntime-vnni")
    model.load_state_dict(post_norm().state_dict())
    fq.nn.switch_quantizers(model, quantizing=False)
    assert_same_bits(post_norm()(DATA[0]), model(DATA[0]))


@pytest.mark.parametrize("target", ["onnxruntime-vnni", "openvino-vnni"])
def test_exported_and_verified(target, tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip(target.split("-")[0])
    model, changes = smoothed(target)
    fq.export_onnx(model, tmp_path / "model.onnx", DATA[0])
    assert fq.verify(model, tmp_path / "model.onnx", DATA[0]).ok
    nodes = onnx.load(tmp_path / "model.onnx").graph.node
    constants = {name for node in nodes for name in node.input} & {
        i.name for i in onnx.load(tmp_path / "model.onnx").graph.initializer
    }
    products = [node for node in nodes if node.op_type == "Mul" and constants & set(node.input)]
    # q, k and v share one, and its codes; GELU has products of its own.
    inserted = sum("factors" in name for node in products for name in node.input)
    assert inserted == int(changes.note.split()[-1].rstrip("."))


def test_the_methods_that_follow_see_the_product():
    model, _ = smoothed("onnxruntime-vnni")
    expected = [post_norm()(x) for x in DATA]

    def noise(m):
        return sum((m(x) - y).square().sum() for x, y in zip(DATA, expected, strict=True))

    same, other = copy.deepcopy(model), copy.deepcopy(model)
    fq.ptq.gptq(same, DATA, progress=False)
    fq.ptq.gptq(other, DATA, reference=post_norm(), progress=False)  # whose weights are not multiplied
    assert_same_bits(same(DATA[0]), other(DATA[0]))
    assert noise(same) < 1.5 * noise(model)


@pytest.mark.parametrize("time", [3, 4, 5])
def test_an_error_undoes_everything(time):
    model = prepared(post_norm(), DATA)
    before = state(model)
    with pytest.raises(RuntimeError, match="no more data"):
        fq.ptq.smooth(model, failing(DATA, time), insert=True, progress=False)
    assert_unchanged(before, model)
    fq.convert(model)


def test_targets_that_cannot_multiply():
    model = prepared(post_norm(), DATA, fq.recipes.int8(target="xnnpack"))
    changes = fq.ptq.smooth(model, DATA, insert=True, progress=False)
    assert not changes.changed
    assert "no multiplication: xnnpack cannot multiply its input" in changes.layers[0].reason
    with pytest.raises(ValueError, match="q multiplies its input"):
        fq.convert(smoothed("onnxruntime-vnni")[0], target="litert")


def test_folders_have_no_place_for_factors():
    model = fq.prepare(post_norm(), fq.recipes.int8_dynamic())
    assert fq.ptq.smooth(model, DATA, insert=True, progress=False).changed
    with pytest.raises(ValueError, match="q multiplies its input"):
        list(prepared_layers(model, _runtimes.find("compressed-tensors")))
