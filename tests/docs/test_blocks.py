"""Every code block in the README and the documentation runs: Python by doctest, commands here."""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

from fakequant._cli import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^```(?P<language>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
# Commands that are not run here: they install things, take minutes, or need several machines.
NOT_RUN_HERE = ("pip install ", "make ", "torchrun ", "git clone ", "cd ", "fakequant demo")


class Block(NamedTuple):
    page: str
    language: str
    text: str


def blocks(page):
    return [Block(str(page.relative_to(ROOT)), *match.groups()) for match in FENCED.finditer(page.read_text())]


def commands(text):
    """Returns the shell commands of a block, with continued lines joined and comments removed."""
    lines = (shlex.join(shlex.split(line, comments=True)) for line in text.replace("\\\n", " ").splitlines())
    return [line for line in lines if line]


BLOCKS = [block for page in PAGES for block in blocks(page)]
COMMANDS = sorted({line for block in BLOCKS if block.language == "sh" for line in commands(block.text)})


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_blocks_are_prompted_python_commands_or_text(page):
    found = blocks(page)
    assert page.read_text().count("\n```") == 2 * len(found), "a fence is not closed, or not at the start of its line"
    assert [b for b in found if b.language not in ("python", "sh", "text")] == []
    assert [b for b in found if b.language == "python" and not b.text.startswith(">>> ")] == []
    # Without an empty line, doctest reads the fence as part of the expected output.
    assert [b for b in found if b.language == "python" and not b.text.endswith("\n\n")] == []


def test_doctest_collects_the_documentation_pages():
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert "--doctest-glob=*.md" in options["addopts"]
    assert {"docs", "README.md", "src"} <= set(options["testpaths"])


TRAIN = """
import torch
import fakequant as fq

def make_float():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))

def make_model():
    return fq.prepare(make_float(), fq.recipes.int8(target="onnxruntime-x86"), torch.ones(1, 8))

def test_data():
    torch.manual_seed(1)
    return [torch.randn(16, 8)]

def accuracy(model):
    return float((model(test_data()[0]).argmax(1) == make_float()(test_data()[0]).argmax(1)).double().mean())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files that commands use: train.py, states, exported files, examples and benchmarks."""
    import torch

    import fakequant as fq

    folder = tmp_path_factory.mktemp("commands")
    (folder / "train.py").write_text(TRAIN)
    for name in ("examples", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    names: dict = {}
    exec(TRAIN, names)
    model = fq.calibrate(names["make_model"](), names["test_data"](), progress=False)
    for name in ("model.pt", "quantized.pt"):
        torch.save(model.state_dict(), folder / name)
    torch.save(names["make_float"]().state_dict(), folder / "float.pt")
    for name in ("model.onnx", "int8.onnx"):
        fq.export_onnx(model, folder / name, names["test_data"]()[0])
    return folder


@pytest.mark.parametrize("command", [c for c in COMMANDS if not c.startswith(NOT_RUN_HERE) or c.endswith("--help")])
def test_documented_commands_run(command, folder, tmp_path, monkeypatch, capsys):
    words = shlex.split(command)
    shutil.copytree(folder, tmp_path / "copy", symlinks=True)  # commands overwrite what others read
    monkeypatch.chdir(tmp_path / "copy")
    if words[:3] == ["python", "-m", "fakequant"]:
        words = words[2:]
    if words[0] == "fakequant":
        code, output = main(words[1:]), capsys.readouterr().out
    else:
        assert words[0] == "python", f"{command!r} is not a command that this test can run; add it to NOT_RUN_HERE"
        ran = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True, timeout=300)
        code, output = ran.returncode, ran.stdout
    assert code == 0
    assert output


def test_documented_extras_exist():
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    named = {extra for page in PAGES for extra in re.findall(r"(?:fakequant|\.)\[([\w,]+)\]", page.read_text())}
    assert {extra for several in named for extra in several.split(",")} <= extras


def test_documented_files_exist():
    pattern = re.compile(r"\b(?:examples|benchmarks|tests|tools|src)/[\w/]+\.(?:py|md)\b")
    named = {name for page in PAGES for name in pattern.findall(page.read_text())}
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "csrc/README.md"]
)
def test_relative_links_point_to_files(page):
    """Links between documentation pages are checked when the site is built."""
    text = re.sub(FENCED, "", (ROOT / page).read_text())
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    files = [(ROOT / page).parent / link.split("#")[0] for link in links if not link.startswith("#")]
    assert [str(file) for file in files if not file.exists()] == []
