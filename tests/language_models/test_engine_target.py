"""The target "compressed-tensors": what stays in float and why, and which specs it takes."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers

import fakequant as fq
from fakequant import LayerConfig, QuantConfig, QuantSpec, presets, recipes, reference_formats
from tiny_language_models import BF16, TARGET, WORDS, assert_same_bits, batch, bits, make, prepared, weights


def test_embeddings_and_norms_stay_in_float():
    floats = fq.summary(prepared()).floats
    assert floats["model.embed_tokens"] == "Embedding layers stay in float in the engines of this target"
    assert any("norm" in path for path in floats)
    assert not any("proj" in path for path in floats)


def test_a_head_that_shares_its_weight_with_the_embedding_stays_in_float(tmp_path):
    model = fq.prepare(
        make("llama", tie_word_embeddings=True), recipes.int4_weight_only(32, target=TARGET), batch()
    ).eval()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert fq.summary(model).floats["lm_head"] == "it shares its weight with model.embed_tokens, which stays in float"
    written = fq.export_compressed_tensors(model, tmp_path / "folder")
    assert written.ignored == ("lm_head",)


def test_a_head_of_its_own_is_quantized():
    assert "lm_head" not in fq.summary(prepared()).floats


def test_a_model_of_layers_without_a_place_is_refused():
    """GPT-2 has Conv1D layers and a head that shares its weight."""
    config = transformers.GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=1, n_head=2, n_positions=32)
    model = transformers.GPT2LMHeadModel(config)
    with pytest.raises(ValueError, match=r"Nothing in the model would be quantized") as error:
        fq.prepare(model, recipes.int4_weight_only(32, target=TARGET))
    assert "Conv1D" in str(error.value)
    assert not any(isinstance(module, fq.nn.QuantizedLayer) for module in model.modules())


def test_operands_are_not_quantized():
    config = QuantConfig(
        default=LayerConfig(weight=presets.int8(), input=presets.uint8()), operands=presets.uint8(), attention=True,
        target=TARGET,
    )  # fmt: skip
    model = fq.prepare(make(), config, batch())
    names = {path.rpartition(".")[2] for path, _ in fq.nn.named_quantizers(model)}
    assert names == {"weight_quantizer", "input_quantizer"}


@pytest.mark.parametrize("case", ["w8a8 per token", "int4 groups", "fp8 weights"])
def test_biases_are_added_in_float(case):
    model = prepared("llama", case)
    layer = model.model.layers[0].mlp.up_proj
    x = torch.randn(2, 3, 64)
    with torch.no_grad():
        inputs = x if layer.input_quantizer is None else layer.input_quantizer(x)
        weight = layer._fakequant.quantized_weight(layer)
        assert_same_bits(layer(x), torch.nn.functional.linear(inputs, weight, layer.bias))
    assert bool(layer.bias.any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_scales_have_the_dtype_of_the_model(dtype):
    model = fq.prepare(make("llama", dtype), weights(presets.int8(), input=presets.uint8()), batch())
    fq.calibrate(model, [batch()])
    model.eval()(**batch())
    for _, quantizer in fq.nn.named_quantizers(model):
        assert quantizer.spec.scale_format == str(dtype).removeprefix("torch.")
        scale = quantizer.qparams().scale
        assert_same_bits(scale.to(dtype).float(), scale.float())


def test_block_scales_keep_their_format():
    for case, expected in (("mxfp4", "e8m0"), ("nvfp4", "e4m3fn")):
        quantizer = prepared("llama", case).lm_head.weight_quantizer
        assert quantizer.spec.scale_format == expected
    assert prepared("llama", "nvfp4").lm_head.weight_quantizer.spec.scale_rule == "divided"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(weight=presets.int16()), "has more than 8 bits"),
        (dict(weight=presets.fp8_e5m2()), "has no type there"),
        (dict(weight=presets.mxint8()), "has no type there"),
        (dict(weight=QuantSpec(axis=1)), "has scales along the inputs"),
        (dict(weight=QuantSpec(axis=0, group_size=16)), "has groups along the outputs"),
        (dict(weight=QuantSpec(axis=-1, group_size=16, group_rows=16)), "has blocks of rows"),
        (dict(weight=presets.fp8_e4m3(group_size=16)), "has a float scale per group"),
        (dict(weight=presets.int8(), input=presets.fp8_e4m3(group_size=24)), "does not divide"),
        (dict(weight=presets.int8(), input=presets.fp8_e4m3(group_size=16, group_rows=2)), "along another axis"),
        (dict(weight=presets.int8(), input=QuantSpec(narrow_range=True)), "has a narrow range"),
        (dict(weight=presets.int8(), input=presets.fp8_e5m2()), "none of the grids of inputs"),
        (dict(weight=presets.int8(), input=presets.int16()), "none of the grids of inputs"),
        (dict(weight=presets.int8(), output=presets.uint8()), "its output would be quantized"),
    ],
    ids=str,
)  # fmt: skip
def test_specs_that_engines_do_not_have_are_refused_with_the_layer(change, message):
    config = recipes.int4_weight_only(32, target=TARGET)
    config = dataclasses.replace(
        config, rules=(fq.config.Rule(path="*.0.mlp.up_proj", use=LayerConfig(**change)), *config.rules)
    )
    with pytest.warns(UserWarning, match=rf"(?s)model\.layers\.0\.mlp\.up_proj.*{message}"):
        model = fq.prepare(make(), config, batch())
    assert message in fq.summary(model).floats["model.layers.0.mlp.up_proj"]


def test_a_group_that_does_not_divide_is_refused_with_the_layer():
    with pytest.warns(UserWarning, match=r"(?s)model\.layers\.0\.mlp\.down_proj.*(40|group)"):
        model = fq.prepare(make(intermediate_size=80), recipes.int4_weight_only(32, target=TARGET), batch())
    assert "down_proj" in " ".join(fq.summary(model).floats)


def test_the_inputs_of_experts_stay_in_float():
    model = prepared("mixtral", "w8a8 static")
    found = [path for path, _ in fq.nn.named_quantizers(model) if "experts" in path]
    assert found
    assert all(path.endswith("weight_quantizer") for path in found)


@pytest.mark.parametrize(
    "case", ["uint4 groups", "w8a8 static", "fp8 static", "mxfp4", "nvfp4", "fp8 blocks, shorter", "nvfp4 inputs"]
)
def test_a_prepared_model_is_saved_and_loaded_with_its_state(case):
    """A state_dict of a prepared model fits a model that is prepared in the same way."""
    model, other = prepared("llama", case), prepared("llama", case)
    model(**batch())
    with torch.no_grad():
        for value in other.parameters():
            value.mul_(0.5)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(bits(other(**batch()).logits), bits(model(**batch()).logits))


def test_the_dtype_of_a_model_is_that_of_its_scales_after_loading(tmp_path):
    model = prepared("llama", "int4 groups bfloat16")
    fq.export_compressed_tensors(model, tmp_path / "folder")
    again = fq.load_grids(make("llama", BF16), tmp_path / "folder", batch())
    assert again.lm_head.weight_quantizer.spec.scale_format == "bfloat16"


def test_a_bias_is_added_in_float_also_if_the_scale_of_the_sums_is_known():
    """Integer runtimes round it to that scale; engines that dequantize do not."""
    torch.manual_seed(0)
    layer = fq.LayerConfig(weight=fq.presets.int8(), input=fq.presets.uint8())
    x = torch.randn(4, 8)
    outputs = {}
    for target in ("generic", "compressed-tensors"):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(8, 3))
        model = fq.prepare(model, fq.QuantConfig(default=layer, target=target), x)
        model = fq.calibrate(model, [x], progress=False).eval()
        weight = fq.nn.quantized_weight(model[0])
        exact = torch.nn.functional.linear(model[0].input_quantizer(x), weight, model[0].bias)
        outputs[target] = torch.equal(model(x), exact)
    assert outputs == {"generic": False, "compressed-tensors": True}


# --- inputs --------------------------------------------------------------------------------------------


def _inputs(dtype):
    """Returns rows of many magnitudes, with zeros, powers of two and their neighbours, and ties of all formats."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 256, generator=generator)
    x *= 2.0 ** torch.randint(-6, 8, (512, 16), generator=generator).repeat_interleave(16, 1)
    x[0], x[1, :32], x[2] = 0, -0.0, 1e-30
    x[3], x[4], x[5] = torch.arange(256) / 16, torch.arange(256) / 64 - 2, 448 * 1.0625
    x[6:38, ::16] = 2.0 ** torch.arange(-16, 16)[:, None] * 1.75
    return x.to(dtype)[None]


