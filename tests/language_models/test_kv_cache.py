"""Keys and values in the cache of attention: quantized, then stored, in training, `generate`, and folders."""

import copy
import json
import pickle
import subprocess

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

import fakequant as fq
from fakequant import QuantSpec, presets, recipes
from fakequant._runtimes.transformers import running
from fakequant.integrations.transformers import from_pretrained, save_pretrained
from tiny_language_models import TARGET, WORDS, assert_same_bits, batch, load, logits, make, tensors_of

SPECS = {
    "fp8": presets.fp8_e4m3(),
    "int8": QuantSpec(),
    "head": QuantSpec(axis=1),
    "token": presets.int8_per_token(),
    "blocks": QuantSpec(narrow_range=True, axis=-1, group_size=8, scale_format="float16"),
    "mxfp8": presets.mxfp8(axis=-1),
}
STATIC = ("fp8", "int8", "head")


def prepared(name="llama", spec="fp8", dtype=torch.float32, target="generic", **changes):
    changes = {"head_dim": 32, **changes} if spec == "mxfp8" else changes
    config = recipes.int4_weight_only(32, target=target, kv_cache=SPECS.get(spec, spec))
    model = fq.prepare(make(name, dtype, **changes), config, batch())
    return fq.calibrate(model, [batch(2), batch(3)], progress=False).eval()


def generate(model, *, use_cache=True):
    return model.generate(
        **batch(), max_new_tokens=20, do_sample=False, use_cache=use_cache, pad_token_id=0, eos_token_id=None
    )


def attention(model, number=0):
    return model.model.layers[number].self_attn


@pytest.fixture
def here(monkeypatch):
    """Runs folders in this process, which is faster."""

    def run(command, **options):
        running._main(command[-1])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(running.subprocess, "run", run)


# --- generate -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "spec"), [*(("llama", spec) for spec in SPECS), ("qwen3", "fp8"), ("qwen2", "token"), ("gemma3", "int8")]
)
def test_tokens_with_and_without_a_cache_are_the_same(name, spec):
    model = prepared(name, spec)
    wanted = generate(model)
    assert torch.equal(generate(model, use_cache=False), wanted)
    with fq.nn.frozen_weights(model):
        assert torch.equal(generate(model), wanted)
    assert_same_bits(logits(model, {**batch(), "use_cache": False}), logits(model))
    converted = fq.convert(model)
    assert torch.equal(generate(converted), wanted)
    assert torch.equal(generate(converted, use_cache=False), wanted)


@pytest.mark.parametrize("spec", SPECS)
def test_the_cache_holds_quantized_keys_and_values(spec):
    """Step by step, logits differ from those of one run in last bits: products of one row sum in another order."""
    model = prepared("llama", spec)
    given, seen = batch()["input_ids"], []
    quantizers = [attention(model).key_quantizer, attention(model).value_quantizer]
    for quantizer in quantizers:
        quantizer.register_forward_hook(lambda module, args, y: seen.append((args[0].clone(), y.clone())))
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        whole = model(given, use_cache=False).logits
        seen.clear()
        steps = [model(given[:, i : i + 1], past_key_values=cache, use_cache=True).logits for i in range(6)]
    torch.testing.assert_close(torch.cat(steps, 1), whole, atol=0.02 * float(whole.abs().max()), rtol=0)
    stored = cache.layers[0]
    assert_same_bits(stored.keys, torch.cat([y for _, y in seen[::2]], 2))
    assert_same_bits(stored.values, torch.cat([y for _, y in seen[1::2]], 2))
    for number, tensor in enumerate((stored.keys, stored.values)):
        assert_same_bits(quantizers[number](torch.cat([x for x, _ in seen[number::2]], 2)), tensor)
        assert not torch.equal(tensor, torch.cat([x for x, _ in seen[number::2]], 2))


