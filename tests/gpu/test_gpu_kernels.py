"""The Triton kernels have the bits of the CPU kernels on ties, edges and special values, in Triton's interpreter."""

import itertools

import numpy as np
import pytest

import gpu_stand_in  # first: it skips without Triton
from fakequant import QuantSpec, _kernels
from fakequant._backends.torch import gpu_kernels, tensor_kernels
from fakequant._backends.torch.triton import kernels, tiles
from fakequant.formats import FLOAT_FORMATS
from fakequant.testing import cases
from fakequant.testing.assertions import assert_same_bits
from thoroughness import ALL
from torch_bridge import to_numpy, to_torch, torch

assert gpu_stand_in
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of overflow and NaN in the interpreter

# Every axis is even, so that groups of two fit. The last has no multiple of 8 elements.
SHAPE = (6, 14, 2, 10)
CUTS = {"tensor": (), "row": (6, 14, 2, 1), "first": (6, 1, 1, 1), "middle": (1, 14, 1, 1), "last": (1, 1, 1, 10),
        "group": (6, 14, 2, 5), "several axes": (3, 14, 1, 2)}  # fmt: skip
LAYOUTS = {
    "contiguous": lambda t: t,
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "permuted": lambda t: t.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
    "sliced": lambda t: t.repeat_interleave(2, -1)[..., ::2],
}
DTYPES = {name: dtype for name, dtype in cases.DTYPES.items() if name != "float64"}
INTEGER_RULES = ("onnx", "half_away", "torch_tensor", "torch_channel")
SCALES = (0.1, 1 / 3, 12345.678, 1e-40)
PACKED, BYTES = _kernels.MASK_PACKED, _kernels.MASK_BYTES
CODES = {8: (-128, 127), 4: (-8, 7), 2: (0, 3)}