_INPUTS = {
    "NVFP4": (presets.nvfp4(), torch.bfloat16), "NVFP4 float32": (presets.nvfp4(), torch.float32),
    "NVFP4 float16": (presets.nvfp4(), torch.float16), "MXFP8": (presets.mxfp8(), BF16),
    "MXFP8 float32": (presets.mxfp8(), torch.float32), "MXFP4": (presets.mxfp4(), BF16),
    "FP8_BLOCK": (presets.fp8_e4m3(group_size=128), torch.float32),
}  # fmt: skip


@pytest.mark.parametrize("kind", _INPUTS)
def test_inputs_have_the_bits_of_compressed_tensors(kind):
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    spec, dtype = _INPUTS[kind]
    layer = torch.nn.Linear(256, 8, bias=False).to(dtype)
    config = LayerConfig(weight=presets.fp8_e4m3(), input=spec)
    model = fq.prepare(torch.nn.Sequential(layer), fq.QuantConfig(default=config, target=TARGET))
    quantizer, x = model[0].input_quantizer, _inputs(dtype)
    options = {}
    if spec.scale_format == "e4m3fn":
        quantizer.set_qparams(torch.tensor(2688 / 111.0), torch.tensor(0))  # which some blocks exceed
        options["global_scale"] = quantizer.scale.reshape(1)
    args = preset_name_to_scheme(kind.split()[0], ["Linear"]).input_activations
    scale, zero_point = compute_dynamic_scales_and_zp(x, args, layer, **options)
    theirs = fake_quantize(x, scale, zero_point, args, **options)
    ours = model.eval()[0].input_quantizer(x)
    assert_same_bits(ours.detach() + 0, theirs + 0)  # -0 of e2m1 is 0 there
    if spec.scale_format == "e4m3fn":
        absmax = x.float().abs().unflatten(-1, (-1, 16)).amax(-1).numpy()
        name = str(dtype).removeprefix("torch.")
        numpy_dtype = ml_dtypes.bfloat16 if name == "bfloat16" else name
        expected = reference_formats.nvfp4_scales(absmax, tensor_scale=2688 / np.float32(111), dtype=numpy_dtype)
        assert np.array_equal(quantizer.qparams_for(x).scale.numpy(), expected.scale)


