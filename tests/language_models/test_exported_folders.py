"""Folders of compressed-tensors: transformers returns the bits of the prepared model, and they are small."""

import json

import pytest
import torch

import fakequant as fq
from fakequant import QuantSpec, presets, recipes
from fakequant._export.compressed_tensors import export_compressed_tensors
from tiny_language_models import (
    CASES,
    CONFIGS,
    EXPERTS,
    TARGET,
    all_of_them,
    assert_same_bits,
    batch,
    load,
    logits,
    make,
    prepared,
    tensors_of,
)  # fmt: skip

# transformers has no place for the zero points, global scales and exponents of experts.
_NOT_FOR_EXPERTS = (
    "uint4 groups", "uint4 channels", "int8 affine", "uint4 groups bfloat16", "mxfp8", "nvfp4", "mxfp8 inputs",
    "nvfp4 inputs", "fp8 blocks and inputs", "fp8 blocks bfloat16", "fp8 blocks", "fp8 blocks, shorter",
)  # fmt: skip
# BERT's pooler and classifier have inputs with two axes; its classifier has two outputs.
_NOT_FOR_BERT = ("w8a8 per token", "uint4 groups", "uint4 groups bfloat16")


def _applies(name, case):
    return not (name in EXPERTS and case in _NOT_FOR_EXPERTS) and not (name == "bert" and case in _NOT_FOR_BERT)


_ALL = [(name, case) for name in CONFIGS for case in CASES if _applies(name, case)]
# Every model, and every scheme, at least once.
_SOME = [
    *(("llama", case) for case in CASES),
    *((name, case) for name in CONFIGS for case in ("int4 groups", "fp8 weights", "mixed") if name != "llama"),
    *((name, "w8a8 static") for name in ("qwen2", "mixtral", "bert")),
    *((name, "mxfp4") for name in ("gemma3", "qwen3_moe", "bert")),
]


def _returns_the_same(name, case, folder):
    model = prepared(name, case)
    expected = logits(model)
    fq.export_compressed_tensors(model, folder)
    assert_same_bits(logits(load(folder, model)), expected)
    assert_same_bits(logits(model), expected)


@pytest.mark.parametrize(("name", "case"), _SOME)
def test_transformers_returns_the_logits_of_the_prepared_model(name, case, tmp_path):
    assert _applies(name, case)
    _returns_the_same(name, case, tmp_path / "folder")


@all_of_them
@pytest.mark.parametrize(("name", "case"), [one for one in _ALL if one not in _SOME])
def test_transformers_returns_the_logits_for_every_model_and_scheme(name, case, tmp_path):
    _returns_the_same(name, case, tmp_path / "folder")


