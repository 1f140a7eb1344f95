"""`Delegation`: which layers of an exported program XNNPACK computes, in integers or in float."""

import dataclasses
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any, Literal

from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from fakequant._util.shown import Shown
from fakequant._util.text import table

# How an operator is computed: by XNNPACK in integers or in float, or by an operator of ExecuTorch itself.
How = Literal["int8", "float", "not delegated"]

# Operators by the name that the reports use. Those with a number multiply; it is the argument that they sum over.
_LAYERS = {"aten.linear.default": "linear", "aten.convolution.default": "convolution"}
_PRODUCTS = {"aten.addmm.default": "linear", "aten.mm.default": "matmul", "aten.bmm.default": "matmul"}
_ADDITIONS = {"aten.add.Tensor": "add"}
# Operators that do no work: they read sizes, constants and parts of results.
_FREE = ("getitem", "sym_size", "executorch_call_delegate", "alloc", "scalar_tensor")


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operator of an exported program."""

    # The path of the module whose code calls it.
    path: str
    # Its name in torch.
    name: str
    how: How
    # The number of multiplications for inputs like the example.
    multiplications: int = 0


@dataclasses.dataclass(frozen=True, repr=False)
class Delegation(Shown):
    """How the operators of an exported program are computed.

    Attributes:
        layers: Linear layers and convolutions.
        products: Products of two activations.
        additions: Sums of two activations.
        others: Further operators that XNNPACK does not compute.
    """

    layers: tuple[Operation, ...]
    products: tuple[Operation, ...]
    additions: tuple[Operation, ...]
    others: tuple[Operation, ...]

    def multiplications(self, how: How) -> int:
        """Returns the number of multiplications of layers and products that are computed in one way."""
        return sum(one.multiplications for one in (*self.layers, *self.products) if one.how == how)

    @property
    def share(self) -> float:
        """The share of the multiplications of layers that XNNPACK computes in integers, from 0 to 1."""
        total = sum(one.multiplications for one in self.layers)
        return sum(one.multiplications for one in self.layers if one.how == "int8") / total if total else 0.0

    def __str__(self) -> str:
        """Returns the numbers, and a table of what is not computed in integers."""
        total = sum(one.multiplications for one in (*self.layers, *self.products))
        lines = [f"{total:,} multiplications:"]
        for how, words in (("int8", "in integers"), ("float", "in float"), ("not delegated", "not in XNNPACK")):
            number = self.multiplications(how)  # type: ignore[arg-type]
            if number or how == "int8":
                lines.append(f"  {100 * number / total if total else 0:.1f}% {words}")
        for word, found in (("layers", self.layers), ("additions", self.additions)):
            if found:
                in_integers = sum(one.how == "int8" for one in found)
                lines.append(f"{word} in integers: {in_integers} of {len(found)}")
        rest = [one for one in (*self.layers, *self.products, *self.additions) if one.how != "int8"]
        rest += self.others
        if rest:
            rows = [(one.path or "the model", one.name, one.how) for one in rest]
            lines += ["", table(["module", "operator", "computed"], list(dict.fromkeys(rows)))]
        return "\n".join(lines)


def find_delegation(program: ExportedProgram) -> Delegation:
    """Returns the delegation of a program that was lowered."""
    found: dict[str, list[Operation]] = {"layers": [], "products": [], "additions": [], "others": []}
    for node, is_delegated in _operators(program):
        name = node.target.__name__  # type: ignore[union-attr]
        kind, word = _kind(node, name)
        if kind == "others" and (is_delegated or any(part in name for part in _FREE) or not _returns_tensors(node)):
            continue
        how: How = "not delegated" if not is_delegated else "int8" if _is_quantized(node, kind) else "float"
        count = 0 if kind in ("additions", "others") else _multiplications(node)
        found[kind].append(Operation(path_of(node), word, how, count))
    return Delegation(**{kind: tuple(operations) for kind, operations in found.items()})


def find_callers(program: ExportedProgram) -> dict[int | str, list[str]]:
    """Returns which modules call an operator, by its number in the messages of XNNPACK, or by its name."""
    found: dict[int | str, list[str]] = {}
    for node, is_delegated in _operators(program):
        name = node.target.__name__.split(".")[-2] if "." in node.target.__name__ else ""  # type: ignore[union-attr]
        key = node.meta.get("debug_handle", 0) if is_delegated else f"aten::{name}"
        found.setdefault(key, []).append(path_of(node))
    return found


def _operators(program: ExportedProgram) -> Iterator[tuple[Node, bool]]:
    """Yields the calls of operators in a program and in its delegates, and whether they are in a delegate."""
    for node in program.graph.nodes:
        if node.op == "get_attr" and hasattr(getattr(program.graph_module, str(node.target), None), "original_module"):
            delegate = getattr(program.graph_module, str(node.target)).original_module
            yield from ((inner, True) for inner in delegate.graph.nodes if inner.op == "call_function")
        elif node.op == "call_function":
            yield node, False


def _returns_tensors(node: Node) -> bool:
    """Returns False for operators on lengths of axes."""
    value = node.meta.get("val")
    return isinstance(value, (Tensor, tuple, list))


def _kind(node: Node, name: str) -> tuple[str, str]:
    """Returns the field of `Delegation` for a call, and the name of the operator in reports."""
    if name in _LAYERS:
        return "layers", _LAYERS[name]
    if name in _PRODUCTS:
        weight = node.args[2 if name == "aten.addmm.default" else 1]
        is_layer = isinstance(weight, Node) and _is_constant(weight)
        return ("layers", "linear") if is_layer else ("products", "matmul")
    operands = [arg for arg in node.args[:2] if isinstance(arg, Node)]
    is_own = _is_in_quantizer(node)
    if name in _ADDITIONS and len(operands) == 2 and not is_own and not any(map(_is_constant, operands)):
        return "additions", "add"
    return "others", name.removesuffix(".default").replace("aten.", "")


def _is_in_quantizer(node: Node) -> bool:
    """Returns True for the operators that compute a scale at run time."""
    stack = node.meta.get("nn_module_stack") or {}
    return any(str(kind).endswith("DelegatedGrid") for _, kind in stack.values())


def _is_constant(node: Node) -> bool:
    """Returns True if a value does not depend on inputs: a parameter, or one that was moved or dequantized."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
    return node.op == "placeholder" and node.name.startswith(("p_", "b_", "c_"))


