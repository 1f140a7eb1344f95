"""Opens an exported file in the runtime that its target is for, or in another one."""

import os
from collections.abc import Callable

from fakequant import _targets
from fakequant._executorch.notes import is_program
from fakequant._verify.runtimes.executorch import ExecuTorch
from fakequant._verify.runtimes.interface import Runtime
from fakequant._verify.runtimes.onnx_file import OnnxFile
from fakequant._verify.runtimes.onnxruntime import OnnxRuntime
from fakequant._verify.runtimes.openvino import OpenVino

RUNTIMES: dict[str, Callable[[str | os.PathLike[str], int], Runtime]] = {
    "onnxruntime": OnnxRuntime,
    "openvino": OpenVino,
    "executorch": ExecuTorch,
}
# Their names in text.
NAMES = {runtime.key: runtime.name for runtime in (OnnxRuntime, OpenVino, ExecuTorch)}


def open_file(path: str | os.PathLike[str], runtime: str | None = None, threads: int = 1) -> Runtime:
    """Loads a file in a runtime.

    Args:
        path: The file.
        runtime: A key of `RUNTIMES`. None for the runtime of the file's target.
        threads: The number of threads. ExecuTorch uses those of its pool instead.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the runtime is unknown, or cannot load the file.
        ImportError: If the runtime is not installed.
    """
    if runtime is None and is_program(path):
        runtime = "executorch"
    if runtime is None:
        target = OnnxFile(path).target
        runtime = _targets.TARGETS[target].runtime if target in _targets.TARGETS else "onnxruntime"
    if not isinstance(runtime, str) or runtime not in RUNTIMES:
        raise ValueError(f"`runtime` must be one of {', '.join(RUNTIMES)}, or None, got {runtime!r}.")
    return RUNTIMES[runtime](path, threads)
