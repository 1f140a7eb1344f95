"""Gives each reader of a constant a constant of its own, which the file stores once.

ExecuTorch copies a constant that several delegates read, but the copies have one name, which it then does not find.
"""

from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument


def use_own_constants(program: ExportedProgram) -> None:
    """Changes a program in place."""
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
