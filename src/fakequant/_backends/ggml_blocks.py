"""The codes and scales of a weight as ggml stores them, before they are packed."""

from typing import NamedTuple

import numpy as np

from fakequant._backends import backend_of, numpy_functions
from fakequant._backends.checks import EPS
from fakequant._backends.types import Array, QParams
from fakequant.formats import SUPER_BLOCKS
from fakequant.spec import QuantSpec


class GgmlBlocks(NamedTuple):
    """A weight in a block type of ggml: `codes * d`, or `(codes - 8) * d` (q4_0), `(codes - 1) * d` (tq2_0).

    In K-quants, `d` and `m` are those of super-blocks: `codes * (d * scales) - m * offsets` (q4_k), or
    `(codes - 32) * (d * scales)` (q6_k).
    """

    # In the shape of the weight: uint8, or int8 for q8_0.
    codes: np.ndarray
    # Scales, float16, one per block.
    d: np.ndarray
    # Offsets, float16, one per block: q4_1 adds them to `codes * d`. None for other types.
    m: np.ndarray | None
    # The integers of K-quants, one per block: uint8 in q4_k, int8 in q6_k. None for other types.
    scales: np.ndarray | None = None
    offsets: np.ndarray | None = None


# What ggml adds to codes to make them unsigned.
_ADDED = {"q4_0": 8, "q4_1": 0, "q8_0": 0, "tq2_0": 1, "q4_k": 0, "q6_k": 32}


def ggml_blocks(weight: Array, spec: QuantSpec, qparams: QParams[Array] | None = None) -> GgmlBlocks:
    """Returns the codes and scales of a weight as ggml stores them.

    Their values, computed in float32 as ggml does, are the bits of the fake-quantized weight in float32.

    Args:
        weight: The weight, an array or a tensor.
        spec: One of the specs of ggml's weights, such as `presets.q4_0()`.
        qparams: Scale and offset of a frozen quantizer. If None, those of the weight itself.

    >>> from fakequant import presets
    >>> blocks = ggml_blocks(np.float32([[1.0, -3.0] + 30 * [0.25]]), presets.q4_0())
    >>> blocks.codes[0, :3].tolist(), blocks.d.tolist(), blocks.m
    ([11, 0, 9], [[0.375]], None)
    """
    if spec.ggml_type not in _ADDED:
        raise ValueError(f"`spec` must be one of {', '.join(_ADDED)} of ggml, got {spec}.")
    x = backend_of(weight).as_float32_array(weight, "weight")
    if qparams is None:
        codes, (scale, offset) = numpy_functions.quantize_dynamic(x, spec, eps=EPS)
    else:
        scale, offset = (v if isinstance(v, np.ndarray) else v.detach().cpu().numpy() for v in qparams)
        codes = numpy_functions.quantize(x, scale, offset, spec)
    added = _ADDED[spec.ggml_type]
    codes = codes if spec.ggml_type == "q8_0" else (codes + added).astype(np.uint8)
    if spec.ggml_type in SUPER_BLOCKS:
        d, scales = factors_of(scale, spec)
        m, offsets = factors_of(0 - offset, spec) if spec.has_offset else (None, None)
        return GgmlBlocks(codes, d, m, scales, offsets)
    return GgmlBlocks(codes, _as_float16(scale), _as_float16(offset) if spec.has_offset else None)


def factors_of(scale: np.ndarray, spec: QuantSpec) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scales of K-quants as ggml stores them: a float16 number per super-block, and integers per block.

    Their float32 products are the bits of `scale`. Several pairs may have the same products. The one with the largest
    integers is returned, 63 or -128 for the scale with the largest magnitude if possible, as ggml's quantizer
    chooses them. Every scale that is such a product is found: one of the integers tried is its own.

    Raises ValueError for other scales.

    >>> from fakequant import presets
    >>> d, integers = factors_of(np.float32([[31.5, 0.5, 0, 2, 0, 0, 0, 1]]), presets.q4_k())
    >>> d.tolist(), integers.tolist()
    ([[0.5]], [[63, 1, 0, 4, 0, 0, 0, 2]])
    """
    assert spec.ggml_type is not None
    size = SUPER_BLOCKS[spec.ggml_type]
    rows = np.asarray(scale, np.float32).reshape(-1, size)
    largest = np.take_along_axis(rows, np.abs(rows).argmax(-1)[:, None], -1)
    is_signed = spec.ggml_type == "q6_k"
    low, high = (-128, 127) if is_signed else (0, 63)
    tried = [sign * n for n in range(max(-low, high), 0, -1) for sign in (-1, 1) if low <= sign * n <= high]
    d = np.where(largest == 0, largest, 0).astype(np.float16)  # with its sign, if all scales are 0
    integers = np.zeros_like(rows)
    missing = np.flatnonzero(largest)
    for integer in tried:
        if not missing.size:
            break
        here = rows[missing]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            one = (largest[missing] / np.float32(integer)).astype(np.float16)
            times = np.clip(np.rint(here / one.astype(np.float32)), low, high) + np.float32(0)
            products = one.astype(np.float32) * times
        fits = (products.view(np.int32) == here.view(np.int32)).all(-1)
        d[missing[fits]], integers[missing[fits]] = one[fits], times[fits]
        missing = missing[~fits]
    if missing.size:
        raise ValueError(
            f"{missing.size} super-blocks have scales that {spec.ggml_type} cannot store: they are not integers from "
            f"{low} to {high} times one float16 number, got {rows[missing[0]].tolist()}.\n"
            "Use the scales of `choose_qparams`, or those that were loaded from a file."
        )
    shape = np.shape(scale)
    return d.reshape(*shape[:-1], -1), integers.astype(np.int8 if is_signed else np.uint8).reshape(shape)


def _as_float16(value: np.ndarray) -> np.ndarray:
    limit = np.finfo(np.float16).max
    return value.clip(-limit, limit).astype(np.float16)
