"""The plan of `prepare`: which layers get which quantizers. Making it does not change the model."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fakequant import _targets
from fakequant._prepare.adapters import REASON, adapters
from fakequant._prepare.plan_warnings import near_names
from fakequant.config import LayerConfig, QuantConfig
from fakequant.nn._attention import MultiheadAttention
from fakequant.nn._call_quantizers import CallQuantizers
from fakequant.nn._fake_quantize import FakeQuantize
from fakequant.nn._layer_kinds import LayerKind, find_kind, is_known
from fakequant.nn._learned_fake_quantize import LearnedFakeQuantize
from fakequant.nn._owned_product import OwnedProduct
from fakequant.nn._owners import is_owner, products_of
from fakequant.nn._quantized_layer import RESERVED, quantized_class
from fakequant.nn._quantizer import Quantizer
from fakequant.nn._records import NAME as RECORD
from fakequant.observers import Dynamic, MovingAverage
from fakequant.qparams import EPS
from fakequant.spec import QuantSpec

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
# The path and type of a rule that recipes contain. It need not match: not every model has convolutions.
OF_RECIPES = ("*", "_ConvNd")


@dataclasses.dataclass
class Layer:
    """A layer to quantize, and its new quantizers by name."""

    path: str
    module: nn.Module
    quantizers: dict[str, Quantizer | CallQuantizers | None]
    # Whether the layer changes its input before it quantizes it.
    changes_input: bool = False


@dataclasses.dataclass
class Owner:
    """A layer that owns products, and its new children by name: its products, and the quantizer of its result or None.

    The products that will be quantized are also in `Plan.layers`.
    """

    path: str
    module: nn.Module
    children: dict[str, nn.Module | None]


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
    # The layers that own a product that will be quantized.
    owners: list[Owner] = dataclasses.field(default_factory=list)
    # All products that rules can name, also those that stay in float, by path.
    products: dict[str, nn.Module] = dataclasses.field(default_factory=dict)


class _LeftInFloat(ValueError):
    """A layer stays in float for another reason than a spec that does not fit it."""


def make_plan(model: nn.Module, config: QuantConfig) -> Plan:
    """Decides for every module of a model whether it is quantized, and creates the quantizers."""
    plan = Plan([], {}, [])
    used: set[int] = set()
    attentions: dict[nn.Module, nn.Module] = {}  # attention modules by their output projections
    in_adapters = adapters(model)
    for path, module in model.named_modules():
        config_of_layer, number = config.find(path, module)
        if number is not None:
            used.add(number)
        if isinstance(module, nn.MultiheadAttention):
            attentions[module.out_proj] = module
        if is_owner(module):
            used |= _add_products(plan, path, module, config)
            continue
        reason = _unsupported_reason(module, config_of_layer)
        if config_of_layer is None and path in in_adapters:
            reason = REASON
        if module in attentions and all(layer.module is not attentions[module] for layer in plan.layers):
            reason = reason or "the attention it belongs to stays in float"
        if reason is None:
            reason = _unsupported_derived_class(type(module))
        if reason is None:
            assert config_of_layer is not None
            reason = _add_layer(plan, path, module, config_of_layer, config)
        has_rule = number is not None and config_of_layer is not None
        if reason is not None and (_owns_parameters(module) or has_rule):
            plan.floats[path] = reason
    for number, rule in enumerate(config.rules):
        if number not in used and (rule.path, rule.type) != OF_RECIPES:
            words = f"Rule(path={rule.path!r}, type={rule.type!r})"
            plan.unmatched.append((words, near_names(rule, (*model.named_modules(), *plan.products.items()))))
    return plan


def _add_layer(plan: Plan, path: str, module: nn.Module, layer: LayerConfig, config: QuantConfig) -> str | None:
    """Adds a layer to the plan, or returns why it stays in float."""
    try:
        plan.layers.append(_layer(path, module, layer, config))
    except (ValueError, IndexError) as error:
        reason = str(error).split("\n")[0]
        if not isinstance(error, _LeftInFloat):
            plan.refused[path] = reason
        return reason
    return None


def _add_products(plan: Plan, path: str, module: nn.Module, config: QuantConfig) -> set[int]:
    """Adds a layer that owns products to the plan, with them. Returns the numbers of the rules that were used."""
    reason = _unsupported_reason(module, LayerConfig()) or _unsupported_derived_class(type(module))
    if reason is not None:
        plan.floats[path] = reason
        return set()
    products = products_of(module)
    try:
        check_free(module, (*products, "output_quantizer", RECORD))
    except _LeftInFloat as error:
        plan.floats[path] = str(error)
        return set()
    used: set[int] = set()
    reasons: dict[str, str] = {}
    for name, product in products.items():
        where = f"{path}.{name}" if path else name
        plan.products[where] = product
        use, number = config_of(where, product, config)
        used |= set() if number is None else {number}
        # The config's `output` is for the result of the layer, not of a product.
        use = None if use is None else dataclasses.replace(use, output=None)
        reason = "the config says so" if use is None else _add_layer(plan, where, product, use, config)
        if reason is not None:
            reasons[where] = reason
    if len(reasons) == len(products):
        plan.floats[path] = next(iter(reasons.values()))
        return used
    plan.floats.update(reasons)
    use, _ = config.find(path, module)
    maker = None if use is None else _Maker(path, use, module, _targets.find(config.target))
    output = None if maker is None else maker.activation("output", maker.config.output)
    if output is not None:
        output.train(module.training)
    plan.owners.append(Owner(path, module, {**products, "output_quantizer": output}))
    return used


def config_of(path: str, module: nn.Module, config: QuantConfig) -> tuple[LayerConfig | None, int | None]:
    """Returns the config of a layer, and the index of the rule that matched or None for the default.

    A rule for a layer that owns products is one for them too: the first rule decides that matches a product or its
    owner.
    """
    found = config.find(path, module)
    if not isinstance(module, OwnedProduct):
        return found
    of_owner = config.find(path.rpartition(".")[0], module.owner)
    return min(found, of_owner, key=lambda one: len(config.rules) if one[1] is None else one[1])


def _owns_parameters(module: nn.Module) -> bool:
    return any(p is not None for p in module._parameters.values())


def _unsupported_reason(module: nn.Module, config: LayerConfig | None) -> str | None:
    """Returns why a module cannot be quantized, or None if it can."""
    if config is None:
        return "the config says so"
    if isinstance(module, _NORMS):
        return "batch norm" if isinstance(module, nn.modules.batchnorm._BatchNorm) else "normalization layer"
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
    quantizers: dict[str, Quantizer | CallQuantizers | None] = {
        "weight_quantizer": make.weight(kind),
        "input_quantizer": make.input(kind),
        "output_quantizer": make.activation("output", layer.output),
    }
    if kind is MultiheadAttention:
        quantizers["projection_quantizer"] = make.activation("projection", config.operands)
        quantizers["attention_quantizer"] = make.activation("attention", config.operands if config.attention else None)
    if not any(quantizers.values()):
        raise _LeftInFloat("the config has no spec for any of its tensors")
    check_free(module, (*quantizers, *RESERVED))
    for quantizer in quantizers.values():
        if quantizer is not None:
            quantizer.train(module.training)
    return Layer(path, module, quantizers, kind.changes_input(module))


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
        weight = read_weight(self.module, kind)
        if spec.granularity == "channel" and spec.axis == 0:
            spec = dataclasses.replace(spec, axis=kind.channel_axis)
        if spec.has_block_scales and spec.axis == -1:
            spec = dataclasses.replace(spec, axis=1 - kind.channel_axis)
        spec = self.target.fit_weight(spec)
        where = self._where("weight")
        options: dict[str, Any] = {"shape": tuple(weight.shape), "path": where, "device": weight.device, "sync": False}
        if self.config.learned and not spec.has_block_scales:
            return LearnedFakeQuantize(spec, init=self.config.weight_observer, **options).initialize(weight)
        return FakeQuantize(spec, self.config.weight_observer or Dynamic(), gradient="auto", **options)

    def input(self, kind: type[LayerKind]) -> Quantizer | None:
        spec = self.config.input if kind.has_input else None
        if spec is not None and spec.has_block_scales and spec.axis == -1:
            # Channels are before the axes of a convolution, and are the last axis of every other input.
            spec = dataclasses.replace(spec, axis=1 - read_weight(self.module, kind).dim())
        return self.activation("input", spec)

    def activation(self, name: str, spec: QuantSpec | None) -> Quantizer | None:
        if spec is None:
            return None
        owner = self.module.owner if isinstance(self.module, OwnedProduct) else self.module
        device = next((p.device for p in owner.parameters()), None)
        fitted, where = self.target.fit_activation(spec), self._where(name)
        is_dynamic = isinstance(self.config.activation_observer, Dynamic) and not self.config.learned
        if (spec.granularity == "token" or is_dynamic) and not self.target.has_dynamic_scales:
            raise ValueError(
                f"{self.target.name} has no integer kernels for scales that are computed at run time. Use a fixed "
                "scale, as recipes.int8 does, quantize only weights, or use another target."
            )
        if (spec.granularity == "token" or is_dynamic) and fitted == _targets.DYNAMIC_SPEC:
            eps = _targets.SMALLEST_DYNAMIC_SCALE if self.target.has_one_dynamic_scale else EPS
            return FakeQuantize(fitted, Dynamic(), eps=eps, path=where, device=device)
        return make_activation_quantizer(self.config, fitted, where, device)

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
    follows_data = spec.granularity == "token" or spec.has_block_scales
    if config.learned and not follows_data:
        return LearnedFakeQuantize(spec, init=config.activation_observer, path=path, device=device)
    observer = Dynamic() if follows_data else config.activation_observer or MovingAverage()
    return FakeQuantize(spec, observer, path=path, device=device)


def read_weight(module: nn.Module, kind: type[LayerKind]) -> Tensor:
    """Returns the weight of a layer that it multiplies by. Reading it does not update the state of parametrizations."""
    # In training mode, parametrizations such as spectral_norm update their buffers whenever the weight is read.
    parametrizations = getattr(module, "parametrizations", None)
    parts = list(parametrizations.modules()) if isinstance(parametrizations, nn.Module) else []
    modes = [part.training for part in parts]
    for part in parts:
        part.training = False
    try:
        weight = kind.read_weight(module)
    finally:
        for part, training in zip(parts, modes, strict=True):
            part.training = training
    return weight
