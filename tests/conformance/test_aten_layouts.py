"""Results on arrays have torch's values for inputs of any strides, in C order.

On tensors they have torch's strides too: see `test_tensor_layouts_named.py`.
"""

import itertools

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from fakequant import torch_ops
from fakequant.testing import cases
from fakequant.testing.assertions import assert_same_bits
from torch_bridge import BF16, aten, each_dtype, same_memory, to_numpy, torch

pytestmark = pytest.mark.usefixtures("machine")


def assert_same(expected, actual, x):
    """Compares torch's tensors with our arrays, single ones or tuples of them."""
    if isinstance(actual, np.ndarray):
        expected, actual = (expected,), (actual,)
    for e, a in zip(expected, actual, strict=True):
        assert_same_bits(to_numpy(e), a)
        assert a.flags.c_contiguous, (x.shape, x.strides)


def elements(*shape, dtype=np.float32):
    pool = cases.values(0.1, 3, *cases.INT8, np.dtype(dtype))
    return np.random.default_rng(sum(shape)).choice(pool, shape)


def expand(x, shape):
    """Like `np.broadcast_to`, but writable, because torch warns about read-only arrays."""
    return as_strided(x, shape, [0 if m != n else s for m, n, s in zip(x.shape, shape, x.strides, strict=True)])


def random_layouts(count, dtype):
    """Yields permuted, sliced, broadcast and reshaped views with many axes of length 1."""
    rng = np.random.default_rng(3)
    for _ in range(count):
        ndim = int(rng.integers(1, 6))
        x = elements(*rng.choice([1, 1, 2, 3, 4], ndim).tolist(), dtype=dtype)
        x = x.transpose(rng.permutation(ndim))
        kinds = rng.choice(4, ndim, p=[0.6, 0.2, 0.1, 0.1])
        x = x[tuple((slice(None), slice(None, None, 2), slice(1, None), slice(0, 1))[k] for k in kinds)]
        if rng.random() < 0.4:
            x = expand(x, [n if n != 1 else int(rng.choice([1, 3])) for n in x.shape])
        if rng.random() < 0.2:
            x = np.expand_dims(x, int(rng.integers(x.ndim + 1)))
        if x.size:
            yield x.transpose(rng.permutation(x.ndim))


def named_layouts(dtype):
    image = elements(2, 3, 4, 5, dtype=dtype)
    yield image
    yield np.asfortranarray(image)
    yield from (image.transpose(order) for order in itertools.permutations(range(4)))
    yield np.ascontiguousarray(image.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)  # channels last
    yield elements(2, 4, 5, 6, 3, dtype=dtype).transpose(0, 4, 1, 2, 3)
    yield elements(2, 1, 1, 7, dtype=dtype).transpose(0, 3, 1, 2)  # both channels last and contiguous
    yield elements(2, 4, 5, 1, dtype=dtype).transpose(0, 3, 1, 2)
    yield image[:, :, ::2, 1:-1]
    yield image[..., ::2].transpose(3, 1, 0, 2)
    yield expand(elements(1, 3, 1, 5, dtype=dtype), (2, 3, 4, 5))
    yield expand(elements(1, 1, dtype=dtype), (4, 5))
    yield elements(4, 1, dtype=dtype).T
    yield elements(6, dtype=dtype)[::2]
    yield elements(6, dtype=dtype)[2:3]
    yield elements(1, 1, 1, dtype=dtype)
    for shape, steps in (((3, 1, 4), (4, 7, 1)), ((3, 4), (1, 1)), ((2, 3, 1, 5), (15, 1, 99, 3))):
        yield as_strided(elements(200, dtype=dtype), shape, [step * image.itemsize for step in steps])
    yield elements(200, 300, dtype=dtype).T  # large enough for several threads
    yield elements(400, 300, dtype=dtype)[::2, ::3]


def all_layouts(dtype):
    return [*named_layouts(dtype), *random_layouts(90, dtype)]


@each_dtype
def test_per_tensor_functions_have_torchs_values_in_every_layout(dtype):
    on, off = np.int64([1]), np.int64([0])
    for x in all_layouts(dtype):
        expected = aten.fake_quantize_per_tensor_affine_cachemask(same_memory(x), 0.1, 3, *cases.INT8)
        assert_same(expected, torch_ops.fake_quantize_per_tensor_affine_cachemask(x, 0.1, 3, *cases.INT8), x)
        assert_same(expected[0], torch_ops.fake_quantize_per_tensor_affine(x, 0.1, 3, *cases.INT8), x)
        for switch in (on, off):
            arrays = x, np.float32([0.1]), np.int32([3]), switch
            expected = torch._fake_quantize_per_tensor_affine_cachemask_tensor_qparams(
                *map(same_memory, arrays), *cases.INT8
            )
            actual = torch_ops.fake_quantize_per_tensor_affine_cachemask_tensor_qparams(*arrays, *cases.INT8)
            assert_same(expected, actual, x)


@each_dtype
def test_per_channel_functions_have_torchs_values_in_every_layout_and_axis(dtype):
    rng = np.random.default_rng(1)
    for x in all_layouts(dtype):
        for axis, count in enumerate(x.shape):
            z = rng.integers(-8, 8, 2 * count)
            # Scales and zero points may have gaps as well.
            arrays = x, rng.uniform(0.01, 1, 2 * count).astype(np.float32)[::2], z.astype(np.int32)[::2]
            expected = aten.fake_quantize_per_channel_affine_cachemask(*map(same_memory, arrays), axis, -8, 7)
            actual = torch_ops.fake_quantize_per_channel_affine_cachemask(*arrays, axis, -8, 7)
            assert_same(expected, actual, x)


