"""`verify` runs programs in ExecuTorch: XNNPACK's codes are those of the golden model, at ties too."""

import platform

import pytest

import fakequant as fq
from fakequant import presets
from thoroughness import ALL

torch = pytest.importorskip("torch")
nn = torch.nn
pytest.importorskip("executorch.exir")
recipes = pytest.importorskip("fakequant.recipes")
runtimes = pytest.importorskip("fakequant._runtimes.xnnpack.session")
digit_models = pytest.importorskip("digit_models")

pytestmark = [
    pytest.mark.usefixtures("torch_on_one_thread", "programs_made_once"),
    pytest.mark.skipif(
        platform.machine().lower() not in ("x86_64", "amd64"), reason="the formulas are those of the x86 kernels"
    ),
]

# Every recipe occurs, and every model in `make test-all`.
CASES = [("residual", "lsq")] + ([("mlp", "int8"), ("depthwise", "w4a8"), ("encoder", "int8")] if ALL else [])
DATA = [digit_models.digits(16, 2), digit_models.digits(16, 3)]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A function that returns a model and its program, exported once."""
    made = {}

    def get(name, recipe):
        if (name, recipe) not in made:
            # XNNPACK multiplies by 1 / scale. At a scale of 1 / 255, all ties would be those of ONNX.
            model = digit_models.calibrated(name, recipe, "xnnpack", brightest=0.9)
            path = tmp_path_factory.mktemp("exported") / "model.pte"
            fq.export_executorch(model, path, DATA[0], max_batch=16 if name == "mlp" else None)
            made[name, recipe] = model, path
        return made[name, recipe]

    return get


# --- the same codes -------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_executorch_has_the_codes_of_the_golden_model(name, recipe, exported):
    model, path = exported(name, recipe)
    found = fq.verify(model, path, DATA)
    digit_models.assert_verified(found, digit_models.float_model(name), "executorch", "xnnpack")
    assert set(found.kernels.values()) == {"XNNPACK int8"}
    assert found.outputs.rows == 32
    assert found.skipped == {}
    if name != "encoder":
        assert found.outputs.runtime_is_equal


def test_inputs_without_the_rule_of_xnnpack_are_noticed(exported):
    """The prepared model would see other codes at ties than the program."""
    model, path = exported("mlp", "int8")
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


def test_batches_of_several_lengths(exported):
    model, path = exported("mlp", "int8")  # up to 16
    found = fq.verify(model, path, [DATA[0][:3], DATA[0]])
    digit_models.assert_verified(found, digit_models.mlp(), "executorch", "xnnpack")
    assert found.outputs.rows == 19
    with pytest.raises(ValueError, match=r"cannot run .* on a batch of shape \(17, 1, 8, 8\)(?s:.)*max_batch"):
        fq.verify(model, path, [digit_models.digits(17)])


def test_empty_batch(exported):
    model, path = exported("mlp", "int8")
    with pytest.raises(ValueError, match=r"The batch has an empty tensor, of shape \(0, 1, 8, 8\).*\nUse at least one"):
        fq.verify(model, path, [DATA[0], DATA[0][:0]])


# --- the choice of the runtime --------------------------------------------------------------------


def test_executorch_is_not_installed(exported, monkeypatch):
    model, path = exported("mlp", "int8")
    digit_models.without(monkeypatch, "executorch")
    for runtime in (None, "executorch"):
        with pytest.raises(ImportError, match=r'needs executorch.*\nUse: pip install "fakequant\[executorch\]"'):
            fq.verify(model, path, DATA, runtime=runtime)


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_program_in_a_runtime_of_onnx_files(runtime, exported):
    pytest.importorskip("onnx")
    pytest.importorskip(runtime)
    with pytest.raises(ValueError, match=r"is not an ONNX model.*(\n.*)*Use a file that fakequant\.export_onnx wrote"):
        fq.verify(*exported("mlp", "int8"), DATA, runtime=runtime)


def test_wrong_runtime(exported):
    with pytest.raises(ValueError, match=r"`runtime` must be one of onnxruntime, openvino, .*, or None, got 'et'"):
        fq.verify(*exported("mlp", "int8"), DATA, runtime="et")


# --- files that do not fit ------------------------------------------------------------------------


def test_damaged_files(exported, tmp_path):
    model, path = exported("mlp", "int8")
    whole, bad = path.read_bytes(), tmp_path / "m.pte"
    for data, message in (
        (b"", "is empty"),
        (b"# no program", "is not an ExecuTorch program"),
        (whole[: len(whole) // 2], "is damaged"),
        (whole[:-1], "is damaged|cannot load"),
        (whole[:40], "is damaged"),
        (whole[:8], "is damaged"),
        (whole[:8] + bytes(1000), "is damaged"),
        (whole.replace(b"fakequant.target", b"fakequant.tarxxx"), "was not written by fakequant.export_executorch"),
    ):
        bad.write_bytes(data)
        with pytest.raises(
            ValueError, match=rf"({message})(?s:.)*Use (a \.pte file that )?fakequant\.export_executorch"
        ):
            fq.verify(model, bad, DATA, runtime="executorch")
    with pytest.raises(FileNotFoundError, match="There is no file"):
        fq.verify(model, tmp_path / "none.pte", DATA, runtime="executorch")


def test_file_of_another_model(exported):
    for name, recipe in (("mlp", "lsq"), ("depthwise", "w4a8")):
        other = digit_models.calibrated(name, recipe, "xnnpack")
        with pytest.raises(ValueError, match="does not belong to the model: a parameter is different in the file"):
            fq.verify(other, exported("mlp", "int8")[1], DATA)


def test_model_trained_further(exported):
    model, path = exported("mlp", "int8")
    assert fq.verify(model, path, DATA[:1]).ok
    further = digit_models.calibrated("mlp", "int8", "xnnpack", brightest=0.9)
    with torch.no_grad():
        next(module for module in further if isinstance(module, torch.nn.Linear)).bias[0] += 0.5
    with pytest.raises(ValueError, match="does not belong to the model: a parameter is different in the file"):
        fq.verify(further, path, DATA)


# --- grids that XNNPACK cannot compute ------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "activation", "message"),
    [
        (presets.int8(), presets.int16(), r"1\.input_quantizer is int16, per tensor, but xnnpack needs activations"),
        (fq.QuantSpec(bits=16, axis=0), presets.uint8(), r"1 has weights in int16.*but xnnpack needs symmetric"),
    ],
)
def test_grids_name_the_layer(weight, activation, message):
    config = fq.QuantConfig(default=fq.LayerConfig(weight=weight, input=activation))
    model = fq.calibrate(fq.prepare(digit_models.mlp(), config, DATA[0]), DATA[:1], progress=False)
    with pytest.raises(ValueError, match=rf"(?s){message}.*target='xnnpack'"):
        fq.convert(model, target="xnnpack")
