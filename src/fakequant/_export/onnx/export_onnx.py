"""`export_onnx`: writes a model to an ONNX file with integer weights and QuantizeLinear/DequantizeLinear nodes."""

import hashlib
import inspect
import json
import logging
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from fakequant import _runtimes
from fakequant._backends.torch.compiled_nodes import release_memory
from fakequant._backends.torch.torch_private import pytree
from fakequant._convert.convert import conversion
from fakequant._export import notes
from fakequant._export.example import (
    DynamicShapes,
    bind_constants,
    converted,
    first_axes,
    inputs_of,
    require_float32,
    require_suffix,
    results_of,
    without_autocast,
)
from fakequant._export.failures import place_of, reason_of
from fakequant._export.function_forms import FunctionForms
from fakequant._export.onnx.exported_modules import forget_codes, make_exportable
from fakequant._export.onnx.report import OnnxExport, layers_of
from fakequant._model import leaves
from fakequant._model.running import Args, Batch, Kwargs, check_module
from fakequant._runtimes.target import Target
from fakequant._util.files import writing
from fakequant._util.packages import require

if TYPE_CHECKING:
    from onnx_ir import ExternalTensor, Graph, Model, Node, TensorProtocol, Value


# The lowest opset with per-channel scales, and the highest one that is tested.
LOWEST, HIGHEST = 13, 25
# The lowest opset that torch's exporter writes.
TORCHS_LOWEST = 18
# Tensors that are larger together are in a second file: protobuf cannot write a file of 2 GiB.
_LARGEST_FILE = 2_000_000_000
# Tensors with fewer bytes are always in the first file, because onnx needs shapes and axes to check it.
_SMALL = 1024


