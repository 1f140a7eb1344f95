"""fakequant's own functions have the same bits on tensors of any layout as on NumPy arrays."""

import numpy as np
import pytest

import fakequant as fq
from fakequant.testing import cases
from fakequant.testing.assertions import assert_same_bits
from tensor_data import (
    BLOCKS,
    DENSE,
    LAYOUTS,
    SHAPE,
    array,
    assert_like,
    data,
    few_rules,
    grid,
    rules,
    unchanged as unchanged,
)
from torch_bridge import to_numpy, to_torch, torch

pytestmark = pytest.mark.usefixtures("torch_on_one_thread")
by_layout = pytest.mark.parametrize("layout", LAYOUTS)
by_blocks = pytest.mark.parametrize("where", BLOCKS.values(), ids=BLOCKS)


def packbits(inside):
    return np.packbits(inside, bitorder="little")


@by_blocks
@by_layout
def test_forward_and_masks_of_tensors_equal_those_of_arrays(layout, where, unchanged):
    for spec, dtype in rules(where):
        x = data(layout, dtype)
        s, z = grid(x, spec)
        tensors = unchanged(to_torch(s), to_torch(z), x)[:2]
        expected, inside = fq.fake_quantize(array(x), s, z, spec, mask="bool")

        y, mask = fq.fake_quantize(x, *tensors, spec, mask="bool")
        assert_like(expected, y, x, "y with a bool mask", spec, dtype)
        assert_like(inside, mask, x, "bool mask", spec, dtype)
        y, bits = fq.fake_quantize(x, *tensors, spec, mask="packed")
        assert_like(expected, y, x, "y with a packed mask", spec, dtype)
        assert_same_bits(packbits(inside), to_numpy(bits), "packed mask", spec, dtype)
        assert y.requires_grad == x.requires_grad
        assert not mask.requires_grad
        assert not bits.requires_grad
        forms = [tensors, (s, z), (tensors[0].double(), tensors[1].long())]
        if not where:
            forms += [(float(s), int(z)), (s.item(), tensors[1]), (s.reshape(1), tensors[1].reshape(1))]
        for form in forms:
            assert_like(expected, fq.fake_quantize(x, *form, spec), x, "y", spec, dtype, form)


@by_layout
def test_backward_of_tensors_from_either_mask_equals_that_of_arrays(layout, unchanged):
    for spec, dtype in rules({}):
        (dy,) = unchanged(LAYOUTS[layout](to_torch(cases.gradients(np.prod(SHAPE), dtype).reshape(SHAPE))))
        inside = np.random.default_rng(2).random(dy.shape) < 0.6
        expected = fq.fake_quantize_backward(array(dy), inside, spec)
        mask = torch.from_numpy(inside)
        like_dy = torch.empty_like(dy, dtype=torch.bool, requires_grad=False).copy_(mask)
        for form in (mask, like_dy, torch.from_numpy(packbits(inside))):
            assert_same_bits(expected, array(fq.fake_quantize_backward(dy, form, spec)), form.dtype, spec, dtype)


CODES = {
    "int8": dict(bits=8),
    "int4": dict(bits=4),
    "uint2": dict(bits=2, signed=False),
    "uint16": dict(bits=16, signed=False),
    "int24": dict(bits=24),
}


@by_blocks
@by_layout
def test_codes_and_values_of_tensors_equal_those_of_arrays(layout, where, unchanged):
    for kind in CODES.values():
        for spec, dtype in (rules if kind == CODES["int4"] else few_rules)(where, **kind):
            x = data(layout, dtype)
            s, z = grid(x, spec)
            scale, zero_point, _ = unchanged(to_torch(s), to_torch(z), x)
            assert_like(
                fq.quantize(array(x), s, z, spec), fq.quantize(x, scale, zero_point, spec), x, "codes", spec, dtype
            )
            if spec.bits in (2, 4):
                small = fq.quantize(x, scale, zero_point, spec, packed=True)
                assert_same_bits(fq.quantize(array(x), s, z, spec, packed=True), to_numpy(small), "packed", spec, dtype)
                y = fq.dequantize(small, scale, zero_point, spec, shape=x.shape, dtype=x.dtype)
                values = fq.dequantize(array(small), s, z, spec, shape=x.shape, dtype=dtype)
                assert_same_bits(values, to_numpy(y), "values of packed codes", spec, dtype)
            codes = np.random.default_rng(5).integers(spec.qmin, spec.qmax, SHAPE, spec.storage, endpoint=True)
            if layout == "lazily negated" and spec.storage == "uint16":
                continue  # torch cannot negate uint16
            (q,) = unchanged(LAYOUTS[layout](torch.from_numpy(codes)))
            y = fq.dequantize(q, scale, zero_point, spec, dtype=x.dtype)
            assert_like(fq.dequantize(array(q), s, z, spec, dtype=dtype), y, q, "values", spec, dtype)
    assert fq.dequantize(q, scale, zero_point, spec).dtype == torch.float32


