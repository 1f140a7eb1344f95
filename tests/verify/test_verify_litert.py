"""`verify` runs .tflite files in LiteRT: its codes are those of the golden model."""

import platform

import pytest

import fakequant as fq
from thoroughness import ALL

torch = pytest.importorskip("torch")
pytest.importorskip("ai_edge_litert.interpreter")
recipes = pytest.importorskip("fakequant.recipes")
digit_models = pytest.importorskip("digit_models")

pytestmark = [
    pytest.mark.usefixtures("torch_on_one_thread"),
    pytest.mark.skipif(
        platform.machine().lower() not in ("x86_64", "amd64"), reason="the formulas are those of the x86 kernels"
    ),
]
# Every recipe occurs, and every model in `make test-all`.
CASES = [("residual", "lsq"), ("encoder", "int8")] + ([("mlp", "int8"), ("depthwise", "w4a8")] if ALL else [])
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


def test_relu6_of_sums_at_ties(tmp_path):
    """The kernel limits codes. Every odd sum lies between two codes: a step of sums is half a step of results."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), torch.nn.ReLU6(), torch.nn.Linear(16, 4))
    with torch.no_grad():
        model[0].weight.copy_(torch.randint(-3, 4, (16, 8)))
        model[0].weight[:, 0] = 127  # the scale of weights is 1
    x = torch.randint(0, 40, (500, 8)) * 0.05
    x[:, 0] = 0
    model = fq.calibrate(fq.prepare(model.eval(), recipes.int8(target="litert"), x), [x], progress=False)
    for layer, scale in ((model[0], 0.05), (model[2], 0.1)):
        layer.input_quantizer.scale.fill_(scale)
        layer.input_quantizer.zero_point.zero_()
    fq.export_litert(model, tmp_path / "m.tflite", x)
    found = fq.verify(model, tmp_path / "m.tflite", [x])
    assert [t.runtime_differ for t in found.tensors] == [0, 0, 0]


def test_batches(exported):
    model, path, _ = exported("mlp", "int8")
    found = fq.verify(model, path, [DATA[0][:3], DATA[0]])
    assert (found.ok, found.outputs.rows) == (True, 19)
    model, path, _ = exported("residual", "lsq")
    with pytest.raises(
        ValueError, match=r"shape \(16, 1, 8, 8\), got one of shape \(3, 1, 8, 8\)(.|\n)*dynamic_batch=True"
    ):
        fq.verify(model, path, [DATA[0][:3]])


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