def export_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    example: Batch,
    *,
    target: str | None = None,
    opset: int = 21,
    dynamic_batch: bool = True,
    dynamic_shapes: DynamicShapes | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    strict: bool = False,
    external_data: bool | None = None,
) -> OnnxExport:
    """Writes a prepared or converted model to an ONNX file. The model is not changed.

    Weights become integer initializers followed by DequantizeLinear; biases are int32. Activations become
    QuantizeLinear and DequantizeLinear, with a Clip if the quantizer does not use the whole range of the integer type.
    4-bit codes and scales per group need opset 21; 2-bit codes get a 2-bit type in opset 25. Batch norms are
    folded into the layers before them. Tensors are named after the paths of their modules. Autocast is disabled during
    the export.

    FP8 needs opset 19, and scales per block 21. Up to opset 22, files run in ONNX Runtime: scales of MX and NVFP4 are
    float32, and FP4 and FP6 codes are stored as FP8, which has all their values. From opset 23 FP4 codes have their own
    type and NVFP4 has its two scales; from opset 24 MX has E8M0 scales. Scales that follow the data (MX, NVFP4) are
    computed by standard operators, to the same bits.

    Args:
        model: A prepared and calibrated model, or a converted one.
        path: The file to write. It appears only when it is complete, onnx.checker has accepted it, and the runtime of
            the target, if it is installed, has run it on the example.
        example: One batch, as `prepare` takes it: a tensor, a dict of keyword arguments, or a tuple, of which only the
            arguments that `forward` requires are passed. Arguments that are not tensors are constants of the file.
        target: The target of the file. None for the target of the model's config.
        opset: The ONNX opset version, 13 to 25.
        dynamic_batch: Whether the first axis of every input may have any length at run time.
        dynamic_shapes: The axes that may have any length, in the format of `torch.export`: a tuple or dict with one
            entry per input, each a dict from axis to name. Overrides `dynamic_batch`.
        input_names: Names of the file's inputs, in the order of the model's arguments.
        output_names: Names of the file's outputs, in the order of the model's results. None for the keys and fields of
            the results, joined by dots: `logits`, `states.0`; `output` for a tensor, and `output_0`, `output_1` and so
            on for a tuple. Only tensors are outputs. Caches of transformers are left out too.
        strict: As in `convert`. Ignored if the model is converted already.
        external_data: Whether large tensors are in a second file, `path` with ".data" at the end, which must stay in
            the same folder. None for only if they do not fit into one file, which holds 2 GB.

    Returns:
        What was written: inputs, outputs, and the layers that can be computed in integers. Print it.

    Needs `pip install "fakequant[onnx]"`.

    >>> import tempfile, fakequant as fq
    >>> model = fq.prepare(nn.Sequential(nn.Linear(4, 2)), fq.recipes.int8(), example=torch.ones(1, 4))
    >>> model = fq.calibrate(model, [torch.ones(3, 4)], progress=False)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     written = export_onnx(model, f"{folder}/model.onnx", torch.ones(1, 4))
    >>> written.inputs, written.outputs, written.integers
    ({'input': ('batch', 4)}, {'output': ('batch', 2)}, ('0',))
    """
    check_module(model)
    if type(opset) is not int or not LOWEST <= opset <= HIGHEST:
        raise ValueError(f"`opset` must be a number from {LOWEST} to {HIGHEST}, got {opset!r}.")
    require_suffix(path, "export_onnx")
    onnx = require("onnx", "onnx")
    require("onnx_ir", "onnxscript")
    require("onnxscript", "onnxscript")
    from fakequant._export.onnx import trial_run

    args, kwargs = inputs_of(model, example)
    shapes = dynamic_shapes
    if shapes is None and dynamic_batch:
        shapes = first_axes(args, kwargs, "batch")
    old_data = _data_of(Path(path))
    with writing(path) as unfinished, without_autocast():
        golden = converted(model, target, strict)
        goal = _runtimes.find(conversion(golden).target)
        if goal.runtime.exporter != "export_onnx":
            raise ValueError(
                f"The target {goal.name!r} is for {goal.runtime.name}, which does not read ONNX files.\n"
                f"Use fakequant.{goal.runtime.exporter}, or prepare the model for another target."
            )
        require_float32(golden, args, kwargs)
        release_memory()  # in which weights became codes
        names, results = results_of(golden.eval(), args, kwargs)
        integers, floats = layers_of(golden)
        digest = notes.digest_of_parameters(golden)
        calls = make_exportable(golden)
        program = _export(golden, args, kwargs, max(opset, TORCHS_LOWEST), shapes)
        modules = _write_steps(program, golden, calls, opset, goal)
        forget_codes(golden)  # `program` has those that are written
        modules |= _finish(program, opset, goal)
        program.metadata_props[notes.INPUTS] = json.dumps([value.name for value in program.graph.inputs])
        _rename(program.graph.inputs, input_names, "input_names")
        if output_names is None:
            _name_outputs(program.graph, names)
        _rename(program.graph.outputs, output_names, "output_names")
        outputs = [value.name for value in program.graph.outputs]
        program.metadata_props[notes.OUTPUTS] = json.dumps(dict(zip(outputs, names, strict=True)))
        program.ir_version = onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", opset)])
        constants = {name: value for graph in program.graphs() for name, value in graph.initializers.items()}
        program.metadata_props[notes.TENSORS] = json.dumps(sorted(map(str, constants)))
        program.metadata_props[notes.TARGET] = goal.name
        program.metadata_props[notes.PARAMETERS] = digest
        size = sum(value.const_value.nbytes for value in constants.values() if value.const_value)
        with TemporaryDirectory(dir=unfinished.parent, prefix=f"{unfinished.name}.") as folder:
            files = [Path(folder) / Path(path).name]
            if size > _LARGEST_FILE if external_data is None else external_data:
                files.append(Path(folder) / f"{Path(path).name}.data")
            _write(program, *files)
            release_memory()  # which the runtime needs
            onnx.checker.check_model(str(files[0]), full_check=True)
            trial_run.require_runs(files[0], goal, (args, kwargs), results, modules)
            size = sum(file.stat().st_size for file in files)
            for file in files[1:]:
                file.replace(unfinished.parent / file.name)
            files[0].replace(unfinished)
    if old_data is not None and len(files) == 1:
        old_data.unlink(missing_ok=True)
    return OnnxExport(
        path=str(path),
        external_data=f"{path}.data" if len(files) > 1 else None,
        target=goal.name,
        opset=opset,
        bytes=size,
        inputs=_shapes(program.graph.inputs),
        outputs=_shapes(program.graph.outputs),
        integers=integers,
        floats=floats,
    )


def _data_of(path: Path) -> Path | None:
    """Returns the second file of the ONNX file that will be replaced, or None if it has none."""
    data = path.with_name(f"{path.name}.data")
    if not (path.is_file() and data.is_file()):
        return None
    onnx = require("onnx", "onnx")
    try:
        found = onnx.load(path, load_external_data=False)
    except Exception:  # whatever was at the path: its neighbours are not ours
        return None
    places = {entry.value for tensor in found.graph.initializer for entry in tensor.external_data}
    return data if data.name in places else None


