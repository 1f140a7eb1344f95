"""Tiny models for GGUF files, and float files of them as llama.cpp's converter makes them."""

import numpy as np
import pytest
import torch
import transformers

import fakequant as fq
from fakequant import recipes
from tiny_language_models import CONFIGS, WORDS, make

pytest.importorskip("gguf")

_WINDOWS = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
# What llama.cpp computes of each family; see `architectures.py`.
CHANGES = {
    "gemma2": {"query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    "gemma3": {"query_pre_attn_scalar": 16, "num_hidden_layers": 7, "layer_types": _WINDOWS, "sliding_window": 8},
    "mixtral": {"sliding_window": None},
    "qwen3_moe": {"norm_topk_prob": True},
}
NAMES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "mixtral", "qwen3_moe", "bert")
KINDS = ("q4_0", "q4_1", "q8_0", "mxfp4", "tq2_0", "q4_k", "q6_k")
# Those with rows of whole blocks of 256.
LONG = ("tq2_0", "q4_k", "q6_k")


def float_model(name="llama", **changes):
    changes = {**CHANGES.get(name, {}), **changes}
    if name == "bert":
        torch.manual_seed(0)
        return transformers.BertModel(CONFIGS["bert"]()).eval()
    model = make(name, **changes)
    if changes.get("tie_word_embeddings"):
        model.tie_weights()
    return model


def config_of(name, kind, **options):
    config = recipes.gguf(kind, **options)
    if name == "bert":
        config = config.skip("*pooler*").skip("*position_embeddings").skip("*token_type_embeddings")
    return config


def sizes_of(kind):
    return {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64} if kind in LONG else {}


def prepared(name="llama", kind="q4_0", *, learned=False, **changes):
    return fq.prepare(float_model(name, **{**sizes_of(kind), **changes}), config_of(name, kind, learned=learned)).eval()


def texts(seed=1, rows=3, length=12):
    numbers = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(1, WORDS, (rows, length), generator=numbers)}


def write_base(model, path, dtype="F32", **changes):
    """Writes the float file of a Llama as llama.cpp's converter does: with q and k interleaved."""
    import gguf

    config = model.config
    values = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "rope.dimension_count": config.head_dim, "vocab_size": config.vocab_size,
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
    }  # fmt: skip
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in values.items():
        writer.add_uint32(f"llama.{name}", changes.get(name, value))
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32("llama.rope.freq_base", config.rope_parameters["rope_theta"])
    writer.add_string("tokenizer.ggml.model", "none")
    writer.add_string("general.name", "a base")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    kind = gguf.GGMLQuantizationType[dtype]
    for name, value in model.state_dict().items():
        for letter, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
            if f".{letter}_proj." in name:
                value = value.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(value.shape)
        data = value.numpy()
        there = names.get_name(name, try_suffixes=(".weight", ".bias"))
        stored = gguf.quants.quantize(data, kind) if data.ndim > 1 else data.astype(np.float32)
        writer.add_tensor(there, stored, raw_dtype=kind if data.ndim > 1 else gguf.GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
