"""`LearnedFakeQuantize`: gradients of the input, the scale and the zero point."""

import contextlib
import itertools
import math

import numpy as np
import pytest

import fakequant as fq
from fakequant import QuantSpec, reference
from fakequant._backends.checks import EPS
from fakequant.testing.assertions import assert_same_bits
from learned_cases import (
    GRIDS,
    INT4,
    SHAPE,
    UINT4,
    X,
    bits,
    blocks,
    by_broken,
    by_grid,
    by_where,
    initialized,
    make_step_size,
)

torch = pytest.importorskip("torch")
observers = pytest.importorskip("fakequant.observers")
LearnedFakeQuantize = pytest.importorskip("fakequant.nn").LearnedFakeQuantize

# --- gradients --------------------------------------------------------------------------------------


def exact(x, scale, zero_point, dy, spec, factor):
    """Returns the gradients by the documented formulas in float64, summed exactly."""
    x, dy, s, z = (np.asarray(v, np.float64) for v in (x, dy, scale, zero_point))
    code = np.rint(x / s) + z
    inside = (code >= spec.qmin) & (code <= spec.qmax)
    bound = np.clip(code, spec.qmin, spec.qmax)
    dscale = dy * np.where(inside, (code - z) - x / s, bound - z) * factor
    dzero_point = np.where(inside, 0, -dy * s) * factor
    return np.where(inside, dy, 0), dscale.sum(-1), dzero_point.sum(-1)


@by_grid
@by_where
def test_gradients_match_the_documented_formulas_exactly(grid, where):
    # Every number, product and sum here is exact in float32.
    spec = QuantSpec(**grid, **where)
    x = torch.from_numpy(np.random.default_rng(1).integers(-800, 800, SHAPE) / 32).float().requires_grad_()
    dy = torch.from_numpy(np.random.default_rng(2).integers(-8, 9, SHAPE) / 4).float()
    quantizer = LearnedFakeQuantize(spec, shape=SHAPE, grad_factor=0.25).initialize(x)
    scale = 0.5 ** np.random.default_rng(3).integers(0, 3, quantizer.scale.shape)
    offset = np.random.default_rng(4).integers(max(spec.qmin, -3), min(spec.qmax, 3) + 1, quantizer.scale.shape)
    make_step_size(quantizer, scale.reshape(quantizer.step_size.shape))
    if quantizer.offset is not None:
        quantizer.offset.data.copy_(torch.as_tensor(offset.reshape(quantizer.step_size.shape)))
    else:
        offset = 0 * offset

    quantizer(x).backward(dy)

    dx, dscale, dzero_point = exact(
        blocks(x.detach(), spec), scale[..., None], offset[..., None], blocks(dy, spec), spec, 0.25
    )
    assert_same_bits(dx.astype(np.float32), blocks(x.grad, spec), "dx")
    assert_same_bits(dscale.astype(np.float32), bits(quantizer.step_size.grad).reshape(dscale.shape), "dscale")
    if quantizer.offset is not None:
        got = bits(quantizer.offset.grad).reshape(dscale.shape)
        assert_same_bits((dzero_point + 0.0).astype(np.float32), got, "dzero_point")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("numerics", reference.NUMERICS)
