"""Values that torch refuses raise torch's exception and message, with the same order of checks.

Messages call arrays `Tensor`, as torch's do. Two things differ on purpose:

* arguments of a wrong type, and a wrong number of them, get Python's errors instead of those of torch's parser;
* a call of the fused observer with wrong arguments leaves the state unchanged.

Differences in releases other than torch 2.13 are listed in `releases.py`.

The last tests of this file cover calls in which torch fails an internal assertion, refuses a float dtype it could
compute, or writes outside its arrays.
"""

import numpy as np
import pytest

import releases
from aten_calls import (
    FUNCTIONS,
    FUSED,
    FUSED_ROWS,
    LEARNABLE,
    LEARNABLE_CHANNEL,
    PER_CHANNEL,
    QPARAMS,
    f32,
    i32,
    i64,
    ones,
    outcome,
    to_torch,
    torch_function,
    x,
)
from fakequant import torch_ops
from torch_bridge import BF16


def assert_same_outcome(name, changed, base=None):
    arguments = (FUNCTIONS[name] if base is None else base) | changed
    if set(arguments) != set(FUNCTIONS[name]):
        raise KeyError(f"{set(arguments) ^ set(FUNCTIONS[name])}: not an argument of {name}")
    expected = outcome(torch_function(name), [to_torch(a) for a in arguments.values()])
    actual = outcome(
        getattr(torch_ops, name), [a.copy() if isinstance(a, np.ndarray) else a for a in arguments.values()]
    )
    if expected is not None and (expected[0] == "TypeError" or "Declaration: aten::" in expected[1]):
        return  # from torch's parser
    assert actual == expected or releases.is_known(name, actual, expected), changed


# --- types -----------------------------------------------------------------------------------


@pytest.mark.parametrize("quant_max", [None, "7", 7.5, [7], np.float32(7)], ids=repr)
@pytest.mark.parametrize("name", [name for name, base in FUNCTIONS.items() if "quant_max" in base])
def test_ranges_that_are_not_integers_are_refused(name, quant_max):
    with pytest.raises(TypeError, match="integer"):
        getattr(torch_ops, name)(*(FUNCTIONS[name] | {"quant_max": quant_max}).values())


@pytest.mark.parametrize("argument", ["running_min", "running_max", "scale", "zero_point"])
def test_state_of_the_fused_observer_that_is_not_an_array_is_refused(argument):
    with pytest.raises(TypeError, match=f"`{argument}` is updated in place and must be an array, got list"):
        torch_ops.fused_moving_avg_obs_fake_quant(*(FUSED | {argument: [1.0]}).values())


@pytest.mark.parametrize("name", [name for name, base in FUNCTIONS.items() if "input" in base])
def test_inputs_of_unsupported_dtypes_raise_torchs_errors(name):
    for kind in ("int8", "uint8", "int16", "int32", "int64", "bool", "complex64", "complex128", "uint16"):
        assert_same_outcome(name, {"input": x.astype(kind)})
        if "per_channel" not in name:
            assert_same_outcome(name, {"input": np.zeros(0, kind)})


def test_mixed_number_and_array_parameters_succeed_or_fail_as_in_torch():
    arrays = (f32(0.1), f32(0.1)[0:1].reshape(()), i32(0), i32(0).reshape(()), f32(1, 2))
    for scale in (0.1, 1, True, np.float32(0.1), *arrays):
        for zero_point in (0, 2**63, np.int64(3), *arrays):
            changed = {"scale": scale, "zero_point": zero_point}
            assert_same_outcome("fake_quantize_per_tensor_affine", changed)


# --- wrong values ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fake_quantize_per_tensor_affine", "fake_quantize_per_tensor_affine_cachemask"])
def test_wrong_per_tensor_numbers_raise_torchs_errors(name):
    for data in (x, x.astype("int32"), np.zeros(0, "float32")):
        for zero_point in (0, -9, 9, 2**31):
            for bounds in ((-8, 7), (8, 7), (0, 0), (-(2**63), 2**63 - 1)):
                changed = dict(zip(("quant_min", "quant_max"), bounds, strict=True))
                assert_same_outcome(name, {"input": data, "zero_point": zero_point, **changed})


