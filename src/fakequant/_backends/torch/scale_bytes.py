"""`encode_scales` and `decode_scales` on tensors. They run once, when a model is stored, so NumPy does the work."""

import numpy as np
import torch
from torch import Tensor

from fakequant._backends import checks, scale_codes
from fakequant._backends.argument_types import Numbers
from fakequant._backends.results import EncodedScales
from fakequant.spec import QuantSpec


def encode_scales(scale: Tensor, spec: QuantSpec) -> EncodedScales[Tensor]:
    """See `fakequant.encode_scales`."""
    checks.check_spec(spec, "scale, spec")
    scale_codes.check_dtype("scale", "float32", str(scale.dtype).removeprefix("torch."))
    codes, factor = scale_codes.encode(scale.detach().cpu().numpy(), spec)
    found = None if factor is None else torch.tensor(factor, device=scale.device)
    return EncodedScales(torch.from_numpy(codes).to(scale.device), found)


def decode_scales(codes: Tensor, tensor_scale: Numbers | None, spec: QuantSpec) -> Tensor:
    """See `fakequant.decode_scales`."""
    checks.check_spec(spec, "codes, tensor_scale, spec")
    scale_codes.check_dtype("codes", "uint8", str(codes.dtype).removeprefix("torch."))
    factor = None if tensor_scale is None else np.float32(float(torch.as_tensor(tensor_scale)))
    return torch.from_numpy(scale_codes.decode(codes.detach().cpu().numpy(), factor, spec)).to(codes.device)
