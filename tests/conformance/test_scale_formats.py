"""Scales of 16 bits, and NVFP4 scales under a divisor: kernels, torch's formula and compressed-tensors agree with the
reference."""

import numpy as np
import pytest

from fakequant import (
    QuantSpec,
    choose_qparams,
    decode_scales,
    encode_scales,
    fake_quantize_dynamic,
    presets,
    reference,
    reference_formats as formats,
)
from fakequant.testing.assertions import assert_same_bits

torch = pytest.importorskip("torch")

from fakequant._backends.torch import formula  # noqa: E402
from fakequant._kernels import numerics_name, scale_rule_name  # noqa: E402

DIVIDED = presets.nvfp4(scale_rule="divided")


def ends(spec: QuantSpec) -> tuple[np.ndarray, np.ndarray]:
    """Returns ranges whose scales are at all ties, edges and neighbours of both formats."""
    levels = spec.largest if spec.format != "int" else (spec.qmax - spec.qmin) / (2 if spec.symmetric else 1)
    steps = np.arange(2**11, dtype=np.float64) + 2**11
    scales = np.concatenate([np.ldexp(steps, e) for e in (-150, -40, -36, -30, -12, 3, 4, 5, 100)])
    edges = [2.0**-24, 2.0**-25, 1.5 * 2.0**-24, 65504, 65519, 65520, 2.0**-133, 3e38 / levels]
    scales = np.concatenate([scales, edges])
    high = (scales * levels).astype(np.float32)
    high = np.concatenate([high, np.nextafter(high, np.float32(0)), np.nextafter(high, np.float32(np.inf)), [0]])
    high = high[np.isfinite(high)].astype(np.float32)
    return (-high * np.float32(0.25) if not spec.symmetric else np.zeros_like(high)), high


@pytest.mark.parametrize("scale_format", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "spec",
    [
        QuantSpec(bits=4, axis=0),
        QuantSpec(narrow_range=True, axis=0),
        QuantSpec(signed=False, symmetric=False, axis=0),
        QuantSpec(format="e4m3fn", axis=0),
    ],
    ids=str,
)
@pytest.mark.parametrize("eps", [2.0**-149, 1.1920929e-07])
def test_scales_are_rounded_as_in_the_reference(spec, scale_format, eps):
    spec = QuantSpec.from_dict(spec.to_dict() | {"scale_format": scale_format})
    lo, hi = ends(spec)
    if spec.format == "int":
        scale, zero_point = reference.choose_qparams(
            lo, hi, spec.qmin, spec.qmax, symmetric=spec.symmetric, eps=eps, scale_format=scale_format
        )
    else:
        scale, zero_point = formats.choose_scale(lo, hi, spec, eps=eps), np.zeros(hi.shape, np.int32)
    stored = torch.from_numpy(scale).to(getattr(torch, scale_format)).float().numpy()
    assert_same_bits(stored, scale)
    kernel = choose_qparams(lo, hi, spec, eps=eps)
    assert_same_bits(kernel.scale, scale)
    assert_same_bits(kernel.zero_point, zero_point)
    options = spec.qmin, spec.qmax, numerics_name(spec), spec.symmetric, scale_rule_name(spec), eps
    slow = formula.choose_qparams(torch.from_numpy(lo), torch.from_numpy(hi), *options)
    assert_same_bits(slow[0].numpy(), scale)
    assert_same_bits(slow[1].numpy(), zero_point)


@pytest.mark.parametrize("scale_format", ["float16", "bfloat16"])
def test_tensors_are_quantized_with_rounded_scales(scale_format):
    spec = QuantSpec(bits=4, axis=-1, group_size=32, scale_format=scale_format)
    x = np.random.default_rng(0).standard_normal((8, 96)).astype(np.float32)
    absmax = np.abs(x).reshape(8, 3, 32).max(-1)
    scale, _ = reference.choose_qparams(-absmax, absmax, -8, 7, symmetric=True, scale_format=scale_format)
    expected, _ = reference.fake_quantize(x, np.repeat(scale, 32, 1), 0, -8, 7, "onnx")
    assert_same_bits(fake_quantize_dynamic(x, spec), expected)
    assert_same_bits(fake_quantize_dynamic(torch.from_numpy(x), spec).numpy(), expected)