def _write(program: "Model", path: Path, data: Path | None = None) -> None:
    """Writes a program to a file, and its large tensors to a second one if there is a path for it."""
    onnx, ir = require("onnx", "onnx"), require("onnx_ir", "onnxscript")
    if data is not None:
        repeated = _repeated(program)
        for value in repeated:
            value.const_value = None
        ir.external_data.unload_from_model(program, data.parent, data.name, size_threshold_bytes=_SMALL)
        for value, first in repeated.items():
            there = cast("ExternalTensor", first.const_value)
            value.const_value = ir.ExternalTensor(
                there.location, there.offset, there.length, there.dtype,
                shape=there.shape, name=value.name, base_dir=there.base_dir,
            )  # fmt: skip
    written = ir.serde.serialize_model(program)
    digest = notes.digest_of_graph(written, path.parent)
    onnx.helper.set_model_props(written, {**program.metadata_props, notes.GRAPH: digest})
    path.write_bytes(written.SerializeToString())


def _repeated(program: "Model") -> "dict[Value, Value]":
    """Returns the large tensors that have the bytes of an earlier one, such as tied weights, each with that one."""
    alike: dict[tuple[Any, ...], list[Value]] = {}
    for value in (value for graph in program.graphs() for value in graph.initializers.values()):
        tensor = value.const_value
        if tensor is not None and tensor.nbytes > _SMALL:
            alike.setdefault((tensor.dtype, tuple(tensor.shape)), []).append(value)
    found: dict[Value, Value] = {}
    for values in alike.values():
        first: dict[bytes, Value] = {}
        for value in values if len(values) > 1 else ():
            array = np.ascontiguousarray(cast("TensorProtocol", value.const_value).numpy())
            earlier = first.setdefault(hashlib.sha256(array.view(np.uint8).data).digest(), value)
            if earlier is not value:
                found[value] = earlier
    return found


def _shapes(values: "Sequence[Value]") -> dict[str, tuple[int | str, ...]]:
    """Returns the shapes of inputs or outputs by name. An axis of any length has a name."""
    return {
        str(value.name): tuple(size if isinstance(size, int) else str(size) for size in value.shape or ())
        for value in values
    }


def _rename(values: "Sequence[Value]", names: Sequence[str] | None, argument: str) -> None:
    if names is None:
        return
    if isinstance(names, str) or len(names) != len(values) or len(set(names)) != len(names):
        raise ValueError(
            f"`{argument}` must be {len(values)} different names, for {', '.join(str(v.name) for v in values)}, "
            f"got {names!r}."
        )
    for value, name in zip(values, names, strict=True):
        value.name = name


def _name_outputs(graph: "Graph", names: Sequence[str]) -> None:
    """Names outputs after the model's results. A name that another value has gets a number."""
    used = {value.name for node in graph for value in node.outputs} | {value.name for value in graph.inputs}
    used |= set(graph.initializers)
    for value, name in zip(graph.outputs, names, strict=True):
        used.discard(value.name)
        free = (name if number == 0 else f"{name}_{number}" for number in count())
        value.name = next(one for one in free if one not in used)
        used.add(value.name)


def _export(model: nn.Module, args: Args, kwargs: Kwargs, opset: int, shapes: DynamicShapes | None) -> "Model":
    """Returns the ONNX program from torch's exporter, with one node per grid and per stored weight."""
    leaves.return_tensors(model)
    args, kwargs, shapes = bind_constants(model, args, kwargs, shapes)
    with quiet_exporter(), torch.no_grad():
        longer = _with_longer_axes(list(inspect.signature(model.forward).parameters), args, kwargs, shapes)
        if longer is not None:
            with suppress(Exception):  # an input whose first axis is not the batch may have to keep its length
                return torch_export(model, *longer, opset, shapes)
        try:
            return torch_export(model, args, kwargs, opset, shapes)
        except Exception as error:
            if shapes is None:
                raise ValueError(_REFUSED.format(reason_of(error), place_of(error, model))) from error
            try:
                torch_export(model, args, kwargs, opset, None)
            except Exception as first:  # fails with fixed shapes too
                raise ValueError(_REFUSED.format(reason_of(first), place_of(first, model))) from first
            where = place_of(error, model)
            raise ValueError(_FIXED.format(reason_of(error), where, *_lengths(args, kwargs))) from error


def torch_export(model: nn.Module, args: Args, kwargs: Kwargs, opset: int, shapes: DynamicShapes | None) -> "Model":
    """Returns the ONNX program that torch's exporter makes of a model."""
    from fakequant._export.onnx import format_lowering, lowering, recurrent

    with FunctionForms():
        program = torch.onnx.export(
            model,
            _fresh(args),
            kwargs=_fresh(kwargs) or None,
            dynamo=True,
            opset_version=opset,
            dynamic_shapes=shapes,
            custom_translation_table={
                **lowering.TRANSLATIONS,
                **format_lowering.TRANSLATIONS,
                **recurrent.TRANSLATIONS,
            },
            verbose=False,
        )
    assert program is not None
    lowering.remove_barriers(program.model.graph)
    return program.model


