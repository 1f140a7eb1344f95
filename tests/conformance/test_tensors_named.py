"""Functions with torch's names have torch's bits, strides, masks, gradients and state on tensors."""

import itertools
import math

import numpy as np
import pytest

from fakequant import torch_ops
from fakequant.testing import cases
from fakequant.testing.assertions import assert_same_bits
from tensor_data import (
    DY_LAYOUTS,
    LAYOUTS,
    array,
    assert_same,
    data,
    differentiable,
    each_nodes as each_nodes,
    gradient,
    saved_bytes,
    torchs,
)
from torch_bridge import aten, to_torch, torch

pytestmark = pytest.mark.usefixtures("each_nodes", "torch_on_one_thread")
by_layout = pytest.mark.parametrize("layout", LAYOUTS)
by_dy_layout = pytest.mark.parametrize("dy_layout", DY_LAYOUTS)
NUMBERS = [(0.1, 3), (1 / 3, -7), (1e-40, 0), (0.0, 0), (-0.1, 2), (np.inf, 0), (np.nan, 0), (1, 1)]
# Every layout of a gradient and every dtype, in pairs.
GRADIENTS = list(zip(DY_LAYOUTS, itertools.cycle(cases.DTYPES.values()), strict=False))
ZERO_DTYPES = (torch.int32, torch.float32, torch.float16)


def channels(x, axis, zero_dtype=torch.int32):
    rng = np.random.default_rng(axis)
    scale = rng.choice(np.float32([0.1, 1 / 3, 12345.678, 1e-40, 0, -0.1, np.inf]), 2 * x.shape[axis])
    zero_point = torch.from_numpy(rng.choice(np.float32([-7, 0, 5]), x.shape[axis]))
    fraction = 0 if zero_dtype == torch.int32 else 0.3
    return torch.from_numpy(scale)[::2], (zero_point + fraction).to(zero_dtype)


def learnable(x, axis):
    rng = np.random.default_rng(axis)
    n = 1 if axis is None else x.shape[axis]
    return to_torch(rng.choice(np.float32([0.1, 1 / 3, 2]), n)), to_torch(rng.uniform(-9, 9, n).astype(np.float32))


@by_layout
def test_per_tensor_functions_on_tensors_equal_torch_in_every_layout(layout):
    for dtype in cases.DTYPES.values():
        x = data(layout, dtype)
        for scale, zero_point in NUMBERS:
            for bounds in (cases.INT8, cases.INT4, (-(2**31), 2**31 - 1)):
                arguments = x, scale, zero_point, *bounds
                expected = torch.fake_quantize_per_tensor_affine(*arguments)
                assert_same(expected, torch_ops.fake_quantize_per_tensor_affine(*arguments), arguments[1:])
                expected = aten.fake_quantize_per_tensor_affine_cachemask(*arguments)
                assert_same(expected, torch_ops.fake_quantize_per_tensor_affine_cachemask(*arguments), arguments[1:])
                qparams = torch.tensor([float(scale)]), torch.tensor([zero_point], dtype=torch.int32)
                expected = torch.fake_quantize_per_tensor_affine(x, *qparams, *bounds)
                assert_same(expected, torch_ops.fake_quantize_per_tensor_affine(x, *qparams, *bounds), qparams)
        for enabled in (1, 0):
            arguments = x, *qparams, torch.tensor([enabled]), *cases.INT8
            expected = torch._fake_quantize_per_tensor_affine_cachemask_tensor_qparams(*arguments)
            assert_same(expected, torch_ops.fake_quantize_per_tensor_affine_cachemask_tensor_qparams(*arguments))


@by_layout
def test_per_channel_functions_on_tensors_equal_torch_in_every_layout(layout):
    for dtype, axis, zero_dtype in itertools.product(cases.DTYPES.values(), range(4), ZERO_DTYPES):
        x = data(layout, dtype)
        arguments = x, *channels(x, axis, zero_dtype), axis, *cases.INT8
        expected = aten.fake_quantize_per_channel_affine_cachemask(*arguments)
        assert_same(expected, torch_ops.fake_quantize_per_channel_affine_cachemask(*arguments), dtype, axis, zero_dtype)
        assert_same(expected[0], torch_ops.fake_quantize_per_channel_affine(*arguments), dtype, axis, zero_dtype)


