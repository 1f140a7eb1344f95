"""Models and files that cannot be exported to GGUF: one line says what and why, nothing is left, nothing is changed."""

import pytest
import torch
import transformers
from torch import nn

import fakequant as fq
from fakequant import presets, recipes
from tiny_gguf_models import float_model, prepared, texts, write_base
from tiny_language_models import bits


def _refused(model, place, message, error=ValueError, **more):
    before = {name: bits(value).clone() for name, value in model.state_dict().items()}
    there = sorted(place.iterdir())
    with pytest.raises(error, match=message):
        fq.export_gguf(model, place / "model.gguf", **more)
    assert sorted(place.iterdir()) == there
    assert all(torch.equal(before[name], bits(value)) for name, value in model.state_dict().items())


def test_models_without_quantizers(tmp_path):
    _refused(nn.Linear(32, 32), tmp_path, r"must be a transformers.PreTrainedModel", TypeError)
    _refused(float_model(), tmp_path, r"prepare")
    model = prepared()
    for module in model.modules():
        if isinstance(module, fq.nn.FakeQuantize):
            module.quantizing = False
    _refused(model, tmp_path, r"No layer .* quantized")


def test_other_specs_are_named(tmp_path):
    model = fq.prepare(float_model(), recipes.int4_weight_only(32), texts())
    _refused(model, tmp_path, r"model\.embed_tokens cannot be stored in llama\.cpp: its weight is int4.* no block type")
    config = recipes.gguf().rule("*up_proj", weight=presets.q4_0(), input=presets.int8())
    with pytest.warns(UserWarning, match=r"up_proj: its input in llama\.cpp: int8 .* not how kernels round inputs"):
        fq.prepare(float_model(), config)


def test_unknown_architectures_are_named(tmp_path):
    config = transformers.GPT2Config(vocab_size=64, n_embd=64, n_layer=1, n_head=2, n_positions=32)
    model = fq.prepare(transformers.GPT2LMHeadModel(config), recipes.gguf("q8_0").skip("*wte").skip("*wpe"))
    _refused(model, tmp_path, r"llama, mistral, .*bert, and the model is 'gpt2'\.\n.*convert_hf_to_gguf.* `base`")


def test_models_that_are_not_what_their_class_makes(tmp_path):
    model = float_model()
    model.lm_head.bias = nn.Parameter(torch.ones(model.lm_head.out_features))
    model = fq.prepare(model, recipes.gguf("q8_0"), texts())
    _refused(model, tmp_path, r"not what LlamaForCausalLM makes of its config: it has lm_head\.bias\. What loads it")


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("llama", {"hidden_act": "gelu"}, "activation is 'gelu' instead of 'silu'"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8}, "sliding window"),
        ("gemma2", {"query_pre_attn_scalar": 256}, "query_pre_attn_scalar` is 256, and llama.cpp computes with 16"),
        ("gemma3", {"layer_types": ["full_attention"] * 7}, "not every 6th layer"),
        ("qwen3_moe", {"norm_topk_prob": False}, "`norm_topk_prob` is not True"),
    ],
)
def test_what_the_runtime_does_not_compute_is_named(name, changes, problem, tmp_path):
    model = prepared(name, "q8_0")
    for key, value in changes.items():
        setattr(model.config, key, value)
    _refused(model, tmp_path, problem)


def test_rows_that_are_no_multiple_of_a_block(tmp_path):
    with pytest.warns(UserWarning, match=r"down_proj: `group_size` 32 does not divide axis 1 of length 80"):
        model = prepared("llama", "q4_0", intermediate_size=80)
    fq.export_gguf(model, tmp_path / "model.gguf")
    pytest.importorskip("cyllama")
    assert fq.verify(model, tmp_path / "model.gguf", [texts()]).ok


def test_tied_layers_that_are_not_quantized_alike(tmp_path):
    model = fq.prepare(float_model("qwen3", tie_word_embeddings=True), recipes.gguf("q4_0").skip("*embed_tokens"))
    _refused(model, tmp_path, r"lm_head and model\.embed_tokens share a weight, .* only lm_head is quantized")
    config = recipes.gguf("q4_0").rule("*lm_head", weight=presets.q4_0())
    model = fq.prepare(float_model("qwen3", tie_word_embeddings=True), config)
    _refused(model, tmp_path, r"embed_tokens and lm_head share a weight, .* different codes")


