"""Compiled nodes accept strided data and groups, with the bits and strides of the Python nodes."""

import pytest

import fakequant as fq
from fakequant.testing.assertions import assert_same_bits

torch = pytest.importorskip("torch")
nodes = pytest.importorskip("fakequant._backends.torch.compiled_nodes")

if nodes.compiled is None:
    pytest.skip("this build has no compiled nodes for this torch", allow_module_level=True)

BASE = torch.linspace(-3, 3, 4 * 6 * 8 * 10).reshape(4, 6, 8, 10)
LAYOUTS = {
    "contiguous": lambda t: t[..., :8],
    "every second": lambda t: t[:, :, :, ::2],
    "transposed": lambda t: t.transpose(1, 3)[:, ::2, :, :],
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "channels last, strided": lambda t: t.contiguous(memory_format=torch.channels_last)[:, :, 1:7:2],
    "expanded": lambda t: t[:, :1].expand(4, 6, 8, 10),
    "an axis of length 1": lambda t: t[:, 2:3, ::2],
    "empty": lambda t: t[:, :, :0],
    "a row": lambda t: t[0, 0, 0, ::3],
}
SPECS = {
    "tensor": fq.QuantSpec(symmetric=False),
    "channel": fq.QuantSpec(symmetric=False, axis=0),
    "last channel": fq.QuantSpec(axis=-1, numerics="torch"),
    "groups": fq.QuantSpec(bits=4, symmetric=False, axis=-1, group_size=2),
    "groups on another axis": fq.QuantSpec(bits=4, axis=0, group_size=2, numerics="half_away"),
    "tokens": fq.QuantSpec(symmetric=False, axis=-1, group_size=-1),
}


def run(x, scale, zero_point, spec, gradient):
    x = x.detach().requires_grad_()
    y = fq.fake_quantize(x, scale, zero_point, spec, gradient=gradient)
    (dx,) = torch.autograd.grad(y, x, torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape))
    return y.detach(), dx


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gradient", ["clipped", "pass"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_compiled_nodes_match_python_nodes_in_results_and_strides(layout, spec, gradient, dtype, monkeypatch):
    x = layout(BASE.to(dtype))
    try:
        parameters = fq.min_max(x, spec).min.shape
    except ValueError:
        pytest.skip("the group size does not divide this shape")
    scale = torch.linspace(0.01, 0.05, parameters.numel()).reshape(parameters)
    zero_point = torch.zeros(parameters, dtype=torch.int32) if spec.symmetric else torch.full(parameters, 3).int()
    found = run(x, scale, zero_point, spec, gradient)
    monkeypatch.setattr(nodes, "compiled", None)
    for compiled, python in zip(found, run(x, scale, zero_point, spec, gradient), strict=True):
        assert compiled.stride() == python.stride()
        assert_same_bits(python.double(), compiled.double())


def test_strided_data_and_groups_use_the_compiled_function(monkeypatch):
    def refuse(*_):
        raise AssertionError("the long way was taken")

    monkeypatch.setattr("fakequant._backends.torch.tensor_functions.check_data", refuse)
    fq.fake_quantize(BASE[..., ::2], 0.1, 0, fq.QuantSpec())
    fq.fake_quantize(BASE, torch.ones(4, 6, 8, 5), 0, fq.QuantSpec(axis=-1, group_size=2))
    fq.fake_quantize(BASE, torch.ones(4, 3, 8, 10), 0, fq.QuantSpec(axis=1, group_size=2))
    fq.fake_quantize(BASE, torch.ones(4, 6, 8), 0, fq.QuantSpec(axis=-1, group_size=-1))
    with pytest.raises(AssertionError, match="the long way"):
        fq.fake_quantize(BASE, torch.ones(4, 6, 8, 3), 0, fq.QuantSpec(axis=-1, group_size=3))
