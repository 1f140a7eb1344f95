"""`fake_quantize_dynamic` and `quantize_dynamic`: scales of the data's own blocks."""

import numpy as np
import pytest

import fakequant as fq
from fakequant import presets, reference_formats
from fakequant.formats import FLOAT_FORMATS
from fakequant.testing.assertions import assert_same_bits

SPECS = {
    "per token": presets.int8_per_token(),
    "affine per token": fq.QuantSpec(bits=4, symmetric=False, axis=-1, group_size=-1),
    "per tensor": presets.uint8(),
    "per channel": presets.int8(),
    "groups": presets.int4(group_size=16),
    "fp8": presets.fp8_e4m3(axis=0),
    "mxfp8": presets.mxfp8(),
    "mxfp6": presets.mxfp6(format="e3m2", scale_rule="even"),
    "mxfp4": presets.mxfp4(axis=0),
    "mxint8": presets.mxint8(scale_rule="rceil"),
    "nvfp4": presets.nvfp4(),
}
by_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def data(columns=48):
    x = np.random.default_rng(0).standard_normal((40, columns)).astype(np.float32)
    x[1] = 0
    x[2, :5] = np.nan, np.inf, -np.inf, 1e-42, 3e38
    x[3] = -np.inf
    return x


def range_of(x, spec):
    seen = fq.min_max(x, spec)
    nothing = seen.min > seen.max
    return np.where(nothing, 0, seen.min), np.where(nothing, 0, seen.max)


@by_spec
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_result_is_that_of_the_three_steps(spec, dtype):
    with np.errstate(over="ignore"):  # a value beyond float16 becomes infinite
        x = data().astype(dtype)
    qparams = fq.choose_qparams(*range_of(x, spec), spec)
    assert_same_bits(fq.fake_quantize(x, *qparams, spec), fq.fake_quantize_dynamic(x, spec))
    codes, found = fq.quantize_dynamic(x, spec)
    assert_same_bits(qparams.scale, found.scale)
    assert_same_bits(fq.quantize(x, *qparams, spec), codes)


@pytest.mark.parametrize("spec", [s for s in SPECS.values() if s.has_block_scales], ids=str)
@pytest.mark.parametrize("columns", [64, 48, 20, 1])
def test_blocks_have_the_bits_of_the_reference(spec, columns):
    x = data(columns) if columns > 4 else data()[:, :columns]
    expected = reference_formats.fake_quantize_blocks(x, spec)
    assert_same_bits(expected.y, fq.fake_quantize_dynamic(x, spec))
    assert_same_bits(expected.scale, fq.quantize_dynamic(x, spec)[1].scale)


@pytest.mark.parametrize(
    "spec", [presets.mxfp4(), presets.mxfp6(), presets.nvfp4(), presets.int4(group_size=16)], ids=str
)
def test_packed_codes_have_the_values_of_the_result(spec):
    x = np.nan_to_num(data())
    codes, qparams = fq.quantize_dynamic(x, spec, packed=True)
    assert codes.size == x.size * spec.bits // 8
    again = fq.dequantize(codes, *qparams, spec, shape=x.shape)
    assert_same_bits(fq.fake_quantize_dynamic(x, spec), again)


@by_spec
def test_tensors_have_the_bits_of_arrays(spec):
    torch = pytest.importorskip("torch")
    x = data()
    t = torch.from_numpy(x)
    expected = fq.fake_quantize_dynamic(x, spec)
    assert_same_bits(expected, fq.fake_quantize_dynamic(t, spec))
    columns = fq.fake_quantize_dynamic(t.t().contiguous().t(), spec)
    assert_same_bits(expected, columns)
    traced = torch.compile(fq.fake_quantize_dynamic, backend="aot_eager", fullgraph=True)
    assert_same_bits(expected, traced(t, spec))
    codes, qparams = fq.quantize_dynamic(t, spec)
    assert_same_bits(fq.quantize_dynamic(x, spec)[0], codes)
    assert_same_bits(fq.quantize_dynamic(x, spec)[1].scale, qparams.scale)


def test_gradient_passes_everywhere_unless_it_is_clipped():
    torch = pytest.importorskip("torch")
    x = torch.tensor([[7.9, 1.0, -0.3, torch.nan]], requires_grad=True)  # 7.9 is above 6, the largest value
    fq.fake_quantize_dynamic(x, presets.mxfp4()).sum().backward()
    assert x.grad.tolist() == [[1, 1, 1, 1]]
    x.grad = None
    fq.fake_quantize_dynamic(x, presets.mxfp4(), gradient="clipped").sum().backward()
    assert x.grad.tolist() == [[0, 1, 1, 0]]


