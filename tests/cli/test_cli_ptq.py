"""The command `ptq`, and the way from `check` to a verified file with commands alone."""

import json
import shlex
import sys
from importlib.util import find_spec

import pytest
import torch

import fakequant as fq
from fakequant._cli import commands, main
from fakequant._runtimes import find
from fakequant.ptq._try_methods import METHODS
from thoroughness import ALL

SCRIPT = """
import torch, fakequant as fq
from torch import nn
def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
def batches():
    torch.manual_seed(1)
    return [(torch.randn(32, 6), torch.zeros(32)) for _ in range(2)]
def endless():
    while True:
        yield torch.ones(4, 6)
@torch.no_grad()
def score(model):
    assert not model.training
    return -float(model(torch.ones(1, 6)).square().sum())
config = fq.QuantConfig(default=fq.LayerConfig(weight=fq.QuantSpec(bits=3, axis=0), input=fq.presets.uint8()))
number = 3
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Changes into a folder with script.py."""
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


ARGUMENTS = ["ptq", "script.py:make", "script.py:batches", "--recipe", "script.py:config"]


def test_ptq_shows_the_model_before_and_after_each_method(here, capsys):
    assert main([*ARGUMENTS, "--method", "gptq", "--method", "correct_bias", "--evaluate", "script.py:score"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[0].strip() for line in lines[2:6]] == ["float", "nearest", "+ gptq", "+ correct_bias"]
    assert lines[0].split() == ["model", "|", "SQNR", "dB", "|", "score", "|", "seconds"]


def make():
    scope: dict = {}
    exec(SCRIPT, scope)
    return scope["make"]()


def test_ptq_saves_a_state_that_a_prepared_model_loads(here, capsys):
    assert main([*ARGUMENTS, "--out", "q.pt", "--json", "--steps", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    floats, nearest, after = found["stages"]
    assert (floats["name"], nearest["name"], after["name"]) == ("float", "nearest", "adaround")
    assert after["sqnr"] > nearest["sqnr"]
    assert floats["score"] is None
    assert [layer["path"] for layer in found["changes"][0]["layers"]] == ["0", "2"]
    scope: dict = {}
    exec(SCRIPT, scope)
    model = fq.prepare(scope["make"](), scope["config"], torch.ones(1, 6))
    model.load_state_dict(torch.load(here / "q.pt"))
    assert model[0].weight_quantizer.frozen
    assert torch.equal(model[0].weight_quantizer(model[0].weight), model[0].weight)


def test_methods_after_equalize_compare_with_the_equalized_model(here, monkeypatch):
    seen = []

    def spy(model, data, *, reference, progress):
        seen.append((reference[0].weight.detach().clone(), model[0].weight.detach().clone()))
        return fq.ptq.gptq(model, data, reference=reference, progress=progress)

    monkeypatch.setitem(METHODS, "gptq", spy)
    for methods in (["gptq"], ["equalize", "gptq"]):
        options = [word for method in methods for word in ("--method", method)]
        assert main([*ARGUMENTS, *options]) == 0
    assert all(torch.equal(reference, weight) for reference, weight in seen)
    assert not torch.equal(seen[0][0], seen[1][0])


def test_steps_limit_the_batches_that_are_read(here, capsys):
    endless = [*ARGUMENTS[:2], "script.py:endless", *ARGUMENTS[3:], "--method", "correct_bias"]
    assert main([*endless, "--steps", "2"]) == 0


def test_ptq_loads_a_float_state_and_changes_the_target(here, capsys):
    torch.save(make().state_dict(), "float.pt")
    assert main([*ARGUMENTS[:3], "--state", "float.pt", "--target", "onnxruntime-x86"]) == 0
    assert "+ adaround" in capsys.readouterr().out


def test_all_methods_and_recipes_can_be_named():
    assert set(commands._METHODS) == set(METHODS)
    assert {*commands.RECIPES, "lsq"} == set(fq.recipes.__all__)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--method", "magic"], "invalid choice: 'magic'"),
        (["--method", "gptq", "--method", "smooth"], "smooth must come before"),
        (["--evaluate", "script.py:number"], "is of type int; name a function that takes a model"),
        (["--state", "none.pt"], "There is no file 'none.pt'"),
        (["--out", "script.py/q.pt"], "cannot be written"),
        (["--target", "abacus"], "abacus"),
    ],
)
def test_ptq_refuses_wrong_arguments_in_one_line(arguments, part, here, capsys):
    assert main([*ARGUMENTS, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert part in err


RECIPE = ["--recipe", "script.py:config"]


def test_a_model_goes_from_ptq_to_a_verified_file_without_a_script(here, capsys):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    assert main([*ARGUMENTS, "--method", "gptq", "--out", "q.pt"]) == 0
    state = ["--state", "q.pt"]
    assert main(["export", "script.py:make", "script.py:batches", "model.onnx", *RECIPE, *state, "--json"]) == 0
    written = json.loads(capsys.readouterr().out.partition("{")[2].join(["{", ""]))
    assert written["bytes"] == (here / "model.onnx").stat().st_size
    assert list(written["integers"]) == ["0", "2"]
    assert main(["verify", "script.py:make", "model.onnx", "script.py:batches", *RECIPE, *state]) == 0
    assert main(["verify", "script.py:make", "model.onnx", "script.py:endless", *RECIPE, *state, "--steps", "2"]) == 0
    assert main([*ARGUMENTS, "--out", "other.pt"]) == 0  # adaround chooses other codes
    assert main(["verify", "script.py:make", "model.onnx", "script.py:batches", *RECIPE, "--state", "other.pt"]) == 2
    assert "different in the file" in capsys.readouterr().err


def next_lines(capsys):
    """Returns the commands that the last one ends with, as arguments of `main`."""
    return [shlex.split(line)[1:] for line in capsys.readouterr().out.partition("next:\n\n")[2].splitlines()]


def test_check_and_ptq_end_with_the_commands_to_type_next(here, capsys):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    assert main(["check", "script.py:make", "script.py:batches"]) == 0
    (ptq,) = next_lines(capsys)
    assert ptq == ["ptq", "script.py:make", "script.py:batches", "--recipe", "int8", "--out", "quantized.pt"]
    assert main(ptq) == 0
    export, verify, card = next_lines(capsys)
    assert main(export) == 0
    assert main([*verify, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.partition("{")[2].join(["{", ""]))["target"] == "onnxruntime-x86"
    capsys.readouterr()
    assert main([*card, "--no-time"]) == 0
    assert capsys.readouterr().out.splitlines()[2].startswith("float ")  # not the weights that ptq has changed


def test_the_next_commands_have_the_arguments_that_were_given(here, capsys):
    torch.save(make().state_dict(), "float one.pt")
    own = ["--target", "xnnpack", "--method", "gptq", "--method", "correct_bias", "--state", "float one.pt"]
    own = [*ARGUMENTS, *own, "--evaluate", "script.py:score", "--steps", "1"]
    assert main(own) == 0
    again, export, verify, card = next_lines(capsys)
    assert sorted(again) == sorted([*own, "--out", "quantized.pt"])
    prepared = [*RECIPE, "--target", "xnnpack", "--state", "quantized.pt"]
    model, data = own[1:3]
    assert export == ["export", model, data, "model.pte", *prepared]
    assert verify == ["verify", model, "model.pte", data, *prepared, "--steps", "1"]
    floats = ["--float", model, "--float-state", "float one.pt"]
    assert card == [
        "card", model, data, "model.pte", *prepared, *floats, "--evaluate", "script.py:score", "--steps", "1"
    ]  # fmt: skip


LANGUAGE_MODEL = """
import torch, transformers
def make():
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=1)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=4)).eval()
def texts():
    return [{"input_ids": torch.arange(1, 17).reshape(2, 8)}]
"""


@pytest.mark.parametrize(
    ("package", "options", "name"),
    [
        ("gguf", ["--recipe", "gguf"], "model.gguf"),
        ("compressed_tensors", ["--recipe", "fp8_block", "--target", "compressed-tensors"], "model"),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else "",
)
def test_a_language_model_goes_from_ptq_to_a_file(package, options, name, here, capsys, monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip(package)
    monkeypatch.setenv("TQDM_DISABLE", "1")
    (here / "language.py").write_text(LANGUAGE_MODEL)
    start = ["ptq", "language.py:make", "language.py:texts", *options, "--method", "gptq", "--out", "q.pt"]
    assert main(start) == 0
    export, verify, _ = next_lines(capsys)
    assert export[3] == name
    assert main(export) == 0
    if find_spec("cyllama") if package == "gguf" else ALL:  # transformers takes seconds, in a process of its own
        assert main(verify) == 0


@pytest.mark.parametrize(
    ("target", "name", "integers"), [("xnnpack", "model.pte", "1 of 2"), ("litert", "model.tflite", "1 of 2")]
)
def test_export_writes_what_the_target_reads(target, name, integers, here, capsys):
    pytest.importorskip(find(target).runtime.package)
    assert main([*ARGUMENTS, "--target", target, "--out", "q.pt"]) == 0
    arguments = ["script.py:make", "script.py:batches", name, *RECIPE, "--state", "q.pt", "--target", target]
    assert main(["export", *arguments]) == 0
    assert f"layers in integers: {integers}" in capsys.readouterr().out
    assert (here / name).is_file()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--target", "xnnpack"], "--target is for float models; use it with --recipe"),
        ([*RECIPE, "--base", "float.gguf"], "--base is for GGUF files"),
        (RECIPE, "not calibrated"),
        ([], "script.py:make is not prepared; add the --recipe and --target of `fakequant ptq`"),
        ([*RECIPE, "--state", "none.pt"], "There is no file 'none.pt'"),
    ],
    ids=str,
)
def test_export_refuses_wrong_arguments_in_one_line(arguments, part, here, capsys):
    assert main(["export", "script.py:make", "script.py:batches", "model.onnx", *arguments]) == 2
    assert part in capsys.readouterr().err
    assert not (here / "model.onnx").exists()
