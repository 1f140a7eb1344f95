"""`encode_scales` and `decode_scales` on NumPy arrays."""

import numpy as np

from fakequant._backends import checks, scale_codes
from fakequant._backends.argument_types import Numbers
from fakequant._backends.results import EncodedScales
from fakequant.spec import QuantSpec


def encode_scales(scale: np.ndarray, spec: QuantSpec) -> EncodedScales[np.ndarray]:
    """See `fakequant.encode_scales`."""
    checks.check_spec(spec, "scale, spec")
    scale = np.asarray(scale)
    scale_codes.check_dtype("scale", "float32", str(scale.dtype))
    codes, factor = scale_codes.encode(scale, spec)
    return EncodedScales(codes, None if factor is None else np.array(factor))


def decode_scales(codes: np.ndarray, tensor_scale: Numbers | None, spec: QuantSpec) -> np.ndarray:
    """See `fakequant.decode_scales`."""
    checks.check_spec(spec, "codes, tensor_scale, spec")
    codes = np.asarray(codes)
    scale_codes.check_dtype("codes", "uint8", str(codes.dtype))
    return scale_codes.decode(codes, None if tensor_scale is None else np.float32(tensor_scale), spec)
