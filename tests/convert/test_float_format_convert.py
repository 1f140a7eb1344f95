"""`convert` and converted files in float formats and with block scales: codes, bits, batch norms."""

import copy
import json
import pickle

import pytest

import fakequant as fq
from fakequant import presets
from fakequant.testing.assertions import assert_same_bits
from float_format_cases import BLOCKS, CONFIGS, FP8, MODELS, batch, make_branches, make_normed, prepared

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors")
save_file = pytest.importorskip("safetensors.torch").save_file
nn = torch.nn
files = pytest.importorskip("fakequant._convert.converted_files")

by_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def quantized_layers(model):
    return {path: m for path, m in model.named_modules() if isinstance(m, fq.nn.QuantizedLayer)}


@by_config
@pytest.mark.parametrize("name", ["cnn", "branches"])
def test_converted_model_has_the_bits_of_the_prepared_one(name, config):
    model = prepared(name, config)
    golden = fq.convert(model)  # before the model runs again: weights changed after its last forward pass
    assert_same_bits(model(batch(name)), golden(batch(name)))
    layers = quantized_layers(model)
    for path, layer in layers.items():
        made = golden.get_submodule(path)
        assert_same_bits(fq.nn.quantized_weight(layer), made.weight, path)
        assert made.weight_codes.dtype == (torch.int8 if layer.weight_quantizer.spec.format == "int" else torch.uint8)
        assert made.bias_codes is None
        assert_same_bits(layer.bias, made.bias)
    assert len(layers) == 3


@by_config
def test_copies_pickles_and_files_compute_the_same(config, tmp_path):
    golden = fq.convert(prepared("cnn", config))
    x = batch("cnn")
    path = tmp_path / "model.safetensors"
    fq.save_converted(golden, path)
    loaded = fq.load_converted(MODELS["cnn"](), path)
    for other in (copy.deepcopy(golden), pickle.loads(pickle.dumps(golden)), loaded):
        assert_same_bits(golden(x), other(x))
        state = other.state_dict()
        assert state.keys() == golden.state_dict().keys()
        for key, value in golden.state_dict().items():
            assert_same_bits(value, state[key], key)
    assert fq.convert(copy.deepcopy(prepared("cnn", config)))(x).equal(golden(x))


def tensors_of(path):
    with safetensors.safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


@pytest.mark.parametrize("name", ["mxfp8", "mxfp6", "mxfp4", "mxint8", "nvfp4"])
def test_file_has_packed_codes_and_scales_of_one_byte(name, tmp_path):
    golden = fq.convert(prepared("branches", BLOCKS[name]))
    fq.save_converted(golden, tmp_path / "m")
    tensors, _ = tensors_of(tmp_path / "m")
    spec = golden.a._fakequant.weight_spec
    assert tensors["a.weight_codes"].numel() == 24 * 40 * spec.bits // 8
    assert tensors["a.weight_scale_codes"].dtype == torch.uint8
    blocks = 3 if name == "nvfp4" else 2  # the last one is shorter
    assert tensors["a.weight_scale_codes"].shape == (24, blocks)
    assert ("a.weight_tensor_scale" in tensors) == (name == "nvfp4")
    assert "a.weight_scale" not in tensors


