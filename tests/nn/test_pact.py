"""`PACT`: values, gradients, and an alpha that stays usable after any optimizer step."""

import math

import numpy as np
import pytest

import fakequant as fq
from fakequant import reference
from fakequant.testing.assertions import assert_same_bits
from learned_cases import X, all_usable, bits, by_optimizer

torch = pytest.importorskip("torch")
PACT = pytest.importorskip("fakequant.nn").PACT


def pact_values(alpha):
    a = np.float32(alpha)
    edges = [a, np.nextafter(a, np.float32(9)), np.nextafter(a, np.float32(0)), 0, -0.0, 1e-45, -1e-45, np.nan]
    ties = (np.arange(-2, 34) + 0.5) * a / 15
    return np.concatenate([np.float32([*edges, np.inf, -np.inf, 3e38]), ties.astype(np.float32)])


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("alpha", [3.0, 0.1, 1.7, 1e30])
def test_pact_clips_at_alpha_and_quantizes(width, alpha):
    x = pact_values(alpha)
    qmax = 2**width - 1
    scale = np.float32(alpha) / np.float32(qmax)
    clipped = np.clip(x, np.float32(0), np.float32(alpha))
    expected, _ = reference.fake_quantize(clipped, scale, 0, 0, qmax, "onnx")
    quantizer = PACT(width, alpha)
    assert_same_bits(expected, bits(quantizer(torch.from_numpy(x))))
    assert_same_bits(scale, bits(quantizer.qparams().scale))
    assert quantizer.qparams().zero_point == 0


@pytest.mark.parametrize("alpha", [3.0, 0.1, 1.7])
def test_pact_gradients_match_the_formulas(alpha):
    values = pact_values(alpha)
    x = torch.from_numpy(values).requires_grad_()
    dy = torch.arange(1.0, len(values) + 1)  # sums of integers are exact
    quantizer = PACT(4, alpha)
    quantizer(x).backward(dy)
    inside = (values >= 0) & (values <= np.float32(alpha))
    assert_same_bits(np.where(inside, dy, np.float32(0)), bits(x.grad))
    assert quantizer.alpha.grad.tolist() == [dy.numpy()[values > np.float32(alpha)].sum()]


@pytest.mark.parametrize(("dtype", "dy"), [(torch.float16, 32.0), (torch.bfloat16, 1.0)], ids=["float16", "bfloat16"])
def test_pact_sums_the_gradient_of_alpha_in_float32_for_every_dtype(dtype, dy):
    quantizer = PACT(8, alpha=1.0)
    x = torch.full((4097,), 2.0, dtype=dtype)
    quantizer(x).backward(torch.full_like(x, dy))
    assert quantizer.alpha.grad.tolist() == [4097 * dy]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_pact_rounds_once_in_other_dtypes(dtype):
    x = torch.linspace(-1, 3, 401).to(dtype)
    quantizer = PACT(4, alpha=1.7)
    wide = x.double() if dtype == torch.float64 else x.float()
    expected = fq.fake_quantize(wide.clamp(min=0), quantizer.scale, 0, quantizer.spec).to(dtype)
    assert torch.equal(quantizer(x), expected)


@by_optimizer
def test_pact_alpha_is_usable_after_every_optimizer_step(optimizer):
    quantizer = PACT(4, alpha=1.0)
    optimizer = optimizer(quantizer.parameters())
    x = torch.tensor([0.5, 2.0, 1e30])
    for step in range(1_000):
        y = quantizer(x)
        y.backward(torch.full_like(x, (1.0, -1.0, 1e30, math.nan, 0.0)[step % 5 if step < 500 else step % 3]))
        optimizer.step()
        optimizer.zero_grad()
        assert all_usable(quantizer.scale), step
        assert y.isfinite().all()


@pytest.mark.parametrize("broken", [math.nan, math.inf, -5.0], ids=str)
def test_pact_saves_the_alpha_in_use(broken):
    quantizer, loaded = PACT(4, alpha=1.5), PACT(4)
    quantizer(X)
    quantizer.alpha.data.fill_(broken)
    used = bits(quantizer.scale)
    assert 0 < used < math.inf
    loaded.load_state_dict(quantizer.state_dict())
    assert_same_bits(used, bits(loaded.scale))
    loaded.alpha.data.fill_(math.nan)
    assert_same_bits(used, bits(loaded.scale), "after one more broken step")


def test_pact_frozen_alpha_does_not_move():
    quantizer = PACT(4, alpha=1.5)
    quantizer.frozen = True
    before = bits(quantizer.scale), bits(quantizer(X))
    for moved in (3.0, -1.0, math.nan):
        quantizer.alpha.data.fill_(moved)
        assert_same_bits(before[0], bits(quantizer.scale))
        assert_same_bits(before[1], bits(quantizer(X)))
    quantizer.frozen = False
    assert_same_bits(before[0], bits(quantizer.scale))
    assert quantizer.alpha == 1.5


def test_pact_with_quantizing_off_is_a_relu():
    quantizer = PACT(4, alpha=1.0)
    quantizer.quantizing = False
    assert quantizer(X).tolist() == [0.0, 0.5, 3.0]


@pytest.mark.parametrize(
    "options",
    [
        dict(alpha=0.0),
        dict(alpha=-1.0),
        dict(alpha=math.nan),
        dict(alpha=math.inf),
        dict(bits=0),
        dict(bits=32),
        dict(eps=0.0, alpha=1.0),
        dict(eps=-1.0, alpha=-0.5),
        dict(eps=1e-46, alpha=1.0),
    ],
    ids=str,
)
def test_pact_refuses_invalid_arguments(options):
    with pytest.raises(ValueError, match="must be"):
        PACT(**options)
