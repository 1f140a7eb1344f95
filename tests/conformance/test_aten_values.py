"""Every function with a torch name returns torch's bits: values, masks and gradients.

Each test runs on every instruction set of this machine, with one and with two threads. Torch's results do not
depend on them and are computed once.
"""

import functools

import numpy as np
import pytest

import fakequant
from fakequant import reference, torch_ops
from fakequant.testing import cases
from fakequant.testing.assertions import assert_same_bits
from torch_bridge import ALL_SCALES, aten, each_dtype, to_numpy, to_torch, torch

pytestmark = pytest.mark.usefixtures("machine")
F32, F64, BF16, F16 = cases.DTYPES.values()
INT32 = (-(2**31), 2**31 - 1)
# Around vector widths and their tails, blocks of work, and the size at which threads are used.
LENGTHS = [*range(71), *(n + d for n in (4096, 32768, 65536) for d in (-1, 0, 1, 63))]


def assert_same(expected, actual, *what):
    """Compares torch's tensors with our arrays, single ones or tuples of them."""
    if isinstance(actual, np.ndarray):
        expected, actual = (expected,), (actual,)
    for i, (e, a) in enumerate(zip(expected, actual, strict=True)):
        try:
            assert_same_bits(to_numpy(e), a, f"result {i}")
        except AssertionError as error:
            raise AssertionError(f"{error} for {what}") from None


def one(value, dtype=np.float32):
    with np.errstate(all="ignore"):
        return np.array([value]).astype(dtype)


