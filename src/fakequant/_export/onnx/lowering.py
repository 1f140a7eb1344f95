"""Replaces the nodes of fakequant's export operators by QuantizeLinear, Clip and DequantizeLinear.

    grid, up to 8 bits      Q -> DQ, with an integer Clip between them if the grid does not use the type's whole range
    grid, 9 to 16 bits      Clip -> Q -> DQ, because ONNX Runtime has no Clip for 16-bit integers
    stored codes            DQ of an integer initializer; 2 and 4 bits are packed if the opset has such types
    dynamic product         DynamicQuantizeLinear -> MatMulInteger -> Cast -> Mul, by both scales

This runs after torch's exporter, for three reasons: the rest of the file must be known, torch has no 4-bit tensors, and
the exporter's optimizer must not fold or merge these nodes. Values are named after the paths of their modules.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import torch
from onnxscript.function_libs.torch_lib.ops.core import aten__native_batch_norm_no_training
from onnxscript.values import Op, Opset

from fakequant._export.notes import OFFSET, QUANTIZER, parse_call
from fakequant._export.onnx import operators

DOMAIN = "fakequant.export"

Array = npt.NDArray[Any]  # of any dtype that ONNX has
Attributes = dict[str, int]

# --- during torch's export: one node each -----------------------------------------------------------

_OPSET = Opset(DOMAIN, 1)
_FLOATS = ("F", ["tensor(float)", "tensor(float16)", "tensor(double)", "tensor(bfloat16)"], "")
_INTEGERS = [f"tensor({kind})" for kind in ("int8", "uint8", "int16", "uint16", "int32", "int64")]


def operator_of(
    name: str,
    inputs: dict[str, str],
    numbers: Sequence[str] = (),
    texts: Sequence[str] = ("name",),
    *,
    has_scale: bool = True,
    outputs: Sequence[str] = ("y",),
) -> Op:
    """Returns an operator whose further inputs are a scale and an optional zero point.

    Args:
        name: The name of the operator.
        inputs: The types of its first inputs, by name: "F" for floats, "Q" for codes.
        numbers: The names of attributes that are integers.
        texts: The names of attributes that are strings.
        has_scale: Whether there are these further inputs.
        outputs: The names of its outputs, which are floats.
    """
    schema, kinds = onnx.defs.OpSchema, onnx.defs.OpSchema.AttrType
    parameter, optional = schema.FormalParameter, schema.FormalParameterOption.Optional
    attributes = [*((number, kinds.INT) for number in numbers), *((text, kinds.STRING) for text in texts)]
    constraints = {"F": _FLOATS, "Q": ("Q", _INTEGERS, ""), "Z": ("Z", _INTEGERS, "")}
    made = schema(
        name,
        DOMAIN,
        1,
        inputs=[
            *(parameter(one, kind) for one, kind in inputs.items()),
            *([parameter("scale", "F"), parameter("zero_point", "Z", param_option=optional)] if has_scale else []),
        ],
        outputs=[parameter(one, "F") for one in outputs],
        type_constraints=[constraints[kind] for kind in sorted({"F", *(["Z"] if has_scale else []), *inputs.values()})],
        attributes=[schema.Attribute(*attribute) for attribute in attributes],
    )
    return Op(_OPSET, name, made)


# `lowest` and `highest` are the quantizer's full range, which decides the storage type. Codes are clipped to
# `qmin` and `qmax`, unless `is_within` is set because the input is on the grid already.
_GRID = operator_of("Grid", {"x": "F"}, ["qmin", "qmax", "lowest", "highest"])
_STORED = operator_of("Stored", {"x": "Q"}, ["bits"])
# `name` is that of the weight, and `grid` that of the input's quantizer.
_DYNAMIC = operator_of("DynamicProduct", {"x": "F", "codes": "Q"}, texts=["name", "grid"])
# Returns its input. The exporter's optimizer does not fuse what is before it with what is after it.
_BARRIER = operator_of("Barrier", {"x": "F"}, texts=(), has_scale=False)


def _batch_norm(x: Any, *parameters: Any) -> Any:
    """Keeps the optimizer from multiplying the batch norm into the weight of a float layer, which `verify` compares."""
    kept = _BARRIER(x)
    kept.shape, kept.type = x.shape, x.type
    return aten__native_batch_norm_no_training(kept, *parameters)


aten = torch.ops.aten

# For torch's exporter: operators and the functions that emit their nodes.
TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    operators.grid: lambda x, scale, zero_point, qmin, qmax, name: _GRID(
        x, scale, zero_point, qmin=qmin, qmax=qmax, lowest=qmin, highest=qmax, name=name
    ),
    operators.stored: lambda codes, scale, zero_point, bits, name: _STORED(
        codes, scale, zero_point, bits=bits, name=name
    ),
    operators.dynamic_product: lambda x, codes, scale, zero_point, name, grid: _DYNAMIC(
        x, codes, scale, zero_point, name=name, grid=grid
    ),
    aten._native_batch_norm_legit_no_training.default: _batch_norm,
}

# --- after torch's export --------------------------------------------------------------------------

_INT8, _UINT8, _INT16, _UINT16 = ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.UINT16
_OWN_RANGES = {_UINT8: (0, 255), _INT8: (-128, 127), _UINT16: (0, 65535), _INT16: (-32768, 32767)}
_PAIRS = (ir.DataType.INT4, ir.DataType.UINT4)
_SINCE = {_INT16: 21, _UINT16: 21}


def remove_barriers(graph: ir.Graph) -> None:
    """Removes the nodes that stopped the exporter's optimizer."""
    for node in list(graph):
        if node.domain == DOMAIN and node.op_type == "Barrier":
            ir.convenience.replace_all_uses_with(node.outputs[0], input_of(node, 0))
            graph.remove(node, safe=True)


