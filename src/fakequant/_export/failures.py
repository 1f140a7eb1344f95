"""Why an export failed: the first cause, and the module in whose code it arose."""

from collections.abc import Iterable, Iterator
from types import FrameType

import torch
from torch import nn


def reason_of(error: BaseException) -> str:
    """Returns the start of the root cause's message, without torch's general advice."""
    error = root_of(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) if lines else type(error).__name__


def root_of(error: BaseException) -> BaseException:
    """Returns the first cause of an error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def place_of(error: BaseException, model: nn.Module) -> str:
    """Returns the module in whose code an error of torch's exporter arose, as a sentence on a line of its own.

    A model is traced first: the modules are those whose code ran. Then the nodes of its graph are translated: each
    knows its module. Returns an empty string if the error names neither.
    """
    names = {id(module): path for path, module in model.named_modules()}
    found = [path for frame in _frames(error) for path in _paths(frame, names)]
    return in_modules(found[-1:])


def in_modules(paths: Iterable[str]) -> str:
    """Returns the sentence that names modules.

    >>> in_modules(["body.0", ""])
    "\\nThis is in 'body.0' and the model itself."
    """
    named = [repr(path) if path else "the model itself" for path in paths]
    return f"\nThis is in {' and '.join(named)}." if named else ""


def _frames(error: BaseException | None) -> Iterator[FrameType]:
    """Yields the frames that an error and its causes have passed, the innermost of the root cause last."""
    while error is not None:
        trace = error.__traceback__
        while trace is not None:
            yield trace.tb_frame
            trace = trace.tb_next
        error = error.__cause__


def _paths(frame: FrameType, names: dict[int, str]) -> Iterator[str]:
    owner, node = frame.f_locals.get("self"), frame.f_locals.get("node")
    if isinstance(owner, nn.Module) and id(owner) in names:
        yield names[id(owner)]
    if isinstance(node, torch.fx.Node):
        # From the name that the tracer gave a module to its path and class, the outermost module first.
        stack = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
        yield from stack[-1:]
