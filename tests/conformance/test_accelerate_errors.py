"""Under `accelerate`, arguments that torch refuses still raise torch's own exception and message."""

import math

import pytest

import fakequant
from accelerated import (  # noqa: F401
    FUSED,
    FUSED_ROWS,
    OPERATORS,
    ORDINARY,
    assert_same_tensors,
    by_operator,
    copies,
    decelerated,
    int64,
)
from torch_bridge import aten, torch

OTHER_FLOATS = (torch.float64, torch.float16, torch.bfloat16)
OTHER_DTYPES = (*OTHER_FLOATS, torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64)


def wrong_values(good):
    if isinstance(good, torch.Tensor):
        yield from (good.to(dtype) for dtype in OTHER_DTYPES if dtype != good.dtype)
        for shape in ((), (0,), (3,), (1, 1), (6,), (3, 2), (2, 0), (1, 2, 3)):
            yield torch.ones(shape, dtype=good.dtype)
        yield from (torch.full_like(good, value) for value in (-100, 100))
        if good.is_floating_point():
            yield from (torch.full_like(good, value) for value in (torch.nan, torch.inf, 0))
            yield good.clone().requires_grad_()
        yield from ("a", 1, 1.5, [1.0])
    elif isinstance(good, bool):
        yield from (None, "a", 1, not good)
    elif isinstance(good, float):
        yield from (None, "a", 1j, [1.0], 2, False, math.nan, math.inf, 0.0, -0.1, 1e39, 2**2000)
    else:
        yield from (None, "a", 1.5, True, [3], -1, 1, 2, 9, -9, 100, -100, 2**24 + 1, 2**31, -(2**31), 2**63)


def outcome(operator, arguments):
    try:
        getattr(aten, operator)(*copies(arguments))
    except Exception as error:
        return type(error).__name__, str(error)
    return "accepted"


def works_where_torch_refuses(operator, argument, value):
    """Whether this is a float dtype that only torch refuses; see docs/numerics.md."""
    if not isinstance(value, torch.Tensor) or value.dtype not in OTHER_FLOATS:
        return False
    return "learnable" in operator


def makes_torch_write_outside_its_arrays(argument, value, rows):
    if argument.startswith("running"):
        return isinstance(value, torch.Tensor) and value.numel() < rows
    if rows < 2:
        return False
    if argument == "ch_axis":
        return type(value) is int and value < 0
    return argument == "input" and isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) > rows


def is_0d_scale_of_the_fused_observer(operator, argument, value):
    """Whether this is the case tested separately below."""
    is_0d = isinstance(value, torch.Tensor) and value.dim() == 0
    return is_0d and "fused" in operator and argument in ("scale", "zero_point")


def wrong_calls(operator, arguments):
    rows = arguments["running_min"].numel() if "running_min" in arguments else 0
    for argument, good in arguments.items():
        for value in wrong_values(good):
            if not (
                works_where_torch_refuses(operator, argument, value)
                or makes_torch_write_outside_its_arrays(argument, value, rows)
                or is_0d_scale_of_the_fused_observer(operator, argument, value)
            ):
                yield arguments | {argument: value}


def assert_same_outcomes(operator, arguments):
    calls = list(wrong_calls(operator, arguments))
    expected = [outcome(operator, call) for call in calls]
    with fakequant.accelerate():
        actual = [outcome(operator, call) for call in calls]
    for e, a, call in zip(expected, actual, calls, strict=True):
        assert e == a, call
    assert sum(e != "accepted" for e in expected) > len(arguments)


@pytest.mark.filterwarnings("ignore")
@by_operator
def test_accelerated_operators_refuse_wrong_arguments_with_torchs_errors(operator):
    assert_same_outcomes(operator, ORDINARY[operator])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("base", [FUSED, FUSED_ROWS], ids=["per_tensor", "per_row"])
@pytest.mark.parametrize("switches", [(1, 1), (1, 0), (0, 1), (0, 0)], ids=str)
def test_the_accelerated_fused_observer_refuses_wrong_arguments_with_torchs_errors(switches, base):
    flags = dict(zip(("observer_on", "fake_quant_on"), map(int64, switches), strict=True))
    assert_same_outcomes("_fused_moving_avg_obs_fq_helper", base | flags)


@pytest.mark.parametrize("operator", [name for name in OPERATORS if name.endswith("_backward")])
def test_accelerated_backward_operators_refuse_none_with_torchs_errors(operator):
    for argument in ("grad", "mask", "input"):
        if argument in ORDINARY[operator]:
            changed = ORDINARY[operator] | {argument: None}
            expected = outcome(operator, changed)
            with fakequant.accelerate():
                assert outcome(operator, changed) == expected


@pytest.mark.parametrize("argument", ["scale", "zero_point"])
def test_the_accelerated_fused_observer_refuses_0d_scales_with_torchs_errors(argument):
    changed = FUSED | {argument: FUSED[argument].reshape(())}
    expected = outcome("_fused_moving_avg_obs_fq_helper", changed)
    with fakequant.accelerate():
        assert outcome("_fused_moving_avg_obs_fq_helper", changed) == expected


REFUSED_FLOATS = [
    (argument, dtype)
    for argument in ("grad", "input", "scale", "zero_point")
    for dtype in OTHER_FLOATS
    if (argument, dtype) != ("input", torch.bfloat16)
]


@pytest.mark.parametrize(("argument", "dtype"), REFUSED_FLOATS, ids=str)
@pytest.mark.parametrize("operator", [name for name in OPERATORS if "learnable" in name])
def test_accelerated_learned_gradients_accept_float_dtypes_that_torch_refuses(operator, argument, dtype):
    changed = ORDINARY[operator] | {argument: ORDINARY[operator][argument].to(dtype)}
    assert outcome(operator, changed) != "accepted"
    with fakequant.accelerate():
        actual = getattr(aten, operator)(*changed.values())
        if changed["input"].dtype == torch.float64:
            assert [t.dtype for t in actual] == [torch.float64, torch.float32, torch.float32]
        else:
            in_float32 = changed | {argument: changed[argument].float()}
            assert_same_tensors(getattr(aten, operator)(*in_float32.values()), actual)
