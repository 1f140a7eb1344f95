"""`QuantConfig.first_last_bits`: more bits for the first and the last layer of a model.

First and last refer to the order in which layers are called, which torch.fx finds by tracing the model. If tracing
fails, the order in which the modules were registered is used as a guess. The first batch of `calibrate`, or a
state_dict that is loaded, corrects it.
"""

import dataclasses
import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fakequant import _targets
from fakequant._prepare.attach import find_preparation
from fakequant._prepare.plan import Plan, config_of, read_weight
from fakequant._prepare.weight_widths import weight_at
from fakequant._train.model_snapshot import unchanged
from fakequant._train.running import copied
from fakequant.config import QuantConfig
from fakequant.nn._call_quantizers import quantizers_in
from fakequant.nn._learned_fake_quantize import LearnedFakeQuantize
from fakequant.nn._model_quantizers import quantizers
from fakequant.nn._owned_product import OwnedProduct
from fakequant.nn._quantized_layer import is_layer, kind_of
from fakequant.nn._quantizer import Quantizer
from fakequant.nn._respec import change_spec
from fakequant.spec import QuantSpec

_NAMES = ("weight_quantizer", "input_quantizer")


@dataclasses.dataclass
class FirstLast:
    """The first and the last layer of a prepared model, and what is needed to correct a guess."""

    # Paths of the layers that have `first_last_bits`: first and last, except those that a rule matches.
    wide: list[str]
    # True if the order of execution is unknown and the order of the modules was used instead.
    is_guess: bool
    # Paths of all layers that can be first or last. Layers that a rule leaves in float are included.
    layers: list[str]
    # For quantizers of layers without a rule, by path: the ordinary spec, and the spec in the first and the last layer.
    specs: dict[str, tuple[QuantSpec, QuantSpec]]
    # Initial values of the learned scales of weights, by the quantizer's path.
    starts: dict[str, Tensor]


def widen_first_and_last(model: nn.Module, config: QuantConfig, plan: Plan, calls: list[str]) -> FirstLast | None:
    """Gives the first and the last layer of a plan `first_last_bits`. Returns None if the config does not set it.

    Args:
        model: The float model.
        config: Says how many bits these layers have, and which layers have rules.
        plan: The layers that will be quantized.
        calls: The modules in the order in which the model calls them. Empty if that is unknown.
    """
    if config.first_last_bits is None:
        return None
    planned = {layer.path: layer for layer in plan.layers}
    layers, without_rule = [], []
    for path, module in _with_products(model, plan):
        use, rule = config_of(path, module, config)
        left_in_float = use is None and rule is not None and is_layer(module)
        if path in planned or left_in_float:
            layers.append(path)
        if path in planned and rule is None:
            without_rule.append(path)
    specs = {
        _join(path, name): (quantizer.spec, _wider(quantizer.spec, name, config))
        for path in without_rule
        for name, quantizer in _weight_and_input(planned[path].quantizers)
    }
    order = _in_order(calls, layers)
    ends = _ends(order or layers, without_rule)
    for path in ends:
        for name, quantizer in _weight_and_input(planned[path].quantizers):
            give_spec(quantizer, specs[_join(path, name)][1], planned[path].module, name)
    starts = {
        _join(path, name): quantizer.step_size.detach().clone()
        for path in without_rule
        for name, quantizer in _weight_and_input(planned[path].quantizers)
        if not order and isinstance(quantizer, LearnedFakeQuantize) and name == "weight_quantizer"
    }
    return FirstLast(ends, not order, layers, specs, starts)


