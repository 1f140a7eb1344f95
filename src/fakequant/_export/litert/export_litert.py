"""`export_litert`: writes a model to a .tflite file for LiteRT."""

import os
from typing import Any

import torch
from torch import Tensor, nn

from fakequant._backends.torch.torch_private import pytree
from fakequant._export.example import (
    converted,
    first_axes,
    inputs_of,
    require_float32,
    require_suffix,
    results_of,
    without_autocast,
)
from fakequant._export.failures import place_of, reason_of
from fakequant._export.layers import DynamicLength
from fakequant._export.litert.file import schema, write
from fakequant._export.litert.graph import Graph
from fakequant._export.litert.program import make_graph
from fakequant._export.litert.report import LitertExport, how_computed, report_of
from fakequant._export.litert.translation import NoOperator
from fakequant._export.notes import INPUTS, OUTPUTS, PARAMETERS, TARGET, digest_of_parameters
from fakequant._model.running import Args, Batch, Kwargs, check_module
from fakequant._runtimes.litert.running import Loaded, RuntimeFailure, arrays_of, import_runtime
from fakequant._util.files import writing

_TARGET = "litert"


def export_litert(
    model: nn.Module,
    path: str | os.PathLike[str],
    example: Batch,
    *,
    dynamic_batch: bool = False,
    strict: bool = False,
) -> LitertExport:
    """Writes a prepared or converted model to a .tflite file for LiteRT. The model is not changed.

    LiteRT computes a layer in integers if its input and its result are quantized, so prepare the model for the target
    "litert". Everything else is computed in float, between operators that quantize and dequantize. Weights of integer
    layers are stored in bytes, or in 4 bits if they have no more and the scales of the input are computed at run time;
    others are stored as floats. Convolutions have the channels last. Axes are moved only where an operator needs
    another order. The signature of the file has the names of the model's inputs and results.

    Args:
        model: A prepared and calibrated model, or one that was converted for the target "litert".
        path: The file to write. It appears only when it is complete.
        example: One batch, as `prepare` takes it: a tensor, a dict of keyword arguments, or a tuple, of which only the
            arguments that `forward` requires are passed. Arguments that are no tensors are constants of the file.
        dynamic_batch: Whether the first axis of every input may have any length. If False, it has that of the example.
        strict: As in `convert`. Ignored if the model is converted already.

    Returns:
        Which operators are computed in integers, and why others are not. Print it.

    Needs `pip install "fakequant[litert]"`.

    >>> import tempfile, fakequant as fq
    >>> model = fq.prepare(nn.Sequential(nn.Linear(4, 2)), fq.recipes.int8(target="litert"), torch.ones(1, 4))
    >>> model = fq.calibrate(model, [torch.ones(3, 4)], progress=False)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     print(export_litert(model, f"{folder}/model.tflite", torch.ones(1, 4)))
    8 multiplications: 100.0% in integers
    layers in integers: 1 of 1
    transposes: 0
    batches: the length of the example
    """
    check_module(model)
    require_suffix(path, "export_litert")
    args, kwargs = inputs_of(model, example)
    import_runtime()
    schema()
    with writing(path) as unfinished, without_autocast():
        golden = converted(model, _TARGET, strict).eval()
        require_float32(golden, args, kwargs)
        names, results = results_of(golden, args, kwargs)
        shapes = first_axes(args, kwargs, torch.export.Dim("batch", min=1)) if dynamic_batch else None
        graph = _graph(golden, args, kwargs, shapes, names)
        data = write(graph, notes_of(golden, graph, names))
        _require_running(args, kwargs, results, graph, data)
        unfinished.write_bytes(data)
    return report_of(graph, len(data), has_any_batch=dynamic_batch)


def notes_of(golden: nn.Module, graph: Graph, names: list[str]) -> dict[str, Any]:
    """Returns the notes of a file."""
    return {
        TARGET: _TARGET,
        INPUTS: [name for name, _ in graph.inputs],
        OUTPUTS: names,
        PARAMETERS: digest_of_parameters(golden),
        "kernels": _kernels(graph),
    }


def _kernels(graph: Graph) -> dict[str, str]:
    """Returns how the layers with quantized weights are computed, by path. If a layer has several ways, the worst."""
    found: dict[str, str] = {}
    for operator in graph.operators:
        if operator.products and operator.path in graph.weights | {operator.path: None}:
            how = how_computed(operator)
            found[operator.path] = "float" if "float" in (how, found.get(operator.path)) else how
    return found


def _graph(golden: nn.Module, args: Args, kwargs: Kwargs, shapes: Any, names: list[str]) -> Graph:
    """Returns the graph of a file. Raises ValueError with the reason if there is none."""
    try:
        return make_graph(golden, args, kwargs, shapes, names)
    except (DynamicLength, NoOperator):
        raise
    except NotImplementedError as error:
        raise ValueError(f"The model cannot be exported to LiteRT: it has {error}.") from error
    except Exception as error:
        raise ValueError(
            f"The model cannot be exported to LiteRT: {reason_of(error)}{place_of(error, golden)}"
        ) from error


def _require_running(args: Args, kwargs: Kwargs, results: list[Tensor], graph: Graph, data: bytes) -> None:
    """Raises ValueError if LiteRT cannot load or run a file, or if its results have other shapes."""
    inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    try:
        found = Loaded(data, "the file")(arrays_of(inputs))
    except RuntimeFailure as error:
        raise ValueError(
            f"The model cannot be exported: LiteRT cannot run the file that was made of it: {error.reason}\n"
            "Use other operations there, or leave the layer in float with config.skip(...)."
        ) from error
    shapes, expected = [tuple(y.shape) for y in found], [tuple(y.shape) for y in results]
    if shapes != expected:
        raise ValueError(
            f"The model cannot be exported: the file returns tensors of the shapes {shapes}, and the golden model of "
            f"{expected}.\nThis is a bug in fakequant. Please report it."
        )
