"""Folders that somebody has changed: `verify` refuses them or says that they are not ok."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

import fakequant as fq
from fakequant._export.compressed_tensors.export_compressed_tensors import folder_contents
from fakequant._export.compressed_tensors.reading import Folder
from fakequant._export.prepared_layers import prepared_layers
from fakequant._runtimes.transformers.target import TARGET
from fakequant._verify.verify_weights import _compare_tensors, _require_same_config
from thoroughness import ALL
from tiny_language_models import prepared, tensors_of

_CASES = [
    ("llama", "int4 groups"), ("llama", "uint4 groups"), ("llama", "int3 channels"), ("qwen2", "w8a8 static"),
    ("llama", "fp8 static"), ("llama", "mxfp4"), ("llama", "mxfp6"), ("qwen3", "nvfp4"), ("mixtral", "mixed"),
    ("llama", "fp8 blocks and inputs"), ("llama", "nvfp4 inputs"), ("qwen2", "mxfp8 inputs"),
    ("bert", "int8 affine"),
]  # fmt: skip
# One per kind: groups, inputs, block scales, experts, blocks of rows, and zero points.
_CASES = _CASES if ALL else [_CASES[i] for i in (1, 3, 5, 8, 9, 10, 12)]


@pytest.fixture(scope="module", params=_CASES, ids=" ".join)
def original(request, tmp_path_factory):
    """A folder in shards and in one file, its tensors, and a function that says whether a folder passes."""
    model = prepared(*request.param)
    place = tmp_path_factory.mktemp("original")
    fq.export_compressed_tensors(model, place / "one")
    fq.export_compressed_tensors(model, place / "many", max_shard_size="30KB")
    contents = folder_contents(model, list(prepared_layers(model, TARGET)))

    def passes(folder):
        """Does all that `verify` does before transformers runs."""
        file = Folder(folder)
        _require_same_config(file, contents.quantization)
        return not any(report.prepared_differ for report in _compare_tensors(file, contents).values())

    assert passes(place / "one")
    assert passes(place / "many")
    return place, tensors_of(place / "one"), passes


def _is_refused(passes, folder):
    try:
        return not passes(folder)
    except (ValueError, FileNotFoundError) as error:
        return bool(str(error))


def _kinds(tensors):
    """Returns the first and the last tensor of each kind, such as weight_scale or norm.weight."""
    found = {}
    for name in tensors:
        *_, owner, local = name.split(".") if "." in name else ("", name)
        kind = f"{'norm' if 'norm' in owner.lower() else 'layer'}.{local}"
        found.setdefault(kind, []).append(name)
    return sorted({name for names in found.values() for name in (names[0], names[-1])})


def _with_flipped_bit(tensor, place, bit):
    flat = tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).clone()
    flat[place] ^= 1 << bit
    return flat.view(tensor.dtype).reshape(tensor.shape)


def test_one_bit_of_any_kind_of_tensor_is_seen(original, tmp_path):
    place, tensors, passes = original
    shutil.copytree(place / "one", tmp_path / "folder")
    missed, tried = [], 0
    for name in _kinds(tensors):
        size = tensors[name].nbytes
        for where, bit in ((0, 0), (size // 2, 3), (size - 1, 6)):
            changed = {**tensors, name: _with_flipped_bit(tensors[name], where, bit)}
            save_file(changed, tmp_path / "folder/model.safetensors")
            missed += [(name, where, bit)] if not _is_refused(passes, tmp_path / "folder") else []
            tried += 1
    assert missed == []
    assert tried >= 21


def test_tensors_that_are_renamed_removed_added_or_of_another_type_are_seen(original, tmp_path):
    place, tensors, passes = original
    shutil.copytree(place / "one", tmp_path / "folder")
    missed = []
    for name in _kinds(tensors):
        others = {key: value for key, value in tensors.items() if key != name}
        value = tensors[name]
        types = {1: torch.bool, 2: torch.int16, 4: torch.float32, 8: torch.float64}
        dtype = types[value.element_size()] if value.dtype != types[value.element_size()] else torch.float16
        for what, changed in {
            "renamed": {**others, f"{name}s": value},
            "removed": others,
            "added": {**tensors, f"{name}_more": value.clone()},
            "of another type": {**others, name: value.to(torch.float64 if value.is_floating_point() else torch.int16)},
            "viewed": {**others, name: value.view(dtype) if dtype != torch.float16 else value.to(dtype)},
            "of another shape": {**others, name: value.reshape(-1) if value.dim() > 1 else value[None]},
            "shorter": {**others, name: value[:-1].contiguous()},
        }.items():
            save_file(changed, tmp_path / "folder/model.safetensors")
            missed += [(name, what)] if not _is_refused(passes, tmp_path / "folder") else []
    assert missed == []


def _changed_groups(quantization):
    """Yields changes of a `quantization_config`."""
    groups = quantization["config_groups"]
    first = next(iter(groups))
    weights = groups[first]["weights"]
    yield "bits", lambda q: q["config_groups"][first]["weights"].update(num_bits=weights["num_bits"] % 8 + 1)
    yield "strategy", lambda q: q["config_groups"][first]["weights"].update(strategy="attn_head")
    yield "block", lambda q: q["config_groups"][first]["weights"].update(block_structure=[16, 32])
    yield "group size", lambda q: q["config_groups"][first]["weights"].update(group_size=8)
    yield "symmetric", lambda q: q["config_groups"][first]["weights"].update(symmetric=not weights["symmetric"])
    yield "type", lambda q: q["config_groups"][first]["weights"].update(type="other")
    yield "dynamic", lambda q: q["config_groups"][first]["weights"].update(dynamic=True)
    yield "actorder", lambda q: q["config_groups"][first]["weights"].update(actorder="group")
    yield "format of a group", lambda q: q["config_groups"][first].update(format="dense")
    yield "format", lambda q: q.update(format="dense")
    yield "targets", lambda q: q["config_groups"][first].update(targets=["re:.*q_proj"])
    yield "outputs", lambda q: q["config_groups"][first].update(output_activations=weights)
    yield "inputs", lambda q: q["config_groups"][first].update(input_activations={"num_bits": 4})
    yield "another group", lambda q: q["config_groups"].update(more=dict(groups[first]))
    yield "no group", lambda q: q.update(config_groups={})
    yield "ignore more", lambda q: q["ignore"].append("re:.*q_proj")
    yield "ignore a layer", lambda q: q["ignore"].append("model.layers.0.mlp.up_proj")
    yield "ignore None", lambda q: q.update(ignore=None)
    yield "status", lambda q: q.update(quantization_status="frozen")
    yield "cache", lambda q: q.update(kv_cache_scheme={"num_bits": 8})
    yield "method", lambda q: q.update(quant_method="gptq")
    yield "sparsity", lambda q: q.update(sparsity_config={"format": "sparse-24-bitmask"})
    yield "transforms", lambda q: q.update(transform_config={"config_groups": {}})


def test_every_change_of_the_quantization_config_is_seen(original, tmp_path):
    place, _, passes = original
    shutil.copytree(place / "one", tmp_path / "folder")
    text = (place / "one/config.json").read_text()
    missed = []
    for what, change in _changed_groups(json.loads(text)["quantization_config"]):
        config = json.loads(text)
        change(config["quantization_config"])
        (tmp_path / "folder/config.json").write_text(json.dumps(config))
        missed += [what] if not _is_refused(passes, tmp_path / "folder") else []
    assert missed == []


def test_damaged_files_are_refused(original, tmp_path):
    place, _, passes = original
    folder = tmp_path / "folder"

    def refused_after(change):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(place / "many", folder)
        change()
        with pytest.raises((ValueError, FileNotFoundError)):
            passes(folder)

    shards = sorted(file.name for file in (place / "many").glob("*.safetensors"))
    assert len(shards) > 1
    config = (place / "many/config.json").read_text()
    index = json.loads((place / "many/model.safetensors.index.json").read_text())
    some = next(iter(index["weight_map"]))
    for shard in (shards[0], shards[-1]):
        data = (place / "many" / shard).read_bytes()
        refused_after((folder / shard).unlink)
        for length in (0, 4, len(data) // 2, len(data) - 1):
            refused_after(lambda shard=shard, data=data, length=length: (folder / shard).write_bytes(data[:length]))
        refused_after(lambda shard=shard, data=data: (folder / shard).write_bytes(data + b"more"))
    for text in ("", config[:-2], config.replace("{", "[", 1), "null", "{}"):
        refused_after(lambda text=text: (folder / "config.json").write_text(text))
    refused_after((folder / "config.json").unlink)
    refused_after((folder / "model.safetensors.index.json").unlink)
    for changed in (
        {}, {"weight_map": 3}, {"weight_map": {}},
        {"weight_map": {**index["weight_map"], some: "other.safetensors"}},
        {"weight_map": {**index["weight_map"], "more": shards[0]}},
        {"weight_map": {k: v for k, v in index["weight_map"].items() if v != shards[0]}},
        {"weight_map": {**index["weight_map"], some: 3}},
    ):  # fmt: skip
        text = json.dumps(changed)
        refused_after(lambda text=text: (folder / "model.safetensors.index.json").write_text(text))
