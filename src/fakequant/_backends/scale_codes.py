"""Block scales as bytes: the codes of E8M0 (MX) and of E4M3 (NVFP4).

e8m0     scale = 2^(code - 127 - k)          k = floor(log2(qmax)) for integers, whose blocks MX counts in units of
                                             the largest power of two; k = 0 for float formats
e4m3fn   scale = value(code) * tensor_scale  rounded to float32; value(code) / tensor_scale with the rule "divided"

They are encoded once, when a model is stored. For tensors NumPy does the work too.
"""

from math import frexp
from typing import NoReturn

import numpy as np

from fakequant._backends import checks
from fakequant._backends.types import EncodedScales, Numbers
from fakequant.formats import FLOAT_FORMATS
from fakequant.spec import QuantSpec

_BIAS, _E8M0_NAN = 127, 255
_E4M3 = FLOAT_FORMATS["e4m3fn"]
# The value of every positive code, in ascending order; the code of `_VALUES[i]` is `i + 1`.
_VALUES = _E4M3.values()[1 : _E4M3.nan_code]
_NAN_CODE = 0x7F
# How many neighbours of a quotient are tried: rounding moves it by less.
_NEIGHBOURS = 2


def _check_scale_format(spec: QuantSpec) -> None:
    """Raises ValueError if the scales of a spec have no codes."""
    if spec.scale_format not in ("e8m0", "e4m3fn"):
        raise ValueError(
            f"The scales of the spec ({spec}) are {spec.scale_format}, which needs no codes.\n"
            "Use a spec with scale_format='e8m0' or 'e4m3fn', such as presets.mxfp4() or presets.nvfp4()."
        )


def check_dtype(name: str, wanted: str, received: str) -> None:
    """Raises TypeError if an argument has another dtype than it must have."""
    if received != wanted:
        raise TypeError(f"`{name}` must be {wanted}, got {received}.")


def encode_scales(scale: np.ndarray, spec: QuantSpec) -> EncodedScales[np.ndarray]:
    """See `fakequant.encode_scales`."""
    checks.check_spec(spec, "scale, spec")
    scale = np.asarray(scale)
    check_dtype("scale", "float32", str(scale.dtype))
    _check_scale_format(spec)
    if spec.scale_format == "e8m0":
        return EncodedScales(_encode_powers(scale, spec), None)
    codes, tensor_scale = _encode_products(scale, spec)
    return EncodedScales(codes, np.array(tensor_scale))


def decode_scales(codes: np.ndarray, tensor_scale: Numbers | None, spec: QuantSpec) -> np.ndarray:
    """See `fakequant.decode_scales`."""
    checks.check_spec(spec, "codes, tensor_scale, spec")
    codes = np.asarray(codes)
    check_dtype("codes", "uint8", str(codes.dtype))
    factor = None if tensor_scale is None else np.float32(tensor_scale)
    _check_scale_format(spec)
    if (factor is None) != (spec.scale_format == "e8m0"):
        needs = "no `tensor_scale`" if factor is not None else "the `tensor_scale` that encode_scales returned"
        raise ValueError(f"Scales of the format {spec.scale_format!r} have {needs}, got {factor!r}.")
    if factor is None:
        is_nan = codes == _E8M0_NAN
        scale = np.ldexp(np.float32(1), np.where(is_nan, 0, codes.astype(np.int32) - _BIAS - _units(spec)))
        return np.where(is_nan, np.float32(np.nan), scale).astype(np.float32)
    return _under(_E4M3.values()[codes], factor, spec)


def _under(values: np.ndarray, tensor_scale: np.ndarray | np.float32, spec: QuantSpec) -> np.ndarray:
    """Returns the scales that E4M3 values stand for."""
    scales: np.ndarray = values / tensor_scale if spec.scale_rule == "divided" else values * tensor_scale
    return scales


def _units(spec: QuantSpec) -> int:
    """Returns the exponent of the largest power of two among the codes of an integer grid; 0 for float formats."""
    return frexp(spec.qmax)[1] - 1 if spec.format == "int" else 0


def _encode_powers(scale: np.ndarray, spec: QuantSpec) -> np.ndarray:
    mantissa, exponent = np.frexp(scale)
    codes = exponent - 1 + _BIAS + _units(spec)
    is_code = (mantissa == 0.5) & (codes >= 0) & (codes < _E8M0_NAN)
    refused = ~(is_code | np.isnan(scale))
    if refused.any():
        _refuse(scale[refused].flat[0], "a power of two that E8M0 has", spec)
    return np.where(np.isnan(scale), _E8M0_NAN, codes).astype(np.uint8)


def _encode_products(scale: np.ndarray, spec: QuantSpec) -> tuple[np.ndarray, np.float32]:
    different, places = np.unique(scale, return_inverse=True)
    known = different[~np.isnan(different)]
    refused = ~((known > 0) & (known < np.inf))
    if refused.any():
        _refuse(known[refused][0], "positive and finite", spec)
    factor, steps = _common_factor(known, spec) if known.size else (np.float32(1), known)
    codes = np.full(different.size, _NAN_CODE, np.uint8)
    codes[~np.isnan(different)] = steps
    return codes[places].reshape(scale.shape), factor


def _common_factor(scales: np.ndarray, spec: QuantSpec) -> tuple[np.float32, np.ndarray]:
    """Returns the tensor scale of NVFP4, found from different scales in ascending order, and the codes of these.

    `choose_qparams` gives the block with the largest magnitude the largest E4M3 value, unless scales are subnormal.
    """
    for values in (_VALUES[-1:], _VALUES[-2::-1]) if scales.size <= _VALUES.size else ():
        candidates = _candidates(scales[-1], values, spec)
        codes = _nearest_codes(scales, candidates, spec)
        fits = (_under(_VALUES[codes - 1], candidates[:, None], spec) == scales).all(1)
        if fits.any():
            first = int(np.argmax(fits))
            return candidates[first], codes[first]
    _refuse(scales[-1], "an E4M3 value times a scale that all blocks share", spec)


def _candidates(largest: np.float32, values: np.ndarray, spec: QuantSpec) -> np.ndarray:
    """Returns tensor scales with which a value of E4M3 may have `largest` as its scale: quotients, neighbours."""
    nearest = values / largest if spec.scale_rule == "divided" else largest / values
    found, below, above = [nearest], nearest, nearest
    for _ in range(_NEIGHBOURS):
        below, above = np.nextafter(below, np.float32(0)), np.nextafter(above, np.float32(np.inf))
        found += [below, above]
    candidates = np.stack(found, 1).ravel()
    kept: np.ndarray = candidates[(candidates > 0) & np.isfinite(candidates)]
    return kept


def _nearest_codes(scales: np.ndarray, candidates: np.ndarray, spec: QuantSpec) -> np.ndarray:
    """Returns the code of the E4M3 value nearest to each scale under each candidate."""
    middle = (_VALUES[1:] + _VALUES[:-1]) / 2
    with np.errstate(over="ignore"):
        divided = spec.scale_rule == "divided"
        quotients = scales * candidates[:, None] if divided else scales / candidates[:, None]
    codes: np.ndarray = np.searchsorted(middle, quotients) + 1
    return codes.astype(np.uint8)


def _refuse(value: np.float32, words: str, spec: QuantSpec) -> NoReturn:
    raise ValueError(
        f"The scale {value:g} is not one of the spec ({spec}): it must be {words}.\n"
        "Use scales that choose_qparams returned for this spec."
    )