def test_the_scale_of_the_tensor_is_calibrated_and_then_fixed():
    x = _inputs(BF16)
    config = fq.QuantConfig(default=LayerConfig(weight=presets.nvfp4(), input=presets.nvfp4()), target=TARGET)
    model = fq.prepare(torch.nn.Sequential(torch.nn.Linear(256, 8).to(BF16)), config)
    with pytest.raises(RuntimeError, match=r"0\.input.* has not observed a finite value"):
        model.eval()(x)
    fq.calibrate(model, [x * 0.5, x], progress=False)
    quantizer = model[0].input_quantizer
    absmax = (x.float().abs().max() * 0.5 + x.float().abs().max()) / 2  # the mean over batches
    assert_same_bits(quantizer.scale.reshape(()), (1 / absmax) * 2688)
    before = quantizer.scale.clone()
    y = x.clone().requires_grad_()
    quantizer.eval()(y * 8).float().sum().backward()
    assert torch.equal(quantizer.scale, before)
    assert 0 < int((y.grad == 0).sum()) < y.numel()  # saturated values have no gradient
    with pytest.raises(ValueError, match="calibrated scale for its tensor"):
        fq.convert(model)
    with pytest.raises(ValueError, match="is calibrated, but Dynamic"):
        type(quantizer)(quantizer.spec, fq.observers.Dynamic())
