"""Models that cannot be exported, folders that cannot be written: nothing is left, and the model is as it was."""

import errno

import pytest
import torch
import transformers
from safetensors import torch as safetensors_torch
from torch import nn

import fakequant as fq
from fakequant import LayerConfig, QuantConfig, presets, recipes
from tiny_language_models import TARGET, batch, bits, make, prepared, weights


def _state(model):
    """Returns all that an export must leave alone."""
    config = model.config
    return (
        type(model),
        model.training,
        {name: repr(value) for name, value in config.__dict__.items()},
        getattr(config, "quantization_config", "none"),
        {name: bits(value).clone() for name, value in model.state_dict().items()},
    )


def _assert_same(before, after):
    assert before[:4] == after[:4]
    assert before[4].keys() == after[4].keys()
    assert all(torch.equal(value, after[4][name]) for name, value in before[4].items())


def _refused(model, place, error, message):
    before = _state(model)
    with pytest.raises(error, match=message):
        fq.export_compressed_tensors(model, place / "folder")
    _assert_same(before, _state(model))
    assert list(place.iterdir()) == []


def test_a_model_that_is_not_of_transformers_is_refused(tmp_path):
    model = fq.prepare(nn.Sequential(nn.Linear(64, 64)), recipes.int4_weight_only(32))
    with pytest.raises(TypeError, match=r"must be a transformers\.PreTrainedModel.*got .*\n.*export_onnx"):
        fq.export_compressed_tensors(model, tmp_path / "folder")
    with pytest.raises(TypeError, match="model"):
        fq.export_compressed_tensors("model", tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_not_prepared_is_refused(tmp_path):
    _refused(make(), tmp_path, ValueError, "prepare")


def _layer_norms():
    config = transformers.StableLmConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.StableLmForCausalLM(config).eval()


def test_models_that_are_not_what_their_class_makes_are_refused(tmp_path):
    """A folder would be loaded with LayerNorm, and without biases."""
    model = _layer_norms()
    fq.ptq.rotate(model, batch())
    fq.prepare(model, recipes.int4_weight_only(32, target=TARGET), batch()).eval()
    reason = (
        r"not what StableLmForCausalLM makes of its config: it has lm_head\.bias, .*; "
        r"lacks model\.layers\.0\.\w+\.bias, .*; "
        r"does not compute LayerNorm in model\.layers\.0\.input_layernorm, .*\n.*`rotate` changes"
    )
    _refused(model, tmp_path, ValueError, reason)
    rotated = make()
    fq.ptq.rotate(rotated, batch())
    fq.prepare(rotated, recipes.int4_weight_only(32, target=TARGET), batch()).eval()
    assert fq.export_compressed_tensors(rotated, tmp_path / "rotated").layers


def test_inputs_without_a_scale_are_named(tmp_path):
    model = fq.prepare(make(), weights(presets.int8(), input=presets.uint8()), batch()).eval()
    _refused(model, tmp_path, ValueError, r"q_proj cannot be stored .* its input has no scale yet; calibrate")


def test_embeddings_and_tied_heads_of_a_model_for_another_target_are_named(tmp_path):
    model = fq.prepare(make(), recipes.int4_weight_only(32), batch()).eval()
    _refused(model, tmp_path, ValueError, r"model\.embed_tokens cannot be stored .*: it is a Embedding, and only")
    config = recipes.int4_weight_only(32).skip("*embed_tokens")
    model = fq.prepare(make(tie_word_embeddings=True), config, batch()).eval()
    _refused(model, tmp_path, ValueError, r"lm_head cannot be stored .*: it shares its weight .*\nUse config.skip")


def test_quantized_operands_are_named(tmp_path):
    config = QuantConfig(default=LayerConfig(weight=presets.int8()), operands=presets.uint8())
    model = fq.prepare(make(), config, batch())
    fq.calibrate(model, [batch()])
    _refused(model.eval(), tmp_path, ValueError, r"also quantize other results\.\nPrepare .*compressed-tensors")


def test_a_model_whose_weights_are_not_quantized_now_is_refused(tmp_path):
    model = prepared()
    for _, quantizer in fq.nn.named_quantizers(model):
        quantizer.quantizing = False
    _refused(model, tmp_path, ValueError, "No layer of the model has a quantized weight")


def test_a_folder_that_is_not_empty_is_refused(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"is a folder that is not empty\.\nUse a path that does not exist"):
        fq.export_compressed_tensors(prepared(), tmp_path / "folder")
    assert [file.name for file in (tmp_path / "folder").iterdir()] == ["mine.txt"]
    with pytest.raises(FileExistsError, match="is a file"):
        fq.export_compressed_tensors(prepared(), tmp_path / "folder/mine.txt")
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        fq.export_compressed_tensors(prepared(), tmp_path / "none/folder")
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "folder").mkdir()
    fq.export_compressed_tensors(prepared(), tmp_path / "folder")
    assert (tmp_path / "folder/config.json").is_file()
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("case", ["int4 groups", "mixed", "w8a8 static"])
def test_the_model_is_as_it_was_after_an_export(case, tmp_path):
    model = prepared("llama", case)
    model.config.architectures = None
    model(**batch())
    model.train()
    before = _state(model)
    fq.export_compressed_tensors(model, tmp_path / "folder")
    _assert_same(before, _state(model))
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize("at", ["first shard", "last shard", "tokenizer"])
def test_a_full_disk_leaves_nothing(at, tmp_path, monkeypatch):
    model = prepared("mixtral")
    before = _state(model)
    full, calls = OSError(errno.ENOSPC, "No space left on device"), []
    write = safetensors_torch.save_file

    def fail(*args, **options):
        calls.append(args)
        if at == "first shard" or len(calls) > 1:
            raise full
        return write(*args, **options)

    class Tokenizer:
        def save_pretrained(self, folder):
            (folder / "tokenizer.json").write_text("{")
            raise full

    if at != "tokenizer":
        import transformers.modeling_utils as modeling

        for module in (modeling, safetensors_torch):
            for name in ("save_file", "safe_save_file"):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, fail)
    with pytest.raises(OSError, match="No space left"):
        fq.export_compressed_tensors(
            model, tmp_path / "folder", Tokenizer() if at == "tokenizer" else None, max_shard_size="50KB"
        )
    _assert_same(before, _state(model))
    assert list(tmp_path.iterdir()) == []


def test_an_export_after_a_failure_is_complete(tmp_path):
    model = fq.prepare(make(), weights(presets.int8(), input=presets.uint8()), batch())
    with pytest.raises(ValueError, match="calibrate"):
        fq.export_compressed_tensors(model, tmp_path / "folder")
    fq.calibrate(model, [batch()])
    fq.export_compressed_tensors(model.eval(), tmp_path / "folder")
    assert fq.audit(model, tmp_path / "folder").ok


def test_two_calls_with_grids_of_their_own_are_named(tmp_path):
    """A layer has a place for one grid of its input."""

    class Twice(type(make())):
        def forward(self, input_ids, **options):
            hidden = self.model(input_ids=input_ids).last_hidden_state
            return self.lm_head(hidden) + self.lm_head(hidden * 2)

    model = Twice(make().config).eval()
    config = QuantConfig(default=LayerConfig(weight=presets.int8(), input=presets.uint8()), target=TARGET)
    model = fq.prepare(model, config, batch())
    fq.calibrate(model, [batch()])
    _refused(model.eval(), tmp_path, ValueError, r"lm_head cannot be stored .* called 2 times with inputs on grids")
