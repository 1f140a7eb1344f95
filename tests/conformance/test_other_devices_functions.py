"""Functions on meta tensors and on tensors of a simulated device.

There, fakequant's own functions run our operators, and functions with torch's names run torch's.
"""

import itertools

import numpy as np
import pytest

import fakequant as fq
from fakequant import torch_ops
from fakequant.testing import cases
from tensor_data import DY_LAYOUTS, LAYOUTS, assert_same, data, gradient, torchs
from torch_bridge import torch

aten = pytest.importorskip("fakequant._backends.torch.tensor_torch_names")
nodes = pytest.importorskip("fakequant._backends.torch.compiled_nodes")


def meta(value):
    return value.to("meta") if isinstance(value, torch.Tensor) else value


WHERE = {
    "tensor": {},
    "channel": dict(axis=1),
    "group": dict(axis=-1, group_size=2),
    "token": dict(axis=0, group_size=-1),
    "block": dict(axis=-1, group_size=2, group_rows=2),
    "block, shorter at the end": dict(axis=-1, group_size=3, group_rows=2),
}


def calls(x, spec):
    """Yields every function on tensors with its arguments."""
    parameters = fq.min_max(x, spec).min.shape
    dtype = torch.float64 if x.dtype == torch.float64 and spec.numerics != "torch" else torch.float32
    scale, zero_point = torch.full(parameters, 0.1), torch.full(parameters, 1, dtype=torch.int32)
    learned = torch.full(parameters, 0.1, dtype=dtype), torch.full(parameters, 0.3)
    running = torch.full(parameters or (1,), -1.0), torch.full(parameters or (1,), 1.0)
    q, inside = fq.quantize(x, scale, zero_point, spec), x.detach() > 0
    yield fq.fake_quantize, (x, scale, zero_point, spec), {}
    yield fq.fake_quantize, (x, scale, zero_point, spec), dict(gradient="pass")
    yield fq.fake_quantize, (x, scale, zero_point, spec), dict(mask="packed")
    yield fq.fake_quantize, (x, scale, zero_point, spec), dict(mask="bool")
    yield fq.fake_quantize_backward, (x, inside, spec), {}
    yield fq.fake_quantize_backward, (x, torch.zeros((x.numel() + 7) // 8, dtype=torch.uint8), spec), {}
    yield fq.fake_quantize_learned, (x, *learned, spec), {}
    yield fq.fake_quantize_learned_backward, (x.detach(), x, *learned, spec), {}
    yield fq.round_zero_point, (learned[1], spec), {}
    yield fq.quantize, (x, scale, zero_point, spec), {}
    yield fq.quantize, (x, scale, zero_point, spec), dict(packed=True)
    yield fq.dequantize, (q, scale, zero_point, spec), dict(dtype=x.dtype)
    yield fq.min_max, (x, spec), {}
    yield fq.choose_qparams, (-scale, scale, spec), {}
    yield fq.observe_fake_quantize, (x, spec, *running), {}
    yield fq.observe_fake_quantize, (x, spec, *running), dict(mask="packed")
    one = torch.tensor([0.1]), torch.tensor([1], dtype=torch.int32)
    each = torch.full((x.shape[1],), 0.1), torch.full((x.shape[1],), 1, dtype=torch.int32)
    yield torch_ops.fake_quantize_per_tensor_affine, (x, 0.1, 1, *cases.INT8), {}
    yield torch_ops.fake_quantize_per_tensor_affine, (x, *one, *cases.INT8), {}
    yield torch_ops.fake_quantize_per_tensor_affine_cachemask, (x, 0.1, 1, *cases.INT8), {}
    yield torch_ops.fake_quantize_per_channel_affine, (x, *each, 1, *cases.INT8), {}
    yield torch_ops.fake_quantize_per_channel_affine_cachemask, (x, *each, 1, *cases.INT8), {}
    yield torch_ops.fake_quantize_learnable_per_tensor_affine, (x, *(p.float() for p in one), *cases.INT8), {}
    yield torch_ops.fake_quantize_learnable_per_channel_affine, (x, *(p.float() for p in each), 1, *cases.INT8), {}


@pytest.mark.parametrize("layout", [n for n in LAYOUTS if n != "lazily negated"])
@pytest.mark.parametrize("where", WHERE.values(), ids=WHERE)
def test_functions_on_meta_tensors_give_the_shapes_dtypes_and_strides_of_cpu_tensors(where, layout):
    for dtype in (np.float32, np.float64):
        x = data(layout, dtype)
        x = torch.where(x.isfinite(), x, 1) if layout == "contiguous" else torch.zeros_like(x)
        for function, arguments, options in calls(x, fq.QuantSpec(bits=4, symmetric=False, **where)):
            without = [meta(a) for a in arguments]
            expected, actual = function(*arguments, **options), function(*without, **options)
            if isinstance(expected, torch.Tensor):
                expected, actual = (expected,), (actual,)
            for e, a in zip(expected, actual, strict=True):
                assert (e is None) == (a is None)
                if e is not None:
                    assert a.device.type == "meta"
                    assert (a.shape, a.dtype) == (e.shape, e.dtype), (function, options)
                    assert a.stride() == e.stride() or e.shape != x.shape, (function, options)


def on_meta(t):
    """Returns a meta tensor with the same strides; `.to` would make a dense one."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


@pytest.mark.parametrize("layout", [n for n in LAYOUTS if n != "lazily negated"])
def test_backward_on_meta_tensors_gives_the_strides_of_cpu_tensors(layout):
    mask = LAYOUTS[layout](torch.ones(4, 6, 2, 8) > 0)
    packed = torch.zeros((mask.numel() + 7) // 8, dtype=torch.uint8)
    for dy_layout, form in itertools.product(DY_LAYOUTS, (mask, packed)):
        dy = gradient(mask, dy_layout, np.dtype(np.float32)).resolve_neg()
        expected = fq.fake_quantize_backward(dy, form, fq.QuantSpec())
        actual = fq.fake_quantize_backward(on_meta(dy), on_meta(form), fq.QuantSpec())
        assert (actual.shape, actual.dtype, actual.stride()) == (expected.shape, expected.dtype, expected.stride())


ONE = torch.tensor([0.1]), torch.tensor([3], dtype=torch.int32)
EACH = torch.linspace(0.1, 0.7, 6), torch.arange(6, dtype=torch.int32) - 3
ON = torch.tensor([1])


def state():
    return torch.full((1,), np.inf), torch.full((1,), -np.inf), torch.ones(1), torch.zeros(1, dtype=torch.int32)


NAMED = {
    "fake_quantize_per_tensor_affine": lambda: (0.1, 3, *cases.INT8),
    "fake_quantize_per_tensor_affine_cachemask": lambda: (0.1, 3, *cases.INT8),
    "fake_quantize_per_tensor_affine_cachemask_tensor_qparams": lambda: (*ONE, ON, *cases.INT8),
    "fake_quantize_per_channel_affine": lambda: (*EACH, 1, *cases.INT8),
    "fake_quantize_per_channel_affine_cachemask": lambda: (*EACH, 1, *cases.INT8),
    "fake_quantize_learnable_per_tensor_affine": lambda: (*(p.float() for p in ONE), *cases.INT8),
    "fake_quantize_learnable_per_channel_affine": lambda: (*(p.float() for p in EACH), 1, *cases.INT8),
    "fused_moving_avg_obs_fake_quant": lambda: (ON, ON, *state(), 0.01, *cases.INT8, -1),
    "fused_moving_avg_obs_fq_helper": lambda: (ON, ON, *state(), 0.01, *cases.INT8, -1),
    "fake_quantize_per_tensor_affine_cachemask_backward": lambda: (torch.ones(4, 6, 2, 8) > 0,),
    "fake_quantize_per_channel_affine_cachemask_backward": lambda: (torch.ones(4, 6, 2, 8) > 0,),
    "fake_quantize_learnable_per_tensor_affine_backward": lambda: (X, *(p.float() for p in ONE), *cases.INT8),
    "fake_quantize_learnable_per_channel_affine_backward": lambda: (X, *(p.float() for p in EACH), 1, *cases.INT8),
}
X = torch.nan_to_num(data("contiguous", np.float32))


@pytest.fixture
def elsewhere(monkeypatch):
    """Makes tensors appear to be on a device for which only torch has kernels."""
    monkeypatch.setattr(nodes, "compiled", None)
    for name in ("_is_direct", "_is_here"):
        monkeypatch.setattr(aten, name, lambda x: False)


class Namespaces(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the namespaces of the operators that run."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.seen.add(operator.namespace)
        return operator(*args, **(kwargs or {}))


@pytest.mark.usefixtures("elsewhere", "torch_on_one_thread")
@pytest.mark.parametrize("name", NAMED)
def test_functions_with_torchs_names_run_torchs_operators_on_other_devices(name):
    arguments, same = NAMED[name](), NAMED[name]()
    with Namespaces() as namespaces:
        actual = getattr(torch_ops, name)(X, *arguments)
    assert namespaces.seen == {"aten"}
    assert_same(torchs(name)(X, *same), actual)
    for e, a in zip(same, arguments, strict=True):
        assert not isinstance(e, torch.Tensor) or torch.equal(e, a)


@pytest.mark.usefixtures("elsewhere")
def test_functions_with_torchs_names_have_torchs_autograd_nodes_on_other_devices():
    x = X.clone().requires_grad_()
    for name in ("fake_quantize_per_tensor_affine", "fake_quantize_per_channel_affine"):
        y = getattr(torch_ops, name)(x, *NAMED[name]())
        assert type(y.grad_fn).__name__.startswith("FakeQuantizePer")


@pytest.mark.parametrize("name", [n for n in NAMED if n.endswith(("affine", "affine_cachemask"))])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_functions_with_torchs_names_run_our_operators_under_a_dispatch_mode(device, name):
    with Namespaces() as namespaces:
        getattr(torch_ops, name)(
            X.to(device), *(a.to(device) if isinstance(a, torch.Tensor) else a for a in NAMED[name]())
        )
    assert "fakequant" in namespaces.seen
