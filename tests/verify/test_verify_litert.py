"""`verify` runs .tflite files in LiteRT: its codes are those of the golden model."""

import copy
import pickle
import platform

import pytest

import fakequant as fq
from thoroughness import ALL

torch = pytest.importorskip("torch")
pytest.importorskip("ai_edge_litert.interpreter")
recipes = pytest.importorskip("fakequant.recipes")
digit_models = pytest.importorskip("digit_models")
files = pytest.importorskip("fakequant._export.litert.file")
running = pytest.importorskip("fakequant._runtimes.litert.running")

pytestmark = [
    pytest.mark.usefixtures("torch_on_one_thread"),
    pytest.mark.skipif(
        platform.machine().lower() not in ("x86_64", "amd64"), reason="the formulas are those of the x86 kernels"
    ),
]
# Every recipe occurs, and every model in `make test-all`.
CASES = [("residual", "lsq"), ("encoder", "int8")] + ([("mlp", "int8"), ("depthwise", "w4a8")] if ALL else [])
# Kernels that round twice: the model, the target, and the bits of activations.
FIXED_POINT = [("depthwise", "litert-builtin", 8), ("residual", "litert-reference", 8), ("depthwise", "litert", 16)] + (
    [
        (name, target, bits)
        for name in ("mlp", "residual", "encoder")
        for target in ("litert-builtin", "litert-reference")
        for bits in (8, 16)
    ]
    if ALL
    else []
)
# The number of the activation in the schema.
RELU6 = 3
DATA = [digit_models.digits(16, 2), digit_models.digits(16, 3)]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A function that returns a model and its file, exported once."""
    made = {}

    def get(name, recipe):
        if (name, recipe) not in made:
            # XNNPACK multiplies by 1 / scale. At a scale of 1 / 255, all ties would be those of ONNX.
            model = digit_models.calibrated(name, recipe, "litert", brightest=0.9)
            path = tmp_path_factory.mktemp("exported") / "model.tflite"
            report = fq.export_litert(model, path, DATA[0], dynamic_batch=name == "mlp")
            made[name, recipe] = model, path, report
        return made[name, recipe]

    return get


@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_litert_has_the_codes_of_the_golden_model(name, recipe, exported):
    model, path, report = exported(name, recipe)
    found = fq.verify(model, path, DATA)
    digit_models.assert_verified(found, digit_models.float_model(name), "litert", "litert")
    assert set(found.kernels.values()) == {"LiteRT int8"}
    assert report.share == 1.0
    assert found.skipped == {}
    if name != "encoder":
        assert found.outputs.runtime_is_equal


@pytest.mark.parametrize(("name", "target", "bits"), FIXED_POINT)
def test_the_golden_model_rounds_like_the_kernels_of_its_target(name, target, bits, tmp_path):
    config = recipes.int8(target=target, activation_bits=bits)
    model = fq.prepare(digit_models.float_model(name), config, DATA[0])
    model = fq.calibrate(model, [digit_models.digits(32, 1) * 0.9], progress=False).eval()
    report = fq.export_litert(model, tmp_path / "m.tflite", DATA[0])
    assert report.share == 1.0
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        found = fq.verify(one, tmp_path / "m.tflite", DATA)
        assert found.ok, found.verdict()
        assert found.target == target
        assert set(found.kernels.values()) == {f"LiteRT int{bits}"}
        assert found.is_exact or name == "encoder"
        twice = [t for t in found.tensors if t.prepared_rounded]
        assert twice or name in ("mlp", "encoder"), str(found)
        assert all(t.why_prepared.startswith("kernel: ") for t in twice)


class Viewed(torch.nn.Module):
    """Code that needs tensors in the order of their axes, and uses a weight without the bias of its layer."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.Linear(64, 64)
        torch.nn.init.ones_(self.fc.bias)

    def forward(self, x):
        y = self.conv(x)
        return y.view(x.shape[0], -1), torch.nn.functional.linear(self.fc(y.flatten(1)), self.fc.weight)


