"""`load_grids`: folders and checkpoints become prepared models with the same codes, which train on."""

import copy
import json
import pickle

import pytest
import torch

import fakequant as fq
from thoroughness import ALL
from tiny_language_models import (
    CASES,
    CONFIGS,
    EXPERTS,
    all_of_them,
    assert_same_bits,
    batch,
    bits,
    logits,
    make,
    prepared,
    tensors_of,
)  # fmt: skip

_SOME = [("llama", case) for case in CASES] + [
    (name, case) for name in CONFIGS for case in ("int4 groups", "mixed") if name != "llama"
]
_SOME += [("mixtral", "fp8 blocks and inputs"), ("qwen3_moe", "fp8 blocks and inputs")]


def _files(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def _writes_the_same(name, case, learned, tmp_path):
    if name in EXPERTS and case in ("fp8 blocks", "fp8 blocks, shorter"):
        pytest.skip("the blocks do not divide the rows of the experts")
    model = prepared(name, case, learned=learned)
    fq.export_compressed_tensors(model, tmp_path / "first")
    again = fq.load_grids(make(name, CASES[case].dtype), tmp_path / "first", batch(), learned=learned).eval()
    assert_same_bits(logits(again), logits(model))
    if name in EXPERTS and case.endswith("tensor"):
        return  # experts are loaded with a scale per row, because those of others differ from expert to expert
    fq.export_compressed_tensors(again, tmp_path / "second")
    assert _files(tmp_path / "first") == _files(tmp_path / "second")


@pytest.mark.parametrize(("name", "case"), _SOME)
def test_fixed_grids_are_written_with_the_same_bytes_again(name, case, tmp_path):
    _writes_the_same(name, case, False, tmp_path)


_LEARNED = ["uint4 groups", "w8a8 static", "mixed", "fp8 blocks, shorter"]
if ALL:
    _LEARNED += ["int4 groups", "int3 channels", "int8 tensor", "fp8 static", "fp8 blocks and inputs"]


@pytest.mark.parametrize("case", _LEARNED)
def test_learned_grids_are_written_with_the_same_bytes_again(case, tmp_path):
    _writes_the_same("llama", case, True, tmp_path)


@all_of_them
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("case", [case for case in CASES if CASES[case].dtype == torch.float32])
def test_learned_grids_of_every_model_are_written_with_the_same_bytes_again(name, case, tmp_path):
    _writes_the_same(name, case, True, tmp_path)


@all_of_them
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "llama"])
@pytest.mark.parametrize(
    "case", [case for case in CASES if case not in ("int4 groups", "mixed", "fp8 blocks and inputs")]
)
def test_fixed_grids_of_every_model_are_written_with_the_same_bytes_again(name, case, tmp_path):
    _writes_the_same(name, case, False, tmp_path)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of a scheme, made once."""
    made = {}

    def folder(case, name="llama"):
        if (case, name) not in made:
            made[case, name] = tmp_path_factory.mktemp("folders") / "folder"
            fq.export_compressed_tensors(prepared(name, case), made[case, name])
        return made[case, name]

    return folder


_KINDS = ["int4 groups", "uint4 groups", "int3 channels", "w8a8 static", "fp8 static", "int4 groups bfloat16", "mxfp4",
          "fp8 blocks and inputs", "nvfp4 inputs"]  # fmt: skip


def _loaded(folders, case, **options):
    return fq.load_grids(make("llama", CASES[case].dtype), folders(case), batch(), **options)


def _written(model, folder):
    fq.export_compressed_tensors(model, folder)
    return tensors_of(folder)


def _assert_same_tensors(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(bits(one[name]), bits(other[name]))] == []


@pytest.mark.parametrize(
    ("case", "learned"),
    [*((case, False) for case in _KINDS[:: 1 if ALL else 2]), ("uint4 groups", True), ("w8a8 static", True)],
)
def test_codes_survive_copies_states_and_a_forward_pass_in_training(folders, case, learned, tmp_path):
    expected = tensors_of(folders(case))
    model = _loaded(folders, case, learned=learned)
    _assert_same_tensors(_written(copy.deepcopy(model), tmp_path / "copied"), expected)
    _assert_same_tensors(_written(pickle.loads(pickle.dumps(model)), tmp_path / "pickled"), expected)
    other = _loaded(folders, case, learned=learned)
    for value in (*other.parameters(), *other.buffers()):
        if value.is_floating_point() and value.numel() > 1:
            value.data.mul_(1.5)
    other.load_state_dict(model.state_dict())
    _assert_same_tensors(_written(other, tmp_path / "state"), expected)
    model.train()(**batch())
    _assert_same_tensors(_written(model.eval(), tmp_path / "trained"), expected)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("case", ["int4 groups", "uint4 groups", "w8a8 static", "fp8 weights"])
def test_training_moves_learned_scales_and_keeps_fixed_ones(folders, case, learned, tmp_path):
    before = tensors_of(folders(case))
    model = _loaded(folders, case, learned=learned).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for seed in range(3):
        model(**batch(seed), labels=batch(seed)["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = _written(model.eval(), tmp_path / "after")
    assert after.keys() == before.keys()
    for kind in ("weight_scale", "input_scale"):
        # Queries and keys of a tiny model have gradients of about 0.
        still = (f"q_proj.{kind}", f"k_proj.{kind}")
        scales = [name for name in after if name.endswith(kind) and not name.endswith(still)]
        moved = [name for name in scales if not torch.equal(bits(after[name]), bits(before[name]))]
        assert moved == (scales if learned else [])
    codes = [name for name in after if name.endswith(("weight_packed", "proj.weight"))]
    assert any(not torch.equal(bits(after[name]), bits(before[name])) for name in codes)


def test_the_float_tensors_of_the_folder_are_loaded_too(folders):
    model = make()
    with torch.no_grad():
        for value in model.parameters():
            value.fill_(7)
    again = fq.load_grids(model, folders("int4 groups"), batch()).eval()
    assert_same_bits(logits(again), logits(prepared("llama", "int4 groups")))


# --- folders that do not fit ---------------------------------------------------------------------------


@pytest.fixture
def damaged(tmp_path):
    """A folder in shards, to damage."""
    fq.export_compressed_tensors(prepared(), tmp_path / "folder", max_shard_size="20KB")
    return tmp_path / "folder"


def _edit(file, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def _refused(folder, error, message, model=None):
    """Returns nothing: `load_grids` raises, and the model is as it was."""
    model = make() if model is None else model
    before = {name: bits(value).clone() for name, value in model.state_dict().items()}
    with pytest.raises(error, match=message):
        fq.load_grids(model, folder, batch())
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(bits(after[name]), before[name]) for name in before)
    assert not any(isinstance(module, fq.nn.QuantizedLayer) for module in model.modules())


def test_another_architecture_is_refused(damaged):
    _refused(damaged, ValueError, "is for a model of type 'llama', and the model is 'qwen3'", make("qwen3"))


def test_a_model_that_is_not_of_transformers_is_refused(damaged):
    _refused(damaged, TypeError, "the model is a Sequential", torch.nn.Sequential(torch.nn.Linear(4, 4)))


def test_a_model_of_another_size_is_refused(damaged):
    _refused(damaged, ValueError, r"\(.*128.*\)", make(intermediate_size=128))
    _refused(damaged, ValueError, "lm_head|embed_tokens", make(vocab_size=80))


def test_a_model_with_more_layers_is_refused(damaged):
    _refused(damaged, ValueError, r"layers\.2", make(num_hidden_layers=3, layer_types=["full_attention"] * 3))


def test_a_model_with_fewer_layers_is_refused(damaged):
    _refused(damaged, ValueError, r"layers\.1", make(num_hidden_layers=1, layer_types=["full_attention"]))


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    _refused(tmp_path / "none", FileNotFoundError, "There is no file or folder '.*none'")


def test_a_missing_shard_is_named(damaged):
    shard = sorted(damaged.glob("*.safetensors"))[1]
    shard.unlink()
    _refused(damaged, FileNotFoundError, f"has no {shard.name}, which its index names")


def test_a_truncated_shard_is_named(damaged):
    shard = sorted(damaged.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-16])
    _refused(damaged, ValueError, f"{shard.name} is damaged")


def test_a_tensor_that_only_the_index_has_is_named(damaged):
    _edit(
        damaged / "model.safetensors.index.json",
        lambda index: index["weight_map"].update({"model.more.weight": next(iter(index["weight_map"].values()))}),
    )
    _refused(damaged, ValueError, "lack tensors that its index names: model.more.weight")


def test_an_index_without_a_shard_is_refused(damaged):
    """Tensors of a file that the index does not name are not there."""
    index = json.loads((damaged / "model.safetensors.index.json").read_text())["weight_map"]
    last = sorted(set(index.values()))[-1]
    _edit(
        damaged / "model.safetensors.index.json",
        lambda found: found.update(weight_map={k: v for k, v in index.items() if v != last}),
    )
    _refused(damaged, ValueError, "it has no model|do not have the format pack-quantized: there is no weight_")


def test_a_strategy_without_a_grid_is_named(damaged):
    _edit(
        damaged / "config.json",
        lambda config: config["quantization_config"]["config_groups"]["group_0"]["weights"].update(strategy="block"),
    )
    _refused(damaged, ValueError, "q_proj in .*strategy 'block', which fakequant has no grid for|strategy 'block'")


@pytest.mark.parametrize(
    "change",
    [dict(num_bits=8), dict(num_bits=3), dict(group_size=16), dict(strategy="channel", group_size=None),
     dict(num_bits="four"), dict(num_bits=0), dict(group_size=0), dict(type="float"), dict(type="complex"),
     dict(symmetric=False), dict(strategy="tensor", group_size=None)],
    ids=str,
)  # fmt: skip
def test_groups_that_do_not_fit_the_tensors_are_refused(damaged, change):
    _edit(
        damaged / "config.json",
        lambda config: config["quantization_config"]["config_groups"]["group_0"]["weights"].update(change),
    )
    _refused(damaged, ValueError, r"proj|lm_head")


@pytest.mark.parametrize("method", [None, "gptq"])
def test_folders_of_other_methods_are_refused(damaged, method):
    def change(config):
        if method is None:
            config.pop("quantization_config")
        else:
            config["quantization_config"]["quant_method"] = method

    _edit(damaged / "config.json", change)
    _refused(damaged, ValueError, "no quantization_config" if method is None else "the quant_method 'gptq'")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"a": NaN', "\x00"])
def test_a_damaged_config_is_named(damaged, text):
    (damaged / "config.json").write_text(text)
    _refused(damaged, ValueError, "config.json is damaged")


def test_codes_without_a_group_are_named(damaged):
    _edit(
        damaged / "config.json",
        lambda config: config["quantization_config"]["config_groups"]["group_0"].update(targets=["lm_head"]),
    )
    _refused(damaged, ValueError, "stores codes of model.layers.*but no group")


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_of_which_some_are_missing_are_refused(name, tmp_path):
    from safetensors.torch import save_file

    fq.export_compressed_tensors(prepared(name), tmp_path / "folder")
    found = tensors_of(tmp_path / "folder")
    gone = next(key for key in found if ".experts.2." in key and key.endswith("weight_scale"))
    found.pop(gone)
    save_file(found, tmp_path / "folder/model.safetensors")
    _refused(tmp_path / "folder", ValueError, "stores some parts of", make(name))
