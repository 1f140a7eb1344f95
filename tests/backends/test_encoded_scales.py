"""`encode_scales` and `decode_scales`: scales of MX and NVFP4 as bytes, and back to the same bits."""

import numpy as np
import pytest

import fakequant as fq
from fakequant import presets

torch = pytest.importorskip("torch")

MX = {
    "mxfp8": presets.mxfp8(),
    "mxfp6": presets.mxfp6(format="e3m2"),
    "mxfp4 rceil": presets.mxfp4(scale_rule="rceil"),
    "mxint8": presets.mxint8(),
    "int4": fq.QuantSpec(bits=4, axis=-1, group_size=32, scale_format="e8m0"),
}
NVFP4 = presets.nvfp4()
LARGEST = np.finfo(np.float32).max


def scales_of(x, spec):
    seen = fq.min_max(x, spec)
    return fq.choose_qparams(seen.min, seen.max, spec).scale


def require_same_bits_after(scale, spec):
    """Encodes and decodes, in both libraries, and returns the codes and the tensor scale."""
    encoded = fq.encode_scales(scale, spec)
    assert encoded.codes.dtype == np.uint8
    assert encoded.codes.shape == scale.shape
    again = fq.decode_scales(*encoded, spec)
    assert again.dtype == np.float32
    np.testing.assert_array_equal(again.view(np.int32), scale.view(np.int32))
    tensors = fq.encode_scales(torch.from_numpy(scale), spec)
    np.testing.assert_array_equal(tensors.codes.numpy(), encoded.codes)
    assert (tensors.tensor_scale is None) == (encoded.tensor_scale is None)
    if encoded.tensor_scale is not None:
        assert tensors.tensor_scale.dtype == torch.float32
        assert tensors.tensor_scale.shape == encoded.tensor_scale.shape == ()
        assert float(tensors.tensor_scale) == float(encoded.tensor_scale)
    np.testing.assert_array_equal(fq.decode_scales(*tensors, spec).numpy().view(np.int32), scale.view(np.int32))
    return encoded


@pytest.mark.parametrize("spec", MX.values(), ids=MX)
def test_every_code_of_powers_of_two_returns(spec):
    shift = {"e4m3fn": 0, "e3m2": 0, "e2m1": 0}.get(spec.format, 6 if spec.bits == 8 else 2)
    codes = np.arange(255, dtype=np.uint8)
    scale = fq.decode_scales(codes, None, spec)
    np.testing.assert_array_equal(scale.astype(np.float64), 2.0 ** (codes.astype(np.float64) - 127 - shift))
    np.testing.assert_array_equal(require_same_bits_after(scale, spec).codes, codes)


@pytest.mark.parametrize("spec", [*MX.values(), NVFP4], ids=[*MX, "nvfp4"])
def test_nan_scale_has_the_nan_code(spec):
    codes, tensor_scale = fq.encode_scales(np.float32([np.nan, 1]), spec)
    assert codes[0] == (0x7F if spec is NVFP4 else 255)
    again = fq.decode_scales(codes, tensor_scale, spec)
    assert np.isnan(again[0])
    assert again[1] == 1


def test_code_of_mxint8_is_the_shared_exponent_of_fractions():
    # Codes up to 127 stand for fractions up to 127 / 64, so a step of 2^-6 has the exponent 0 and the code 127.
    assert fq.encode_scales(np.float32([2.0**-6]), presets.mxint8()).codes.tolist() == [127]
    assert fq.encode_scales(np.float32([2.0**-6]), presets.mxfp8()).codes.tolist() == [121]


def test_scales_of_ordinary_data_return_for_nvfp4():
    draw = np.random.default_rng(0)
    for _ in range(300):
        rows = int(draw.integers(1, 20))
        x = draw.normal(size=(rows, 32)) * 2.0 ** draw.uniform(-20, 20, size=(rows, 1)) * 2.0 ** draw.integers(-100, 90)
        require_same_bits_after(scales_of(x.astype(np.float32), NVFP4), NVFP4)


@pytest.mark.parametrize("value", [0, 1e-45, 3e-42, 1e-40, 1e-38, 1, 448 * 6, 3e38, LARGEST], ids=str)
def test_scales_of_one_value_return_for_nvfp4(value):
    for shape in ((1, 16), (3, 16), (2, 5)):
        require_same_bits_after(scales_of(np.full(shape, value, np.float32), NVFP4), NVFP4)


def test_largest_scale_need_not_have_the_largest_code():
    # 416 = 448 - 32 times a factor, and no other factor gives both scales exactly.
    factor = np.float32(0.1)
    scale = np.float32([416, 1.125, 9]) * factor
    codes, tensor_scale = require_same_bits_after(scale, NVFP4)
    assert (fq.decode_scales(codes, tensor_scale, NVFP4) == scale).all()


def test_no_blocks_have_no_codes():
    for spec in (presets.mxfp8(), NVFP4):
        assert require_same_bits_after(np.zeros((0, 3), np.float32), spec).codes.shape == (0, 3)


@pytest.mark.parametrize(
    ("scale", "spec", "words"),
    [
        ([1.0, 3.0], presets.mxfp8(), "scale 3 is not one of the spec .*power of two"),
        ([-1.0], presets.mxfp8(), "scale -1 is not"),
        ([0.0], presets.mxfp8(), "scale 0 is not"),
        ([np.inf], presets.mxfp8(), "scale inf is not"),
        ([2.0**-128], presets.mxfp8(), "is not one of the spec"),
        ([2.0**122], presets.mxint8(), "is not one of the spec"),
        ([1.0, 1.01], NVFP4, "E4M3 value times a scale that all blocks share"),
        ([0.0, 1.0], NVFP4, "positive and finite"),
        ([-1.0, 1.0], NVFP4, "positive and finite"),
        ([np.inf, 1.0], NVFP4, "positive and finite"),
        (np.linspace(1, 2, 200), NVFP4, "E4M3 value times a scale"),
        ([1.0], presets.fp8_e4m3(), "float32, which needs no codes"),
    ],
)
def test_scale_of_another_format_is_refused(scale, spec, words):
    for of in (np.float32(scale), torch.tensor(np.float32(scale))):
        with pytest.raises(ValueError, match=words):
            fq.encode_scales(of, spec)


def test_wrong_arguments_are_refused():
    for of in (np.asarray, torch.from_numpy):
        with pytest.raises(TypeError, match="`scale` must be float32, got float64"):
            fq.encode_scales(of(np.ones(2)), NVFP4)
        with pytest.raises(TypeError, match="`codes` must be uint8, got int64"):
            fq.decode_scales(of(np.ones(2, np.int64)), None, MX["mxfp8"])
        codes = of(np.ones(2, np.uint8))
        with pytest.raises(ValueError, match="have the `tensor_scale` that encode_scales returned, got None"):
            fq.decode_scales(codes, None, NVFP4)
        with pytest.raises(ValueError, match="have no `tensor_scale`"):
            fq.decode_scales(codes, 1.0, MX["mxfp8"])
        with pytest.raises(ValueError, match="needs no codes"):
            fq.decode_scales(codes, None, presets.fp8_e4m3())
        with pytest.raises(TypeError, match="`spec` must be a QuantSpec"):
            fq.encode_scales(of(np.ones(2, np.float32)), 8)
