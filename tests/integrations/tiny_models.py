"""Tiny transformers models, their data, and a comparison of all their bits."""

import torch
import transformers

import fakequant as fq
from fakequant.testing.assertions import assert_same_state

ROWS, WORDS = 24, 50


def everything(model):
    """Returns copies of all parameters and buffers of a model, and the switches that schedules set."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    # The data a learned scale was initialized from is not saved.
    found = {name: tensor.detach().clone() for name, tensor in tensors if ".seen_" not in name}
    for path, layer in model.named_modules():
        if isinstance(layer, fq.nn.QuantizedLayer) and hasattr(layer._fakequant, "deploys_bias"):
            found[f"{path} deploys its bias"] = torch.tensor([layer._fakequant.deploys_bias])
    for path, quantizer in fq.nn.named_quantizers(model):
        found[f"{path} switches"] = torch.tensor([quantizer.observing, quantizer.quantizing, quantizer.frozen])
    return found


def assert_same_everything(one, other):
    assert_same_state(everything(one), everything(other))


def words():
    return torch.randint(0, WORDS, (ROWS, 8), generator=torch.Generator().manual_seed(0))


def bert():
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def llama():
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=32, max_position_embeddings=16, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def vit():
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=4
    )
    return transformers.ViTForImageClassification(config)


def data_for(make):
    if make in (gpt2, llama):
        return [{"input_ids": row, "labels": row} for row in words()]
    if make is vit:
        pictures = torch.randn(ROWS, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        return [{"pixel_values": picture, "labels": i % 2} for i, picture in enumerate(pictures)]
    return [{"input_ids": row, "labels": i % 2} for i, row in enumerate(words())]
