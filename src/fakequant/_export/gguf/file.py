"""GGUF files: their metadata and tensors, read and written. The package `gguf` knows the format."""

import hashlib
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fakequant._export.gguf.blocks import Array
from fakequant._util.packages import require

EXTRA = "gguf"
# The number of bytes of an element in the types without blocks.
FLOATS = {"F32": 4, "F16": 2, "BF16": 2}
# Bytes of metadata that the writer adds by itself.
_ARCHITECTURE, _ALIGNMENT = "general.architecture", "general.alignment"


class Field(NamedTuple):
    """A value of the metadata."""

    value: Any
    # The type of the value, as `GGUFValueType` names it, and the type of its elements if it is a list.
    type: str
    items: str | None = None


class FileTensor(NamedTuple):
    """A tensor of a file."""

    name: str
    # As ggml names it.
    type: str
    # The sizes of its axes, in torch's order.
    shape: tuple[int, ...]
    # Returns its bytes, uint8, one row per row. They are made when they are written.
    read: Callable[[], Array]


Metadata = dict[str, Field]


def field(value: Any) -> Field:
    """Returns a value with the type that llama.cpp expects: 32-bit numbers, strings, and lists of them.

    >>> field(0.1).value, field([1, 2]).items
    (0.10000000149011612, 'INT32')
    """
    if isinstance(value, list):
        first = field(value[0])
        return Field([field(item).value for item in value], "ARRAY", "INT32" if first.type == "UINT32" else first.type)
    if isinstance(value, bool):
        return Field(value, "BOOL")
    if isinstance(value, float):
        return Field(float(np.float32(value)), "FLOAT32")
    return Field(value, "STRING" if isinstance(value, str) else "UINT32")


def gguf() -> Any:
    """Returns the package `gguf`."""
    return require("gguf", "gguf", EXTRA)


class GgufFile:
    """A file that is read.

    Raises FileNotFoundError or ValueError, with the file and what to do, if there is none or it is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"There is no file {str(path)!r}.")
        try:
            reader = gguf().GGUFReader(self.path)
            fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
            self.metadata: Metadata = {name: _field(field) for name, field in fields.items()}
            self.tensors: dict[str, FileTensor] = {tensor.name: _tensor(tensor) for tensor in reader.tensors}
        except (ValueError, KeyError, IndexError, OverflowError, MemoryError, UnicodeDecodeError) as error:
            words = str(error) or type(error).__name__
            raise ValueError(
                f"{self.path} is no GGUF file, or it is damaged: {words}.\nExport, copy or download it again."
            ) from error

    @property
    def architecture(self) -> str:
        """The architecture, as llama.cpp names it. Raises ValueError if the file does not say it."""
        field = self.metadata.get(_ARCHITECTURE)
        if field is None or not isinstance(field.value, str):
            raise ValueError(f"{self.path} does not say its architecture ({_ARCHITECTURE}), so it is no model.")
        return field.value


def _field(field: Any) -> Field:
    items = field.types[-1].name if field.types[0].name == "ARRAY" and len(field.types) > 1 else None
    return Field(field.contents(), field.types[0].name, items)


def _tensor(tensor: Any) -> FileTensor:
    data = tensor.data
    shape = tuple(int(size) for size in reversed(tensor.shape))

    def read() -> Array:
        return np.ascontiguousarray(data).view(np.uint8).reshape(*shape[:-1], -1)

    return FileTensor(tensor.name, tensor.tensor_type.name, shape, read)


def write(path: Path, metadata: Metadata, tensors: Iterable[FileTensor]) -> int:
    """Writes a file, and returns the number of bytes of its tensors."""
    package = gguf()
    writer = package.GGUFWriter(path, metadata[_ARCHITECTURE].value)
    total = 0
    try:
        for name, field in metadata.items():
            if name == _ALIGNMENT:
                writer.add_custom_alignment(field.value)
            elif name != _ARCHITECTURE:
                items = None if field.items is None else package.GGUFValueType[field.items]
                writer.add_key_value(name, field.value, package.GGUFValueType[field.type], items)
        ordered = list(tensors)
        for tensor in ordered:
            kind = package.GGMLQuantizationType[tensor.type]
            length, size = package.GGML_QUANT_SIZES[kind]
            size = math.prod(tensor.shape) // length * size
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), size, kind)
            total += size
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in ordered:
            writer.write_tensor_data(tensor.read())
    finally:
        writer.close()
    return total


def digest_of(metadata: Metadata, without: str) -> str:
    """Returns the SHA-256 of all metadata but one value."""
    found = hashlib.sha256()
    for name, field in sorted(metadata.items()):
        if name != without:
            found.update(repr((name, field.type, field.items, field.value)).encode())
    return found.hexdigest()
