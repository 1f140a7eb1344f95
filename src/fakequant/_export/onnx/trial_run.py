"""Runs a new file once on the example, in the runtime of its target, before the export returns."""

import ast
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch import Tensor

from fakequant._backends.torch.tensor_kernels import dtype_name
from fakequant._backends.torch.torch_private import pytree
from fakequant._export.failures import in_modules
from fakequant._export.notes import tensors_of
from fakequant._runtimes import part
from fakequant._runtimes.target import Target

# Types that ONNX Runtime 1.31 and OpenVINO 2026.4 have no kernels for, or not for all operators that take them. Files
# with these types are not run: they are for other runtimes, or for later releases.
_WITHOUT_KERNELS = {
    onnx.TensorProto.FLOAT4E2M1,
    onnx.TensorProto.FLOAT8E8M0,
    onnx.TensorProto.INT2,
    onnx.TensorProto.UINT2,
}
# The key of torch's exporter for the modules that a node was made in, the outermost first, and the operator.
_SCOPES = "pkg.torch.onnx.name_scopes"


def modules_of_nodes(graph: ir.Graph) -> dict[ir.Node, str]:
    """Returns the paths of the modules in whose code the nodes were made.

    Nodes that were inserted after torch's export are left out.
    """
    found = {}
    for node in graph:
        scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))
        if len(scopes) > 1:
            found[node] = scopes[-2]
    return found


def require_runs(
    path: Path, target: Target, inputs: Any, results: Sequence[Tensor], modules: Mapping[ir.Node, str]
) -> None:
    """Raises ValueError if the runtime of the target refuses the file, or its results have other shapes or types.

    Does nothing if the runtime is not installed, or has no kernels for a type in the file. `results` is what the golden
    model returns for the inputs, and `modules` what `modules_of_nodes` returned.
    """
    written = onnx.load(path, load_external_data=False)
    if {tensor.data_type for tensor in tensors_of(written.graph)} & _WITHOUT_KERNELS:
        return
    tensors = [np.asarray(leaf.detach()) for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    feed = dict(zip((value.name for value in written.graph.input), tensors, strict=True))
    name = target.runtime.name
    try:
        ran = part(target.runtime.room, "running").run_once(path, feed)
    except ImportError:
        return
    except Exception as error:  # of classes without a common base
        reason = _shortened(str(error))
        raise ValueError(
            f"{name} refuses the file, so it is not written: {reason}{_place(str(error), modules)}\n"
            "Change that part of the model, or use another target or opset."
        ) from error
    if len(results) != len(ran):
        raise ValueError(f"The model returns {len(results)} tensors and the file {len(ran)}, so it is not written.")
    for number, (mine, other) in enumerate(zip(results, ran, strict=True)):
        theirs = torch.from_numpy(np.array(other))
        if mine.shape != theirs.shape or mine.is_floating_point() != theirs.is_floating_point():
            raise ValueError(
                f"Result {number} is {_kind(mine)} in the model and {_kind(theirs)} in {name}, so the file is not "
                "written.\nChange the shape of the inputs, for example to batches, or use another target."
            )


_LONGEST = 600


def _shortened(message: str) -> str:
    """Returns the message of a runtime without the places in its own source code."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("Exception from", "Check 'false' failed"))] or lines
    text = " ".join(lines)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _place(message: str, modules: Mapping[ir.Node, str]) -> str:
    """Returns the module that a message is about, if it names a node or a tensor."""
    words = re.split(r"[^\w.]+", message)
    by_name = {
        name: path for node, path in modules.items() for name in (node.name, *(value.name for value in node.outputs))
    }
    paths = dict.fromkeys(by_name[word] for word in words if word in by_name)
    return in_modules(list(paths)[:3])


def _kind(x: Tensor) -> str:
    return f"{dtype_name(x.dtype)} of shape {tuple(x.shape)}"