def test_every_example_of_a_batch_has_its_own_scales():
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(np.nan_to_num(data().reshape(4, 10, 48)))
    for spec in (presets.nvfp4(), presets.mxfp8(), presets.int8_per_token()):
        expected = torch.stack([fq.fake_quantize_dynamic(example, spec) for example in x])
        actual = torch.func.vmap(lambda example, spec=spec: fq.fake_quantize_dynamic(example, spec))(x)
        assert_same_bits(expected, actual)


def test_tiny_numbers_in_nvfp4_stay_numbers():
    x = np.zeros((2, 32), np.float32)
    x[0, :3] = 1e-43, -1e-45, 3e-41
    assert np.isfinite(fq.fake_quantize_dynamic(x, presets.nvfp4())).all()
    assert not fq.fake_quantize_dynamic(np.zeros((2, 32), np.float32), presets.nvfp4()).any()


def test_eps_is_the_smallest_scale_of_float32_scales():
    x = np.float32([[1e-9, 0]])
    spec = presets.int8_per_token()
    assert fq.quantize_dynamic(x, spec, eps=0.5)[1].scale == np.float32(0.5)
    assert_same_bits(np.float32([[0, 0]]), fq.fake_quantize_dynamic(x, spec, eps=0.5))


@pytest.mark.parametrize("call", [fq.fake_quantize_dynamic, fq.quantize_dynamic])
def test_wrong_arguments_are_refused(call):
    with pytest.raises(TypeError, match="`spec` must be a QuantSpec"):
        call(np.ones(4, np.float32), "mxfp4")
    with pytest.raises(TypeError, match="float32"):
        call(np.ones(4, np.int32), presets.mxfp4())
    with pytest.raises(IndexError, match="out of range"):
        call(np.ones(4, np.float32), presets.mxfp4(axis=1))


def test_running_ranges_of_blocks_must_be_dynamic():
    lo = np.zeros(1, np.float32)
    with pytest.raises(ValueError, match='`update` must be "dynamic"'):
        fq.observe_fake_quantize(np.ones(4, np.float32), presets.mxfp4(), lo, lo.copy())


def test_nvfp4_divides_by_the_scale_also_at_ties():
    """A product with the reciprocal of the scale would fall on the other side of some ties."""
    values = FLOAT_FORMATS["e4m3fn"].grid()
    block_scales = values[(values >= 2.0**-6) & (values <= 448)]
    ties = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    x = np.zeros((block_scales.size, 3, 16), np.float32)
    for i, end in enumerate((-np.inf, 0, np.inf)):
        exact = ties * block_scales[:, None]
        x[:, i, :7] = exact if end == 0 else np.nextafter(exact, np.float32(end))
    x[:, :, 15] = 6 * block_scales[:, None]  # the largest of each block; 2688 in all, so the tensor scale is 1
    spec = presets.nvfp4()
    y = fq.fake_quantize_dynamic(x.reshape(-1, 16), spec)
    assert_same_bits(np.repeat(block_scales, 3)[:, None], fq.quantize_dynamic(x.reshape(-1, 16), spec)[1].scale)
    assert_same_bits(reference_formats.fake_quantize_blocks(x.reshape(-1, 16), spec).y, y)
    even = np.float32([0, 1, 1, 2, 2, 4, 4]) * block_scales[:, None]
    assert_same_bits(even, y.reshape(x.shape)[:, 1, :7])


@pytest.mark.parametrize("form", ["packed", "bool"])
@pytest.mark.parametrize("shape", [(300, 64), (40, 7, 96), (999, 20), (64, 3, 300)], ids=str)
@pytest.mark.parametrize("make", [presets.mxfp4, presets.nvfp4, presets.mxint8], ids=lambda make: make.__name__)
def test_masks_of_many_blocks_are_those_of_the_found_scales(make, shape, form):
    """Large arrays are processed in parts, each with its own part of the mask."""
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32) * 3
    for axis in (-1, 0):
        spec = make(axis=axis)
        scale = fq.quantize_dynamic(x, spec)[1].scale
        lo = np.zeros(scale.shape, np.float32)
        observed = fq.observe_fake_quantize(x, spec, lo, lo.copy(), update="dynamic", mask=form)
        y, mask = fq.fake_quantize(x, scale, 0, spec, mask=form)
        assert_same_bits(scale, observed.scale)
        assert_same_bits(y, observed.y)
        assert_same_bits(mask, observed.mask)
        if make is presets.mxfp4:
            assert not fq.fake_quantize(x, scale, 0, spec, mask="bool")[1].all()  # some values are clipped


def test_six_bit_integers_are_not_packed():
    for spec in (fq.QuantSpec(bits=6), fq.QuantSpec(bits=6, signed=False, symmetric=False)):
        with pytest.raises(ValueError, match="6-bit and 4-bit floats can be packed, got 6 bits of the format 'int'"):
            fq.quantize_dynamic(np.ones(4, np.float32), spec, packed=True)
