"""Notes in exported programs: what a file was made for, from which parameters, and whether it has changed since.

Notes are methods of the program that return a string. The last one is the seal of the file.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from fakequant._export.notes import INPUTS, OUTPUTS, PARAMETERS, TARGET
from fakequant._export.seal import is_unchanged
from fakequant._runtimes.xnnpack.running import collecting_messages, import_runtime

FILE = "fakequant.file"
# What follows the first four bytes of every program.
MAGIC = b"ET12"


@dataclasses.dataclass(frozen=True)
class Notes:
    """The notes of an exported file."""

    # The target that the model was converted for.
    target: str
    # The names of the model's arguments, in the order of the program's inputs.
    inputs: tuple[str, ...]
    # The names of the model's results, in the order of the program's outputs. None in files of older versions.
    outputs: list[str] | None
    # The hash of the golden model's parameters.
    parameters: str
    # Whether the file is as `export_executorch` wrote it.
    is_unchanged: bool


def read_notes(path: str | os.PathLike[str]) -> Notes:
    """Returns the notes of a file. Raises ValueError if it is damaged, or was not written by `export_executorch`."""
    data = Path(path).read_bytes()
    if data[4:8] != MAGIC:
        kind = "is empty" if not data else "is not an ExecuTorch program"
        raise ValueError(f"{str(path)!r} {kind}.\nUse a .pte file that fakequant.export_executorch wrote.")
    methods = _methods(data, path)
    try:
        inputs = tuple(json.loads(methods[INPUTS]))
        outputs = json.loads(methods[OUTPUTS]) if OUTPUTS in methods else None
        return Notes(methods[TARGET], inputs, outputs, methods[PARAMETERS], is_unchanged(data))
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"{str(path)!r} was not written by fakequant.export_executorch: its notes are missing.\n"
            "Use fakequant.export_executorch to write it."
        ) from error


def _methods(data: bytes, path: object) -> dict[str, Any]:
    """Returns the results of the methods that are notes, by name."""
    runtime = import_runtime()
    try:
        with collecting_messages():
            program = runtime.Runtime.get().load_program(data, verification=runtime.Verification.InternalConsistency)
            names = [name for name in (TARGET, INPUTS, OUTPUTS, PARAMETERS, FILE) if name in program.method_names]
            return {name: program.load_method(name).execute([])[0] for name in names}
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"{str(path)!r} is damaged, or was written by another version of ExecuTorch: it cannot be loaded.\n"
            "Use fakequant.export_executorch to write it again."
        ) from error