def hostile(dtype):
    """Ties, edges, subnormal and huge values; one in ten is NaN or infinite."""
    values = np.concatenate([cases.values(s, z, -128, 127, dtype) for s in SCALES for z in (-7, 0, 20)])
    return np.concatenate([values, np.resize(np.array([np.nan, np.inf, -np.inf]).astype(dtype), len(values) // 9)])


HOSTILE = {name: hostile(dtype) for name, dtype in DTYPES.items()}


def data(dtype, layout="contiguous", shape=SHAPE, seed=0):
    return LAYOUTS[layout](to_torch(np.random.default_rng(seed).choice(HOSTILE[dtype], shape)))


def gradient(x, dtype):
    return to_torch(cases.gradients(x.numel(), DTYPES[dtype], seed=3).reshape(x.shape))


def grid(blocks, numerics, bounds=(-128, 127), zero=torch.int32):
    rng = np.random.default_rng(7)
    scale = to_torch(np.asarray(rng.choice(np.float32(SCALES), blocks)))
    zeros = to_torch(np.asarray(rng.integers(max(bounds[0], -7), min(bounds[1], 5), blocks, endpoint=True)))
    return tensor_kernels.Grid(scale, None if zero is None else zeros.to(zero), *bounds, numerics)


def assert_same(expected, actual, *names):
    """Asserts equal bits, dtypes, shapes and strides."""
    if isinstance(expected, torch.Tensor):
        expected, actual = (expected,), (actual,)
    for i, (e, a) in enumerate(zip(expected, actual, strict=True)):
        assert (e is None) == (a is None), names
        if e is not None:
            assert_same_bits(*(to_numpy(t.contiguous()) for t in (e, a)), *names, i)
            assert e.shape != SHAPE or a.stride() == e.stride(), names


def both(name, *args):
    return (getattr(module, name)(*args) for module in (tensor_kernels, kernels))


# --- elementwise ----------------------------------------------------------------------------------


@pytest.mark.parametrize("numerics", INTEGER_RULES)
def test_forward_and_masks_have_the_bits_of_the_cpu(numerics):
    places = [
        *itertools.product(CUTS, ["contiguous"]),
        ("middle", "channels last"),
        ("tensor", "permuted"),
        ("row", "sliced"),
    ]
    seen = 0
    for i, ((cut, layout), dtype) in enumerate(itertools.product(places, DTYPES)):
        x = data(dtype, layout)
        on = grid(CUTS[cut], numerics, zero=[None, torch.int32, torch.int64][i % 3])
        assert_same(*both("fake_quantize", x, on, BYTES if i % 4 == 3 else PACKED), numerics, cut, layout, dtype)
        seen += x.numel()
    assert seen >= 30 * 1680  # with four rules, more than 10^5 in total


@pytest.mark.parametrize("numerics", FLOAT_FORMATS)
def test_float_formats_have_the_bits_of_the_cpu(numerics):
    for dtype, cut in itertools.product(DTYPES, ("tensor", "group") if ALL else ("group",)):
        x = data(dtype)
        assert_same(
            *both("fake_quantize", x, grid(CUTS[cut], numerics, (0, 255), zero=None), PACKED), numerics, dtype, cut
        )


def test_every_tie_of_a_grid_has_the_bits_of_the_cpu():
    for scale, zero in ((0.1, 0), (1 / 3, -7), (1e-40, 20), (3.0517578e-05, 127)):
        for dtype, numerics in zip(itertools.cycle(DTYPES), INTEGER_RULES, strict=False):
            x = to_torch(cases.values(scale, zero, -128, 127, DTYPES[dtype]))
            on = tensor_kernels.Grid(torch.tensor(scale), torch.tensor(zero, dtype=torch.int32), -128, 127, numerics)
            assert_same(*both("fake_quantize", x, on, PACKED), scale, zero, dtype, numerics)


@pytest.mark.parametrize("numerics", INTEGER_RULES)
def test_wide_ranges_and_results_between_two_numbers_have_the_bits_of_the_cpu(numerics):
    """At scale 3, results beyond 2^8 and 2^11 are ties of bfloat16 and float16; levels reach 2^23, and codes 2^22."""
    for dtype in ("bfloat16", "float16"):
        x = torch.arange(-16000, 16000, 2).to(getattr(torch, dtype))
        on = tensor_kernels.Grid(torch.tensor(3.0), torch.tensor(1, dtype=torch.int32), -5000, 5001, numerics)
        assert_same(*both("fake_quantize", x, on, PACKED), numerics, dtype)
    for zero in (-(2**22), 0, 2**22 - 1):
        ends = [end - zero + torch.arange(-16, 16) / 4 for end in (-(2**22), 0, 2**22 - 1)]
        x = torch.cat(ends).float()
        on = tensor_kernels.Grid(
            torch.tensor(1.0), torch.tensor(zero, dtype=torch.int32), -(2**22), 2**22 - 1, numerics
        )
        assert_same(*both("fake_quantize", x, on, PACKED), numerics, zero)
        assert_same(*both("quantize", x, on, torch.int32), numerics, zero)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 2047, 2048, 2049, 4096 + 5])
def test_sizes_around_whole_bytes_and_programs_have_the_bits_of_the_cpu(size):
    x = data("float32", shape=(size,))
    expected, actual = both("fake_quantize", x, grid((), "onnx"), PACKED)
    assert_same(expected, actual, size)
    assert_same(*both("mask_backward", gradient(x, "float32"), expected[1], None, False), size)


@pytest.mark.parametrize("multiply", [False, True])
def test_backward_has_the_bits_of_the_cpu(multiply):
    for dtype, layout in itertools.product(DTYPES, LAYOUTS):
        like = torch.empty_like(data(dtype, layout))
        mask = data(dtype, layout) > 0
        packed = kernels.fake_quantize(data(dtype, layout), grid((), "onnx"), PACKED)[1]
        order = tensor_kernels.order_of(like)
        for form, in_order in ((mask, None), (packed, order), (packed, None)):
            assert_same(
                *both("mask_backward", gradient(like, dtype), form, in_order, multiply), dtype, layout, form.dtype
            )


@pytest.mark.parametrize("numerics", [*INTEGER_RULES, "e4m3fn", "e2m1", "q8_0", "q4_1"])
@pytest.mark.parametrize("cut", ["tensor", "row", "first", "middle", "last", "several axes"])
def test_learned_gradients_have_the_bits_of_the_cpu(numerics, cut):
    """Sums too: both add float64 numbers in a fixed order, and the results are rounded to the dtype of the scale."""
    dtype = "bfloat16" if cut == "middle" else "float32"
    x = data(dtype, "channels last" if cut == "first" else "contiguous")
    zero = None if numerics.startswith(("e", "q8")) else torch.float32 if numerics == "q4_1" else torch.int32
    on = grid(CUTS[cut], numerics, zero=zero)
    on = on._replace(scale=on.scale.clamp(min=1e-3))
    dy = gradient(x, dtype)
    assert_same(*(g[0] for g in both("learned_backward", dy, x, on, 0.25)), numerics, cut)
    finite = torch.nan_to_num(dy, 1, 2, -3)
    expected, actual = both("learned_backward", finite, x, on, 0.25)
    assert_same(expected, actual, numerics, cut)


def test_learned_gradients_of_parts_are_sums_in_a_fixed_order():
    """Terms are exact here: the sum of several programs is the exact one."""
    x = torch.full((100_003,), 1000.0)
    dy = to_torch(np.resize(np.float32([1.0, 0.5, -0.25, 3.0]), 100_003))
    on = tensor_kernels.Grid(torch.tensor(0.5), torch.tensor(3, dtype=torch.int32), -128, 127, "onnx")
    results = [kernels.learned_backward(dy, x, on, 1.0) for _ in range(2)]
    assert_same(*results)
    assert results[0][1].item() == np.float32(dy.double().sum().item() * 124)
    assert results[0][2].item() == np.float32(dy.double().sum().item() * -0.5)
    assert_same(tensor_kernels.learned_backward(dy, x, on, 1.0), results[0])


# --- codes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("numerics", [*INTEGER_RULES, *FLOAT_FORMATS])
def test_codes_and_values_have_the_bits_of_the_cpu(numerics):
    of = FLOAT_FORMATS.get(numerics)
    for bits, bounds in CODES.items() if of is None else [(of.bits, (0, 2**of.bits - 1))]:
        storage = (
            torch.uint8
            if of is not None
            else getattr(torch, QuantSpec(bits=bits, signed=bounds[0] < 0, symmetric=False).storage)
        )
        on = grid(CUTS["middle"], numerics, bounds, torch.int32 if of is None else None)
        x = data("float16" if bits == 8 else "float32", "channels last" if bits == 8 else "contiguous")
        q, same = both("quantize", x, on, storage)
        assert_same(q, same, numerics, bits)
        assert_same(*both("dequantize", q, on, torch.bfloat16), numerics, bits)
        if bits < 8:
            odd = x[:1, :, :1, :7]
            packed, same = both("quantize_packed", odd, on, bits)
            assert_same(packed, same, numerics, bits)
            assert_same(*both("dequantize_packed", packed, on, odd.shape, bits, torch.float32), numerics, bits)


@pytest.mark.parametrize("numerics", FLOAT_FORMATS)
def test_every_code_of_a_format_has_the_value_of_the_cpu(numerics):
    every = torch.arange(2 ** FLOAT_FORMATS[numerics].bits).to(torch.uint8)
    on = tensor_kernels.Grid(torch.tensor(1 / 3), None, 0, 255, numerics)
    assert_same(*both("dequantize", every, on, torch.float32), numerics)


# --- ranges ---------------------------------------------------------------------------------------


def test_ranges_have_the_bits_of_the_cpu():
    for dtype, layout, cut in [
        (d, la, c) for i, (d, la, c) in enumerate(itertools.product(DTYPES, LAYOUTS, CUTS)) if i % 3 == 0
    ]:
        x = data(dtype, layout)
        if gpu_kernels.supports_ranges(x, CUTS[cut]):
            assert_same(*both("min_max", x, CUTS[cut]), dtype, layout, cut)
    for x in (torch.full((8,), -0.0), torch.full((3,), torch.nan), data("float32", shape=(50_001,))):
        assert_same(*both("min_max", x, ()))


def observed(x, blocks, *options, steps=2):
    """Asserts that observing has the bits of the CPU after every step."""
    inf = torch.full(blocks, np.inf)
    states = [(inf.clone(), -inf) for _ in range(2)]
    for step in range(steps):
        now = x if step == 0 else x.roll(5, 0) * 0.75
        options_now = tensor_kernels.ObserverOptions(*options)
        e, a = (
            m.observe_fake_quantize(now, *state, options_now)
            for m, state in zip((tensor_kernels, kernels), states, strict=True)
        )
        assert_same(e, a, blocks, options, step)
        assert_same(*states, "state", blocks, options, step)


RULES = [
    ("onnx", True, "any"), ("half_away", False, "float16"), ("torch_channel", False, "bfloat16"),
    ("e4m3fn", True, "any"), ("torch_tensor", False, "any"),
]  # fmt: skip


@pytest.mark.parametrize("update", ["moving_average", "min_max", "dynamic"])
@pytest.mark.parametrize("cut", [c for c in CUTS if c != "several axes"])
def test_observing_has_the_bits_of_the_cpu_after_every_step(cut, update):
    for i, (numerics, symmetric, rule) in enumerate(RULES):
        dtype, layout = [*DTYPES][i % 3], ["contiguous", "channels last"][i % 2 if cut in ("tensor", "middle") else 0]
        x = data(dtype, layout)
        x = torch.where(x.abs() < 1e4, x, torch.tensor(0.3, dtype=x.dtype)) if i % 2 else x
        x[0, :, 0, 0] = 0.5  # every channel has a finite value
        x[:, 0, :, :2] = 0.25
        x[..., ::2] = torch.nan_to_num(x[..., ::2], 1.5, 2.0, -3.0)
        observed(x, CUTS[cut], -128, 127, numerics, symmetric, rule, update, 0.3, 1e-7, i % 4 != 3)


@pytest.mark.parametrize(
    ("shape", "blocks"),
    [((20_011,), ()), ((3, 10_000), (3, 1)), ((2, 3, 4500), (1, 3, 1)), ((600, 24), (1, 24))],
    ids=str,
)
def test_observing_tensors_of_several_programs_has_the_bits_of_the_cpu(shape, blocks):
    x = data("float32", shape=shape)
    observed(x, blocks, -128, 127, "onnx", False, "any", "moving_average", 0.3, 1e-7, True)


def test_a_moving_average_whose_difference_overflows_has_the_bits_of_the_cpu():
    for lo, hi in ((-3.4e38, 3.4e38), (-3e38, 1.0)):
        states = [(torch.tensor(lo), torch.tensor(hi)) for _ in range(2)]
        options = tensor_kernels.ObserverOptions(-128, 127, "onnx", False, "any", "moving_average", 0.3, 1e-7, True)
        x = torch.tensor([3.3e38, 3.2e38])
        assert_same(
            *(m.observe_fake_quantize(x, *s, options) for m, s in zip((tensor_kernels, kernels), states, strict=True))
        )
        assert_same(*states)


BLOCK_RULES = [
    ("e2m1", "floor", (0, 15)), ("e4m3fn", "ceil", (0, 255)), ("e5m2", "even", (0, 255)), ("e3m2", "rceil", (0, 63)),
    ("onnx", "even", (-127, 127)), ("onnx", "ceil", (-1, 1)),
    ("e4m3fn", "even_e2m1", (0, 255)), ("e2m1", "e4m3fn", (0, 15)),
    ("e2m1", "e4m3fn_divided", (0, 15)), ("q4_0", "q4_0", (-8, 7)), ("q4_1", "q4_1", (0, 15)),
    ("q8_0", "q8_0", (-127, 127)), ("q8_0_input", "q8_0_input", (-127, 127)), ("q8_k_input", "q8_k_input", (-127, 127)),
    ("tq2_0", "tq2_0", (-1, 1)),
]  # fmt: skip


@pytest.mark.parametrize(("numerics", "rule", "bounds"), BLOCK_RULES, ids=[f"{n}, {r}" for n, r, _ in BLOCK_RULES])
def test_block_scales_have_the_bits_of_the_cpu(numerics, rule, bounds):
    for dtype, size, factor in (("float32", 32, 1.0), ("bfloat16", 16, 1e-38), ("float16", 32, 1.0)):
        x = data(dtype, shape=(64, 64)) * factor
        x[2], x[3], x[4], x[5, :3] = 0.0, torch.nan, -0.0, torch.tensor([-3.0, 3.0, -3.0])
        x[6, 0] = torch.finfo(x.dtype).max
        observed(x, (64, 64 // size), *bounds, numerics, True, rule, "dynamic", 0.0, 1.0, True, steps=1)
    x[:] = 0.0
    observed(x, (64, 2), *bounds, numerics, True, rule, "dynamic", 0.0, 1.0, False, steps=1)


def test_offsets_of_64_bits_have_the_bits_of_the_cpu(monkeypatch):
    """As for tensors of more than 2^31 elements."""
    monkeypatch.setattr(tiles, "_LARGEST_OFFSET", 0)
    x, on = data("float32"), grid(CUTS["middle"], "onnx", CODES[4])
    packed, _ = both("quantize_packed", x, on, 4)
    for call in (
        ("fake_quantize", x, on, PACKED), ("learned_backward", torch.ones_like(x), x, on, 1.0),
        ("min_max", x, (6, 1, 1, 1)),
        ("quantize_packed", x, on, 4), ("dequantize_packed", packed, on, x.shape, 4, torch.float32),
        ("mask_backward", x, torch.full((210,), 0x5A, dtype=torch.uint8), None, False),
    ):  # fmt: skip
        assert_same(*both(*call), call[0])
    whole = torch.nan_to_num(x)
    for blocks, values in (((), whole.flatten()[:1677].repeat(4)), ((6, 14, 2, 1), whole), ((1, 14, 1, 1), whole)):
        observed(values, blocks, -128, 127, "onnx", False, "any", "min_max", 0.3, 1e-7, False)


# --- the choice -----------------------------------------------------------------------------------


def test_calls_that_the_kernels_do_not_handle_run_the_formula():
    x = data("float32")
    whole, wide = grid((), "onnx"), grid((), "onnx")._replace(qmax=2**31 - 1)
    assert gpu_kernels.supports(x, whole)
    for other, on in (
        (x.double(), whole),
        (x[:0], whole),
        (x, wide),
        (x, grid((14,), "torch_channel", zero=torch.float16)),
    ):
        assert not gpu_kernels.supports(other, on)
    options = tensor_kernels.ObserverOptions(0, 15, "q4_k", False, "q4_k", "dynamic", 0.0, 1.0, False)
    assert not gpu_kernels.supports_observing(data("float32", shape=(2, 256)), torch.zeros(2, 8), options)
    q4_0 = options._replace(numerics="q4_0", scale_rule="q4_0")
    assert gpu_kernels.supports_observing(data("float32", shape=(2, 256)), torch.zeros(2, 8), q4_0)
    assert not gpu_kernels.supports_observing(data("float32", shape=(256, 2)), torch.zeros(8, 2), q4_0)
    for call in (lambda m: m.fake_quantize(x.double(), whole, PACKED), lambda m: m.fake_quantize(x, wide, PACKED)):
        assert_same(call(tensor_kernels), call(gpu_kernels))
