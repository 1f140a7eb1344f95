"""Gradients of `fakequant.reference` have torch's bits; its sums are exact."""

from fractions import Fraction

import numpy as np
import pytest

from fakequant import reference
from fakequant.testing import cases
from fakequant.testing.assertions import assert_same_bits
from torch_bridge import ALL_SCALES, BF16, FLOAT32, aten, each_dtype, to_numpy, to_torch, torch

pytestmark = pytest.mark.usefixtures("torch_on_one_thread")


@each_dtype
def test_the_reference_backward_equals_torchs_product_with_the_mask(dtype):
    dy = cases.gradients(4000, dtype)
    mask = np.random.default_rng(1).random(4000) < 0.5
    for op in (
        aten.fake_quantize_per_tensor_affine_cachemask_backward,
        aten.fake_quantize_per_channel_affine_cachemask_backward,
    ):
        dx = op(to_torch(dy), to_torch(mask))

        assert_same_bits(to_numpy(dx), reference.fake_quantize_backward(dy, mask, "torch"))


def learned_zero_points(qmin, qmax):
    candidates = [float(qmin), (qmin + qmax) / 2, 0.0, 0.5, 1.5, -2.5, -0.7, -57.0, 3.3]
    candidates += [float(qmax), 1e9, -1e9]
    # Clamping in float32 may leave a wide range by rounding its ends; torch refuses those.
    ends = np.float32(qmin), np.float32(qmax)
    return [z for z in candidates if qmin <= int(np.clip(np.float32(z), *ends)) <= qmax]


LEARNED_RANGES = [
    *(r for r in cases.ranges() if r[0] <= 0 <= r[1]),
    (-(2**53) - 1, 2**53 + 1),
]


@each_dtype
def test_the_reference_equals_torchs_learnable_forward(dtype):
    for i, (qmin, qmax) in enumerate(LEARNED_RANGES):
        scale = np.float32([(0.1, 1 / 3, -0.5, 0.02)[i % 4]])
        x = cases.values(float(scale[0]), max(qmin, -3), qmin, qmax, dtype)
        for z in np.float32(learned_zero_points(qmin, qmax)).reshape(-1, 1):
            parameters = to_torch(scale), to_torch(z)
            y = torch._fake_quantize_learnable_per_tensor_affine(to_torch(x), *parameters, qmin, qmax)
            used = reference.forward_zero_point(z, qmin, qmax)
            ref, _ = reference.fake_quantize(x, scale, used, qmin, qmax, "torch")
            assert_same_bits(to_numpy(y), ref, "tensor", scale, z, qmin, qmax)

            used = reference.forward_zero_point(z, qmin, qmax, granularity="channel")
            if not qmin <= used[0] <= qmax:
                continue  # torch's own cast to int32 left the range, and it raises
            y = torch._fake_quantize_learnable_per_channel_affine(to_torch(x[None]), *parameters, 0, qmin, qmax)
            ref, _ = reference.fake_quantize(
                x[None], scale[:, None], used[:, None], qmin, qmax, "torch", granularity="channel"
            )
            assert_same_bits(to_numpy(y), ref, "channel", scale, z, qmin, qmax)


def learned_cases():
    factors = (1.0, 0.1, 1 / 3, 1e-3, 0.0, -2.0, 1e39)
    for i, scale in enumerate(ALL_SCALES):
        for qmin, qmax in (cases.INT8, (0, 2**25 - 1), (-(2**31), 2**31 - 1)):
            for z in learned_zero_points(qmin, qmax)[:6]:
                yield scale, z, qmin, qmax, factors[i % len(factors)]
    for i, (qmin, qmax) in enumerate(LEARNED_RANGES):
        for z in learned_zero_points(qmin, qmax):
            yield 1 / 3, z, qmin, qmax, factors[i % len(factors)]


def learned_data(scale, z, qmin, qmax, dtype, limit):
    x = cases.values(scale, min(max(int(z), qmin), qmax), qmin, qmax, dtype)
    x = np.random.default_rng(len(x)).permutation(x)[:limit]
    return x, cases.gradients(len(x), dtype, seed=len(x))


def assert_same_terms(expected, terms, *names):
    for name, want, got in zip(("dx", "ds", "dz"), expected, terms, strict=True):
        # torch's sum over one element is 0 + term, which loses the sign of a zero.
        got = got if name == "dx" else got + np.float32(0)
        assert_same_bits(to_numpy(want), got, name, *names)