_REFUSED = "torch's exporter cannot export the model: {}{}"
_FIXED = (
    "The model cannot be exported for batches of any length: {}{}\n"
    "Use export_onnx(..., dynamic_batch=False) for batches of the example's length ({}) only, or change the model's "
    "code to read the length from the input's shape."
)


def _with_longer_axes(
    parameters: list[str], args: Args, kwargs: Kwargs, shapes: DynamicShapes | None
) -> tuple[Args, Kwargs] | None:
    """Returns the example with dynamic axes of length 1 repeated, or None if it has no such axes.

    In some operations torch's exporter takes a length of 1 for a constant, although the axis is dynamic. The file would
    then compute only batches of this length. Axes of one name are repeated only if all have length 1.
    """
    given = {**dict(zip(parameters, args, strict=False)), **kwargs}
    of_inputs = shapes if isinstance(shapes, Mapping) else dict(zip(given, shapes or (), strict=False))
    axes = {
        (key, axis): str(name)
        for key, found in of_inputs.items()
        if isinstance(found, Mapping) and isinstance(given.get(key), Tensor)
        for axis, name in found.items()
        if name is not None
    }
    lengths: dict[str, set[int]] = {}
    for (key, axis), name in axes.items():
        lengths.setdefault(name, set()).add(given[key].shape[axis])
    repeated: dict[tuple[int, ...], Tensor] = {}  # an input that is passed twice stays one tensor
    for key, x in given.items():
        short = [axis for (of, axis), name in axes.items() if of == key and lengths[name] == {1}]
        if short:
            times = [2 if axis in short else 1 for axis in range(x.dim())]
            given[key] = repeated.setdefault((id(x), *short), x.repeat(times))
    if not repeated:
        return None
    longer = tuple(given[name] for name in parameters[: len(args)])
    return (*longer, *args[len(longer) :]), {name: given[name] for name in kwargs}


def _fresh(inputs: Any) -> Any:
    """Returns aliases of the input tensors, because torch's exporter permanently marks its inputs as dynamic."""
    made: dict[int, Tensor] = {}  # an input that is passed twice stays one tensor
    return pytree.tree_map_only(Tensor, lambda x: made.setdefault(id(x), x.detach()), inputs)


def _lengths(args: Args, kwargs: Kwargs) -> list[str]:
    found = {str(len(x)) for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() > 0}
    return [" and ".join(sorted(found)) or "none"]


def _write_steps(
    program: "Model", model: nn.Module, calls: "Counter[str]", opset: int, target: Target
) -> "dict[Node, str]":
    """Writes recurrent layers as Scan nodes. Returns the modules of the nodes of their steps."""
    from fakequant._export.onnx import recurrent

    modules: dict[Node, str] = {}

    def export(path: str, step: nn.Module, args: tuple[Tensor, ...]) -> "Model":
        with quiet_exporter(), torch.no_grad():
            body = torch_export(step, args, {}, max(opset, TORCHS_LOWEST), first_axes(args, {}, "batch"))
        _finish(body, opset, target)
        modules.update(dict.fromkeys(body.graph, path))
        return body

    recurrent.write_scans(program, model, calls, export)
    return modules


def _finish(program: "Model", opset: int, target: Target) -> "dict[Node, str]":
    """Turns torch's program into the program of the file. Returns the modules of nodes, see `trial_run`."""
    from fakequant._export.onnx import format_lowering, graph_forms, lowering, old_opsets, trial_run

    graph_forms.rewrite(program, target)
    format_lowering.FormatLowering(program, opset, unsigned=target.activations.is_stored_unsigned).run()
    graph_forms.gather_codes(program.graph)
    if opset < program.opset_imports[""]:
        old_opsets.downgrade(program, opset)
    modules = trial_run.modules_of_nodes(program.graph)
    lowering.strip(program)
    return modules


@contextmanager
def quiet_exporter() -> Iterator[None]:
    """Hides messages that users cannot act on: torchvision is missing, torch calls its own deprecated functions."""
    names = ("torch.onnx._internal.exporter._registration", "onnxscript.optimizer._constant_folding")
    loggers = [(logging.getLogger(name), logging.getLogger(name).level) for name in names]
    for logger, _ in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)`", category=FutureWarning)
            warnings.filterwarnings("ignore", message=r"# The axis name: .* will not be used", category=UserWarning)
            yield
    finally:
        for logger, level in loggers:
            logger.setLevel(level)
