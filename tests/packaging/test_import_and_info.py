"""Importing fakequant: the instruction set, missing kernels, lazy imports, and `info`."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import fakequant
from fakequant import _native, reference
from thoroughness import only_in_test_all


def run(code, **environment):
    environment = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)


@pytest.mark.parametrize("target", _native.supported_targets())
def test_environment_variable_forces_the_target(target):
    result = run("import fakequant; print(fakequant.info().target)", FAKEQUANT_TARGET=target)
    assert result.stdout.strip() == target


def test_unknown_target_is_an_import_error_that_lists_the_targets():
    result = run("import fakequant", FAKEQUANT_TARGET="sse9")
    assert "ImportError: FAKEQUANT_TARGET='sse9': this build has no such target." in result.stderr
    assert f"Accepted here: {', '.join(_native.supported_targets())}." in result.stderr


@pytest.mark.parametrize("target", sorted(set(_native.compiled_targets()) - set(_native.supported_targets())))
def test_target_that_this_cpu_lacks_is_refused(target):
    result = run("import fakequant", FAKEQUANT_TARGET=target)
    assert f"FAKEQUANT_TARGET='{target}': this CPU cannot run it." in result.stderr


def test_kernels_that_fail_to_load_are_an_import_error_with_the_fix():
    result = run(
        "import sys; sys.modules['fakequant._native'] = None\n"
        "try: import fakequant\n"
        "except ImportError as e: print(e)\n"
    )
    assert "fakequant's compiled kernels could not be loaded" in result.stdout
    assert "pip install --force-reinstall --no-deps ." in result.stdout


def test_importing_fakequant_does_not_import_torch():
    result = run("import sys, fakequant, fakequant.reference, fakequant.testing.cases; print('torch' in sys.modules)")
    assert result.stdout == "False\n"


def test_reference_module_needs_numpy_only():
    path = reference.__file__
    result = run(
        "import sys, runpy\n"
        "for name in ('torch', 'ml_dtypes', 'fakequant'): sys.modules[name] = None\n"
        f"names = runpy.run_path({path!r})\n"
        "print(names['NUMERICS'])\n"
    )
    assert result.stdout == "('torch', 'onnx', 'half_away')\n", result.stderr


def test_info_reports_the_target_threads_and_versions():
    info = fakequant.info()
    assert info.target == _native.target()
    assert info.target in info.supported_targets
    assert set(info.supported_targets) <= set(info.compiled_targets)
    assert info.num_threads == fakequant.get_num_threads()
    assert info.numpy == np.__version__


def test_info_command_prints_text_and_json():
    text = subprocess.run([sys.executable, "-m", "fakequant", "info"], capture_output=True, text=True, check=True)
    assert fakequant.__version__ in text.stdout
    machine = subprocess.run(
        [sys.executable, "-m", "fakequant", "info", "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(machine.stdout)["target"] == fakequant.info().target
    nothing = subprocess.run([sys.executable, "-m", "fakequant"], capture_output=True, text=True, check=False)
    assert nothing.returncode == 2


def test_info_names_the_torch_that_is_imported():
    torch = pytest.importorskip("torch")
    assert fakequant.info().torch.startswith(f"{torch.__version__}, autograd nodes ")


@only_in_test_all
def test_no_module_imports_lazy_attributes_of_the_package():
    """A module that waits for the lock of lazy imports while being imported can deadlock with another thread."""
    pytest.importorskip("torch")
    code = """
import importlib, pkgutil
import fakequant

def on_demand(name):
    assert name not in ("nn", "observers", "recipes", *fakequant._WHOLE_MODELS), f"{name} was imported from the package"
    raise AttributeError(name)

fakequant.__getattr__ = on_demand
for found in pkgutil.walk_packages(fakequant.__path__, "fakequant."):
    if "_native" not in found.name and "_autograd" not in found.name and not found.name.endswith("__main__"):
        importlib.import_module(found.name)
"""
    result = run(code)
    assert result.returncode == 0, result.stderr
