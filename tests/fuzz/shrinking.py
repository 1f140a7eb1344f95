"""Makes the source of a failing network smaller while it fails in the same way."""

import ast
import dataclasses
import re
import time
from collections.abc import Callable, Iterator

import torch

from random_networks import is_sound
from sources import Source, attributes, names


def shrunk(text: str, fails: Callable[[str], bool], seconds: float = 120.0) -> str:
    """Returns the smallest source found that still fails.

    Edits are tried, the largest first, until none of them keeps the failure. An edit returns another variable, removes
    a statement (another variable or a new input takes the place of its result), replaces an expression by a part of
    it, drops inputs and modules, or simplifies the data.

    Args:
        text: The source of a network that fails.
        fails: Whether a source fails in the same way. It is called only with networks that torch itself can run.
        seconds: After this time, the smallest source so far is returned.
    """
    end = time.monotonic() + seconds
    source, tried = Source.parse(text), {text}

    def is_failing(candidate: Source) -> bool:
        text = str(candidate)
        if text in tried or not is_sound(text):
            return False
        tried.add(text)
        return fails(text)

    while True:
        for candidate in _edits(source):
            if time.monotonic() > end:
                return str(source)
            if is_failing(candidate):
                source = candidate
                break
        else:
            return str(source)


def _edits(source: Source) -> Iterator[Source]:
    """Returns sources that are smaller, each by one edit, in the order in which they save most."""
    for result in _results(source):
        shorter = dataclasses.replace(source, result=result)
        yield _without_dead_code(shorter)
        yield shorter
    yield _without_dead_code(source)
    yield _without_unused(source)
    for n in reversed(range(len(source.statements))):
        yield from _without_statement(source, n)
    for name in source.inputs:
        if len(source.inputs) > 1:
            yield _without_unused(source, {name})
    for n, statement in enumerate(source.modules):
        if not re.match(r"self\.\w+ = ", statement):  # a weight that was changed
            yield dataclasses.replace(source, modules=(*source.modules[:n], *source.modules[n + 1 :]))
    for n, statement in enumerate(source.statements):
        for simpler in _simpler_statements(statement):
            changed = (*source.statements[:n], simpler, *source.statements[n + 1 :])
            yield _without_unused(dataclasses.replace(source, statements=changed))
    yield from _plainer_data(source)


def _results(source: Source) -> Iterator[str]:
    """Returns variables that could be returned instead: earlier ones first, as they need the fewest statements."""
    if source.result.isidentifier():
        assigned = [name for statement in source.statements for name in sorted(names(statement, ast.Store))]
        yield from assigned[: assigned.index(source.result)] if source.result in assigned else []
    else:
        # The order in which they appear; names of dict keys and constants do not.
        found = (n.id for n in ast.walk(ast.parse(source.result)) if isinstance(n, ast.Name))
        yield from dict.fromkeys(found)


def _writes(statement: str) -> set[str]:
    """Returns the variables that a statement assigns or changes in place."""
    return names(statement, ast.Store) or names(statement, ast.Load)


def _without_dead_code(source: Source) -> Source:
    """Removes statements that the result does not depend on."""
    needed, kept = names(source.result, ast.Load), []
    for statement in reversed(source.statements):
        if _writes(statement) & needed:
            needed |= names(statement, ast.Load)
            kept.append(statement)
    return _without_unused(dataclasses.replace(source, statements=tuple(reversed(kept))))


def _without_unused(source: Source, dropped: set[str] | None = None) -> Source:
    """Removes modules that no statement uses, and inputs: those that no statement reads, or `dropped`."""
    code = "\n".join([*source.statements, f"({source.result})"])
    used, read = attributes(code), names(code, ast.Load)
    inputs = {x: value for x, value in source.inputs.items() if (x in read if dropped is None else x not in dropped)}
    modules = tuple(statement for statement in source.modules if attributes(statement) <= used)
    return dataclasses.replace(source, modules=modules, inputs=inputs or source.inputs)


def _without_statement(source: Source, n: int) -> Iterator[Source]:
    """Removes a statement. A variable of the same shape, or a new input, takes the place of its result."""
    statement, rest = source.statements[n], source.statements[n + 1 :]
    before = source.statements[:n]
    yield _without_unused(dataclasses.replace(source, statements=(*before, *rest)))
    shapes = _shapes(source)
    for old in sorted(names(statement, ast.Store) & shapes.keys()):
        known = [*source.inputs, *(name for text in before for name in sorted(names(text, ast.Store)))]
        for new in reversed([name for name in dict.fromkeys(known) if shapes.get(name) == shapes[old] and name != old]):
            yield _without_unused(_renamed(source, before, rest, old, new))
        free = next((name for name in "xyzuvw" if name not in source.inputs), None)
        if free and shapes[old][0] is torch.float32:
            sizes = ", ".join(map(str, shapes[old][1][1:]))
            changed = _renamed(source, before, rest, old, free)
            inputs = {**source.inputs, free: f"torch.randn(batch, {sizes})"}
            yield _without_unused(dataclasses.replace(changed, inputs=inputs))


def _renamed(source: Source, before: tuple[str, ...], rest: tuple[str, ...], old: str, new: str) -> Source:
    rename = re.compile(rf"(?<![.\w]){old}\b")
    statements = (*before, *(rename.sub(new, text) for text in rest))
    return dataclasses.replace(source, statements=statements, result=rename.sub(new, source.result))


def _shapes(source: Source) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Returns the types and shapes of all variables, found by running the network."""
    watched = dataclasses.replace(source, statements=(*source.statements, "self.seen = dict(locals())"))
    scope = {"__name__": "network"}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        exec(str(watched), scope)
        model = scope["Network"]().eval()
        model(*scope["inputs"](11))  # an unlikely length of another axis
    return {
        name: (x.dtype, tuple(x.shape))
        for name, x in model.seen.items()
        if isinstance(x, torch.Tensor) and x.dim() > 1 and x.shape[0] == 11
    }


def _simpler_statements(statement: str) -> Iterator[str]:
    """Returns assignments of a part of the expression that a statement assigns, and branches of an `if`."""
    parsed = ast.parse(statement).body[0]
    if isinstance(parsed, ast.If):
        for branch in (parsed.body, parsed.orelse):
            yield "\n".join(map(ast.unparse, branch))
    if not isinstance(parsed, ast.Assign):
        return
    for part in ast.walk(parsed.value):
        if part is not parsed.value and isinstance(part, ast.Call | ast.BinOp | ast.Subscript | ast.Name):
            text = ast.unparse(part)
            if not text.startswith(("F", "torch", "self")) or "(" in text:
                yield f"{ast.unparse(parsed.targets[0])} = {text}"


def _plainer_data(source: Source) -> Iterator[Source]:
    """Returns the same network with normal numbers as inputs, or with other lengths of the batch."""
    for name, expression in source.inputs.items():
        found = re.match(
            r"torch\.(?:randn|rand)\(batch, ([\d, ]+)\)|torch\.randint\(-8, 9, \(batch, ([\d, ]+)\)", expression
        )
        if found and expression != f"torch.randn(batch, {found.group(1)})":
            plain = {**source.inputs, name: f"torch.randn(batch, {found.group(1) or found.group(2)})"}
            yield dataclasses.replace(source, inputs=plain)
    if source.sizes != (2, 3):
        yield dataclasses.replace(source, sizes=(2, 3))