def copied(call, shape):
    """Returns the names of the operations that copied a tensor of `shape` while `call` ran."""
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        call()
    moves = [e for e in profile.function_events if e.name in ("aten::copy_", "aten::clone")]
    return [e.name for e in moves if e.input_shapes[0] == list(shape)]


@pytest.mark.parametrize("layout", DENSE)
def test_functions_do_not_copy_dense_tensors(layout):
    spec = fq.QuantSpec(axis=1)
    x = data(layout, np.float32).detach()
    scale = torch.full((x.shape[1],), 0.1)
    mask, q = fq.fake_quantize(x, scale, 0, spec, mask="bool")[1], fq.quantize(x, scale, 0, spec)
    calls = {
        "forward": lambda: fq.fake_quantize(x, scale, 0, spec),
        "bool": lambda: fq.fake_quantize(x, scale, 0, spec, mask="bool"),
        "backward": lambda: fq.fake_quantize_backward(x, mask, spec),
        "learned": lambda: fq.fake_quantize_learned_backward(x, x, scale, 0, spec),
        "quantize": lambda: fq.quantize(x, scale, 0, spec),
        "dequantize": lambda: fq.dequantize(q, scale, 0, spec),
        "min_max": lambda: fq.min_max(x, spec),
        "observe": lambda: fq.observe_fake_quantize(x, spec, -scale, scale),
    }
    assert {name: copied(call, x.shape) for name, call in calls.items()} == {name: [] for name in calls}
    gaps = x[..., ::2]
    assert copied(lambda: fq.fake_quantize(gaps, scale, 0, spec), gaps.shape), "copies are detected"


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0, 2), (1,), (1, 1, 1)], ids=str)
def test_functions_on_0d_and_empty_tensors_equal_those_on_arrays(shape):
    for where in ({}, dict(axis=0), dict(axis=-1), dict(axis=-1, group_size=-1)):
        if not shape and where:
            continue
        for spec, dtype in rules(where):
            x = torch.full(shape, -0.3, dtype=to_torch(np.empty(0, dtype)).dtype, requires_grad=True)
            s, z = grid(x, spec)
            scale, zero_point = to_torch(s), to_torch(z)
            expected, inside = fq.fake_quantize(array(x), s, z, spec, mask="packed")
            y, mask = fq.fake_quantize(x, scale, zero_point, spec, mask="packed")
            assert_like(expected, y, x)
            assert_same_bits(inside, to_numpy(mask))
            assert_same_bits(array(x), array(torch.autograd.grad(y, x, x.detach())[0]))
            assert_same_bits(fq.quantize(array(x), s, z, spec), array(fq.quantize(x, scale, zero_point, spec)))
            for e, a in zip(fq.min_max(array(x), spec), fq.min_max(x, spec), strict=True):
                assert_same_bits(e, array(a))
            arguments = array(x), array(x), s, z, spec
            learned = fq.fake_quantize_learned_backward(x.detach(), x, scale, zero_point, spec)
            for e, a in zip(fq.fake_quantize_learned_backward(*arguments), learned, strict=True):
                assert_same_bits(e, array(a))


@by_layout
def test_functions_in_inference_mode_equal_those_on_arrays(layout):
    spec = fq.QuantSpec(axis=1)
    outside = data(layout, np.float32)
    s, _ = grid(outside, spec)
    with torch.inference_mode():
        for x in (outside, data(layout, np.float32)):
            y, mask = fq.fake_quantize(x, to_torch(s), 0, spec, mask="bool")
            assert_like(fq.fake_quantize(array(x), s, 0, spec), y, x)
            assert_same_bits(
                fq.fake_quantize_backward(array(x), array(mask), spec), array(fq.fake_quantize_backward(x, mask, spec))
            )
            for e, a in zip(fq.min_max(array(x), spec), fq.min_max(x, spec), strict=True):
                assert_same_bits(e, array(a))
            state = -torch.ones(x.shape[1]), torch.ones(x.shape[1])
            expected = [array(t).copy() for t in state]
            fq.observe_fake_quantize(x, spec, *state)
            fq.observe_fake_quantize(array(x), spec, *expected)
            assert [t.tolist() for t in state] == [e.tolist() for e in expected]
