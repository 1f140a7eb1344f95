"""Chains of blocks: modules that run one after another, each on the result of the one before.

    x = embed(tokens)
    for block in blocks:          # an nn.ModuleList or nn.Sequential
        x = block(x, mask)
    y = head(x)

A run that is about block k need not compute the blocks before it again. They are replaced while it runs: block k - 1
returns the result that was kept, and the others return tensors that nothing may read. If anything reads one, the blocks
are no chain. So every assumption about the flow of data is checked by the run itself.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fakequant._backends.torch.torch_private import pytree
from fakequant._model.shelf import Shelf

_CONTAINERS = (nn.ModuleList, nn.Sequential)
_CONSTANTS = (bool, int, float, str, type(None))


class NoChain(Exception):
    """A run shows that blocks are no chain."""


class _Unread(Tensor):
    """The result of a block that was not run. It can be passed on, but not read."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NoChain(f"{getattr(func, '__name__', func)} reads a result of a block that was not run")


def _unread() -> Tensor:
    return torch.empty(0, device="meta").as_subclass(_Unread)


class _Replaced(nn.Module):
    """Stands for a block and returns a result without computing it."""

    def __init__(self, block: nn.Module, result: Any) -> None:
        super().__init__()
        # Not children: the layers of the block are not part of the model while it runs.
        self.__dict__.update(_block=block, _result=result)
        self.training = block.training

    def __getattr__(self, name: str) -> Any:
        # The code of the model may look at attributes of its blocks.
        return getattr(self.__dict__["_block"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._result


@dataclasses.dataclass(eq=False)
class Chain:
    """Blocks by path, in the order in which they run, and the results of one of them.

    Attributes:
        blocks: The paths.
        results: What each block returns, with tensors that cannot be read.
    """

    blocks: list[str]
    results: dict[str, Any]
    # How many blocks need not run again, and functions that return the results of the last of these, one for each
    # batch; by model.
    _kept: dict[nn.Module, tuple[int, Shelf, list[Callable[[], Any]]]] = dataclasses.field(default_factory=dict)

    def done(self, model: nn.Module) -> int:
        """Returns how many blocks of a model need not run again."""
        return self._kept[model][0] if model in self._kept else 0

    def keep(self, model: nn.Module, done: int, results: Iterable[Any]) -> None:
        """Keeps the results of the last block that is done, for each batch."""
        with ExitStack() as undo:
            shelf = undo.enter_context(Shelf())
            kept = [shelf.put(result) for result in results]  # which may be computed from the results before
            undo.pop_all()  # open as long as the results are kept
        self._forget(model)
        self._kept[model] = (done, shelf, kept)

    def forget(self) -> None:
        """Forgets all results."""
        for model in list(self._kept):
            self._forget(model)

    def _forget(self, model: nn.Module) -> None:
        if model in self._kept:
            _, shelf, _ = self._kept.pop(model)
            shelf.close()

    def position(self, path: str) -> int | None:
        """Returns the number of the block that a module belongs to, or None if it belongs to none."""
        return next((n for n, block in enumerate(self.blocks) if is_inside(path, block)), None)

    @contextmanager
    def replaced(self, model: nn.Module, batch: int) -> Iterator[None]:
        """Context in which the blocks that are done are not computed."""
        if model not in self._kept:
            yield
            return
        places = []
        done, _, kept = self._kept[model]
        result: Any = kept[batch]()
        for number, path in enumerate(self.blocks[:done]):
            parent, _, name = path.rpartition(".")
            children = model.get_submodule(parent)._modules
            block = children[name]
            assert block is not None
            places.append((children, name, block))
            is_last = number == done - 1
            children[name] = _Replaced(block, result if is_last else self.results[path])
        try:
            yield
        finally:
            for children, name, block in places:
                children[name] = block


def is_inside(path: str, outer: str) -> bool:
    """Returns True if a module has another module's path, or is inside it.

    >>> is_inside("layers.1.fc", "layers.1"), is_inside("layers.10", "layers.1"), is_inside("fc", "")
    (True, False, True)
    """
    return path == outer or outer == "" or path.startswith(f"{outer}.")


def possible_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules that may be blocks, by path: the children of containers."""
    return {
        f"{path}.{name}" if path else name: child
        for path, module in model.named_modules()
        if isinstance(module, _CONTAINERS)
        for name, child in module.named_children()
    }


def find_chains(model: nn.Module, calls: list[tuple[str, Any]], waves: list[list[str]]) -> list[Chain]:
    """Returns the outermost chains that may be in a model, none of which has a block with most of its layers.

    Args:
        model: The model.
        calls: The calls of all `possible_blocks` in one run, in order: the path and the result.
        waves: The paths of layers in the order of their first call; layers with the same input together.
    """
    called = [path for wave in waves for path in wave]
    found: list[Chain] = []

    def visit(path: str, module: nn.Module) -> None:
        if isinstance(module, _CONTAINERS):
            chain = _chain(path, module, calls, called)
            if chain is not None and _is_apart(model, chain) and is_in_order(chain, waves):
                found.append(chain)
                return
        for name, child in module.named_children():
            visit(f"{path}.{name}" if path else name, child)

    visit("", model)
    return found


def _chain(path: str, module: nn.Module, calls: list[tuple[str, Any]], called: list[str]) -> Chain | None:
    children = [f"{path}.{name}" if path else name for name, _ in module.named_children()]
    sizes = {child: sum(is_inside(layer, child) for layer in called) for child in children}
    if 2 * max(sizes.values(), default=0) > sum(sizes.values()) or not any(sizes.values()):
        return None
    own = [(child, result) for child, result in calls if child in sizes]
    blocks = [child for child, _ in own]
    in_order = [child for child in children if child in blocks]
    if blocks != in_order or any(sizes[child] for child in children if child not in blocks):
        return None  # called several times, in another order, or not as a module
    results = {}
    for child, result in own:
        leaves, structure = pytree.tree_flatten(result)
        if not all(isinstance(leaf, (Tensor, *_CONSTANTS)) for leaf in leaves):
            return None
        changed = [_unread() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        results[child] = pytree.tree_unflatten(changed, structure)
    return Chain(blocks, results)


def _is_apart(model: nn.Module, chain: Chain) -> bool:
    """Returns True if blocks share no modules and parameters with other blocks, or with the rest of the model."""
    owners: dict[int, set[int | None]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        block = chain.position(path)
        for part in (module, *(p for p in module._parameters.values() if p is not None)):
            owners.setdefault(id(part), set()).add(block)
    return all(len(blocks) == 1 for blocks in owners.values())


def is_in_order(chain: Chain, waves: list[list[str]]) -> bool:
    """Returns True if the layers of each block come before the layers of the next, and others before or after all."""
    numbers: list[int | None] = []
    for wave in waves:
        of_wave = {chain.position(path) for path in wave}
        if len(of_wave) > 1:
            return False
        numbers += of_wave
    inside = [number for number in numbers if number is not None]
    first = next(at for at, number in enumerate(numbers) if number is not None)
    return inside == sorted(inside) and numbers[first : first + len(inside)] == inside