class UnsupportedOpset(ValueError):
    """The model needs an operator or type that the opset does not have."""


class Lowering:
    """Replaces the Grid, Stored and DynamicProduct nodes of a model.

    Args:
        model: The program from torch's exporter. It is changed in place.
        opset: The opset of the file, which may be lower than the exporter's. Nodes have the features of this one.
        unsigned: Whether to store activation codes as unsigned integers, as x86 kernels expect.
    """

    def __init__(self, model: ir.Model, opset: int, *, unsigned: bool) -> None:
        self.model, self.graph, self.opset, self.unsigned = model, model.graph, opset, unsigned
        self.calls: dict[str, int] = {}
        self.made: dict[str, ir.Value] = {}

    def replacements(self) -> dict[str, Callable[[ir.Node], None]]:
        """Returns the methods that replace nodes, by the operator of the node."""
        return {"Grid": self._grid, "Stored": self._stored, "DynamicProduct": self._dynamic_product}

    def run(self) -> None:
        replace = self.replacements()
        for node in list(self.graph):
            if node.domain == DOMAIN:
                replace[node.op_type](node)
        self.model.opset_imports.pop(DOMAIN, None)
        remove_unused(self.graph)

    def _grid(self, node: ir.Node) -> None:
        call = node.attributes["name"].as_string()
        path, _ = parse_call(call)
        name = self._unique(path)
        lowest, highest = (node.attributes[end].as_int() for end in ("lowest", "highest"))
        dtype, offset = self._storage(path, lowest, highest)
        lo, hi = (node.attributes[end].as_int() + offset for end in ("qmin", "qmax"))
        scale, zero_point, attributes = self._parameters(node, path, dtype, offset)
        x, is_full = input_of(node, 0), (lo, hi) == _OWN_RANGES[dtype] or "is_within" in node.attributes
        if not is_full and dtype in (_INT16, _UINT16):
            x, is_full = self._clipped(node, path, name, x, scale, zero_point, lo, hi, attributes), True
        quantized = f"{name}_quantized"
        codes = self._emit(
            node,
            "QuantizeLinear",
            [x, scale, zero_point],
            quantized if is_full else f"{name}_unclipped",
            dtype,
            attributes,
        )
        if not is_full:
            low, high = (self._constant(f"{name}_{end}", np.array(v), dtype) for end, v in (("min", lo), ("max", hi)))
            codes = self._emit(node, "Clip", [codes, low, high], quantized, dtype, {})
        producer = codes.producer()
        assert producer is not None
        also = node.attributes["also"].as_string() if "also" in node.attributes else ""
        producer.metadata_props.update({QUANTIZER: f"{call}{also}", OFFSET: str(offset)})
        y = self._emit(
            node, "DequantizeLinear", [codes, scale, zero_point], f"{name}_dequantized", ir.DataType.FLOAT, attributes
        )
        self._replace(node, y)

    def _storage(self, path: str, lo: int, hi: int) -> tuple[ir.DataType, int]:
        """Returns the type that stores the codes and the offset that is added to them."""
        dtype = next((t for t, (low, high) in _OWN_RANGES.items() if low <= lo and hi <= high), None)
        if dtype is None:
            raise ValueError(f"{path}: no ONNX type holds the range {lo} to {hi}; at most 16 bits can be exported.")
        self._require(path, dtype)
        if self.unsigned and dtype == _INT8:
            return _UINT8, 128 if lo == -128 else -lo
        return dtype, 0

    def _require(self, path: str, dtype: ir.DataType) -> None:
        if _SINCE.get(dtype, 0) > self.opset:
            raise UnsupportedOpset(
                f"{path}: {dtype.name.lower()} needs opset {_SINCE[dtype]}, got opset {self.opset}.\n"
                f"Use opset={_SINCE[dtype]}, or at most 8 bits."
            )

    def _clipped(
        self,
        node: ir.Node,
        path: str,
        name: str,
        x: ir.Value,
        scale: ir.Value,
        zero_point: ir.Value,
        lo: int,
        hi: int,
        attributes: Attributes,
    ) -> ir.Value:
        """Emits a float Clip to the values of the codes `lo` and `hi`.

        This is exact: a value beyond the last code's value is quantized to the last code, as that value itself is.
        """
        if attributes:
            raise ValueError(f"{path}: the range {lo} to {hi} per channel or group cannot be exported in 16 bits.")
        s, z = constant_of(scale), constant_of(zero_point).astype(np.float32)
        low, high = (
            self._constant(f"{name}_{end}", (np.float32(v) - z) * s, ir.DataType.FLOAT)
            for end, v in (("low", lo), ("high", hi))
        )
        return self._emit(node, "Clip", [x, low, high], f"{name}_clipped", ir.DataType.FLOAT, {})

    def _stored(self, node: ir.Node) -> None:
        path = node.attributes["name"].as_string()
        dtype, bits = input_of(node, 0).dtype, node.attributes["bits"].as_int()
        assert dtype is not None
        self._require(path, dtype)
        for width, since in ((2, 25), (4, 21)):
            if bits <= width and self.opset >= since:
                dtype = getattr(ir.DataType, f"{'UINT' if dtype == _UINT8 else 'INT'}{width}")
                break
        # The optimizer may have merged equal tensors of two layers, so the codes get a tensor named after this layer.
        codes = self._constant(f"{path}_codes", constant_of(input_of(node, 0)), dtype)
        scale, zero_point, attributes = self._parameters(node, path, dtype, 0)
        # ONNX Runtime needs a zero point to choose an integer kernel, so it is written even if it is 0. It is left out
        # for symmetric scales per group, which have no such kernel, and for int32, which does not allow one.
        is_symmetric = len(node.inputs) < 3 or node.inputs[2] is None
        left_out = dtype == ir.DataType.INT32 or (is_symmetric and "block_size" in attributes)
        inputs = [codes, scale] if left_out else [codes, scale, zero_point]
        y = self._emit(node, "DequantizeLinear", inputs, f"{path}_dequantized", ir.DataType.FLOAT, attributes)
        self._replace(node, y)

    def _dynamic_product(self, node: ir.Node) -> None:
        """Emits the form that ONNX Runtime merges into DynamicQuantizeMatMul or MatMulIntegerToFloat."""
        path, call = (node.attributes[key].as_string() for key in ("name", "grid"))
        name = self._unique(parse_call(call)[0])
        x, given = input_of(node, 0), constant_of(input_of(node, 2))
        has_zero = len(node.inputs) > 3 and node.inputs[3] is not None
        points = constant_of(input_of(node, 3)) if has_zero else np.zeros_like(given, dtype=np.int32)
        shape = (-1,) if given.size > 1 else ()
        codes = self._constant(f"{path}_codes", constant_of(input_of(node, 1)), _storage_of(node))
        scale = self._constant(f"{path}_scale", given.reshape(shape), ir.DataType.FLOAT)
        zero_point = self._constant(f"{path}_zero_point", points.reshape(shape), _storage_of(node))
        quantized, own_scale, own_zero_point = (
            ir.Value(name=f"{name}_{kind}", shape=of, type=ir.TensorType(dtype))
            for kind, of, dtype in (
                ("quantized", x.shape, _UINT8),
                ("scale", ir.Shape([]), ir.DataType.FLOAT),
                ("zero_point", ir.Shape([]), _UINT8),
            )
        )
        outputs = [quantized, own_scale, own_zero_point]
        made = ir.Node("", "DynamicQuantizeLinear", [x], outputs=outputs, name=f"{name}/DynamicQuantizeLinear")
        made.metadata_props.update({QUANTIZER: call, OFFSET: "0"})
        self.graph.insert_before(node, made)
        factors = [quantized, codes, own_zero_point, zero_point]
        sums = self._emit(node, "MatMulInteger", factors, f"{name}_sums", ir.DataType.INT32, {})
        to_float = {"to": int(ir.DataType.FLOAT)}
        floats = self._emit(node, "Cast", [sums], f"{name}_float_sums", ir.DataType.FLOAT, to_float)
        both = self._emit(node, "Mul", [own_scale, scale], f"{name}_sum_scale", ir.DataType.FLOAT, {})
        both.shape = scale.shape
        y = self._emit(node, "Mul", [floats, both], f"{name}_product", ir.DataType.FLOAT, {})
        self._replace(node, y)

    # --- pieces -----------------------------------------------------------------------------------

    def _parameters(
        self, node: ir.Node, path: str, dtype: ir.DataType, offset: int
    ) -> tuple[ir.Value, ir.Value, Attributes]:
        """Returns scale, zero point, and the axis and block size attributes."""
        shape = input_of(node, 0).shape
        assert shape is not None
        scale = constant_of(input_of(node, 1))
        has_zero = len(node.inputs) > 2 and node.inputs[2] is not None
        points = constant_of(input_of(node, 2)) if has_zero else np.zeros_like(scale, dtype=np.int32)
        long = [axis for axis, n in enumerate(scale.shape) if n > 1]
        grouped = [axis for axis in long if scale.shape[axis] != shape[axis]] or (long[1:] and long[-1:])  # groups of 1
        attributes: Attributes = {}
        if grouped:
            if self.opset < 21:
                raise UnsupportedOpset(
                    f"{path}: scales per group need opset 21, got opset {self.opset}.\nUse opset=21."
                )
            axis = grouped[0]
            length = shape[axis]
            assert isinstance(length, int), "the axis of groups has a fixed length"
            attributes = {"axis": axis, "block_size": length // scale.shape[axis]}
        elif long:
            attributes = {"axis": long[0]}
            scale, points = scale.reshape(-1), points.reshape(-1)
        else:
            scale, points = scale.reshape(()), points.reshape(())
        return (
            self._constant(f"{path}_scale", scale, ir.DataType.FLOAT),
            self._constant(f"{path}_zero_point", points + offset, dtype),
            attributes,
        )

    def _unique(self, name: str) -> str:
        """Returns the name, with a number appended from the second call of a module."""
        count = self.calls[name] = self.calls.get(name, 0) + 1
        return name if count == 1 else f"{name}_{count}"

    def _constant(self, name: str, array: Array, dtype: ir.DataType) -> ir.Value:
        if name in self.made:
            return self.made[name]
        # A buffer of the model may have the same name but another shape: it is replaced.
        self.graph.initializers.pop(name, None)
        array = np.asarray(array).astype(dtype.numpy(), copy=False)
        value = self.made[name] = register(self.graph, name, array, dtype)
        return value

    def _emit(
        self, at: ir.Node, op: str, inputs: list[ir.Value], name: str, dtype: ir.DataType, attributes: Attributes
    ) -> ir.Value:
        """Inserts a node before `at` and returns its output, which has the shape of `at`'s output."""
        return insert_node(at, op, inputs, name, dtype, at.outputs[0].shape, attributes)

    def _replace(self, node: ir.Node, value: ir.Value) -> None:
        ir.convenience.replace_all_uses_with(node.outputs[0], value, replace_graph_outputs=True)
        self.graph.remove(node, safe=True)


def _storage_of(node: ir.Node) -> ir.DataType:
    """Returns the 8-bit type of the codes of a dynamic product."""
    return _UINT8 if input_of(node, 1).dtype == _UINT8 else _INT8


def insert_node(
    at: ir.Node,
    op: str,
    inputs: Sequence[ir.Value | None],
    name: str,
    dtype: ir.DataType | None,
    shape: ir.Shape | None,
    attributes: dict[str, Any] | None = None,
) -> ir.Value:
    """Inserts a node before `at` and returns its output, which has this name, type and shape."""
    assert at.graph is not None
    value = ir.Value(name=name, shape=shape, type=None if dtype is None else ir.TensorType(dtype))
    made = ir.convenience.convert_attributes(attributes or {})
    at.graph.insert_before(at, ir.Node("", op, inputs, made, outputs=[value], name=f"{name}/{op}"))
    return value


def copy_of(node: ir.Node, inputs: Sequence[ir.Value | None], out: ir.Value, **changes: Any) -> ir.Node:
    """Returns a copy of a node of an export operator, with other inputs, another output and changed attributes."""
    attributes = {key: attribute.value for key, attribute in node.attributes.items() if key != "also"} | changes
    return ir.Node(DOMAIN, node.op_type, inputs, ir.convenience.convert_attributes(attributes), outputs=[out])


def input_of(node: ir.Node, number: int) -> ir.Value:
    """Returns an input of a node that is not optional."""
    value = node.inputs[number]
    assert value is not None, f"{node.name} has no input {number}"
    return value


def constant_of(value: ir.Value) -> Array:
    """Returns the array of a constant value."""
    assert value.const_value is not None, f"{value.name} is not a constant"
    return value.const_value.numpy()


def register(graph: ir.Graph, name: str, array: npt.ArrayLike, dtype: ir.DataType) -> ir.Value:
    """Adds a constant to a graph and returns it. Types of 2 and 4 bits are packed in the file."""
    values = np.asarray(array, dtype=dtype.numpy())
    value = ir.Value(name=name, shape=ir.Shape(values.shape), type=ir.TensorType(dtype))
    value.const_value = _packed(values, dtype, name) if dtype in _PAIRS else ir.tensor(values, dtype=dtype, name=name)
    graph.register_initializer(value)
    return value


def _packed(values: Array, dtype: ir.DataType, name: str) -> ir.TensorProtocol:
    """Returns codes of 4 bits, two in a byte as in the file: otherwise each would take a byte until it is written."""
    low = values.reshape(-1).view(np.uint8) & 15
    low = np.pad(low, (0, low.size % 2))
    return ir.PackedTensor(low[::2] | low[1::2] << 4, dtype, shape=values.shape, name=name)


def remove_unused(graph: ir.Graph) -> None:
    """Removes initializers that no node reads."""
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]


def strip(model: ir.Model) -> None:
    """Removes torch's debug metadata: stack traces with local paths, about half a kilobyte per node."""
    graph = model.graph
    for item in (*graph, *graph.inputs, *graph.outputs, *graph.initializers.values(), graph):
        for key in [k for k in item.metadata_props if k.startswith("pkg.") or k == "namespace"]:
            del item.metadata_props[key]
