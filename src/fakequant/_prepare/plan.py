"""The plan of `prepare`: which layers get which quantizers. Making it does not change the model."""

import dataclasses
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fakequant import _runtimes
from fakequant._backends.blocks import blocks_of, short_blocks
from fakequant._backends.torch.tensor_kernels import dtype_name
from fakequant._prepare.adapters import REASON, adapters
from fakequant._runtimes.target import DYNAMIC_SPEC, EngineRules, Target
from fakequant._util.text import indented
from fakequant.config import LayerConfig, QuantConfig, Rule
from fakequant.nn._attention import MultiheadAttention
from fakequant.nn._call_quantizers import CallQuantizers
from fakequant.nn._experts import ExpertProduct
from fakequant.nn._fake_quantize import FakeQuantize
from fakequant.nn._layer_kinds import LayerKind, find_kind, is_known
from fakequant.nn._learned_fake_quantize import LearnedFakeQuantize
from fakequant.nn._owners import OwnedProduct, is_owner, products_of
from fakequant.nn._quantized_layer import RESERVED, quantized_class
from fakequant.nn._quantizer import Quantizer
from fakequant.nn._records import NAME as RECORD
from fakequant.nn._tensor_scale import TensorScaleFakeQuantize
from fakequant.observers import Dynamic, MovingAverage
from fakequant.spec import QuantSpec

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
# The paths and types of rules that recipes contain. They need not match: not every model has convolutions.
_OF_RECIPES = (("*", "_ConvNd"), ("*", "Embedding"), ("*lm_head", None))
# Longer patterns are not compared with names: it would be slow, and nothing would be similar.
_LONGEST = 200


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
    target = _runtimes.find(config.target)
    has_float_tables = target.engine is not None and "Embedding" not in target.engine.layers
    tied = _tied_to_embeddings(model) if has_float_tables else {}
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
        if reason is None and path in tied:
            reason = f"it shares its weight with {tied[path]}, which stays in float"
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
        if number not in used and (rule.path, rule.type) not in _OF_RECIPES:
            words = f"Rule(path={rule.path!r}, type={rule.type!r})"
            plan.unmatched.append((words, _near_names(rule, (*model.named_modules(), *plan.products.items()))))
    return plan


def _tied_to_embeddings(model: nn.Module) -> dict[str, str]:
    """Returns the layers that share their weight with an embedding, with the path of that embedding."""
    modules = list(model.named_modules())
    tables = {module.weight: path for path, module in modules if isinstance(module, nn.Embedding)}
    found = ((path, tables.get(module._parameters.get("weight"))) for path, module in modules)
    return {path: table for path, table in found if table is not None and table != path}


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
    maker = None if use is None else _Maker(path, use, module, _runtimes.find(config.target))
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
    target = _runtimes.find(config.target)
    make = _Maker(path, layer, module, target)
    if target.engine is not None:
        _require_place(module, layer, target.engine)
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