@by_dy_layout
@by_layout
def test_backward_functions_on_tensors_equal_torch_in_every_layout(layout, dy_layout):
    mask = LAYOUTS[layout if layout != "lazily negated" else "contiguous"](torch.rand(4, 6, 2, 8) < 0.6)
    for dtype in cases.DTYPES.values():
        dy = gradient(mask, dy_layout, dtype)
        for name in ("tensor", "channel"):
            name = f"fake_quantize_per_{name}_affine_cachemask_backward"
            assert_same(getattr(aten, name)(dy, mask), getattr(torch_ops, name)(dy, mask), dtype)


def fused_arguments(x, per_row=False):
    n = len(x) if per_row else 1
    state = torch.full((n,), -3.0), torch.full((n,), 5.0), torch.ones(n), torch.zeros(n, dtype=torch.int32)
    return torch.tensor([0]), torch.tensor([1]), *state, 0.01, *cases.INT8, 0 if per_row else -1, per_row, False


ONE = torch.tensor([0.1]), torch.tensor([3], dtype=torch.int32)
DIFFERENTIABLE = {
    "numbers": ("fake_quantize_per_tensor_affine", lambda x: (0.1, 3, *cases.INT8)),
    "tensors": ("fake_quantize_per_tensor_affine", lambda x: (*ONE, *cases.INT8)),
    "cachemask": ("fake_quantize_per_tensor_affine_cachemask", lambda x: (0.1, 3, *cases.INT8)),
    "tensor qparams": (
        "fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
        lambda x: (*ONE, torch.tensor([1]), *cases.INT8),
    ),
    "channel, first": ("fake_quantize_per_channel_affine", lambda x: (*channels(x, 0), 0, *cases.INT8)),
    "channel, last": ("fake_quantize_per_channel_affine", lambda x: (*channels(x, 3), 3, *cases.INT8)),
    "channel cachemask": (
        "fake_quantize_per_channel_affine_cachemask",
        lambda x: (*channels(x, 1, torch.float32), 1, *cases.INT8),
    ),
    "fused": ("fused_moving_avg_obs_fake_quant", fused_arguments),
    "fused, with mask": ("fused_moving_avg_obs_fq_helper", fused_arguments),
    "fused rows": ("fused_moving_avg_obs_fake_quant", lambda x: fused_arguments(x, per_row=True)),
}
by_function = pytest.mark.parametrize(("name", "arguments"), DIFFERENTIABLE.values(), ids=DIFFERENTIABLE)


def first(result):
    return result if isinstance(result, torch.Tensor) else result[0]


@by_function
@by_layout
def test_gradients_of_functions_with_torchs_names_equal_torchs(layout, name, arguments):
    for dy_layout, dtype in GRADIENTS:
        x = differentiable(layout, dtype)
        dy = gradient(x, dy_layout, dtype)
        expected, actual = (first(function(x, *arguments(x))) for function in (torchs(name), getattr(torch_ops, name)))
        assert_same(expected, actual, dtype)
        (expected,), (actual,) = (torch.autograd.grad(y, x, dy) for y in (expected, actual))
        assert_same(expected, actual, dtype, dy_layout)


@by_function
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 3, 3, 3), (2, 2, 2, 100)], ids=str)
def test_functions_with_torchs_names_save_only_a_mask_for_the_backward_pass(shape, name, arguments):
    x = torch.zeros(shape, requires_grad=True)
    returns_bytes = "mask" in name or name.endswith("helper")
    size = x.numel() if returns_bytes else math.ceil(x.numel() / 8)
    assert saved_bytes(getattr(torch_ops, name), x, *arguments(x)) == [size]


def learnable_call(x, axis):
    """Returns scale and zero point, the arguments after them, and the function's name."""
    kind = "tensor" if axis is None else "channel"
    rest = (() if axis is None else (axis,)) + (*cases.INT4, 0.25)
    return learnable(x, axis), rest, f"fake_quantize_learnable_per_{kind}_affine"


