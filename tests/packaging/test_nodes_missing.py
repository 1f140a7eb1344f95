"""Without compiled autograd nodes for this torch, the Python nodes are used and one warning says why."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

CODE = """
import sys, warnings
import torch

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("fakequant._autograd_"):
            raise {error}

sys.meta_path.insert(0, Without())
torch.__version__ = {version} or torch.__version__
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import fakequant as fq
    for _ in range(2):
        x = torch.tensor([0.26, 9.0], requires_grad=True)
        fq.fake_quantize(x, 0.1, 0, fq.QuantSpec(bits=4)).sum().backward()
print(x.grad.tolist())
print(fq.info().torch)
print(*[str(w.message) for w in said if w.category is RuntimeWarning], sep="\\n")
"""
ABSENT = "ModuleNotFoundError(name)"
UNLOADABLE = "ImportError('undefined symbol: something of torch')"


def run(error, version=None, **environment):
    code = CODE.format(error=error, version=repr(version))
    clean = {k: v for k, v in os.environ.items() if k != "FAKEQUANT_PYTHON_NODES"}
    out = subprocess.check_output([sys.executable, "-c", code], text=True, env=clean | environment)
    grad, torch, *said = out.splitlines()
    assert grad == "[1.0, 0.0]"
    assert torch.endswith("autograd nodes in Python")
    return torch, [line for line in said if line]


def test_missing_compiled_nodes_warn_with_the_build_option():
    _, [said] = run(ABSENT)
    assert "has none compiled for torch 2." in said
    assert "--no-build-isolation" in said


def test_unloadable_compiled_nodes_warn_with_the_error():
    _, [said] = run(UNLOADABLE)
    assert "cannot be loaded: undefined symbol: something of torch." in said


def test_untested_newer_torch_warns_with_the_supported_releases():
    torch, [said] = run(ABSENT, "2.99.0")
    assert torch.startswith("2.99.0 (tested: 2.12 to 2.15)")
    assert "compiled ones are for torch 2.12 to 2.15, and this is torch 2.99.0." in said


def test_python_nodes_chosen_by_environment_do_not_warn():
    assert run(ABSENT, FAKEQUANT_PYTHON_NODES="1")[1] == []
