"""The source of a network, as text and as its parts."""

import ast
import dataclasses


@dataclasses.dataclass(frozen=True)
class Source:
    """The parts of a network's source; `str` gives the text.

    >>> source = Source(("self.a = nn.ReLU()",), {"x": "torch.randn(batch, 2)"}, ("h = self.a(x)",), "h", (1, 2))
    >>> Source.parse(str(source)).statements
    ('h = self.a(x)',)
    """

    # Statements of `__init__`.
    modules: tuple[str, ...]
    # The arguments of `forward`, each with the expression of its value.
    inputs: dict[str, str]
    # Statements of `forward`, each with one or more lines, and what it returns.
    statements: tuple[str, ...]
    result: str
    # The length of the batch of an example, and another one.
    sizes: tuple[int, int]

    def __str__(self) -> str:
        lines = ["import torch", "import torch.nn.functional as F", "from torch import nn", "", ""]
        lines += ["class Network(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [f"        {line}" for line in self.modules]
        lines += ["", f"    def forward(self, {', '.join(self.inputs)}):"]
        lines += [f"        {line}" for statement in self.statements for line in statement.splitlines()]
        lines += [f"        return {self.result}", "", "", "def inputs(batch):"]
        lines += [f"    {name} = {expression}" for name, expression in self.inputs.items()]
        lines += [f"    return ({', '.join(self.inputs)}{',' * (len(self.inputs) == 1)})", "", ""]
        lines += [f"SIZES = {self.sizes}  # the batch of the example, and another one", ""]
        return "\n".join(lines)

    @classmethod
    def parse(cls, text: str) -> "Source":
        """Returns the parts of a text that `str` gave."""
        network, inputs, sizes = ast.parse(text).body[-3:]
        init, forward = network.body
        return cls(
            tuple(ast.unparse(statement) for statement in init.body[1:]),
            {line.targets[0].id: ast.unparse(line.value) for line in inputs.body[:-1]},
            tuple(ast.unparse(statement) for statement in forward.body[:-1]),
            ast.unparse(forward.body[-1].value),
            ast.literal_eval(sizes.value),
        )


def names(code: str, context: type[ast.expr_context]) -> set[str]:
    """Returns the variables that a piece of code reads (`ast.Load`) or assigns (`ast.Store`)."""
    return {n.id for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Name) and isinstance(n.ctx, context)}


def attributes(code: str) -> set[str]:
    """Returns the attributes of `self` that a piece of code uses.

    >>> sorted(attributes("h = self.a(x) + self.b"))
    ['a', 'b']
    """
    return {
        n.attr
        for n in ast.walk(ast.parse(code))
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "self"
    }
