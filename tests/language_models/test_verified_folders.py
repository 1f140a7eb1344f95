"""`verify` of folders, in transformers: a few times in a process of its own, otherwise in this one."""

import json
import subprocess

import pytest
import torch
from safetensors.torch import save_file

import fakequant as fq
from fakequant import presets, recipes
from fakequant._runtimes.transformers import running
from fakequant._verify import verify_weights
from thoroughness import ALL, only_in_test_all
from tiny_language_models import TARGET, batch, bits, make, prepared, tensors_of, weights


@pytest.fixture
def here(monkeypatch):
    """Runs folders in this process, which is faster."""

    def run(command, **options):
        try:
            running._main(command[-1])
        except Exception as error:
            return subprocess.CompletedProcess(command, 1, "", f"{type(error).__name__}: {error}")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(running.subprocess, "run", run)


def _exported(folder, name="llama", case="int4 groups", **options):
    model = prepared(name, case, **options)
    fq.export_compressed_tensors(model, folder)
    return model


def _edit(folder, change, name="config.json"):
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))


def _change_tensor(folder, name, change):
    tensors = tensors_of(folder)
    tensors[name] = change(tensors[name].clone())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# --- in a process of its own ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "case"), [pytest.param("llama", "int4 groups", marks=only_in_test_all), ("mixtral", "fp8 weights")]
)
def test_exported_folders_are_verified_in_another_process(name, case, tmp_path):
    model = _exported(tmp_path / "folder", name, case)
    found = fq.verify(model, tmp_path / "folder", [batch(), batch(5)])
    assert found.ok, str(found)
    assert found.outputs.runtime_is_equal
    assert found.outputs.runtime_difference == 0
    kind = {"int4 groups": "pack", "fp8 weights": "float"}[case]
    assert set(found.kernels.values()) == {f"{kind}-quantized, dequantized"}


def test_a_folder_that_transformers_cannot_run_is_refused_with_its_words(tmp_path):
    """transformers has no place for zero points of experts."""
    model = _exported(tmp_path / "folder", "mixtral", "uint4 groups")
    with pytest.raises(ValueError, match=r"transformers cannot load or run .*folder: .*conversion of the weights"):
        fq.verify(model, tmp_path / "folder", [batch()])


# --- in this process -------------------------------------------------------------------------------------


def test_a_changed_code_is_named_with_its_layer(tmp_path, here):
    model = _exported(tmp_path / "folder")
    name = "model.layers.1.mlp.up_proj.weight_packed"
    _change_tensor(tmp_path / "folder", name, lambda codes: codes ^ torch.eye(*codes.shape, dtype=torch.int32))
    found = fq.verify(model, tmp_path / "folder", [batch()])
    assert not found.ok
    assert "model.layers.1.mlp.up_proj.weight" in str(found)
    wrong = [report for report in found.tensors if report.prepared_differ or report.runtime_differ]
    assert [report.path for report in wrong] == ["model.layers.1.mlp.up_proj.weight"]
    assert "weight_packed" in wrong[0].why
    assert found.outputs.runtime_unexplained > 0


def test_the_pooler_of_bert_is_named_with_the_reason(tmp_path, here):
    """Its input has two axes."""
    model = _exported(tmp_path / "folder", "bert", "w8a8 per token")
    found = fq.verify(model, tmp_path / "folder", [batch()])
    assert not found.ok
    assert "bert.pooler.dense differ for the same input" in found.outputs.why
    assert "one scale for all rows of an input with two axes" in found.outputs.why
    assert "bert.pooler.dense" in str(found)


@pytest.mark.parametrize(
    ("name", "case"),
    [("qwen2", "w8a8 static"), ("llama", "uint4 groups"), ("llama", "uint4 channels"),
     ("llama", "int8 tensor"), ("llama", "w8a8 per token"),
     ("llama", "fp8 static"), ("qwen3", "mixed"), ("gemma2", "mxfp6"), ("gemma3", "nvfp4"), ("qwen3_moe", "mixed"),
     ("qwen3", "fp8 blocks and inputs"), ("gemma3", "nvfp4 inputs"), ("llama", "mxfp8 inputs"),
     ("bert", "w8a8 static"), ("mixtral", "int4 groups bfloat16")][:: 1 if ALL else 2],
)  # fmt: skip
def test_exported_folders_are_ok(name, case, tmp_path, here):
    model = _exported(tmp_path / "folder", name, case)
    found = fq.verify(model, tmp_path / "folder", [batch(), batch(5)])
    assert found.ok, str(found)


@pytest.mark.parametrize("case", ["nvfp4", "float experts"])
def test_experts_that_transformers_loads_with_other_values_are_not_ok(case, tmp_path, here):
    if case == "nvfp4":
        model = _exported(tmp_path / "folder", "mixtral", "nvfp4")
    else:
        model = fq.prepare(make("mixtral"), recipes.int4_weight_only(32, target=TARGET).skip("*experts*"), batch())
        fq.export_compressed_tensors(model.eval(), tmp_path / "folder")
    try:
        found = fq.verify(model, tmp_path / "folder", [batch()])
    except ValueError as error:
        assert "experts" in str(error)  # noqa: PT017
    else:
        assert not found.ok
        assert "experts" in str(found)


def _rope(config):
    place = config.get("rope_parameters") or config
    place["rope_theta"] = 20000.0


