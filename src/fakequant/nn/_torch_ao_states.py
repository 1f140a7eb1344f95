"""Conversion of the states of torch.ao's modules with an observer to the state of `FakeQuantize`."""

import torch
from torch import Tensor

from fakequant._backends.torch import tensor_functions
from fakequant.observers._observer import State
from fakequant.spec import QuantSpec


def observed_tensors(old: dict[str, Tensor], spec: QuantSpec, empty: State) -> dict[str, Tensor]:
    """Returns the running range, scale and zero point of a torch.ao module, with fakequant's names and dtypes.

    Raises ValueError if the module has no running range, or if the zero points do not fit the spec.

    Args:
        old: The state of the torch.ao module.
        spec: The spec of the quantizer that will have the state.
        empty: The running range of that quantizer before anything was observed.
    """
    if "learning_enabled" in old or "activation_post_process.min_val" not in old:
        raise ValueError(
            "the state is from a torch.ao module without a running range.\n"
            "Use LearnedFakeQuantize for a learned scale, FakeQuantize(spec, Fixed(lo, hi)) for a fixed one."
        )
    lo, hi = (old[f"activation_post_process.{end}_val"] for end in ("min", "max"))
    scale, zero_point = old["scale"], old["zero_point"]
    if zero_point.is_floating_point():
        raise ValueError("the zero point of the state is not an integer.")
    if lo.numel() == 0:  # nothing was observed, so the scale of 1 has no meaning
        lo, hi = empty["running_min"], empty["running_max"]
        scale, zero_point = torch.full_like(lo, torch.nan), torch.zeros_like(lo, dtype=torch.int32)
    # An end that is not finite counts as not observed. The other end is kept.
    lo = torch.where(lo.isfinite(), lo, torch.inf)
    hi = torch.where(hi.isfinite(), hi, -torch.inf)
    known = lo <= hi
    if known.shape == scale.shape or known.numel() == scale.numel() == 1:
        scale = torch.where(known.reshape(scale.shape), scale, torch.nan)
        zero_point = torch.where(known.reshape(scale.shape), zero_point, 0)
    if spec.symmetric and bool(zero_point.any()):
        raise ValueError(
            f"the zero point is not 0 everywhere, but the spec is symmetric ({spec}).\n"
            "torch's fused operator chooses such zero points for data of one sign: use "
            "fakequant.nn.FusedFakeQuantize, or QuantSpec(symmetric=False)."
        )
    return {"running_min": lo, "running_max": hi, "scale": scale, "zero_point": zero_point.to(torch.int32)}


def check_scale(observed: dict[str, Tensor], spec: QuantSpec, eps: float) -> None:
    """Raises ValueError if `choose_qparams` does not find the same scale and zero point for the running range."""
    lo, hi, scale, zero_point = (
        observed[name].reshape(-1) for name in ("running_min", "running_max", "scale", "zero_point")
    )
    known = lo <= hi
    if not bool(known.any()):
        return
    scale, zero_point = scale[known], zero_point[known]
    expected = tensor_functions.choose_qparams(lo[known], hi[known], spec, eps=eps)
    if not torch.equal(expected.scale, scale) or not torch.equal(expected.zero_point, zero_point):
        raise ValueError(
            f"the scale of the state is {scale[0]:g}, but for its range this grid has "
            f"{expected.scale[0]:g} ({spec}, eps={eps:g}).\n"
            "It has another range of codes (bits, narrow_range), another eps, or was fused (FusedFakeQuantize)."
        )
