"""Type checkers and editors see the types of the whole package, also of names that are imported on first use."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fakequant
from thoroughness import only_in_test_all

SCRIPT = """\
import fakequant as fq
from torch import Tensor, nn


def ship(model: nn.Module, data: list[Tensor], path: str) -> fq.results.Verification:
    prepared: nn.Module = fq.prepare(model, fq.recipes.int8(), example=data[0])
    fq.calibrate(prepared, data)
    report: fq.results.OnnxExport = fq.export_onnx(prepared, path, data[0])
    print(report.bytes, fq.summary(prepared).parameters)
    return fq.verify(prepared, path, data)


def wrong(model: nn.Module) -> None:
    fq.prepare(model, "int8")
    fq.verify(model).no_such_name
"""
# The lines of `wrong`, and words of the error of each checker.
WRONG = {14: ("QuantConfig",), 15: ("path",)}


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("types") / "user.py"
    path.write_text(SCRIPT)
    return path


@only_in_test_all
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_checker_finds_the_mistakes_of_a_script_and_no_others(checker, script):
    pytest.importorskip(checker)
    options = ["--strict", "--cache-dir", str(script.parent)] if checker == "mypy" else ["--pythonpath", sys.executable]
    found = subprocess.run(
        [sys.executable, "-m", checker, *options, str(script)], capture_output=True, text=True, check=False
    ).stdout
    errors = [line for line in found.splitlines() if "error:" in line or "- error" in line]
    lines = {int(line.split("user.py:")[1].split(":")[0]) for line in errors}
    assert lines == set(WRONG), found
    for number, words in WRONG.items():
        assert all(word in found for word in words), (number, found)


def test_names_that_are_imported_on_first_use_are_declared_for_checkers():
    tree = ast.parse(Path(fakequant.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    declared = {alias.asname: node.module for node in block.body for alias in node.names}
    modules = dict.fromkeys(fakequant._MODULES, "fakequant")
    assert declared == {name: f"fakequant.{module}" for name, module in fakequant._WHOLE_MODELS.items()} | modules
