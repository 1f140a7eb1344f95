"""`verify` explains why codes differ: every reason, from numbers that have it."""

import pytest

import fakequant as fq

torch = pytest.importorskip("torch")
nn = torch.nn
recipes = pytest.importorskip("fakequant.recipes")
explain = pytest.importorskip("fakequant._verify.explain_codes")
values = pytest.importorskip("fakequant._convert.golden.tracked_codes")
arithmetics = pytest.importorskip("fakequant._runtimes.arithmetic").arithmetics()

UINT8 = fq.QuantSpec(bits=8, signed=False, symmetric=False)


def grid(scale, zero_point=0):
    return values.GridOf(torch.tensor(scale), torch.tensor(zero_point, dtype=torch.int32), UINT8)


def saturating():
    """Returns sums of two largest products, which saturate on x86 without VNNI."""
    layer = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        layer.weight.fill_(127.0)
    config = recipes.int8().rule(activation_observer=fq.observers.Fixed(0.0, 255.0))
    golden = fq.convert(fq.prepare(nn.Sequential(layer), config, torch.ones(1, 2)))
    codes = torch.full((1, 2), 255.0)
    return values.Accumulated(torch.tensor([[2 * 255 * 127.0]]), torch.tensor(1.0), golden[0], codes, grid(1.0))


def why(origin, x, to, before, golden, runtime):
    return explain.why_runtime(origin, x, to, before, torch.tensor(golden), torch.tensor(runtime))


def test_codes_of_saturated_sums_are_explained_by_saturation():
    sums, to = saturating(), grid(512.0)
    # 64770 / 512 and 32767 / 512
    assert why(sums, sums.sums, to, [], [[127.0]], [[64.0]]) == explain.SATURATION
    assert why(values.Rectified(sums), sums.sums, to, [], [[127.0]], [[64.0]]) == explain.SATURATION
    assert why(sums, sums.sums, to, [], [[127.0]], [[65.0]]) == explain.UNKNOWN


def test_saturation_before_a_float_operation_is_explained(monkeypatch):
    monkeypatch.setattr(explain, "cpu_saturates", lambda: True)
    x = torch.tensor([[1.0]])
    assert why(None, x, grid(0.1), [saturating()], [[10.0]], [[3.0]]) == explain.SATURATION
    assert why(None, x, grid(0.1), [], [[10.0]], [[3.0]]) == explain.UNKNOWN


def test_fused_and_unfused_arithmetic_are_told_apart():
    generator = torch.Generator().manual_seed(0)
    scale, to = torch.tensor(0.1), grid(0.2)
    sums = values.Accumulated(torch.randint(0, 500, (4096,), generator=generator).double(), scale)
    fused, single = (a.from_sums(sums.sums, scale, to) for a in (arithmetics["onnxruntime"], arithmetics["reference"]))
    assert not torch.equal(fused, single)
    x = sums.sums.float() * scale
    assert explain.why_runtime(sums, x, to, [], fused, single) == explain.NOT_FUSED
    assert explain.why_runtime(sums, x, to, [], single, fused) == explain.FUSED


def test_multiplication_by_the_reciprocal_is_explained():
    to = grid(0.7)
    x = (torch.arange(255) + 0.5) * to.scale  # at ties, where dividing and multiplying differ
    divided = values.quantized(x, to)
    multiplied = torch.round(x * (1 / to.scale)).clamp(0, 255)
    assert not torch.equal(divided, multiplied)
    assert explain.why_runtime(None, x, to, [], divided, multiplied) == explain.RECIPROCAL


def test_tie_is_one_step_apart_within_the_tolerance_of_the_middle():
    """A tie needs codes one step apart and a value within the tolerance of the middle."""
    x, to = torch.tensor([0.25 + 1e-6, 0.25 + 1e-6, 0.3]), grid(0.5)
    golden, runtime = torch.tensor([1.0, 2.0, 1.0]), torch.zeros(3)
    assert explain.ties(x, to, torch.full((3,), 2e-6), golden, runtime).tolist() == [True, False, False]
    assert not explain.ties(x, to, torch.full((3,), 5e-7), golden, runtime).any()


def test_codes_within_rounding_are_those_of_inputs_within_the_tolerance():
    x, to = torch.tensor([1.0, 1.0, 1.0]), grid(0.5, zero_point=3)
    codes = torch.tensor([5.0, 7.0, 7.0])  # the inputs 1.75 and more have the code 7
    assert explain.within(x, to, torch.tensor([0.0, 0.75, 0.74]), codes).tolist() == [True, True, False]


def test_ties_of_equal_inputs_count_once_only_if_their_codes_differ():
    """If all equal inputs have the other code, the other model has another rule, and each counts."""
    x, at_tie = torch.tensor([0.5, 0.5, 0.5, 1.5, 1.5]), torch.tensor([True, True, False, True, True])
    assert explain.repeated_ties(x, torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]), at_tie) == 1
    assert explain.repeated_ties(x, torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0]), at_tie) == 0


def test_sums_beyond_32_bits_are_explained_by_overflow():
    sums = values.Accumulated(torch.tensor([2.0**31 + 300, 5.0], dtype=torch.float64), torch.tensor(1.0))
    to = grid(2.0**24, zero_point=128)
    # 2^31 + 300 wraps to 300 - 2^31 in 32 bits: code 0 instead of 255
    assert why(sums, sums.sums.float(), to, [], [255.0, 128.0], [0.0, 128.0]) == explain.OVERFLOW
    assert explain.why_sums([sums]) == explain.OVERFLOW


def test_nan_is_explained():
    x = torch.tensor([torch.nan, 1.0])
    assert why(None, x, grid(0.5), [], [torch.nan, 2.0], [0.0, 2.0]) == explain.NAN


def test_unrounded_bias_of_the_prepared_model_is_explained():
    sums = values.Accumulated(torch.tensor([7.0]), torch.tensor(0.1))
    x, codes = torch.tensor([0.73]), (torch.tensor([1.0]), torch.tensor([0.0]))
    # x is 0.03 from the middle between two codes, less than half a step of the sums, 0.05
    assert explain.why_prepared(sums, x, grid(1.4), [], *codes) == explain.BIAS
    assert explain.why_prepared(None, x, grid(1.4), [], *codes) == explain.UNKNOWN
