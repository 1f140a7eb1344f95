"""Whether ExecuTorch has a kernel for every operator of a program."""

from torch.export import ExportedProgram

from fakequant._executorch.delegation import path_of
from fakequant._executorch.quiet import import_runtime


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
