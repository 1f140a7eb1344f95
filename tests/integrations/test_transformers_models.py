"""Models of transformers, with random weights, through the whole flow from `prepare` to `verify`."""

import pytest

import fakequant as fq

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("onnxruntime")

WIDTH = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
IDS = {"input_ids": torch.arange(18).reshape(2, 9) % 50 + 5}
PICTURE = {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))}


def bert():
    return transformers.BertModel(transformers.BertConfig(vocab_size=60, **WIDTH))


def gpt2():
    """Its linear layers are `Conv1D`, with transposed weights."""
    config = transformers.GPT2Config(
        vocab_size=60, n_embd=32, n_layer=2, n_head=2, use_cache=False, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2Model(config)


def llama():
    return transformers.LlamaModel(transformers.LlamaConfig(vocab_size=60, use_cache=False, **WIDTH))


def vit():
    """Its code reads the dtype of a weight."""
    return transformers.ViTModel(transformers.ViTConfig(image_size=32, patch_size=8, **WIDTH))


def resnet():
    """Its batch norms are not in an `nn.Sequential`, and torch.fx cannot trace it."""
    config = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], layer_type="basic")
    return transformers.ResNetModel(config)


MODELS = {
    "BERT": (bert, IDS),
    "GPT-2": (gpt2, IDS),
    "Llama": (llama, IDS),
    "ViT": (vit, PICTURE),
    "ResNet": (resnet, PICTURE),
}


@pytest.mark.parametrize(("make", "example"), MODELS.values(), ids=MODELS)
def test_all_layers_of_a_model_of_transformers_run_in_integers(make, example):
    torch.manual_seed(0)
    found = fq.check(make(), example)
    assert found.ok, str(found)
    assert found.float_kernels == {}
    assert found.integer_multiplications == found.quantized_multiplications
    assert found.quantized_multiplications > 0.85 * found.multiplications  # the rest are products of attention