@pytest.mark.parametrize("case", ["int4 groups", "uint4 groups", "w8a8 static", "fp8 static", "int4 groups bfloat16"])
def test_learned_scales_are_written_as_they_were_trained(case, tmp_path):
    model = prepared("llama", case, learned=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        model.train()(**batch(), labels=batch()["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    if case.endswith("bfloat16"):  # learned scales are floats, which engines would round
        with pytest.raises(ValueError, match=r"q_proj is not exact in bfloat16, .*\n.*scale_format='bfloat16'"):
            fq.export_compressed_tensors(model, tmp_path / "folder")
        return
    fq.export_compressed_tensors(model, tmp_path / "folder")
    assert_same_bits(logits(load(tmp_path / "folder", model)), logits(model))


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize(
    ("others", "experts"),
    [
        ({"*experts*": 8}, 8),
        ({"*q_proj": 8}, 4),
        # The experts have the scheme of a few other layers, and not of the most.
        ({"*q_proj": 8, "*k_proj": 8, "*v_proj": 8, "lm_head": 8}, 4),
        ({"*.o_proj": 8, "*experts*": 8}, 8),
    ],
)
def test_experts_keep_their_scheme_beside_others(name, others, experts, tmp_path):
    config = recipes.int4_weight_only(32, target=TARGET)
    for path, bits in others.items():
        config = config.rule(path, weight=QuantSpec(bits=bits, axis=0))
    model = fq.prepare(make(name), config, batch()).eval()
    written = fq.export_compressed_tensors(model, tmp_path / "folder")
    assert {spec[:4] for path, spec in written.layers.items() if ".experts." in path} == {f"int{experts}"}
    assert_same_bits(logits(load(tmp_path / "folder", model)), logits(model))
    again = fq.load_grids(make(name), tmp_path / "folder", batch()).eval()
    assert_same_bits(logits(again), logits(model))


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_with_two_schemes_are_named_one_by_one(name, tmp_path):
    """A pattern for all experts would give all of them one scheme."""
    config = recipes.int4_weight_only(32, target=TARGET).rule("*experts.down_product", weight=presets.int8())
    model = fq.prepare(make(name), config, batch()).eval()
    fq.export_compressed_tensors(model, tmp_path / "folder")
    groups = json.loads((tmp_path / "folder/config.json").read_text())["quantization_config"]["config_groups"]
    assert [len(group["targets"]) for group in groups.values()] == [1, 2 * 4]
    again = fq.load_grids(make(name), tmp_path / "folder", batch()).eval()
    assert_same_bits(logits(again), logits(model))


def test_experts_in_float_are_in_the_list_of_ignored_layers(tmp_path):
    config = recipes.int4_weight_only(32, target=TARGET).skip("*experts*")
    model = fq.prepare(make("mixtral"), config, batch())
    written = fq.export_compressed_tensors(model, tmp_path / "folder")
    assert sum(".experts." in path for path in written.ignored) == 2 * 4 * 3
    assert not any(".experts." in path for path in written.layers)


@pytest.mark.parametrize(
    ("case", "dtype", "most"),
    [("int4 groups", torch.float32, 0.17), ("int8 channels", torch.float32, 0.27),
     ("int3 channels", torch.float32, 0.11), ("nvfp4", torch.bfloat16, 0.17), ("mxfp4", torch.bfloat16, 0.14)],
)  # fmt: skip
def test_quantized_layers_are_small(case, dtype, most, tmp_path):
    model = prepared("llama", case, hidden_size=256, intermediate_size=512, head_dim=64)
    written = fq.export_compressed_tensors(model, tmp_path / "folder")
    in_float32 = written.quantized_float_bytes * (2 if dtype == torch.bfloat16 else 1)
    assert 0 < written.quantized_bytes / in_float32 <= most
    stored = sum(value.nbytes for value in tensors_of(tmp_path / "folder").values())
    assert written.bytes == stored
    # The file has a short header beside its tensors.
    assert stored <= (tmp_path / "folder/model.safetensors").stat().st_size <= stored + 20_000


def test_the_report_prints_format_sizes_schemes_and_layers_in_float(tmp_path):
    config = recipes.int4_weight_only(32, target=TARGET).rule("*q_proj", weight=presets.int8()).skip("*k_proj")
    written = fq.export_compressed_tensors(fq.prepare(make(), config), tmp_path / "small")
    first, *rest = str(written).splitlines()
    assert first.startswith("small: pack-quantized, ")
    assert "% of their size in float" in first
    assert sorted(line.split("|")[0].strip() for line in rest[2:4]) == ["11", "2"]
    assert rest[-1] == "in float: model.layers.0.self_attn.k_proj, model.layers.1.self_attn.k_proj"


def test_a_folder_in_shards_has_the_same_tensors(tmp_path):
    model = prepared()
    fq.export_compressed_tensors(model, tmp_path / "one")
    fq.export_compressed_tensors(model, tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = tensors_of(tmp_path / "one"), tensors_of(tmp_path / "many")
    assert one.keys() == many.keys()
    for name in one:
        assert_same_bits(one[name], many[name])
    assert_same_bits(logits(load(tmp_path / "many", model)), logits(model))


@pytest.mark.parametrize(
    ("name", "case"),
    [("llama", "uint4 groups"), ("llama", "uint4 channels"), ("llama", "int8 tensor"), ("llama", "w8a8 per token"),
     ("llama", "fp8 blocks, shorter"), ("llama", "mxfp6"), ("llama", "nvfp4"), ("mixtral", "int4 groups"),
     ("qwen3_moe", "fp8 blocks and inputs")],
)  # fmt: skip
def test_weights_are_written_in_parts_with_the_same_tensors(name, case, tmp_path, monkeypatch):
    model = prepared(name, case)
    fq.export_compressed_tensors(model, tmp_path / "whole")
    monkeypatch.setattr(export_compressed_tensors, "_PART", 1)
    fq.export_compressed_tensors(model, tmp_path / "parts")
    whole, parts = tensors_of(tmp_path / "whole"), tensors_of(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    for tensor, value in whole.items():
        assert_same_bits(parts[tensor], value)


@pytest.mark.parametrize("case", ["fp8 blocks and inputs", "w8a8 per token"])
def test_inputs_that_are_almost_zero_have_scales_of_their_own(case, tmp_path):
    """A scale of 0 is all that compressed-tensors replaces."""
    model = prepared("llama", case)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight.mul_(1e-9)
    expected = logits(model)
    fq.export_compressed_tensors(model, tmp_path / "folder")
    assert_same_bits(logits(load(tmp_path / "folder", model)), expected)
    assert model.model.layers[0].self_attn.v_proj.input_quantizer(torch.full((1, 64), 1e-9)).min() > 0


def test_the_tokenizer_is_written_too(tmp_path):
    class Tokenizer:
        def save_pretrained(self, folder):
            (folder / "tokenizer.json").write_text("{}")

    fq.export_compressed_tensors(prepared(), tmp_path / "folder", Tokenizer())
    assert (tmp_path / "folder/tokenizer.json").read_text() == "{}"
