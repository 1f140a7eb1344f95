"""Batch norms that stay in evaluation mode while the model around them trains."""

from typing import Any, Self

from torch import nn

from fakequant.nn._records import NAME

_CLASSES: "dict[type[nn.Module], type[FrozenNorm]]" = {}


class FrozenNorm(nn.Module):
    """The base of frozen batch norms, for `isinstance`. Running statistics are used and kept."""

    def train(self, mode: bool = True) -> Self:
        """Stays in evaluation mode. Children, such as a quantizer of the result, are set to `mode`."""
        self.training = False
        for child in self.children():
            child.train(mode)
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The class is made at run time, so pickle cannot find it by its name.
        return _rebuild, (self.__dict__[NAME].float_class,), self.__getstate__()


def frozen_class(cls: type[nn.Module]) -> type[FrozenNorm]:
    """The class of frozen batch norms for a class of batch norms.

    >>> issubclass(frozen_class(nn.BatchNorm2d), nn.BatchNorm2d)
    True
    """
    if cls not in _CLASSES:
        # With the module of `cls`: torch.compile and torch.fx know torch's own modules by it.
        _CLASSES[cls] = type(f"Frozen{cls.__name__}", (FrozenNorm, cls), {"__module__": cls.__module__})
    return _CLASSES[cls]


def _rebuild(cls: type[nn.Module]) -> nn.Module:
    made = frozen_class(cls)
    return made.__new__(made)
