"""Export limits are errors with a fix: fixed batch sizes, and grids that a target does not support."""

import dataclasses
import os

import pytest

import fakequant as fq
from fakequant import QuantSpec, _runtimes, presets

torch = pytest.importorskip("torch")
nn = torch.nn
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
ort = pytest.importorskip("onnxruntime")

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
# --- fixed batch sizes -----------------------------------------------------------------------------------------


class Fixed(nn.Module):
    """Adds a buffer of the length of the batch, so that the batch size is fixed."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("more", torch.arange(6.0).reshape(3, 2))

    def forward(self, x):
        return self.layer(x) + self.more


class DependsOnData(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x if x.sum().item() > 0 else -x)


def calibrated(model, config=None):
    torch.manual_seed(0)
    return fq.calibrate(fq.prepare(model, config or fq.recipes.int8(), X), [X], progress=False)


def test_fixed_batch_size_is_refused_and_names_dynamic_batch_false(tmp_path):
    model = calibrated(Fixed(), fq.recipes.int8(target="onnxruntime-x86"))
    with pytest.raises(ValueError, match=r"(?s)batches of any length: .*dynamic_batch=False.*length \(3\)"):
        fq.export_onnx(model, tmp_path / "m.onnx", X)
    assert not os.listdir(tmp_path)
    fq.export_onnx(model, tmp_path / "m.onnx", X, dynamic_batch=False)
    (y,) = ort.InferenceSession(str(tmp_path / "m.onnx")).run(None, {"x": X.numpy()})
    assert float((torch.from_numpy(y) - fq.convert(model)(X)).abs().max()) < 1e-5


def test_data_dependent_model_error_does_not_suggest_dynamic_batch(tmp_path):
    with pytest.raises(Exception, match=r"(?i)export") as caught:
        fq.export_onnx(calibrated(DependsOnData()), tmp_path / "m.onnx", X)
    assert "dynamic_batch" not in str(caught.value)


# --- TensorRT --------------------------------------------------------------------------------------------------

TENSORRT = _runtimes.find("tensorrt")
UNSIGNED = QuantSpec(signed=False, symmetric=False)


def test_tensorrt_fits_specs_to_8_bit_symmetric_grids():
    for spec in (UNSIGNED, QuantSpec(bits=4), QuantSpec(bits=16), QuantSpec(narrow_range=True)):
        assert TENSORRT.fit_activation(spec) == QuantSpec()
    assert TENSORRT.fit_activation(presets.int8_per_token()) == presets.int8_per_token()
    assert TENSORRT.fit_weight(QuantSpec(bits=16, axis=0)) == QuantSpec(axis=0)
    assert TENSORRT.fit_weight(dataclasses.replace(UNSIGNED, bits=4)) == QuantSpec(bits=4)
    assert TENSORRT.fit_weight(presets.int8()) == presets.int8()


CONFIGS = {
    "int8": fq.LayerConfig(weight=presets.int8(), input=presets.uint8()),
    "4 bits": fq.LayerConfig(weight=presets.int4(group_size=None), input=presets.uint4()),
    "affine weights": fq.LayerConfig(weight=dataclasses.replace(UNSIGNED, axis=0), input=QuantSpec()),
    "16 bits": fq.LayerConfig(weight=QuantSpec(bits=16, axis=0), input=presets.int16(), output=presets.int16()),
}


@pytest.mark.parametrize("layer", CONFIGS.values(), ids=CONFIGS)
def test_model_prepared_for_tensorrt_is_int8_in_the_file(layer, tmp_path):
    config = fq.QuantConfig(default=layer, operands=presets.uint8(), target="tensorrt")
    model = calibrated(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), config)
    fq.export_onnx(model, tmp_path / "m.onnx", X)
    proto = onnx.load(tmp_path / "m.onnx")
    stored = {tensor.name: tensor for tensor in proto.graph.initializer}
    quantizing = [node for node in proto.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert len(quantizing) >= 6
    for node in quantizing:
        if len(node.input) > 2 and node.input[2]:
            zero_point = onnx.numpy_helper.to_array(stored[node.input[2]])
            assert zero_point.dtype in ("int8", "int32")
            assert not zero_point.any()
    for name in ("0.weight_codes", "2.weight_codes"):
        assert stored[name].data_type == onnx.TensorProto.INT8


REFUSED = {
    "affine activations": (CONFIGS["int8"], r"0\.input_quantizer is affine \(uint8, per tensor\)"),
    "4-bit activations": (
        fq.LayerConfig(weight=presets.int8(), input=QuantSpec(bits=4)),
        r"0\.input_quantizer is int4, per tensor, but tensorrt needs activations with the full range of 8 bits",
    ),
    "16-bit activations": (
        fq.LayerConfig(weight=presets.int8(), input=presets.int16()),
        r"0\.input_quantizer is int16, per tensor, but tensorrt needs activations with the full range of 8 bits",
    ),
    "narrow activations": (
        fq.LayerConfig(weight=presets.int8(), input=QuantSpec(narrow_range=True)),
        r"0\.input_quantizer is int8 narrow, per tensor, but tensorrt",
    ),
    "affine weights": (
        fq.LayerConfig(weight=dataclasses.replace(UNSIGNED, axis=0), input=QuantSpec()),
        r"0 has weights in uint8, per channel on axis 0, but tensorrt needs symmetric weights of at most 8 bits",
    ),
    "16-bit weights": (
        fq.LayerConfig(weight=QuantSpec(bits=16, axis=0), input=QuantSpec()),
        r"0 has weights in int16, per channel on axis 0, but tensorrt needs symmetric weights of at most 8 bits",
    ),
}


@pytest.mark.parametrize(("layer", "message"), REFUSED.values(), ids=REFUSED)
def test_model_prepared_for_another_target_is_refused_for_tensorrt_with_the_fix(layer, message, tmp_path):
    model = calibrated(nn.Sequential(nn.Linear(4, 2)), fq.QuantConfig(default=layer))
    with pytest.raises(ValueError, match=rf"(?s){message}.*prepare with a config that has target='tensorrt'"):
        fq.export_onnx(model, tmp_path / "m.onnx", X, target="tensorrt")
    assert not os.listdir(tmp_path)
