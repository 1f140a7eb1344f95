"""The plan of `prepare`: which layers get which quantizers. Making it does not change the model."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

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
# The path and type of a rule that recipes contain. It need not match: not every model has convolutions.
OF_RECIPES = ("*", "_ConvNd")


@dataclasses.dataclass
class Layer:
    """A layer to quantize, and its new quantizers by name."""

    path: str
    module: nn.Module
    quantizers: dict[str, Quantizer | None]


@dataclasses.dataclass
class Plan:
    """The layers that `prepare` will quantize, and those that it will leave in float."""

    layers: list[Layer]
    # Why modules stay in float, by path.
    floats: dict[str, str]
    # Rules that matched nothing, each with similar paths.
    unmatched: list[tuple[str, list[str]]]
    # The part of `floats` that stays in float because a spec does not fit the layer.
    refused: dict[str, str] = dataclasses.field(default_factory=dict)


class _LeftInFloat(ValueError):
    """A layer stays in float for another reason than a spec that does not fit it."""


def make_plan(model: nn.Module, config: QuantConfig) -> Plan:
    """Decides for every module of a model whether it is quantized, and creates the quantizers."""
    plan = Plan([], {}, [])
    used: set[int] = set()
    attentions: dict[nn.Module, nn.Module] = {}  # attention modules by their output projections
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
                if not isinstance(error, _LeftInFloat):
                    plan.refused[path] = reason
        has_rule = number is not None and config_of_layer is not None
        if reason is not None and (_owns_parameters(module) or has_rule):
            plan.floats[path] = reason
    for number, rule in enumerate(config.rules):
        if number not in used and (rule.path, rule.type) != OF_RECIPES:
            words = f"Rule(path={rule.path!r}, type={rule.type!r})"
            plan.unmatched.append((words, near_names(rule, model.named_modules())))
    return plan


def _owns_parameters(module: nn.Module) -> bool:
    return any(p is not None for p in module._parameters.values()) or isinstance(module, _RECURRENT)


def _unsupported_reason(module: nn.Module, config: LayerConfig | None) -> str | None:
    """Returns why a module cannot be quantized, or None if it can."""
    if config is None:
        return "the config says so"
    if isinstance(module, _NORMS):
        return "batch norm" if isinstance(module, nn.modules.batchnorm._BatchNorm) else "normalization layer"
    if isinstance(module, _RECURRENT):
        return "recurrent layers run as one operator that does not accept quantized weights"
    kind = find_kind(type(module))
    if kind is None:
        if is_known(type(module)):
            return f"{type(module).__name__} overrides the forward pass of a supported layer type"
        return f"{type(module).__name__} is not a supported layer type"
    if any(nn.parameter.is_lazy(p) for p in module._parameters.values() if p is not None):
        return "its parameters have no shape yet; run the model once first"
    return kind.unsupported_reason(module)


def _unsupported_derived_class(cls: type[nn.Module]) -> str | None:
    try:
        quantized_class(cls)
    except Exception as error:  # deriving a class can run user code, such as __init_subclass__
        return f"no class can be derived from {cls.__name__}: {error}".split("\n")[0]
    return None


def _layer(path: str, module: nn.Module, layer: LayerConfig, config: QuantConfig) -> Layer:
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
        raise _LeftInFloat("the config has no spec for any of its tensors")
    check_free(module, (*quantizers, *RESERVED))
    for quantizer in quantizers.values():
        if quantizer is not None:
            quantizer.train(module.training)
    return Layer(path, module, quantizers)


def check_free(module: nn.Module, names: Iterable[str]) -> None:
    """Raises ValueError if a module already has an attribute with one of these names."""
    for name in names:
        if hasattr(module, name):
            raise _LeftInFloat(f"it already has an attribute `{name}`")


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
        weight = read_weight(self.module, kind.weight_name)
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


def make_activation_quantizer(
    config: LayerConfig, spec: QuantSpec, path: str, device: torch.device | None
) -> Quantizer:
    """Returns a new quantizer for an activation, with a learned scale or an observer as the config says.

    Args:
        config: The config of the layer.
        spec: The spec of the activation, adapted to the target.
        path: The name of the activation in messages.
        device: The device of the quantizer's parameters and buffers.
    """
    if config.learned and spec.granularity != "token":
        return LearnedFakeQuantize(spec, init=config.activation_observer, path=path, device=device)
    observer = Dynamic() if spec.granularity == "token" else config.activation_observer or MovingAverage()
    return FakeQuantize(spec, observer, path=path, device=device)


def read_weight(module: nn.Module, name: str) -> Tensor:
    """Returns a weight. If it is parametrized, reading it does not update the state of the parametrization."""
    # In training mode, parametrizations such as spectral_norm update their buffers whenever the weight is read.
    parametrizations = getattr(module, "parametrizations", None)
    parts = list(parametrizations.modules()) if isinstance(parametrizations, nn.Module) else []
    modes = [part.training for part in parts]
    for part in parts:
        part.training = False
    try:
        weight: Tensor = getattr(module, name)
    finally:
        for part, training in zip(parts, modes, strict=True):
            part.training = training
    return weight