@pytest.mark.parametrize(
    "change",
    [
        _rope,
        lambda config: config.update(hidden_act="gelu"),
        lambda config: config.update(rms_norm_eps=1e-3),
        lambda config: config.update(num_hidden_layers=1),
        lambda config: config.update(num_hidden_layers=3),
        lambda config: config.update(num_key_value_heads=4),
        lambda config: config.update(head_dim=32),
        lambda config: config.update(mlp_bias=False),
        lambda config: config.update(attention_bias=False),
        lambda config: config.update(tie_word_embeddings=True),
        lambda config: config.update(vocab_size=32),
        lambda config: config.update(hidden_size=128),
    ],
    ids=["rope_theta", "hidden_act", "rms_norm_eps", "fewer layers", "more layers", "heads", "head_dim", "mlp_bias",
         "attention_bias", "tied", "vocab_size", "hidden_size"],
)  # fmt: skip
def test_a_changed_config_of_the_model_is_not_ok(change, tmp_path, here):
    model = _exported(tmp_path / "folder")
    _edit(tmp_path / "folder", change)
    try:
        found = fq.verify(model, tmp_path / "folder", [batch()])
    except ValueError as error:
        assert "transformers" in str(error) or "in the config.json of" in str(error)  # noqa: PT017
    else:
        assert not found.ok


def test_a_model_that_was_trained_on_after_the_export_is_not_ok(tmp_path, here):
    model = _exported(tmp_path / "folder")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.train()(**batch(), labels=batch()["input_ids"]).loss.backward()
    optimizer.step()
    found = fq.verify(model.eval(), tmp_path / "folder", [batch()])
    assert not found.ok
    names = {report.path for report in found.tensors if report.prepared_differ and "the folder has other" in report.why}
    assert {"model.layers.0.mlp.up_proj.weight", "lm_head.weight", "model.norm.weight"} <= names


def test_one_norm_weight_that_was_changed_is_not_ok(tmp_path, here):
    model = _exported(tmp_path / "folder")
    _change_tensor(
        tmp_path / "folder", "model.norm.weight", lambda value: torch.nextafter(value, torch.full_like(value, 9))
    )
    found = fq.verify(model, tmp_path / "folder", [batch()])
    assert not found.ok
    assert "model.norm.weight" in str(found)


def test_layers_that_transformers_loads_in_float_are_not_ok(tmp_path, here, monkeypatch):
    model = _exported(tmp_path / "folder")
    path = "model.layers.0.mlp.up_proj"
    layers = running._layers
    monkeypatch.setattr(running, "_layers", lambda model: (pair for pair in layers(model) if pair[0] != path))
    found = fq.verify(model, tmp_path / "folder", [batch()])
    assert not found.ok
    assert [report.why for report in found.tensors if report.runtime_differ] == [
        "transformers loads the layer in float"
    ]


@pytest.mark.parametrize("what", ["weights", "scheme"])
def test_a_layer_that_transformers_quantizes_in_another_way_is_not_ok(what, tmp_path, here, monkeypatch):
    """As a release of transformers with another rule would."""
    model = _exported(tmp_path / "folder", "llama", "w8a8 per token")
    layers = running._layers

    def changed(loaded):
        if what == "weights":
            loaded.get_submodule("model.layers.1.mlp.up_proj").bias.data.add_(1e-4)
        for path, (format, weight, inputs) in layers(loaded):
            yield path, (format, weight, {**inputs, "num_bits": 4} if what == "scheme" else inputs)

    monkeypatch.setattr(running, "_layers", changed)
    assert not fq.verify(model, tmp_path / "folder", [batch()]).ok


def test_a_model_that_is_not_deterministic_is_refused(tmp_path, here):
    model = _exported(tmp_path / "folder")
    model.model.norm.register_forward_hook(lambda module, args, y: y + torch.rand(()) * 1e-3)
    with pytest.raises(ValueError, match="The prepared model does not return the same for the same batch each time"):
        fq.verify(model, tmp_path / "folder", [batch()])


def test_a_folder_that_does_not_repeat_itself_is_refused(tmp_path, here, monkeypatch):
    model = _exported(tmp_path / "folder")
    run = verify_weights.run_folder
    monkeypatch.setattr(
        verify_weights, "run_folder", lambda *args, **options: run(*args, **options)._replace(repeats=False)
    )
    with pytest.raises(ValueError, match="transformers does not return the same for the same batch each time"):
        fq.verify(model, tmp_path / "folder", [batch()])


def test_no_batches_are_refused(tmp_path, here):
    model = _exported(tmp_path / "folder")
    with pytest.raises(ValueError, match="no batches"):
        fq.verify(model, tmp_path / "folder", [])


def test_a_folder_of_another_scheme_is_refused(tmp_path, here):
    _exported(tmp_path / "folder")
    other = fq.prepare(make(), weights(presets.int8()), batch()).eval()
    with pytest.raises(ValueError, match=r"The `config_groups` in the quantization_config of .*\n.*\nExport the model"):
        fq.verify(other, tmp_path / "folder", [batch()])


def test_verify_leaves_the_model_as_it_was(tmp_path, here):
    model = _exported(tmp_path / "folder")
    model(**batch())  # dynamic quantizers keep the scales of their last call
    model.train()
    before = {name: bits(value).clone() for name, value in model.state_dict().items()}
    assert fq.verify(model, tmp_path / "folder", [batch()]).ok
    assert model.training
    assert [name for name, value in model.state_dict().items() if not torch.equal(bits(value), before[name])] == []