SCALES = [f32(), f32(1, 2), ones(1, 1), ones(1, 2), ones(), ones(1, dtype="float16")]
SCALES += [np.array([v]) for v in (1e39, -1e39, np.inf, np.nan, 1 + 1j, 2**62, True)]
ZEROS = [f32(), i32(1, 2), np.uint64([2**63])]
ZEROS += [np.array([v]) for v in (1e39, np.nan, np.inf, -0.5, 1 + 1j, 1 + 0j, True, 2**31, -(2**31) - 1)]
ZEROS += [np.array([v]) for v in (2147483648.0, 2147483647.5, -2147483648.5, -2147483649.0)]


def test_wrong_per_tensor_arrays_raise_torchs_errors():
    name = "fake_quantize_per_tensor_affine_cachemask_tensor_qparams"
    for data, quant_max in ((x, 7), (x, -9), (x.astype("int32"), 7)):
        base = QPARAMS | {"input": data, "quant_max": quant_max}
        for scale in SCALES:
            assert_same_outcome(name, {"scale": scale}, base)
            public = {k: v for k, v in base.items() if k != "fake_quant_enabled"}
            assert_same_outcome("fake_quantize_per_tensor_affine", {"scale": scale}, public)
        for zero_point in ZEROS:
            assert_same_outcome(name, {"zero_point": zero_point}, base)
            # The zero point is checked before the scale.
            assert_same_outcome(name, {"zero_point": zero_point, "scale": np.array([1e39])}, base)
            assert_same_outcome(name, {"fake_quant_enabled": zero_point, "scale": np.array([1e39])}, base)


@pytest.mark.parametrize("per", ["tensor", "channel"])
def test_wrong_masks_raise_torchs_errors(per):
    name = f"fake_quantize_per_{per}_affine_cachemask_backward"
    shapes = [(2, 3), (3, 2), (6,), (1, 6), (6, 1), (2, 3, 1), (1, 2, 3), (0,), (0, 3), (2, 2), (4, 1), (1, 4), ()]
    for grad_shape in shapes:
        for mask_shape in shapes:
            for kind in ("bool", "uint8", "float32"):
                changed = {"grad": ones(*grad_shape), "mask": ones(*mask_shape, dtype=kind)}
                assert_same_outcome(name, changed)
    for kind in ("int32", "bool", "complex64", "float64"):
        assert_same_outcome(name, {"grad": x.astype(kind)})


CHANNEL_ARRAYS = [ones(2, dtype=k) for k in ("int8", "uint8", "int16", "int32", "int64", "bool", "float16", "float64")]
CHANNEL_ARRAYS += [f32(1), f32(), ones(3), ones(2, 1), ones(), i32(9, 0), i32(0, -9), f32(9, np.nan), i32()]


@pytest.mark.parametrize("name", ["fake_quantize_per_channel_affine", "fake_quantize_per_channel_affine_cachemask"])
def test_wrong_channel_parameters_raise_torchs_errors(name):
    for axis in (-3, -2, -1, 0, 1, 2, 2**63 - 1):
        for bounds in ((-8, 7), (8, 7)):
            base = PER_CHANNEL | {"axis": axis, "quant_min": bounds[0], "quant_max": bounds[1]}
            for array in CHANNEL_ARRAYS:
                assert_same_outcome(name, {"scale": array}, base)
                assert_same_outcome(name, {"zero_point": array}, base)
                assert_same_outcome(name, {"scale": array, "zero_point": array}, base)
    for shape in ((), (0, 2), (2, 0), (0,), (2,)):
        for axis in (-1, 0, 1):
            for n in (0, 1, 2):
                for zero_dtype in ("int32", "float32"):
                    parameters = {"scale": ones(n), "zero_point": ones(n, dtype=zero_dtype), "axis": axis}
                    assert_same_outcome(name, {"input": ones(*shape), **parameters})