def test_a_cache_given_by_position_or_by_an_older_name_is_replaced():
    sizes = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.GPTNeoXConfig(**sizes, intermediate_size=32, bos_token_id=0, eos_token_id=0)  # `layer_past`
    torch.manual_seed(0)
    model = fq.prepare(transformers.GPTNeoXForCausalLM(config), recipes.int4_weight_only(kv_cache=QuantSpec(axis=1)))
    model = fq.calibrate(model, [batch()], progress=False).eval()
    module = model.gpt_neox.layers[0].attention
    assert module.key_quantizer.scale.shape == (2,)
    assert torch.equal(generate(model), generate(model, use_cache=False))
    seen = []
    module.key_quantizer.register_forward_hook(lambda *found: seen.append(found))
    x, rotary = torch.randn(1, 3, 32), model.gpt_neox.rotary_emb(torch.randn(1, 3, 32), torch.arange(3)[None])
    for cache in (None, transformers.DynamicCache(config=config)):
        module(x, None, cache, position_embeddings=rotary)
    assert len(seen) == 2
    assert cache.get_seq_length() == 3


class Ignoring(nn.Module):
    layer_idx = 0

    def __init__(self):
        super().__init__()
        self.k_proj = nn.Linear(32, 32)

    def forward(self, x, past_key_values=None):
        return self.k_proj(x)


def test_attention_that_does_not_use_its_cache_is_an_error():
    model = fq.prepare(nn.Sequential(Ignoring()), recipes.int4_weight_only(kv_cache=SPECS["int8"]))
    with pytest.raises(RuntimeError, match="Ignoring has not passed its keys and values"):
        model(torch.ones(1, 32))


# --- training -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["fp8", "token"])
def test_training_quantizes_keys_and_values(spec):
    grads = {}
    for checkpoints in (False, True):
        torch.manual_seed(0)
        model = prepared(spec=spec).train()
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        loss = model(**batch(), labels=batch()["input_ids"]).loss
        loss.backward()
        grads[checkpoints] = {name: p.grad for name, p in model.named_parameters()}
    assert grads[False]["model.layers.0.self_attn.k_proj.weight"].abs().sum() > 0
    for name, grad in grads[False].items():
        assert_same_bits(grads[True][name], grad)
    quantized = logits(model.eval())
    fq.nn.switch_quantizers(attention(model, 1), quantizing=False)
    assert not torch.equal(logits(model), quantized)


def test_ranges_are_those_of_all_keys_after_rotation():
    model = prepared(spec="int8")
    seen = []
    attention(model).key_quantizer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    fq.calibrate(model, [batch(7)], progress=False)
    largest = float(seen[0].abs().max())
    assert_same_bits(attention(model).key_quantizer.scale, torch.tensor(largest) / 127.5)


def test_copies_states_and_unprepare():
    plain = make()
    wanted = logits(plain)
    names = list(plain.state_dict())
    model = prepared()
    found, tokens = logits(model), generate(model)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_bits(logits(made), found)
        assert torch.equal(generate(made), tokens)
        fq.nn.switch_quantizers(made, quantizing=False)  # of its own
    assert_same_bits(logits(model), found)
    other = fq.prepare(make(), recipes.int4_weight_only(32, kv_cache=SPECS["fp8"]), batch()).eval()
    other.load_state_dict(model.state_dict())
    assert_same_bits(logits(other), found)
    again = fq.unprepare(model)
    assert_same_bits(logits(again), wanted)
    assert list(again.state_dict()) == names
    assert not attention(again)._forward_pre_hooks
    assert not attention(again)._forward_hooks


def test_folders_of_prepared_models(tmp_path):
    model = prepared()
    save_pretrained(model, tmp_path)
    assert_same_bits(logits(from_pretrained(transformers.LlamaForCausalLM, tmp_path).eval()), logits(model))


@pytest.mark.parametrize("spec", ["fp8", "int8", "token"])
def test_converted_files(spec, tmp_path):
    converted = fq.convert(prepared(spec=spec))
    fq.save_converted(converted, tmp_path / "model.safetensors")
    loaded = fq.load_converted(make(), tmp_path / "model.safetensors")
    assert_same_bits(logits(loaded), logits(converted))
    assert torch.equal(generate(loaded), generate(converted))
    assert type(loaded(**batch()).past_key_values.layers[0].keys) is torch.Tensor


