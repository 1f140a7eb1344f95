"""Exported files with one change each, to test that `verify` notices it."""

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

# Attributes that do not affect the computation, or repeat what other parts of the file say.
# ONNX Runtime aborts if `num_outputs` of a Split is wrong.
IDLE = {"storage_order", "stash_type", "saturate", "allowzero", "noop_with_empty_axes", "auto_pad", "num_outputs"}


def replaced(model: Any, name: str, array: Any) -> Any:
    """Returns a copy of the model with other values in one tensor."""
    made = copy.deepcopy(model)
    tensor = next(t for t in made.graph.initializer if t.name == name)
    kind = tensor.data_type
    if kind in (onnx.TensorProto.INT4, onnx.TensorProto.UINT4):
        new = helper.make_tensor(name, kind, array.shape, array.astype(np.int8).ravel())
    else:
        new = numpy_helper.from_array(np.ascontiguousarray(array), name)
    tensor.CopyFrom(new)
    return made


def of_tensors(model: Any, rng: Any, per_tensor: int = 1) -> Iterator[tuple[str, Any, str, Any]]:
    """Yields a description of the change, the changed model, the tensor's name and its new values."""
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.dtype == np.int64 or array.size == 0:
            continue  # shapes and axes
        if array.dtype == np.float32:
            for way in (np.inf, -np.inf):
                for place in rng.choice(array.size, min(per_tensor, array.size), replace=False):
                    changed = array.copy()
                    changed.flat[place] = np.nextafter(changed.flat[place], np.float32(way))
                    yield (
                        f"{tensor.name}[{place}] by one ulp",
                        replaced(model, tensor.name, changed),
                        tensor.name,
                        changed,
                    )
            continue
        info = np.iinfo(np.int32 if array.dtype == np.int32 else array.dtype) if array.dtype.kind in "iu" else None
        low, high = (info.min, info.max) if info else (-8, 7)
        for place in rng.choice(array.size, min(2 * per_tensor, array.size), replace=False):
            for step in (1, -1):
                value = int(array.flat[place]) + step
                if low <= value <= high:
                    changed = array.copy()
                    changed.flat[place] = value
                    yield (
                        f"{tensor.name}[{place}] by {step}",
                        replaced(model, tensor.name, changed),
                        tensor.name,
                        changed,
                    )
        if array.ndim > 1 and len(array) > 1:
            changed = array.copy()
            changed[[0, 1]] = changed[[1, 0]]
            yield f"channels of {tensor.name}", replaced(model, tensor.name, changed), tensor.name, changed


def of_nodes(model: Any) -> Iterator[tuple[str, Any]]:
    """Yields a description and the changed model, with an operation removed, replaced or altered."""
    for number, node in enumerate(model.graph.node):
        if node.op_type in ("Relu", "Clip", "Tanh", "Softmax", "LayerNormalization", "Gelu", "Sigmoid", "Mul", "Add"):
            yield f"{node.op_type} {number} removed", without(model, number)
        if node.op_type in OTHERS:
            made = copy.deepcopy(model)
            made.graph.node[number].op_type = OTHERS[node.op_type]
            yield f"{node.op_type} {number} is {OTHERS[node.op_type]}", made
        if node.op_type in ("Sub", "Div", "MatMul", "Where"):
            made = copy.deepcopy(model)
            inputs = made.graph.node[number].input
            inputs[-1], inputs[-2] = inputs[-2], inputs[-1]
            yield f"arguments of {node.op_type} {number}", made
        for place, attribute in enumerate(node.attribute):
            for value in other_values(attribute):
                made = copy.deepcopy(model)
                made.graph.node[number].attribute[place].CopyFrom(helper.make_attribute(attribute.name, value))
                little = isinstance(value, float) and abs(value - attribute.f) <= 1e-6 * abs(value)
                yield f"{attribute.name} of {node.op_type} {number} is {'a little more' if little else value}", made


OTHERS = {"Relu": "Abs", "Add": "Sub", "Mul": "Add", "Sub": "Add", "Div": "Mul", "Tanh": "Sigmoid", "Exp": "Abs"}


def without(model: Any, number: int) -> Any:
    """Returns a copy of the model in which consumers of a node read the node's first input."""
    made = copy.deepcopy(model)
    node = made.graph.node[number]
    for reader in made.graph.node:
        reader.input[:] = [node.input[0] if name == node.output[0] else name for name in reader.input]
    if any(output.name == node.output[0] for output in made.graph.output):
        node.CopyFrom(helper.make_node("Identity", [node.input[0]], list(node.output)))
    else:
        made.graph.node.remove(node)
    return made


def other_values(attribute: Any) -> list[Any]:
    """Returns values near that of an attribute."""
    if attribute.name in IDLE:
        return []
    value = helper.get_attribute_value(attribute)
    if isinstance(value, float):
        # Twice an epsilon of 1e-5 changes the result of a layer norm by no more than rounding may.
        return [float(np.nextafter(np.float32(value), np.float32(np.inf))), value * 4]
    if isinstance(value, int):
        return [value + 1, value - 1]
    if isinstance(value, list) and value and all(isinstance(v, int) for v in value):
        return [[value[0] + 1, *value[1:]], [*value[:-1], value[-1] + 1]]
    return []
