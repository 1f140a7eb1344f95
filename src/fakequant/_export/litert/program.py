"""From a golden model to the graph of a .tflite file."""

import copy
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from fakequant._export.example import bind_constants
from fakequant._export.function_forms import FunctionForms
from fakequant._export.litert.exported_modules import Tables, make_exportable
from fakequant._export.litert.graph import Graph
from fakequant._export.litert.translation import KNOWN, translate
from fakequant._model.leaves import return_tensors
from fakequant._model.running import Args, Kwargs


@contextmanager
def _any_batch() -> Iterator[None]:
    """Makes torch choose the same convolution for batches of any length. It limits lengths to those with one choice."""
    with torch.backends.nnpack.flags(enabled=False), torch.backends.mkldnn.flags(enabled=False):
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


@torch.no_grad()
def make_graph(golden: nn.Module, args: Args, kwargs: Kwargs, shapes: Any, results: list[str]) -> Graph:
    """Returns the graph of a golden model, which is not changed.

    Args:
        golden: The converted model.
        args: Its positional arguments, as an example.
        kwargs: Its keyword arguments.
        shapes: The axes that may have any length, as in `torch.export`, or None.
        results: The names of its results.
    """
    model = copy.deepcopy(golden).eval()
    tables = make_exportable(model)
    return _graph_of(model, tables, args, kwargs, shapes, results)


def make_float_graph(model: nn.Module, args: Args, kwargs: Kwargs, results: list[str]) -> Graph:
    """Returns the graph of a float model. See `make_graph`."""
    with torch.no_grad():
        return _graph_of(copy.deepcopy(model).eval(), Tables(), args, kwargs, None, results)


def _graph_of(
    model: nn.Module, tables: Tables, args: Args, kwargs: Kwargs, shapes: Any, results: list[str]
) -> Graph:
    return_tensors(model)
    args, kwargs, shapes = bind_constants(model, args, kwargs, shapes)
    with _quiet():
        model(*args, **kwargs)  # makes the parts of weights that are used by themselves
        with FunctionForms(), _any_batch():
            program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
        program = _decomposed(program)
    return translate(program, tables, results)


def _decomposed(program: ExportedProgram) -> ExportedProgram:
    """Decomposes the operators that have no translation."""
    table = torch.export.default_decompositions()
    return program.run_decompositions({op: function for op, function in table.items() if op not in KNOWN})
