"""A small run of the demo: its table, files and reproducibility; it restores the state of the process."""

import dataclasses
import json
import random
import re
from functools import partial
from typing import Any

import pytest

from thoroughness import only_in_test_all

torch = pytest.importorskip("torch")
for package in ("sklearn", "onnxscript", "onnxruntime", "matplotlib", "jinja2"):
    pytest.importorskip(package)
demo = pytest.importorskip("fakequant._demo.run")
digits_of_demo = pytest.importorskip("fakequant._demo.digits")
explain = pytest.importorskip("fakequant._verify.explain_codes")
result = pytest.importorskip("fakequant._demo.result")
onnx = pytest.importorskip("onnx")

SMALL: dict[str, Any] = {"epochs": 1, "images": 160, "timing": 0.05}


variants = demo.variants


def only_one():
    return [variant for variant in variants() if variant.name == "QAT int4"]


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Runs the demo once; returns its folder and result."""
    folder = tmp_path_factory.mktemp("first") / "made" / "by it"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "variants", only_one)
        patch.setattr(demo, "report", partial(demo.report, max_tensors=2))  # figures are slow
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return folder, demo.run(folder, progress=False, **SMALL)
        finally:
            torch.set_num_threads(threads)


def test_demo_table_lists_bits_bytes_times_and_codes(first):
    _, found = first
    lines = str(found).splitlines()
    assert re.split(r" *\| *", lines[0]) == [
        "model", "bits", "accuracy", "in the runtime", "bytes", "step time", "differing codes",
    ]  # fmt: skip
    cells = [re.split(r" *\| *", line) for line in lines[2:4]]
    assert lines[4] == ""
    assert [line[:2] for line in cells] == [["float", "32 / 32"], ["QAT int4", "4 / 4"]]
    # 23,738 float parameters; then codes (two per byte), scales and biases.
    assert [line[4] for line in cells] == ["94,952", "12,784"]
    assert cells[0][5] == "× 1.00"
    assert re.fullmatch(r"× \d+\.\d\d", cells[1][5])
    # 80 images: 1 and 16 channels of 8 × 8, four tensors of 32 channels of 4 × 4, and 32 means.
    codes = 80 * (64 + 16 * 64 + 4 * 32 * 16 + 32)
    assert [line[6] for line in cells] == ["–", f"0 of {codes:,}"]


def test_demo_writes_the_result_report_and_onnx_files(first):
    folder, found = first
    assert {path.name for path in folder.iterdir()} == {
        "report.html", "figures", "qat-int4.onnx", "result.json", "times.json", "card.md",
    }  # fmt: skip
    written = json.loads((folder / "result.json").read_text())
    rows = [dataclasses.asdict(row) for row in found.rows]
    times = {row["model"]: row.pop("step_time") for row in rows}
    assert written == {"test_images": 80, "rows": rows}
    assert json.loads((folder / "times.json").read_text())["step_time_over_float"] == times
    assert set(found.seconds) == {"float", "QAT int4", "step times", "report", "card"}
    assert found.rows[1].onnx_bytes == (folder / "qat-int4.onnx").stat().st_size
    assert found.rows[1].why == ""
    assert set(found.rows[1].kernels.values()) == {"QLinearConv", "QGemm"}
    onnx.checker.check_model(folder / "qat-int4.onnx", full_check=True)
    assert "QAT int4" in (folder / "report.html").read_text(encoding="utf-8")
    assert {"sensitivity.png", "layers-sqnr.png", "history-clipped.png"} <= {
        p.name for p in (folder / "figures").iterdir()
    }
    json.dumps(found.to_dict())


@only_in_test_all
def test_demo_is_reproducible_and_restores_process_state(first, tmp_path, monkeypatch, capsys):
    folder, found = first
    monkeypatch.setattr(demo, "variants", only_one)
    monkeypatch.setattr(demo._Run, "_report", lambda *_: None)  # the report is slow and tested elsewhere
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(5)
    random.seed(5)
    try:
        states = torch.get_rng_state(), random.getstate()
        with torch.no_grad():
            again = demo.run(tmp_path, **SMALL)
            assert not torch.is_grad_enabled()
        assert torch.equal(states[0], torch.get_rng_state())
        assert states[1] == random.getstate()
        assert torch.get_num_threads() == 2
        assert torch.get_default_dtype() == torch.float64
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float32)
    for name in ("qat-int4.onnx", "result.json"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
    assert [dataclasses.replace(row, step_time=None) for row in again.rows] == [
        dataclasses.replace(row, step_time=None) for row in found.rows
    ]
    _one_line_for_each_stage(capsys.readouterr())


def _one_line_for_each_stage(printed):
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert "\r" not in printed.err
    assert lines[0].startswith("fakequant ")
    assert [line.split("  ")[1] for line in lines if line.startswith("  ")] == [
        "float", "QAT int4", "step times", "card",
    ]  # fmt: skip
    assert all(re.search(r" \d+\.\d s$", line) for line in lines if line.startswith("  "))
    assert max(map(len, lines)) <= 100


def test_demo_lines_fit_a_terminal():
    row = result.Row(
        model="LSQ 2-bit", weight_bits=7, activation_bits=32, accuracy=100.0, runtime_accuracy=100.0, bytes=94952,
        step_time=10.0, differing_codes=2851200, codes=2851200,
    )  # fmt: skip
    lines = str(result.Result("fakequant-demo", [row], 900)).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[-3].startswith("Look at it       fakequant-demo/report.html ")


def test_demo_result_prints_the_reason_for_differing_codes():
    row = result.Row(model="LSQ 2-bit", weight_bits=2, activation_bits=2, accuracy=95.0, bytes=1, why="bias: it is")
    lines = str(result.Result("here", [row], 900)).splitlines()
    assert "LSQ 2-bit        integer model differs: bias: it is" in lines
    same = dataclasses.replace(row, why="")
    assert "integer model differs" not in str(result.Result("here", [same], 900))
    assert len("LSQ 2-bit        integer model differs: " + explain.BIAS) <= 100


def test_demo_result_prints_a_dash_for_missing_values():
    row = result.Row(model="PTQ int8", weight_bits=7, activation_bits=8, accuracy=98.222, bytes=24536)
    line = str(result.Result("here", [row], 900)).splitlines()[2]
    assert re.split(r" *\| *", line) == ["PTQ int8", "7 / 8", "98.22 %", "–", "24,536", "–", "–"]


def test_demo_variants_have_the_expected_names_and_bits():
    found = {variant.name: variant.config.default for variant in variants()}
    assert list(found) == ["PTQ int8", "QAT int8", "QAT int4", "LSQ 2-bit"]
    assert [layer.weight.bits for layer in found.values()] == [8, 8, 4, 2]
    assert [layer.input.bits for layer in found.values()] == [8, 8, 4, 2]
    assert [layer.learned for layer in found.values()] == [False, False, False, True]
    assert {variant.config.target for variant in variants()} == {"onnxruntime-x86"}


def test_demo_data_is_the_digits_split_by_seed():
    digits = digits_of_demo.load(seed=1)
    everything = torch.cat([digits.train_images, digits.test_images]).flatten(1)
    assert everything.shape == (1797, 64)
    assert (everything.min(), everything.max()) == (0, 1)
    labels = torch.cat([digits.train_labels, digits.test_labels])
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert not torch.equal(digits.test_labels, digits_of_demo.load(seed=0).test_labels)
    small = digits_of_demo.load(seed=1, images=160)
    assert torch.equal(small.test_images, torch.cat([digits.test_images, digits.train_images])[:80])


def test_demo_training_learns_the_digits():
    torch.manual_seed(0)
    digits, model, steps = digits_of_demo.load(), digits_of_demo.DigitsNet(), []
    digits_of_demo.train(model, digits, 4, digits_of_demo.FLOAT_RATE, 0, steps.append)
    assert steps == list(range(1, digits_of_demo.steps_of(digits, 4) + 1))
    assert not model.training
    assert digits_of_demo.accuracy(model, digits.test_images, digits.test_labels) > 85


def test_demo_certainty_is_the_mean_probability_of_the_label():
    scores = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    assert digits_of_demo.certainty(torch.nn.Identity(), scores, torch.tensor([0, 1])) == 50
    scores = torch.tensor([[3.0, 1.0], [1.0, 1.0]]).log()
    assert digits_of_demo.certainty(torch.nn.Identity(), scores, torch.tensor([0, 1])) == pytest.approx(62.5)
    assert digits_of_demo.accuracy(torch.nn.Identity(), scores, torch.tensor([0, 1])) == 50


def refuse(*_, **__):
    raise AssertionError("work began")


@pytest.mark.parametrize("where", ["file", "file/below", "/proc/nowhere"])
def test_demo_refuses_an_unusable_folder_before_any_work(tmp_path, monkeypatch, where):
    monkeypatch.setattr(demo, "load", refuse)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"^[^\n]*(is a file|cannot be written)[^\n]* Use [^\n]*\.$") as caught:
        demo.run(tmp_path / where, progress=False)
    assert where.rpartition("/")[2] in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seed": -1}, "`seed` must be a whole number, at least 0, got -1"),
        ({"epochs": 0}, "`epochs` must be a whole number, at least 1, got 0"),
        ({"images": 3}, "`images` must be a whole number, at least 20, got 3"),
        ({"timing": float("nan")}, "`timing` must be a number of seconds, got nan"),
    ],
)
def test_demo_refuses_invalid_arguments(tmp_path, wrong, message):
    with pytest.raises(ValueError, match=message):
        demo.run(tmp_path / "new", progress=False, **wrong)
    assert not (tmp_path / "new").exists()


def test_demo_without_scikit_learn_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn", None)
    with pytest.raises(
        ImportError, match=r'scikit-learn, which is not installed.\nUse: pip install "fakequant\[demo\]"'
    ):
        demo.run(tmp_path, progress=False)


def test_progress_bar_on_a_terminal_leaves_one_line(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with result.Progress(show=True).stage("work", total=2) as stage:
        stage.doing("something")
        assert list(stage.each("ab")) == ["a", "b"]
        stage.result = "done"
    printed = capsys.readouterr().err
    assert "work: something" in printed
    # The text after the last carriage return stays visible.
    assert re.fullmatch(r"  work        done +0\.\d s\n", printed.rpartition("\r")[2])


def test_failed_stage_prints_no_line(capsys):
    with pytest.raises(KeyboardInterrupt), result.Progress(show=True).stage("work", total=1):
        raise KeyboardInterrupt
    assert capsys.readouterr().err == ""
