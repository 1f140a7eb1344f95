"""GGUF files in llama.cpp: the weights and outputs that were trained, for every family and type."""

import copy
import json
import pickle

import pytest
import torch
import transformers
from shared.thoroughness import ALL
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import fakequant as fq
from fakequant._export.gguf.file import GgufFile
from fakequant._export.gguf.tokenizers import _RULES
from tiny_gguf_models import KINDS, LONG, NAMES, config_of, float_model, prepared, texts, write_base

pytest.importorskip("cyllama")
_ALL_CASES = [(name, kind) for name in NAMES for kind in KINDS if kind not in LONG or name in ("llama", "qwen3")]
_CASES = _ALL_CASES if ALL else [("llama", "q4_0"), ("llama", "tq2_0"), ("llama", "q4_k"), ("qwen2", "q8_0"),
                                 ("qwen3", "q4_1"),
                                 ("gemma2", "q4_0"), ("gemma3", "q8_0"), ("mixtral", "mxfp4"), ("qwen3_moe", "q4_0"),
                                 ("bert", "q4_0")]  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), _CASES)
def test_the_runtime_computes_what_was_trained(name, kind, tmp_path):
    model = prepared(name, kind)
    written = fq.export_gguf(model, tmp_path / "model.gguf")
    assert kind.upper() in {tensor.type for tensor in written.tensors}
    found = fq.verify(model, tmp_path / "model.gguf", [texts(), texts(2)])
    assert found.ok, found.problem
    assert found.runtime == "llama.cpp"
    assert len(found.tensors) == sum(tensor.spec is not None for tensor in written.tensors)


@pytest.mark.parametrize("kind", ["q4_0", "q8_0", "q4_1", "mxfp4", "q4_k", "q6_k"])
def test_one_token_is_equal_up_to_the_rounding_of_sums(kind, tmp_path):
    """Rounded inputs, block scales and sums: a different rule anywhere would be visible."""
    model = prepared("llama", kind)
    fq.export_gguf(model, tmp_path / "model.gguf")
    found = fq.verify(model, tmp_path / "model.gguf", [{"input_ids": torch.arange(1, 9)[:, None]}])
    assert found.ok
    assert found.outputs.runtime_difference <= 1e-6 * found.outputs.largest


def test_trained_weights_are_exported(tmp_path):
    model = prepared("llama", "q4_0").train()
    optimizer = torch.optim.SGD(fq.nn.param_groups(model), lr=0.1)
    for seed in range(3):
        batch = texts(seed)
        model(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    fq.export_gguf(model, tmp_path / "model.gguf")
    assert fq.verify(model, tmp_path / "model.gguf", [texts()]).ok
    untrained = prepared("llama", "q4_0")
    assert not _is_ok(untrained, tmp_path / "model.gguf")


def test_copies_and_reloaded_models_give_the_same_file(tmp_path):
    model = prepared("qwen3", "q4_0")
    fq.export_gguf(model, tmp_path / "model.gguf")
    fresh = fq.prepare(float_model("qwen3"), config_of("qwen3", "q4_0"))
    fresh.load_state_dict(model.state_dict())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), fresh.train()):
        fq.export_gguf(other, tmp_path / "other.gguf")
        assert (tmp_path / "other.gguf").read_bytes() == (tmp_path / "model.gguf").read_bytes()


def test_the_report_names_every_tensor(tmp_path):
    written = fq.export_gguf(prepared("mixtral", "q8_0"), tmp_path / "model.gguf")
    file = GgufFile(tmp_path / "model.gguf")
    assert {(t.name, t.type, t.shape) for t in written.tensors} == {
        (t.name, t.type, t.shape) for t in file.tensors.values()
    }
    assert written.architecture == "llama"
    assert written.bytes < written.float_bytes
    assert "Q8_0" in str(written)
    sources = {tensor.name: tensor.source for tensor in written.tensors}
    assert sources["blk.1.ffn_up_exps.weight"] == "model.layers.1.mlp.experts.gate_up_proj"


def test_what_an_encoder_leaves_out_is_named(tmp_path):
    written = fq.export_gguf(prepared("bert", "q8_0"), tmp_path / "model.gguf")
    assert written.left_out == ("pooler.dense.weight", "pooler.dense.bias")


def test_llama3_frequencies(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip
    config = float_model().config
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**config.to_dict(), "rope_parameters": rope})
    ).eval()
    model = fq.prepare(model, fq.recipes.gguf("q8_0"))
    fq.export_gguf(model, tmp_path / "model.gguf")
    assert "rope_freqs.weight" in GgufFile(tmp_path / "model.gguf").tensors
    assert fq.verify(model, tmp_path / "model.gguf", [texts(length=24)]).ok


