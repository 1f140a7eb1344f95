"""The first and the last layer of a model in more bits than the others: `QuantConfig.first_last_bits`.

First and last are by the order in which layers are called. torch.fx finds it where it can trace the model. Where it
cannot, the order in which the modules were registered is a guess, which the first batch of `calibrate` or a loaded
state corrects.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fakequant import _targets
from fakequant._prepare.attach import find_preparation
from fakequant._prepare.plan import Plan, _read
from fakequant._train.model_snapshot import unchanged
from fakequant._train.running import copied
from fakequant.config import QuantConfig
from fakequant.nn._layer_kinds import find_kind
from fakequant.nn._learned_fake_quantize import LearnedFakeQuantize
from fakequant.nn._quantized_layer import QuantizedLayer
from fakequant.nn._quantizer import Quantizer, quantizers
from fakequant.nn._respec import change_spec
from fakequant.spec import QuantSpec

_NAMES = ("weight_quantizer", "input_quantizer")


@dataclasses.dataclass
class FirstLast:
    """What a prepared model knows about its first and its last layer."""

    # The paths of both, or of one if they are the same; without those that a rule speaks of.
    wide: list[str]
    # The order of the modules stands for the order of execution, which is not known.
    is_guess: bool
    # All layers that count, also those that a rule leaves in float.
    layers: list[str]
    # Of layers without a rule: the spec of a quantizer by its path, as others have it and as the first and the last.
    specs: dict[str, tuple[QuantSpec, QuantSpec]]
    # Learned scales of weights as they were at the start, by the quantizer's path.
    starts: dict[str, Tensor]


def widen_first_and_last(model: nn.Module, config: QuantConfig, plan: Plan, calls: list[str]) -> FirstLast | None:
    """Gives the first and the last layer of the plan their bits; None: the config asks for none."""
    if config.first_last_bits is None:
        return None
    planned = {layer.path: layer for layer in plan.layers}
    layers, free = [], []
    for path, module in model.named_modules():
        use, rule = config.find(path, module)
        left_out = use is None and rule is not None and find_kind(type(module)) is not None
        if path in planned or left_out:
            layers.append(path)
        if path in planned and rule is None:
            free.append(path)
    specs = {
        _join(path, name): (quantizer.spec, _wider(quantizer.spec, name, config))
        for path in free
        for name, quantizer in _own(planned[path].quantizers)
    }
    order = _in_order(calls, layers)
    ends = _ends(order or layers, free)
    for path in ends:
        for name, quantizer in _own(planned[path].quantizers):
            _respec(quantizer, specs[_join(path, name)][1], planned[path].module, name)
    starts = {
        _join(path, name): quantizer.step_size.detach().clone()
        for path in free
        for name, quantizer in _own(planned[path].quantizers)
        if not order and isinstance(quantizer, LearnedFakeQuantize) and name == "weight_quantizer"
    }
    return FirstLast(ends, not order, layers, specs, starts)


def adopting_hook(found: FirstLast | None) -> Callable[..., None] | None:
    """The hook by which a model takes over the first and the last layer of a state; None if they are no guess."""
    return _adopt if found is not None and found.is_guess else None


@contextmanager
def settled_by_first_batch(model: nn.Module) -> Iterator[None]:
    """While it lasts, the first call of the model settles which its first and last layer are, if that is a guess.

    On failure the specs are as before; values are for the caller to restore.
    """
    found = _found(model)
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
    """A hook: before the model is called for the first time, it is called once to see the order of its layers."""

    def __init__(self, found: FirstLast) -> None:
        self.found = found
        self.is_done = False

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if self.is_done:
            return
        self.is_done = True
        order = _in_order(_calls(model, self.found.layers, args, kwargs), self.found.layers)
        free = {path.rpartition(".")[0] for path in self.found.specs}
        ends = _ends(order, free)
        if order and _move(model, self.found, ends):
            self.found.wide, self.found.is_guess = ends, False


def _calls(model: nn.Module, layers: list[str], args: Any, kwargs: Any) -> list[str]:
    """The layers in the order in which the model calls them; the model is what it was before."""
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


def _move(model: nn.Module, found: FirstLast, ends: list[str]) -> bool:
    """Makes `ends` the layers with more bits, unless something was learned already."""
    changed = sorted(set(ends) ^ set(found.wide))
    layers: dict[str, Any] = {path: model.get_submodule(path) for path in changed}
    own = [(path, name, q) for path, layer in layers.items() for name, q in _own(layer._modules)]
    if any(_has_learned(_join(path, name), quantizer, found) for path, name, quantizer in own):
        warnings.warn(
            f"The first and the last layer of the model are {_words(ends)}, and those with `first_last_bits` are "
            f"{_words(found.wide)}: the model could not be traced when it was prepared. Quantizers have scales "
            "already, so they stay as they are.\n"
            "Prepare the model again and calibrate it before it is trained, or name the layers in rules.",
            UserWarning,
            stacklevel=2,
        )
        return False
    for path, name, quantizer in own:
        plain, wide = found.specs[_join(path, name)]
        _respec(quantizer, wide if path in ends else plain, layers[path], name)
    return True


def _has_learned(path: str, quantizer: Any, found: FirstLast) -> bool:
    """Whether a quantizer is not as `prepare` left it: it has a scale, or another scale than it had."""
    if quantizer.frozen or any(p.grad is not None or hasattr(p, "full_tensor") for p in quantizer.parameters()):
        return True  # a sharded one has an optimizer that knows its shards
    if path.endswith("weight_quantizer"):
        start = found.starts.get(path)
        return start is not None and not torch.equal(start, quantizer.step_size.detach().to(start.device))
    return not quantizer.is_dynamic and not bool(torch.as_tensor(quantizer.scale).isnan().any())


def _adopt(model: nn.Module, state: Any, prefix: str, *others: Any) -> None:
    """Before a state is loaded: quantizers whose bits are a guess have those of the state."""
    found = _found(model)
    if found is None or not found.is_guess:
        return
    wide: dict[str, None] = {}
    seen = 0
    for path, specs in found.specs.items():
        saved = state.get(f"{prefix}{path}.grid")
        if not isinstance(saved, Tensor) or saved.is_meta:
            continue
        layer, _, name = path.rpartition(".")
        for spec in specs:
            if saved.tolist()[1:] == spec.to_numbers():
                seen += 1
                module: Any = model.get_submodule(layer)
                if module._modules[name].spec != spec:
                    change_spec(module._modules[name], spec)
                if spec == specs[1] != specs[0]:
                    wide[layer] = None
    if seen:
        found.wide, found.is_guess = list(wide), False


def _found(model: nn.Module) -> FirstLast | None:
    made = find_preparation(model)
    return None if made is None else made.first_last


def _own(children: Any) -> list[tuple[str, Any]]:
    """The quantizers of weight and input, by name."""
    return [(name, children[name]) for name in _NAMES if children.get(name) is not None]


def _wider(spec: QuantSpec, name: str, config: QuantConfig) -> QuantSpec:
    """The spec with as many bits at least as the first and the last layer have, as far as the target lets it."""
    bits, target = config.first_last_bits, _targets.find(config.target)
    assert bits is not None
    if bits <= spec.bits or spec.granularity == "token":
        return spec
    if name == "input_quantizer":
        return target.fit_activation(dataclasses.replace(spec, bits=bits))
    # With 8 bits as `presets.int8` has them: a batch norm then folds into the weights whatever its factors are.
    narrow = spec.narrow_range or (spec.symmetric and bits >= 8)
    wide = target.fit_weight(dataclasses.replace(spec, bits=bits, narrow_range=narrow))
    return wide if wide.bits > spec.bits else spec


def _respec(quantizer: Quantizer, spec: QuantSpec, layer: Any, name: str) -> None:
    if quantizer.spec == spec:
        return
    change_spec(quantizer, spec)
    if name == "weight_quantizer" and isinstance(quantizer, LearnedFakeQuantize):
        kind = layer._fakequant.kind if isinstance(layer, QuantizedLayer) else find_kind(type(layer))
        assert kind is not None
        quantizer.initialize(_read(layer, kind.weight_name))


def _in_order(calls: list[str], layers: list[str]) -> list[str]:
    """The layers that calls of modules stand for; a call of an attention is one of the layers in it, too."""
    return [path for call in calls for path in layers if path == call or path.startswith(f"{call}.")]


def _ends(order: list[str], free: Any) -> list[str]:
    """The first and the last, without those that a rule speaks of."""
    ends = dict.fromkeys((order[0], order[-1])) if order else {}
    return [path for path in ends if path in free]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _words(paths: list[str]) -> str:
    return " and ".join(path or "the model" for path in paths) or "none"
