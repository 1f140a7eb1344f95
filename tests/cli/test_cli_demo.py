"""The command `demo`."""

import importlib
import inspect
import json
import sys
import types

import pytest

from fakequant._cli import main


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
