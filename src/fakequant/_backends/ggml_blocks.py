"""The codes and scales of a weight as ggml stores them, before they are packed."""

from typing import NamedTuple

import numpy as np

from fakequant._backends import backend_of, numpy_functions
from fakequant._backends.checks import EPS
from fakequant._backends.types import Array, QParams
from fakequant.spec import QuantSpec


class GgmlBlocks(NamedTuple):
    """A weight in a block type of ggml: `codes * d`, or `(codes - 8) * d` (q4_0), `(codes - 1) * d` (tq2_0)."""

    # In the shape of the weight: uint8, or int8 for q8_0.
    codes: np.ndarray
    # Scales, float16, one per block.
    d: np.ndarray
    # Offsets, float16, one per block: q4_1 adds them to `codes * d`. None for other types.
    m: np.ndarray | None


# What ggml adds to codes to make them unsigned.
_ADDED = {"q4_0": 8, "q4_1": 0, "q8_0": 0, "tq2_0": 1}


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
    return GgmlBlocks(codes, _as_float16(scale), _as_float16(offset) if spec.has_offset else None)


def _as_float16(value: np.ndarray) -> np.ndarray:
    limit = np.finfo(np.float16).max
    return value.clip(-limit, limit).astype(np.float16)
