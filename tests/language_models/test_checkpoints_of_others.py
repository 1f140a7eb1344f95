"""Checkpoints of compressed-tensors' own compressor and of torchao: `load_grids` has their dequantized weights."""

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationStatus,
    apply_quantization_config,
    preset_name_to_scheme,
)  # fmt: skip
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import nn

import fakequant as fq
from tiny_language_models import assert_same_bits, batch, load, logits, make

BF16 = torch.bfloat16
# With the dtype of the model, and whether fakequant has a grid for its inputs.
_PRESETS = {
    "W4A16": torch.float32, "W4A16_ASYM": torch.float32, "W8A16": torch.float32, "W8A8": torch.float32,
    "INT8": torch.float32, "FP8": torch.float32, "FP8_DYNAMIC": torch.float32, "NVFP4A16": BF16, "MXFP4A16": BF16,
    "W3A16": torch.float32, "MXFP6A16": BF16, "MXFP8A16": BF16, "W2A16": torch.float32, "W5A16": torch.float32,
    "W6A16": torch.float32, "W7A16": torch.float32, "FP8_BLOCK": torch.float32, "NVFP4": BF16, "MXFP8": BF16,
    "MXFP4": BF16, "MXFP6A8": BF16, "MXFP4XFP8": BF16,
}  # fmt: skip


def _their_folder(preset, dtype, folder):
    """Writes a folder with compressed-tensors alone. Returns the model that it was made from."""
    model = make("llama", dtype, hidden_size=128, intermediate_size=256, head_dim=32)
    scheme = preset_name_to_scheme(preset, ["Linear"])
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=["lm_head"], quantization_status=QuantizationStatus.FROZEN
    )
    apply_quantization_config(model, config)
    for layer in model.modules():
        if getattr(layer, "quantization_scheme", None) is not None:
            _set_scales(layer)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    return model


@torch.no_grad()
def _set_scales(layer):
    args, weight = layer.quantization_scheme.weights, layer.weight
    size = args.group_size
    rows = weight.reshape(1, -1) if args.strategy == "tensor" else weight
    parts = rows.unflatten(-1, (-1, size)) if args.strategy in ("group", "tensor_group") else rows[:, None]
    if args.strategy == "block":
        height, width = args.block_structure
        filled = nn.functional.pad(weight, (0, -weight.shape[1] % width, 0, -weight.shape[0] % height))
        parts = filled.unflatten(1, (-1, width)).unflatten(0, (-1, height)).transpose(1, 2).flatten(2)
    options = {}
    if hasattr(layer, "weight_global_scale"):
        found = generate_gparam(weight.min(), weight.max())
        layer.weight_global_scale.copy_(found)
        options["global_scale"] = found
    scale, zero_point = calculate_qparams(parts.amin(-1), parts.amax(-1), args, **options)
    layer.weight_scale.copy_(scale.reshape(layer.weight_scale.shape))
    if hasattr(layer, "weight_zero_point"):
        layer.weight_zero_point.copy_(zero_point.reshape(layer.weight_zero_point.shape))
    if hasattr(layer, "input_scale"):
        layer.input_scale.fill_(0.03125)
    if hasattr(layer, "input_global_scale"):
        layer.input_global_scale.fill_(2688 / 3)


def _values(model):
    """Returns the weights with which a prepared model computes, by path."""
    return {
        path: layer._fakequant.quantized_weight(layer).detach()
        for path, layer in model.named_modules()
        if isinstance(layer, fq.nn.QuantizedLayer) and layer.weight_quantizer is not None
    }


@pytest.mark.parametrize("preset", _PRESETS)
def test_a_folder_by_compressed_tensors_has_the_same_weights(preset, tmp_path):
    dtype = _PRESETS[preset]
    _their_folder(preset, dtype, tmp_path / "folder")
    sizes = dict(hidden_size=128, intermediate_size=256, head_dim=32)
    model = fq.load_grids(make("llama", dtype, **sizes), tmp_path / "folder", batch()).eval()
    theirs = load(tmp_path / "folder", model)
    theirs(**batch())  # which dequantizes its weights
    values = _values(model)
    assert len(values) == 14
    for path, value in values.items():
        assert_same_bits(value, theirs.get_submodule(path).weight)
    # FP8 inputs of bfloat16 are divided by their scale in bfloat16 there.
    if preset != "MXFP4XFP8":
        assert_same_bits(logits(model), logits(theirs))


