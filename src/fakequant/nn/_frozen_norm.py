"""Batch norms that stay in evaluation mode while the model around them trains."""

from typing import TYPE_CHECKING, Any, Self

from torch import nn

from fakequant.nn._records import NAME

_CLASSES: "dict[type[nn.Module], type[FrozenNorm]]" = {}


class FrozenNorm(nn.Module):
    """The base of frozen batch norms, for `isinstance`. They use their running statistics and do not update them."""

    if TYPE_CHECKING:

        def __getstate__(self) -> dict[str, Any]:
            """Returns the attributes to pickle."""

    def train(self, mode: bool = True) -> Self:
        """Keeps the batch norm in evaluation mode. Its children, such as an output quantizer, are set to `mode`."""
        self.training = False
        for child in self.children():
            child.train(mode)
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Pickle cannot find the class, which is made at run time.
        return _rebuild, (self.__dict__[NAME].float_class,), self.__getstate__()


def frozen_class(cls: type[nn.Module]) -> type[FrozenNorm]:
    """Returns the class of frozen batch norms for a class of batch norms.

    >>> issubclass(frozen_class(nn.BatchNorm2d), nn.BatchNorm2d)
    True
    """
    if cls not in _CLASSES:
        # The same `__module__`, by which torch.compile and torch.fx recognize torch's modules.
        _CLASSES[cls] = type(f"Frozen{cls.__name__}", (FrozenNorm, cls), {"__module__": cls.__module__})
    return _CLASSES[cls]


def _rebuild(cls: type[nn.Module]) -> nn.Module:
    made = frozen_class(cls)
    return made.__new__(made)
