"""The commands `summary`, `verify` and `report` on models and data of users."""

import inspect
import json
import sys

import pytest
import torch

import fakequant as fq
from fakequant._cli import main
from fakequant._verify.verdict import Verification
from thoroughness import ALL

GOOD = """
import torch, fakequant as fq
from torch import nn
from neighbour import WIDTH
print("noise on stdout")
torch.manual_seed(0)
data = [torch.randn(8, WIDTH)]
empty = []
def batches():
    yield from data
def no_batches():
    return iter(())
def float_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 3))
def make():
    model = fq.prepare(float_model(), fq.recipes.int8(target="onnxruntime-x86"), data[0])
    return fq.calibrate(model, data, progress=False)
model = make()
config = fq.recipes.w4a8(first_last_bits=None)
def needs(argument): ...
def divides():
    return 1 / 0
def leaves():
    raise SystemExit(4)
tensor = data[0]
def score(model):
    return 0.5
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder with good.py, its exported model and its state."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "good.py").write_text(GOOD)
    (folder / "neighbour.py").write_text("WIDTH = 6\n")
    torch.manual_seed(0)
    data = torch.randn(8, 6)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    model = fq.prepare(model, fq.recipes.int8(target="onnxruntime-x86"), data)
    model = fq.calibrate(model, [data], progress=False)
    fq.export_onnx(model, folder / "model.onnx", data)
    torch.save(model.state_dict(), folder / "state.pt")
    return folder


@pytest.fixture
def here(exported, monkeypatch):
    """Changes into that folder."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(exported)
    return exported


def fails(arguments, capsys, *parts):
    """Asserts exit code 2, empty stdout and one line on stderr with all parts; returns the line."""
    code = main(list(map(str, arguments)))
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line != "noise on stdout"]
    assert (code, out, len(lines)) == (2, "", 1), err
    assert lines[0].startswith(f"fakequant {arguments[0]}: ")
    for part in parts:
        assert part in lines[0]
    return lines[0]


