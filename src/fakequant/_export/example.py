"""What every export starts with: the path, the golden model, the arguments of the example, and the outputs for them.

Arguments that are not tensors, such as `use_cache=False`, become constants of the file. Exporters would have inputs for
them, or lose the names of dynamic axes.
"""

import copy
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from fakequant._backends.torch.tensor_kernels import dtype_name
from fakequant._backends.torch.torch_private import pytree
from fakequant._convert.convert import conversion, converted_view, find_conversion
from fakequant._convert.golden.integer_layer import IntegerLayer
from fakequant._convert.golden.quantizer import GoldenQuantizer
from fakequant._export.failures import reason_of
from fakequant._model import leaves
from fakequant._model.running import Args, Batch, Kwargs, described_call, example_arguments, hooked
from fakequant._runtimes import RUNTIMES

# The `dynamic_shapes` of torch.export: nested as the arguments are, with a dict from axes to names per tensor.
DynamicShapes: TypeAlias = tuple[Any, ...] | dict[str, Any]

# Parameters that take any number of arguments.
_SEVERAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def require_suffix(path: str | os.PathLike[str], exporter: str) -> None:
    """Raises ValueError if a path has the suffix of files that another exporter writes."""
    for runtime in RUNTIMES.values():
        if runtime.exporter != exporter and runtime.suffix and Path(path).suffix.lower() == runtime.suffix:
            raise ValueError(
                f"`path` is {str(path)!r}, and {runtime.suffix} files have another format.\n"
                f"Use fakequant.{runtime.exporter}, or a path with another suffix."
            )


def converted(model: nn.Module, target: str | None, strict: bool) -> nn.Module:
    """Returns the golden model of a prepared model, or a copy of a model that was converted for the target.

    Its floats may share their memory with the model.
    """
    if find_conversion(model) is None:
        golden = converted_view(model, target=target, strict=strict)
    elif target is None or target == conversion(model).target:
        # Codes and floats are shared with the model: exporters change modules, and no tensor.
        golden = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    else:
        raise ValueError(
            f"The model was converted for the target {conversion(model).target!r}, not for {target!r}.\n"
            f"Use fakequant.convert(model, target={target!r}) of the prepared model."
        )
    return golden


def require_float32(model: nn.Module, args: Args, kwargs: Kwargs) -> None:
    """Raises ValueError if the model or an input has floats of another type than float32."""
    inputs = {**{f"example input {number}": x for number, x in enumerate(args)}, **kwargs}
    for name, value in (*model.named_parameters(), *model.named_buffers(), *inputs.items()):
        if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float32:
            raise ValueError(
                f"{name} is {dtype_name(value.dtype)}; only float32 models can be exported.\n"
                "Use model.float() and float32 inputs."
            )


@contextmanager
def without_autocast() -> Iterator[None]:
    """Context in which autocast is off."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


class _Autocast(ValueError):
    """The model's forward pass switches autocast on."""


def results_of(model: nn.Module, args: Args, kwargs: Kwargs) -> tuple[list[str], list[Tensor]]:
    """Runs the model once, and returns the names of the tensors in its result, and these.

    Raises ValueError if its forward pass switches autocast on, or fails, or returns nothing that a file can.
    """

    def look(module: nn.Module, inputs: Args) -> None:
        if torch.is_autocast_enabled("cpu"):
            raise _Autocast(
                "The model's forward pass switches torch.autocast on, but only float32 models can be exported.\n"
                "Remove the autocast wrapper first, e.g. with "
                "accelerator.unwrap_model(model, keep_fp32_wrapper=False)."
            )

    looked_at = (m for m in model.modules() if isinstance(m, (IntegerLayer, GoldenQuantizer)))
    try:
        with hooked(m.register_forward_pre_hook(look) for m in looked_at), torch.no_grad():
            result = model(*_copied(args), **_copied(kwargs))
    except _Autocast:
        raise
    except Exception as error:
        raise ValueError(
            f"The model cannot be exported because it fails on the example inputs: {reason_of(error)}\n"
            f"{described_call(model, args, kwargs)}"
        ) from error
    try:
        names = leaves.names(result)
    except TypeError as error:
        raise ValueError(str(error)) from error
    if not names:
        raise ValueError(f"The model returns no tensor, only {result!r}, so there is nothing to export.")
    return names, leaves.tensors(result)


def _copied(inputs: Any) -> Any:
    return pytree.tree_map_only(Tensor, torch.clone, inputs)


def inputs_of(model: nn.Module, example: Batch) -> tuple[Args, Kwargs]:
    """Returns the arguments of the model for `example`, those by keyword in the order of the model's parameters."""
    args, kwargs = example_arguments(model, example)
    order = {name: number for number, name in enumerate(inspect.signature(model.forward).parameters)}
    return args, dict(sorted(kwargs.items(), key=lambda item: order.get(item[0], len(order))))


def first_axes(args: Args, kwargs: Kwargs, axis: object) -> DynamicShapes:
    """Returns the `dynamic_shapes` in which the first axis of every input is `axis`, a name or a `torch.export.Dim`."""

    def of(x: object) -> Any:
        return {0: axis} if isinstance(x, Tensor) and x.dim() > 0 else None

    return tuple(map(of, args)) if args else {name: of(x) for name, x in kwargs.items()}


def repeated(inputs: Any, length: int) -> Any:
    """Returns inputs with this number of rows, which are those of the given ones."""

    def of(x: Tensor) -> Tensor:
        return x[torch.arange(length) % len(x)] if x.dim() > 0 and len(x) else x

    return pytree.tree_map_only(Tensor, of, inputs)


@contextmanager
def any_batch() -> Iterator[None]:
    """Makes torch choose the same convolution for batches of any length. It limits lengths to those with one choice.

    torch would choose others for single images, and from 16 images on.
    """
    with torch.backends.nnpack.flags(enabled=False), torch.backends.mkldnn.flags(enabled=False):
        yield


def bind_constants(model: nn.Module, args: Args, kwargs: Kwargs, shapes: Any) -> tuple[Args, Kwargs, Any]:
    """Makes arguments without tensors constants of a model, in place. Returns the others, and their shapes.

    `shapes` has the axes of arguments that may have any length, as in `torch.export`, or is None.
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
