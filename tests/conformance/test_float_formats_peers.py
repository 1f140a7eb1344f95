"""Float formats have the bits of ml_dtypes, gfloat, torch, torchao and ONNX Runtime, or a test says why not."""

import types

import numpy as np
import pytest

from fakequant import reference_formats as formats
from fakequant.formats import FLOAT_FORMATS
from fakequant.testing.assertions import assert_same_bits
from float_format_data import all_values, bfloat16_values, by_format, dtype_of, hard_values, nearest

OCP = {"e4m3fn": "ocp_e4m3", "e5m2": "ocp_e5m2", "e2m3": "ocp_e2m3", "e3m2": "ocp_e3m2", "e2m1": "ocp_e2m1"}
FP8 = ["e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"]
SMALL = ["e2m3", "e3m2", "e2m1"]  # without NaN
by_ocp_format = pytest.mark.parametrize("format", OCP)
by_fp8_format = pytest.mark.parametrize("format", FP8)
by_small_format = pytest.mark.parametrize("format", SMALL)


def codes(x, format):
    return formats.quantize(x, 1.0, format)


def numbers(format):
    """Returns all values to compare, without NaN, which peers treat differently."""
    x = all_values(format)
    return x[~np.isnan(x)]


def clipped(x, format):
    largest = np.float32(FLOAT_FORMATS[format].largest)
    return np.clip(x, -largest, largest)


def cast_by_ml_dtypes(x, format):
    with np.errstate(all="ignore"):
        return x.astype(dtype_of(format)).view(np.uint8)


# --- ml_dtypes ----------------------------------------------------------------------------


@by_format
def test_codes_equal_casts_of_ml_dtypes_after_clipping(format):
    x = numbers(format)
    assert_same_bits(cast_by_ml_dtypes(clipped(x, format), format), codes(x, format))


@by_fp8_format
def test_casts_of_ml_dtypes_overflow_where_ours_saturate(format):
    top = int(codes(np.float32(1e9), format))
    lost = {"e4m3fn": 0x7F, "e5m2": 0x7C}.get(format, 0x80)  # NaN, infinity, NaN
    assert cast_by_ml_dtypes(np.float32([1e9]), format).tolist() == [lost]
    assert lost != top == int(formats.encode(np.float32(FLOAT_FORMATS[format].largest), format))


@by_small_format
def test_nan_is_a_zero_in_the_small_formats_of_ml_dtypes_and_the_lowest_code_here(format):
    (theirs,) = cast_by_ml_dtypes(np.float32([np.nan]), format)
    (ours,) = codes(np.float32([np.nan]), format)
    assert formats.decode(theirs, format) == 0
    assert formats.decode(ours, format) == -FLOAT_FORMATS[format].largest


# --- gfloat -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def round_by_gfloat():
    gfloat = pytest.importorskip("gfloat")
    infos = pytest.importorskip("gfloat.formats")

    def call(x, format, **options):
        with np.errstate(over="ignore"):  # in values that it does not use
            y = gfloat.round_ndarray(getattr(infos, f"format_info_{OCP[format]}"), x, **options)
        return y.astype(x.dtype)

    return call


@by_ocp_format
def test_values_equal_saturated_ones_of_gfloat(format, round_by_gfloat):
    x = numbers(format)
    assert_same_bits(round_by_gfloat(x, format, sat=True), formats.round_to_format(x, format)[0])
    wide = numbers(format)[::10].astype(np.float64) * (1 + 1e-12)
    assert_same_bits(round_by_gfloat(wide, format, sat=True), formats.round_to_format(wide, format)[0])


def test_gfloat_overflows_unless_told_to_saturate(round_by_gfloat):
    x = np.float32([1e9])
    assert np.isnan(round_by_gfloat(x, "e4m3fn"))
    assert np.isinf(round_by_gfloat(x, "e5m2"))
    with pytest.raises(ValueError, match="No Infs or NaNs"):
        round_by_gfloat(x, "e2m1")


@by_small_format
def test_nan_stays_nan_in_arrays_of_gfloat_and_its_scalars_refuse_it(format, round_by_gfloat):
    gfloat, infos = (pytest.importorskip(name) for name in ("gfloat", "gfloat.formats"))
    nan = np.float32([np.nan])
    assert_same_bits(round_by_gfloat(nan, format, sat=True), formats.round_to_format(nan, format)[0])
    with pytest.raises(ValueError, match="No NaN in format"):
        gfloat.round_float(getattr(infos, f"format_info_{OCP[format]}"), np.nan, sat=True)


# --- torch --------------------------------------------------------------------------------


def cast_by_torch(x, format):
    torch = pytest.importorskip("torch")
    return torch.from_numpy(x.copy()).to(getattr(torch, f"float8_{format}")).view(torch.uint8).numpy()


@by_fp8_format
def test_codes_equal_casts_of_torch_after_clamping(format):
    x = numbers(format)
    assert_same_bits(cast_by_torch(clipped(x, format), format), codes(x, format))