def test_views_of_codes_and_weights_without_their_bias(tmp_path):
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    model = fq.prepare(Viewed(), recipes.int8(target="litert"), x)
    model = fq.calibrate(model, [x], progress=False).eval()
    report = fq.export_litert(model, tmp_path / "m.tflite", x)
    found = fq.verify(model, tmp_path / "m.tflite", [x])
    assert found.is_exact, str(found)
    assert found.ok
    # The golden model computes what functions compute in float.
    assert [one.how for one in report.layers] == ["int8", "int8", "float"]


def test_kernels_that_round_twice_are_those_of_the_target(tmp_path):
    """`verify` runs a file with the kernels of its target. Other kernels compute other codes."""
    config = recipes.int8(target="litert-reference")
    model = fq.prepare(digit_models.float_model("residual"), config, DATA[0])
    model = fq.calibrate(model, [digit_models.digits(32, 1) * 0.9], progress=False).eval()
    path = tmp_path / "m.tflite"
    for target in ("litert-reference", "litert-builtin", "litert"):
        golden = fq.convert(model, target=target)
        fq.export_litert(golden, path, DATA[0])
        assert fq.verify(model, path, DATA).target == target
    resolvers = running.RESOLVERS
    assert fq.verify(model, path, DATA).is_exact
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(resolvers, "litert", resolvers["litert-builtin"])
        found = fq.verify(model, path, DATA)
    assert not found.ok
    assert not found.is_exact


def test_inputs_without_the_rule_of_xnnpack_are_noticed(exported):
    """The prepared model would see other codes at ties than the file."""
    model, path, _ = exported("mlp", "int8")
    quantizer = model[1].input_quantizer
    ties = (torch.arange(16 * 64) % 250 + 0.5).double() * quantizer.scale.item()
    data = [ties.float().reshape(16, 1, 8, 8)]
    assert fq.verify(model, path, data).ok
    rounding, quantizer.rounding = quantizer.rounding, None
    try:
        found = fq.verify(model, path, data)
    finally:
        quantizer.rounding = rounding
    assert found.tensors[0].prepared_differ > 4
    assert not found.ok


def set_grids(scales, *quantizers):
    """Gives quantizers these scales, and one grid from -5 to 250 steps."""
    for quantizer, scale in zip(quantizers, scales, strict=True):
        quantizer.set_qparams(torch.tensor(scale), torch.tensor(5))


@pytest.mark.parametrize("step", [1 / 16, 0.05])
def test_relu6_of_sums_at_ties(step, tmp_path):
    """The kernel limits codes. Every odd sum lies between two codes: a step of sums is half a step of results.

    The prepared model adds floats, so it is at the same ties only if the scales are powers of 2.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), torch.nn.ReLU6(), torch.nn.Linear(16, 4))
    with torch.no_grad():
        model[0].weight.copy_(torch.randint(-3, 4, (16, 8)))
        model[0].weight[:, 0] = 127  # the scale of weights is 1
    x = torch.randint(0, 40, (500, 8)) * step
    x[:, 0] = 0
    model = fq.calibrate(fq.prepare(model.eval(), recipes.int8(target="litert"), x), [x], progress=False)
    set_grids([step, 2 * step], model[0].input_quantizer, model[2].input_quantizer)
    report = fq.export_litert(model, tmp_path / "m.tflite", x)
    graph = files.LitertFile(tmp_path / "m.tflite").graph
    fused = [getattr(operator.builtinOptions, "fusedActivationFunction", None) for operator in graph.operators]
    assert report.operators == {"QUANTIZE": 1, "FULLY_CONNECTED": 2, "DEQUANTIZE": 1}
    assert fused == [None, RELU6, 0, None]
    sums = torch.round(torch.nn.functional.linear(x, model[0].weight) / step)
    assert (sums % 2 == 1).float().mean() > 0.4
    assert (sums * step > 6).any()
    found = fq.verify(model, tmp_path / "m.tflite", [x])
    assert [t.runtime_differ for t in found.tensors] == [0, 0, 0]
    is_exact = step == 1 / 16
    assert (found.ok, found.tensors[1].prepared_differ == 0) == (is_exact, is_exact), str(found)


class Averaged(torch.nn.Module):
    """A layer that returns its input, and the mean of that."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = torch.nn.Conv2d(4, 4, 1, bias=False), torch.nn.Linear(4, 3)
        self.stem.weight.data = torch.eye(4)[:, :, None, None]

    def forward(self, x):
        return self.head(self.stem(x).mean((2, 3)))


