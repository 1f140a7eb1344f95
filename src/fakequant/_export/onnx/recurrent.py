"""Recurrent layers as Scan nodes: a file has one step of each layer and direction, for sequences of any length.

    products of the input, for all steps   first state
                 |                              |
                 +------------ Scan ------------+      its body: quantizer -> product of the hidden state -> gates
                                 |
              results of all steps, last state

For torch's exporter all steps are one operator. One step is exported by itself, and becomes the body of the Scan. Its
tensors are in the body too: ONNX Runtime looks for 4-bit weights only there, and its steps are faster without tensors
from outside.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn

from fakequant._export.notes import QUANTIZER, call_name, parse_call
from fakequant._export.onnx import operators
from fakequant._export.onnx.lowering import DOMAIN, operator_of
from fakequant.nn._records import NAME, find_record
from fakequant.nn._recurrent import Advance, Recurrence, Sequences, State

# Exports and lowers a step of the layer with a path, for arguments with a first axis of any length.
ExportStep = Callable[[str, nn.Module, tuple[Tensor, ...]], ir.Model]


# --- during torch's export ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _AllSteps(Sequences):
    """Sequences whose steps are one operator. Time is axis 0 in between."""

    path: str

    def split(self, products: Tensor, *, first: bool) -> Tensor:
        return products.transpose(0, self.axis) if first else products

    def join(self, results: Tensor, *, last: bool) -> Tensor:
        return results.transpose(0, self.axis) if last else results

    def run(self, advance: Advance, products: Tensor, state: State, *, reverse: bool) -> tuple[Tensor, State]:
        y, *last = operators.recurrences[len(state)](products, *state, self.path, advance.suffix, reverse)
        return y, tuple(last)


@dataclasses.dataclass(eq=False, kw_only=True)
class ScannedRecurrence(Recurrence):
    """The record of a recurrent layer that becomes Scan nodes."""

    path: str

    def sequences(self, x: Tensor, axis: int) -> Sequences:
        """Returns sequences whose steps are one operator."""
        return _AllSteps(x.shape[axis], axis, self.path)


def make_recurrences_scans(golden: nn.Module) -> None:
    """Makes the steps of each recurrent layer one operator, in place."""
    for path, module in golden.named_modules():
        record = find_record(module)
        if isinstance(record, Recurrence):
            module.__dict__[NAME] = ScannedRecurrence(**vars(record), path=path)


_STATES = {"h": "F", "c": "F"}
_RECURRENCES = [
    operator_of(
        "Recurrence",
        {"products": "F", **dict(list(_STATES.items())[:number])},
        ["reverse"],
        ["path", "suffix"],
        has_scale=False,
        outputs=["y", *(f"last_{state}" for state in list(_STATES)[:number])],
    )
    for number in (1, 2)
]

# For torch's exporter, as in `lowering`.
TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    operators.recurrences[1]: lambda products, h, path, suffix, reverse: _RECURRENCES[0](
        products, h, path=path, suffix=suffix, reverse=int(reverse)
    ),
    operators.recurrences[2]: lambda products, h, c, path, suffix, reverse: _RECURRENCES[1](
        products, h, c, path=path, suffix=suffix, reverse=int(reverse)
    ),
}


# --- after torch's export -------------------------------------------------------------------------


# What the names of a step's parameters start with.
_LAYER = "layer."


class _Step(nn.Module):
    """One step of one layer and direction."""

    def __init__(self, layer: Any, suffix: str, calls: Counter[str]) -> None:
        super().__init__()
        self.layer, self._suffix = layer, suffix
        self.register_forward_pre_hook(lambda *_: calls.clear())

    def forward(self, x_product: Tensor, h: Tensor, c: Tensor | None = None) -> State:
        """Returns the next state."""
        with Advance(self.layer, self._suffix) as advance:
            return advance(x_product, (h,) if c is None else (h, c))


def write_scans(program: ir.Model, golden: nn.Module, calls: Counter[str], export: ExportStep) -> None:
    """Replaces the operators of recurrent layers by Scan nodes. `calls` counts the calls of the model's grids."""
    number: Counter[tuple[str, str]] = Counter()
    for node in list(program.graph):
        if node.domain != DOMAIN or node.op_type != "Recurrence":
            continue
        path, suffix = (node.attributes[name].as_string() for name in ("path", "suffix"))
        products, *states = node.inputs
        widths = [value.shape[-1] for value in (products, *states)]  # type: ignore[union-attr,index]
        step = _Step(golden.get_submodule(path), suffix, calls).eval()
        body = export(path, step, tuple(torch.zeros(2, int(width)) for width in widths)).graph  # type: ignore[arg-type]
        _Scan(program.graph, node, body, path, suffix, number[path, suffix]).run()
        number[path, suffix] += 1


class _Scan:
    """The Scan of one operator.

    Args:
        graph: The graph of the file.
        node: The operator.
        body: The graph of a step. It becomes part of the file.
        path: The path of the recurrent layer.
        suffix: What the names of its products end with.
        call: How many calls of the layer are before this one.
    """

    def __init__(self, graph: ir.Graph, node: ir.Node, body: ir.Graph, path: str, suffix: str, call: int) -> None:
        self.graph, self.node, self.body, self.call = graph, node, body, call
        self.start = f"{path}." if path else ""
        self.products = tuple(f"{self.start}{kind}_{suffix}." for kind in ("hh", "hr"))
        self.name = f"{call_name(f'{self.start}step_{suffix}', call)}/"

    def run(self) -> None:
        self._name_constants()
        for value in (*self.body.inputs, *(out for node in self.body for out in node.outputs)):
            value.name = f"{self.name}{value.name}"
        for node in self.body:
            node.name = f"{self.name}{node.name}"
            if self.call and QUANTIZER in node.metadata_props:
                paths = [parse_call(line)[0] for line in node.metadata_props[QUANTIZER].split("\n")]
                node.metadata_props[QUANTIZER] = "\n".join(call_name(path, self.call) for path in paths)
        products, *states = self.node.inputs
        x_product, *inner_states = self.body.inputs
        h = self.body.outputs[0]
        y = ir.Value(name=f"{self.name}y", shape=h.shape, type=h.type)
        self.body.append(ir.Node("", "Identity", [h], outputs=[y], name=f"{y.name}/Identity"))
        self.body.outputs.append(y)
        self.body.inputs[:] = [*inner_states, x_product]
        self.body.name = f"{self.name}body"
        attributes: dict[str, Any] = {"body": self.body, "num_scan_inputs": 1}
        if self.node.attributes["reverse"].as_int():
            attributes |= {"scan_input_directions": [1], "scan_output_directions": [1]}
        results, *last = self.node.outputs
        made = [ir.Value(name=f"{self.name}{old.name}", shape=old.shape, type=old.type) for old in (*last, results)]
        scan = ir.Node(
            "",
            "Scan",
            [*states, products],
            ir.convenience.convert_attributes(attributes),
            outputs=made,
            name=f"{self.name}Scan",
        )
        self.graph.insert_before(self.node, scan)
        for old, new in zip((*last, results), made, strict=True):
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        self.graph.remove(self.node, safe=True)

    def _name_constants(self) -> None:
        """Names the tensors of a step as other layers name theirs."""
        for old, value in list(self.body.initializers.items()):
            del self.body.initializers[old]
            if old.startswith(_LAYER):
                value.name = f"{self.start}{old.removeprefix(_LAYER)}"
            elif not old.startswith(self.products):
                value.name = f"{self.name}{old}"
            self.body.register_initializer(value)
