"""What `prepare` will do to a model, before anything is done."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fakequant import _targets
from fakequant._prepare.plan_warnings import near_names
from fakequant.config import LayerConfig, QuantConfig
from fakequant.nn._attention import MultiheadAttention
from fakequant.nn._fake_quantize import FakeQuantize
from fakequant.nn._layer_kinds import LayerKind, find_kind, is_known
from fakequant.nn._learned_fake_quantize import LearnedFakeQuantize
from fakequant.nn._quantized_layer import RESERVED, quantized_class
from fakequant.nn._quantizer import Quantizer
from fakequant.observers import Dynamic, MovingAverage
from fakequant.spec import QuantSpec

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
# Recipes say what convolutions get, whether a model has any or not.
OF_RECIPES = ("*", "_ConvNd")


@dataclasses.dataclass
class Layer:
    """One layer to quantize, and the quantizers it gets by name."""

    path: str
    module: nn.Module
    quantizers: dict[str, Quantizer | None]


@dataclasses.dataclass
class Plan:
    """Everything that `prepare` will do, and what it will not do."""

    layers: list[Layer]
    # Paths of modules that stay in float, and why.
    floats: dict[str, str]
    # Rules that matched nothing, and paths that are like theirs.
    unmatched: list[tuple[str, list[str]]]
    # Of those in float: the layers that were to be quantized with a spec that does not fit them.
    refused: dict[str, str] = dataclasses.field(default_factory=dict)


class _Left(ValueError):
    """A layer stays in float, and not because a spec does not fit it."""


def make_plan(model: nn.Module, config: QuantConfig) -> Plan:
    """Which layers get which quantizers."""
    plan = Plan([], {}, [])
    used: set[int] = set()
    attentions: dict[nn.Module, nn.Module] = {}  # by the layer in it that projects the result
    for path, module in model.named_modules():
        config_of_layer, number = config.find(path, module)
        if number is not None:
            used.add(number)
        if isinstance(module, nn.MultiheadAttention):
            attentions[module.out_proj] = module
        reason = _unsupported_reason(module, config_of_layer)
        if module in attentions and all(layer.module is not attentions[module] for layer in plan.layers):
            reason = reason or "the attention it belongs to stays in float"
        if reason is None:
            reason = _unsupported_derived_class(type(module))
        if reason is None:
            assert config_of_layer is not None
            try:
                plan.layers.append(_layer(path, module, config_of_layer, config))
            except (ValueError, IndexError) as error:
                reason = str(error).split("\n")[0]
                if not isinstance(error, _Left):
                    plan.refused[path] = reason
        meant = number is not None and config_of_layer is not None
        if reason is not None and (_owns_parameters(module) or meant):
            plan.floats[path] = reason
    for number, rule in enumerate(config.rules):
        if number not in used and (rule.path, rule.type) != OF_RECIPES:
            words = f"Rule(path={rule.path!r}, type={rule.type!r})"
            plan.unmatched.append((words, near_names(rule, model.named_modules())))
    return plan


def _owns_parameters(module: nn.Module) -> bool:
    return any(p is not None for p in module._parameters.values()) or isinstance(module, _RECURRENT)


def _unsupported_reason(module: nn.Module, config: LayerConfig | None) -> str | None:
    """Why a module is not quantized, if it is not."""
    if config is None:
        return "the config says so"
    if isinstance(module, _NORMS):
        return "batch norm"
    if isinstance(module, _RECURRENT):
        return "recurrent layers compute in one operator that takes no quantized weights"
    kind = find_kind(type(module))
    if kind is None:
        if is_known(type(module)):
            return f"{type(module).__name__} has a forward pass of its own"
        return f"{type(module).__name__} is not a supported layer type"
    if any(nn.parameter.is_lazy(p) for p in module._parameters.values() if p is not None):
        return "its parameters have no shape yet; run the model once first"
    return kind.unsupported_reason(module)


def _unsupported_derived_class(cls: type[nn.Module]) -> str | None:
    try:
        quantized_class(cls)
    except Exception as error:  # whatever a class does that is derived from
        return f"no class can be derived from {cls.__name__}: {error}".split("\n")[0]
    return None


def _layer(path: str, module: Any, layer: LayerConfig, config: QuantConfig) -> Layer:
    kind = find_kind(type(module))
    assert kind is not None
    target = _targets.find(config.target)
    make = _Maker(path, layer, module, target)
    quantizers: dict[str, Quantizer | None] = {
        "weight_quantizer": make.weight(kind),
        "input_quantizer": make.activation("input", layer.input if kind.has_input else None),
        "output_quantizer": make.activation("output", layer.output),
    }
    if kind is MultiheadAttention:
        quantizers["projection_quantizer"] = make.activation("projection", config.operands)
    if not any(quantizers.values()):
        raise _Left("the config has no spec for any of its tensors")
    check_free(module, (*quantizers, *RESERVED))
    for quantizer in quantizers.values():
        if quantizer is not None:
            quantizer.train(module.training)
    return Layer(path, module, quantizers)


def check_free(module: nn.Module, names: Iterable[str]) -> None:
    """That a module has no attributes of its own where quantizers are to be."""
    for name in names:
        if hasattr(module, name):
            raise _Left(f"it has an attribute `{name}` of its own")


@dataclasses.dataclass
class _Maker:
    """Makes the quantizers of one layer."""

    path: str
    config: LayerConfig
    module: nn.Module
    target: _targets.Target

    def weight(self, kind: type[LayerKind]) -> Quantizer | None:
        spec = self.config.weight
        if spec is None:
            return None
        weight = _read(self.module, kind.weight_name)
        if spec.granularity == "channel" and spec.axis == 0:
            spec = dataclasses.replace(spec, axis=kind.channel_axis)
        spec = self.target.fit_weight(spec)
        where = self._where("weight")
        options: dict[str, Any] = {"shape": tuple(weight.shape), "path": where, "device": weight.device, "sync": False}
        if self.config.learned:
            return LearnedFakeQuantize(spec, init=self.config.weight_observer, **options).initialize(weight)
        return FakeQuantize(spec, self.config.weight_observer or Dynamic(), gradient="auto", **options)

    def activation(self, name: str, spec: QuantSpec | None) -> Quantizer | None:
        if spec is None:
            return None
        device = next((p.device for p in self.module.parameters()), None)
        return make_activation_quantizer(self.config, self.target.fit_activation(spec), self._where(name), device)

    def _where(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name


def make_activation_quantizer(config: LayerConfig, spec: QuantSpec, path: str, device: Any) -> Quantizer:
    """A quantizer for an activation, learned or observed."""
    if config.learned and spec.granularity != "token":
        return LearnedFakeQuantize(spec, init=config.activation_observer, path=path, device=device)
    observer = Dynamic() if spec.granularity == "token" else config.activation_observer or MovingAverage()
    return FakeQuantize(spec, observer, path=path, device=device)


def _read(module: Any, name: str) -> torch.Tensor:
    """A weight, also one that is computed when it is read, without changing what it is computed from."""
    parts = list(module.parametrizations.modules()) if hasattr(module, "parametrizations") else []
    modes = [part.training for part in parts]
    for part in parts:
        part.training = False
    try:
        return getattr(module, name)
    finally:
        for part, training in zip(parts, modes, strict=True):
            part.training = training
