"""Inductor fuses the forward operators with surrounding code and keeps eager's bits."""

import re
import shutil
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import fakequant as fq
from fakequant import torch_ops
from fakequant.testing import cases
from fakequant.testing.assertions import assert_same_bits
from straight_through import AFFINE, torch
from thoroughness import ALL, only_in_test_all, sampled

fusion = pytest.importorskip("fakequant._backends.torch.inductor")
private = pytest.importorskip("fakequant._backends.torch.torch_private")
run_and_get_code = pytest.importorskip("torch._inductor.utils").run_and_get_code

pytestmark = [
    pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler"),
    # Raised by dynamo and inductor themselves.
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"),
]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ZERO_POINT = 3
SCALES = (0.02, 1 / 3, 12345.678, 1e-38, 3e-39)


def operators_in(code):
    return set(re.findall(r"fakequant\.(\w+)\.default", "\n".join(code)))


def compiled(function, *args):
    torch._dynamo.reset()
    return run_and_get_code(torch.compile(function, fullgraph=True, dynamic=False), *args)


def edges(dtype, rows):
    """Returns rows of ties, ends of the range and special values."""
    numpy_dtype = cases.DTYPES[str(dtype)[6:]]
    with np.errstate(over="ignore"):  # values too large for float16 become infinite
        found = [cases.special_values(numpy_dtype)]
        found += [cases.ties(s, z, 0, 255, numpy_dtype) for s in SCALES for z in (0, ZERO_POINT)]
    values = np.concatenate(found)
    x = torch.from_numpy(values.astype(np.float64)).to(dtype)
    return x[: x.numel() // 8 * 8].repeat(rows, 1)


@pytest.mark.parametrize("dtype", DTYPES if ALL else DTYPES[:1], ids=str)
def test_fused_functions_have_eager_bits(dtype):
    x = edges(dtype, len(SCALES))
    scales, zeros = torch.tensor(SCALES), torch.full((len(SCALES),), ZERO_POINT, dtype=torch.int32)

    def function(x):
        results = []
        for numerics in ("onnx", "half_away"):
            spec = AFFINE(bits=8, signed=False, numerics=numerics)
            rows = range(len(SCALES)) if ALL else (0, 4)  # the channels below have all scales
            results += [fq.fake_quantize(x[i], scales[i], zeros[i], spec) for i in rows]
            channel = AFFINE(bits=8, signed=False, axis=0, numerics=numerics)
            results.append(fq.fake_quantize(x, scales, zeros, channel))
            results.append(fq.fake_quantize_learned(x, scales, zeros + 0.4, channel))
            last = AFFINE(bits=4, axis=-1, numerics=numerics)
            results.append(fq.fake_quantize(x.t(), scales, 0, last))
        results.extend(tuple(fq.min_max(x, fq.QuantSpec(axis=-1, group_size=8))))
        ends_at_zero = torch.where(x > 0, -x, x)
        results.extend(tuple(fq.min_max(ends_at_zero, fq.QuantSpec(axis=-1, group_size=2))))
        return tuple(results)

    with torch.no_grad():
        expected = function(x)
        actual, code = compiled(function, x)
    assert operators_in(code) == {"checked_scale"}
    for e, a in zip(expected, actual, strict=True):
        assert e.stride() == a.stride()
        assert_same_bits(e, a)


def test_functions_with_torch_numerics_are_not_fused():
    x = edges(torch.float32, 1)[0]
    scale, zero = torch.tensor([1 / 3]), torch.tensor([ZERO_POINT], dtype=torch.int32)

    def function(x):
        return (
            torch_ops.fake_quantize_per_tensor_affine(x, scale, zero, 0, 255) + 1,
            torch_ops.fake_quantize_learnable_per_tensor_affine(x, scale, zero + 0.4, 0, 255, 1.0),
        )

    with torch.no_grad():
        expected = function(x)
        actual, code = compiled(function, x)
    assert operators_in(code) == {"fake_quantize_masked"}
    for e, a in zip(expected, actual, strict=True):
        assert_same_bits(e, a)


def test_compiled_training_saves_packed_masks():
    x = torch.randn(64, 8, requires_grad=True)
    function = lambda x: fq.fake_quantize(x.relu(), 0.02, 0, AFFINE()).square()  # noqa: E731
    y, code = compiled(function, x)
    y.sum().backward()
    expected = torch.autograd.grad(function(x).sum(), x)[0]
    assert "fake_quantize_masked" in operators_in(code)
    assert torch.equal(x.grad, expected)


def test_fused_functions_check_scale_and_zero_point_at_run_time():
    x, scale, zero = torch.randn(6, 8), torch.full((6,), 0.1), torch.zeros(6, dtype=torch.int32)
    function = torch.compile(lambda x, s, z: fq.fake_quantize(x, s, z, AFFINE(axis=0)), fullgraph=True)
    with torch.no_grad():
        assert torch.equal(function(x, scale, zero), fq.fake_quantize(x, scale, zero, AFFINE(axis=0)))
        for bad in (0.0, -1.0, torch.inf, torch.nan):
            with pytest.raises(ValueError, match="`scale` must be finite and greater than 0 in float32, got"):
                function(x, scale.index_fill(0, torch.tensor(3), bad), zero)
        with pytest.raises(ValueError, match="`zero_point` must be between -8 and 7"):
            function(x, scale, zero + 9)


def test_a_prepared_model_in_evaluation_is_fused_and_has_eager_bits():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4))
    x = torch.randn(32, 8)
    fq.calibrate(fq.prepare(model, fq.recipes.int8(), x), [x], progress=False)
    model.eval()
    with torch.no_grad():
        expected = model(x)
        actual, code = compiled(model, x)
    assert "fake_quantize" not in operators_in(code)  # of activations; weights are still observed
    assert torch.equal(expected, actual)


