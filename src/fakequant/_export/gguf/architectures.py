"""The models that are written without a base file: their metadata, and where llama.cpp stores their weights.

llama.cpp computes some things as the models of one family do, whatever the config says. The config is checked for them,
so that no file is written that computes something else.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fakequant._util.text import listed

# The arguments of an architecture, without its name in front.
Values = dict[str, Any]
_SILU, _GELU = ("silu", "swish"), ("gelu_pytorch_tanh", "gelu_new", "gelu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """A family of models."""

    # As llama.cpp names it.
    name: str
    # Returns the metadata that only this family has. Raises ValueError with what llama.cpp does not compute.
    values: Callable[[Any], Values]
    # Whether the rows of q and k are reordered, so that the two halves of a head alternate.
    interleaves_heads: bool = False
    # Whether norms multiply by 1 + weight; the file has the sum.
    adds_one_to_norms: bool = False
    # Whether the model is an encoder, whose outputs are the last hidden states.
    is_encoder: bool = False
    # The ends of names that the file has no place for.
    leaves_out: tuple[str, ...] = ()


def architecture_of(config: Any) -> Architecture:
    """Returns the architecture of a transformers model. Raises ValueError if there is none."""
    known = getattr(config, "model_type", None)
    if known not in ARCHITECTURES:
        raise ValueError(
            f"export_gguf writes the metadata of {listed(list(ARCHITECTURES), most=20)}, and the model is {known!r}.\n"
            "Make a float file with llama.cpp's convert_hf_to_gguf.py (--outtype f32), and pass it as `base`."
        )
    return ARCHITECTURES[known]


def metadata_of(config: Any) -> Values:
    """Returns the metadata of a model, without its architecture's name in front of the keys.

    Raises ValueError if llama.cpp computes something else than the config says.
    """
    found = architecture_of(config)
    heads = config.num_attention_heads
    values: Values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "vocab_size": config.vocab_size,
    }
    try:
        return values | found.values(config)
    except ValueError as error:
        raise ValueError(
            f"llama.cpp does not compute this model: {error}.\nChange its config before training, or use another "
            "runtime, such as target='compressed-tensors'."
        ) from error


def rope_tensors(config: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensor of factors by which frequencies of rotary embeddings are divided, for the rule of Llama 3."""
    rope = _rope(config)
    if rope.get("rope_type", "default") != "llama3":
        return
    size = _head_size(config)
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    context = rope["original_max_position_embeddings"]
    lengths = 2 * math.pi / frequencies
    smooth = (context / lengths - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    factors = torch.where(lengths < context / high, torch.ones(()), between)
    yield "rope_freqs.weight", torch.where(lengths > context / low, torch.tensor(float(factor)), factors)


def interleaved(rows: int, heads: int) -> Tensor:
    """Returns the order of rows in which the two halves of every head alternate.

    >>> interleaved(8, 2).tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    return torch.arange(rows).reshape(heads, 2, -1).transpose(1, 2).reshape(-1)


# --- families --------------------------------------------------------------------------------------


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


def _head_size(config: Any) -> int:
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size


def _rope(config: Any) -> Values:
    every: Values = getattr(config, "rope_parameters", None) or {}
    found: Values = every.get("full_attention", every)
    return found


def _decoder(
    config: Any, activations: tuple[str, ...] = _SILU, kinds: tuple[str, ...] = ("default", "linear")
) -> Values:
    """Returns what all decoders have."""
    activation = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    _require(activation in activations, f"its activation is {activation!r} instead of {activations[0]!r}")
    rope = _rope(config)
    kind = rope.get("rope_type", "default")
    _require(kind in kinds, f"its rotary embedding is of the type {kind!r} instead of {listed(kinds)}")
    _require(rope.get("partial_rotary_factor", 1.0) == 1.0, "it rotates only a part of each head")
    size = _head_size(config)
    values: Values = {
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": size,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if kind == "linear":
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    return values


def _require_full_attention(config: Any) -> None:
    window = getattr(config, "sliding_window", None)
    is_used = getattr(config, "use_sliding_window", True) and window is not None
    _require(not is_used or window >= config.max_position_embeddings, "its attention has a sliding window")


def _llama(config: Any) -> Values:
    _require_full_attention(config)
    return _decoder(config, kinds=("default", "linear", "llama3"))


def _mixtral(config: Any) -> Values:
    return _llama(config) | {
        "expert_count": config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok,
    }


def _qwen(config: Any) -> Values:
    _require_full_attention(config)
    return _decoder(config)


def _qwen_experts(config: Any) -> Values:
    _require(config.decoder_sparse_step == 1 and not config.mlp_only_layers, "some of its layers have no experts")
    normalizes = config.model_type == "qwen3_moe"
    _require(config.norm_topk_prob == normalizes, f"`norm_topk_prob` is not {normalizes}")
    values = {
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
    }
    shared = getattr(config, "shared_expert_intermediate_size", None)
    if shared is not None:
        values["expert_shared_feed_forward_length"] = shared
    return _qwen(config) | values


def _gemma(config: Any, period: int, layers_of_27b: int) -> Values:
    size = _head_size(config)
    if config.num_hidden_layers == layers_of_27b:
        size = config.hidden_size // config.num_attention_heads
    scale = config.query_pre_attn_scalar
    _require(scale == size, f"`query_pre_attn_scalar` is {scale}, and llama.cpp computes with {size}")
    kinds = [
        "full_attention" if i % period == period - 1 else "sliding_attention" for i in range(config.num_hidden_layers)
    ]
    _require(list(config.layer_types) == kinds, f"not every {period}th layer, and no other, has full attention")
    return _decoder(config, _GELU[:2]) | {"attention.sliding_window": config.sliding_window}


def _gemma2(config: Any) -> Values:
    _require(config.tie_word_embeddings, "its output layer has a weight of its own")
    caps = {"attn_logit_softcapping": config.attn_logit_softcapping}
    caps["final_logit_softcapping"] = config.final_logit_softcapping
    _require(None not in caps.values(), "it has no soft caps")
    return _gemma(config, 2, 46) | {name: float(value) for name, value in caps.items()}


def _gemma3(config: Any) -> Values:
    _require(config.attn_logit_softcapping is None, "it has `attn_logit_softcapping`")
    values = _gemma(config, 6, 62)
    local = (config.rope_parameters or {}).get("sliding_attention", {})
    _require(local.get("rope_type", "default") == "default", "its local rotary embedding is scaled")
    values["rope.freq_base_swa"] = float(local["rope_theta"])
    if config.final_logit_softcapping is not None:
        values["final_logit_softcapping"] = float(config.final_logit_softcapping)
    return values


def _bert(config: Any) -> Values:
    _require(config.hidden_act in _GELU, f"its activation is {config.hidden_act!r} instead of 'gelu'")
    kind = getattr(config, "position_embedding_type", None) or "absolute"
    _require(kind == "absolute", f"its positions are {kind!r}")
    return {
        "attention.layer_norm_epsilon": config.layer_norm_eps,
        "attention.causal": False,
    }


_LLAMA = Architecture(name="llama", values=_llama, interleaves_heads=True)
ARCHITECTURES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": dataclasses.replace(_LLAMA, values=_mixtral),
    "qwen2": Architecture(name="qwen2", values=_qwen),
    "qwen3": Architecture(name="qwen3", values=_qwen),
    "qwen2_moe": Architecture(name="qwen2moe", values=_qwen_experts),
    "qwen3_moe": Architecture(name="qwen3moe", values=_qwen_experts),
    "gemma2": Architecture(name="gemma2", values=_gemma2, adds_one_to_norms=True),
    "gemma3_text": Architecture(name="gemma3", values=_gemma3, adds_one_to_norms=True),
    "bert": Architecture(
        name="bert", values=_bert, is_encoder=True, leaves_out=("pooler.dense.weight", "pooler.dense.bias")
    ),
}