def test_compiled_models_and_diagnoses():
    model = prepared()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        assert_same_bits(compiled(**batch(), use_cache=False).logits, logits(model))
    rows = {layer.path: layer for layer in fq.summary(model).layers}
    assert rows["model.layers.1.self_attn.value_quantizer"].output == "e4m3fn, per tensor"
    assert fq.health(model)
    assert fq.compare(make(), model, [batch()]).layers
    config = recipes.int4_weight_only(32, kv_cache=SPECS["int8"]).skip(type="Linear").skip(type="Embedding")
    ranked = fq.sensitivity(make(), config, data=[batch()], progress=False)  # of keys and values only
    assert {layer.path: layer.cost != 0 for layer in ranked.layers} == {
        f"model.layers.{number}.self_attn": True for number in range(2)
    }


# --- folders --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "spec"), [("llama", "fp8"), ("qwen3", "head"), ("mixtral", "int8")])
def test_folders_have_the_scheme_and_the_scales(name, spec, tmp_path, here):
    model = prepared(name, spec, target=TARGET)
    report = fq.export_compressed_tensors(model, tmp_path / "folder")
    assert f"keys and values in the cache: {attention(model).key_quantizer.spec}" in str(report)
    written = json.loads((tmp_path / "folder" / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]
    strategy = "attn_head" if spec == "head" else "tensor"
    kind = "float" if spec == "fp8" else "int"
    for key, value in dict(num_bits=8, type=kind, strategy=strategy, symmetric=True, dynamic=False).items():
        assert written[key] == value
    stored = tensors_of(tmp_path / "folder")
    for number in range(2):
        for key, quantizer in (("k_scale", "key_quantizer"), ("v_scale", "value_quantizer")):
            scale = stored[f"model.layers.{number}.self_attn.{key}"]
            assert scale.shape == ((2, 1, 1) if spec == "head" else (1,))
            assert_same_bits(scale.flatten(), getattr(attention(model, number), quantizer).scale.flatten())
    assert_same_bits(logits(load(tmp_path / "folder", model)), logits(model))
    assert torch.equal(generate(load(tmp_path / "folder", model)), generate(model))
    found = fq.verify(model, tmp_path / "folder", [batch()])
    assert found.ok, str(found)

    again = fq.load_grids(make(name), tmp_path / "folder", batch()).eval()
    assert_same_bits(logits(again), logits(model))
    fq.export_compressed_tensors(again, tmp_path / "again")
    for key, value in tensors_of(tmp_path / "again").items():
        assert_same_bits(value, stored[key])


def test_verify_names_a_changed_scale_and_a_missing_scheme(tmp_path, here):
    model = prepared(target=TARGET)
    folder = tmp_path / "folder"
    fq.export_compressed_tensors(model, folder)
    tensors = tensors_of(folder)
    name = "model.layers.1.self_attn.v_scale"
    save_file({**tensors, name: tensors[name] * 2}, folder / "model.safetensors", metadata={"format": "pt"})
    found = fq.verify(model, folder, [batch()])
    assert not found.ok
    assert "model.layers.1.self_attn.v_scale" in found.problem
    without = {key: value for key, value in tensors.items() if key != name}
    save_file(without, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"has a kv_cache_scheme, but no model\.layers\.1\.self_attn\.v_scale"):
        fq.load_grids(make(), folder, batch())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = None
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="The `kv_cache_scheme` in the quantization_config"):
        fq.verify(model, folder, [batch()])


def test_verify_says_that_transformers_divides_in_bfloat16(tmp_path, here):
    model = prepared(dtype=torch.bfloat16, target=TARGET)
    scale = attention(model).key_quantizer.scale
    assert_same_bits(scale, scale.bfloat16().float())
    fq.export_compressed_tensors(model, tmp_path / "folder")
    found = fq.verify(model, tmp_path / "folder", [batch()])
    assert "transformers divides keys and values by their scale in bfloat16" in found.problem


