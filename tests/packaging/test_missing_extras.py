"""Without torch, names that need it say how to install it, and everything else works."""

import subprocess
import sys

import pytest

WITHOUT = "import sys; sys.modules[{!r}] = None; import fakequant as fq; {}"


def run(missing, code):
    return subprocess.run([sys.executable, "-c", WITHOUT.format(missing, code)], capture_output=True, text=True)


def test_import_does_not_import_torch_or_slow_modules():
    code = "import sys, fakequant; print(sorted({'torch', 'importlib.metadata', 'matplotlib'} & sys.modules.keys()))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_version_matches_info():
    import fakequant

    assert fakequant.__version__ == fakequant.info().version


@pytest.mark.parametrize("name", ["prepare", "summary", "nn", "recipes"])
def test_names_that_need_torch_say_how_to_install_it(name):
    result = run("torch", f"fq.{name}")
    assert result.returncode == 1
    assert f"ImportError: `fakequant.{name}` needs torch, which is not installed." in result.stderr
    assert 'Use: pip install "fakequant[torch]"' in result.stderr


def test_from_import_without_torch_says_how_to_install_it():
    assert 'pip install "fakequant[torch]"' in run("torch", "from fakequant import observers").stderr


def test_missing_internal_module_is_not_reported_as_a_missing_extra():
    result = run("fakequant._prepare.prepare", "fq.prepare")
    assert "fakequant[torch]" not in result.stderr
    assert "ModuleNotFoundError" in result.stderr