def test_weight_only_layer_keeps_float_inputs():
    golden = fq.convert(prepared("branches", BLOCKS["mxfp4 weights"]))
    assert golden.a.input_quantizer is None
    assert golden.a.weight_codes.shape == (24 * 40 // 2,)


@pytest.mark.parametrize("format", FP8)
def test_batch_norm_folds_into_fp8_codes(format):
    model = prepared("normed", FP8[format], steps=0)
    golden = fq.convert(model)
    assert fq._convert.convert.conversion(golden).folded == ["1", "5"]
    layer, made = model[0], golden[0]
    factor = model[1].weight.double() / (model[1].running_var.double() + model[1].eps).sqrt()
    scale = (layer.weight_quantizer.scale.double() * factor.abs()).float()
    assert_same_bits(scale, made.weight_scale)
    codes = fq.quantize(layer.weight.detach(), layer.weight_quantizer.scale, 0, layer.weight_quantizer.spec)
    flipped = torch.where((factor < 0).reshape(-1, 1, 1, 1), codes ^ 0x80, codes)
    if format.endswith("uz"):
        flipped = torch.where(codes == 0, codes, flipped)  # 0x80 is NaN
    assert_same_bits(flipped, made.weight_codes)
    assert bool((factor < 0).any())
    # Sums of floats in another order.
    torch.testing.assert_close(golden(batch("normed")), model(batch("normed")), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", BLOCKS)
def test_batch_norm_stays_behind_block_scales(name):
    model = prepared("normed", BLOCKS[name])
    golden = fq.convert(model)
    done = fq._convert.convert.conversion(golden)
    assert done.folded == []
    assert [note for note in done.notes if "which folding would leave" in note]
    assert_same_bits(model(batch("normed")), golden(batch("normed")))


def test_bias_of_fp8_layer_is_not_rounded_to_integers():
    model = prepared("branches", FP8["e4m3fn"])
    with torch.no_grad():
        model.c.bias.fill_(1e-7)
    x = torch.zeros(1, 40)
    with torch.no_grad():
        model.a.bias.zero_()
        model.b.bias.zero_()
    assert_same_bits(model(x), torch.full((1, 5), 1e-7))
    assert_same_bits(fq.convert(model)(x), model(x))


@pytest.mark.parametrize("swapped", [False, True])
def test_integers_and_fp8_mix(swapped):
    whole, floats = presets.int8(), presets.fp8_e4m3(axis=0)
    inputs = presets.fp8_e4m3(), presets.uint8()
    weight, x = (floats, inputs[1]) if swapped else (whole, inputs[0])
    model = prepared("branches", fq.QuantConfig(default=fq.LayerConfig(weight=weight, input=x), operands=x))
    golden = fq.convert(model)
    assert golden.a.bias_codes is None
    assert_same_bits(model(batch("branches")), golden(batch("branches")))


def test_fp8_scale_may_be_computed_at_run_time():
    layer = fq.LayerConfig(
        weight=presets.fp8_e4m3(axis=0), input=presets.fp8_e4m3(), activation_observer=fq.observers.Dynamic()
    )
    model = prepared("branches", fq.QuantConfig(default=layer))
    golden = fq.convert(model)
    assert golden.a.input_quantizer.scale is None
    for x in (batch("branches"), batch("branches") * 100):
        assert_same_bits(model(x), golden(x))


@pytest.mark.filterwarnings("ignore:.*has observed .* values that are NaN:RuntimeWarning")
@by_config
def test_special_values_pass_as_in_the_prepared_model(config):
    model = prepared("branches", config)
    x = batch("branches")
    x[0, 0], x[1, 1], x[2, 2], x[3] = torch.nan, torch.inf, -torch.inf, 0
    assert_same_bits(model(x), fq.convert(model)(x))


def test_other_targets_refuse_float_formats():
    model = prepared("branches", FP8["e4m3fn"])
    for target in ("onnxruntime-x86", "openvino", "tensorrt", "xnnpack"):
        with pytest.raises(ValueError, match=f"is e4m3fn, per .*kernels of {target} compute with integers"):
            fq.convert(model, target=target)
    with pytest.raises(ValueError, match="but the kernels of openvino compute with integers"):
        fq.convert(prepared("branches", BLOCKS["mxfp4 weights"]), target="openvino")


# --- files with wrong contents --------------------------------------------------------------------


def tampered(path, change):
    """Rewrites a file with changed tensors and description, and a valid checksum."""
    tensors, metadata = tensors_of(path)
    described = json.loads(metadata["fakequant"])
    change(tensors, described)
    text = json.dumps(described)
    save_file(tensors, path, metadata={"fakequant": text, "checksum": files.checksum(text, tensors)})


def put(name, value):
    return lambda tensors, described: tensors.__setitem__(name, value)


def described_as(**fields):
    return lambda tensors, described: described["layers"]["a"]["weight"]["spec"].update(fields)


def fixed_scale(tensors, described):
    tensors["a.input_quantizer.scale"] = torch.ones(())
    tensors["a.input_quantizer.zero_point"] = torch.zeros((), dtype=torch.int32)


WRONG = {
    "nvfp4 without codes": ("nvfp4", lambda t, d: t.pop("a.weight_scale_codes"), "weight_scale_codes is missing"),
    "nvfp4 without tensor scale": ("nvfp4", lambda t, d: t.pop("a.weight_tensor_scale"), "tensor_scale is missing"),
    "tensor scale of 0": ("nvfp4", put("a.weight_tensor_scale", torch.zeros(())), "has the value 0"),
    "tensor scale NaN": ("nvfp4", put("a.weight_tensor_scale", torch.tensor(torch.nan)), "has the value nan"),
    "two tensor scales": ("nvfp4", put("a.weight_tensor_scale", torch.ones(2)), "float32 of shape .2,., but must be"),
    "codes as int64": ("mxfp8", put("a.weight_scale_codes", torch.ones(24, 2, dtype=torch.int64)), "is int64 of shape"),
    "NaN scale": ("mxfp8", put("a.weight_scale_codes", torch.full((24, 2), 255, dtype=torch.uint8)), "value nan"),
    "too few scales": ("mxfp8", put("a.weight_scale_codes", torch.ones(24, 1, dtype=torch.uint8)), "but must be uint8"),
    "float scales too": ("mxfp8", put("a.weight_scale", torch.ones(24, 2)), "although the scales are bytes"),
    "NaN code": ("e4m3fn", put("a.weight_codes", torch.full((24, 40), 0x7F, dtype=torch.uint8)), "value nan"),
    "infinite code": ("e5m2", put("a.weight_codes", torch.full((24, 40), 0x7C, dtype=torch.uint8)), "value inf"),
    "codes as int8": ("e4m3fn", put("a.weight_codes", torch.ones(24, 40, dtype=torch.int8)), "is int8, but must be"),
    "unknown format": ("e4m3fn", described_as(format="e6m1"), "`format` must be one of"),
    "format of another type": ("e4m3fn", described_as(format=["int"]), "`format` must be one of"),
    "unknown scale format": ("mxfp8", described_as(scale_format="e5m3"), "`scale_format` must be one of"),
    "fixed scale of blocks": ("mxfp8", fixed_scale, "follow the data"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    made = {}

    def file_of(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("saved") / f"{name}.safetensors"
            fq.save_converted(fq.convert(prepared("branches", CONFIGS[name])), made[name])
        return made[name].read_bytes()

    return file_of


@pytest.mark.parametrize(("name", "change", "words"), WRONG.values(), ids=WRONG)
def test_file_with_wrong_contents_is_refused(name, change, words, saved, tmp_path):
    path = tmp_path / "m"
    path.write_bytes(saved(name))
    tampered(path, lambda tensors, described: None)
    fq.load_converted(make_branches(), path)
    path.write_bytes(saved(name))
    tampered(path, change)
    model = make_branches()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=f"is damaged.*{words}"):
        fq.load_converted(model, path)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert type(model.a) is nn.Linear


def test_normed_model_of_blocks_returns_from_a_file(tmp_path):
    golden = fq.convert(prepared("normed", BLOCKS["nvfp4"]))
    fq.save_converted(golden, tmp_path / "m")
    assert_same_bits(golden(batch("normed")), fq.load_converted(make_normed(), tmp_path / "m")(batch("normed")))