def test_wrong_learned_per_tensor_parameters_raise_torchs_errors():
    name = "fake_quantize_learnable_per_tensor_affine"
    arrays = [
        f32(),
        f32(1, 2),
        ones(1, 1),
        ones(1, 2),
        ones(),
        ones(1, 0),
        ones(0, 2),
        np.array([1e39]),
        np.array([1 + 1j]),
    ]
    arrays += [f32(v) for v in (9, -9, 1e10, np.nan, -np.inf, 2**31)]
    for bounds in ((-8, 7), (8, 7), (5, 7), (-8, -1), (-(2**31), 2**31 - 1), (-(2**63), 2**63 - 1)):
        base = LEARNABLE | dict(zip(("quant_min", "quant_max"), bounds, strict=True))
        for array in arrays:
            for changed in ({"scale": array}, {"zero_point": array}, {"scale": array, "zero_point": array}):
                assert_same_outcome(name, changed, base)
                if all(a.dtype == np.float32 for a in changed.values()):
                    assert_same_outcome(f"{name}_backward", changed, {"grad": x, **base})
    for shape in ((6,), (3, 2), (5,), (1, 6), (2, 3, 1), (1, 2, 3), (6, 1)):
        assert_same_outcome(f"{name}_backward", {"grad": ones(*shape)})
        assert_same_outcome(f"{name}_backward", {"grad": ones(*shape), "quant_min": 1})
    for argument in ("grad", "input", "scale", "zero_point"):
        for kind in ("int32", "int64", "bool", "complex64"):
            assert_same_outcome(f"{name}_backward", {argument: FUNCTIONS[f"{name}_backward"][argument].astype(kind)})


def test_wrong_learned_per_channel_parameters_raise_torchs_errors():
    name = "fake_quantize_learnable_per_channel_affine"
    arrays = [f32(1), f32(), ones(3), ones(2, 1), ones(), f32(9, 9)]
    arrays += [f32(v, 0) for v in (np.nan, np.inf, -9, 2**31, 2.0**63)]
    for bounds in ((-8, 7), (8, 7), (5, 7), (-8, -1), (-(2**31), 2**31 - 1), (-(2**63), 2**63 - 1)):
        for axis in (0, 1, 2, -2, -1):
            base = LEARNABLE_CHANNEL | {"quant_min": bounds[0], "quant_max": bounds[1], "axis": axis}
            for array in arrays:
                for changed in ({"scale": array}, {"zero_point": array}, {"scale": array, "zero_point": array}):
                    assert_same_outcome(name, changed, base)
                    assert_same_outcome(f"{name}_backward", changed, {"grad": x, **base})
    for shape in ((6,), (3, 2), (1, 2, 3)):
        assert_same_outcome(f"{name}_backward", {"grad": ones(*shape), "quant_min": 1})
    for argument in ("grad", "input", "scale", "zero_point"):
        for kind in ("int32", "bool", "complex64"):
            changed = {argument: FUNCTIONS[f"{name}_backward"][argument].astype(kind)}
            assert_same_outcome(f"{name}_backward", changed)
            if argument != "grad":
                assert_same_outcome(name, changed)


@pytest.mark.parametrize("base", [FUSED, FUSED_ROWS], ids=["per_tensor", "per_row"])
@pytest.mark.parametrize("switches", [(1, 1), (1, 0), (0, 1), (0, 0)], ids=str)
@pytest.mark.parametrize("name", ["fused_moving_avg_obs_fake_quant", "fused_moving_avg_obs_fq_helper"])
def test_wrong_state_of_the_fused_observer_raises_torchs_errors(name, switches, base):
    observe, quantize = switches
    base = base | {"observer_on": i64(observe), "fake_quant_on": i64(quantize)}
    states = [f32(1, 2), f32(1, 2, 3), ones(), ones(1, 1), ones(2, 1)]
    states += [ones(n, dtype=k) for n in (1, 2) for k in ("float64", "float16", "int32", "int64", "bool")]
    rows = base["per_row_fake_quant"]
    for argument in ("running_min", "running_max", "scale", "zero_point"):
        for array in states:
            # Torch would write beyond the end of a running range that is too short.
            if not (rows and "running" in argument and array.size < 2):
                assert_same_outcome(name, {argument: array}, base)
    for array in (f32(np.nan), f32(0.5), i64(1, 1), i64(), i64(2**40), np.array([1e30]), np.array(1), np.array([True])):
        assert_same_outcome(name, {"observer_on": array}, base)
        assert_same_outcome(name, {"fake_quant_on": array}, base)
    for shape in ((), (0,), (2,), (2, 0), (0, 2), (3, 2), (2, 2, 2)):
        if not (rows and observe and shape and shape[0] > 2):
            assert_same_outcome(name, {"input": ones(*shape)}, base)
    for kind in ("float64", "float16", BF16, "int32", "complex64", "uint16"):
        assert_same_outcome(name, {"input": x.astype(kind)}, base)
    for axis in (0, 1, 2, 5, *(() if rows else (-1, -2, -5))):
        assert_same_outcome(name, {"ch_axis": axis}, base)
    assert_same_outcome(name, {"quant_min": 9, "quant_max": 7}, base)
    assert_same_outcome(name, {"input": np.where(x > 0.5, np.float32(np.nan), x)}, base)