def _is_quantized(node: Node, kind: str) -> bool:
    """Returns True if XNNPACK computes a call with an integer kernel."""
    operands = [arg for arg in node.args[:2] if isinstance(arg, Node)]
    if not all(_is_call_of(operand, "dequantize", "constant_pad_nd") for operand in operands):
        return False
    if kind == "layers" and _is_call_of(operands[0], "per_token"):
        return True
    users = list(node.users)
    while len(users) == 1 and _is_call_of(users[0], "relu", "hardtanh"):
        users = list(users[0].users)
    return len(users) == 1 and _is_call_of(users[0], "decomposed.quantize")


def _is_call_of(node: Node, *names: str) -> bool:
    return node.op == "call_function" and any(name in node.target.__name__ for name in names)  # type: ignore[union-attr]


def _multiplications(node: Any) -> int:
    """Returns the number of multiplications of a layer or a product."""
    name = node.target.__name__
    if name == "aten.convolution.default":
        x, weight = (arg.meta["val"].shape for arg in node.args[:2])
        is_transposed = node.args[6]
        return _number(x if is_transposed else node.meta["val"].shape) * _number(weight[1:])
    x = node.args[1 if name == "aten.addmm.default" else 0].meta["val"].shape
    return _number(node.meta["val"].shape) * _number(x[-1:])


def _number(shape: Iterable[Any]) -> int:
    """Returns the number of elements of a tensor."""
    return prod([_length(size) for size in shape])


def _length(size: Any) -> int:
    """Returns the length of an axis in the example, if any length is possible."""
    return size if isinstance(size, int) else int(size.node.hint)


def path_of(node: Node) -> str:
    """Returns the path of the module whose code calls an operator."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values() if isinstance(path, str) and not path.startswith("_empty")]
    return paths[-1] if paths else ""
