"""Random networks as Python source, from a seed."""

import ast
import random

import torch

from constructs import CONSTRUCTS, any_layer, embedding
from drafts import Draft
from sources import names

MOST_STATEMENTS = 18


def network(seed: int) -> str:
    """Returns the source of a random network. The same seed gives the same source.

    The source needs only torch. It defines the class `Network`, the function `inputs(batch)`, which returns the
    arguments of its `forward`, and `SIZES`: the length of the batch of an example, and another one that it takes.

    A network that torch itself cannot run, train or copy is not returned, nor one with infinite results.
    """
    for attempt in range(100):
        source = _drawn(random.Random(f"{seed}, attempt {attempt}"))
        if is_sound(source):
            return source
    raise AssertionError(f"no network of seed {seed} runs")


def is_sound(source: str) -> bool:
    """Returns True if torch runs and trains the network of a source in float, with finite and repeatable results."""
    scope = {"__name__": "network"}
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            exec(source, scope)
            model, sizes = scope["Network"]().eval(), scope["SIZES"]
            for size in (*sizes, max(*sizes, 2)):
                given = scope["inputs"](size)
                with torch.no_grad():
                    first, again = (tensors(model(*(x.clone() for x in given))) for _ in range(2))
                if not all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(first, again)):
                    return False
            results = [y for y in tensors(model.train()(*given)) if y.requires_grad]
            if results:
                sum(y.square().mean() for y in results).backward()
            return bool(results)
    except Exception:  # of any kind: the shrinker asks about networks that use what they do not define
        return False


def tensors(result: object) -> list[torch.Tensor]:
    """Returns the tensors of a result: a tensor, or tuples, lists and dicts of them."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, dict):
        result = list(result.values())
    return [y for part in result for y in tensors(part)] if isinstance(result, list | tuple) else []


def _drawn(generator: random.Random) -> str:
    draft = Draft(generator)
    for _ in range(generator.choices((1, 2, 3), (8, 2, 1))[0]):
        draft.input(_data(generator))
    for name in list(draft.inputs):
        with draft.attempt():
            embedding(draft) if "randint(10" in draft.inputs[name] else any_layer(draft, name)
    added, wanted = 0, generator.randint(2, 9)
    for _ in range(30):
        before = len(draft.statements)
        if added < wanted and before < MOST_STATEMENTS:
            with draft.attempt():
                generator.choices(list(CONSTRUCTS), list(CONSTRUCTS.values()))[0](draft)
            added += len(draft.statements) > before
    result = _result(draft)
    if draft.chance(0.9):  # otherwise there may be inputs that nothing reads, and one more
        read = names("\n".join([*draft.statements, result]), ast.Load)
        draft.inputs = {name: given for name, given in draft.inputs.items() if name in read}
    elif len(draft.inputs) < 3:
        draft.input("torch.randn(batch, 4)")
    example = generator.choice((1, 2, 3, 4, 5))
    return str(draft.source(result, (example, generator.choice([n for n in (1, 2, 3, 5, 7) if n != example]))))


def _data(generator: random.Random) -> str:
    """Returns the expression of an input: an image, a volume, a sequence, rows or tokens."""
    kind = generator.choices(("image", "volume", "sequence", "rows", "tokens"), (12, 1, 8, 3, 4))[0]
    size, length = generator.randint(5, 12), generator.randint(3, 7)
    channels = generator.choice((1, 2, 3, 4, 8))
    shape = {
        "image": f"{channels}, {size}, {generator.choice((size, size, 7))}",
        "volume": "2, 5, 5, 6",
        "sequence": f"{length}, {generator.choice((3, 4, 6, 8, 8, 16))}",
        "rows": f"{generator.choice((2, 3, 5, 8, 16))}",
        "tokens": f"{length}",
    }[kind]
    if kind == "tokens":
        return f"torch.randint(10, (batch, {shape}))"
    scale = generator.choice(("1e4", "1e5", "1e6", "1e-4", "1e-5", "1e-6"))
    forms = (
        f"torch.randn(batch, {shape})",
        f"torch.rand(batch, {shape})",
        f"torch.randint(-8, 9, (batch, {shape})) / 4",  # many ties
        f"torch.randn(batch, {shape}) * {scale}",
        f"torch.randn(batch, {shape}).relu()",
    )
    return generator.choices(forms, (10, 3, 3, 2, 1))[0]


def _result(draft: Draft) -> str:
    """Returns the expression that a network returns."""
    found = [name for name in draft.names if name not in draft.inputs] or draft.names
    last = found[-1]
    other = draft.random.choice(found)
    read = names("\n".join(draft.statements), ast.Load)
    unread = [name for name in found if name not in read]
    if len(unread) > 1 and draft.chance(0.8):
        other = draft.random.choice(unread)
    constant = draft.random.choice(("None", "2.0", f"{last}.shape[1]", "'name'"))
    if len(draft.inputs) > 1 and draft.chance(0.8):  # otherwise some inputs are likely not used
        return ", ".join(dict.fromkeys([last, *unread]))
    forms = {
        last: 12,
        f"{last}, {other}": 3,
        f'{{"first": {last}, "second": {other}}}': 1.5,
        f'{last}, ({other}, {{"third": {draft.random.choice(found)}}})': 1,
        f"[{last}]": 0.3,
        f"{last}, {constant}": 1.5,
    }
    return draft.random.choices(list(forms), list(forms.values()))[0]