def test_inductors_cache_key_changes_with_the_decompositions(monkeypatch):
    """Inductor finds cached code by operator names and this key."""
    config = private.inductor().config
    with config.patch(unsafe_marked_cacheable_functions={"someone.elses": "1"}):
        fusion.offer({})
        before = config.save_config_portable()["unsafe_marked_cacheable_functions"]
        monkeypatch.setattr(fusion, "_digest", lambda: "another")
        fusion.offer({})
        after = config.save_config_portable()["unsafe_marked_cacheable_functions"]
    assert before["someone.elses"] == after["someone.elses"] == "1"
    assert before["torch.ops.fakequant"] != after["torch.ops.fakequant"] == "another"


PROGRAM = """
    import torch

    def code_of(function, *args):
        from torch._inductor.utils import run_and_get_code
        torch._dynamo.reset()
        with torch.no_grad():
            return "".join(run_and_get_code(torch.compile(function), *args)[1])

    class Module(torch.nn.Module):
        def forward(self, x):
            return fq.fake_quantize(x.relu(), 0.1, 0, fq.QuantSpec())

    x = torch.randn(64)
"""
ORDERS = {
    "Inductor is imported before": """
        import torch._inductor.compile_fx
        import fakequant as fq
    """,
    "compiled before the import": """
        code_of(lambda x: x.relu() + 1, x)
        import fakequant as fq
    """,
    "exported before Inductor is imported": """
        import fakequant as fq
        torch.export.export(Module(), (x,))
    """,
    "called before Inductor is imported": """
        import fakequant as fq
        Module()(x)
    """,
}


@only_in_test_all
def test_a_prepared_model_compiles_in_a_process_that_has_not_imported_inductor():
    program = """
        import torch, fakequant as fq
        x = torch.ones(2, 4)
        model = fq.prepare(torch.nn.Sequential(torch.nn.Linear(4, 4)), fq.recipes.int8(), x).eval()
        fq.calibrate(model, [x], progress=False)
        print(torch.equal(torch.compile(model, fullgraph=True)(x), model(x)))
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.stdout.split() == ["True"], run.stderr


@pytest.mark.parametrize("order", sampled(ORDERS, "Inductor is imported before"))
def test_decompositions_are_registered_in_any_order_of_imports(order):
    lines = (PROGRAM, ORDERS[order], 'print("fakequant.fake_quantize.default" in code_of(Module(), x))')
    program = "\n".join(map(textwrap.dedent, lines))
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False)
    assert run.stdout.split() == ["False"], run.stderr