@by_where
def test_gradients_match_fake_quantize_learned_backward(where, numerics, dtype):
    for grid, factor in itertools.product((GRIDS["int4"], GRIDS["int8 affine"], GRIDS["uint4"]), (None, 0.3)):
        spec = QuantSpec(**grid, **where, numerics=numerics)
        generator = torch.Generator().manual_seed(5)
        x, dy = (torch.randn(SHAPE, generator=generator).to(dtype) for _ in range(2))
        init = "lsq" if spec.symmetric else observers.MinMax()  # a search would take most of the time
        quantizer = LearnedFakeQuantize(spec, shape=SHAPE, grad_factor=factor, init=init).initialize(x / 2)
        x.view(-1)[::17] = torch.tensor([math.nan, math.inf, -math.inf]).repeat(9)[:12].to(dtype)
        if quantizer.offset is not None:
            quantizer.offset.data += 0.3
        offset = 0 if quantizer.offset is None else bits(quantizer.offset).reshape(quantizer.scale.shape)
        grad_factor = 1 / math.sqrt(x.numel() * spec.qmax) if factor is None else factor
        expected = fq.fake_quantize_learned_backward(
            dy, x, quantizer.scale, torch.as_tensor(offset), spec, grad_factor=grad_factor
        )
        leaf = x.clone().requires_grad_()

        y = quantizer(leaf)
        y.backward(dy)

        plain = fq.fake_quantize(x, quantizer.scale, quantizer.zero_point, spec)
        assert torch.equal(y.detach().nan_to_num(9e9), plain.nan_to_num(9e9))
        assert y.dtype == dtype
        assert torch.equal(leaf.grad, expected.dx)
        assert_same_bits(
            bits(expected.dscale.float()).reshape(-1), bits(quantizer.step_size.grad).reshape(-1), "dscale"
        )
        if quantizer.offset is not None:
            assert_same_bits(
                bits(expected.dzero_point.float()).reshape(-1), bits(quantizer.offset.grad).reshape(-1), "dz"
            )


@pytest.mark.parametrize("grid", [GRIDS["int2"], GRIDS["uint1"]], ids=str)
def test_default_grad_factor_is_one_over_the_root_of_elements_times_qmax(grid):
    quantizer = LearnedFakeQuantize(QuantSpec(**grid), init="lsq").initialize(torch.full((4,), 0.5))
    assert quantizer.scale == 1
    for elements, factor in ((64, 1 / 8), (4, 1 / 2), (1, 1.0)):  # qmax is 1
        quantizer.step_size.grad = None
        quantizer(torch.full((elements,), 9.0)).sum().backward()
        assert quantizer.step_size.grad.tolist() == [elements * factor]


def test_default_grad_factor_counts_the_whole_tensor_not_a_channel():
    quantizer = initialized(QuantSpec(bits=2, axis=0), torch.full((4, 16), 0.5))
    quantizer(torch.full((4, 16), 9.0)).sum().backward()
    assert quantizer.step_size.grad.tolist() == [16 / 8] * 4


def test_symmetric_grid_has_no_offset_parameter():
    quantizer = initialized()
    assert quantizer.offset is None
    assert [name for name, _ in quantizer.named_parameters()] == ["step_size"]
    assert "offset" not in quantizer.state_dict()
    assert quantizer.zero_point.dtype == torch.int32
    assert quantizer.zero_point == 0


def test_zero_point_that_is_not_learned_stays_constant():
    quantizer = LearnedFakeQuantize(UINT4, init=observers.MinMax(), learn_zero_point=False)
    quantizer.initialize(torch.tensor([-1.0, 2.0]))
    optimizer = torch.optim.SGD(quantizer.parameters(), lr=0.1)
    assert len(optimizer.param_groups[0]["params"]) == 1
    for _ in range(3):
        quantizer(torch.tensor([-9.0, 9.0, 0.3])).sum().backward()
        optimizer.step()
    assert quantizer.offset.grad is None
    assert quantizer.zero_point == 5
    assert quantizer(torch.tensor([-1e9])) == -5 * quantizer.scale


@by_broken
def test_nonfinite_values_contribute_no_gradient(broken):
    for spec in (INT4, UINT4):
        grads = []
        for x in (torch.tensor([0.3, 9.0, -2.0]), torch.tensor([0.3, 9.0, broken, -2.0])):
            quantizer = initialized(spec, torch.tensor([-1.0, 2.0]), grad_factor=1.0)
            x.requires_grad_()
            y = quantizer(x)
            y.sum().backward()
            grads.append([bits(p.grad) for p in quantizer.parameters()])
        assert x.grad[2] == 0
        end = y[2].item()
        assert math.isnan(end) if math.isnan(broken) else math.copysign(1, end) == math.copysign(1, broken)
        for expected, actual in zip(*grads, strict=True):
            assert_same_bits(expected, actual)


