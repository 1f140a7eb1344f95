"""The notebooks in docs/notebooks run from the first cell to the last, and their results are shown as tables."""

import ast
import json
from pathlib import Path

import pytest

from thoroughness import only_in_test_all

pytest.importorskip("torch")

NOTEBOOKS = {path.stem: path for path in (Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb")}
NEEDS = {
    "first-steps": ("sklearn", "onnxruntime", "onnxscript"),
    "cnn-to-a-phone": ("executorch",),
    "language-model-to-llama-cpp": ("gguf", "cyllama"),
}


def run(cell, names):
    """Runs a cell, and returns the value of its last line as a notebook does."""
    tree = ast.parse(cell)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)


def test_every_notebook_is_tested():
    assert set(NOTEBOOKS) == set(NEEDS)


@pytest.mark.parametrize(
    "name",
    # The guide on export takes the same steps as the one for phones.
    [pytest.param(name, marks=only_in_test_all) if name == "cnn-to-a-phone" else name for name in NEEDS],
)
def test_notebook_runs(name):
    for package in NEEDS[name]:
        pytest.importorskip(package)
    cells = json.loads(NOTEBOOKS[name].read_text())["cells"]
    # Outputs are not committed: they would be long, and become untrue.
    assert not any(cell.get("outputs") for cell in cells)
    names = {}
    shown = [run("".join(cell["source"]), names) for cell in cells if cell["cell_type"] == "code"]
    html = [value._repr_html_() for value in shown if hasattr(value, "_repr_html_")]
    assert len(html) >= 3
    assert sum("<table" in one for one in html) >= 2
