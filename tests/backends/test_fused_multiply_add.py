"""`a * b + c` rounded once with torch operations, against exact fractions, and formulas that use it."""

from fractions import Fraction

import numpy as np
import pytest

from fakequant import _kernels, reference
from fakequant.testing.assertions import assert_same_bits

torch = pytest.importorskip("torch")
exact = pytest.importorskip("fakequant._backends.torch.fused_multiply_add")
formula = pytest.importorskip("fakequant._backends.torch.formula")
kernels = pytest.importorskip("fakequant._backends.torch.tensor_kernels")


def double_rounding(dtype, count=4000):
    """Returns sums just beside the middle of two floats, where rounding twice gives the wrong one."""
    digits = {np.float32: 24, np.float64: 53}[dtype]
    rng = np.random.default_rng(0)
    c = rng.integers(2 ** (digits - 1), 2**digits, count).astype(np.float64)
    # (1 + e) * 0.5 * (1 - e) is slightly less than half a unit of c.
    e = 2.0 ** -rng.integers(2, digits - 1, count)
    a, b = 1 + e, 0.5 * (1 - e)
    signs = rng.choice([-1, 1], (3, count))
    shift = 2.0 ** rng.integers(-20, 20, count)
    return tuple(v.astype(dtype) for v in (signs[0] * a * shift, signs[1] * b, signs[2] * c * shift))


def assorted(dtype, count=4000):
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal(count).astype(dtype) * dtype(2.0) ** rng.integers(-30, 30, count) for _ in range(2))
    close = -(a * b) * (1 + rng.integers(-4, 5, count) * np.finfo(dtype).eps)  # cancels almost completely
    return a.astype(dtype), b.astype(dtype), np.where(rng.random(count) < 0.7, close, a).astype(dtype)


def special(dtype):
    values = np.array([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, np.finfo(dtype).max, np.finfo(dtype).tiny, 3], dtype)
    return tuple(v.ravel() for v in np.meshgrid(values, values, values))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("numbers", [double_rounding, assorted, special], ids=lambda f: f.__name__)
def test_fma_rounds_once(dtype, numbers):
    a, b, c = numbers(dtype)
    with np.errstate(all="ignore"):
        expected = reference.fma(a, b, c)
    tensors = [torch.from_numpy(v) for v in (a, b, c)]
    assert_same_bits(expected, exact.fma(*tensors))
    if numbers is double_rounding:
        twice = (a.astype(np.float64) * b + c).astype(dtype)
        assert (twice != expected).mean() > 0.05


def test_fma_rounds_once_without_float64():
    """The path for devices without float64 computes the parts in float32."""
    for numbers in (double_rounding, assorted):
        a, b, c = numbers(np.float32)
        parts = exact._in_parts(*(torch.from_numpy(v) for v in (a, b, c)))
        assert_same_bits(reference.fma(a, b, c), parts)


def test_reference_fma_is_the_nearest_float():
    a, b, c = (v[:200] for v in double_rounding(np.float32))
    for i, j, k, r in zip(a, b, c, reference.fma(a, b, c), strict=True):
        total = Fraction(float(i)) * Fraction(float(j)) + Fraction(float(k))
        neighbours = (np.nextafter(r, np.float32(d)) for d in (-np.inf, np.inf))
        assert all(abs(Fraction(float(r)) - total) <= abs(Fraction(float(n)) - total) for n in neighbours)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_fma_derivatives_match_the_formula():
    a, b, c = (torch.from_numpy(v[:8]).requires_grad_() for v in double_rounding(np.float32))
    for actual, expected in zip(
        torch.autograd.grad(exact.fma(a, b, c).sum(), (a, b, c)), (b, a, torch.ones_like(c)), strict=True
    ):
        assert torch.equal(actual, expected)
    _, tangent = torch.func.jvp(lambda x: exact.fma(x, b.detach(), c.detach()), (a.detach(),), (torch.ones(8),))
    assert torch.equal(tangent, b)


# --- the formulas ---------------------------------------------------------------------------------


def channel_grid(scale, zero_point):
    return kernels.Grid(torch.tensor([[scale]]), torch.tensor([[zero_point]]), -8, 7, "torch_channel")


def test_float_zero_point_at_a_tie_matches_torch():
    """With 1 / scale = 1 - 2^-12 + 2^-24, the sum is just above 0.5, but exactly 0.5 if rounded twice."""
    x = torch.tensor([[(1 + 2.0**-12) * 2.0**-25]])
    grid = channel_grid(np.float32(1.0002441), 0.5)
    of_kernel, of_formula = (module.fake_quantize(x, grid, _kernels.MASK_BYTES) for module in (kernels, formula))
    theirs = torch.fake_quantize_per_channel_affine(x, grid.scale[0], grid.zero_point[0], 0, -8, 7)
    assert_same_bits(theirs, of_kernel[0])
    assert_same_bits(of_kernel[0], of_formula[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_kernel_and_formula_agree_for_float_zero_points_near_ties(dtype):
    """x * inv + zero_point is within a unit in the last place of a tie, on either side."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        scale = (torch.rand(1, generator=generator) + 0.5) * 2.0 ** torch.randint(-6, 6, (1,), generator=generator)
        zero_point = torch.rand(1, generator=generator) * 2.0 ** -torch.randint(0, 20, (1,), generator=generator)
        ties = torch.arange(-8, 8) + 0.5
        x = ((ties - zero_point) * scale)[:, None].double() * (1 + torch.arange(-6, 7) * 2.0**-24)
        x = x.reshape(1, -1).to(dtype)
        grid = kernels.Grid(scale[:, None], zero_point[:, None], -8, 7, "torch_channel")
        of_kernel, of_formula = (module.fake_quantize(x, grid, _kernels.MASK_BYTES) for module in (kernels, formula))
        for k, f in zip(of_kernel, of_formula, strict=True):
            assert torch.equal(k, f), (scale, zero_point)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_formula_gradients_of_learned_scales_have_the_bits_of_the_kernel(dtype):
    """Each scale has one element, so nothing is summed."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2000, 1, generator=generator, dtype=dtype)
    scale = torch.rand(2000, 1, generator=generator) + 0.01
    grid = kernels.Grid(scale, torch.randint(-8, 8, (2000, 1), generator=generator).int(), -8, 7, "torch_tensor")
    dy = torch.randn(2000, 1, generator=generator, dtype=dtype)
    of_kernel, of_formula = (module.learned_backward(dy, x, grid, 1.0) for module in (kernels, formula))
    for k, f in zip(of_kernel, of_formula, strict=True):
        assert_same_bits((k + 0.0), (f + 0.0))