def test_a_spec_with_rounded_scales_survives_dicts_numbers_and_words():
    for name in ("float16", "bfloat16"):
        spec = QuantSpec(bits=4, axis=-1, group_size=32, scale_format=name)
        assert QuantSpec.from_numbers(spec.to_numbers()) == spec
        assert QuantSpec.from_json(spec.to_json()) == spec
        assert str(spec) == f"int4, per group of 32 on axis -1, scales {name}"
        assert spec.is_integer
        assert not spec.has_block_scales
    assert QuantSpec.from_numbers(DIVIDED.to_numbers()) == DIVIDED


def test_a_divisor_needs_fp8_scales():
    with pytest.raises(ValueError, match=r"scale_rule='divided'.*got scale_format='e8m0'"):
        QuantSpec(format="e2m1", axis=-1, group_size=32, scale_format="e8m0", scale_rule="divided")


def blocks(magnitude: float) -> np.ndarray:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((32, 64)) * 10.0 ** rng.uniform(-9, 0, (32, 1)) * magnitude
    x[3] = 0
    return x.astype(np.float32)


@pytest.mark.parametrize("magnitude", [1, 1e-30, 1e30, 1e-37, 3e-36, 0])
def test_nvfp4_under_a_divisor_is_that_of_the_reference(magnitude):
    x = blocks(magnitude)
    expected = formats.fake_quantize_blocks(x, DIVIDED)
    assert_same_bits(fake_quantize_dynamic(x, DIVIDED), expected.y)
    assert_same_bits(fake_quantize_dynamic(torch.from_numpy(x), DIVIDED).numpy(), expected.y)
    absmax = np.abs(x).reshape(32, 4, 16).max(-1)
    assert_same_bits(choose_qparams(-absmax, absmax, DIVIDED).scale, expected.scale)
    options = DIVIDED.qmin, DIVIDED.qmax, numerics_name(DIVIDED), True, scale_rule_name(DIVIDED), 0.0
    low, high = torch.from_numpy(-absmax), torch.from_numpy(absmax)
    assert_same_bits(formula.choose_qparams(low, high, *options)[0].numpy(), expected.scale)
    codes, divisor = encode_scales(expected.scale, DIVIDED)
    assert_same_bits(decode_scales(codes, divisor, DIVIDED), expected.scale)


def test_the_divisor_of_nvfp4_is_rounded_twice():
    """Its reciprocal is rounded first, as torch divides a number by a tensor. One division would give other bits."""
    largest = np.random.default_rng(2).uniform(1, 2, 200).astype(np.float32)
    once = sum(np.float32(2688) / v != np.float32(1) / v * np.float32(2688) for v in largest)
    assert once > 20
    options = DIVIDED.qmin, DIVIDED.qmax, numerics_name(DIVIDED), True, scale_rule_name(DIVIDED), 0.0
    for value in largest:
        absmax = np.float32([value, value / 3])
        expected = formats.nvfp4_scales(absmax, divided=True)
        assert expected.tensor_scale == np.float32(1) / value * np.float32(2688)
        assert_same_bits(choose_qparams(-absmax, absmax, DIVIDED).scale, expected.scale)
        slow = formula.choose_qparams(torch.from_numpy(-absmax), torch.from_numpy(absmax), *options)[0]
        assert_same_bits(slow.numpy(), expected.scale)


@pytest.mark.parametrize("magnitude", [1, 1e-20, 1e20])
def test_nvfp4_under_a_divisor_has_the_scales_of_compressed_tensors(magnitude):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    x = torch.from_numpy(blocks(magnitude)).unflatten(-1, (4, 16))
    divisor = generate_gparam(x.min(), x.max())
    args = quantization.preset_name_to_scheme("NVFP4A16", ["Linear"]).weights
    scale, _ = calculate_qparams(x.amin(-1), x.amax(-1), args, global_scale=divisor)
    absmax = x.abs().amax(-1)
    assert_same_bits(choose_qparams(-absmax, absmax, DIVIDED).scale.numpy(), (scale / divisor).numpy())
