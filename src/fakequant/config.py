"""`QuantConfig`: which layers of a model are quantized, and how."""

import dataclasses
import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

import fakequant.observers as observers
from fakequant import _targets
from fakequant.observers import Observer
from fakequant.spec import QuantSpec, read_json, shortened


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """How the tensors of one layer are quantized; a tensor without a spec stays in float.

    >>> from fakequant import presets
    >>> LayerConfig(weight=presets.int4()).input is None
    True
    """

    # Axis 0 of a weight's spec stands for its output channels, wherever the layer keeps them.
    weight: QuantSpec | None = None
    input: QuantSpec | None = None
    output: QuantSpec | None = None
    # Scales are parameters of the model (LSQ); else they follow an observer.
    learned: bool = False
    # Where ranges come from, or where learned scales start. None: weights have the range of the tensor at hand
    # (Dynamic), activations a moving average; learned scales start by LSQ's rule.
    weight_observer: Observer | None = None
    activation_observer: Observer | None = None

    def __post_init__(self) -> None:
        for name in ("weight", "input", "output"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, QuantSpec):
                raise TypeError(
                    f"`{name}` must be a QuantSpec or None, got {value!r}.\nUse e.g. fakequant.presets.int8()."
                )
        for name in ("weight_observer", "activation_observer"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Observer):
                raise TypeError(f"`{name}` must be an observer, such as MinMax(), or None, got {value!r}.")
        if not isinstance(self.learned, bool):
            raise TypeError(f"`learned` must be True or False, got {self.learned!r}.")

    def to_dict(self) -> dict[str, Any]:
        """Every field by its name: dicts, numbers, strings and None only."""
        return {
            field.name: value.to_dict() if hasattr(value, "to_dict") else value
            for field in dataclasses.fields(self)
            for value in (getattr(self, field.name),)
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "LayerConfig":
        """The config with these fields; those that are absent have their defaults."""
        _check_names(cls, fields)
        read = dict(fields)
        for name in ("weight", "input", "output"):
            if read.get(name) is not None:
                read[name] = QuantSpec.from_dict(read[name])
        for name in ("weight_observer", "activation_observer"):
            if read.get(name) is not None:
                read[name] = observers.from_dict(read[name])
        return cls(**read)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """What to do with the modules whose path and type match.

    >>> rule = Rule(path="encoder.*", type="Linear")
    >>> rule.matches("encoder.0.fc", nn.Linear(2, 2)), rule.matches("head", nn.Linear(2, 2))
    (True, False)
    """

    # A path in the model, with * and ? as in file names; * also stands for dots.
    path: str = "*"
    # The name of the module's class or of one it is derived from; None: any.
    type: str | None = None
    # None: leave it in float.
    use: LayerConfig | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.path, str):
            raise TypeError(f"`path` must be a path with * and ?, got {self.path!r}.")
        if self.type is not None and not isinstance(self.type, str):
            raise TypeError(f"`type` must be the name of a class, such as 'Linear', got {self.type!r}.")
        if self.use is not None and not isinstance(self.use, LayerConfig):
            raise TypeError(f"`use` must be a LayerConfig, or None to leave a module in float, got {self.use!r}.")

    def matches(self, path: str, module: nn.Module) -> bool:
        """Whether the rule is about the module at `path`."""
        if not fnmatchcase(path, self.path):
            return False
        return self.type is None or any(cls.__name__ == self.type for cls in type(module).__mro__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """Which layers of a model are quantized, and how: the first rule that matches, else the default.

    >>> from fakequant import recipes
    >>> config = recipes.int8().skip("head").rule("stem.*", weight=QuantSpec(bits=8, axis=0))
    >>> QuantConfig.from_json(config.to_json()) == config
    True
    """

    # For layers that no rule matches; None: they stay in float.
    default: LayerConfig | None = None
    rules: tuple[Rule, ...] = ()
    # For results of layers that reach an addition, a concatenation, a product or a mean,
    # where an integer runtime needs codes too; None: they stay in float.
    operands: QuantSpec | None = None
    # Quantized layers keep codes for the backward pass instead of floats: the same gradients in less memory.
    save_codes: bool = True
    # What the model will run on, by name; see `fakequant._targets`.
    target: str = "generic"
    # The weights and inputs of the first and the last layer, in the order in which layers are called, have at least
    # so many bits; None: as many as the others. What a rule says about a layer holds.
    first_last_bits: int | None = None

    def __post_init__(self) -> None:
        _targets.find(self.target)
        object.__setattr__(self, "rules", tuple(self.rules))
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise TypeError(f"`rules` must be Rules, got {rule!r}.")
        if self.default is not None and not isinstance(self.default, LayerConfig):
            raise TypeError(f"`default` must be a LayerConfig or None, got {self.default!r}.")
        if self.operands is not None and not isinstance(self.operands, QuantSpec):
            raise TypeError(f"`operands` must be a QuantSpec or None, got {self.operands!r}.")
        if not isinstance(self.save_codes, bool):
            raise TypeError(f"`save_codes` must be True or False, got {self.save_codes!r}.")
        bits = self.first_last_bits
        if bits is not None and (type(bits) is not int or not 2 <= bits <= 16):
            raise ValueError(
                f"`first_last_bits` must be a number of bits from 2 to 16, or None for as many as the other layers "
                f"have, got {bits!r}."
            )

    def rule(self, path: str = "*", *, type: str | None = None, **layer: Any) -> "QuantConfig":
        """Returns a copy with this rule placed first. The fields are those of `LayerConfig`."""
        problem = _unknown(LayerConfig, layer)
        if problem is not None:
            raise TypeError(problem)
        use = dataclasses.replace(self.default or LayerConfig(), **layer)
        return dataclasses.replace(self, rules=(Rule(path=path, type=type, use=use), *self.rules))

    def skip(self, path: str = "*", *, type: str | None = None) -> "QuantConfig":
        """The same, with what matches left in float."""
        return dataclasses.replace(self, rules=(Rule(path=path, type=type), *self.rules))

    def find(self, path: str, module: nn.Module) -> tuple[LayerConfig | None, int | None]:
        """What to do with a module, and the number of the rule that said so; None: the default."""
        for number, rule in enumerate(self.rules):
            if rule.matches(path, module):
                return rule.use, number
        return self.default, None

    def to_dict(self) -> dict[str, Any]:
        """Every field by its name: dicts, lists, numbers, strings and None only."""
        return {
            "default": self.default and self.default.to_dict(),
            "rules": [{"path": r.path, "type": r.type, "use": r.use and r.use.to_dict()} for r in self.rules],
            "operands": self.operands and self.operands.to_dict(),
            "save_codes": self.save_codes,
            "target": self.target,
            "first_last_bits": self.first_last_bits,
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "QuantConfig":
        """The config with these fields; those that are absent have their defaults."""
        _check_names(cls, fields)
        read = dict(fields)
        if read.get("default") is not None:
            read["default"] = LayerConfig.from_dict(read["default"])
        if read.get("operands") is not None:
            read["operands"] = QuantSpec.from_dict(read["operands"])
        rules = []
        given = read.get("rules", ())
        if not isinstance(given, (list, tuple)):
            raise TypeError(f"`rules` must be a list of rules, got {shortened(repr(given))}.")
        for rule in given:
            _check_names(Rule, rule)
            use = rule.get("use")
            rules.append(Rule(**{**rule, "use": None if use is None else LayerConfig.from_dict(use)}))
        return cls(**{**read, "rules": tuple(rules)})

    def to_json(self, indent: int | None = None) -> str:
        """The same as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_json(cls, text: str) -> "QuantConfig":
        """The config that `to_json` wrote."""
        return cls.from_dict(read_json(text))


def _check_names(cls: type, fields: Mapping[str, Any]) -> None:
    if not isinstance(fields, Mapping):
        raise TypeError(f"A {cls.__name__} is read from a dict with its fields, got {type(fields).__name__}.")
    problem = _unknown(cls, fields)
    if problem is not None:
        raise ValueError(problem)


def _unknown(cls: type, fields: Mapping[str, Any]) -> str | None:
    names = [field.name for field in dataclasses.fields(cls)]
    unknown = [name for name in fields if name not in names]
    return f"{cls.__name__} has no field {shortened(repr(unknown[0]))}; it has {', '.join(names)}." if unknown else None
