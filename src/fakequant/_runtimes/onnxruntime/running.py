"""Loads and runs ONNX files with ONNX Runtime."""

import os
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy.typing as npt
import torch

from fakequant._util.packages import require

PROVIDERS = ["CPUExecutionProvider"]
# Weight-only layers multiply a float input by codes. At accuracy level 4, the default of a session, their kernel rounds
# its input to 8 bits, in blocks along the last axis. At level 1 it does not.
EXACT_LEVEL = 1


def run_once(path: str | os.PathLike[str], feed: dict[str, npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
    """Loads a file and runs it on inputs by name. Raises ImportError without ONNX Runtime, and whatever that raises."""
    ort = require("onnxruntime", "onnxruntime")
    session = ort.InferenceSession(str(path), options(ort, torch.get_num_threads()), providers=PROVIDERS)
    found: list[npt.NDArray[Any]] = session.run(None, feed)
    return found


def options(ort: ModuleType, threads: int, level: int | None = EXACT_LEVEL, folder: Path | None = None) -> Any:
    """Returns the options of a session with all optimizations.

    Args:
        ort: ONNX Runtime.
        threads: The number of threads.
        level: The accuracy level. None for the default.
        folder: Where a second file of a model that is given as bytes is.
    """
    settings = ort.SessionOptions()
    if folder is not None:
        settings.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    if level is not None:
        settings.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", str(level))
    settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    settings.intra_op_num_threads = threads
    settings.log_severity_level = 3  # no warnings
    # Threads that wait would slow down other sessions, which are timed in turn.
    settings.add_session_config_entry("session.force_spinning_stop", "1")
    return settings
