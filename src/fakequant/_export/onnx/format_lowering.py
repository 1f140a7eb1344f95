"""Replaces the nodes of `operators` by QuantizeLinear and DequantizeLinear with float types.

    fixed grid          Q -> DQ, FP8, from opset 19
    rounding            Q -> DQ with scale 1
    stored codes        DQ of an initializer. FP8 has types from opset 19, FP4 has one from opset 23. Before, and for
                        FP6, of which ONNX has none, codes are stored as FP8: E4M3 has all their values.
    scales of MX        float32 powers of two; E8M0 from opset 24
    scales of NVFP4     float32; from opset 23 the DQ of E4M3 codes by the scale of the tensor

The opset decides: ONNX Runtime runs files without FP4 and E8M0, so those of the default opset.

A Max that changes no finite number is inserted before every Q. ONNX Runtime would otherwise merge the Q with the node
before it into an integer kernel, which does not take FP8, or fail at a Clip before it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from fakequant._backends import scale_codes
from fakequant._export.notes import OFFSET, QUANTIZER, parse_call
from fakequant._export.onnx import operators
from fakequant._export.onnx.lowering import (
    Array,
    Attributes,
    Lowering,
    UnsupportedOpset,
    constant_of,
    input_of,
    operator_of,
)
from fakequant.formats import FLOAT_FORMATS
from fakequant.presets import nvfp4

_FLOAT, _E4M3 = ir.DataType.FLOAT, ir.DataType.FLOAT8E4M3FN
_FP8 = {
    "e4m3fn": _E4M3,
    "e5m2": ir.DataType.FLOAT8E5M2,
    "e4m3fnuz": ir.DataType.FLOAT8E4M3FNUZ,
    "e5m2fnuz": ir.DataType.FLOAT8E5M2FNUZ,
}
# The opsets that introduced types and attributes.
_SINCE_FP8, _SINCE_BLOCKS, _SINCE_FP4, _SINCE_E8M0 = 19, 21, 23, 24

_GRID = operator_of("FormatGrid", {"x": "F"}, ["axis", "block"], ["format", "name"])
_ROUNDED = operator_of("Rounded", {"x": "F"}, [], ["format", "name"], has_scale=False)
_STORED = operator_of("StoredFormat", {"x": "Q"}, ["axis", "block"], ["format", "scale_format", "name"])

# For torch's exporter, as in `lowering`.
TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    operators.format_grid: lambda x, scale, format, axis, block, name: _GRID(
        x, scale, format=format, axis=axis, block=block, name=name
    ),
    operators.rounded_to_format: lambda x, format, name: _ROUNDED(x, format=format, name=name),
    operators.stored_format: lambda codes, scale, format, scale_format, axis, block, name: _STORED(
        codes, scale, format=format, scale_format=scale_format, axis=axis, block=block, name=name
    ),
}


class FormatLowering(Lowering):
    """Replaces all nodes of fakequant's export operators, those of float formats included."""

    def replacements(self) -> dict[str, Callable[[ir.Node], None]]:
        """Returns the methods that replace nodes, by the operator of the node."""
        own = {"FormatGrid": self._format_grid, "Rounded": self._rounded, "StoredFormat": self._stored_format}
        return {**super().replacements(), **own}

    def _format_grid(self, node: ir.Node) -> None:
        call, x = _text(node, "name"), input_of(node, 0)
        path, _ = parse_call(call)
        assert x.shape is not None
        scale = constant_of(input_of(node, 1))
        attributes = self._axis_and_block(node, path, scale, len(x.shape))
        y = self._rounded_to_type(node, path, self._unique(path), scale, attributes)
        producer = y.producer()
        assert producer is not None
        # The codes are read as values: runtimes do not output all FP8 types.
        producer.metadata_props.update({QUANTIZER: call, OFFSET: "0"})
        self._replace(node, y)

    def _rounded(self, node: ir.Node) -> None:
        path = _text(node, "name")
        self._replace(node, self._rounded_to_type(node, path, self._unique(path), np.float32(1), {}))

    def _rounded_to_type(
        self, node: ir.Node, path: str, name: str, scale: Array | np.float32, attributes: Attributes
    ) -> ir.Value:
        """Emits QuantizeLinear and DequantizeLinear, and returns the result."""
        dtype = _FP8[_text(node, "format")]
        self._require_opset(path, "FP8", _SINCE_FP8)
        parameters = [
            self._constant(f"{path}_scale", np.asarray(scale), _FLOAT),
            self._constant(f"{path}_zero_point", np.zeros(np.shape(scale)), dtype),
        ]
        saturating = {**attributes, "saturate": 1}
        x = self._apart(node, name)
        codes = self._emit(node, "QuantizeLinear", [x, *parameters], f"{name}_quantized", dtype, saturating)
        return self._emit(node, "DequantizeLinear", [codes, *parameters], f"{name}_dequantized", _FLOAT, attributes)

    def _apart(self, node: ir.Node, name: str) -> ir.Value:
        """Emits the Max between a node and the quantizer of its result."""
        x = input_of(node, 0)
        if x.producer() is None:
            return x
        lowest = self._constant("lowest_float", np.asarray(np.finfo(np.float32).min), _FLOAT)
        return self._emit(node, "Max", [x, lowest], f"{name}_apart", _FLOAT, {})

    def _stored_format(self, node: ir.Node) -> None:
        path, format = _text(node, "name"), _text(node, "format")
        stored, scale = constant_of(input_of(node, 0)), constant_of(input_of(node, 1))
        dtype = self._type_of_codes(path, format)
        values = stored if format == "int" else FLOAT_FORMATS[format].values()[stored]
        codes = self._constant(f"{path}_codes", values, dtype)
        attributes = self._axis_and_block(node, path, scale, stored.ndim)
        scales = self._scales(node, path, scale)
        if scales.dtype == ir.DataType.FLOAT8E8M0:
            attributes["output_dtype"] = int(_FLOAT)
        y = self._emit(node, "DequantizeLinear", [codes, scales], f"{path}_dequantized", _FLOAT, attributes)
        self._replace(node, y)

    def _type_of_codes(self, path: str, format: str) -> ir.DataType:
        if format == "int":
            return ir.DataType.INT8
        if format == "e2m1" and self.opset >= _SINCE_FP4:
            return ir.DataType.FLOAT4E2M1
        self._require_opset(path, "FP8", _SINCE_FP8)
        return _FP8.get(format, _E4M3)

    def _scales(self, node: ir.Node, path: str, scale: Array) -> ir.Value:
        scale_format = _text(node, "scale_format")
        if scale_format == "e8m0" and self.opset >= _SINCE_E8M0:
            return self._constant(f"{path}_scale", scale, ir.DataType.FLOAT8E8M0)
        if scale_format != "e4m3fn" or self.opset < _SINCE_FP4:
            return self._constant(f"{path}_scale", scale, _FLOAT)
        if f"{path}_scale" in self.made:
            return self.made[f"{path}_scale"]
        codes, tensor_scale = scale_codes.encode_scales(scale, nvfp4())
        assert tensor_scale is not None
        parts = [
            self._constant(f"{path}_block_scale", FLOAT_FORMATS["e4m3fn"].values()[codes], _E4M3),
            self._constant(f"{path}_tensor_scale", np.asarray(tensor_scale), _FLOAT),
        ]
        self.graph.initializers.pop(f"{path}_scale", None)  # a buffer of the model
        made = self._emit(node, "DequantizeLinear", parts, f"{path}_scale", _FLOAT, {})
        made.shape = ir.Shape(scale.shape)
        self.made[f"{path}_scale"] = made
        return made

    def _axis_and_block(self, node: ir.Node, path: str, scale: Array, rank: int) -> Attributes:
        axis, block = node.attributes["axis"].as_int(), node.attributes["block"].as_int()
        if scale.ndim == 0:
            return {}
        if not block:
            return {"axis": axis % rank}
        self._require_opset(path, "scales per block", _SINCE_BLOCKS)
        return {"axis": axis % rank, "block_size": block}

    def _require_opset(self, path: str, what: str, since: int) -> None:
        if self.opset < since:
            verb = "needs" if what == "FP8" else "need"
            raise UnsupportedOpset(f"{path}: {what} {verb} opset {since}, got opset {self.opset}.\nUse opset={since}.")


def _text(node: ir.Node, name: str) -> str:
    return node.attributes[name].as_string()
