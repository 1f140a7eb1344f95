"""Tests an installed fakequant, without its sources: python -I tools/smoke_test.py [--torch compiled|python].

Without the option, torch must not be installed; functions that need it must then say how to install it.
"""

import argparse
import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np

import fakequant as fq

IMPORT_LIMIT_MS = 100


def check_place() -> None:
    here = Path(fq.__file__).resolve()
    assert here.is_relative_to(Path(sysconfig.get_path("platlib")).resolve()), f"not the installed package: {here}"
    assert (here.parent / "py.typed").is_file()
    assert (here.parent / "_native.pyi").is_file()


def check_results() -> None:
    """Checks values on which wrong rounding, clamping or packing would show."""
    x = np.float32([-0.3, 0.05, 0.15, 0.25, 9.0, np.inf, -np.inf])
    scale, spec = np.float32(0.1), fq.QuantSpec(bits=4)
    expected = np.int8([-3, 0, 2, 2, 7, 7, -8])
    for numerics in ("torch", "onnx", "half_away"):
        codes = fq.quantize(np.float32([-1.5, 0.5, 1.5, 2.5]), 1.0, 0, fq.QuantSpec(bits=4, numerics=numerics))
        assert codes.tolist() == ([-2, 1, 2, 3] if numerics == "half_away" else [-2, 0, 2, 2]), (numerics, codes)
    assert fq.quantize(x, float(scale), 0, spec).tolist() == expected.tolist()
    for target in fq.info().supported_targets:
        assert fq._native.select_target(target)
        y, mask = fq.fake_quantize(np.tile(x, 300), float(scale), 0, spec, mask="packed")
        assert (y.view(np.int32) == np.tile(expected * scale, 300).view(np.int32)).all(), target
        dx = fq.fake_quantize_backward(np.ones_like(y), mask, spec)
        assert (dx == np.tile(np.float32([1, 1, 1, 1, 0, 0, 0]), 300)).all(), target
    fq._native.select_target(fq.info().supported_targets[-1])
    weights = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    groups = fq.QuantSpec(bits=4, axis=1, group_size=32)
    seen = fq.min_max(weights, groups)
    qparams = fq.choose_qparams(seen.min, seen.max, groups)
    packed = fq.quantize(weights, *qparams, groups, packed=True)
    again = fq.dequantize(packed, *qparams, groups, shape=weights.shape)
    assert packed.nbytes == weights.size // 2
    assert (again == fq.fake_quantize(weights, *qparams, groups)).all()


def check_command() -> None:
    script = Path(sysconfig.get_path("scripts")) / ("fakequant.exe" if sys.platform == "win32" else "fakequant")
    for command in ([script], [sys.executable, "-I", "-m", "fakequant"]):
        run = subprocess.run([*command, "info", "--json"], capture_output=True, text=True, check=True)
        assert json.loads(run.stdout)["version"] == fq.__version__
    print(subprocess.run([script, "info"], capture_output=True, text=True, check=True).stdout, end="")


def check_missing() -> None:
    """Checks that NumPy is enough, and that functions that need torch say how to install it."""
    assert "torch" not in sys.modules
    for use in (lambda: fq.prepare, lambda: fq.nn, lambda: fq.recipes, fq.accelerate):
        try:
            use()
        except ImportError as error:
            assert 'pip install "fakequant[torch]"' in str(error), error
        else:
            raise AssertionError("torch is installed, or a function that needs it did not raise")


def check_import_time() -> None:
    """Checks the CPU time of `import fakequant` after NumPy. Not wall time, which depends on other processes."""
    code = "import numpy, sys, time; t = time.process_time(); import fakequant; print(time.process_time() - t)"
    code += "; assert 'torch' not in sys.modules"
    command = [sys.executable, "-I", "-c", code]
    best = min(float(subprocess.check_output(command, text=True)) for _ in range(7)) * 1000
    print(f"import     {best:.0f} ms beyond NumPy")
    assert best < IMPORT_LIMIT_MS, best


def check_torch(nodes: str) -> None:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    x, label = torch.randn(64, 16), torch.arange(64) % 4
    model = fq.prepare(model, fq.recipes.int8(), example=x)
    model = fq.calibrate(model, [x], progress=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), label)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    plain = torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -8, 7)
    with fq.accelerate() as acceleration:
        assert acceleration.replaced
        assert torch.equal(plain, torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -8, 7))
    print(f"torch      {fq.info().torch}")
    assert str(fq.info().torch).endswith({"compiled": "nodes compiled", "python": "nodes in Python"}[nodes])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch", choices=["compiled", "python"], help="which autograd nodes must be in use")
    nodes = parser.parse_args().torch
    check_place()
    check_results()
    if nodes:
        check_torch(nodes)
    else:
        check_command()
        check_missing()
        check_import_time()
    print("ok")


if __name__ == "__main__":
    main()