@each_dtype
def test_backward_functions_have_torchs_values_in_every_layout(dtype):
    rng = np.random.default_rng(2)
    for dy in all_layouts(dtype):
        mask = rng.random(dy.shape) < 0.5
        like_dy = as_strided(rng.random(200_000) < 0.5, dy.shape, [s // dy.itemsize for s in dy.strides])
        masks = [mask, np.asfortranarray(mask), like_dy, expand(mask[(slice(0, 1),) * mask.ndim], mask.shape)]
        if mask.ndim == 4:
            masks.append(np.ascontiguousarray(mask.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2))
        for mask in masks:
            expected = aten.fake_quantize_per_tensor_affine_cachemask_backward(same_memory(dy), same_memory(mask))
            assert_same(expected, torch_ops.fake_quantize_per_tensor_affine_cachemask_backward(dy, mask), dy)


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=str)
def test_learnable_functions_have_torchs_values_in_every_layout(dtype):
    rng = np.random.default_rng(3)
    for x in all_layouts(dtype):
        dy = np.asfortranarray(rng.standard_normal(x.shape).astype(dtype))
        one = np.float32([0.1]), np.float32([2.3])
        expected = torch._fake_quantize_learnable_per_tensor_affine(*map(same_memory, (x, *one)), -8, 7)
        assert_same(expected, torch_ops.fake_quantize_learnable_per_tensor_affine(x, *one, -8, 7), x)
        expected = aten._fake_quantize_learnable_per_tensor_affine_backward(*map(same_memory, (dy, x, *one)), -8, 7)
        actual = torch_ops.fake_quantize_learnable_per_tensor_affine_backward(dy, x, *one, -8, 7)
        assert_same(expected[0], actual.dx, x)
        for axis, count in enumerate(x.shape):
            each = rng.uniform(0.01, 1, 2 * count).astype(np.float32)[::2], rng.uniform(-9, 9, count).astype(np.float32)
            expected = torch._fake_quantize_learnable_per_channel_affine(*map(same_memory, (x, *each)), axis, -8, 7)
            assert_same(expected, torch_ops.fake_quantize_learnable_per_channel_affine(x, *each, axis, -8, 7), x)
            expected = aten._fake_quantize_learnable_per_channel_affine_backward(
                *map(same_memory, (dy, x, *each)), axis, -8, 7
            )
            actual = torch_ops.fake_quantize_learnable_per_channel_affine_backward(dy, x, *each, axis, -8, 7)
            assert_same(expected[0], actual.dx, x)
            assert [s.shape for s in expected[1:]] == [s.shape for s in actual[1:]]


@pytest.mark.parametrize("switches", [(1, 1), (1, 0), (0, 1), (0, 0)], ids=str)
def test_the_fused_observer_has_torchs_values_in_every_layout(switches):
    for x in all_layouts(np.float32):
        np.nan_to_num(x, copy=False, nan=1)  # NaN per row is an error
        for per_row in (False, True) if x.ndim > 1 else (False,):
            n = len(x) if per_row else 1
            flags = [np.int64([s]) for s in switches]
            state = [np.full(n, value, np.float32) for value in (-2, 3, 1)] + [np.zeros(n, np.int32)]
            tensors = [torch.from_numpy(a.copy()) for a in state]
            options = 0.01, 0, 255, 0 if per_row else -1, per_row, False
            expected = torch._fused_moving_avg_obs_fq_helper(
                same_memory(x), *map(same_memory, flags), *tensors, *options
            )
            assert_same(expected, torch_ops.fused_moving_avg_obs_fq_helper(x, *flags, *state, *options), x)
            for e, a in zip(tensors, state, strict=True):
                assert_same_bits(e, a)


@each_dtype
def test_unaligned_and_reversed_arrays_give_the_values_of_their_copies(dtype):
    x = elements(5, 6, 7, dtype=dtype)
    storage = np.zeros(x.nbytes + 1, np.uint8)
    unaligned = storage[1:].view(x.dtype).reshape(x.shape)
    unaligned[...] = x
    assert not unaligned.flags.aligned
    parameters = np.linspace(0.1, 0.7, 6).astype(np.float32), np.arange(6, dtype=np.int32)
    for view in (unaligned, unaligned[:, ::2], x[::-1], x[:, ::-1, ::-2], unaligned.T[::-1]):
        copy = np.ascontiguousarray(view)
        expected = aten.fake_quantize_per_tensor_affine_cachemask(same_memory(copy), 0.1, 3, *cases.INT8)
        y, mask = torch_ops.fake_quantize_per_tensor_affine_cachemask(view, 0.1, 3, *cases.INT8)
        assert_same_bits(to_numpy(expected[0]), y)
        assert_same_bits(to_numpy(expected[1]), mask)
        expected = aten.fake_quantize_per_tensor_affine_cachemask_backward(same_memory(copy), expected[1])
        assert_same_bits(to_numpy(expected), torch_ops.fake_quantize_per_tensor_affine_cachemask_backward(view, mask))
        scale, zero_point = (p[: view.shape[1]] for p in parameters)
        expected = torch.fake_quantize_per_channel_affine(*map(same_memory, (copy, scale, zero_point)), 1, -8, 7)
        actual = torch_ops.fake_quantize_per_channel_affine(view, scale, zero_point, 1, -8, 7)
        assert_same_bits(to_numpy(expected), actual)
