"""Quantizers on a stand-in for a GPU have the CPU's results, launch few kernels and read nothing back."""

import pytest

import fakequant as fq
import gpu_stand_in  # first: it skips without Triton
from fakequant import nn, presets
from fakequant.observers import MinMax, MovingAverage
from fakequant.testing.assertions import assert_same_bits
from torch_bridge import to_numpy, torch

pytestmark = pytest.mark.filterwarnings("ignore:.*values that are NaN or infinite:RuntimeWarning")
ROWS, IMAGES = (64, 304), (4, 6, 8, 8)
PER_ROW, PER_CHANNEL = fq.QuantSpec(axis=0), fq.QuantSpec(axis=1)
# The quantizer, the shape of the data, and the kernels of a forward pass in training.
QUANTIZERS = {
    "per tensor": (lambda: nn.FakeQuantize(presets.uint8()), ROWS, ["range_kernel", "observe_tensor_kernel"]),
    "per tensor, small": (lambda: nn.FakeQuantize(presets.uint8(), MinMax()), (9, 7), ["observe_rows_kernel"]),
    "weights": (lambda: nn.FakeQuantize(PER_ROW, shape=(64, None)), ROWS, ["observe_rows_kernel"]),
    "weights, odd rows": (
        lambda: nn.FakeQuantize(PER_ROW, shape=(64, None)),
        (64, 27),
        ["range_kernel", "fake_quantize_kernel"],
    ),
    "per channel": (
        lambda: nn.FakeQuantize(PER_CHANNEL, MovingAverage(), shape=(None, 6, None, None)),
        IMAGES,
        ["range_kernel", "fake_quantize_kernel"],
    ),
    "per token": (lambda: nn.FakeQuantize(fq.QuantSpec().per_token()), ROWS, ["observe_rows_kernel"]),
    "MXFP4": (lambda: nn.FakeQuantize(presets.mxfp4()), (64, 320), ["observe_rows_kernel"]),
    "NVFP4": (lambda: nn.FakeQuantize(presets.nvfp4()), (64, 320), ["range_kernel", "observe_rows_kernel"]),
    "q4_0": (lambda: nn.FakeQuantize(presets.q4_0()), (64, 320), ["observe_rows_kernel"]),
}  # fmt: skip


def step(quantizer, x):
    """Returns the result and the gradient of one step of training."""
    x = x.clone().requires_grad_()
    y = quantizer(x)
    return y, torch.autograd.grad(y, x, torch.full_like(y, 0.5))[0]


def assert_equal(expected, actual, name):
    assert_same_bits(to_numpy(expected.detach()), to_numpy(actual.detach()), name)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_step_launches_two_kernels_and_one_backward_and_reads_nothing(name):
    make, shape, expected = QUANTIZERS[name]
    here, there = make(), make()
    for seed in range(2):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        x[0, 0] = torch.inf
        y, dx = step(here, x)
        leaf = x.clone().requires_grad_()
        dy = torch.full_like(x, 0.5)
        with gpu_stand_in.gpu() as device:
            same = there(leaf)
            forward = [*device.launches]
            device.launches.clear()
            same_dx = torch.autograd.grad(same, leaf, dy)[0]
        assert forward == expected
        assert len(forward) <= 2
        assert device.launches == ([] if there._following == "pass" else ["mask_backward_kernel"])
        assert device.reads == []
        assert_equal(y, same, name)
        assert_equal(dx, same_dx, name)
        for key, value in here.state_dict().items():
            assert_equal(value, there.state_dict()[key], key)


def test_evaluation_launches_one_kernel_and_reads_nothing():
    quantizer = nn.FakeQuantize(presets.uint8())
    x = torch.linspace(-1, 3, 999)
    quantizer(x)
    expected = quantizer.eval()(x)
    with gpu_stand_in.gpu() as device:
        actual = quantizer(x)
    assert (device.launches, device.reads) == (["fake_quantize_kernel"], [])
    assert_equal(expected, actual, "y")


def test_learned_scales_read_nothing_and_sum_on_the_device():
    here, there = (nn.LearnedFakeQuantize(fq.QuantSpec(bits=4)) for _ in range(2))
    x = torch.linspace(-3, 3, 10_001)
    for quantizer in (here, there):
        quantizer.initialize(x)
    y, dx = step(here, x)
    leaf = x.clone().requires_grad_()
    with gpu_stand_in.gpu() as device:
        same = there(leaf)
        same_dx = torch.autograd.grad(same, leaf, torch.full_like(x, 0.5))[0]
    assert device.reads == []
    assert [k for k in device.launches if k.endswith("kernel")] == [
        "fake_quantize_kernel",
        "learned_kernel",
        "sum_kernel",
    ]
    assert_equal(y, same, "y")
    assert_equal(dx, same_dx, "dx")


def test_the_stand_in_sees_what_would_wait_for_a_gpu():
    with gpu_stand_in.gpu() as device:
        x = torch.ones(3)
        assert x.sum().item() == 3
        x.add_(1).view(3).float()
    assert device.reads == ["_local_scalar_dense"]
    assert device.launches == ["ones", "sum", "add"]


def test_codes_and_functions_run_kernels():
    x, spec = torch.linspace(-3, 3, 128), fq.QuantSpec(bits=4)
    expected = fq.quantize(x, 0.4, 0, spec, packed=True)
    with gpu_stand_in.gpu() as device:
        q = fq.quantize(x, torch.tensor(0.4), 0, spec, packed=True)
        y = fq.dequantize(q, torch.tensor(0.4), 0, spec, shape=(128,))
        fq.min_max(x)
    assert device.reads == []
    assert [k for k in device.launches if k.endswith("kernel")] == [
        "quantize_kernel",
        "dequantize_kernel",
        "range_kernel",
    ]
    assert_equal(expected, q, "codes")
    assert_equal(fq.fake_quantize(x, 0.4, 0, spec), y, "values")
