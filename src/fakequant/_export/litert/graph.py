"""The graph of a file in memory: tensors and operators, as the schema of LiteRT has them."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class AnyLength(int):
    """The length of an axis in the example, where the file takes any length."""


# The order of the axes of a tensor: the axis `order[i]` of torch's tensor is axis `i` of the file's.
Order = tuple[int, ...]


@dataclasses.dataclass(eq=False)
class Tensor:
    """A tensor of a file."""

    shape: tuple[int, ...]
    # The name of a NumPy dtype, or "int4".
    dtype: str
    name: str = ""
    # Its values, for constants.
    data: Array | None = None
    # Scales and zero points of codes: one of each, or one for each index along `axis`.
    scale: Array | None = None
    zero_point: int = 0
    axis: int = 0

    @property
    def is_codes(self) -> bool:
        """Whether the tensor has codes of activations."""
        return self.scale is not None

    @property
    def signature(self) -> tuple[int, ...]:
        """The shape, with -1 for any length."""
        return tuple(-1 if isinstance(length, AnyLength) else length for length in self.shape)


@dataclasses.dataclass(eq=False)
class Operator:
    """An operator of a file."""

    code: str
    inputs: list[Tensor | None]
    outputs: list[Tensor]
    # The class of its options in the schema without "OptionsT", and their values.
    options: tuple[str, dict[str, Any]] | None
    # The path of the module whose code calls it.
    path: str
    # The number of multiplications for inputs like the example, of operators that sum products.
    products: int = 0
    # Why it is computed in float, if a kernel in integers could be expected.
    why_float: str = ""
    # Whether it is a part of what stands for DEQUANTIZE.
    is_conversion: bool = False


class Graph:
    """The operators of a file, in order."""

    def __init__(self) -> None:
        self.operators: list[Operator] = []
        self.inputs: list[tuple[str, Tensor]] = []
        self.outputs: list[tuple[str, Tensor]] = []
        # The tensors of quantizers with a fixed scale, by the name of the call, and the order of their axes.
        self.codes: dict[str, tuple[Tensor, Order]] = {}
        # The path of the module whose code is being translated.
        self.path = ""
        self._constants: dict[Any, Tensor] = {}

    def add(
        self,
        code: str,
        inputs: Sequence[Tensor | None],
        outputs: Iterable[Tensor],
        options: tuple[str, dict[str, Any]] | None = None,
        **more: Any,
    ) -> Tensor:
        """Adds an operator, and returns its first output."""
        made = Operator(code, list(inputs), list(outputs), options, more.pop("path", self.path), **more)
        self.operators.append(made)
        return made.outputs[0]

    def constant(self, values: Any, dtype: str, name: str = "") -> Tensor:
        """Returns a constant. Equal ones without scales are one tensor."""
        array = np.ascontiguousarray(values, dtype=dtype)
        key = (dtype, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = Tensor(array.shape, dtype, name, array)
        return self._constants[key]

    def drop_unused(self) -> None:
        """Removes operators whose results nothing reads, and the names of codes that are not computed."""
        used = {id(tensor) for _, tensor in self.outputs}
        kept = []
        for operator in reversed(self.operators):
            if any(id(tensor) in used for tensor in operator.outputs):
                used |= {id(tensor) for tensor in operator.inputs if tensor is not None}
                kept.append(operator)
        self.operators = kept[::-1]
        self.codes = {name: found for name, found in self.codes.items() if id(found[0]) in used}

    def tensors(self) -> list[Tensor]:
        """Returns all tensors, each once."""
        found = {id(tensor): tensor for _, tensor in (*self.inputs, *self.outputs)}
        for operator in self.operators:
            found |= {id(tensor): tensor for tensor in (*operator.inputs, *operator.outputs) if tensor is not None}
        return list(found.values())