@pytest.mark.parametrize(("ratio", "number"), [(128.0, 1), (256.0, 2)])
def test_means_on_a_finer_grid(ratio, number, tmp_path):
    """XNNPACK has no kernel for means on a grid that is 256 times as fine. Odd sums are ties."""
    x = torch.randint(-4, 5, (64, 4, 16, int(2 * ratio) // 16), generator=torch.Generator().manual_seed(0)) / 8
    model = fq.prepare(Averaged().eval(), recipes.int8(target="litert"), x)
    model = fq.calibrate(model, [x], progress=False)
    quantizers = model.stem.input_quantizer, model.stem.output_quantizer, model.head.input_quantizer
    set_grids([1 / 8, 1 / 8, 1 / 8 / ratio], *quantizers)
    report = fq.export_litert(model, tmp_path / "m.tflite", x)
    assert report.operators["QUANTIZE"] == number
    found = fq.verify(model, tmp_path / "m.tflite", [x])
    assert sum(t.runtime_differ for t in found.tensors) == 0, str(found)


def test_batches(exported):
    model, path, _ = exported("mlp", "int8")
    found = fq.verify(model, path, [DATA[0][:3], DATA[0]])
    assert (found.ok, found.outputs.rows) == (True, 19)
    model, path, _ = exported("residual", "lsq")
    with pytest.raises(
        ValueError, match=r"shape \(16, 1, 8, 8\), got one of shape \(3, 1, 8, 8\)(.|\n)*dynamic_batch=True"
    ):
        fq.verify(model, path, [DATA[0][:3]])


class Joining(torch.nn.Module):
    """The tokens of all texts are rows of one tensor. Learned tokens are the same for all texts."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 6), torch.nn.Linear(6, 3)
        self.learned = torch.nn.Parameter(torch.randn(1, 8))

    def forward(self, x):
        learned = self.second(self.first(self.learned.expand(x.shape[0], 8)))
        return self.second(self.first(x.reshape(-1, 8))).reshape(x.shape[0], -1, 3) + learned[:, None]


def test_batches_in_an_axis_with_others(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)
    model = fq.calibrate(fq.prepare(Joining(), recipes.int8(target="litert"), x), [x], progress=False).eval()
    fq.export_litert(model, tmp_path / "m.tflite", x, dynamic_batch=True)
    found = fq.verify(model, tmp_path / "m.tflite", [x, torch.randn(1, 5, 8), torch.randn(7, 5, 8)])
    assert found.ok, str(found)
    assert sum(t.runtime_differ for t in found.tensors) == 0


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(8, 8)

    def forward(self, x, factor=1.0):
        return self.fc(x) * factor


def test_other_constants_are_named(tmp_path):
    example = {"x": torch.randn(2, 8), "factor": 3.0}
    model = fq.prepare(Scaled(), recipes.int8(target="litert"), example)
    model = fq.calibrate(model, [example], progress=False).eval()
    fq.export_litert(model, tmp_path / "m.tflite", example)
    assert fq.verify(model, tmp_path / "m.tflite", [example]).ok
    with pytest.raises(ValueError, match=r"for this model with factor=2\.0: it was exported with other arguments"):
        fq.verify(model, tmp_path / "m.tflite", [{**example, "factor": 2.0}])


def test_latency(exported):
    model, path, _ = exported("residual", "lsq")
    found = fq.latency(model, path, DATA[0], seconds=0.01)
    assert (found.runtime, found.target, found.share) == ("litert", "litert", 1.0)
    assert found.median_ms > 0


def test_litert_is_not_installed(exported, monkeypatch):
    model, path, _ = exported("mlp", "int8")
    digit_models.without(monkeypatch, "ai_edge_litert")
    with pytest.raises(ImportError, match=r'needs ai-edge-litert.*\nUse: pip install "fakequant\[litert\]"'):
        fq.verify(model, path, DATA)


def test_file_of_another_model(exported):
    other = digit_models.calibrated("mlp", "lsq", "litert")
    with pytest.raises(ValueError, match="does not belong to the model: a parameter is different in the file"):
        fq.verify(other, exported("mlp", "int8")[1], DATA)
