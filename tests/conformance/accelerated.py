"""Calls of torch's operators with torch's kernels and with ours, for `test_accelerate*.py`."""

import contextlib

import pytest

import fakequant
from fakequant._backends.torch import override_aten
from fakequant._backends.torch.compare_with_aten import REPLACED
from fakequant.testing.assertions import assert_same_bits
from torch_bridge import to_numpy, torch

OPERATORS = tuple(REPLACED)
by_operator = pytest.mark.parametrize("operator", OPERATORS)


@pytest.fixture(autouse=True)
def decelerated():
    """Undoes `accelerate` after every test."""
    yield
    fakequant.decelerate()
    assert not override_aten.is_accelerated()


@contextlib.contextmanager
def counted_kernels():
    """Yields a list that collects (operator, whether our kernel handled it) for every call of our functions."""
    calls = []

    def counted(name, function):
        def kernel(*arguments):
            result = function(*arguments)
            calls.append((name, result is not None))
            return result

        return kernel

    with fakequant.accelerate():
        pass  # the first call compares the kernels with torch, which does not count
    with pytest.MonkeyPatch.context() as patch:
        for name, function in REPLACED.items():
            patch.setitem(REPLACED, name, counted(name, function))
        yield calls


def assert_same_tensors(expected, actual, *what):
    """Asserts equal dtypes, shapes, bits and strides."""
    for i, (e, a) in enumerate(zip(expected, actual, strict=True)):
        assert_same_bits(to_numpy(e.detach()), to_numpy(a.detach()), f"result {i}", *what)
        assert e.stride() == a.stride(), (f"result {i}", *what)


def compare(function, *arguments):
    """Asserts that `function` returns the same tensors with and without acceleration."""
    expected = function(*arguments)
    with fakequant.accelerate():
        actual = function(*arguments)
    assert_same_tensors(expected, actual)


def float32(*values):
    """Returns a float32 tensor. Values that are too large become infinite, as in NumPy."""
    return torch.tensor(values, dtype=torch.float64).float()


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def int64(*values):
    return torch.tensor(values, dtype=torch.int64)


# --- ordinary calls -----------------------------------------------------------------------

x = torch.linspace(-1, 1, 6).reshape(2, 3)
RANGE = dict(quant_min=-8, quant_max=7)
CHANNELS = dict(scale=float32(0.1, 0.2), zero_point=int32(0, 1), axis=0)
FLOAT_CHANNELS = CHANNELS | dict(zero_point=float32(0, 1.2))
FUSED = dict(
    input=x, observer_on=int64(1), fake_quant_on=int64(1), running_min=float32(-1), running_max=float32(2),
    scale=float32(1), zero_point=int32(0), averaging_const=0.01, quant_min=0, quant_max=255, ch_axis=-1,
    per_row_fake_quant=False, symmetric_quant=False,
)  # fmt: skip
FUSED_ROWS = FUSED | dict(
    running_min=float32(-1, -2), running_max=float32(1, 2), scale=float32(1, 1), zero_point=int32(0, 0), ch_axis=0,
    per_row_fake_quant=True,
)  # fmt: skip
# Arguments in the order of the operators' schemas.
ORDINARY = {
    "fake_quantize_per_tensor_affine_cachemask": dict(input=x, scale=0.1, zero_point=0) | RANGE,
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": (
        dict(input=x, scale=float32(0.1), zero_point=int32(0), fake_quant_enabled=int64(1)) | RANGE
    ),
    "fake_quantize_per_channel_affine_cachemask": dict(input=x) | CHANNELS | RANGE,
    "fake_quantize_per_tensor_affine_cachemask_backward": dict(grad=x, mask=x > 0),
    "fake_quantize_per_channel_affine_cachemask_backward": dict(grad=x, mask=x > 0),
    "_fake_quantize_learnable_per_tensor_affine_backward": (
        dict(grad=x, input=x, scale=float32(0.1), zero_point=float32(0)) | RANGE | dict(grad_factor=0.5)
    ),
    "_fake_quantize_learnable_per_channel_affine_backward": (
        dict(grad=x, input=x) | FLOAT_CHANNELS | RANGE | dict(grad_factor=0.5)
    ),
    "_fused_moving_avg_obs_fq_helper": FUSED,
}


def copies(arguments):
    """Returns the arguments with tensors copied, because operators change some of them in place."""
    return [a.clone() if isinstance(a, torch.Tensor) and not a.requires_grad else a for a in arguments.values()]
