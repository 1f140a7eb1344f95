"""The models of the zoo: architectures of other packages with random weights, as small as they can be had.

Each entry has the package that a model needs, and a function that makes the model and its example. Networks with
batch norms get statistics that fit the data.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fitted_norms import fit_norms

Made = tuple[nn.Module, Any]
Entry = tuple[str, Callable[[], Made]]

WIDTH = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
BOS = dict(vocab_size=60, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def ids() -> Tensor:
    return torch.arange(18).reshape(2, 9) % 50 + 5


def images(size: int, count: int = 2) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))


def sounds(*shape: int) -> Tensor:
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))


# --- transformers ---------------------------------------------------------------------------------


def hugging_face(name: str, example: dict[str, Tensor], **settings: Any) -> Entry:
    """Returns an entry for a class `<name>Model`, with the settings of its `<name>Config`."""

    def make() -> Made:
        import transformers

        config = getattr(transformers, f"{name}Config")(**settings)
        model = getattr(transformers, f"{name}Model")(config)
        return fit_norms(model, images(32, count=8)), example

    return "transformers", make


def clip(part: str, example: dict[str, Tensor], **settings: Any) -> Entry:
    def make() -> Made:
        import transformers

        config = getattr(transformers, f"CLIP{part}Config")(**WIDTH, projection_dim=32, **settings)
        return getattr(transformers, f"CLIP{part}Model")(config), example

    return "transformers", make


TEXT = {"input_ids": ids()}
BOTH = {"input_ids": ids(), "decoder_input_ids": ids()[:, :5]}
SIDES = dict(encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, d_model=32)
FFN = dict(encoder_ffn_dim=64, decoder_ffn_dim=64)

TRANSFORMERS: dict[str, Entry] = {
    "BERT": hugging_face("Bert", TEXT, vocab_size=60, **WIDTH),
    "DistilBERT": hugging_face("DistilBert", TEXT, vocab_size=60, dim=32, n_layers=2, n_heads=2, hidden_dim=64),
    "RoBERTa": hugging_face("Roberta", TEXT, vocab_size=60, **WIDTH),
    # Its linear layers are `Conv1D`, with transposed weights.
    "GPT-2": hugging_face("GPT2", TEXT, n_embd=32, n_layer=2, n_head=2, use_cache=False, **BOS),
    "Llama": hugging_face("Llama", TEXT, use_cache=False, **BOS, **WIDTH),
    "Qwen2": hugging_face("Qwen2", TEXT, use_cache=False, num_key_value_heads=1, **BOS, **WIDTH),
    # The weights of their experts are 3-D parameters. Those of GPT-OSS are transposed, with biases.
    "Mixtral": hugging_face("Mixtral", TEXT, num_key_value_heads=1, use_cache=False, **EXPERTS, **BOS, **WIDTH),
    "GPT-OSS": hugging_face(
        "GptOss", TEXT, num_key_value_heads=1, head_dim=16, sliding_window=4, use_cache=False, **EXPERTS, **BOS, **WIDTH
    ),
    "T5": hugging_face(
        "T5",
        BOTH,
        vocab_size=60,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        use_cache=False,
        decoder_start_token_id=0,
    ),
    "BART": hugging_face("Bart", BOTH, use_cache=False, decoder_start_token_id=2, **BOS, **SIDES, **FFN),
    # Its code reads the dtype of a weight.
    "ViT": hugging_face("ViT", {"pixel_values": images(32)}, image_size=32, patch_size=8, **WIDTH),
    "Swin": hugging_face(
        "Swin",
        {"pixel_values": images(32)},
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    "CLIP vision": clip("Vision", {"pixel_values": images(32)}, image_size=32, patch_size=8),
    "CLIP text": clip("Text", TEXT, **BOS),
    "Whisper": hugging_face(
        "Whisper",
        {"input_features": sounds(16, 40), "decoder_input_ids": ids()[:, :5]},
        num_mel_bins=16,
        max_source_positions=20,
        max_target_positions=20,
        use_cache=False,
        decoder_start_token_id=1,
        **BOS,
        **SIDES,
        **FFN,
    ),
    "wav2vec2": hugging_face(
        "Wav2Vec2",
        {"input_values": sounds(400)},
        vocab_size=60,
        conv_dim=(16, 16),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        apply_spec_augment=False,
        **WIDTH,
    ),
    # Its batch norms are not in an `nn.Sequential`, and torch.fx cannot trace it.
    "ResNet": hugging_face(
        "ResNet",
        {"pixel_values": images(32)},
        embedding_size=16,
        hidden_sizes=[16, 32],
        depths=[2, 2],
        layer_type="basic",
    ),
    "MobileNetV2": hugging_face("MobileNetV2", {"pixel_values": images(32)}, image_size=32, depth_multiplier=0.35),
}

# --- timm and torchvision -------------------------------------------------------------------------


def vision(package: str, make: Callable[[], nn.Module], size: int = 32) -> Entry:
    return package, lambda: (fit_norms(make(), images(size, count=8)), images(size))


def timm_model(name: str, size: int = 32, **settings: Any) -> Entry:
    def make() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=10, **settings)

    return vision("timm", make, size)


def mixer() -> nn.Module:
    from timm.models.mlp_mixer import MlpMixer

    return MlpMixer(img_size=32, patch_size=8, num_blocks=2, embed_dim=48, num_classes=10)


def torchvision_model(name: str, **settings: Any) -> Entry:
    def make() -> nn.Module:
        import torchvision

        return getattr(torchvision.models, name)(num_classes=10, **settings)

    return vision("torchvision", make)


def torchvision_swin() -> nn.Module:
    from torchvision.models import SwinTransformer

    return SwinTransformer([4, 4], 24, [2, 2], [2, 4], [4, 4], num_classes=10)


SMALL_NFNET = dict(depths=(1, 1, 1, 1), channels=(16, 32, 32, 32), group_size=8)

TIMM: dict[str, Entry] = {
    "efficientnet_lite0": timm_model("efficientnet_lite0"),
    "efficientnet_b0": timm_model("efficientnet_b0"),
    "mobilenetv3_small_100": timm_model("mobilenetv3_small_100"),
    "convnext_atto": timm_model("convnext_atto", depths=(1, 1, 2, 1), ls_init_value=1.0),
    "regnetx_002": timm_model("regnetx_002"),
    "regnety_002": timm_model("regnety_002"),
    "resnetv2_18": timm_model("resnetv2_18", layers=(1, 1, 1, 1)),
    "vit_tiny": timm_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=48),
    "swin_tiny": timm_model(
        "swin_tiny_patch4_window7_224", 56, img_size=56, depths=(2, 2), embed_dim=24, num_heads=(2, 4)
    ),
    "mixer_s": vision("timm", mixer),
    # Their convolutions compute their weight in a forward pass of their own.
    "test_nfnet": timm_model("test_nfnet"),
    "dm_nfnet_f0": timm_model("dm_nfnet_f0", **SMALL_NFNET),
    "eca_nfnet_l0": timm_model("eca_nfnet_l0", **SMALL_NFNET),
}
TORCHVISION: dict[str, Entry] = {
    "torchvision resnet18": torchvision_model("resnet18"),
    "torchvision mobilenet_v2": torchvision_model("mobilenet_v2", width_mult=0.35),
    "torchvision mobilenet_v3_small": torchvision_model("mobilenet_v3_small", width_mult=0.5),
    # A function computes the attention from the weights of `qkv` and `proj`, which are never called.
    "torchvision swin_t": vision("torchvision", torchvision_swin),
}

MODELS = TRANSFORMERS | TIMM | TORCHVISION
# Networks that are made for phones, and others that run there.
PHONE = {name: TIMM[name] for name in ("mobilenetv3_small_100", "efficientnet_lite0", "vit_tiny")} | {
    name: timm_model(name) for name in ("mobilenetv2_100", "resnet18")
}
# What `make test` runs. `make zoo` and `make test-all` run all.
SOME = ("GPT-2", "Llama")
