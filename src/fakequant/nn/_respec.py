"""Changing the spec of a quantizer in place."""

import torch

from fakequant.nn._fake_quantize import FakeQuantize
from fakequant.nn._learned_fake_quantize import LearnedFakeQuantize
from fakequant.nn._quantizer import Quantizer
from fakequant.spec import QuantSpec


@torch.no_grad()
def change_spec(quantizer: Quantizer, spec: QuantSpec) -> None:
    """Gives a quantizer another spec with the same number of scales, and resets it.

    Parameters and buffers remain the same tensors, so an optimizer that holds them stays valid.

    >>> quantizer = FakeQuantize(QuantSpec(bits=2))
    >>> change_spec(quantizer, QuantSpec(bits=8))
    >>> quantizer
    FakeQuantize(int8, per tensor; observing, quantizing; MovingAverage(constant=0.01))
    """
    before = quantizer.spec
    kept = ("signed", "symmetric", "axis", "group_size", "format", "scale_format")
    if any(getattr(before, name) != getattr(spec, name) for name in kept):
        raise ValueError(
            f"The spec of a quantizer cannot change from ({before}) to ({spec}): formats, sign, symmetry and axes must "
            "stay."
        )
    quantizer.spec = spec
    if isinstance(quantizer, FakeQuantize):
        quantizer._set_observer(quantizer.observer)
    elif isinstance(quantizer, LearnedFakeQuantize):
        quantizer._set_start()
    quantizer.reset_parameters()