# --- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "target", "words"),
    [
        (presets.nvfp4(), "generic", "depend on the whole tensor"),
        (QuantSpec(axis=2), "generic", "per head"),
        (QuantSpec(axis=-1), "generic", "per head"),
        (QuantSpec(axis=-1, group_size=5), "generic", "16 features per head, which groups of 5 do not divide"),
        (QuantSpec(bits=4), TARGET, "symmetric 8-bit integers"),
        (presets.uint8(), TARGET, "symmetric 8-bit integers"),
        (presets.int8_per_token(), TARGET, "one calibrated scale per tensor"),
        (QuantSpec(), "llama.cpp", "its caches have the types"),
    ],
)
def test_specs_that_do_not_fit_are_refused_before_anything_changes(spec, target, words):
    model = make()
    config = recipes.gguf("q4_0") if target == "llama.cpp" else recipes.int4_weight_only(32, target=target)
    config = fq.QuantConfig.from_dict({**config.to_dict(), "kv_cache": spec.to_dict()})
    assert fq.QuantConfig.from_json(config.to_json()) == config
    assert config.kv_cache == spec
    with pytest.raises(ValueError, match=words):
        fq.prepare(model, config, batch())
    assert type(model.lm_head) is nn.Linear


def test_models_without_a_cache_are_refused():
    config = recipes.int4_weight_only(kv_cache=QuantSpec())
    with pytest.raises(ValueError, match="no module of the model takes a cache"):
        fq.prepare(nn.Sequential(nn.Linear(32, 32)), config)
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    bart = transformers.BartForConditionalGeneration(transformers.BartConfig(vocab_size=WORDS, **sizes))
    with pytest.raises(ValueError, match="this model has an encoder too"):
        fq.prepare(bart, config)
    with pytest.raises(TypeError, match="`kv_cache` must be a QuantSpec"):
        recipes.int4_weight_only(kv_cache="fp8")


def test_rules_leave_modules_out_and_folders_need_all(tmp_path):
    config = recipes.int4_weight_only(32, target=TARGET, kv_cache=QuantSpec()).skip("model.layers.0.self_attn")
    model = fq.calibrate(fq.prepare(make(), config, batch()), [batch()], progress=False)
    assert not hasattr(attention(model), "key_quantizer")
    assert isinstance(attention(model).k_proj, fq.nn.QuantizedLayer)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn keeps floats"):
        fq.export_compressed_tensors(model, tmp_path / "folder")
    fresh = fq.prepare(make(), recipes.int4_weight_only(32, target=TARGET, kv_cache=QuantSpec()))
    with pytest.raises(ValueError, match="key_quantizer has no scale yet"):
        fq.export_compressed_tensors(fresh, tmp_path / "folder")


def test_folders_need_both_keys_and_values(tmp_path):
    model = prepared(target=TARGET)
    attention(model).value_quantizer.quantizing = False
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn keeps floats"):
        fq.export_compressed_tensors(model, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_onnx_files_have_them_and_executorch_files_do_not(tmp_path):
    model = prepared(spec="int8", use_cache=False)
    fq.export_onnx(model, tmp_path / "model.onnx", batch())
    found = fq.verify(model, tmp_path / "model.onnx", [batch(5)], accuracy_level=1)
    assert found.ok, found.problem
    assert "model.layers.0.self_attn.key_quantizer" in {tensor.path for tensor in found.tensors}
    blocks = prepared(spec="blocks", use_cache=False)
    with pytest.raises(ValueError, match="scales computed at run time, which ONNX has no operators for"):
        fq.export_onnx(blocks, tmp_path / "blocks.onnx", batch())
    with pytest.raises(ValueError, match="quantizes what a cache stores, and files of xnnpack"):
        fq.export_executorch(model, tmp_path / "model.pte", batch())
    with pytest.raises(ValueError, match="files of xnnpack have no place for it"):
        prepared(spec="int8", target="xnnpack")


def test_gguf_files_do_not_tell(tmp_path):
    model = fq.prepare(make(head_dim=32), recipes.gguf("q4_0", kv_cache=presets.q8_0())).eval()
    assert torch.equal(generate(model), generate(model, use_cache=False))
    with pytest.raises(ValueError, match="options --cache-type-k and --cache-type-v"):
        fq.export_gguf(model, tmp_path / "model.gguf")
    for layer in model.model.layers:
        layer.self_attn.key_quantizer.quantizing = layer.self_attn.value_quantizer.quantizing = False
    fq.export_gguf(model, tmp_path / "model.gguf")