@pytest.mark.parametrize("axis", [None, 0, 1, 3])
@by_layout
def test_learnable_functions_on_tensors_equal_torch_up_to_the_order_of_sums(layout, axis):
    """Includes dtypes for which torch has no backward.

    torch sums n terms in float32, with an error of at most n * 2^-24 of the sum of their magnitudes. Our sums are
    rounded once from float64; arrays and tensors are summed in different orders.
    """
    for dy_layout, dtype in GRADIENTS:
        x = differentiable(layout, dtype)
        parameters, rest, name = learnable_call(x, axis)
        function, theirs = getattr(torch_ops, name), torchs(name)
        assert_same(theirs(x, *parameters, *rest), function(x, *parameters, *rest), dtype)
        leaves = [p.clone().requires_grad_() for p in parameters]
        dy = torch.nan_to_num(gradient(x, dy_layout, dtype), 1, 2, -3)
        ours = torch.autograd.grad(function(x, *leaves, *rest), (x, *leaves), dy)
        direct = getattr(torch_ops, f"{name}_backward")(dy, x, *parameters, *rest)
        on_arrays = getattr(torch_ops, f"{name}_backward")(array(dy), array(x), *map(array, parameters), *rest)
        assert_same_bits(on_arrays.dx.astype(dtype), array(ours[0]), "dx", dtype, dy_layout)
        assert_same_bits(on_arrays.dx, array(direct.dx), "dx", dtype, dy_layout)
        assert ours[0].stride() == direct.dx.stride() == torch.empty_like(x).stride()
        magnitudes = float(dy.double().abs().sum()) * 0.25 * np.array([16, float(parameters[0].max())])
        for i, magnitude in zip((1, 2), magnitudes, strict=True):
            assert_same_bits(array(direct[i]), array(ours[i]), "by autograd", dtype, dy_layout)
            np.testing.assert_allclose(array(ours[i]), on_arrays[i], rtol=2.0**-23, atol=2.0**-40 * magnitude)
        if dtype.name in ("float32", "bfloat16"):
            expected = torch.autograd.grad(theirs(x, *leaves, *rest), (x, *leaves), dy)
            assert_same(expected[0], ours[0], "dx", dtype, dy_layout)
            for i, magnitude in zip((1, 2), magnitudes, strict=True):
                assert expected[i].shape == ours[i].shape
                atol = x.numel() * 2.0**-24 * magnitude
                np.testing.assert_allclose(array(ours[i]), array(expected[i]), rtol=0, atol=atol)


def test_learnable_functions_save_only_their_inputs_for_the_backward_pass():
    x = torch.zeros(5, 6, dtype=torch.float16, requires_grad=True)
    for axis in (None, 0, 1):
        parameters, rest, name = learnable_call(x, axis)
        n = 1 if axis is None else x.shape[axis]
        assert saved_bytes(getattr(torch_ops, name), x, *parameters, *rest) == [60, 4 * n, 4 * n]


@pytest.mark.parametrize("per_row", [False, True], ids=["tensor", "rows"])
@by_layout
def test_the_fused_observer_on_tensors_equals_torch_after_every_step(layout, per_row):
    """One step runs without the observer and one without the quantizer."""
    for name, symmetric in itertools.product(("fake_quant", "fq_helper"), (False, True)):
        name = f"fused_moving_avg_obs_{name}"
        states = []
        for step, switches in enumerate([(1, 1), (1, 0), (0, 1), (1, 1)]):
            x = torch.nan_to_num(data(layout, np.float32, seed=step), 1)
            n = len(x) if per_row else 1
            if not states:
                infinite = torch.full((n,), np.inf)
                fresh = infinite, -infinite, torch.ones(n), torch.zeros(n, dtype=torch.int32)
                states = [[t.clone() for t in fresh] for _ in range(2)]
            flags = [torch.tensor([s]) for s in switches]
            options = 0.3, *cases.UINT8, 0 if per_row else -1, per_row, symmetric
            expected, actual = (
                function(x, *flags, *state, *options)
                for function, state in zip((torchs(name), getattr(torch_ops, name)), states, strict=True)
            )
            assert_same(expected, actual, step)
            for e, a in zip(*states, strict=True):
                assert_same_bits(array(e), array(a), "state", step)


@by_layout
def test_the_fused_observer_on_tensors_keeps_the_sign_of_the_first_zero_as_torch_does(layout):
    for seed, per_row in itertools.product(range(4), (False, True)):
        rng = np.random.default_rng(seed)
        x = LAYOUTS[layout](torch.from_numpy(rng.choice(np.float32([0.0, -0.0]), (4, 6, 2, 8))))
        results = []
        for function in (torch.fused_moving_avg_obs_fake_quant, torch_ops.fused_moving_avg_obs_fake_quant):
            infinite = torch.full((len(x) if per_row else 1,), np.inf)
            state = infinite, -infinite, torch.ones_like(infinite), torch.zeros_like(infinite, dtype=torch.int32)
            options = 0.3, *cases.UINT8, 0 if per_row else -1, per_row, False
            function(x, torch.tensor([1]), torch.tensor([1]), *state, *options)
            results.append(state)
        assert_same(*results, seed, per_row)
