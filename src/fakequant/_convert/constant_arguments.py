"""Arguments of a model that are constants of an exported file: those that are no tensors, such as `use_cache=False`.

Exporters would have inputs for them, or lose the names of dynamic axes.
"""

import functools
from typing import Any

from torch import Tensor, nn

from fakequant._backends.torch.torch_private import pytree


def bind_constants(model: nn.Module, kwargs: dict[str, Any], shapes: Any) -> tuple[dict[str, Any], Any]:
    """Makes keyword arguments without tensors constants of a model, in place. Returns the others, and their shapes.

    Args:
        model: The model.
        kwargs: Its keyword arguments.
        shapes: The axes of these that may have any length, as in `torch.export`, or None.
    """
    constants = {
        name: value
        for name, value in kwargs.items()
        if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))
    }
    if constants:
        model.forward = functools.partial(model.forward, **constants)
    kwargs = {name: value for name, value in kwargs.items() if name not in constants}
    if isinstance(shapes, dict):
        shapes = {name: shape for name, shape in shapes.items() if name not in constants}
    return kwargs, shapes
