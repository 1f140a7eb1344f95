"""Writes the float model of a prepared model for the runtime of an exported file."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fakequant._convert.constant_arguments import bind_constants
from fakequant._convert.result_leaves import return_tensors
from fakequant._executorch.notes import FILE, UNSEALED, sealed
from fakequant._executorch.program import make_float_program
from fakequant._onnx.export_onnx import TORCHS_LOWEST, quiet_exporter, reason_of, torch_export, without_autocast
from fakequant._onnx.metadata_keys import PARAMETERS, TARGET
from fakequant._prepare.prepare import unprepare
from fakequant._util.optional_packages import require
from fakequant._verify.runtimes.interface import Runtime
from fakequant._verify.runtimes.onnx_file import OnnxFile


def write_float(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], file: Runtime, folder: Path) -> Path:
    """Writes the float model of a prepared model, which is not changed, and returns the path of the new file.

    Args:
        model: The prepared model.
        args: Its positional arguments, as an example.
        kwargs: Its keyword arguments.
        file: The exported file. An ONNX file has the same opset and the same dynamic axes, if torch can export them.
            A program takes batches of the example's shape.
        folder: Where to write.
    """
    made = unprepare(copy.deepcopy(model)).eval()
    return_tensors(made)
    args, kwargs, _ = bind_constants(made, args, kwargs, None)
    try:
        with torch.no_grad(), without_autocast(), _without_fast_path():
            if isinstance(file, OnnxFile):
                return _write_onnx(made, args, kwargs, file, folder / "float.onnx")
            notes = {TARGET: "float", PARAMETERS: "", FILE: UNSEALED}
            (folder / "float.pte").write_bytes(sealed(make_float_program(made, args, kwargs, notes)))
            return folder / "float.pte"
    except Exception as error:
        raise ValueError(f"The float model cannot be exported to compare its time: {reason_of(error)}") from error


def _write_onnx(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], file: OnnxFile, path: Path) -> Path:
    onnx, ir = require("onnx", "onnx"), require("onnx_ir", "onnxscript")
    opset = max(file.opset, TORCHS_LOWEST)
    axes = file.dynamic_axes()
    by_position = tuple(of for name, of in axes.items() if name not in kwargs)
    shapes: Any = by_position if not kwargs else axes if not args else None
    with quiet_exporter():
        try:
            program = torch_export(model, args, kwargs, opset, shapes)
        except Exception:
            if shapes is None:
                raise
            program = torch_export(model, args, kwargs, opset, None)
    onnx.save(ir.serde.serialize_model(program), path)
    return path


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """Context in which transformer layers call the usual operators, because runtimes have no kernel for the others."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