@pytest.mark.parametrize(
    "preset", ["W4A16", "W4A16_ASYM", "FP8", "MXFP4A16", "NVFP4A16", "FP8_BLOCK", "NVFP4", "MXFP8"]
)
def test_the_weights_of_their_folders_are_written_with_the_same_codes(preset, tmp_path):
    dtype = _PRESETS[preset]
    _their_folder(preset, dtype, tmp_path / "theirs")
    sizes = dict(hidden_size=128, intermediate_size=256, head_dim=32)
    model = fq.load_grids(make("llama", dtype, **sizes), tmp_path / "theirs", batch()).eval()
    fq.export_compressed_tensors(model, tmp_path / "ours")
    again = fq.load_grids(make("llama", dtype, **sizes), tmp_path / "ours", batch()).eval()
    for value, other in zip(_values(model).values(), _values(again).values(), strict=True):
        assert_same_bits(value, other)


def test_a_folder_with_another_kind_of_input_scales_is_refused_with_the_layer(tmp_path):
    _their_folder("NVFP4", BF16, tmp_path / "folder")
    file = tmp_path / "folder/config.json"
    file.write_text(file.read_text().replace('"local"', "true"))
    model = make("llama", BF16, hidden_size=128, intermediate_size=256, head_dim=32)
    with pytest.raises(ValueError, match=r"(?s)model\.layers\.0\..*dynamic=True.*dynamic='local'"):
        fq.load_grids(model, tmp_path / "folder", batch())
    assert not any(isinstance(module, fq.nn.QuantizedLayer) for module in model.modules())


def test_embeddings_that_are_stored_as_codes_are_refused_and_the_model_is_left_alone(tmp_path):
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    model = make()
    scheme = QuantizationScheme(
        targets=["Embedding", "Linear"], weights=QuantizationArgs(num_bits=8, strategy="channel")
    )
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}))
    for layer in model.modules():
        if getattr(layer, "quantization_scheme", None) is not None:
            _set_scales(layer)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path / "folder")
    compressor.update_config(str(tmp_path / "folder"))
    other = make()
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(ValueError, match=r"stores model\.embed_tokens as codes, .*: Embedding layers stay in float"):
        fq.load_grids(other, tmp_path / "folder", batch())
    assert before.keys() == other.state_dict().keys()
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    assert not any(isinstance(module, fq.nn.QuantizedLayer) for module in other.modules())


# --- torchao -----------------------------------------------------------------------------------------


def _torchao_configs():
    ao = pytest.importorskip("torchao.quantization")
    group, axis = ao.PerGroup(32), ao.PerAxis(0)
    asymmetric = ao.MappingType.ASYMMETRIC
    return {
        "int8": ao.Int8WeightOnlyConfig(version=2),
        "int4 groups": ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=group),
        "int4 channels": ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=axis),
        "int3 groups": ao.IntxWeightOnlyConfig(weight_dtype=torch.int3, granularity=group),
        "int8 groups": ao.IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=group),
        "int4 asymmetric": ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=group, mapping_type=asymmetric),
        "int4 asymmetric channels": ao.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=axis, mapping_type=asymmetric
        ),
        "int8 inputs": ao.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=group),
        "fp8": ao.Float8WeightOnlyConfig(version=2),
    }


_KINDS = ("int8", "int4 groups", "int4 channels", "int3 groups", "int8 groups", "int4 asymmetric",
          "int4 asymmetric channels", "int8 inputs", "fp8")  # fmt: skip