@pytest.mark.parametrize("dtype", [FLOAT32, BF16], ids=["float32", "bfloat16"])
def test_the_reference_equals_torchs_learnable_backward_per_channel(dtype):
    op = aten._fake_quantize_learnable_per_channel_affine_backward
    for scale, z, qmin, qmax, factor in learned_cases():
        x, dy = (a[:, None] for a in learned_data(scale, z, qmin, qmax, dtype, None))
        # One channel per element: every sum has one term.
        scales = np.full(len(x), scale).astype(np.float32)
        zs = np.full(len(x), z, np.float32)
        out = op(*map(to_torch, (dy, x, scales, zs)), 0, qmin, qmax, factor)
        dx, ds, dz = reference.learned_backward(
            dy, x, scales[:, None], zs[:, None], qmin, qmax, "torch",
            grad_factor=factor, granularity="channel",
        )  # fmt: skip

        assert_same_terms(out, (dx, ds[:, 0], dz[:, 0]), scale, z, qmin, qmax, factor)


@pytest.mark.parametrize("dtype", [FLOAT32, BF16], ids=["float32", "bfloat16"])
def test_the_reference_equals_torchs_learnable_backward_per_tensor(dtype):
    op = aten._fake_quantize_learnable_per_tensor_affine_backward
    for scale, z, qmin, qmax, factor in learned_cases():
        x, dy = learned_data(scale, z, qmin, qmax, dtype, 24)
        scale32, z32 = np.array([scale]).astype(np.float32), np.float32([z])
        parameters = to_torch(scale32), to_torch(z32)
        out = [
            op(*pair, *parameters, qmin, qmax, factor)
            for pair in zip(to_torch(dy).split(1), to_torch(x).split(1), strict=True)
        ]
        terms = reference.learned_backward(dy, x, scale32, z32, qmin, qmax, "torch", grad_factor=factor)

        out = [torch.cat(column) for column in zip(*out, strict=True)]
        assert_same_terms(out, terms, scale, z, qmin, qmax, factor)


def test_exact_reference_sums_equal_torchs_up_to_its_rounding():
    rng = np.random.default_rng(3)
    dy, x = rng.standard_normal((2, 3, 1000)).astype(np.float32)
    scale, z = np.float32([0.1, 0.02, 1.0]), np.zeros(3, np.float32)
    _, ds, _ = aten._fake_quantize_learnable_per_channel_affine_backward(
        *map(to_torch, (dy, x, scale, z)), 0, -8, 7, 1.0
    )
    terms = reference.learned_backward(dy, x, scale[:, None], z[:, None], -8, 7, "torch", granularity="channel")[1]

    exact = reference.exact_sum(terms, axis=1)
    assert np.all(np.abs(ds.numpy() - exact) < 1e-5 * np.abs(terms).sum(axis=1))


def test_exact_reference_sums_equal_rational_sums():
    rng = np.random.default_rng(4)
    terms = rng.standard_normal((2, 3, 50)) * 10.0 ** rng.integers(-30, 30, (2, 3, 50))
    terms[..., 25:] = -terms[..., :25] * (1 + 1e-15)

    def exact(row):
        return float(sum(map(Fraction, row.ravel().tolist())))

    assert reference.exact_sum(terms).item() == exact(terms)
    by_axis = [[exact(terms[i, j]) for j in range(3)] for i in range(2)]
    assert reference.exact_sum(terms, axis=-1).tolist() == by_axis
    by_channel = [exact(terms[:, j]) for j in range(3)]
    assert reference.exact_sum(terms, axis=(0, 2)).tolist() == by_channel
    assert reference.exact_sum(np.float64([1e308, 1e308, -1e308])).item() == 1e308
    assert reference.exact_sum(np.zeros((0, 2)), axis=0).tolist() == [0.0, 0.0]
    assert_same_bits(np.float64(0.0), reference.exact_sum(np.float32([-0.0])))
    specials = np.float32([[1, np.inf], [np.inf, -np.inf], [np.nan, 1]])
    assert_same_bits(np.array([np.inf, np.nan, np.nan]), reference.exact_sum(specials, axis=1))


def test_learned_reference_gradients_of_nonfinite_inputs_are_zero():
    x, dy = np.float32([np.nan, np.inf, -np.inf]), np.float32([np.nan, -1, np.inf])
    for numerics in ("onnx", "half_away"):
        for term in reference.learned_backward(dy, x, 0.1, 0.4, -8, 7, numerics):
            assert_same_bits(np.zeros(3, np.float32), term, numerics)
