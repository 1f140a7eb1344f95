"""From a golden model to the graph of a .tflite file."""

import copy
import inspect
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from inspect import Parameter
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from fakequant._convert.convert import conversion
from fakequant._export.example import any_batch, bind_constants, first_axes, repeated
from fakequant._export.failures import place_of, reason_of
from fakequant._export.function_forms import FunctionForms
from fakequant._export.layers import DynamicLength
from fakequant._export.litert.exported_modules import Tables, make_exportable
from fakequant._export.litert.file import write
from fakequant._export.litert.graph import Graph
from fakequant._export.litert.operations import NoOperator
from fakequant._export.litert.report import how_computed
from fakequant._export.litert.translation import KNOWN, translate
from fakequant._export.notes import INPUTS, OUTPUTS, PARAMETERS, TARGET, digest_of_parameters
from fakequant._model.leaves import return_tensors
from fakequant._model.running import Args, Kwargs
from fakequant._runtimes import TARGETS
from fakequant._runtimes.litert import target as litert
from fakequant._runtimes.target import Target

_ONE_LENGTH = "Use dynamic_batch=False for batches of the example's length."
# The length of the batch when a model is traced for any.
_LENGTH = 3
# The note on how layers are computed, by path.
KERNELS = "kernels"


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


@torch.no_grad()
def make_graph(golden: nn.Module, args: Args, kwargs: Kwargs, results: list[str], *, has_any_batch: bool) -> Graph:
    """Returns the graph of a golden model, which is not changed.

    Args:
        golden: The converted model.
        args: Its positional arguments, as an example.
        kwargs: Its keyword arguments.
        results: The names of its results.
        has_any_batch: Whether the first axis of every input may have any length.

    Raises:
        ValueError: If there is none. The message has the reason.
    """
    shapes = None
    if has_any_batch:
        shapes = first_axes(args, kwargs, torch.export.Dim("batch", min=1))
        # torch makes axes of length 1 constants. A file is the same for examples of all lengths.
        args, kwargs = repeated((args, kwargs), _LENGTH)
    model = copy.deepcopy(golden).eval()
    tables = make_exportable(model)
    try:
        return _graph_of(model, tables, TARGETS[conversion(golden).target], args, kwargs, shapes, results)
    except (DynamicLength, NoOperator):
        raise
    except NotImplementedError as error:
        advice = _ONE_LENGTH if has_any_batch else "Use other operations there."
        raise ValueError(f"The model cannot be exported to LiteRT: it has {error}.\n{advice}") from error
    except Exception as error:
        reason = f"{reason_of(error)}{place_of(error, model)}"
        advice = f"\n{_ONE_LENGTH}" if has_any_batch else ""
        raise ValueError(f"The model cannot be exported to LiteRT: {reason}{advice}") from error


def file_of(golden: nn.Module, graph: Graph, results: list[str]) -> bytes:
    """Returns the file of a golden model, with notes."""
    notes = {
        TARGET: conversion(golden).target,
        INPUTS: [name for name, _ in graph.inputs],
        OUTPUTS: results,
        PARAMETERS: digest_of_parameters(golden),
        KERNELS: _kernels(graph),
    }
    return write(graph, notes)


def _kernels(graph: Graph) -> dict[str, str]:
    """Returns how layers are computed, by path. If a layer has several ways, the one in float."""
    found: dict[str, str] = {}
    for operator in graph.operators:
        if operator.products and operator.code != "BATCH_MATMUL":
            how = how_computed(operator)
            found[operator.path] = "float" if "float" in (how, found.get(operator.path)) else how
    return found


def make_float_graph(model: nn.Module, args: Args, kwargs: Kwargs, results: list[str]) -> Graph:
    """Returns the graph of a float model. See `make_graph`."""
    with torch.no_grad():
        return _graph_of(copy.deepcopy(model).eval(), Tables(), litert.TARGETS[0], args, kwargs, None, results)


def _graph_of(
    model: nn.Module, tables: Tables, target: Target, args: Args, kwargs: Kwargs, shapes: Any, results: list[str]
) -> Graph:
    return_tensors(model)
    args, kwargs, shapes = bind_constants(model, args, kwargs, shapes)
    shapes = _nested(model, shapes)
    with _quiet():
        model(*args, **kwargs)  # makes the parts of weights that are used by themselves
        with FunctionForms(), any_batch():
            program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
        program = _decomposed(program)
    return translate(program, tables, target, results)


def _nested(model: nn.Module, shapes: Any) -> Any:
    """Returns the shapes of arguments as torch takes them: the shapes of `*args` are one tuple."""
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    if Parameter.VAR_POSITIONAL not in kinds or not isinstance(shapes, tuple):
        return shapes
    start = kinds.index(Parameter.VAR_POSITIONAL)
    return (*shapes[:start], shapes[start:]) if start < len(shapes) else shapes


def _decomposed(program: ExportedProgram) -> ExportedProgram:
    """Decomposes the operators that have no translation."""
    table = torch.export.default_decompositions()
    decomposed: ExportedProgram = program.run_decompositions({op: how for op, how in table.items() if op not in KNOWN})
    return decomposed