def _network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32)).eval()


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_a_checkpoint_of_torchao_has_the_same_weights(kind, dtype, tmp_path):
    ao = pytest.importorskip("torchao.quantization")
    theirs = _network().to(dtype)
    ao.quantize_(theirs, _torchao_configs()[kind])
    torch.save(theirs.state_dict(), tmp_path / "model.pt")
    model = fq.load_grids(_network().to(dtype), tmp_path / "model.pt").eval()
    values = _values(model)
    assert sorted(values) == ["0", "2"]
    for path, value in values.items():
        layer = theirs.get_submodule(path)
        assert_same_bits(value, layer.weight.dequantize())
        assert_same_bits(model.get_submodule(path).bias, layer.bias)
        assert (model.get_submodule(path).input_quantizer is not None) == (kind == "int8 inputs")


def test_weights_with_inputs_per_token_are_loaded_with_them(tmp_path):
    ao = pytest.importorskip("torchao.quantization")
    theirs = _network()
    ao.quantize_(theirs, ao.Int8DynamicActivationInt8WeightConfig(version=2))
    torch.save(theirs.state_dict(), tmp_path / "model.pt")
    model = fq.load_grids(_network(), tmp_path / "model.pt").eval()
    assert str(model[0].input_quantizer.spec) == "int8, per token over axis -1"
    assert_same_bits(_values(model)["0"], theirs[0].weight.dequantize())


@pytest.mark.parametrize("kind", ["MX", "NVFP4"])
def test_kinds_of_torchao_that_are_not_known_are_refused_by_name(kind, tmp_path):
    ao = pytest.importorskip("torchao.quantization")
    formats = pytest.importorskip("torchao.prototype.mx_formats")
    config = formats.NVFP4WeightOnlyConfig() if kind == "NVFP4" else formats.MXDynamicActivationMXWeightConfig()
    theirs = _network().to(BF16)
    ao.quantize_(theirs, config)
    torch.save(theirs.state_dict(), tmp_path / "model.pt")
    with pytest.raises(ValueError, match=rf"0\.weight is a {kind}Tensor of torchao.*\nUse Int8Tensor"):
        fq.load_grids(_network().to(BF16), tmp_path / "model.pt")


def test_a_checkpoint_with_a_tied_weight_is_loaded(tmp_path):
    ao = pytest.importorskip("torchao.quantization")
    theirs = make("llama", tie_word_embeddings=True)
    theirs.tie_weights()
    ao.quantize_(theirs.model, _torchao_configs()["int4 groups"])
    torch.save(theirs.state_dict(), tmp_path / "model.pt")
    model = make("llama", tie_word_embeddings=True)
    model.tie_weights()
    model = fq.load_grids(model, tmp_path / "model.pt", batch()).eval()
    assert len(_values(model)) == 14
    for path, value in _values(model).items():
        assert_same_bits(value, theirs.get_submodule(path).weight.dequantize())


@pytest.mark.parametrize("content", ["text", "list", "floats"])
def test_files_without_quantized_tensors_are_refused(content, tmp_path):
    file = tmp_path / "model.pt"
    if content == "text":
        file.write_text("no checkpoint")
    else:
        torch.save([1] if content == "list" else _network().state_dict(), file)
    message = {"text": "cannot be read as a", "list": "holds list instead of", "floats": "no quantized layers"}
    with pytest.raises(ValueError, match=message[content]):
        fq.load_grids(_network(), file)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(96,), (80, 32), (96, 32, 8)], ids=str)
def test_a_checkpoint_of_torchao_for_another_model_is_refused(bias, sizes, tmp_path):
    ao = pytest.importorskip("torchao.quantization")

    def network(*sizes):
        return nn.Sequential(*(nn.Linear(n, m, bias=bias) for n, m in zip((64, *sizes), sizes)))

    theirs = network(96, 32)
    ao.quantize_(theirs, _torchao_configs()["int4 groups"])
    torch.save(theirs.state_dict(), tmp_path / "model.pt")
    other = network(*sizes)
    with pytest.raises(ValueError, match=r"model\.pt (has [01]\.|does not belong to the model: it has no 2\.)"):
        fq.load_grids(other, tmp_path / "model.pt")
    assert not any(isinstance(module, fq.nn.QuantizedLayer) for module in other.modules())
