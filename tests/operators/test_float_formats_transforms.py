"""Float formats and block scales under `torch.func`: every example is quantized as by itself."""

import dataclasses

import pytest

import fakequant as fq
from fakequant import presets
from fakequant.testing.assertions import assert_same_bits
from straight_through import torch

fqnn = pytest.importorskip("fakequant.nn")
grad, jacrev, jvp, vjp, vmap = (getattr(torch.func, name) for name in ("grad", "jacrev", "jvp", "vjp", "vmap"))
pytestmark = pytest.mark.filterwarnings("ignore:Quantizers that observe under a transform:RuntimeWarning")

BATCH = 5
SPECS = {
    "FP8": presets.fp8_e4m3(),
    "FP8 channel": presets.fp8_e5m2(axis=0),
    "e2m1": fq.QuantSpec(format="e2m1"),
    "MXFP8": presets.mxfp8(),
    "MXFP8, axis 0": presets.mxfp8(axis=0),
    "MXFP6, short blocks": dataclasses.replace(presets.mxfp6(), group_size=7),
    "MXINT8, short blocks": dataclasses.replace(presets.mxint8(), group_size=9),
    "NVFP4": presets.nvfp4(),
    "NVFP4, short blocks": dataclasses.replace(presets.nvfp4(), group_size=7),
}
BLOCKS = {name: spec for name, spec in SPECS.items() if spec.has_block_scales}
by_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
by_blocks = pytest.mark.parametrize("spec", BLOCKS.values(), ids=BLOCKS)


def data(spec):
    """Examples of very different size: a scale of all of them together would show."""
    torch.manual_seed(0)
    return torch.randn(BATCH, 4, 16) * torch.logspace(-3, 3, BATCH).reshape(-1, 1, 1)


def qparams(x, spec):
    return fq.choose_qparams(fq.min_max(x, spec), spec)


def quantized(x, spec):
    scale, zero_point = qparams(x, spec)
    return fq.fake_quantize(x, scale, zero_point, spec)


@by_spec
def test_vmap_equals_a_loop(spec):
    x = data(spec)
    expected = torch.stack([quantized(one, spec) for one in x])
    assert_same_bits(vmap(lambda one: quantized(one, spec))(x), expected)


@by_spec
@pytest.mark.parametrize("at", [0, 1, 2])
def test_vmap_of_codes_over_any_axis_equals_a_loop(spec, at):
    x = data(spec)
    grids = [qparams(one, spec) for one in x]
    codes = torch.stack([fq.quantize(one, *grid, spec) for one, grid in zip(x, grids, strict=True)])
    scales = torch.stack([grid.scale for grid in grids])
    found = vmap(lambda one, s: fq.quantize(one, s, 0, spec), in_dims=(at, 0))(x.movedim(0, at), scales)
    assert torch.equal(found, codes)
    back = vmap(lambda q, s: fq.dequantize(q, s, 0, spec))(codes, scales)
    assert_same_bits(back, vmap(lambda one: quantized(one, spec))(x))


@by_blocks
def test_a_quantizer_under_vmap_gives_every_example_its_own_scales(spec):
    x, quantizer = data(spec), fqnn.FakeQuantize(spec)
    expected = torch.stack([quantizer(one) for one in x])
    assert_same_bits(vmap(quantizer)(x), expected)


@by_blocks
def test_derivatives_of_block_scaled_values_pass(spec):
    x, quantizer = data(spec)[0], fqnn.FakeQuantize(spec)
    dy = torch.randn(x.shape)
    y, tangent = jvp(quantizer, (x,), (dy,))
    assert_same_bits(y, quantizer(x))
    assert torch.equal(tangent, dy)
    assert torch.equal(vjp(quantizer, x)[1](dy)[0], dy)
    assert torch.equal(grad(lambda t: (quantizer(t) * dy).sum())(x), dy)


@pytest.mark.parametrize("name", ["FP8", "FP8 channel", "e2m1"])
def test_derivatives_of_static_scales_are_clipped(name):
    spec, x = SPECS[name], data(SPECS[name])[0]
    scale = qparams(x, spec).scale / 3
    dy = torch.randn(x.shape)
    _, inside = fq.fake_quantize(x, scale, 0, spec, mask="bool")
    assert not inside.all()
    y, tangent = jvp(lambda t: fq.fake_quantize(t, scale, 0, spec), (x,), (dy,))
    assert_same_bits(y, fq.fake_quantize(x, scale, 0, spec))
    assert torch.equal(tangent, torch.where(inside, dy, 0))
    assert torch.equal(vjp(lambda t: fq.fake_quantize(t, scale, 0, spec), x)[1](dy)[0], torch.where(inside, dy, 0))


@pytest.mark.parametrize("name", ["FP8", "FP8 channel", "e2m1"])
def test_gradients_of_learned_scales_per_example_equal_a_loop(name):
    spec, x = SPECS[name], data(SPECS[name])
    scale = qparams(x[2], spec).scale / 3

    def loss(s, one):
        return (fq.fake_quantize_learned(one, s, 0, spec) * one.cos()).sum()

    expected = torch.stack([grad(loss)(scale, one) for one in x])
    assert torch.equal(vmap(grad(loss), in_dims=(None, 0))(scale, x), expected)
    assert torch.equal(jacrev(loss)(scale, x[1]), expected[1])