def test_bases_of_other_models(tmp_path):
    model = prepared("llama", "q4_0")
    other = float_model()
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight[5, 5] += 1
    base = write_base(other, tmp_path / "base.gguf")
    _refused(model, tmp_path, r"blk\.1\.ffn_down\.weight has other rows than .*down_proj", base=base)
    other = float_model()
    with torch.no_grad():
        other.model.norm.weight[3] += 1
    base = write_base(other, tmp_path / "base.gguf")
    _refused(model, tmp_path, r"output_norm\.weight has other values than model\.norm\.weight\.\n.*convert", base=base)
    base = write_base(float_model(num_hidden_layers=1), tmp_path / "base.gguf")
    _refused(model, tmp_path, r"does not belong to the model: ", base=base)
    tied = prepared("llama", "q4_0", tie_word_embeddings=True)
    base = write_base(float_model(), tmp_path / "base.gguf")
    _refused(tied, tmp_path, r"output\.weight", base=base)


def test_bases_that_are_quantized_or_damaged(tmp_path):
    model = prepared("llama", "q4_0")
    base = write_base(float_model(), tmp_path / "base.gguf", "Q8_0")
    _refused(model, tmp_path, r"token_embd\.weight in .* is already quantized, as Q8_0", base=base)
    base = write_base(float_model(), tmp_path / "base.gguf")
    base.write_bytes(base.read_bytes()[:20_000])
    _refused(model, tmp_path, r"no GGUF file, or it is damaged", base=base)
    base.write_text("not a file of this format")
    _refused(model, tmp_path, r"no GGUF file, or it is damaged", base=base)
    _refused(model, tmp_path, r"There is no file", FileNotFoundError, base=tmp_path / "none.gguf")


def test_a_16_bit_base_that_rounds_float_layers(tmp_path):
    model = fq.prepare(float_model(), recipes.gguf("q4_0").skip("*up_proj"))
    base = write_base(float_model(), tmp_path / "base.gguf", "F16")
    _refused(model, tmp_path, r"blk\.0\.ffn_up\.weight has other values", base=base)


def test_tokenizers(tmp_path):
    from tokenizers import Tokenizer, models

    model = prepared("llama", "q8_0")
    _refused(model, tmp_path, r"must be a fast tokenizer of transformers, got str", tokenizer="gpt2")
    words = {chr(97 + number): number for number in range(20)}
    unigram = Tokenizer(models.Unigram([(word, 0.0) for word in words]))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=unigram)
    _refused(model, tmp_path, r"does not know this tokenizer \(Unigram.*\n.*`base`", tokenizer=tokenizer)
    base = write_base(float_model(), tmp_path / "base.gguf")
    _refused(model, tmp_path, r"`tokenizer` must be None with `base`", tokenizer=tokenizer, base=base)


def test_folders_that_do_not_exist(tmp_path):
    model = prepared("llama", "q8_0")
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        fq.export_gguf(model, tmp_path / "none" / "model.gguf")
    with pytest.raises(IsADirectoryError):
        fq.export_gguf(model, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    from fakequant._export.gguf import file_tensors

    model = prepared("llama", "q8_0")
    (tmp_path / "model.gguf").write_bytes(b"old")
    monkeypatch.setattr(file_tensors, "pack", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fq.export_gguf(model, tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1


def test_batches_without_tokens(tmp_path):
    pytest.importorskip("cyllama")
    model = prepared("llama", "q8_0")
    fq.export_gguf(model, tmp_path / "model.gguf")
    with pytest.raises(ValueError, match="nothing to compare"):
        fq.verify(model, tmp_path / "model.gguf", [])
    with pytest.raises(ValueError, match="input_ids"):
        fq.verify(model, tmp_path / "model.gguf", [{"inputs_embeds": torch.ones(1, 2, 64)}])
