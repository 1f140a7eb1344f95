"""Loads and runs ONNX files with OpenVINO's CPU plug-in."""

import os
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fakequant._util.packages import require


def run_once(path: str | os.PathLike[str], feed: dict[str, npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
    """Loads a file and runs it on inputs by name. Raises ImportError without OpenVINO, and whatever that raises."""
    core = import_openvino().Core()
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    return outputs(core.compile_model(core.read_model(path), "CPU", settings), feed)


def outputs(model: Any, feed: dict[str, npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
    """Runs a compiled model. It has no ports for inputs that nothing reads."""
    read = {name for port in model.inputs for name in port.get_names()}
    return [np.array(value) for value in model({name: x for name, x in feed.items() if name in read}).values()]


def import_openvino() -> Any:
    """Imports OpenVINO without its telemetry, which starts a thread and sends statistics."""
    name = "openvino_telemetry"
    if name in sys.modules:
        return require("openvino", "openvino", "openvino")
    sys.modules[name] = None  # type: ignore[assignment]  # this makes the import of the telemetry fail
    try:
        return require("openvino", "openvino", "openvino")
    finally:
        del sys.modules[name]