def _require_place(module: nn.Module, layer: LayerConfig, engine: EngineRules) -> None:
    """Raises ValueError if an engine has no place for the codes of a layer."""
    if not any(cls.__name__ in engine.layers for cls in type(module).__mro__):
        raise _LeftInFloat(f"{type(module).__name__} layers stay in float in the engines of this target")
    if layer.output is not None:
        raise ValueError("its output would be quantized, which the engines of this target do not do")


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
    target: Target

    def weight(self, kind: type[LayerKind]) -> Quantizer | None:
        spec = self.config.weight
        if spec is None:
            return None
        weight = read_weight(self.module, kind)
        if spec.granularity == "channel" and spec.axis == 0:
            spec = dataclasses.replace(spec, axis=kind.channel_axis)
        if spec.has_block_scales and spec.axis == -1:
            spec = dataclasses.replace(spec, axis=1 - kind.channel_axis)
        spec = self._fitted(spec, "weight", dtype_name(weight.dtype))
        self._require_whole_blocks(spec, weight)
        engine = self.target.engine
        if engine is not None and not engine.has_short_blocks and short_blocks(tuple(weight.shape), spec):
            raise ValueError(f"its rows of {weight.shape[1]} weights are not divisible by blocks of {spec.group_size}")
        where = self._where("weight")
        options: dict[str, Any] = {"shape": tuple(weight.shape), "path": where, "device": weight.device, "sync": False}
        observer, own = self.config.weight_observer, self.config.weight_quantizer
        can_learn = spec.has_learnable_scales or not spec.has_block_scales
        if issubclass(own, LearnedFakeQuantize) if own else self.config.learned and can_learn:
            return (_checked(own) or LearnedFakeQuantize)(spec, init=observer, **options).initialize(weight)
        return (_checked(own) or FakeQuantize)(spec, observer or Dynamic(), gradient="auto", **options)

    def _require_whole_groups(self, spec: QuantSpec, length: int) -> None:
        """Raises ValueError if groups along an axis of `length` do not divide it, which engines need for MX too."""
        if self.target.engine is not None:
            spec = dataclasses.replace(spec, scale_format="float32", scale_rule="floor")
        blocks_of((length,), dataclasses.replace(spec, axis=0))

    def _require_whole_blocks(self, spec: QuantSpec, weight: Tensor) -> None:
        """Raises ValueError if a block of rows would be a part of two experts, or of a gate and its values."""
        if spec.group_rows is None or not isinstance(self.module, ExpertProduct) or self.target.engine is None:
            return
        owner = self.module.owner
        is_double = owner.has_gate and self.module.names["weight"].startswith("gate")
        rows = len(weight) // (owner.num_experts * (2 if is_double else 1))
        if rows % spec.group_rows:
            raise ValueError(f"its experts have {rows} rows each, which blocks of {spec.group_rows} rows do not divide")

    def input(self, kind: type[LayerKind]) -> Quantizer | None:
        engine = self.target.engine
        is_weight_only = engine is not None and type(self.module).__name__ in engine.weight_only
        spec = self.config.input if kind.has_input and not is_weight_only else None
        if spec is not None and spec.has_block_scales and spec.axis == -1:
            # Channels are before the axes of a convolution, and are the last axis of every other input.
            spec = dataclasses.replace(spec, axis=1 - read_weight(self.module, kind).dim())
        if spec is not None and spec.granularity == "group" and spec.axis == -1:
            weight = read_weight(self.module, kind)
            if weight.dim() == 2:
                self._require_whole_groups(spec, weight.shape[1 - kind.channel_axis])
        return self.activation("input", spec)

    def activation(self, name: str, spec: QuantSpec | None) -> Quantizer | None:
        if spec is None:
            return None
        owner = self.module.owner if isinstance(self.module, OwnedProduct) else self.module
        device = next((p.device for p in owner.parameters()), None)
        dtype = next((dtype_name(p.dtype) for p in owner.parameters() if p.is_floating_point()), "float32")
        fitted, where = self._fitted(spec, "input", dtype), self._where(name)
        if self.config.activation_quantizer is not None:
            return make_activation_quantizer(self.config, fitted, where, device)
        is_dynamic = isinstance(self.config.activation_observer, Dynamic) and not self.config.learned
        if (follows_data(spec) or is_dynamic) and not self.target.activations.has_dynamic_scales:
            raise ValueError(
                f"{self.target.name} has no integer kernels for scales that are computed at run time. Use a fixed "
                "scale, as recipes.int8 does, quantize only weights, or use another target."
            )
        engine = self.target.engine
        if engine is not None and fitted.scale_format == "e4m3fn":
            return TensorScaleFakeQuantize(fitted, self.config.activation_observer, path=where, device=device)
        if engine is not None and follows_data(fitted):
            return FakeQuantize(fitted, Dynamic(), eps=engine.smallest_dynamic_scale, path=where, device=device)
        if (spec.granularity == "token" or is_dynamic) and fitted == DYNAMIC_SPEC:
            eps = self.target.activations.smallest_dynamic_scale
            return FakeQuantize(fitted, Dynamic(), eps=eps, path=where, device=device)
        return make_activation_quantizer(self.config, fitted, where, device)

    def _fitted(self, spec: QuantSpec, whose: Literal["weight", "input"], dtype: str) -> QuantSpec:
        """Returns a spec adapted to the target. Raises ValueError if its engine cannot hold it."""
        spec = self.target.fit_weight(spec) if whose == "weight" else self.target.fit_activation(spec)
        engine = self.target.engine
        if engine is None:
            return spec
        spec = engine.fit_weight(spec) if whose == "weight" else engine.fit_input(spec)
        reason = engine.reason_against_weight(spec) if whose == "weight" else engine.reason_against_input(spec)
        if reason is not None:
            raise ValueError(f"its {whose} in {self.target.name}: {reason}")
        return spec if self.config.learned else engine.with_scales_in(spec, dtype)

    def _where(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name


def follows_data(spec: QuantSpec) -> bool:
    """Returns True if an activation with this spec has scales that are computed at run time."""
    is_group = spec.granularity == "group" and spec.format != "int"
    return spec.granularity == "token" or spec.has_block_scales or is_group


def make_activation_quantizer(
    config: LayerConfig, spec: QuantSpec, path: str, device: torch.device | None
) -> Quantizer:
    """Returns a new quantizer for an activation, with a learned scale or an observer as the config says.

    The spec is adapted to the target already. Messages call the activation `path`.
    """
    own = config.activation_quantizer
    if issubclass(own, LearnedFakeQuantize) if own else config.learned and not follows_data(spec):
        return (_checked(own) or LearnedFakeQuantize)(spec, init=config.activation_observer, path=path, device=device)
    observer = Dynamic() if follows_data(spec) else config.activation_observer or MovingAverage()
    return (_checked(own) or FakeQuantize)(spec, observer, path=path, device=device)


def _checked(own: Any) -> Any:
    """Returns the class of a quantizer. Raises TypeError if it is none that layers can be given."""
    if own is not None and not issubclass(own, (FakeQuantize, LearnedFakeQuantize)):
        raise TypeError(
            f"A quantizer in a config must be a class derived from nn.FakeQuantize or nn.LearnedFakeQuantize, got "
            f"{own.__name__}.\nSee docs/guides/custom-layers-and-observers.md."
        )
    return own


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


# --- warnings ---------------------------------------------------------------------------------------


def _near_names(rule: Rule, modules: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """Returns types that are similar to the type of a rule if no module has it, otherwise paths similar to its path."""
    named = list(modules)
    if rule.type is not None:
        types = {cls.__name__ for _, module in named for cls in type(module).__mro__ if issubclass(cls, nn.Module)}
        if rule.type not in types:
            return _near(rule.type, sorted(types), 0.6)
    return _near(rule.path, [path for path, _ in named], 0.3)


def warn_about_rules(model: nn.Module, plan: Plan, config: QuantConfig) -> None:
    """Warns once about rules that match no module and no product, and suggests similar names."""
    named = [*model.named_modules(), *plan.products.items()]
    unmatched = [
        rule
        for rule in config.rules
        if (rule.path, rule.type) not in _OF_RECIPES and not any(rule.matches(path, module) for path, module in named)
    ]
    if not unmatched:
        return
    lines = "".join(
        f"\n  {_words(rule)}; near: {', '.join(_near_names(rule, named)) or 'nothing'}" for rule in unmatched
    )
    warnings.warn(
        f"Rules of the config match no module of the model:{lines}\nCorrect or remove them.",
        UserWarning,
        stacklevel=3,
    )


def warn_about_refused(refused: dict[str, str]) -> None:
    """Warns once about layers that stay in float because the spec does not fit them."""
    if not refused:
        return
    shown = indented([f"{path or 'the model'}: {reason}" for path, reason in refused.items()], most=3)
    warnings.warn(
        f"Layers stay in float because their spec does not fit them:\n{shown}\n"
        "Use another spec for them in a rule, or leave them out with skip(...).",
        UserWarning,
        stacklevel=3,
    )


def _words(rule: Rule) -> str:
    verb = "skip" if rule.use is None else "rule"
    return f"{verb}({rule.path[:_LONGEST]!r}{'' if rule.type is None else f', type={rule.type!r}'})"


def _near(name: str, names: list[str], cutoff: float) -> list[str]:
    return get_close_matches(name, names, n=3, cutoff=cutoff) if len(name) <= _LONGEST else []
