"""The commands `bench` and `demo`."""

import dataclasses
import importlib
import inspect
import json
import sys
import types

import numpy as np
import pytest
import torch

import fakequant
from fakequant._cli import bench_command, contenders, main

OPERATIONS = [case.operation for case in contenders.make_cases(1 << 10, None)]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(bench_command, "ELEMENTS", 1 << 12)

    def best_times(runs, seconds):
        for run in runs.values():
            run()
        return {"ours": 2e-6, "copy": 1e-6, "torch": 8e-6}

    monkeypatch.setattr(bench_command, "best_times", best_times)


def test_bench_reports_every_operation_with_one_and_all_threads(quick, capsys):
    fakequant.set_num_threads(2)
    torchs = torch.get_num_threads()
    assert main(["bench", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["operation"], row["threads"]) for row in found["rows"]] == [(o, n) for n in (1, 2) for o in OPERATIONS]
    assert all(row["same_bits"] for row in found["rows"])
    figures = [(row["microseconds"], row["over_copy"], row["torch_over_ours"]) for row in found["rows"]]
    assert figures == [(2.0, 2.0, 4.0)] * len(figures)
    assert found["torch"] == torch.__version__
    assert (fakequant.get_num_threads(), torch.get_num_threads()) == (2, torchs)


def test_bench_runs_with_the_threads_it_reports(quick, monkeypatch, capsys):
    seen = []

    def watch(case):
        seen.append((fakequant.get_num_threads(), torch.get_num_threads()))
        return True

    monkeypatch.setattr(contenders.Case, "has_torchs_bits", watch)
    before = torch.get_num_threads()
    assert main(["bench", "--threads", "3"]) == 0
    assert torch.get_num_threads() == before
    assert seen == [(1, 1)] * len(OPERATIONS) + [(3, 3)] * len(OPERATIONS)
    text = capsys.readouterr().out
    assert "forward + packed mask, per channel | 3       |" in text


def test_bench_without_torch_leaves_out_the_comparison(quick, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    fakequant.set_num_threads(1)
    assert main(["bench"]) == 0
    text = capsys.readouterr().out
    assert "torch not installed" in text
    assert len([line for line in text.splitlines() if line.endswith("| -                 | -")]) == len(OPERATIONS)


def test_bench_exits_with_1_if_bits_differ_from_torchs(quick, monkeypatch, capsys):
    def with_a_negative_zero(elements, torch):
        cases = contenders_of(elements, torch)
        wrong = lambda: np.negative(np.zeros(2, np.float32))  # noqa: E731
        return [dataclasses.replace(cases[0], ours=wrong, torch=lambda: torch.zeros(2)), *cases[1:]]

    contenders_of = contenders.make_cases
    monkeypatch.setattr(bench_command, "make_cases", with_a_negative_zero)
    assert main(["bench", "--threads", "1", "--json"]) == 1
    assert [row["same_bits"] for row in json.loads(capsys.readouterr().out)["rows"]] == [False] + [True] * 4


# --- demo -----------------------------------------------------------------------------------------------


@pytest.fixture
def demo(monkeypatch):
    """Replaces fakequant._demo.run and records its calls."""
    calls = []

    class Result:
        def __str__(self):
            return "a table"

        def to_dict(self):
            return {"rows": []}

    signature = inspect.signature(importlib.import_module("fakequant._demo.run").run)

    def run(*args, **named):
        signature.bind(*args, **named)
        calls.append((str(args[0]), named["seed"]))
        print("a line of progress")
        return Result()

    module = types.ModuleType("fakequant._demo.run")
    module.run = run
    monkeypatch.setitem(sys.modules, "fakequant._demo", types.ModuleType("fakequant._demo"))
    monkeypatch.setitem(sys.modules, "fakequant._demo.run", module)
    return calls


def test_demo_prints_its_table_and_passes_folder_and_seed(demo, tmp_path, capsys):
    assert main(["demo"]) == 0
    assert capsys.readouterr() == ("a table\n", "a line of progress\n")
    assert main(["demo", "--out", str(tmp_path), "--seed", "7", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"rows": []}
    assert demo == [("fakequant-demo", 0), (str(tmp_path), 7)]


def test_demo_refuses_a_folder_that_cannot_be_written(demo, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["demo", "--out", str(tmp_path / "file")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "cannot be written" in err
    assert demo == []
