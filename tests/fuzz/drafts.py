"""A network that is being written, statement by statement, as Python source."""

import random
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from sources import Source

# Elements of a sample that a tensor may have: networks stay fast.
LARGEST = 2000
# The batch that shapes are computed with. No other axis is likely to have this length.
BATCH = 19


class UnsuitableError(Exception):
    """A construct has no tensor to work on, or its result would be too large."""


class Draft:
    """The statements of a network so far. Each runs on the meta device when it is added, so shapes are known.

    >>> draft = Draft(random.Random(0))
    >>> x = draft.input("torch.randn(batch, 3)")
    >>> draft.let(f"{draft.module('linear', 'nn.Linear(3, 2)')}({x})"), draft.shape("h1")
    ('h1', (19, 2))
    >>> draft.statements
    ['h1 = self.linear1(x)']
    """

    def __init__(self, generator: random.Random) -> None:
        self.random = generator
        # Whether the network calls one module wherever it needs an activation or a pool, as many networks do.
        self.is_sharing = self.chance(0.4)
        # Statements of `__init__`, expressions of inputs by name, statements of `forward`.
        self.modules: list[str] = []
        self.inputs: dict[str, str] = {}
        self.statements: list[str] = []
        # Names of the tensors that a construct may read, oldest first.
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}
        self._scope = {"torch": torch, "nn": nn, "F": F, "self": nn.Module(), "batch": BATCH}

    def input(self, expression: str) -> str:
        """Adds an argument of `forward` and returns its name."""
        name = ("x", "y", "z", "u", "v")[len(self.inputs)]
        self.inputs[name] = expression
        self._run(f"{name} = {expression}")
        self.names.append(name)
        return name

    def module(self, kind: str, constructor: str) -> str:
        """Adds a module and returns the expression that reads it."""
        name = self._name(kind)
        self.setup(f"self.{name} = {constructor}")
        return f"self.{name}"

    def shared(self, kind: str, constructor: str) -> str:
        """Returns the expression of a module that the whole network shares, and adds it when it is first needed."""
        if not hasattr(self._scope["self"], kind):
            self.setup(f"self.{kind} = {constructor}")
        return f"self.{kind}"

    def setup(self, statement: str) -> None:
        """Adds a statement of `__init__`."""
        self._run(statement)
        self.modules.append(statement)

    def do(self, statement: str) -> None:
        """Adds a statement of `forward`, which may have several lines."""
        self._run(statement)
        self.statements.append(statement)

    def let(self, expression: str) -> str:
        """Adds a variable that later constructs may read, and returns its name."""
        name = self.fresh()
        self.do(f"{name} = {expression}")
        return self.offer(name)

    def fresh(self) -> str:
        """Returns a name that is not used yet."""
        return self._name("h")

    def offer(self, name: str) -> str:
        """Lets later constructs read a variable."""
        value = self._scope[name]
        if value[0].numel() > LARGEST or min(value.shape) == 0 or value.shape[0] != BATCH:
            raise UnsuitableError
        self.names.append(name)
        return name

    def shape(self, expression: str) -> tuple[int, ...]:
        """Returns the shape of a variable, or of a parameter such as "self.linear1.weight"."""
        return tuple(eval(expression, self._scope).shape)

    def value(self, expression: str) -> object:
        """Returns what an expression has as its value on the meta device."""
        return eval(expression, self._scope)

    def pick(self, *dims: int, integers: bool = False) -> str:
        """Returns a tensor with one of these numbers of axes, most often the last one."""
        fitting = [
            name
            for name in self.names
            if len(self.shape(name)) in dims and self._scope[name].is_floating_point() is not integers
        ]
        if not fitting:
            raise UnsuitableError
        return fitting[-1] if self.random.random() < 0.75 else self.random.choice(fitting)

    def others(self, name: str) -> list[str]:
        """Returns the other tensors with the same shape."""
        return [other for other in self.names if other != name and self.shape(other) == self.shape(name)]

    def chance(self, share: float) -> bool:
        """Returns True with this probability."""
        return self.random.random() < share

    @contextmanager
    def attempt(self):
        """Takes everything back that was added inside if it cannot run."""
        modules, statements, names = len(self.modules), len(self.statements), len(self.names)
        children, numbers = dict(self._scope["self"]._modules), dict(self._numbers)
        parameters = dict(self._scope["self"]._parameters)
        try:
            yield
        except (UnsuitableError, RuntimeError, ValueError, IndexError, AssertionError, NotImplementedError):
            del self.modules[modules:], self.statements[statements:], self.names[names:]
            self._scope["self"]._modules, self._numbers = children, numbers
            self._scope["self"]._parameters = parameters

    def source(self, result: str, sizes: tuple[int, int]) -> Source:
        """Returns the source of the network."""
        return Source(tuple(self.modules), dict(self.inputs), tuple(self.statements), result, sizes)

    def _name(self, kind: str) -> str:
        self._numbers[kind] = self._numbers.get(kind, 0) + 1
        return f"{kind}{self._numbers[kind]}"

    def _run(self, statement: str) -> None:
        with torch.device("meta"), torch.no_grad():
            exec(statement, self._scope)
