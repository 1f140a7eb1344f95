"""`export_executorch`: writes a model to a program for ExecuTorch, with integer kernels of XNNPACK."""

import json
import os
from typing import Any

import torch
from torch import Tensor, nn

from fakequant._backends.torch.torch_private import pytree
from fakequant._export.example import (
    converted,
    first_axes,
    inputs_of,
    repeated,
    require_float32,
    require_suffix,
    results_of,
    without_autocast,
)
from fakequant._export.executorch.delegation import Delegation
from fakequant._export.executorch.notes import FILE
from fakequant._export.executorch.program import MissingKernel, Program, make_program
from fakequant._export.failures import reason_of
from fakequant._export.layers import DynamicLength
from fakequant._export.notes import OUTPUTS, PARAMETERS, TARGET, digest_of_parameters
from fakequant._export.seal import UNSEALED, sealed
from fakequant._model.running import Args, Batch, Kwargs, check_module
from fakequant._runtimes.xnnpack.running import Loaded, RuntimeFailure, import_executorch, require_elements
from fakequant._util.files import writing

_TARGET = "xnnpack"


def export_executorch(
    model: nn.Module,
    path: str | os.PathLike[str],
    example: Batch,
    *,
    max_batch: int | None = None,
    dynamic_shapes: Any = None,
    strict: bool = False,
) -> Delegation:
    """Writes a prepared or converted model to an ExecuTorch program (.pte). The model is not changed.

    XNNPACK computes a layer in integers if its input and its result are quantized, so prepare the model for the target
    "xnnpack". Weights of integer layers are stored in bytes, or in 4 bits if they have no more and the scales of
    the input are computed at run time; others are stored as floats. Batch norms are folded into the layers
    before them. Autocast is disabled during the export.

    Args:
        model: A prepared and calibrated model, or one that was converted for the target "xnnpack".
        path: The file to write. It appears only when it is complete.
        example: One batch, as `prepare` takes it: a tensor, a dict of keyword arguments, or a tuple, of which only the
            arguments that `forward` requires are passed. Arguments that are not tensors are constants of the program.
        max_batch: The largest length of the first axis of every input. The program reserves memory for it. If None,
            the length is that of the example.
        dynamic_shapes: The axes that may have other lengths, in the format of `torch.export`: a tuple or dict with one
            entry per input, each a dict from axis to `torch.export.Dim` with a maximum. Overrides `max_batch`.
        strict: As in `convert`. Ignored if the model is converted already.

    Returns:
        Which layers XNNPACK computes, in integers or in float. Print it.

    Needs `pip install "fakequant[executorch]"`.

    >>> import tempfile, fakequant as fq
    >>> model = fq.prepare(nn.Sequential(nn.Linear(4, 2)), fq.recipes.int8(target="xnnpack"), torch.ones(1, 4))
    >>> model = fq.calibrate(model, [torch.ones(3, 4)], progress=False)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     print(export_executorch(model, f"{folder}/model.pte", torch.ones(1, 4)))
    8 multiplications:
      100.0% in integers
    layers in integers: 1 of 1
    """
    check_module(model)
    require_suffix(path, "export_executorch")
    args, kwargs = inputs_of(model, example)
    shapes = dynamic_shapes
    if dynamic_shapes is None and max_batch is not None:
        shapes = _batches(args, kwargs, max_batch)
        # The example must be as long: torch limits an axis to lengths for which it would choose the same convolution.
        args, kwargs = repeated((args, kwargs), max_batch)
    import_executorch()
    require_elements([x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)], "The example")
    with writing(path) as unfinished, without_autocast():
        golden = converted(model, _TARGET, strict).eval()
        require_float32(golden, args, kwargs)
        names, results = results_of(golden, args, kwargs)
        notes = {
            TARGET: _TARGET,
            OUTPUTS: json.dumps(names),
            PARAMETERS: digest_of_parameters(golden),
            FILE: UNSEALED,
        }
        program = _program(golden, args, kwargs, shapes, notes)
        data = sealed(program.data)
        _require_running(args, kwargs, results, program, data)
        if dynamic_shapes is None and max_batch is not None:
            args, kwargs = repeated((args, kwargs), 1)
            _require_running(args, kwargs, results_of(golden, args, kwargs)[1], program, data)
        unfinished.write_bytes(data)
    return program.delegation


def _require_running(args: Args, kwargs: Kwargs, results: list[Tensor], program: Program, data: bytes) -> None:
    """Raises ValueError if ExecuTorch cannot load or run a program, or if its results have other shapes."""
    inputs = [x.contiguous() for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    try:
        found = Loaded(data, "the program")(inputs)
    except RuntimeFailure as error:
        where = error.caller(program.callers) or _layers_in_xnnpack(program.delegation)
        raise ValueError(
            f"The model cannot be exported: ExecuTorch cannot run the program that was made of it"
            f"{f', because of {where}' if where else ''}: {error.reasons[0]}\n"
            f"Use other operations there, or leave the layer in float with config.skip(...)."
        ) from error
    shapes, expected = ([(tuple(y.shape), y.dtype) for y in some] for some in (found, results))
    if shapes != expected:
        raise ValueError(
            f"The model cannot be exported: the program returns {_in_words(shapes)}, and the golden model returns "
            f"{_in_words(expected)}.\nReturn tensors only, each of them once."
        )


def _layers_in_xnnpack(delegation: Delegation) -> str:
    """Returns the layers that XNNPACK computes, for messages that have only the number of a tensor."""
    paths = dict.fromkeys(one.path or "the model" for one in delegation.layers if one.how != "not delegated")
    return f"one of the layers {', '.join(paths)}" if paths else ""


def _in_words(results: list[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{dtype} of shape {shape}".removeprefix("torch.") for shape, dtype in results) or "nothing"


def _batches(args: Args, kwargs: Kwargs, max_batch: int) -> Any:
    """Returns the `dynamic_shapes` that let the first axis of every input have any length up to `max_batch`."""
    inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() > 0]
    longest = max((len(x) for x in inputs), default=2)
    if type(max_batch) is not int or max_batch < max(longest, 2):
        raise ValueError(
            f"`max_batch` must be a number from {max(longest, 2)}, the length of the example, or None, "
            f"got {max_batch!r}."
        )
    return first_axes(args, kwargs, torch.export.Dim("batch", min=1, max=max_batch))


def _program(golden: nn.Module, args: Args, kwargs: Kwargs, shapes: Any, notes: dict[str, str]) -> Program:
    """Returns the program. Raises ValueError with the reason if torch or ExecuTorch cannot make it."""
    try:
        return make_program(golden, args, kwargs, shapes, notes=notes)
    except (DynamicLength, MissingKernel):
        raise
    except Exception as error:
        raise ValueError(f"The model cannot be exported to ExecuTorch: {reason_of(error)}") from error
