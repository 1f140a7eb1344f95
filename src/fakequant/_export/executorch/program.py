"""From a golden model to the bytes of an ExecuTorch program."""

import copy
import dataclasses
import json
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Graph, GraphModule
from torch.fx.passes.infra.pass_base import PassResult

from fakequant._export.example import any_batch, bind_constants
from fakequant._export.executorch.delegation import Delegation, find_callers, find_delegation, path_of
from fakequant._export.executorch.exported_modules import Seen, make_exportable
from fakequant._export.executorch.graph import aten, is_call
from fakequant._export.function_forms import FunctionForms
from fakequant._export.notes import INPUTS
from fakequant._model.leaves import return_tensors
from fakequant._model.running import Args, Kwargs
from fakequant._runtimes.xnnpack.running import import_executorch, import_runtime, quiet
from fakequant._util.packages import require


@dataclasses.dataclass(frozen=True)
class Program:
    """A program for ExecuTorch, before notes are completed."""

    data: bytes
    delegation: Delegation
    # The paths of the quantizers whose values are additional outputs, behind those of the model. One per call.
    watched: list[str]
    # The operators by the numbers that XNNPACK's messages have for them, and by name: which modules call them.
    callers: dict[int | str, list[str]]


def _watch(model: nn.Module, seen: Seen) -> None:
    """Makes a model return its result together with those of its quantizers."""
    model.register_forward_pre_hook(lambda *_: seen.clear())
    model.register_forward_hook(lambda module, args, result: (result, [value for _, value in seen]))


def _remove_copies_of_results(graph: Graph) -> None:
    """Makes a graph return the values that it has copied only to return them."""
    for node in list(graph.nodes):
        if is_call(node, {aten.clone.default}) and all(user.op == "output" for user in node.users):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


@torch.no_grad()
def make_graph(
    golden: nn.Module, args: Args, kwargs: Kwargs, shapes: Any = None, *, watched: bool = False
) -> tuple[ExportedProgram, list[str]]:
    """Returns a golden model as a graph of operators that ExecuTorch knows, and the paths of watched quantizers.

    The arguments are those of `make_program`.
    """
    import_executorch()
    from fakequant._export.executorch.graph_forms import rewrite
    from fakequant._export.executorch.layer_forms import use_images, use_products, use_two_dimensions
    from fakequant._export.executorch.lowering import lower

    model = copy.deepcopy(golden).eval()
    seen = make_exportable(model)
    return_tensors(model)
    args, kwargs, shapes = bind_constants(model, args, kwargs, shapes)
    with quiet():
        model(*args, **kwargs)  # makes the parts of weights that are used by themselves
        paths = [path for path, _ in seen]
        if watched:
            _watch(model, seen)
        with FunctionForms(), any_batch():
            graph = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
        graph = graph.run_decompositions({})
        seen.clear()
        _remove_copies_of_results(graph.graph)
        use_own_constants(graph)
        use_products(graph)
        use_two_dimensions(graph)
        use_images(graph)
        rewrite(graph.graph)
        lower(graph)
    return graph, paths if watched else []


def make_program(
    golden: nn.Module,
    args: Args,
    kwargs: Kwargs,
    shapes: Any = None,
    *,
    notes: dict[str, str] | None = None,
    watched: bool = False,
) -> Program:
    """Returns the program of a golden model, which is not changed.

    Args:
        golden: The converted model.
        args: Its positional arguments, as an example.
        kwargs: Its keyword arguments.
        shapes: The axes that may have any length, as in `torch.export`, or None.
        notes: Strings that the program contains, by name, together with the names of its inputs. None for neither.
        watched: Whether the program also returns the dequantized values of all quantizers with a fixed scale.
    """
    graph, paths = make_graph(golden, args, kwargs, shapes, watched=watched)
    if notes is not None:
        notes = {**notes, INPUTS: json.dumps(_tensor_inputs(graph))}
    with quiet(), any_batch(), torch.no_grad():
        edge = _to_edge(graph, notes)
        delegation = find_delegation(edge.exported_program())
        callers = find_callers(edge.exported_program())
        made = edge.to_executorch()
        require_kernels(made.exported_program())
        data = made.buffer
    return Program(bytes(data), delegation, paths, callers)


