"""Learnable functions on tensors at their limits: empty inputs, and ranges that float32 does not hold."""

import itertools

import numpy as np
import pytest

import fakequant as fq
from fakequant import torch_ops
from fakequant.testing.assertions import assert_same_bits
from torch_bridge import aten, to_numpy, torch

BACKWARD = {
    "per tensor": (
        torch_ops.fake_quantize_learnable_per_tensor_affine_backward,
        aten._fake_quantize_learnable_per_tensor_affine_backward,
    ),
    "per channel": (
        torch_ops.fake_quantize_learnable_per_channel_affine_backward,
        aten._fake_quantize_learnable_per_channel_affine_backward,
    ),
}


def outcome(function, *arguments):
    try:
        return tuple(function(*arguments))
    except Exception as error:
        return type(error).__name__, str(error)


# --- empty inputs ---------------------------------------------------------------------------------

EMPTY, ONE, TWO = torch.zeros(0), torch.tensor([0.1]), torch.tensor([0.1, 0.2])
PER_TENSOR = {
    "accepted": (EMPTY, EMPTY, ONE, ONE, -8, 7, 1.0),
    "zero outside the range": (EMPTY, EMPTY, ONE, ONE, 1, 7, 1.0),
    "quant_min above quant_max": (EMPTY, EMPTY, ONE, ONE, 7, -8, 1.0),
    "NaN zero point": (EMPTY, EMPTY, ONE, torch.tensor([torch.nan]), -8, 7, 1.0),
    "0-d scale": (EMPTY, EMPTY, torch.tensor(0.1), ONE, -8, 7, 1.0),
    "gradient of another size": (torch.ones(2), EMPTY, ONE, ONE, -8, 7, 1.0),
    "integer input": (EMPTY, EMPTY.int(), ONE, ONE, -8, 7, 1.0),
    "float quant_min": (EMPTY, EMPTY, ONE, ONE, -8.5, 7, 1.0),
    "no scale": (EMPTY, EMPTY, EMPTY, ONE, -8, 7, 1.0),
}
NONE = torch.zeros(2, 0)
PER_CHANNEL = {
    "accepted": (NONE, NONE, TWO, TWO, 0, -8, 7, 1.0),
    "zero outside the range": (NONE, NONE, TWO, TWO, 0, 1, 7, 1.0),
    "wrong number of scales": (NONE, NONE, ONE, TWO, 0, -8, 7, 1.0),
    "axis out of range": (NONE, NONE, TWO, TWO, 2, -8, 7, 1.0),
    "gradient of another shape": (torch.zeros(0, 2), NONE, TWO, TWO, 0, -8, 7, 1.0),
}


@pytest.mark.parametrize("arguments", PER_TENSOR.values(), ids=PER_TENSOR)
def test_per_tensor_backward_of_an_empty_input_runs_torchs_checks_first(arguments):
    check_empty("per tensor", arguments)


@pytest.mark.parametrize("arguments", PER_CHANNEL.values(), ids=PER_CHANNEL)
def test_per_channel_backward_of_an_empty_input_runs_torchs_checks_first(arguments):
    check_empty("per channel", arguments)


def check_empty(kind, arguments):
    ours, theirs = BACKWARD[kind]
    expected, actual = outcome(theirs, *arguments), outcome(ours, *arguments)
    if isinstance(expected[0], str):
        assert actual == expected
        return
    x, scale, zero_point = arguments[1:4]
    assert [(t.shape, t.dtype) for t in actual] == [(t.shape, t.dtype) for t in (x, scale, zero_point)]
    assert not any(t.any() for t in actual)


def test_backward_of_an_empty_input_accepts_float64_and_float16():
    for dtype in (torch.float64, torch.float16):
        dx, dscale, dzero = BACKWARD["per tensor"][0](EMPTY.to(dtype), EMPTY.to(dtype), ONE, ONE, -8, 7, 1.0)
        assert (dx.dtype, dscale.tolist(), dzero.tolist()) == (dtype, [0.0], [0.0])


# --- ranges beyond 2^24 ---------------------------------------------------------------------------

