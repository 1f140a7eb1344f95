"""All files name the same supported torch releases, and an older torch is refused with a message."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fakequant._torch_releases import NEWEST, OLDEST, describe

ROOT = Path(__file__).parents[2]
WINDOW = f"{describe(OLDEST)} to {describe(NEWEST)}"


def test_project_metadata_names_the_oldest_torch():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [torch] = [need for need in project["optional-dependencies"]["torch"] if need.startswith("torch")]
    assert torch.startswith(f"torch>={describe(OLDEST)},")


def test_cmake_names_the_oldest_and_newest_torch():
    text = (ROOT / "CMakeLists.txt").read_text()
    assert f"set(FAKEQUANT_TORCH_OLDEST {describe(OLDEST)})" in text
    assert f"set(FAKEQUANT_TORCH_NEWEST {describe(NEWEST)})" in text


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/concepts/torch.md"])
def test_pages_name_the_supported_torch_releases(page):
    assert re.search(rf"torch\W+{WINDOW}|{WINDOW}", (ROOT / page).read_text())


def test_old_torch_is_refused_with_its_version():
    pytest.importorskip("torch")
    code = """
import torch, fakequant
torch.__version__ = "2.9.1"
try:
    fakequant.nn
except ImportError as error:
    print(error)
"""
    said = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert "needs torch 2.12 or newer" in said
    assert "found torch 2.9.1" in said
