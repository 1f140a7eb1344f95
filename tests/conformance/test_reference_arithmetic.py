"""The arithmetic `fakequant.reference` is built on, and the comparison of bits used by the tests."""

import ctypes
import ctypes.util
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from fakequant import reference
from fakequant.testing import cases
from fakequant.testing.assertions import assert_same_bits, assert_same_model, assert_same_state

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's: overflow and NaN are results here


@pytest.mark.parametrize(("dtype", "name"), [(np.float32, "fmaf"), (np.float64, "fma")])
def test_the_reference_fma_equals_the_c_library(dtype, name):
    library = ctypes.util.find_library("m")
    if library is None:
        pytest.skip("no C math library found")
    kind = np.ctypeslib.as_ctypes_type(dtype)
    function = getattr(ctypes.CDLL(library), name)
    function.restype, function.argtypes = kind, [kind] * 3
    rng, size = np.random.default_rng(9), 20000
    integer = np.dtype(f"u{np.dtype(dtype).itemsize}")
    info = np.finfo(dtype)
    specials = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, info.max, info.tiny, info.smallest_subnormal], dtype)
    # All bit patterns, then near cancellation, ties from short integers, specials.
    a, b, c = (rng.integers(0, 2 ** (8 * integer.itemsize), size, dtype=integer).view(dtype) for _ in range(3))
    with np.errstate(all="ignore"):
        near = -(a * b) * (1 + rng.integers(-3, 4, size).astype(dtype) * info.eps)
    c = np.where(rng.random(size) < 0.5, near, c).astype(dtype)
    short = rng.random(size) < 0.2
    a[short], b[short] = rng.integers(1, 2**12, (2, short.sum()))
    b[short] *= dtype(2) ** -rng.integers(0, 30, short.sum()).astype(dtype)
    c[short] = rng.integers(-(2**24), 2**24, short.sum())
    # Just beside a tie of the result: half an ulp of c, times (1 + eps)(1 - eps).
    tie = rng.random(size) < 0.2
    c[tie] = rng.uniform(1, 2, tie.sum())
    sign, up = rng.choice([-1, 1], (2, tie.sum()))
    a[tie], b[tie] = sign * (1 + up * info.eps), (1 - up * info.eps) * info.eps / 2
    for values in (a, b, c):
        places = rng.random(size) < 0.05
        values[places] = rng.choice(specials, places.sum())

    expected = [function(*abc) for abc in zip(*(v.tolist() for v in (a, b, c)), strict=True)]
    assert_same_bits(np.array(expected, dtype), reference.fma(a, b, c))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_reference_round_half_away_equals_rational_rounding(dtype):
    halves = np.arange(-40, 40).astype(dtype) / 2
    large = np.array([2.0**k + h for k in range(20, 54) for h in (-0.5, 0.5, 1)]).astype(dtype)
    v = np.concatenate([halves, large, -large])
    v = np.concatenate([cases.neighbours(v, step) for step in (-1, 0, 1)])

    def exact(value):
        whole = int(abs(Fraction(value)) + Fraction(1, 2))
        return whole if value >= 0 else -whole

    expected = np.array([exact(value) for value in v.tolist()], dtype)
    assert_same_bits(expected + dtype(0), reference.round_half_away(v) + dtype(0))


@pytest.mark.parametrize(
    ("expected", "actual", "message"),
    [
        (np.float32([0.0]), np.float32([-0.0]), r"1 of 1 differ.*0x00000000.*0x80000000"),
        (np.float32([1, 2]), np.float32([1, 3]), r"first at \(1,\): expected 2.0.*got 3.0"),
        (np.float32([np.nan]), np.float32([1]), r"expected nan"),
        (np.float32([1]), np.float64([1]), "dtype"),
        (np.float32([1]), np.float32([[1]]), "shape"),
    ],
)
def test_assert_same_bits_reports_differences(expected, actual, message):
    with pytest.raises(AssertionError, match=message):
        assert_same_bits(expected, actual)
    other_nan = np.uint32([0xFFC00001]).view(np.float32)
    assert_same_bits(np.float32([np.nan]), other_nan)


@pytest.mark.parametrize("name", ["float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int32"])
def test_bits_of_tensors_are_those_of_arrays(name):
    torch = pytest.importorskip("torch")
    tensor = torch.tensor([[1.0, -2.0], [0.5, 0.0]]).to(getattr(torch, name))
    array = np.array([[1.0, -2.0], [0.5, 0.0]]).astype(getattr(ml_dtypes, name, name))
    if name == "float32":
        tensor.requires_grad_()
    assert_same_bits(array, tensor)
    assert_same_bits(array.T, tensor.t())
    with pytest.raises(AssertionError, match=r"y: 1 of 4 differ, first at \(0, 1\): expected -2"):
        assert_same_bits(array, changed(tensor), "y")


def changed(tensor):
    values = tensor.detach().float()
    values[0, 1] = 1
    return values.to(tensor.dtype)


def test_assert_same_state_reports_names_and_values():
    one = {"a": np.float32([1]), "b": None}
    assert_same_state(one, dict(one))
    with pytest.raises(AssertionError, match=r"loaded: expected the names \['a', 'b'\], got \['b', 'a'\]"):
        assert_same_state(one, {"b": None, "a": np.float32([1])}, "loaded")
    with pytest.raises(AssertionError, match=r"loaded, b: expected None, got \[1\.\]"):
        assert_same_state(one, {**one, "b": np.float32([1])}, "loaded")
    with pytest.raises(AssertionError, match="loaded, a: 1 of 1 differ"):
        assert_same_state(one, {**one, "a": np.float32([2])}, "loaded")


def test_assert_same_model_compares_gradients_and_all_buffers():
    torch = pytest.importorskip("torch")
    models = []
    for _ in range(3):
        torch.manual_seed(0)
        models.append(torch.nn.Linear(2, 2))
        models[-1].register_buffer("seen", torch.zeros(1), persistent=False)
    one, with_gradient, with_buffer = models
    assert_same_model(one, with_gradient)
    with_gradient(torch.ones(1, 2)).sum().backward()
    with_buffer.seen += 1
    with pytest.raises(AssertionError, match="gradient of weight: expected None"):
        assert_same_model(one, with_gradient)
    with pytest.raises(AssertionError, match="seen: 1 of 1 differ"):
        assert_same_model(one, with_buffer)