RANGES = [(-(2**25), 2**25 - 1), (-(2**31), 2**31 - 1), (-(2**40), 2**40), (-(2**63), 2**63 - 1), (0, 2**33)]
ZERO_POINTS = (0.0, -57.0, 0.5, 3e7, -3e7, 2.0**31, 1e12, 2.0**62, 2.0**63)
VALUES = (0.3, -1.0, 1e8, -1e8, 3e30, -3e30, torch.nan, torch.inf, 2.0**25, 2.0**24 + 2)


@pytest.mark.parametrize("kind", BACKWARD)
@pytest.mark.parametrize("bounds", RANGES, ids=str)
def test_learned_gradients_on_wide_ranges_have_torchs_bits(kind, bounds):
    ours, theirs = BACKWARD[kind]
    for zero_point, value, scale in itertools.product(ZERO_POINTS, VALUES, (0.1, 1.0, 3e-5)):
        data = [torch.tensor([[v]]) for v in (0.7, value)]
        rest = [torch.tensor([scale]), torch.tensor([zero_point]), *([0] if kind == "per channel" else []), *bounds]
        expected, actual = (outcome(f, *data, *rest, 0.3) for f in (theirs, ours))
        if isinstance(expected[0], str):
            assert actual == expected
            continue
        for e, a in zip(expected, actual, strict=True):
            assert_same_bits(to_numpy(e), to_numpy(a), kind, bounds, zero_point, value, scale)


def wide_case():
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(4, 25_000, generator=generator) for _ in range(2))
    return x * 2**24, dy, torch.tensor([0.7, 0.1, 3.0, 1.0]), torch.tensor([3.3, 2.5, -7.5, 2.0**24])


@pytest.mark.parametrize("accelerated", [False, True], ids=["fakequant", "accelerated torch"])
@pytest.mark.parametrize("kind", BACKWARD)
def test_learned_gradient_sums_on_wide_ranges_do_not_depend_on_threads(kind, accelerated):
    x, dy, scale, zero_point = wide_case()
    bounds, axis = (-(2**25), 2**25 - 1), [0] if kind == "per channel" else []
    if kind == "per tensor":
        scale, zero_point = scale[:1], zero_point[:1]
    backward = BACKWARD[kind][accelerated]
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with fq.accelerate() if accelerated else torch.no_grad():
                found.append(backward(dy, x, scale, zero_point, *axis, *bounds, 1.0))
    finally:
        torch.set_num_threads(before)
    for one, two in zip(*found, strict=True):
        assert_same_bits(to_numpy(one), to_numpy(two))


@pytest.mark.parametrize("kind", BACKWARD)
def test_autograd_gives_the_sums_of_the_backward_functions_on_wide_ranges(kind):
    x, dy, scale, zero_point = wide_case()
    bounds, axis = (-(2**25), 2**25 - 1), [0] if kind == "per channel" else []
    name = f"fake_quantize_learnable_{kind.replace(' ', '_')}_affine"
    if kind == "per tensor":
        scale, zero_point = scale[:1], zero_point[:1]
    expected = BACKWARD[kind][0](dy, x, scale, zero_point, *axis, *bounds, 1.0)
    leaves = [t.clone().requires_grad_() for t in (x, scale, zero_point)]
    y = getattr(torch_ops, name)(*leaves, *axis, *bounds, 1.0)
    assert_same_bits(to_numpy(getattr(torch, f"_{name}")(x, scale, zero_point, *axis, *bounds)), to_numpy(y.detach()))
    gradients = torch.autograd.grad(y, leaves, dy, create_graph=True)
    for e, a in zip(expected, gradients, strict=True):
        assert_same_bits(to_numpy(e), to_numpy(a.detach()))
    with pytest.raises(RuntimeError, match="cannot be differentiated again for a range beyond 2"):
        gradients[1].sum().backward()


def test_backward_functions_on_wide_ranges_give_equal_bits_for_arrays_and_tensors():
    x, dy, scale, zero_point = wide_case()
    bounds = (-(2**25), 2**25 - 1)
    for kind, axis in (("per tensor", []), ("per channel", [0])):
        s, z = (scale, zero_point) if axis else (scale[:1], zero_point[:1])
        of_tensors = BACKWARD[kind][0](dy, x, s, z, *axis, *bounds, 0.5)
        of_arrays = BACKWARD[kind][0](*(np.asarray(t) for t in (dy, x, s, z)), *axis, *bounds, 0.5)
        for t, a in zip(of_tensors, of_arrays, strict=True):
            assert_same_bits(to_numpy(t), a, kind)