# --- verify ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["good.py:model", "good.py:make", "good:make"])
@pytest.mark.parametrize("data", ["good.py:data", "good.py:batches"])
def test_verify_exits_with_0_if_all_codes_are_equal(model, data, here, capsys):
    assert main(["verify", model, "model.onnx", data, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert found["tensors"][0]["codes"] == 48
    assert main(["verify", model, "model.onnx", data, "--state", "state.pt", "--steps", "1"]) == 0
    assert "The runtime computes what was trained." in capsys.readouterr().out


def test_verify_exits_with_1_if_codes_differ(here, capsys, monkeypatch):
    monkeypatch.setattr(Verification, "ok", False)
    assert main(["verify", "good.py:model", "model.onnx", "good.py:data", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


@pytest.mark.parametrize("content", [b"", b"not a model" * 50, b"\x08\x07"])
def test_verify_refuses_a_corrupt_onnx_file(content, here, tmp_path, capsys):
    (tmp_path / "bad.onnx").write_bytes(content)
    line = fails(["verify", "good.py:model", tmp_path / "bad.onnx", "good.py:data"], capsys, "bad.onnx", "; use a file")
    assert "fakequant.export_onnx" in line


def test_verify_refuses_a_truncated_onnx_file(here, tmp_path, capsys):
    whole = (here / "model.onnx").read_bytes()
    (tmp_path / "cut.onnx").write_bytes(whole[: len(whole) // 2])
    fails(["verify", "good.py:model", tmp_path / "cut.onnx", "good.py:data"], capsys, "cut.onnx", "; use a file")


def test_verify_refuses_an_onnx_file_of_another_model(here, tmp_path, capsys):
    onnx = pytest.importorskip("onnx")
    value = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None, 6]) for name in "xy"]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", value[:1], value[1:])
    opset = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=8), tmp_path / "foreign.onnx")
    arguments = ["verify", "good.py:model", tmp_path / "foreign.onnx", "good.py:data"]
    fails(arguments, capsys, "foreign.onnx does not belong to the model", "; export the model again")


def test_verify_refuses_a_missing_onnx_file_and_a_folder(here, capsys):
    fails(["verify", "good.py:model", "none.onnx", "good.py:data"], capsys, "There is no file 'none.onnx'")
    fails(["verify", "good.py:model", ".", "good.py:data"], capsys, "There is no file '.'")


@pytest.mark.parametrize("data", ["good.py:empty", "good.py:no_batches"])
def test_verify_refuses_an_empty_dataset(data, here, capsys):
    fails(["verify", "good.py:model", "model.onnx", data], capsys, "no batches")


@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
def test_verify_without_a_package_names_the_install_command(package, here, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    arguments = ["verify", "good.py:model", "model.onnx", "good.py:data"]
    fails(arguments, capsys, f"{package}, which is not installed", 'pip install "fakequant[')


def test_commands_without_torch_name_the_install_command(here, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    fails(["summary", "good.py:model"], capsys, 'torch, which is not installed; use: pip install "fakequant[torch]"')
    arguments = ["verify", "good.py:model", "model.onnx", "good.py:data"]
    fails(arguments, capsys, 'torch, which is not installed; use: pip install "fakequant[onnx]"')


# --- verify --time, --runtime -----------------------------------------------------------------------------


@pytest.mark.parametrize("data", ["good.py:batches"] + (["good.py:data", "good.py:tensor"] if ALL else []))
def test_verify_with_time_adds_the_latency_of_the_first_batch(data, here, capsys):
    assert main(["verify", "good.py:model", "model.onnx", data, "--time", "--threads", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    assert sum(t["codes"] for t in found["tensors"]) == 8 * 6 + 8 * 8  # the first batch is verified too
    time = found["latency"]
    assert (time["runtime"], time["threads"], time["shapes"]) == ("onnxruntime", 2, [[8, 6]])
    assert time["median_ms"] > 0
    assert time["float_median_ms"] > 0


def test_verify_with_time_prints_the_latency_below_the_verdict(here, capsys):
    assert main(["verify", "good.py:model", "model.onnx", "good.py:data", "--time"]) == 0
    verdict, _, below = capsys.readouterr().out.partition("The runtime computes what was trained.")
    assert verdict
    assert below.startswith("\n\nonnxruntime, 1 thread, batch of 8x6\n")
    assert "time over float: " in below


def test_verify_without_time_has_no_latency(here, capsys):
    assert main(["verify", "good.py:model", "model.onnx", "good.py:data", "--json"]) == 0
    assert "latency" not in json.loads(capsys.readouterr().out)


def test_verify_runs_the_file_in_the_chosen_runtime(here, capsys):
    pytest.importorskip("openvino")
    arguments = ["verify", "good.py:model", "model.onnx", "good.py:data", "--runtime", "openvino", "--time", "--json"]
    assert main(arguments) in (0, 1)  # the file is for another runtime
    found = json.loads(capsys.readouterr().out)
    assert (found["runtime"], found["latency"]["runtime"]) == ("openvino", "openvino")


def test_verify_refuses_wrong_options_of_time_and_runtime(here, capsys):
    call = ["verify", "good.py:model", "model.onnx", "good.py:data"]
    fails([*call, "--threads", "2"], capsys, "--threads is for measuring the time; use it with --time")
    fails([*call, "--time", "--threads", "0"], capsys, "expected a whole number of at least 1, got '0'")
    fails([*call, "--runtime", "tflite"], capsys, "invalid choice: 'tflite'")
    fails([*call, "--runtime", "executorch"], capsys, "is not an ExecuTorch program; use a .pte file")


@pytest.mark.parametrize("data", ["good.py:empty", "good.py:no_batches"])
def test_verify_with_time_refuses_an_empty_dataset(data, here, capsys):
    fails(["verify", "good.py:model", "model.onnx", data, "--time"], capsys, "no batches; give it at least one")


def test_verify_without_openvino_names_the_install_command(here, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    arguments = ["verify", "good.py:model", "model.onnx", "good.py:data", "--runtime", "openvino"]
    fails(arguments, capsys, "openvino, which is not installed", 'pip install "fakequant[openvino]"')


# --- FILE.py:NAME ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ("none.py:model", ["There is no file 'none.py'", "FILE.py:NAME"]),
        ("no_such_module:model", ["There is no module 'no_such_module'"]),
        ("good.none:model", ["There is no module 'good.none'"]),
        ("../good:model", ["'../good' is neither"]),
        ("good.py", ["'good.py' is not a name to load"]),
        ("good.py:modle", ["good.py has no 'modle'; near: model"]),
        ("good.py:data", ["good.py:data is of type list; name a torch.nn.Module"]),
        ("good.py:batches", ["good.py:batches() returned generator"]),
        ("good.py:needs", ["good.py:needs raised TypeError: ", "'argument'"]),
        ("good.py:divides", ["good.py:divides raised ZeroDivisionError in line 23: division by zero; --debug"]),
        ("good.py:leaves", ["good.py:leaves called sys.exit(4)"]),
    ],
)
def test_names_that_do_not_give_a_model_are_refused(model, parts, here, capsys):
    fails(["summary", model], capsys, *parts)
    fails(["verify", model, "model.onnx", "good.py:data"], capsys, *parts)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys\nsys.exit(3)\n", "bad.py called sys.exit(3)"),
        ("x = 1\nraise ValueError('two\\nlines')\n", "bad.py raised ValueError in line 2: two; lines; --debug shows"),
        ("def broken(:\n", "bad.py raised SyntaxError"),
        ("import no_such_module\n", "bad.py raised ModuleNotFoundError in line 1: No module named 'no_such_module'"),
        ("import argparse\nargparse.ArgumentParser().parse_args()\n", "bad.py has no 'model'"),
    ],
)
def test_a_model_file_that_fails_is_reported_in_one_line(code, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["fakequant", "summary", "bad.py:model"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text(code)
    fails(["summary", "bad.py:model"], capsys, message)
    assert sys.argv == ["fakequant", "summary", "bad.py:model"]
    if "has no" not in message:
        assert "_fakequant_bad" not in sys.modules


def test_debug_shows_where_a_model_file_failed(here, capsys):
    assert main(["summary", "good.py:divides", "--debug"]) == 2
    err = capsys.readouterr().err
    assert "return 1 / 0" in err
    assert "ZeroDivisionError" in err


def test_verify_refuses_data_that_is_not_iterable(here, capsys):
    fails(["verify", "good.py:model", "model.onnx", "good.py:config"], capsys, "good.py:config is of type QuantConfig")


# --- --state --------------------------------------------------------------------------------------------


def test_a_state_that_cannot_be_loaded_is_refused_with_a_reason(here, tmp_path, capsys):
    def fails_with(path, *parts):
        fails(["verify", "good.py:make", "model.onnx", "good.py:data", "--state", path], capsys, *parts)

    path = tmp_path / "other.pt"
    fails_with(path, "There is no file", "other.pt")
    path.write_bytes(b"not a checkpoint")
    fails_with(path, "cannot be read as a checkpoint", "torch.save(model.state_dict(), FILE)")
    torch.save(torch.nn.Linear(2, 2), path)  # would run code when loaded
    fails_with(path, "cannot be read as a checkpoint")
    torch.save([1], path)
    fails_with(path, "other.pt holds list")
    torch.save({"epoch": 3, "0.weight": torch.zeros(8, 6)}, path)
    fails_with(path, "does not fit the model: it lacks 0.bias, ", " more, and the model has no epoch; load a state of")
    state = torch.load(here / "state.pt")
    torch.save({**state, "0.bias": torch.zeros(5)}, path)
    fails_with(path, "does not fit the model: ", "0.bias", "; load a state of")


# --- summary --------------------------------------------------------------------------------------------


def test_summary_prints_the_library_summary(here, capsys):
    assert main(["summary", "good.py:model"]) == 0
    assert capsys.readouterr().out == f"{fq.summary(sys.modules['_fakequant_good'].model)}\n"
    assert main(["summary", "good.py:model", "--json"]) == 0
    assert [layer["path"] for layer in json.loads(capsys.readouterr().out)["layers"]] == ["0", "2"]


@pytest.mark.parametrize(
    ("recipe", "weight"),
    [
        ("int8", "int7 narrow, per channel on axis 0"),
        ("int8_dynamic", "int7 narrow, per channel on axis 0"),
        ("w4a8", "int7 narrow, per channel on axis 0"),  # the first layer
        ("lsq2", "int7 narrow, per channel on axis 0, learned"),
        ("fp8", "e4m3fn, per channel on axis 0"),
        ("nvfp4", "e2m1, per group of 16 on axis 1, scales e4m3fn"),
        ("good.py:config", "int4, per channel on axis 0"),
    ],
)
def test_summary_with_a_recipe_shows_what_it_would_quantize(recipe, weight, here, capsys):
    assert main(["summary", "good.py:float_model", "--recipe", recipe, "--data", "good.py:batches", "--json"]) == 0
    layers = json.loads(capsys.readouterr().out)["layers"]
    assert layers[0]["weight"].startswith(weight)  # for the target that `check` tries


def test_summary_with_a_recipe_leaves_the_model_unchanged(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "plain.py").write_text("from torch import nn\nmodel = nn.Sequential(nn.Linear(4, 4))\n")
    assert main(["summary", f"{tmp_path}/plain.py:model", "--recipe", "int8_dynamic"]) == 0
    capsys.readouterr()
    assert type(sys.modules["_fakequant_plain"].model[0]) is torch.nn.Linear


def test_summary_with_a_recipe_that_quantizes_nothing_gives_reasons(here, capsys):
    arguments = ["summary", "good.py:float_model", "--recipe", "int4_weight_only"]
    fails(arguments, capsys, "Nothing in the model would be quantized; 0: `group_size` 32 does not divide")


def test_summary_needs_a_recipe_or_a_prepared_model(here, capsys):
    fails(["summary", "good.py:float_model"], capsys, "good.py:float_model is not prepared; ", "--recipe int8")
    fails(["summary", "good.py:model", "--recipe", "int8"], capsys, "is already prepared; remove --recipe")
    fails(["summary", "good.py:model", "--target", "generic"], capsys, "--target is for float models; use it with")
    fails(["summary", "good.py:float_model", "--recipe", "int8"], capsys, "int8 needs batches", "--data FILE.py:NAME")
    fails(
        ["summary", "good.py:float_model", "--recipe", "good.py:data"], capsys, "good.py:data is of type list; name a"
    )


# --- check ----------------------------------------------------------------------------------------------


def test_check_tries_the_whole_flow(here, capsys):
    assert main(["check", "good.py:float_model", "good.py:batches", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["target"] == "onnxruntime-x86"
    assert found["integer_multiplications"] == found["multiplications"] == 8 * (6 * 8 + 8 * 3)
    assert main(["check", "good.py:float_model", "good.py:data", "--recipe", "good.py:config"]) == 0
    assert "verify        | ok" in capsys.readouterr().out


def test_check_exits_with_1_if_a_stage_fails(here, capsys):
    assert main(["check", "good.py:model", "good.py:data"]) == 1
    assert "prepare | FAILED | ValueError: The model is prepared already" in capsys.readouterr().out


# --- report ---------------------------------------------------------------------------------------------


@pytest.fixture
def reported(monkeypatch):
    """Replaces fakequant.report and records its calls."""
    calls = []
    signature = inspect.signature(fq.report)

    def report(*args, **named):
        signature.bind(*args, **named)
        model, folder, data = args
        calls.append((model, folder, data, named))
        (folder / "figures").mkdir(parents=True)
        (folder / "figures" / "a.png").touch()
        return folder / "report.html"

    monkeypatch.setitem(vars(fq), "report", report)
    return calls


def test_report_passes_model_data_and_options_to_the_library(here, tmp_path, reported, capsys):
    out = tmp_path / "new" / "report"
    arguments = ["report", "good.py:model", "--data", "good.py:data", "--float", "good.py:float_model"]
    arguments += ["--state", "state.pt", "--out", str(out), "--title", "T", "--steps", "2", "--json"]
    assert main(arguments) == 0
    expected = {"report": str(out / "report.html"), "figures": [str(out / "figures" / "a.png")]}
    assert json.loads(capsys.readouterr().out) == expected
    [(model, folder, data, named)] = reported
    good = sys.modules["_fakequant_good"]
    assert (model, folder, data) == (good.model, out, good.data)
    assert type(named.pop("float_model")) is torch.nn.Sequential
    assert named == {"title": "T", "steps": 2, "progress": False}


def test_report_loads_the_state_into_the_model(here, tmp_path, reported, capsys):
    state = torch.load(here / "state.pt")
    torch.save({**state, "0.bias": torch.full((8,), 7.0)}, tmp_path / "sevens.pt")
    arguments = ["good.py:make", "--data", "good.py:data", "--state", str(tmp_path / "sevens.pt")]
    assert main(["report", *arguments, "--out", str(tmp_path / "r")]) == 0
    assert reported[0][0][0].bias.tolist() == [7.0] * 8


def test_report_loads_a_separate_state_into_the_float_model(here, tmp_path, reported, capsys):
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    torch.save(model.state_dict(), tmp_path / "float.pt")
    arguments = ["report", "good.py:make", "--data", "good.py:data", "--out", str(tmp_path / "r")]
    state = ["--float-state", str(tmp_path / "float.pt")]
    assert main([*arguments, "--float", "good.py:float_model", *state]) == 0
    assert torch.equal(reported[0][3]["float_model"][0].weight, model[0].weight)
    capsys.readouterr()
    fails([*arguments, *state], capsys, "use --float MODEL too")
    arguments += ["--float", "good.py:float_model", "--float-state"]
    fails([*arguments, "none.pt"], capsys, "--float-state needs")
    fails([*arguments, "state.pt"], capsys, "saved before fakequant.prepare")


def test_report_prints_the_path_of_the_page(here, tmp_path, reported, capsys):
    assert main(["report", "good.py:model", "--data", "good.py:data", "--out", str(tmp_path / "r")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'r' / 'report.html'}\n"
    assert reported[0][3] == {"float_model": None, "title": None, "steps": None, "progress": False}


@pytest.mark.parametrize("data", ["good.py:empty", "good.py:model"])
def test_report_refuses_empty_or_wrong_data(data, here, tmp_path, reported, capsys):
    fails(["report", "good.py:model", "--data", data, "--out", tmp_path], capsys, data)
    assert reported == []


def test_report_checks_its_folder_before_it_loads_anything(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below" / "it"):
        arguments = ["report", "none.py:model", "--data", "none.py:data", "--out", out]
        fails(arguments, capsys, f"{str(out)!r} cannot be written: ", "file' is a file; use another folder")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    fails(
        ["report", "none.py:model", "--data", "none.py:data", "--out", tmp_path / "new"],
        capsys,
        "permission denied; use",
    )
    assert not (tmp_path / "new").exists()


# --- card -------------------------------------------------------------------------------------------------


def test_card_prints_float_beside_the_file_in_every_format(here, capsys):
    call = ["card", "good.py:model", "good.py:batches", "model.onnx", "--no-time", "--float", "good.py:float_model"]
    assert main(call) == 0
    assert capsys.readouterr().out.splitlines()[4].startswith("model.onnx | onnxruntime |")
    assert main([*call, "--format", "markdown", "--evaluate", "good.py:score"]) == 0
    assert capsys.readouterr().out.splitlines()[2:5:2] == [
        "| model | runtime | score | bytes | in integers | verify |",
        "| float | torch | 0.5 | 332 | - | - |",
    ]
    assert main([*call, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]
    fails([*call, "--evaluate", "good.py:empty"], capsys, "good.py:empty is of type list; name a function")
