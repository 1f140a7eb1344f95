"""Gradients through autograd equal those of the NumPy functions for any layouts of x and dy."""

import math

import numpy as np
import pytest

import fakequant as fq
from fakequant import reference
from fakequant.testing.assertions import assert_same_bits
from tensor_data import (
    BLOCKS,
    DY_LAYOUTS,
    IN_C_ORDER,
    LAYOUTS,
    array,
    assert_like,
    differentiable,
    each_nodes as each_nodes,
    few_rules,
    gradient,
    grid,
    rules,
    saved_bytes,
)
from torch_bridge import to_torch, torch

pytestmark = pytest.mark.usefixtures("each_nodes", "torch_on_one_thread")
by_layout = pytest.mark.parametrize("layout", LAYOUTS)
by_blocks = pytest.mark.parametrize("where", BLOCKS.values(), ids=BLOCKS)


def strides_of_product(dy, x):
    return (dy * torch.empty_like(x, dtype=torch.bool, requires_grad=False)).stride()


@pytest.mark.parametrize("dy_layout", DY_LAYOUTS)
@by_layout
def test_clipped_and_passed_gradients_equal_those_of_arrays_in_every_layout(layout, dy_layout):
    for spec, dtype in few_rules(dict(axis=1)):
        x = differentiable(layout, dtype)
        dy = gradient(x, dy_layout, dtype)
        s, z = grid(x, spec)
        tensors = to_torch(s), to_torch(z)
        _, inside = fq.fake_quantize(array(x), s, z, spec, mask="bool")
        expected = fq.fake_quantize_backward(array(dy), inside, spec)
        outputs = [fq.fake_quantize(x, *tensors, spec)]
        outputs += [fq.fake_quantize(x, *tensors, spec, mask=m)[0] for m in ("packed", "bool")]
        for y in outputs:
            (dx,) = torch.autograd.grad(y, x, dy)
            assert_same_bits(expected, array(dx), "dx", spec, dtype)
            assert dx.stride() == strides_of_product(dy, x)

        (dx,) = torch.autograd.grad(fq.fake_quantize(x, *tensors, spec, gradient="pass"), x, dy)
        assert_same_bits(array(dy), array(dx), "dx passed through", spec, dtype)
        assert dx.stride() == dy.stride()


@by_blocks
@by_layout
def test_clipped_gradients_equal_those_of_arrays_in_every_granularity(layout, where):
    for spec, dtype in few_rules(where):
        x = differentiable(layout, dtype)
        dy = gradient(x, "contiguous", dtype)
        s, z = grid(x, spec)
        _, inside = fq.fake_quantize(array(x), s, z, spec, mask="bool")
        (dx,) = torch.autograd.grad(fq.fake_quantize(x, to_torch(s), to_torch(z), spec), x, dy)
        assert_same_bits(fq.fake_quantize_backward(array(dy), inside, spec), array(dx), spec, dtype)


@pytest.mark.parametrize("dy_layout", DY_LAYOUTS)
@by_layout
def test_gradients_through_observe_fake_quantize_equal_those_of_arrays(layout, dy_layout):
    for spec, dtype in few_rules(dict(axis=1)):
        x = differentiable(layout, dtype)
        dy = gradient(x, dy_layout, dtype)
        state = [np.full(x.shape[1], v, np.float32) for v in (-3, 5)]
        expected = fq.observe_fake_quantize(array(x), spec, *(v.copy() for v in state), mask="bool")
        result = fq.observe_fake_quantize(x, spec, *map(to_torch, state))
        (dx,) = torch.autograd.grad(result.y, x, dy)
        assert_same_bits(fq.fake_quantize_backward(array(dy), expected.mask, spec), array(dx), spec, dtype)
        assert dx.stride() == strides_of_product(dy, x)
        assert not any(t.requires_grad for t in result[2:])


def test_observe_fake_quantize_with_gradient_pass_saves_nothing_and_passes_dy():
    x, dy = torch.tensor([-9.0, 0.3], requires_grad=True), torch.tensor([1.0, -2.0])
    state = -torch.ones(1), torch.ones(1)
    assert saved_bytes(fq.observe_fake_quantize, x, fq.QuantSpec(), *state, gradient="pass") == []
    y = fq.observe_fake_quantize(x, fq.QuantSpec(), *state, gradient="pass").y
    assert torch.autograd.grad(y, x, dy)[0].tolist() == dy.tolist()


