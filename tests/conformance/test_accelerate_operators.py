"""Under `accelerate`, torch's operators keep their bits and strides, and the fused observer its state."""

import itertools
import math

import numpy as np
import pytest

import fakequant
from accelerated import OPERATORS, compare, counted_kernels, decelerated, float32, int32, int64  # noqa: F401
from fakequant.testing import cases
from torch_bridge import aten, each_dtype, to_torch, torch

pytestmark = pytest.mark.usefixtures("torch_on_one_thread")

# --- forward and backward: values and layouts ---------------------------------------------

SHAPE = (4, 6, 3, 5)
LAYOUTS = {
    "contiguous": lambda t: t,
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "permuted": lambda t: t.permute(3, 1, 0, 2),
    "expanded": lambda t: t[:, :1, :, :1].expand(SHAPE),
    "sliced": lambda t: t[:, ::2, :, 1:],
    "overlapping": lambda t: t.as_strided((4, 3, 2), (3, 1, 2)),
    "one axis": lambda t: t.flatten(),
    "0-d": lambda t: t[0, 0, 0, 0],
    "empty": lambda t: t[:, :, :0],
}
by_layout = pytest.mark.parametrize("layout", LAYOUTS)


def elements(layout, dtype):
    pool = np.concatenate([cases.values(s, z, *cases.INT8, dtype) for s in (0.1, 1 / 3) for z in (0, 3)])
    return LAYOUTS[layout](to_torch(np.random.default_rng(0).choice(pool, SHAPE)))


def gradients_of(x, dtype):
    """Returns gradients in the memory order of x, with reversed axes, and expanded as from `sum`."""
    dy = to_torch(cases.gradients(x.numel(), dtype).reshape(x.shape))
    axes = list(reversed(range(x.dim())))
    return (
        torch.empty_like(x).copy_(dy),
        dy.permute(axes).contiguous().permute(axes),
        dy.new_tensor(-0.5).expand(x.shape),
    )


def zero_points(count):
    spread = torch.linspace(-8, 7, count)
    return spread.int(), spread, spread.half()


def forwards(shape):
    """Yields the public functions with their arguments."""
    yield torch.fake_quantize_per_tensor_affine, (0.1, 3, *cases.INT8)
    yield torch.fake_quantize_per_tensor_affine, (float32(0.1), int32(300), *cases.UINT8)
    for axis, size in enumerate(shape):
        for zeros in zero_points(size) if size else ():
            yield torch.fake_quantize_per_channel_affine, (torch.linspace(0.01, 1, size), zeros, axis, -8, 7)


def output_and_gradient(forward, x, arguments, dy):
    x = x.detach().requires_grad_()
    y = forward(x, *arguments)
    return y, *torch.autograd.grad(y, x, dy)


@each_dtype
@by_layout
def test_accelerated_public_functions_keep_bits_and_strides_in_every_layout(layout, dtype):
    x = elements(layout, dtype)
    for forward, arguments in forwards(x.shape):
        for dy in gradients_of(x, dtype):
            compare(output_and_gradient, forward, x, arguments, dy)


@each_dtype
@by_layout
def test_accelerated_aten_operators_keep_bits_and_strides_in_every_layout(layout, dtype):
    x = elements(layout, dtype)
    one = float32(1 / 3), int32(-5)
    compare(aten.fake_quantize_per_tensor_affine_cachemask, x, 0.1, 3, *cases.INT8)
    for on in (int64(1), int64(0)):
        compare(aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams, x, *one, on, *cases.INT8)
    for axis, size in enumerate(x.shape):
        for zeros in zero_points(2 * size) if size else ():
            scale = torch.linspace(0.01, 1, 2 * size)
            # Scales and zero points may have gaps as well.
            compare(aten.fake_quantize_per_channel_affine_cachemask, x, scale[::2], zeros[::2], axis, -8, 7)
    for dy, mask in itertools.product(gradients_of(x, dtype), (x > 0, torch.ones(x.shape) > 0)):
        compare(lambda *a: [aten.fake_quantize_per_tensor_affine_cachemask_backward(*a)], dy, mask)
        compare(lambda *a: [aten.fake_quantize_per_channel_affine_cachemask_backward(*a)], dy, mask)


