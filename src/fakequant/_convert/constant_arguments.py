"""Arguments of a model that are constants of an exported file: those that are no tensors, such as `use_cache=False`.

Exporters would have inputs for them, or lose the names of dynamic axes.
"""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fakequant._backends.torch.torch_private import pytree

# Parameters that take any number of arguments.
_SEVERAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def bind_constants(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Makes arguments without tensors constants of a model, in place. Returns the others, and their shapes.

    Args:
        model: The model.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        shapes: The axes of these that may have any length, as in `torch.export`, or None.
    """
    positions = {position: value for position, value in enumerate(args) if not _has_tensors(value)}
    names = {name: value for name, value in kwargs.items() if not _has_tensors(value)}
    if not positions and not names:
        return args, kwargs, shapes
    parameters = list(inspect.signature(model.forward).parameters.values())
    constants = {one.name for i, one in enumerate(parameters) if i in positions and one.kind not in _SEVERAL} | set(
        names
    )
    # Exporters name inputs by the signature.
    signature = inspect.Signature([one for one in parameters if one.name not in constants])
    model.forward = _bound(model.forward, positions, names, signature)
    if isinstance(shapes, dict):
        shapes = {name: shape for name, shape in shapes.items() if name not in constants}
    elif shapes is not None:
        shapes = tuple(shape for position, shape in enumerate(shapes) if position not in positions)
    args = tuple(value for position, value in enumerate(args) if position not in positions)
    return args, {name: value for name, value in kwargs.items() if name not in names}, shapes


def _has_tensors(value: object) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))


def _bound(
    forward: Callable[..., Any], positions: dict[int, Any], names: dict[str, Any], signature: inspect.Signature
) -> Callable[..., Any]:
    """Returns a forward pass with constants by position and by name, and with this signature of the other arguments."""

    def with_constants(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        for position, value in sorted(positions.items()):
            given.insert(position, value)
        return forward(*given, **kwargs, **names)

    with_constants.__signature__ = signature  # type: ignore[attr-defined]
    return with_constants
