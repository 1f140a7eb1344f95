"""Under `accelerate`, scales of every dtype give the result or the error that torch gives without it."""

import pytest

import fakequant as fq
from accelerated import assert_same_tensors, decelerated  # noqa: F401
from fakequant import torch_ops
from torch_bridge import torch

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.bool)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
ZERO_POINTS = (torch.int32, torch.float32, torch.float16, torch.int64, torch.bfloat16)


def run(function, *arguments):
    """Returns output and gradient, or the type and message of the error."""
    x, *rest = arguments
    x = x.clone().requires_grad_()
    try:
        y = function(x, *rest)
        y.sum().backward()
    except Exception as error:
        return type(error).__name__, str(error)
    return y.detach(), x.grad


def assert_same(function, *arguments):
    expected = run(function, *arguments)
    with fq.accelerate():
        actual = run(function, *arguments)
    if isinstance(expected[0], str):
        assert actual == expected
    else:
        assert_same_tensors(expected, actual)
    return expected


@each_dtype
@pytest.mark.parametrize("zero_point", ZERO_POINTS, ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_accelerated_per_channel_quantization_treats_every_scale_dtype_as_torch_does(dtype, zero_point, axis):
    x = torch.linspace(-4, 4, 20).reshape(4, 5)
    channels = x.shape[axis]
    scale, zeros = torch.linspace(0.5, 1.5, channels).to(dtype), torch.zeros(channels, dtype=zero_point)
    result = assert_same(torch.fake_quantize_per_channel_affine, x, scale, zeros, axis, -8, 7)
    assert isinstance(result[0], str) or (dtype, zero_point) in [(torch.float32, z) for z in ZERO_POINTS[:3]]


@each_dtype
@pytest.mark.parametrize("zero_point", ZERO_POINTS, ids=str)
def test_accelerated_per_tensor_quantization_treats_every_scale_dtype_as_torch_does(dtype, zero_point):
    scale, zeros = torch.ones(1).to(dtype), torch.zeros(1, dtype=zero_point)
    assert_same(torch.fake_quantize_per_tensor_affine, torch.linspace(-4, 4, 20), scale, zeros, -8, 7)


@each_dtype
@pytest.mark.parametrize("per_channel", [False, True])
def test_accelerated_learnable_forward_treats_every_scale_dtype_as_torch_does(dtype, per_channel):
    """Only the forward pass: our gradient accepts float dtypes that torch refuses (docs/numerics.md)."""
    x, scale, zeros = torch.linspace(-4, 4, 20).reshape(4, 5), torch.ones(4).to(dtype), torch.zeros(4)
    if per_channel:
        call = lambda: torch._fake_quantize_learnable_per_channel_affine(x, scale, zeros, 0, -8, 7)  # noqa: E731
    else:
        call = lambda: torch._fake_quantize_learnable_per_tensor_affine(x, scale[:1], zeros[:1], -8, 7)  # noqa: E731

    def outcome():
        try:
            return (call(),)
        except Exception as error:
            return type(error).__name__, str(error)

    expected = outcome()
    with fq.accelerate():
        actual = outcome()
    if isinstance(expected[0], str):
        assert actual == expected
    else:
        assert_same_tensors(expected, actual)


def test_fakequant_per_channel_accepts_bfloat16_scales():
    x, scale = torch.linspace(-4, 4, 20).reshape(4, 5), torch.tensor([0.5, 0.25, 1.0, 2.0])
    zeros = torch.zeros(4, dtype=torch.int32)
    expected = torch.fake_quantize_per_channel_affine(x, scale, zeros, 0, -8, 7)
    assert torch.equal(torch_ops.fake_quantize_per_channel_affine(x, scale.bfloat16(), zeros, 0, -8, 7), expected)
