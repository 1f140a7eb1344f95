"""Functions on tensors equal the reference for float formats and block scales, in any layout, with gradients."""

import numpy as np
import pytest

import fakequant as fq
from fakequant import reference, reference_formats as formats
from fakequant.testing import cases
from fakequant.testing.assertions import assert_same_bits
from float_format_blocks import (
    BLOCK_SHAPES,
    BLOCK_SPECS,
    STATIC,
    block_case,
    blocks,
    expand,
    gradients,
    static_case,
)
from float_format_data import by_format
from torch_bridge import to_numpy, to_torch, torch

pytestmark = pytest.mark.usefixtures("machine")
by_dtype = pytest.mark.parametrize("dtype", cases.DTYPES.values(), ids=cases.DTYPES)
by_block_spec = pytest.mark.parametrize("spec", BLOCK_SPECS.values(), ids=BLOCK_SPECS)


def axes_reversed(t):
    order = tuple(reversed(range(t.ndim)))
    return t.permute(order).contiguous().permute(order)


LAYOUTS = {
    "contiguous": lambda t: t,
    "axes reversed": axes_reversed,
    "sliced": lambda t: t.repeat_interleave(2, -1)[..., ::2] if t.ndim else t,
}


def layouts(dtype):
    """Returns all layouts for float32, and one for other dtypes, which take the same way."""
    return LAYOUTS if dtype == np.float32 else {"axes reversed": axes_reversed}


def array(t):
    """Returns the values of a tensor in C order."""
    return to_numpy(t.detach().contiguous())


def check(x, scale, spec, expected, where):
    """Compares values, masks, codes and gradients with the reference."""
    s, dy = to_torch(scale), gradients(x.shape, x.dtype)
    clipped = reference.fake_quantize_backward(dy, expected.mask, "onnx")
    for layout_name, layout in layouts(x.dtype).items():
        name = f"{where}, {layout_name}"
        t = layout(to_torch(x))
        y, mask = fq.fake_quantize(t, s, 0, spec, mask="bool")
        assert_same_bits(expected.y, array(y), "y", name)
        assert_same_bits(expected.mask, array(mask), "mask", name)
        _, packed = fq.fake_quantize(t, s, 0, spec, mask="packed")
        assert_same_bits(np.packbits(expected.mask, bitorder="little"), array(packed), "packed mask", name)
        assert_same_bits(clipped, array(fq.fake_quantize_backward(to_torch(dy), packed, spec)), "backward", name)
        q = fq.quantize(t, s, 0, spec)
        assert_same_bits(expected.codes, array(q), "codes", name)
        assert_same_bits(expected.values, array(fq.dequantize(q, s, 0, spec, dtype=t.dtype)), "values", name)
        if spec.bits in (4, 6):
            small = fq.quantize(t, s, 0, spec, packed=True)
            low_bits = expected.codes.view(np.uint8) & ((1 << spec.bits) - 1)
            assert_same_bits(formats.pack(low_bits, spec.bits), array(small), "packed codes", name)
            again = fq.dequantize(small, s, 0, spec, shape=tuple(t.shape), dtype=t.dtype)
            assert_same_bits(expected.values, array(again), "values of packed codes", name)
        leaf = t.detach().requires_grad_()
        for gradient, dx in (("clipped", clipped), ("pass", dy)):
            y = fq.fake_quantize(leaf, s, 0, spec, gradient=gradient)
            assert_same_bits(dx, array(torch.autograd.grad(y, leaf, to_torch(dy))[0]), gradient, name)


@by_dtype
@by_format
def test_values_masks_codes_and_gradients_equal_the_reference(format, dtype):
    for where in STATIC:
        spec, x, scale, expected = static_case(format, where, dtype)
        check(x, scale, spec, expected, where)


@by_format
def test_gradient_of_a_learned_scale_is_the_sum_of_the_reference(format):
    for where, dtype in (("tensor", np.dtype(np.float32)), ("channel, middle axis", np.dtype(np.float64))):
        spec, x, scale, expected = static_case(format, where, dtype)
        dy = np.random.default_rng(1).standard_normal(x.shape).astype(dtype)
        factor = 1 / np.sqrt(x.size * spec.largest)
        for given, used in ((0.25, 0.25), (None, factor)):
            s, t = to_torch(scale).requires_grad_(), to_torch(x).requires_grad_()
            y = fq.fake_quantize_learned(t, s, 0, spec, grad_factor=given)
            assert_same_bits(expected.y, array(y))
            dt, ds = torch.autograd.grad(y, (t, s), to_torch(dy))
            dx, terms = formats.learned_backward(dy, x, expand(scale, x.shape, spec), format, grad_factor=used)
            assert_same_bits(dx.astype(dtype), array(dt))
            axes = tuple(d for d in range(x.ndim) if spec.axis is None or d != spec.axis)
            # A sum of float64 numbers in any order, rounded to float32, of terms that are rounded to the compute dtype.
            exact, size = reference.exact_sum(terms, axes), np.abs(terms).sum(axes)
            finite = np.isfinite(size)
            assert (np.abs(array(ds) - exact)[finite] <= 2.0**-22 * size[finite]).all()


@by_dtype
@by_block_spec
def test_blocks_equal_the_reference(spec, dtype):
    few = [BLOCK_SHAPES[name] for name in ("short last block", "middle axis, short")]
    for shape, axis in BLOCK_SHAPES.values() if dtype == np.float32 else few:
        cut, x, observed, expected = block_case(spec, shape, axis, dtype)
        dy = gradients(shape, dtype)
        for name, layout in layouts(dtype).items():
            leaf = layout(to_torch(x)).detach().requires_grad_()
            state = [torch.full(observed.lo.shape, v) for v in (np.inf, -np.inf)]
            result = fq.observe_fake_quantize(leaf, cut, *state, update="dynamic", gradient="pass")
            assert_same_bits(observed.scale, array(result.scale), "scale", shape, name)
            assert_same_bits(expected.y, array(result.y), "y", shape, name)
            assert int(result.nonfinite) == observed.nonfinite
            for running, seen in zip(state, observed, strict=False):
                assert_same_bits(seen, array(running), "range", shape, name)
            (dx,) = torch.autograd.grad(result.y, leaf, to_torch(dy))
            assert_same_bits(dy, array(dx), "gradients pass everywhere", shape, name)
        check(x, observed.scale, cut, expected, shape)


@by_block_spec
def test_ranges_and_scales_of_tensors_equal_the_reference(spec):
    for shape, axis in BLOCK_SHAPES.values():
        cut, x, observed, _ = block_case(spec, shape, axis, np.dtype(np.float32))
        for layout in LAYOUTS.values():
            seen = fq.min_max(layout(to_torch(x)), cut)
            for index, block in blocks(x, cut):
                expected = reference.min_max(block)
                assert (float(seen.min[index]), float(seen.max[index])) == (expected.min, expected.max)
        scale, zero_point = fq.choose_qparams(to_torch(observed.lo), to_torch(observed.hi), cut)
        assert_same_bits(observed.scale, array(scale))
        assert not zero_point.any()