def _with_products(model: nn.Module, plan: Plan) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules of a float model by path, and after each layer that owns products those that are planned."""
    products = [layer for layer in plan.layers if isinstance(layer.module, OwnedProduct)]
    for path, module in model.named_modules():
        yield path, module
        for product in products:
            if product.module.owner is module:
                yield product.path, product.module


def notes_on_formats(found: FirstLast | None, config: QuantConfig) -> list[str]:
    """Returns notes on first and last layers with fewer bits than `first_last_bits`, because of their formats."""
    if found is None or config.first_last_bits is None:
        return []
    specs = {_join(path, name): path for path in found.wide for name in _NAMES}
    return [
        f"{name} stays in {found.specs[name][1]}: `first_last_bits` does not widen float formats and block scales. Use "
        f"a rule, such as config.rule({specs[name]!r}, weight=..., input=...)"
        for name in specs
        if name in found.specs
        and found.specs[name][1].bits < config.first_last_bits
        and not found.specs[name][1].is_integer
    ]


def adopting_hooks(found: FirstLast | None) -> list[Callable[..., None]]:
    """Returns a hook that adopts the first and the last layer of a loaded state_dict; none if they are known."""
    return [_adopt] if found is not None and found.is_guess else []


@contextmanager
def settled_by_first_batch(model: nn.Module) -> Iterator[None]:
    """Context in which the first call of the model determines its first and last layer, if they are a guess.

    If the body raises, the specs are restored. The caller restores parameters and buffers.
    """
    found = _first_last_of(model)
    if found is None or not found.is_guess:
        yield
        return
    before = {path: quantizer.spec for path, quantizer in quantizers(model)}
    wide = found.wide
    handle = model.register_forward_pre_hook(_FirstCall(found), with_kwargs=True)
    try:
        yield
    except BaseException:
        for path, quantizer in quantizers(model):
            if quantizer.spec != before[path]:
                change_spec(quantizer, before[path])
        found.wide, found.is_guess = wide, True
        raise
    finally:
        handle.remove()


class _FirstCall:
    """A forward pre-hook. On the first call it runs the model once more to record the order of its layers."""

    def __init__(self, found: FirstLast) -> None:
        self.found = found
        self.is_done = False

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if self.is_done:
            return
        self.is_done = True
        order = _in_order(_called_layers(model, self.found.layers, args, kwargs), self.found.layers)
        without_rule = {path.rpartition(".")[0] for path in self.found.specs}
        ends = _ends(order, without_rule)
        if order and _move_bits(model, self.found, ends):
            self.found.wide, self.found.is_guess = ends, False


def _called_layers(model: nn.Module, layers: list[str], args: Any, kwargs: Any) -> list[str]:
    """Returns the layers in the order in which the model calls them. Leaves the model unchanged."""
    called: list[str] = []
    switches = [(q, q.observing, q.quantizing) for _, q in quantizers(model)]
    with ExitStack() as undo:
        for path in layers:
            hook = model.get_submodule(path).register_forward_pre_hook(lambda *_, path=path: called.append(path))
            undo.callback(hook.remove)
        for quantizer, _, quantizing in switches:
            undo.callback(setattr, quantizer, "quantizing", quantizing)
            quantizer.quantizing = False
            if quantizer.observing:
                undo.callback(setattr, quantizer, "observing", True)
                quantizer.observing = False
        args, kwargs = copied(args, kwargs)
        with unchanged(model):
            model(*args, **kwargs)
    return called


def _move_bits(model: nn.Module, found: FirstLast, ends: list[str]) -> bool:
    """Makes `ends` the layers with more bits. Warns and returns False if a quantizer has a scale already."""
    changed = sorted(set(ends) ^ set(found.wide))
    layers = {path: model.get_submodule(path) for path in changed}
    own = [(path, name, q) for path, layer in layers.items() for name, q in _weight_and_input(layer._modules)]
    if any(_has_changed(_join(path, name), quantizer, found) for path, name, quantizer in own):
        warnings.warn(
            f"The first and the last layer of the model are {_words(ends)}, but those with `first_last_bits` are "
            f"{_words(found.wide)}, because the model could not be traced when it was prepared. Their bits are not "
            "changed, because their quantizers already have scales.\n"
            "Prepare the model again and calibrate it before training, or name the layers in rules.",
            UserWarning,
            stacklevel=2,
        )
        return False
    for path, name, quantizer in own:
        ordinary, wide = found.specs[_join(path, name)]
        give_spec(quantizer, wide if path in ends else ordinary, layers[path], name)
    return True


def _has_changed(path: str, quantizer: Quantizer, found: FirstLast) -> bool:
    """Returns True if a quantizer has changed since `prepare`: it got a scale, or its initial scale changed."""
    if quantizer.frozen or any(p.grad is not None or hasattr(p, "full_tensor") for p in quantizer.parameters()):
        return True  # the optimizer of a sharded parameter already refers to its shards
    if path.endswith("weight_quantizer"):
        start = found.starts.get(path)
        if start is None or not isinstance(quantizer, LearnedFakeQuantize):
            return False
        return not torch.equal(start, quantizer.step_size.detach().to(start.device))
    return not quantizer.is_dynamic and not bool(torch.as_tensor(quantizer.scale).isnan().any())


def _adopt(model: nn.Module, state: Any, prefix: str, *others: Any) -> None:
    """A load_state_dict pre-hook: gives quantizers whose bits are a guess the specs that the state was saved with."""
    found = _first_last_of(model)
    if found is None or not found.is_guess:
        return
    wide: dict[str, None] = {}
    seen = 0
    paths = {quantizer: path for path, quantizer in quantizers(model)}
    for slot, specs in found.specs.items():
        layer, _, name = slot.rpartition(".")
        for quantizer in quantizers_in(model.get_submodule(layer)._modules.get(name)):
            saved = state.get(f"{prefix}{paths[quantizer]}.grid")
            if not isinstance(saved, Tensor) or saved.is_meta:
                continue
            for spec in specs:
                if saved.tolist()[1:] == spec.to_numbers():
                    seen += 1
                    if quantizer.spec != spec:
                        change_spec(quantizer, spec)
                    if spec == specs[1] != specs[0]:
                        wide[layer] = None
    if seen:
        found.wide, found.is_guess = list(wide), False


def _first_last_of(model: nn.Module) -> FirstLast | None:
    made = find_preparation(model)
    return None if made is None else made.first_last


def _weight_and_input(children: Mapping[str, nn.Module | None]) -> list[tuple[str, Quantizer]]:
    """Returns the quantizers of weight and input among the children of a layer, with the names of the children."""
    return [(name, quantizer) for name in _NAMES for quantizer in quantizers_in(children.get(name))]


def _wider(spec: QuantSpec, name: str, config: QuantConfig) -> QuantSpec:
    """Returns `spec` with at least `first_last_bits` bits, as far as the target allows."""
    bits, target = config.first_last_bits, _targets.find(config.target)
    assert bits is not None
    if bits <= spec.bits or spec.granularity == "token" or not spec.is_integer:
        return spec
    if name == "input_quantizer":
        return target.fit_activation(dataclasses.replace(spec, bits=bits))
    wide = weight_at(spec, bits, target)
    return wide if wide.bits > spec.bits else spec


def give_spec(quantizer: Quantizer, spec: QuantSpec, layer: nn.Module, name: str) -> None:
    """Gives the quantizer of a layer that is called `name` another spec. A learned scale of a weight starts anew."""
    if quantizer.spec == spec:
        return
    change_spec(quantizer, spec)
    if name == "weight_quantizer" and isinstance(quantizer, LearnedFakeQuantize):
        kind = kind_of(layer)
        assert kind is not None
        quantizer.initialize(read_weight(layer, kind))


def _in_order(calls: list[str], layers: list[str]) -> list[str]:
    """Returns the called layers, in order. A call of an attention module also counts as a call of its layers."""
    return [path for call in calls for path in layers if path == call or path.startswith(f"{call}.")]


def _ends(order: list[str], without_rule: Container[str]) -> list[str]:
    """Returns the first and the last layer, except those that a rule matches, which are not in `without_rule`."""
    ends = dict.fromkeys((order[0], order[-1])) if order else {}
    return [path for path in ends if path in without_rule]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _words(paths: list[str]) -> str:
    return " and ".join(path or "the model" for path in paths) or "none"
