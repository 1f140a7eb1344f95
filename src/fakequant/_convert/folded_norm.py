"""What is left of a batch norm in a converted model, after it was folded into the layer before it."""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fakequant._convert.fold_batch_norm import BatchNorm
from fakequant._prepare.attach import record_of
from fakequant.nn._records import NAME, find_record


class Folded(nn.Module):
    """The identity that replaces a folded batch norm. It keeps the batch norm's output quantizer."""

    output_quantizer: Any

    def __init__(self, output_quantizer: nn.Module | None = None) -> None:
        super().__init__()
        self.register_module("output_quantizer", output_quantizer)

    def forward(self, x: Tensor) -> Tensor:
        return x if self.output_quantizer is None else self.output_quantizer(x)


class FoldedNorm(nn.Module):
    """The base class of folded batch norms with a forward pass of their own, for `isinstance`.

    The class of such a module is derived from the batch norm's class. Its forward pass does everything but normalize.
    """

    if TYPE_CHECKING:

        def __getstate__(self) -> dict[str, Any]:
            """Returns the attributes to pickle."""

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