def make_float_program(model: nn.Module, args: Args, kwargs: Kwargs, notes: dict[str, str]) -> bytes:
    """Returns the program of a float model, with as much of it in XNNPACK as possible. See `make_program`."""
    import_executorch()
    with quiet(), torch.no_grad():
        graph = torch.export.export(model, args, kwargs, strict=False).run_decompositions({})
        notes = {**notes, INPUTS: json.dumps(_tensor_inputs(graph))}
        made = _to_edge(graph, notes).to_executorch()
        require_kernels(made.exported_program())
        return bytes(made.buffer)


def _tensor_inputs(graph: ExportedProgram) -> list[str]:
    """Returns the names of the inputs that are tensors. Others are constants of the program."""
    specs = graph.graph_signature.input_specs
    return [one.arg.name for one in specs if one.kind == InputKind.USER_INPUT and isinstance(one.arg, TensorArgument)]


def _to_edge(traced: ExportedProgram, notes: dict[str, str] | None) -> Any:
    exir = require("executorch.exir", "executorch", "executorch")
    xnnpack = require("executorch.backends.xnnpack.partition.xnnpack_partitioner", "executorch", "executorch")
    return exir.to_edge_transform_and_lower(
        traced,
        transform_passes=[_dequantize_for_each_reader],
        partitioner=[xnnpack.XnnpackPartitioner()],
        constant_methods=notes,
        compile_config=exir.EdgeCompileConfig(_check_ir_validity=False),  # kernels are checked at the end
    )


def _dequantize_for_each_reader(module: GraphModule) -> PassResult:
    """Gives each reader of codes a dequantize operator, also those that an activation was decomposed into.

    Where a reader needs another order of axes than XNNPACK's convolutions return, XNNPACK's pass reorders the result of
    the operator, also for other readers, whose order it has decided before.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and "dequantize_per_tensor" in str(node.target):
            for reader in list(node.users)[1:]:
                with graph.inserting_after(node):
                    reader.replace_input_with(node, graph.node_copy(node))
    module.recompile()
    return PassResult(module, True)


def use_own_constants(program: ExportedProgram) -> None:
    """Gives each reader of a constant a constant of its own, in place. The file stores it once.

    ExecuTorch copies a constant that several delegates read, but the copies have one name, which it then does not find.
    """
    graph, signature = program.graph, program.graph_signature
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    specs: list[InputSpec] = []
    for spec in signature.input_specs:
        specs.append(spec)
        if spec.kind != InputKind.CONSTANT_TENSOR:
            continue
        assert spec.target is not None
        node = after = placeholders[spec.arg.name]
        for number, reader in enumerate(list(node.users)[1:], 1):
            name, target = f"{node.name}_{number}", f"{spec.target}_{number}"
            with graph.inserting_after(after):
                after = graph.placeholder(name)
            after.meta = dict(node.meta)
            reader.replace_input_with(node, after)
            program.constants[target] = program.constants[spec.target]
            specs.append(InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(after.name), target))
    signature.input_specs[:] = specs
    program.graph_module.recompile()


class MissingKernel(ValueError):
    """ExecuTorch has no kernel for an operator."""


def require_kernels(program: ExportedProgram) -> None:
    """Raises MissingKernel if the program calls an operator that the installed runtime does not have."""
    known = set(import_runtime().Runtime.get().operator_registry.operator_names)
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None:
            continue
        if schema.name == "aten::convolution" and node.args[1].meta["val"].dim() > 4:
            raise MissingKernel(
                f"ExecuTorch has no kernel for convolutions along three axes, which {path_of(node) or 'the model'} "
                "computes.\nUse other operations there."
            )
        name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        if name not in known:
            raise MissingKernel(
                f"ExecuTorch has no kernel for {schema.name.replace('aten::', 'torch.')}, which "
                f"{path_of(node) or 'the model'} calls.\nUse other operations there."
            )