# --- deliberate differences from torch -------------------------------------------------------


def test_per_channel_functions_accept_a_bfloat16_scale():
    scale = np.array([0.1, 0.2]).astype(BF16)
    y = torch_ops.fake_quantize_per_channel_affine(x, scale, i32(0, 1), 0, -8, 7)
    same = torch_ops.fake_quantize_per_channel_affine(x, scale.astype(np.float32), i32(0, 1), 0, -8, 7)
    assert np.array_equal(y, same)


@pytest.mark.parametrize("kind", ["float16", "float64", BF16])
@pytest.mark.parametrize("argument", ["grad", "input", "scale", "zero_point"])
@pytest.mark.parametrize("per", ["tensor", "channel"])
def test_learned_gradients_accept_every_float_dtype(per, argument, kind):
    name = f"fake_quantize_learnable_per_{per}_affine_backward"
    arguments = FUNCTIONS[name] | {argument: FUNCTIONS[name][argument].astype(kind)}
    dx, dscale, dzero_point = getattr(torch_ops, name)(*arguments.values())
    assert dx.dtype == (np.float64 if argument == "input" and kind == "float64" else np.float32)
    assert dscale.dtype == dzero_point.dtype == np.float32


@pytest.mark.parametrize("per", ["tensor", "channel"])
def test_learned_gradients_of_an_empty_input_are_zero(per):
    name = f"fake_quantize_learnable_per_{per}_affine_backward"
    arguments = FUNCTIONS[name] | {"input": ones(2, 0), "grad": ones(2, 0)}
    dx, dscale, dzero_point = getattr(torch_ops, name)(*arguments.values())
    assert dx.shape == (2, 0)
    assert dscale.tolist() == dzero_point.tolist() == [0] * arguments["scale"].size


def test_a_numpy_scalar_is_accepted_as_input():
    y = torch_ops.fake_quantize_per_tensor_affine(np.float32(0.26), 0.1, 0, -8, 7)
    assert type(y) is np.ndarray


def test_the_fused_observer_refuses_a_running_range_that_is_too_short():
    for state in (f32(), f32(np.inf)):
        arguments = FUSED_ROWS | {"running_max": state}
        with pytest.raises(RuntimeError, match="dimensions of scale and zero-point are not consistent"):
            torch_ops.fused_moving_avg_obs_fake_quant(*arguments.values())
    with pytest.raises(RuntimeError, match="only supported on axis == 0"):
        torch_ops.fused_moving_avg_obs_fake_quant(*(FUSED_ROWS | {"ch_axis": -1}).values())


def test_an_error_leaves_the_state_of_the_fused_observer_unchanged():
    state = {k: v.copy() for k, v in FUSED.items() if isinstance(v, np.ndarray)}
    arguments = FUSED | state | {"quant_min": 9, "quant_max": 7}
    with pytest.raises(RuntimeError):
        torch_ops.fused_moving_avg_obs_fake_quant(*arguments.values())
    for name, array in state.items():
        assert np.array_equal(array, FUSED[name])