def zero_points(qmin, qmax):
    """Returns both ends, the middle, and values next to zero, clamped to the range."""
    return sorted({qmin, qmax, (qmin + qmax) // 2, *(min(max(z, qmin), qmax) for z in (0, 3))})


def grids():
    """Yields every scale on a few ranges and a few scales on every range."""
    for qmin, qmax in (cases.INT8, cases.UINT8, (5, 5), INT32):
        for scale in ALL_SCALES:
            yield from ((scale, z, qmin, qmax) for z in zero_points(qmin, qmax))
    for i, (qmin, qmax) in enumerate([*cases.ranges(), *cases.INT64_RANGES]):
        for scale in (0.1, cases.SCALES[i % len(cases.SCALES)]):
            yield from ((scale, z, qmin, qmax) for z in zero_points(qmin, qmax))


GRIDS = list(grids())


def mixed(size, dtype, seed=0):
    """Returns `size` adversarial values for the scales 0.1 and 1/3 and the range int8."""
    pool = np.concatenate([cases.values(s, z, *cases.INT8, dtype) for s in (0.1, 1 / 3) for z in (0, 3)])
    return np.random.default_rng(seed).choice(pool, size)


# --- forward and mask -------------------------------------------------------------------


@functools.cache
def torch_per_tensor(dtype):
    def run(grid):
        x = cases.values(*grid, dtype)
        scale, *integers = grid
        return grid, x, aten.fake_quantize_per_tensor_affine_cachemask(to_torch(x), float(scale), *integers)

    return [run(grid) for grid in GRIDS]


@each_dtype
def test_per_tensor_functions_equal_torch_on_every_scale_and_range(dtype):
    for grid, x, expected in torch_per_tensor(dtype):
        assert_same(expected, torch_ops.fake_quantize_per_tensor_affine_cachemask(x, *grid), grid)
        assert_same(expected[0], torch_ops.fake_quantize_per_tensor_affine(x, *grid), grid)


@each_dtype
def test_per_tensor_functions_accept_any_zero_point_as_an_array(dtype):
    op = torch._fake_quantize_per_tensor_affine_cachemask_tensor_qparams
    for z in (-(2**31), -500, -1, 300, 2**24 + 1, 2**31 - 1):
        for scale in (0.1, -0.1, 0.0, np.inf, np.nan, 1e-45):
            for qmin, qmax in (cases.INT8, cases.UINT8, (5, 5)):
                x = cases.values(scale, 0, qmin, qmax, dtype)
                arrays = x, one(scale), one(z, np.int64), one((z + qmin) % 2, np.int64)
                actual = torch_ops.fake_quantize_per_tensor_affine_cachemask_tensor_qparams(*arrays, qmin, qmax)
                assert_same(op(*map(to_torch, arrays), qmin, qmax), actual, scale, z, qmin, qmax)


@pytest.mark.parametrize("kind", ["float64", "float16", "int32", "uint8", "bool", "bfloat16"])
def test_per_tensor_functions_accept_parameter_arrays_of_any_dtype_and_shape(kind):
    x = mixed(300, F32)
    kind = cases.DTYPES.get(kind, np.dtype(kind))
    for s, z in ((1, 0), (1, 1), (0.7, 1.9)):
        scale, zero_point = one(s, kind), one(z, kind).reshape(1, 1)
        expected = torch.fake_quantize_per_tensor_affine(to_torch(x), to_torch(scale), to_torch(zero_point), -8, 7)
        assert_same(expected, torch_ops.fake_quantize_per_tensor_affine(x, scale, zero_point, -8, 7), s, z)
        # One number and one 0-d array fit either of the two signatures.
        expected = torch.fake_quantize_per_tensor_affine(to_torch(x), to_torch(scale[0]), 1, -8, 7)
        assert_same(expected, torch_ops.fake_quantize_per_tensor_affine(x, scale[0:1].reshape(()), 1, -8, 7), s)


@functools.cache
def torch_per_channel(dtype, zero_dtype):
    def run(i, grid):
        scale, z, qmin, qmax = grid
        x = cases.values(*grid, dtype)[None]
        fraction = 0 if zero_dtype == np.int32 else (0, 0.25, 0.5, -0.3)[i % 4]
        arguments = x, one(scale), one(z + fraction, zero_dtype)
        return (
            arguments,
            (0, qmin, qmax),
            aten.fake_quantize_per_channel_affine_cachemask(*map(to_torch, arguments), 0, qmin, qmax),
        )

    fits = [g for g in GRIDS if INT32[0] <= g[1] <= INT32[1]] if zero_dtype == np.int32 else GRIDS[::2]
    return [run(i, grid) for i, grid in enumerate(fits)]


@pytest.mark.parametrize("zero_dtype", [np.int32, np.float32, np.float16])
@each_dtype
def test_per_channel_functions_equal_torch_on_every_scale_and_range(dtype, zero_dtype):
    for arrays, integers, expected in torch_per_channel(dtype, zero_dtype):
        actual = torch_ops.fake_quantize_per_channel_affine_cachemask(*arrays, *integers)
        assert_same(expected, actual, *arrays[1:], *integers)


@each_dtype
def test_per_channel_functions_equal_torch_with_special_float_zero_points(dtype):
    z = np.float32([np.nan, np.inf, -np.inf, 1e30, -1e30, 1e-45, -0.0, 0.49999997, 2**31])
    for scale in (0.1, np.nan, np.inf, 0.0, -1e-45):
        x = np.stack([cases.values(scale, 0, -8, 7, dtype)] * len(z))
        for zero_dtype in (np.float32, np.float16):
            arrays = x, np.full(len(z), scale, np.float32), z.astype(zero_dtype)
            expected = aten.fake_quantize_per_channel_affine_cachemask(*map(to_torch, arrays), 0, -8, 7)
            assert_same(expected, torch_ops.fake_quantize_per_channel_affine_cachemask(*arrays, 0, -8, 7))


@pytest.mark.parametrize("zero_dtype", [np.int32, np.float32, np.float16])
@each_dtype
def test_per_channel_functions_equal_torch_on_every_axis_and_block_size(dtype, zero_dtype):
    rng = np.random.default_rng(1)
    shapes = [(6, 5, 12), (3, 70, 1), (40, 1, 3), (7, 33), (1, 1), (2, 3, 2, 5, 2), (0, 3), (64,), (5, 4099)]
    for shape in shapes:
        x = mixed(shape, dtype)
        for axis, count in enumerate(shape):
            z = rng.integers(-8, 8, count).astype(zero_dtype)
            if zero_dtype != np.int32:
                z += rng.choice([0, 0.5, 0.3], count).astype(zero_dtype)
            elif count == 0:
                continue
            arrays = x, rng.choice(np.float32([0.1, 1 / 3, 0.02, -0.5, 7.0, 0, np.nan]), count), z
            expected = aten.fake_quantize_per_channel_affine_cachemask(*map(to_torch, arrays), axis, -8, 7)
            actual = torch_ops.fake_quantize_per_channel_affine_cachemask(*arrays, axis, -8, 7)
            assert_same(expected, actual, shape, axis)
            assert_same(expected[0], torch_ops.fake_quantize_per_channel_affine(*arrays, axis, -8, 7))


@each_dtype
def test_forward_and_backward_equal_torch_on_arrays_of_all_lengths(dtype):
    everything = mixed(max(LENGTHS), dtype)
    gradients = cases.gradients(max(LENGTHS), dtype)
    for n in LENGTHS:
        x, dy = everything[:n], gradients[:n]
        y, mask = expected = aten.fake_quantize_per_tensor_affine_cachemask(to_torch(x), 0.1, 3, *cases.INT8)
        assert_same(expected, torch_ops.fake_quantize_per_tensor_affine_cachemask(x, 0.1, 3, *cases.INT8), n)
        assert_same(y, torch_ops.fake_quantize_per_tensor_affine(x, 0.1, 3, *cases.INT8), n)
        expected = aten.fake_quantize_per_tensor_affine_cachemask_backward(to_torch(dy), mask)
        assert_same(expected, torch_ops.fake_quantize_per_tensor_affine_cachemask_backward(dy, mask.numpy()), n)
        arrays = x[None], one(1 / 3), one(0, np.int32)
        expected = aten.fake_quantize_per_channel_affine_cachemask(*map(to_torch, arrays), 0, *cases.INT8)
        actual = torch_ops.fake_quantize_per_channel_affine_cachemask(*arrays, 0, *cases.INT8)
        assert_same(expected, actual, n)
        assert_same(
            aten.fake_quantize_per_channel_affine_cachemask_backward(to_torch(dy[None]), expected[1]),
            torch_ops.fake_quantize_per_channel_affine_cachemask_backward(dy[None], actual.mask),
        )


@each_dtype
def test_per_tensor_functions_equal_torch_on_0d_arrays(dtype):
    for x in mixed(200, dtype):
        x = np.array(x)
        expected = aten.fake_quantize_per_tensor_affine_cachemask(to_torch(x), 0.1, 3, *cases.INT8)
        assert_same(expected, torch_ops.fake_quantize_per_tensor_affine_cachemask(x, 0.1, 3, *cases.INT8), x)
        mask = expected[1]
        expected = aten.fake_quantize_per_tensor_affine_cachemask_backward(to_torch(x), mask)
        assert_same(expected, torch_ops.fake_quantize_per_tensor_affine_cachemask_backward(x, mask.numpy()), x)


# --- learned parameters -----------------------------------------------------------------


def learned_zero_points(qmin, qmax):
    """Returns zero points that stay in the range when torch clamps them in float32."""
    candidates = [float(qmin), (qmin + qmax) / 2, 0.0, 0.5, 1.5, -2.5, -0.7, -57.0, 3.3, float(qmax), 1e9, -1e9]
    ends = np.float32(qmin), np.float32(qmax)
    return [z for z in candidates if qmin <= int(np.clip(np.float32(z), *ends)) <= qmax]


LEARNED_RANGES = [*(r for r in cases.ranges() if r[0] <= 0 <= r[1]), (-(2**53) - 1, 2**53 + 1)]
LEARNED = [
    (scale, z, qmin, qmax)
    for i, (qmin, qmax) in enumerate(LEARNED_RANGES)
    for scale in ((0.1, 1 / 3, 0.7)[i % 3], (-0.5, 0.0, np.nan, np.inf, 1e-45, 1e30, 0.02)[i % 7])
    for z in learned_zero_points(qmin, qmax)[i % 2 :: 2]
]


@functools.cache
def torch_learned_forward(dtype):
    def run(scale, z, qmin, qmax):
        x = cases.values(scale, max(qmin, -3), qmin, qmax, dtype)[None]
        arrays = x, one(scale), one(z)
        tensors = [to_torch(a) for a in arrays]
        per_tensor = torch._fake_quantize_learnable_per_tensor_affine(*tensors, qmin, qmax)
        per_channel = None
        if max(-qmin, qmax) < 2**31 and qmin <= np.clip(np.float32(z), np.float32(qmin), np.float32(qmax)) <= qmax:
            per_channel = torch._fake_quantize_learnable_per_channel_affine(*tensors, 0, qmin, qmax)
        return arrays, (qmin, qmax), per_tensor, per_channel

    return [run(*grid) for grid in LEARNED]


@each_dtype
def test_learnable_forward_equals_torch(dtype):
    for arrays, bounds, per_tensor, per_channel in torch_learned_forward(dtype):
        actual = torch_ops.fake_quantize_learnable_per_tensor_affine(*arrays, *bounds)
        assert_same(per_tensor, actual, "tensor", *arrays[1:], *bounds)
        if per_channel is not None:
            actual = torch_ops.fake_quantize_learnable_per_channel_affine(*arrays, 0, *bounds)
            assert_same(per_channel, actual, "channel", *arrays[1:], *bounds)


@functools.cache
def torch_learned_backward(dtype):
    def run(i, scale, z, qmin, qmax):
        x = cases.values(scale, max(qmin, -3), qmin, qmax, dtype)[i % 3 :: 3, None]
        arrays = cases.gradients(x.size, dtype, i).reshape(x.shape), x
        tensors = [to_torch(a) for a in arrays]
        integers = qmin, qmax, (1.0, 0.037, 1e-40, -3.0)[i % 4]
        parameters = one(scale), one(z)
        per_tensor = aten._fake_quantize_learnable_per_tensor_affine_backward(
            *tensors, *map(to_torch, parameters), *integers
        )
        # One channel per element, so that the sums are the terms themselves.
        each = np.full(x.size, scale, np.float32), np.full(x.size, z, np.float32)
        per_channel = aten._fake_quantize_learnable_per_channel_affine_backward(
            *tensors, *map(to_torch, each), 0, *integers
        )
        return arrays, parameters, each, integers, per_tensor, per_channel

    return [run(i, *grid) for i, grid in enumerate(LEARNED)]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_learned_gradients_of_single_elements_equal_torch(dtype):
    for arrays, parameters, each, integers, per_tensor, per_channel in torch_learned_backward(dtype):
        actual = torch_ops.fake_quantize_learnable_per_tensor_affine_backward(*arrays, *parameters, *integers)
        assert_same(per_tensor[0], actual.dx, *parameters, *integers)
        actual = torch_ops.fake_quantize_learnable_per_channel_affine_backward(*arrays, *each, 0, *integers)
        assert_same(per_channel, actual, *parameters, *integers)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_learned_gradients_of_one_element_arrays_equal_torch(dtype):
    dys, xs = cases.gradients(60, dtype, 3), mixed(60, dtype)
    for dy, x in zip(dys, xs, strict=True):
        for z in (-3.0, 0.4):
            arrays = dy.reshape(1), x.reshape(1), one(0.1), one(z)
            tensors = [to_torch(a) for a in arrays]
            expected = aten._fake_quantize_learnable_per_tensor_affine_backward(*tensors, -8, 7, 0.3)
            actual = torch_ops.fake_quantize_learnable_per_tensor_affine_backward(*arrays, -8, 7, 0.3)
            assert_same(expected, actual, dy, x, z)
            expected = aten._fake_quantize_learnable_per_channel_affine_backward(*tensors, 0, -8, 7, 0.3)
            actual = torch_ops.fake_quantize_learnable_per_channel_affine_backward(*arrays, 0, -8, 7, 0.3)
            assert_same(expected, actual, dy, x, z)


@functools.cache
def torch_sums(axis, shape, dtype):
    rng = np.random.default_rng(5)
    x = (rng.standard_normal(shape) * 0.5).astype(dtype)
    dy = (rng.standard_normal(shape) * np.exp(rng.uniform(-8, 8, shape))).astype(dtype)
    channels = 1 if axis is None else shape[axis]
    scale, z = rng.uniform(0.01, 0.2, channels).astype(np.float32), rng.uniform(-6, 6, channels).astype(np.float32)
    arguments = dy, x, scale, z, *(() if axis is None else (axis,)), -8, 7, 0.03
    tensors = [to_torch(a) if isinstance(a, np.ndarray) else a for a in arguments]
    if axis is None:
        sums = aten._fake_quantize_learnable_per_tensor_affine_backward(*tensors)[1:]
        used, others, granularity = (scale[0], z[0]), None, "tensor"
    else:
        sums = aten._fake_quantize_learnable_per_channel_affine_backward(*tensors)[1:]
        along = [-1 if d == axis else 1 for d in range(len(shape))]
        used, granularity = (scale.reshape(along), z.reshape(along)), "channel"
        others = tuple(d for d in range(len(shape)) if d != axis)
    terms = reference.learned_backward(dy, x, *used, -8, 7, "torch", grad_factor=0.03, granularity=granularity)
    return arguments, sums, [reference.exact_sum(t, others) for t in terms[1:]]


SUMS = [(None, (n,)) for n in (2, 7, 1000, 4097, 32769, 150_001)]
SUMS += [(0, (8, 5003)), (1, (5003, 8)), (1, (3, 33, 40)), (0, (1, 70_000)), (2, (64, 3, 300))]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(("axis", "shape"), SUMS)
def test_learned_gradient_sums_are_at_least_as_exact_as_torchs_for_any_threads(axis, shape, dtype):
    arguments, torchs, exact = torch_sums(axis, shape, dtype)
    per = "per_tensor" if axis is None else "per_channel"
    backward = getattr(torch_ops, f"fake_quantize_learnable_{per}_affine_backward")
    ours = backward(*arguments)
    for name, theirs, mine, truth in zip(("dscale", "dzero_point"), torchs, ours[1:], exact, strict=True):
        error, torch_error = np.abs(mine - truth), np.abs(theirs.numpy() - truth)
        assert (mine.shape, mine.dtype) == (theirs.shape, np.float32)
        assert (error <= torch_error).all(), (name, error.max(), torch_error.max())
    for threads in (1, 2, 3, 5):
        fakequant.set_num_threads(threads)
        for first, again in zip(ours, backward(*arguments), strict=True):
            assert_same_bits(first, again, threads)


@pytest.mark.parametrize("dtype", [F16, F64], ids=str)
def test_learned_gradients_of_float16_and_float64_equal_the_reference(dtype):
    x, dy = mixed(400, dtype)[:, None], cases.gradients(400, dtype)[:, None]
    arrays = dy, x, np.full(400, 0.1, np.float32), np.full(400, 1.2, np.float32)
    actual = torch_ops.fake_quantize_learnable_per_channel_affine_backward(*arrays, 0, -8, 7, 0.3)
    dx, ds, dz = reference.learned_backward(dy, x, 0.1, 1.2, -8, 7, "torch", grad_factor=0.3, granularity="channel")
    wide = np.float64 if dtype == np.float64 else np.float32
    assert_same_bits(dx.astype(wide), actual.dx)
    for expected, sums in ((ds, actual.dscale), (dz, actual.dzero_point)):
        with np.errstate(over="ignore"):
            assert_same_bits((expected[:, 0] + expected.dtype.type(0)).astype(np.float32), sums)


def test_learned_zero_points_far_below_int32_equal_torch():
    x, dy = np.float32([3.0]), np.float32([1.0])
    scale, zero_point = np.float32([0.5]), np.float32([-1e30])
    limits = (-(2**63), 2**62)
    expected = aten._fake_quantize_learnable_per_tensor_affine_backward(
        *map(to_torch, (dy, x, scale, zero_point)), *limits, 1.0
    )
    actual = torch_ops.fake_quantize_learnable_per_tensor_affine_backward(dy, x, scale, zero_point, *limits)
    assert_same(expected, tuple(actual))