def test_a_tied_embedding_is_one_tensor(tmp_path):
    model = prepared("qwen3", "q4_0", tie_word_embeddings=True)
    written = fq.export_gguf(model, tmp_path / "model.gguf")
    assert "output.weight" not in {tensor.name for tensor in written.tensors}
    assert fq.verify(model, tmp_path / "model.gguf", [texts()]).ok


def test_padding_is_left_out_of_texts(tmp_path):
    model = prepared("llama", "q8_0")
    fq.export_gguf(model, tmp_path / "model.gguf")
    batch = texts()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, -4:] = 0
    assert fq.verify(model, tmp_path / "model.gguf", [batch]).outputs.rows == 3 * 12 - 4 + 3


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_blocks_in_the_file_of_a_converter(dtype, tmp_path):
    """Rows of q and k are reordered there. Float tensors of the base must be exact, so only norms are in float here."""
    model = float_model()
    base = write_base(model, tmp_path / "base.gguf", dtype)
    model = fq.prepare(model, fq.recipes.gguf("q4_0"))
    written = fq.export_gguf(model, tmp_path / "model.gguf", base=base)
    assert {tensor.type for tensor in written.tensors} == {"Q4_0", "Q8_0", "F32"}
    assert GgufFile(tmp_path / "model.gguf").metadata["general.name"].value == "a base"
    assert fq.verify(model, tmp_path / "model.gguf", [texts()]).ok
    fq.export_gguf(model, tmp_path / "direct.gguf")
    both = [GgufFile(tmp_path / name).tensors for name in ("model.gguf", "direct.gguf")]
    assert both[0].keys() == both[1].keys()
    assert all((both[0][name].read() == both[1][name].read()).all() for name in both[0])


def test_a_16_bit_model_is_verified_in_float32(tmp_path):
    model = fq.prepare(float_model().bfloat16(), fq.recipes.gguf("q8_0")).eval()
    fq.export_gguf(model, tmp_path / "model.gguf")
    assert fq.verify(model, tmp_path / "model.gguf", [texts()]).ok


def _is_ok(model, path):
    try:
        return fq.verify(model, path, [texts()]).ok
    except ValueError:
        return False


# --- tokenizers ------------------------------------------------------------------------------------

_TEXTS = ["hello world, a small text about cats and dogs.", "It's 1234 o'clock!  Two  spaces\n\n", "naïve café"] * 3


def _bytes(rule):
    tokenizer = Tokenizer(models.BPE())
    levels = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule is None)
    split = None if rule is None else pre_tokenizers.Split(Regex(rule), "isolated")
    tokenizer.pre_tokenizer = levels if split is None else pre_tokenizers.Sequence([split, levels])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def _fallback():
    pieces = [f"<0x{number:02X}>" for number in range(256)]
    space = "\u2581"
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend(space), normalizers.Replace(" ", space)])
    trained.train_from_iterator(_TEXTS, trainers.BpeTrainer(vocab_size=100, show_progress=False))
    words = sorted(trained.get_vocab(), key=trained.get_vocab().get)
    merges = [tuple(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
    tokens = ["<unk>", "<s>", "</s>", *pieces, *words]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = trained.normalizer
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def _words():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(_TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "cls", "sep", "pad", "mask")}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


_TOKENIZERS = {
    "gpt-2": lambda: _bytes(None),
    **{name: lambda rule=rule: _bytes(rule) for rule, name in _RULES.items()},
    "spm": _fallback,
    "bert": _words,
}


@pytest.mark.parametrize("kind", _TOKENIZERS)
def test_texts_have_the_same_tokens(kind, tmp_path):
    from cyllama.llama import llama_cpp

    tokenizer = _TOKENIZERS[kind]()
    if kind == "bert":
        torch.manual_seed(0)
        config = float_model("bert").config
        config.vocab_size = len(tokenizer)
        model = fq.prepare(transformers.BertModel(config), config_of("bert", "q8_0"))
    else:
        model = prepared("llama", "q8_0", vocab_size=len(tokenizer))
    fq.export_gguf(model, tmp_path / "model.gguf", tokenizer=tokenizer)
    llama_cpp.disable_logging()
    engine = llama_cpp.LlamaModel(str(tmp_path / "model.gguf"), llama_cpp.LlamaModelParams(), verbose=False)
    vocabulary = engine.get_vocab()
    for text in (*_TEXTS[:3], "the lazy dog's 12345 cats!!", " x", "two\nlines"):
        assert list(vocabulary.tokenize(text, True, False)) == tokenizer(text)["input_ids"]
    assert fq.verify(model, tmp_path / "model.gguf", [texts()]).ok