def test_empty_tensor_gives_zero_gradients():
    quantizer = initialized(UINT4, torch.tensor([-1.0, 2.0]))
    y = quantizer(torch.empty(0, 3, requires_grad=True))
    assert y.shape == (0, 3)
    y.sum().backward()
    assert [p.grad.tolist() for p in quantizer.parameters()] == [[0.0], [0.0]]


# --- several passes ---------------------------------------------------------------------------------


def test_gradients_of_two_forward_passes_accumulate():
    separate, together = initialized(UINT4), initialized(UINT4)
    a, b = torch.tensor([9.0, 0.3, -4.0]), torch.tensor([-1.0, 7.0])
    for x in (a, b):  # accumulated
        separate(x).sum().backward()
    first, second = together(a), together(b)
    (first.sum() + second.sum()).backward()
    for e, g in zip(separate.parameters(), together.parameters(), strict=True):
        assert_same_bits(bits(e.grad), bits(g.grad))


def test_backward_through_a_graph_from_before_an_optimizer_step_is_an_error():
    quantizer = initialized()
    y = quantizer(torch.tensor([9.0, 0.3], requires_grad=True))
    quantizer.step_size.grad = torch.tensor([1.0])
    torch.optim.SGD(quantizer.parameters(), lr=1e2).step()
    quantizer(X)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_second_derivatives_match_the_formulas():
    # dscale = sum of dy * (bound - z), dzero_point = -sum of dy * scale: each is linear in the other.
    quantizer = LearnedFakeQuantize(UINT4, grad_factor=0.5).initialize(torch.tensor([-1.0, 2.0]))
    quantizer.step_size.data.fill_(0.25), quantizer.offset.data.fill_(5.0)
    x = torch.tensor([9.0, 9.0, -9.0, 0.3], requires_grad=True)
    dy = torch.tensor([1.0, 2.0, 4.0, 8.0], requires_grad=True)
    dx, dscale, doffset = torch.autograd.grad(
        quantizer(x), (x, quantizer.step_size, quantizer.offset), dy, create_graph=True
    )
    assert dx.tolist() == [0, 0, 0, 8]
    assert dscale.item() == pytest.approx(0.5 * (3 * 10 + 4 * -5 + 8 * (1 - 0.3 / 0.25)), rel=1e-6)  # float32
    for value, wanted in ((dscale, quantizer.offset), (doffset, quantizer.step_size)):
        (second,) = torch.autograd.grad(value, wanted, retain_graph=True)
        assert second.tolist() == [-0.5 * 7]
    (by_dy,) = torch.autograd.grad(doffset, dy, retain_graph=True)
    assert by_dy.tolist() == [-0.125, -0.125, -0.125, 0]


def test_functional_call_gives_the_same_gradients():
    quantizer = initialized()
    x = torch.tensor([9.0, 0.3, -4.0])
    quantizer(x).sum().backward()
    parameters, buffers = (
        {k: v.detach().clone() for k, v in named} for named in (quantizer.named_parameters(), quantizer.named_buffers())
    )
    found = torch.func.grad(lambda p: torch.func.functional_call(quantizer, (p, buffers), x).sum())(parameters)
    assert_same_bits(bits(quantizer.step_size.grad), bits(found["step_size"]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_step_size_of_another_dtype_is_not_written_as_float32(dtype):
    quantizer = initialized()  # a sharded model may pass parameters in the dtype of the computation
    memory = torch.full((8,), -3.0, dtype=dtype)
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        torch.func.functional_call(quantizer, {"step_size": memory[:1]}, X)
    assert memory[1:].tolist() == [-3.0] * 7
    assert memory[0].item() in (-3.0, torch.tensor(EPS, dtype=dtype).item())
