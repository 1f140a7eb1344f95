"""`verify` runs .tflite files in LiteRT: its codes are those of the golden model, and changed files are refused."""

import platform

import numpy as np
import pytest

import fakequant as fq
from thoroughness import ALL

torch = pytest.importorskip("torch")
pytest.importorskip("ai_edge_litert.interpreter")
recipes = pytest.importorskip("fakequant.recipes")
files = pytest.importorskip("fakequant._export.litert.file")
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
TAMPERS = 220 if ALL else 12


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


# --- changed files --------------------------------------------------------------------------------


def says_ok(model, data, path):
    """Returns whether `verify` is content with a file of these bytes."""
    path.write_bytes(data)
    try:
        return fq.verify(model, path, DATA[:1], runtime="litert").ok
    except ValueError:
        return False


def test_damaged_files(exported, tmp_path):
    model, path, _ = exported("mlp", "int8")
    whole, bad = path.read_bytes(), tmp_path / "m.tflite"
    for data, message in (
        (b"", "is empty"),
        (b"# no model", "is not a .tflite file"),
        (whole[: len(whole) // 2], "was changed|is damaged"),
        (whole[:8] + bytes(1000), "is damaged"),
        (whole.replace(b"sha256:", b"sha255:"), "was not written by fakequant.export_litert"),
    ):
        bad.write_bytes(data)
        with pytest.raises(ValueError, match=message):
            fq.verify(model, bad, DATA, runtime="litert")


def test_changed_bytes(exported, tmp_path, record_property):
    """Every second hash is made to match again."""
    model, path, _ = exported("mlp", "int8")
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    seal = files._SEALED.search(whole)
    ok = []
    assert says_ok(model, files.sealed(whole), tmp_path / "m.tflite")
    for number, place in enumerate(rng.choice(len(whole), TAMPERS, replace=False).tolist()):
        if seal.start() <= place < seal.end():
            continue
        changed = bytearray(whole)
        changed[place] ^= 1 << int(rng.integers(8))
        data = files.sealed(bytes(changed)) if number % 2 else bytes(changed)
        if says_ok(model, data, tmp_path / "m.tflite"):
            ok.append((number, place))
    record_property("tampers", TAMPERS)
    assert ok == []


def _weight(graph, model):
    buffer = model.buffers[next(t.buffer for t in graph.tensors if t.name == b"3.weight")]
    buffer.data = np.array(buffer.data)
    buffer.data[0] ^= 1


def _scale(graph, model):
    tensor = next(t for t in graph.tensors if t.name.startswith(b"3.input_quantizer"))
    tensor.quantization.scale = np.nextafter(tensor.quantization.scale, np.float32(9))


def _activation(graph, model):
    options = next(op.builtinOptions for op in graph.operators if hasattr(op.builtinOptions, "keepNumDims"))
    options.fusedActivationFunction ^= 1


def _zero_point(graph, model):
    quantization = next(t for t in graph.tensors if t.name.startswith(b"5.input_quantizer")).quantization
    quantization.zeroPoint = quantization.zeroPoint + 1


@pytest.mark.parametrize("change", [_weight, _scale, _activation, _zero_point])
def test_changed_parts(change, exported, tmp_path):
    """The file is one that LiteRT runs, and its hash matches."""
    model, path, _ = exported("mlp", "int8")
    made = files.schema().ModelT.InitFromPackedBuf(path.read_bytes())
    change(made.subgraphs[0], made)
    assert not says_ok(model, files.sealed(files.pack(made)), tmp_path / "m.tflite")
