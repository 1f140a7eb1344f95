"""What runs on a GPU, without a GPU and without Triton: `tests/gpu` runs the kernels."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from fakequant import _kernels
from thoroughness import only_in_test_all
from torch_bridge import torch

gpu_kernels = pytest.importorskip("fakequant._backends.torch.gpu_kernels")
operators = pytest.importorskip("fakequant._backends.torch.operators")
kernels = pytest.importorskip("fakequant._backends.torch.tensor_kernels")
inductor = pytest.importorskip("fakequant._backends.torch.inductor")

X = torch.linspace(-3, 3, 64).view(4, 16)
GRID = kernels.Grid(torch.tensor(0.1), torch.tensor(3, dtype=torch.int32), -8, 7, "onnx")
ROOT = Path(gpu_kernels.__file__).parents[2]
ON_CPU = """
import sys
sys.modules["triton"] = None  # importing it fails
import torch
import fakequant as fq
x = torch.randn(64, requires_grad=True)
fq.nn.FakeQuantize(fq.QuantSpec())(x).sum().backward()
fq.fake_quantize(x, 0.1, 0, fq.QuantSpec()).sum().backward()
print([name for name in sys.modules if name.startswith("fakequant._backends.torch.triton")])
"""


def test_only_the_kernels_in_triton_import_it():
    for path in sorted(ROOT.rglob("*.py")):
        if path.parent.name == "triton":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.split(".")[0] == "triton" or ".torch.triton" in name for name in names), path


@only_in_test_all
def test_tensors_on_the_cpu_do_not_import_triton():
    done = subprocess.run([sys.executable, "-c", ON_CPU], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_operator_has_an_implementation_for_gpus():
    names = {schema.split("(")[0] for schema in operators.SCHEMAS}
    assert operators.ON_GPU.keys() == names
    for name in names:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fakequant::{name}", "CUDA")


def test_without_triton_a_gpu_runs_the_formula(monkeypatch):
    monkeypatch.setattr(gpu_kernels, "has_triton", lambda: False)
    y, mask = operators.ON_GPU["fake_quantize_masked"](X, *GRID, True)
    expected = kernels.fake_quantize(X, GRID, _kernels.MASK_PACKED)
    assert torch.equal(y, expected[0])
    assert torch.equal(mask, expected[1])
    state = [torch.tensor(v) for v in (-1.0, 1.0, 0.5)] + [torch.tensor(0, dtype=torch.int32), torch.tensor(0)]
    same = [v.clone() for v in state]
    options = (-8, 7, "onnx", False, "any", "moving_average", 0.1, 1e-7, True)
    found = operators.ON_GPU["observe_into"](X, *state, *options)
    expected = torch.ops.fakequant.observe_into(X, *same, *options)
    for a, b in zip((*found, *state), (*expected, *same), strict=True):
        assert torch.equal(a, b)


def test_triton_is_used_where_it_is_installed(monkeypatch):
    monkeypatch.setattr(gpu_kernels, "has_triton", lambda: True)
    options = kernels.ObserverOptions(-8, 7, "onnx", False, "any", "moving_average", 0.1, 1e-7, True)
    assert gpu_kernels.supports(X, GRID)
    assert gpu_kernels.supports_ranges(X, (4, 1))
    assert gpu_kernels.supports_observing(X, torch.tensor(0.0), options)
    assert not gpu_kernels.supports(X.double(), GRID)
    assert not gpu_kernels.supports(X, GRID._replace(qmax=2**22 + 1))
    assert not gpu_kernels.supports_observing(X.view(2, 2, 2, 8), torch.zeros(1, 2, 1, 2), options)


def test_inductor_leaves_gpus_to_the_kernels():
    class OnGpu:
        device = torch.device("cuda")

    assert inductor._is_left_to_the_kernel(OnGpu(), GRID)
    assert not inductor._is_left_to_the_kernel(X, GRID)
