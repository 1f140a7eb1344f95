"""The limits of LiteRT's kernels: the types of elements and the numbers of axes that they take.

LiteRT would refuse a file with other operators, and name its kernels instead of the module.
"""

from fakequant._export.litert.graph import Graph
from fakequant._export.litert.operations import NoOperator

_NUMBERS = ("float32", "int32", "int64")
# The types of the first input, for operators that take only some. Codes are checked when operators are chosen.
_TYPES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("ADD", "SUB", "MUL", "FLOOR_MOD", "MAXIMUM", "MINIMUM", "NEG"), _NUMBERS),
    **dict.fromkeys(("LESS", "LESS_EQUAL", "GREATER", "GREATER_EQUAL"), _NUMBERS),
    **dict.fromkeys(("SUM", "REDUCE_MAX", "REDUCE_MIN", "CUMSUM"), _NUMBERS),
    **dict.fromkeys(("DIV", "FLOOR_DIV", "POW", "SIGN"), ("float32", "int32")),
    **dict.fromkeys(("ARG_MAX", "ARG_MIN"), ("float32", "int32", "bool")),
    **dict.fromkeys(("FLOOR", "CEIL", "ROUND", "BATCH_MATMUL", "MAX_POOL_2D", "AVERAGE_POOL_2D"), ("float32",)),
}
# XNNPACK computes these operators, and its tensors have at most this number of axes.
_MOST_AXES = 6
_LIMITED = {
    "FULLY_CONNECTED", "BATCH_MATMUL", "SOFTMAX", "CONCATENATION", "PAD", "PADV2", "SUM", "MEAN", "REDUCE_MAX",
    "REDUCE_MIN",
}  # fmt: skip


def require_kernels(graph: Graph) -> None:
    """Raises NoOperator if LiteRT has no kernel for an operator of a graph."""
    for operator in graph.operators:
        place = operator.path or "The model"
        tensors = [one for one in (*operator.inputs, *operator.outputs) if one is not None]
        for tensor in tensors:
            if tensor.dtype in ("float16", "bfloat16"):
                raise NoOperator(
                    f"{place} computes with {tensor.dtype}, and files have float32 only.\nUse float32 there."
                )
        kind, axes = tensors[0].dtype, max(len(tensor.shape) for tensor in tensors)
        if not tensors[0].is_codes and kind not in _TYPES.get(operator.code, (kind,)):
            raise NoOperator(
                f"{place} needs the operator {operator.code} on {kind}, for which LiteRT has no kernel, only on "
                f"{', '.join(_TYPES[operator.code])}.\nUse other operations there, or cast its operands."
            )
        if operator.code in _LIMITED and axes > _MOST_AXES:
            raise NoOperator(
                f"{place} needs the operator {operator.code} on a tensor with {axes} axes; LiteRT takes at most "
                f"{_MOST_AXES}.\nJoin axes with reshape there."
            )
