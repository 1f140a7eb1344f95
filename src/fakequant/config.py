"""`QuantConfig`: which layers of a model are quantized, and how."""

import dataclasses
import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any, Literal

from torch import nn

import fakequant.observers as observers
from fakequant import _runtimes
from fakequant._util.shown import Shown, html_of, short_repr
from fakequant._util.text import read_json, shortened, table
from fakequant.observers import Observer
from fakequant.spec import QuantSpec

__all__ = ["LayerConfig", "QuantConfig", "Rule"]


def __dir__() -> list[str]:
    return __all__


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class LayerConfig:
    """How the tensors of one layer are quantized. A tensor without a spec stays in float.

    >>> from fakequant import presets
    >>> LayerConfig(weight=presets.int4()).input is None
    True
    """

    # If set, quantize the weight. For a spec per channel, axis 0 means the output channels, even if the layer
    # stores them on another axis, as transposed convolutions do. For block scales (MX, NVFP4), axis -1 means the input
    # channels, in the weight and in the input of the layer: the axis that products sum over.
    weight: QuantSpec | None = None
    # If set, quantize the input. Ignored for layers whose input holds indices, such as embeddings.
    input: QuantSpec | None = None
    # If set, quantize the output.
    output: QuantSpec | None = None
    # If True, scales are trained with the model (LSQ). If False, observers determine them.
    learned: bool = False
    # If set, how the range of the weight is determined. With `learned=True` it determines the initial scale only.
    # If None, the range is recomputed from the weight whenever the layer runs (`Dynamic`), and learned scales start
    # with the least squared error; see `nn.LearnedFakeQuantize`.
    weight_observer: Observer | None = None
    # If set, how the ranges of input and output are determined. With `learned=True` it determines the initial scales
    # only. If None, ranges are moving averages (`MovingAverage`), and learned scales start with the least squared
    # error. Ignored for specs per token, which always use `Dynamic`.
    activation_observer: Observer | None = None
    # If set, the class of the quantizers of weights, or of inputs and outputs: your own, derived from
    # `nn.FakeQuantize` or `nn.LearnedFakeQuantize`, which it then replaces whatever `learned` says. JSON has its name,
    # "module:Class", and reading it imports the module.
    weight_quantizer: type[nn.Module] | None = None
    activation_quantizer: type[nn.Module] | None = None

    __repr__ = short_repr

    def _repr_html_(self) -> str:
        """Returns a table for notebooks."""
        return html_of(_table_of([("layer", self)]))

    def __post_init__(self) -> None:
        for name in _TENSORS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, QuantSpec):
                raise TypeError(
                    f"`{name}` must be a QuantSpec or None, got {value!r}.\nUse e.g. fakequant.presets.int8()."
                )
        for name in ("weight_observer", "activation_observer"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Observer):
                raise TypeError(f"`{name}` must be an observer, such as MinMax(), or None, got {value!r}.")
        for name in _CLASSES:
            value = getattr(self, name)
            if value is not None and not (isinstance(value, type) and issubclass(value, nn.Module)):
                raise TypeError(
                    f"`{name}` must be a class derived from fakequant.nn.FakeQuantize, or None, got {value!r}."
                )
        if not isinstance(self.learned, bool):
            raise TypeError(f"`learned` must be True or False, got {self.learned!r}.")

    def _others(self) -> str:
        """Returns the fields that are set, but for specs."""
        fields = (f for f in dataclasses.fields(self) if f.name not in _TENSORS)
        values = {f.name: value for f in fields if (value := getattr(self, f.name)) != f.default}
        words = {name: value.__name__ if isinstance(value, type) else value for name, value in values.items()}
        return ", ".join(name if value is True else f"{name}={value}" for name, value in words.items())

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields by name, as dicts, numbers, strings and None."""
        return {
            field.name: _name_of(value) if isinstance(value, type) else getattr(value, "to_dict", lambda v=value: v)()
            for field in dataclasses.fields(self)
            for value in (getattr(self, field.name),)
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "LayerConfig":
        """Returns the config that `to_dict` describes. Missing fields get their defaults."""
        _check_names(cls, fields)
        read = dict(fields)
        for name in _TENSORS:
            if read.get(name) is not None:
                read[name] = QuantSpec.from_dict(read[name])
        for name in ("weight_observer", "activation_observer"):
            if read.get(name) is not None:
                read[name] = observers.from_dict(read[name])
        for name in _CLASSES:
            if isinstance(read.get(name), str):
                read[name] = _named(read[name])
        return cls(**read)


def _table_of(layers: "list[tuple[str, LayerConfig | None]]") -> str:
    """Returns a table of named layers: the specs of their tensors, and what else is set."""
    others = ["" if use is None else use._others() for _, use in layers]
    header = ["layers", *_TENSORS, *(["also"] if any(others) else [])]
    rows = [
        [name, *(str(getattr(use, tensor, None) or "-") for tensor in _TENSORS), *([more] if any(others) else [])]
        for (name, use), more in zip(layers, others, strict=True)
    ]
    return table(header, rows)


_TENSORS = ("weight", "input", "output")
_CLASSES = ("weight_quantizer", "activation_quantizer")


def _name_of(cls: type) -> str:
    """Returns the name from which `_named` finds a class."""
    if "<locals>" in cls.__qualname__:
        raise ValueError(
            f"The quantizer {cls.__qualname__} cannot be written by name, because it was defined in a function.\n"
            "Define it in a module."
        )
    return f"{cls.__module__}:{cls.__qualname__}"


def _named(name: str) -> Any:
    """Returns the class called "module:Class"."""
    module, _, path = name.partition(":")
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"There is no class {shortened(repr(name))}: {error}.\nA quantizer is named 'module:Class', and its module "
            "must be importable here."
        ) from error
    return found


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Rule:
    """The config of the layers whose path and type match.

    >>> rule = Rule(path="encoder.*", type="Linear")
    >>> rule.matches("encoder.0.fc", nn.Linear(2, 2)), rule.matches("head", nn.Linear(2, 2))
    (True, False)
    """

    # The module's path in the model. `*` and `?` are wildcards, as in file names; `*` also matches dots.
    path: str = "*"
    # If set, match only modules whose class, or one of its base classes, has this name.
    type: str | None = None
    # How matching layers are quantized. If None, they stay in float.
    use: LayerConfig | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if not isinstance(self.path, str):
            raise TypeError(f"`path` must be a path, such as 'encoder.*', got {self.path!r}.")
        if self.type is not None and not isinstance(self.type, str):
            raise TypeError(f"`type` must be the name of a class, such as 'Linear', got {self.type!r}.")
        if self.use is not None and not isinstance(self.use, LayerConfig):
            raise TypeError(f"`use` must be a LayerConfig, or None to leave a module in float, got {self.use!r}.")

    def _layers(self) -> str:
        """Returns the path and the type in words."""
        return self.path if self.type is None else self.type if self.path == "*" else f"{self.type} at {self.path}"

    def matches(self, path: str, module: nn.Module) -> bool:
        """Returns True if the rule applies to `module`, which is at `path` in the model."""
        if not fnmatchcase(path, self.path):
            return False
        return self.type is None or any(cls.__name__ == self.type for cls in type(module).__mro__)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class QuantConfig(Shown):
    """Which layers of a model are quantized, and how. Prints as a table.

    The first rule that matches a layer decides. Layers that no rule matches use the default.

    >>> from fakequant import recipes
    >>> print(recipes.int8().skip("head"))
    layers     | weight                             | input             | output
    -----------+------------------------------------+-------------------+-------
    head       | -                                  | -                 | -
    all others | int8 narrow, per channel on axis 0 | uint8, per tensor | -
    <BLANKLINE>
    operands: uint8, per tensor
    target: generic
    >>> config = recipes.int8().skip("head").rule("stem.*", weight=QuantSpec(bits=8, axis=0))
    >>> QuantConfig.from_json(config.to_json()) == config
    True
    """

    # How layers that no rule matches are quantized. If None, they stay in float.
    default: LayerConfig | None = None
    # Exceptions from the default, in order of precedence.
    rules: tuple[Rule, ...] = ()
    # If set, quantize the operands of additions, concatenations, products and means, where the target then computes
    # these operations in integers too. If None, the operands stay in float.
    operands: QuantSpec | None = None
    # If True, attention is computed as two products of matrices with quantized queries, keys, values and attention
    # weights, so that a runtime can compute them in integers. Training then needs memory for all attention weights. If
    # False, `F.scaled_dot_product_attention` and `nn.MultiheadAttention` use one operator, in float. Ignored if
    # `operands` is None.
    attention: bool = False
    # If True, quantized layers save codes instead of floats for the backward pass. Gradients are identical and need
    # less memory.
    save_codes: bool = True
    # If "exact", linear layers, convolutions, recurrent layers and experts whose inputs and weights are codes of at
    # most 8 bits add up products of integers without rounding, as runtimes do. Results are then the same on every
    # machine. If "float", they add up products of floats.
    sums: Literal["exact", "float"] = "exact"
    # What the model is trained for: a runtime, such as "onnxruntime-x86", or "generic". docs/guides/export.md lists all
    # targets. Specs that the target cannot compute exactly are adapted to it.
    target: str = "generic"
    # If set, the minimum number of bits for the weights and inputs of the first and the last layer, in the order in
    # which the model calls its layers. Layers that a rule matches are not affected. If None, the first and the last
    # layer are treated like all others.
    first_last_bits: int | None = None
    # If set, quantize the keys and values that attention modules of transformers store in a cache, in training and
    # without a cache too. They have the shape (batch, heads, tokens, features), and scales per tensor, per head
    # (axis=1), per token or per group of features (axis=-1). Scales per tensor and per head are calibrated.
    kv_cache: QuantSpec | None = None

    def __post_init__(self) -> None:
        _runtimes.find(self.target)
        object.__setattr__(self, "rules", tuple(self.rules))
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise TypeError(f"`rules` must be Rules, got {rule!r}.")
        if self.default is not None and not isinstance(self.default, LayerConfig):
            raise TypeError(f"`default` must be a LayerConfig or None, got {self.default!r}.")
        if self.operands is not None and not isinstance(self.operands, QuantSpec):
            raise TypeError(f"`operands` must be a QuantSpec or None, got {self.operands!r}.")
        if self.kv_cache is not None and not isinstance(self.kv_cache, QuantSpec):
            raise TypeError(f"`kv_cache` must be a QuantSpec or None, got {self.kv_cache!r}.")
        for name in ("save_codes", "attention"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"`{name}` must be True or False, got {getattr(self, name)!r}.")
        if self.sums not in ("exact", "float"):
            raise ValueError(f"`sums` must be 'exact' or 'float', got {self.sums!r}.")
        bits = self.first_last_bits
        if bits is not None and (type(bits) is not int or not 2 <= bits <= 16):
            raise ValueError(
                f"`first_last_bits` must be a number of bits from 2 to 16, or None for the bits of the other layers, "
                f"got {bits!r}."
            )

    def __str__(self) -> str:
        """Returns a table of the layers in the order in which rules match, and the other fields that are set."""
        layers = [
            *((rule._layers(), rule.use) for rule in self.rules),
            ("all others" if self.rules else "all", self.default),
        ]
        set_ = (f for f in dataclasses.fields(self) if f.name not in ("default", "rules", "target"))
        fields = [f"{f.name}: {getattr(self, f.name)}" for f in set_ if getattr(self, f.name) != f.default]
        return "\n".join([_table_of(layers), "", *fields, f"target: {self.target}"])

    def rule(self, path: str = "*", *, type: str | None = None, **layer: Any) -> "QuantConfig":
        """Returns a copy with a new rule placed before all others.

        Args:
            path: The paths that the rule matches, see `Rule.path`.
            type: The class that the rule matches, see `Rule.type`.
            **layer: Fields of `LayerConfig` that differ from the default.
        """
        problem = _unknown(LayerConfig, layer)
        if problem is not None:
            raise TypeError(problem)
        use = dataclasses.replace(self.default or LayerConfig(), **layer)
        return dataclasses.replace(self, rules=(Rule(path=path, type=type, use=use), *self.rules))

    def skip(self, path: str = "*", *, type: str | None = None) -> "QuantConfig":
        """Returns a copy with a new rule, placed before all others, that leaves the matching layers in float."""
        return dataclasses.replace(self, rules=(Rule(path=path, type=type), *self.rules))

    def find(self, path: str, module: nn.Module) -> tuple[LayerConfig | None, int | None]:
        """Returns the config of a module, and the index of the rule that matched or None for the default."""
        for number, rule in enumerate(self.rules):
            if rule.matches(path, module):
                return rule.use, number
        return self.default, None

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields by name, as dicts, lists, numbers, strings and None."""
        return {
            "default": self.default and self.default.to_dict(),
            "rules": [{"path": r.path, "type": r.type, "use": r.use and r.use.to_dict()} for r in self.rules],
            "operands": self.operands and self.operands.to_dict(),
            "attention": self.attention,
            "save_codes": self.save_codes,
            "sums": self.sums,
            "target": self.target,
            "first_last_bits": self.first_last_bits,
            "kv_cache": self.kv_cache and self.kv_cache.to_dict(),
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "QuantConfig":
        """Returns the config that `to_dict` describes. Missing fields get their defaults."""
        _check_names(cls, fields)
        read = dict(fields)
        if read.get("default") is not None:
            read["default"] = LayerConfig.from_dict(read["default"])
        for name in ("operands", "kv_cache"):
            if read.get(name) is not None:
                read[name] = QuantSpec.from_dict(read[name])
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
        """Returns the config as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_json(cls, text: str) -> "QuantConfig":
        """Returns the config that `to_json` wrote."""
        return cls.from_dict(read_json(text))


def _check_names(cls: type, fields: Mapping[str, Any]) -> None:
    if not isinstance(fields, Mapping):
        raise TypeError(f"A {cls.__name__} is read from a dict of its fields, got {type(fields).__name__}.")
    problem = _unknown(cls, fields)
    if problem is not None:
        raise ValueError(problem)


def _unknown(cls: type, fields: Mapping[str, Any]) -> str | None:
    names = [field.name for field in dataclasses.fields(cls)]
    unknown = [name for name in fields if name not in names]
    return f"{cls.__name__} has no field {shortened(repr(unknown[0]))}; it has {', '.join(names)}." if unknown else None