def test_accelerated_gradients_keep_strides_of_axes_of_length_1():
    x = torch.linspace(-1, 1, 14).as_strided((2, 7, 1, 1), (7, 1, 7, 7))
    compare(output_and_gradient, torch.fake_quantize_per_tensor_affine, x, (0.1, 0, -8, 7), torch.ones_like(x))


@each_dtype
def test_accelerated_functions_keep_bits_on_every_scale_and_many_ranges(dtype):
    scales = cases.SCALES + cases.EXTREME_SCALES + cases.BROKEN_SCALES
    ranges = cases.INT8, cases.UINT8, (5, 5), (-(2**31), 2**31 - 1), *cases.INT64_RANGES[:4]
    for i, (scale, (qmin, qmax)) in enumerate(itertools.product(scales, ranges)):
        z = (qmin, qmax, (qmin + qmax) // 2)[i % 3]
        x = to_torch(cases.values(scale, z, qmin, qmax, dtype))
        s, dy = float32(scale), to_torch(cases.gradients(x.numel(), dtype))
        compare(output_and_gradient, torch.fake_quantize_per_tensor_affine, x, (float(scale), z, qmin, qmax), dy)
        if -(2**31) <= z < 2**31:
            parameters = (s, int32(z), qmin, qmax)
            compare(output_and_gradient, torch.fake_quantize_per_tensor_affine, x, parameters, dy)
            parameters = (s, int32(z), 0, qmin, qmax)
            compare(output_and_gradient, torch.fake_quantize_per_channel_affine, x[None], parameters, dy[None])
        for zeros in (float32(z + 0.25), float32(z + 0.3).half()):
            parameters = (s, zeros, 0, qmin, qmax)
            compare(output_and_gradient, torch.fake_quantize_per_channel_affine, x[None], parameters, dy[None])


# --- learned scale and zero point ---------------------------------------------------------

ZEROS = (0.0, 2.3, -1.5, 0.49999997, -57.0, 99.5, -200.0)


def learned_per_tensor(dy, x, scale, zero_point, bounds, factor=0.3):
    return aten._fake_quantize_learnable_per_tensor_affine_backward(dy, x, scale, zero_point, *bounds, factor)


def learned_per_channel(dy, x, scale, zero_point, axis, bounds, factor=0.3):
    return aten._fake_quantize_learnable_per_channel_affine_backward(dy, x, scale, zero_point, axis, *bounds, factor)


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@by_layout
def test_accelerated_learned_backward_keeps_the_bits_of_the_input_gradient(layout, name):
    x = elements(layout, cases.DTYPES[name])
    for dy in gradients_of(x.float(), cases.DTYPES["float32"]):
        compare(lambda *a: learned_per_tensor(*a)[:1], dy, x, float32(0.1), float32(2.3), (-8, 7))
        for axis in (a for a, size in enumerate(x.shape) if size):
            parameters = torch.linspace(0.01, 1, x.shape[axis]), torch.linspace(-9, 9, x.shape[axis])
            compare(lambda *a: learned_per_channel(*a)[:1], dy, x, *parameters, axis, (-8, 7))


@pytest.mark.parametrize("scale", [0.1, 1 / 3, 12345.678, 1e-40, 0.0, -0.1, np.inf, np.nan])
@pytest.mark.parametrize("bounds", [cases.INT8, cases.UINT8, (-8, 7), (0, 0)], ids=str)
def test_accelerated_learned_gradients_of_single_elements_keep_their_bits(bounds, scale):
    """There is one channel per element, so that nothing is summed."""
    for z in ZEROS:
        x = to_torch(cases.values(scale, 0, *bounds, cases.DTYPES["float32"]))[None]
        dy = to_torch(cases.gradients(x.numel(), cases.DTYPES["float32"]))[None]
        compare(learned_per_channel, dy, x, *(float32(v).expand(x.shape[1]) for v in (scale, z)), 1, bounds)
        for one in range(0, x.numel(), 41):
            at = slice(one, one + 1)
            compare(learned_per_tensor, dy[:, at], x[:, at], float32(scale), float32(z), bounds)


def test_accelerated_learned_gradient_sums_are_at_least_as_exact_as_torchs():
    rng = np.random.default_rng(0)
    closer = 0
    for trial in range(20):
        x, dy = (torch.from_numpy(rng.standard_normal((400, 1)).astype(np.float32)) for _ in range(2))
        scale, zero_point = float32(rng.uniform(0.05, 0.3)), float32(ZEROS[trial % len(ZEROS)])
        function, where = (learned_per_tensor, ()) if trial % 2 else (learned_per_channel, (1,))
        torchs = function(dy, x, scale, zero_point, *where, (-8, 7))
        terms = [function(dy[i : i + 1], x[i : i + 1], scale, zero_point, *where, (-8, 7)) for i in range(x.numel())]
        with fakequant.accelerate():
            ours = function(dy, x, scale, zero_point, *where, (-8, 7))
        for gradient in (1, 2):
            exact = math.fsum(term[gradient].item() for term in terms)
            error, torchs_error = (abs(r[gradient].item() - exact) for r in (ours, torchs))
            assert error <= torchs_error
            closer += error < torchs_error
            assert ours[gradient].shape == torchs[gradient].shape
            assert ours[gradient].dtype == torchs[gradient].dtype
    assert closer, "every sum equals torch's: did our kernels run?"


def learned_output_and_gradients(function, x, scale, zero_point, dy, *arguments):
    leaves = [t.detach().requires_grad_() for t in (x, scale, zero_point)]
    y = function(*leaves, *arguments)
    return y, *torch.autograd.grad(y, leaves, dy)


FACTORS = [pytest.param(factor, id=f"factor {factor}") for factor in (0.3, 0.0)] + [
    pytest.param(1.0, id="default factor")
]


@pytest.mark.parametrize("factor", FACTORS)
def test_accelerated_learnable_functions_keep_bits_of_single_elements(factor):
    pool = torch.linspace(-3, 3, 61)
    for i, z in itertools.product(range(0, 61, 4), ZEROS):
        x, dy = pool[i : i + 1].reshape(1, 1), float32(-0.7).reshape(1, 1)
        arguments = x, float32(0.1), float32(z), dy
        per_tensor = torch._fake_quantize_learnable_per_tensor_affine
        compare(learned_output_and_gradients, per_tensor, *arguments, *cases.INT8, factor)
        per_channel = torch._fake_quantize_learnable_per_channel_affine
        compare(learned_output_and_gradients, per_channel, *arguments, 0, *cases.INT8, factor)


# --- fused observer -----------------------------------------------------------------------


def fresh_state(rows):
    infinite = torch.full((rows,), torch.inf)
    return [infinite, -infinite, torch.ones(rows), torch.zeros(rows, dtype=torch.int32)]


def seen_state(rows):
    return [torch.linspace(-1, -3, rows), torch.linspace(1, 5, rows), torch.ones(rows), int32(*[0] * rows)]


def fused_steps(inputs, switches, state, per_row, symmetric, bounds):
    """Returns outputs, masks, gradients, error messages, and the state after each of two calls per step."""
    state, results = [t.clone() for t in state], []
    for step, (x, flags) in enumerate(zip(inputs, switches, strict=True)):
        flags = [int64(on) for on in flags]
        options = (0.01, 0.5, 1.0)[step % 3], *bounds, 0 if per_row else -1, per_row, symmetric
        try:
            results += torch._fused_moving_avg_obs_fq_helper(x, *flags, *state, *options)
            results += [t.clone() for t in state]
            leaf = x.detach().requires_grad_()
            y = torch.fused_moving_avg_obs_fake_quant(leaf, *flags, *state, *options)
            results += [y, *torch.autograd.grad(y, leaf, torch.ones_like(y))]
        except RuntimeError as refused:
            results.append(torch.tensor(list(str(refused).encode())))
        results += [t.clone() for t in state]
    return results


def observed_inputs():
    rng = np.random.default_rng(5)
    for step in range(9):
        x = torch.from_numpy(rng.standard_normal((4, 6, 2, 3)) * 10.0 ** rng.integers(-6, 3, (4, 1, 1, 1)))
        x = (x.abs() if step == 2 else x).float()
        x[step % 4, step % 5] = (0.0, -0.0, 1e-45, 3e38, 0.5, 1.0, 0.0, torch.inf, torch.nan)[step]
        yield (x, x.contiguous(memory_format=torch.channels_last), x.transpose(1, 3), x[:, ::2])[step % 4]


ALL_SWITCHES = [(1, 1), (1, 1), (1, 0), (0, 1), (0, 0), (1, 1), (0, 1), (1, 1), (1, 1)]


@pytest.mark.parametrize("symmetric", [False, True], ids=["affine", "symmetric"])
@pytest.mark.parametrize("start", ["per tensor", "per tensor, 0-d", "per row", "per row, empty"])
def test_the_accelerated_fused_observer_keeps_the_bits_of_every_step(start, symmetric):
    rows = {"per row": 4, "per row, empty": 0}.get(start, 1)
    state = fresh_state(rows)
    if start == "per tensor, 0-d":
        state[:2] = [running.reshape(()) for running in state[:2]]  # the shape torch.ao uses
    for bounds in (cases.INT8, cases.UINT8, (0, 127), (-8, 7), (-(2**31), 2**31 - 1)):
        compare(fused_steps, list(observed_inputs()), ALL_SWITCHES, state, rows != 1, symmetric, bounds)


@pytest.mark.parametrize("per_row", [False, True], ids=["per_tensor", "per_row"])
def test_the_accelerated_fused_observer_keeps_the_sign_of_the_first_zero(per_row):
    """Which zero gives the sign depends on how torch searches for the smallest value."""
    rng = np.random.default_rng(9)
    for size in (*range(1, 40), 255, 1000):
        x = rng.uniform(1, 2, (2, size)).astype(np.float32) * rng.choice(np.float32([1, -1]))
        x[:, rng.integers(size)] = -0.0
        x[rng.random((2, size)) < rng.choice([0.03, 0.9])] = 0.0
        compare(
            fused_steps, [torch.from_numpy(x)], [(1, 0)], fresh_state(2 if per_row else 1), per_row, False, (0, 255)
        )


@each_dtype
@pytest.mark.parametrize("per_row", [False, True], ids=["per_tensor", "per_row"])
def test_the_accelerated_fused_observer_keeps_bits_of_every_dtype_when_off(per_row, dtype):
    x = elements("contiguous", dtype)
    inputs = [x, x.transpose(1, 3), x[:, ::2], torch.nan_to_num(x) / 8]
    state = seen_state(4 if per_row else 1)
    compare(fused_steps, inputs, [(0, 1), (0, 1), (0, 0), (0, 1)], state, per_row, False, cases.INT8)


@each_dtype
def test_accelerated_operators_run_our_kernels_for_every_dtype(dtype):
    x = elements("channels last", dtype)
    with counted_kernels() as calls, fakequant.accelerate():
        for forward, arguments in forwards(x.shape):
            output_and_gradient(forward, x, arguments, torch.ones_like(x))
        fused_steps([x], [(0, 1)], seen_state(4), True, False, cases.INT8)
    assert all(ours for _, ours in calls)
    assert {name for name, _ in calls} == {name for name in OPERATORS if "learnable" not in name}
