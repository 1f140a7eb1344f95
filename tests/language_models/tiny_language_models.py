"""Tiny language models of transformers, the schemes that folders hold, and comparisons bit by bit."""

import dataclasses
import os

import pytest
import torch
import transformers

import fakequant as fq
from fakequant import LayerConfig, QuantConfig, QuantSpec, presets, recipes

TARGET = "compressed-tensors"
WORDS = 64
all_of_them = pytest.mark.skipif(
    os.environ.get("FAKEQUANT_TESTS") != "all", reason="a large matrix; set FAKEQUANT_TESTS=all"
)


def _sizes(**more):
    return dict(
        vocab_size=WORDS, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=32, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=0, pad_token_id=0, **more,
    )  # fmt: skip


CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**_sizes(attention_bias=True, mlp_bias=True)),
    "qwen2": lambda: transformers.Qwen2Config(**_sizes()),
    "qwen3": lambda: transformers.Qwen3Config(**_sizes()),
    "gemma2": lambda: transformers.Gemma2Config(**_sizes()),
    "gemma3": lambda: transformers.Gemma3TextConfig(**_sizes()),
    "mixtral": lambda: transformers.MixtralConfig(**_sizes(num_local_experts=4)),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_sizes(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    ),
    "bert": lambda: transformers.BertConfig(
        vocab_size=WORDS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=32,
    ),
}  # fmt: skip
EXPERTS = ("mixtral", "qwen3_moe")


def make(name="llama", dtype=torch.float32, **changes):
    """Returns a tiny model in evaluation, with random biases."""
    config = CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    if name == "bert":
        model = transformers.AutoModelForSequenceClassification.from_config(config, dtype=dtype)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for key, value in model.named_parameters():
            if key.endswith("bias"):
                value.normal_(0, 0.1)
            elif "norm" in key.lower():
                value.add_(torch.randn(value.shape).to(dtype) * 0.1)
    return model.eval()


def batch(seed=1):
    return {"input_ids": torch.randint(1, WORDS, (2, 6), generator=torch.Generator().manual_seed(seed))}


@dataclasses.dataclass(frozen=True)
class Case:
    """A scheme, and the models that it is tried with."""

    config: QuantConfig
    dtype: torch.dtype = torch.float32
    has_static_inputs: bool = False
    has_inputs: bool = False


def weights(spec, **more):
    return QuantConfig(default=LayerConfig(weight=spec, **more), target=TARGET)


BF16 = torch.bfloat16
CASES = {
    "int4 groups": Case(recipes.int4_weight_only(32, target=TARGET)),
    "int4 channels": Case(weights(presets.int4(group_size=None))),
    "int8 channels": Case(weights(presets.int8())),
    "int8 groups": Case(weights(presets.int8(group_size=16))),
    "int8 tensor": Case(weights(QuantSpec())),
    "int3 channels": Case(weights(QuantSpec(bits=3, axis=0))),
    "int3 groups": Case(weights(QuantSpec(bits=3, axis=-1, group_size=32))),
    "uint4 groups": Case(weights(QuantSpec(bits=4, signed=False, symmetric=False, axis=-1, group_size=32))),
    "uint4 channels": Case(weights(QuantSpec(bits=4, signed=False, symmetric=False, axis=0))),
    "int8 affine": Case(weights(QuantSpec(symmetric=False, axis=0))),
    "w8a8 per token": Case(recipes.int8_dynamic(target=TARGET), has_inputs=True),
    "w8a8 static": Case(
        weights(presets.int8(), input=presets.uint8()), has_static_inputs=True, has_inputs=True
    ),
    "fp8 static": Case(recipes.fp8(target=TARGET), has_static_inputs=True, has_inputs=True),
    "fp8 weights": Case(weights(presets.fp8_e4m3(axis=0))),
    "fp8 tensor": Case(weights(presets.fp8_e4m3())),
    "fp8 blocks": Case(weights(presets.fp8_e4m3(group_size=128, group_rows=128))),
    "fp8 blocks, shorter": Case(weights(presets.fp8_e4m3(group_size=40, group_rows=24))),
    "fp8 blocks bfloat16": Case(weights(presets.fp8_e4m3(group_size=32, group_rows=32)), BF16),
    "fp8 blocks and inputs": Case(recipes.fp8_block(32, target=TARGET), has_inputs=True),
    "nvfp4 inputs": Case(recipes.nvfp4(target=TARGET), BF16, has_static_inputs=True, has_inputs=True),
    "mxfp8 inputs": Case(recipes.mxfp8(target=TARGET), BF16, has_inputs=True),
    "mxfp4": Case(recipes.mxfp4_weight_only(target=TARGET), BF16),
    "mxfp6": Case(weights(presets.mxfp6()), BF16),
    "mxfp8": Case(weights(presets.mxfp8()), BF16),
    "nvfp4": Case(recipes.nvfp4_weight_only(target=TARGET), BF16),
    "int4 groups bfloat16": Case(recipes.int4_weight_only(32, target=TARGET), BF16),
    "uint4 groups bfloat16": Case(
        weights(QuantSpec(bits=4, signed=False, symmetric=False, axis=-1, group_size=32)), BF16
    ),
    "mixed": Case(
        recipes.int4_weight_only(32, target=TARGET)
        .rule("*o_proj", weight=presets.int8())
        .rule("*q_proj", weight=QuantSpec(bits=3, axis=0))
        .skip("*k_proj")
    ),
}  # fmt: skip


def prepared(name="llama", case="int4 groups", *, learned=False, **changes):
    """Returns a prepared and calibrated model in evaluation."""
    chosen = CASES[case]
    config = chosen.config
    if name == "bert":  # whose layers have other names
        names = {"*o_proj": "*attention.output.dense", "*q_proj": "*query", "*k_proj": "*key"}
        rules = tuple(dataclasses.replace(rule, path=names.get(rule.path, rule.path)) for rule in config.rules)
        config = dataclasses.replace(config, rules=rules)
    if learned:
        config = dataclasses.replace(
            config,
            default=dataclasses.replace(config.default, learned=True),
            rules=tuple(r if r.use is None else dataclasses.replace(r, use=dataclasses.replace(r.use, learned=True))
                        for r in config.rules),
        )  # fmt: skip
    model = fq.prepare(make(name, chosen.dtype, **changes), config, batch())
    if chosen.has_static_inputs:
        fq.calibrate(model, [batch(seed) for seed in range(2, 4)])
    return model.eval()


def load(folder, model):
    """Loads a folder in transformers."""
    is_bert = model.config.model_type == "bert"
    cls = transformers.AutoModelForSequenceClassification if is_bert else transformers.AutoModelForCausalLM
    attention = model.config._attn_implementation
    return cls.from_pretrained(folder, dtype=model.dtype, attn_implementation=attention).eval()


def logits(model, inputs=None):
    with torch.no_grad():
        return model(**(inputs or batch())).logits


def bits(tensor):
    """Returns a tensor as bytes."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def same_bits(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))


def assert_same_bits(one, other):
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    assert int((bits(one) != bits(other)).sum()) == 0


def tensors_of(folder):
    """Returns all tensors of a folder by name."""
    from safetensors.torch import load_file

    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found