def test_backward_accumulates_gradients_in_leaves():
    x = torch.tensor([-0.3, 0.05, 9.0], requires_grad=True)
    for kind, expected in (("clipped", [2, 2, 0]), ("pass", [2, 2, 2])):
        x.grad = None
        for _ in range(2):
            fq.fake_quantize(x, 0.1, 0, fq.QuantSpec(bits=4), gradient=kind).sum().backward()
        assert x.grad.tolist() == expected


def per_element(parameters, shape, spec):
    if spec.axis is None:
        return parameters
    if spec.group_size is None:
        return np.expand_dims(parameters, [d for d in range(len(shape)) if d != spec.axis % len(shape)])
    if spec.group_rows is not None:
        parameters = np.repeat(parameters, spec.group_rows, axis=-2)
    return np.repeat(parameters, shape[spec.axis] // parameters.shape[spec.axis], axis=spec.axis)


def block_sums(terms, spec):
    shape, axis = terms.shape, None if spec.axis is None else spec.axis % terms.ndim
    if spec.group_size is None:
        return terms.sum(axis=tuple(d for d in range(terms.ndim) if d != axis), dtype=np.float64)
    size = shape[axis] if spec.group_size == -1 else spec.group_size
    cut = terms.reshape(*shape[:axis], shape[axis] // size, size, *shape[axis + 1 :])
    if spec.group_rows is not None:
        rows = (*shape[:-2], shape[-2] // spec.group_rows, spec.group_rows, shape[-1] // size, size)
        return terms.reshape(rows).sum(axis=(-3, -1), dtype=np.float64)
    return cut.sum(axis=axis + 1, dtype=np.float64)


def assert_sum_of(terms, actual, spec, *names):
    """Asserts equal sums up to their order.

    Sums of n float64 numbers in two orders differ by at most 2 * n * 2^-53 of the sum of magnitudes.
    """
    total, slack = block_sums(terms, spec), 2.0**-52 * terms.size * block_sums(np.abs(terms), spec)
    low, high = (np.asarray(total + d).astype(actual.dtype) for d in (-slack, slack))
    assert ((low <= actual) & (actual <= high)).all(), names


@by_blocks
@by_layout
def test_learned_gradients_equal_those_of_arrays_in_every_layout_and_granularity(layout, where):
    for spec, dtype in few_rules(where):
        x = differentiable(layout, dtype)
        s, z = grid(x, spec)
        z = np.float32(z + np.random.default_rng(4).choice([-0.5, -0.3, 0, 0.2, 0.5], z.shape))
        scale, zero_point = to_torch(s).requires_grad_(), to_torch(z).requires_grad_()

        y = fq.fake_quantize_learned(x, scale, zero_point, spec, grad_factor=0.25)

        assert_like(fq.fake_quantize_learned(array(x), s, z, spec), y, x, "y", spec, dtype)
        hostile = gradient(x, "channels last", dtype)
        for dy in (hostile, torch.nan_to_num(hostile, 1, 2, -3)):
            expected = fq.fake_quantize_learned_backward(array(dy), array(x), s, z, spec, grad_factor=0.25)
            direct = fq.fake_quantize_learned_backward(dy, x, scale, zero_point, spec, grad_factor=0.25)
            by_autograd = torch.autograd.grad(y, (x, scale, zero_point), dy, retain_graph=True)
            assert by_autograd[1].dtype == by_autograd[2].dtype == torch.float32
            for name, *gradients in zip(expected._fields, expected, direct, by_autograd, strict=True):
                e, d, a = (g if isinstance(g, np.ndarray) else array(g) for g in gradients)
                if name == "dx" or layout in IN_C_ORDER:
                    assert_same_bits(e, d, name, spec, dtype)
                with np.errstate(over="ignore"):
                    assert_same_bits(d.astype(a.dtype), a, name, "by autograd", spec, dtype)
            assert by_autograd[0].stride() == direct.dx.stride() == torch.empty_like(x).stride()
        terms = reference.learned_backward(
            array(dy), array(x), *(per_element(p, x.shape, spec) for p in (s, z)), spec.qmin, spec.qmax, spec.numerics,
            grad_factor=0.25, granularity="channel" if where else "tensor",
        )  # fmt: skip
        for values, actual in zip(terms[1:], direct[1:], strict=True):
            assert_sum_of(values, array(actual), spec, spec, dtype)


@pytest.mark.parametrize("dy_layout", DY_LAYOUTS)
@by_layout
def test_learned_gradients_equal_those_of_arrays_for_dy_of_every_layout(layout, dy_layout):
    for spec, dtype in few_rules(dict(axis=-1), bits=4, symmetric=True):
        x = differentiable(layout, dtype)
        s, _ = grid(x, spec)
        scale = to_torch(s).requires_grad_()
        dy = torch.nan_to_num(gradient(x, dy_layout, dtype), 1, 2, -3)
        dx, dscale = torch.autograd.grad(fq.fake_quantize_learned(x, scale, 0, spec), (x, scale), dy)
        expected = fq.fake_quantize_learned_backward(array(dy), array(x), s, 0, spec)
        assert_same_bits(expected.dx, array(dx), "dx", spec, dtype)
        np.testing.assert_allclose(array(dscale), expected.dscale, rtol=1e-6, atol=1e-6 * np.abs(array(dy)).max())


@pytest.mark.parametrize("learned", ["x", "scale", "zero point"])
def test_only_inputs_that_require_a_gradient_get_one(learned):
    spec = fq.QuantSpec(bits=4, symmetric=False)
    values = {"x": torch.tensor([0.26, 9.0]), "scale": torch.tensor(0.1), "zero point": torch.tensor(1.4)}
    values[learned].requires_grad_()
    fq.fake_quantize_learned(*values.values(), spec).sum().backward()
    assert {name for name, t in values.items() if t.grad is not None} == {learned}


@pytest.mark.parametrize("changed", [0, 1, 2], ids=["x", "scale", "zero point"])
def test_changing_a_saved_input_in_place_is_an_error_in_the_backward_pass(changed):
    spec = fq.QuantSpec(bits=4, symmetric=False)
    leaves = [torch.tensor(v, requires_grad=True) for v in ([0.26, 9.0], 0.1, 1.4)]
    inputs = [leaf.clone() for leaf in leaves]
    y = fq.fake_quantize_learned(*inputs, spec)
    with torch.no_grad():
        inputs[changed].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y = fq.fake_quantize(inputs[0], 0.1, 0, spec)
    inputs[0].detach().add_(1)
    y.sum().backward()  # only a mask was saved, not x


@pytest.mark.parametrize("n", [0, 1, 8, 9, 1000])
def test_functions_save_only_a_mask_or_their_inputs_for_the_backward_pass(n):
    bits = math.ceil(n / 8)
    for spec, dtype in rules({}):
        x = to_torch(np.zeros(n, dtype)).requires_grad_()
        grid = (x, 0.1, 0, spec)
        assert saved_bytes(fq.fake_quantize, *grid) == [bits]
        assert saved_bytes(fq.fake_quantize, *grid, mask="packed") == [bits]
        assert saved_bytes(fq.fake_quantize, *grid, mask="bool") == [n]
        assert saved_bytes(fq.fake_quantize, *grid, gradient="pass") == []
        assert saved_bytes(fq.observe_fake_quantize, x, spec, -torch.ones(1), torch.ones(1)) == [bits]
        wide = dtype == np.float64 and spec.numerics != "torch"
        scale = torch.tensor(0.1, dtype=torch.float64 if wide else torch.float32, requires_grad=True)
        kept = [n * x.itemsize, scale.itemsize, 4]
        assert saved_bytes(fq.fake_quantize_learned, x, scale, torch.tensor(0.5), spec) == kept
        assert saved_bytes(fq.fake_quantize_learned, x, scale, 0, spec) == kept[:2]
        with torch.no_grad():
            assert saved_bytes(fq.fake_quantize, *grid) == []


@pytest.mark.parametrize("bits", [26, 32])
def test_learned_zero_points_of_wide_ranges_give_the_bits_of_arrays(bits):
    spec = fq.QuantSpec(bits=bits, symmetric=False)
    x, z = np.float32([1e9, -5, 0]), np.float32(1e10)
    y = fq.fake_quantize_learned(to_torch(x), torch.tensor(1.0), torch.tensor(z), spec)
    assert_same_bits(fq.fake_quantize_learned(x, 1.0, z, spec), array(y))
