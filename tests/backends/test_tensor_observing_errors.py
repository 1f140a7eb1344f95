"""Errors of observing, ranges and codes with tensors; the running range is unchanged after an error."""

import numpy as np
import pytest

import fakequant as fq

torch = pytest.importorskip("torch")

X = torch.arange(12, dtype=torch.float32).view(2, 6) - 3
SPEC = fq.QuantSpec()
PER_CHANNEL = fq.QuantSpec(symmetric=False, axis=0)
RUNNING = {
    "float64": torch.zeros(2, dtype=torch.float64),
    "too many": torch.zeros(3),
    "an array": np.zeros(2, np.float32),
    "a number": 0.0,
}


@pytest.mark.parametrize("name", ["running_min", "running_max"])
@pytest.mark.parametrize("bad", RUNNING.values(), ids=RUNNING)
def test_unusable_running_range_tensor_is_refused_and_the_other_unchanged(bad, name):
    running = {"running_min": torch.full((2,), -1.0), "running_max": torch.full((2,), 1.0)}
    running[name] = bad
    with pytest.raises(
        ValueError, match=rf"`{name}` must be a float32 tensor with one entry per block, shape \(2,\), got"
    ):
        fq.observe_fake_quantize(X, PER_CHANNEL, *running.values())
    other = running["running_max" if name == "running_min" else "running_min"]
    assert other.abs().tolist() == [1, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(averaging_constant=1.5), "`averaging_constant` must be between 0 and 1, got 1.5"),
        (dict(averaging_constant=np.nan), "`averaging_constant` must be between 0 and 1, got nan"),
        (dict(eps=0), "`eps` must be finite and greater than 0 in float32, got 0"),
        (dict(eps=np.inf), "`eps` must be finite and greater than 0 in float32, got inf"),
        (dict(mask="bits"), '`mask` must be None, "packed" or "bool", got \'bits\''),
        (dict(mask="packed", gradient="pass"), 'needs gradient="clipped", got "pass"'),
        (dict(gradient="none"), '`gradient` must be "clipped" or "pass", got \'none\''),
    ],
    ids=str,
)
def test_invalid_observing_options_are_refused_and_nothing_is_updated(options, message):
    state = torch.full((1,), -1.0), torch.full((1,), 1.0)
    for x in (X, X.clone().requires_grad_(), torch._neg_view(X)):
        with pytest.raises(ValueError, match=message):
            fq.observe_fake_quantize(x, SPEC, *state, **options)
    assert [t.item() for t in state] == [-1, 1]


@pytest.mark.parametrize(
    "x", [X[:, :0], X * np.nan, (X * np.nan).t().contiguous().t()], ids=["empty", "NaN", "transposed"]
)
def test_observe_fake_quantize_before_any_finite_value_is_an_error(x):
    state = torch.full((2,), np.inf), torch.full((2,), -np.inf)
    for data in (x, x.clone().requires_grad_()):
        with pytest.raises(ValueError, match=r"2 of 2 blocks have not seen a finite value.*\nObserve data before"):
            fq.observe_fake_quantize(data, PER_CHANNEL, *state)
    half = torch.tensor([-1.0, np.inf]), torch.tensor([1.0, -np.inf])
    with pytest.raises(ValueError, match=r"1 of 2 blocks have not seen a finite value"):
        fq.observe_fake_quantize(x, PER_CHANNEL, *half)
    assert [t.tolist() for t in (*state, *half)] == [[np.inf] * 2, [-np.inf] * 2, [-1, np.inf], [1, -np.inf]]


def test_running_range_with_overlapping_memory_is_refused():
    lo, hi = torch.full((1,), -1.0).expand(2), torch.full((2,), 1.0)
    with pytest.raises(ValueError, match=r"`running_min` is updated in place.*pass `running_min.clone\(\)`"):
        fq.observe_fake_quantize(X * 9, PER_CHANNEL, lo, hi)
    assert (lo.tolist(), hi.tolist()) == ([-1, -1], [1, 1])


def test_choose_qparams_refuses_invalid_range_tensors():
    for lo, hi in ((np.inf, -np.inf), (np.nan, 1.0), (0.0, np.inf), (1.0, 0.0)):
        with pytest.raises(
            ValueError, match=r"`lo` and `hi` must be finite with lo <= hi, got lo=.*\n.*observe data first"
        ):
            fq.choose_qparams(torch.tensor(lo), torch.tensor(hi), SPEC)
        with pytest.raises(ValueError, match=r"`lo` and `hi` must be finite .* at index 1"):
            fq.choose_qparams(torch.tensor([0.0, lo]), torch.tensor([1.0, hi]), SPEC)


def test_code_tensors_of_the_wrong_dtype_or_shape_are_refused():
    q = torch.zeros(3, dtype=torch.int16)
    with pytest.raises(
        TypeError, match=r"`q` must hold int8 codes for this spec, got int16.\nPacked codes need `shape`"
    ):
        fq.dequantize(q, 0.1, 0, SPEC)
    with pytest.raises(ValueError, match=r"are uint8 of shape \(2,\), got shape \(3,\)"):
        fq.dequantize(q.to(torch.uint8), 0.1, 0, fq.QuantSpec(bits=4), shape=(4,))
    with pytest.raises(ValueError, match="6-bit and 4-bit floats can be packed, got 3 bits of the format 'int'"):
        fq.quantize(X, 0.1, 0, fq.QuantSpec(bits=3), packed=True)
    with pytest.raises(TypeError, match=r"`dtype` must be float32, float64, bfloat16 or float16, got int32"):
        fq.dequantize(q.to(torch.int8), 0.1, 0, SPEC, dtype=torch.int32)


def test_gradient_tensor_of_another_shape_or_dtype_is_refused():
    for dy in (X.t(), X.double()):
        with pytest.raises(ValueError, match=r"`dy` must have the shape and dtype of `x`, \(2, 6\) float32, got"):
            fq.fake_quantize_learned_backward(dy, X, 0.1, 0, SPEC)


def test_axis_or_group_size_that_does_not_fit_is_refused():
    for call in (fq.fake_quantize, fq.quantize):
        with pytest.raises(IndexError, match="`axis` 2 is out of range"):
            call(X, torch.ones(2), 0, fq.QuantSpec(axis=2))
        with pytest.raises(ValueError, match=r"`group_size` 4 does not divide axis -1 of length 6"):
            call(X, torch.ones(2, 1), 0, fq.QuantSpec(axis=-1, group_size=4))
    with pytest.raises(IndexError, match="`axis` 0 is out of range"):
        fq.fake_quantize(X[0, 0], torch.ones(1), 0, fq.QuantSpec(axis=0))