@by_fp8_format
def test_casts_of_torch_from_bfloat16_equal_ours(format):
    torch = pytest.importorskip("torch")
    x = bfloat16_values()
    x = x[np.abs(x) <= FLOAT_FORMATS[format].largest]
    narrow = torch.from_numpy(x.copy()).bfloat16().to(getattr(torch, f"float8_{format}"))
    assert_same_bits(narrow.view(torch.uint8), codes(x, format))


# NaN up to torch 2.11, 448 since then; infinity; NaN; NaN
@pytest.mark.parametrize(("format", "code"), [("e4m3fn", 0x7E), ("e5m2", 0x7C), ("e4m3fnuz", 0x80), ("e5m2fnuz", 0x80)])
def test_casts_of_torch_overflow_where_ours_saturate(format, code):
    assert cast_by_torch(np.float32([1e9]), format).tolist() == [code]
    assert (codes(np.float32([1e9]), format) == code) == (format == "e4m3fn")


def test_nan_of_e5m2_has_several_codes():
    nan = np.uint32([0x7FC00000, 0xFFC00000]).view(np.float32)
    assert cast_by_ml_dtypes(nan, "e5m2").tolist() == [0x7E, 0xFE]
    assert cast_by_torch(nan, "e5m2").tolist() == [0x7F, 0xFF]
    assert codes(nan, "e5m2").tolist() == [0x7F, 0x7F]


@pytest.mark.parametrize("cast", [cast_by_ml_dtypes, cast_by_torch], ids=["ml_dtypes", "torch"])
def test_casts_round_float64_twice(cast):
    x = np.float64([1.0625 + 1e-9])  # above the tie of 1 and 1.125, but a tie in float32
    assert formats.decode(cast(x, "e4m3fn"), "e4m3fn") == 1.0
    assert formats.round_to_format(x, "e4m3fn")[0] == 1.125


# --- torchao ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kernels():
    torch = pytest.importorskip("torch")
    torchao = pytest.importorskip("torchao.prototype.mx_formats.kernels")
    functions = {
        "e2m3": torchao.f32_to_f6_e2m3_unpacked,
        "e3m2": torchao.f32_to_f6_e3m2_unpacked,
        "e2m1": torchao.f32_to_f4_unpacked,
    }

    def call(x, format):
        return functions[format](torch.from_numpy(x.copy())).numpy()

    return types.SimpleNamespace(codes=call, pack=torchao.pack_uint4, torch=torch)


@by_small_format
def test_codes_equal_those_of_torchao(format, kernels):
    x = numbers(format)
    assert_same_bits(kernels.codes(x, format), codes(x, format))


@by_small_format
def test_nan_becomes_some_number_in_torchao(format, kernels):
    bits = np.uint32([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFFC00000]).view(np.float32)
    theirs = kernels.codes(bits, format)
    assert len(set(theirs.tolist())) > 1  # the payload decides
    assert set(codes(bits, format).tolist()) == {(1 << FLOAT_FORMATS[format].bits) - 1}


def test_packed_4_bit_codes_are_in_the_order_of_torchao(kernels):
    q = np.random.default_rng(0).integers(0, 16, 64).astype(np.uint8)
    assert_same_bits(kernels.pack(kernels.torch.from_numpy(q)), formats.pack(q, 4))


# --- ONNX ---------------------------------------------------------------------------------


@by_fp8_format
@pytest.mark.parametrize("scale", [1.0, 0.1, 3e-3])
def test_codes_equal_quantizelinear_of_onnx_runtime(format, scale):
    onnx = pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    helper, kind = onnx.helper, getattr(onnx.TensorProto, f"FLOAT8{format.upper()}")
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    constants = [
        helper.make_tensor("s", onnx.TensorProto.FLOAT, [], [scale]),
        helper.make_tensor("z", kind, [], [0.0]),
    ]
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None]) for name in "xy"]
    graph = helper.make_graph(nodes, "round", ends[:1], ends[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = numbers(format)[::5]
    with np.errstate(all="ignore"):
        x = np.concatenate([(hard_values(format) * np.float32(scale)).astype(np.float32), x])

    (y,) = session.run(None, {"x": x})

    assert_same_bits(y, formats.fake_quantize(x, np.float32(scale), format)[0])


# --- what the comparisons see -------------------------------------------------------------


def test_values_compared_include_every_tie_on_both_sides():
    for format in FLOAT_FORMATS:
        x = hard_values(format)
        magnitude, fits = nearest(x, format)
        assert fits.sum() > 3 * (1 << FLOAT_FORMATS[format].bits - 1)
        assert (~fits).sum() > 10
        assert len(set(magnitude.tolist())) == len(FLOAT_FORMATS[format].grid()) // 2 + 1
    assert len(all_values("e4m3fn")) > 1_000_000
