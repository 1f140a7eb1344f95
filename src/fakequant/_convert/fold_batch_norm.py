"""Batch norm as part of the layer before it: another scale per channel and another bias.

    y = (x w + b - mean) * factor + beta        factor = gamma / sqrt(variance + eps)

    weight_scale' = weight_scale * |factor|     codes' = -codes where factor < 0
    b'            = (b - mean) * factor + beta

Codes of a symmetric, narrow grid can change their sign, so nothing is rounded anew.
"""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fakequant._convert.golden.integer_layer import set_levels, weight_levels
from fakequant._prepare.attach import record_of
from fakequant.nn._batch_norm import factor_of, folded_bias, folded_scale, lacks_opposite
from fakequant.nn._quantized_layer import QuantizedLayer
from fakequant.nn._records import NAME, find_record


class Folded(nn.Module):
    """The identity left where a batch norm was folded; its result may be quantized."""

    output_quantizer: Any

    def __init__(self, output_quantizer: nn.Module | None = None) -> None:
        super().__init__()
        self.register_module("output_quantizer", output_quantizer)

    def forward(self, x: Tensor) -> Tensor:
        return x if self.output_quantizer is None else self.output_quantizer(x)


class FoldedNorm(nn.Module):
    """The base of folded batch norms that do more than normalize, for `isinstance`.

    The class is derived from the batch norm's own. Its forward pass is the same, without the normalization.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _WithoutNormalization():
            return super().forward(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        # A batch norm adds the number of batches to a state without a version.
        nn.Module._load_from_state_dict(self, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The class is made at run time, so pickle cannot find it by its name.
        return _rebuild, (self.__dict__[NAME].float_class,), self.__getstate__()


class _WithoutNormalization(TorchFunctionMode):
    """Makes `batch_norm` return its input."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.batch_norm, torch.batch_norm):
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)


_CLASSES: dict[type[nn.Module], type[FoldedNorm]] = {}


def folded_class(cls: type[nn.Module]) -> type[FoldedNorm]:
    """Returns the class of folded batch norms for a class derived from a batch norm."""
    if cls not in _CLASSES:
        _CLASSES[cls] = type(f"Folded{cls.__name__}", (FoldedNorm, cls), {"__module__": __name__})
    return _CLASSES[cls]


def _rebuild(cls: type[nn.Module]) -> nn.Module:
    made = folded_class(cls)
    return made.__new__(made)


def remove_norm(model: nn.Module, path: str) -> None:
    """Makes a batch norm that was folded do nothing, or only what its class adds to a batch norm."""
    norm = model.get_submodule(path)
    record = find_record(norm)
    cls = type(norm) if record is None or record.float_class is None else record.float_class
    if cls.forward in (nn.modules.batchnorm._BatchNorm.forward, nn.SyncBatchNorm.forward):
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, Folded(norm._modules.get("output_quantizer")))
        return
    record_of(norm).float_class = cls
    norm.__class__ = folded_class(cls)
    for name in ("weight", "bias"):
        norm._parameters[name] = None
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        norm._buffers[name] = None


def can_fold(model: nn.Module, path: str, norm_path: str) -> bool:
    """Returns whether the batch norm at `norm_path` fits the layer at `path`: its shape, and the spec of the weight."""
    layer: Any = model.get_submodule(path)
    norm: Any = model.get_submodule(norm_path)
    if not isinstance(norm, nn.modules.batchnorm._BatchNorm) or norm.running_mean is None:
        return False
    if not isinstance(layer, QuantizedLayer) or layer.output_quantizer is not None or layer.weight_quantizer is None:
        return False
    kind = layer._fakequant.kind
    spec, weight, axis = layer.weight_quantizer.spec, getattr(layer, kind.weight_name), kind.channel_axis
    is_grouped = getattr(layer, "groups", 1) != 1 and axis != 0
    if not spec.symmetric or is_grouped or norm.num_features != weight.shape[axis]:
        return False
    if spec.group_size is not None:
        return axis == 0 and spec.axis % weight.dim() != 0
    return spec.axis is None or spec.axis % weight.dim() == axis


def reason_not_foldable(layer: Any, norm: Any, has_tokens: bool) -> str | None:
    """Why a batch norm cannot be folded into an integer layer; None if it can.

    `has_tokens` says whether inputs with more than two axes were observed.
    """
    record = layer._fakequant
    spec = record.weight_spec
    if len(record.weight_shape) == 2 and has_tokens:
        return "of tokens it normalizes another axis than that of the layer's channels"
    if spec.qmin == -spec.qmax:
        return None
    lowest = weight_levels(layer).movedim(record.kind.channel_axis, 0).flatten(1).amin(1) / 2**record.weight_shift
    if bool(lacks_opposite(lowest, spec.qmin, factor_of(norm))):
        return (
            f"a channel with a negative factor has the code {spec.qmin}, which cannot change its sign; "
            "use narrow_range=True"
        )
    return None


def fold(layer: Any, bias: Tensor | None, norm: Any) -> Tensor:
    """Changes codes and scale of an integer layer; returns its bias, in float64."""
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
    # Behind a linear layer, a batch norm has the channels of vectors on axis 1, and of tokens the tokens.
    record.takes_vectors = dims == 2
    return folded_bias(bias, norm)
