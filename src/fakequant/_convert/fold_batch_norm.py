"""Folds a batch norm into the layer before it: the layer gets new scales per channel and a new bias.

    y = (x w + b - mean) * factor + beta        factor = gamma / sqrt(variance + eps)

    weight_scale' = weight_scale * |factor|     codes' = -codes where factor < 0
    b'            = (b - mean) * factor + beta

Codes of a symmetric grid with narrow range can change their sign, and so can those of float formats, so the weights are
not rounded again. Scales of few bits (MX, NVFP4) would leave their format: such a batch norm stays.
"""

import dataclasses
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fakequant._convert.golden.integer_layer import IntegerLayer, set_levels, weight_levels
from fakequant._prepare.attach import record_of
from fakequant.nn._folding import factor_of, folded_bias, folded_scale, lacks_opposite
from fakequant.nn._records import DerivedModule, derived_class, find_record

BatchNorm: TypeAlias = nn.modules.batchnorm._BatchNorm


def find_norm(model: nn.Module, path: str) -> BatchNorm:
    """Returns the batch norm at `path`."""
    norm = model.get_submodule(path)
    assert isinstance(norm, BatchNorm)
    return norm


def reason_not_foldable(layer: IntegerLayer, norm: BatchNorm, has_tokens: bool) -> str | None:
    """Returns why a batch norm cannot be folded into an integer layer, or None if it can.

    `has_tokens` says whether the layer was given inputs with more than two axes.
    """
    record = layer._fakequant
    spec = record.weight_spec
    if len(record.weight_shape) == 2 and has_tokens:
        return "with inputs of more than two axes, it normalizes another axis than the layer's channels"
    if spec.has_block_scales:
        return f"the scales of the weight have the format {spec.scale_format}, which folding would leave"
    if spec.format != "int" or spec.qmin == -spec.qmax:
        return None
    lowest = weight_levels(layer).movedim(record.kind.channel_axis, 0).flatten(1).amin(1) / 2**record.weight_shift
    if bool(lacks_opposite(lowest, spec.qmin, factor_of(norm))):
        return (
            f"a channel with a negative factor has the code {spec.qmin}, which cannot change its sign; "
            "use narrow_range=True"
        )
    return None


def fold(layer: IntegerLayer, bias: Tensor | None, norm: BatchNorm) -> Tensor:
    """Folds a batch norm into the codes and the scale of an integer layer. Returns the new bias in float64."""
    factor, record = factor_of(norm), layer._fakequant
    axis, dims = record.kind.channel_axis, len(record.weight_shape)
    channels = record.weight_shape[axis]
    if record.weight_spec.axis is None:
        record.weight_spec = dataclasses.replace(record.weight_spec, axis=axis)
        layer.weight_scale = layer.weight_scale.expand(channels).clone()
    per_scale = factor.reshape(-1, *[1] * (layer.weight_scale.dim() - 1))
    layer.weight_scale = folded_scale(layer.weight_scale, per_scale)
    sign = factor.sign().reshape([-1 if a == axis else 1 for a in range(dims)])
    set_levels(layer, weight_levels(layer) * sign.float())
    # A batch norm normalizes axis 1. After a linear layer these are the channels only if inputs have two axes.
    record.takes_vectors = dims == 2
    return folded_bias(bias, norm)


# --- what is left of a folded batch norm ----------------------------------------------------------


class Folded(nn.Module):
    """The identity that replaces a folded batch norm. It keeps the batch norm's output quantizer."""

    output_quantizer: Any

    def __init__(self, output_quantizer: nn.Module | None = None) -> None:
        super().__init__()
        self.register_module("output_quantizer", output_quantizer)

    def forward(self, x: Tensor) -> Tensor:
        return x if self.output_quantizer is None else self.output_quantizer(x)


class FoldedNorm(DerivedModule):
    """The base class of folded batch norms with a forward pass of their own, for `isinstance`.

    The class of such a module is derived from the batch norm's class. Its forward pass does everything but normalize.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _WithoutNormalization():
            return super().forward(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        # A batch norm adds the number of batches to a state without a version.
        nn.Module._load_from_state_dict(self, *args, **kwargs)


class _WithoutNormalization(TorchFunctionMode):
    """Makes `batch_norm` return its input."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.batch_norm, torch.batch_norm):
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)


def folded_class(cls: type[nn.Module]) -> type[FoldedNorm]:
    """Returns the class of folded batch norms for a class derived from a batch norm."""
    return derived_class(FoldedNorm, cls, f"Folded{cls.__name__}", (folded_class, cls), __module__=__name__)


def normalized(norm: nn.Module, x: Tensor) -> Tensor:
    """Returns the batch norm of `x` in evaluation mode, without anything that its class adds."""
    assert isinstance(norm, BatchNorm)
    return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps)


def remove_norm(model: nn.Module, path: str) -> None:
    """Removes the normalization of a folded batch norm, and keeps its output quantizer.

    A plain batch norm is replaced by an identity. One with a forward pass of its own keeps the rest of it.
    """
    norm = model.get_submodule(path)
    record = find_record(norm)
    cls = type(norm) if record is None or record.float_class is None else record.float_class
    if cls.forward in (BatchNorm.forward, nn.SyncBatchNorm.forward):
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, Folded(norm._modules.get("output_quantizer")))
        return
    record_of(norm).float_class = cls
    norm.__class__ = folded_class(cls)
    for name in ("weight", "bias"):
        norm._parameters[name] = None
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        norm._buffers[name] = None
