"""Adapters of PEFT that a model has before it is prepared: they stay in float, and are not merged.

Adapters are small and trained, and start at 0, so that ranges found before training do not fit them. For adapters that
are added to a prepared model, see `nn/_adapters.py`.
"""

import dataclasses
import warnings
from functools import partial
from typing import Any, NoReturn

from torch import nn

from fakequant._util.text import listed
from fakequant.config import QuantConfig, Rule
from fakequant.nn._adapters import BASE, TUNER, float_adapters, is_quantized, tuner_layers

REASON = "an adapter; it stays in float unless a rule has its name"


def adapters(model: nn.Module) -> dict[str, str]:
    """Returns the name of the adapter that each module inside an adapter belongs to, by path.

    >>> adapters(nn.Sequential(nn.Linear(2, 2)))
    {}
    """
    found = {}
    for path, tuner in tuner_layers(model):
        for name, child in tuner.named_children():
            if name != BASE:
                start = f"{path}.{name}" if path else name
                found.update({f"{start}.{part}" if part else start: name for part, _ in child.named_modules()})
    return found


def without_adapters(model: nn.Module, config: QuantConfig) -> QuantConfig:
    """Returns a config that leaves adapters in float, and the sums that tuner layers compute.

    Rules that have the name of an adapter in their path still come first. A warning says what stays in float.
    """
    inside = adapters(model)
    if not inside:
        return config
    names = dict.fromkeys(inside.values())
    named = [rule for rule in config.rules if any(name in rule.path for name in names)]
    paths = dict.fromkeys(f"*{name}" if path.endswith(name) else f"*{name}.*" for path, name in inside.items())
    own = [Rule(type=TUNER), *(Rule(path=path) for path in paths)]
    others = [rule for rule in config.rules if rule not in named and rule not in own]
    found = dataclasses.replace(config, rules=(*named, *own, *others))
    left = [
        path
        for path, module in model.named_modules()
        if path in inside and found.find(path, module)[0] is None and any(True for _ in module.parameters(False))
    ]
    if left:
        warnings.warn(
            f"Adapters stay in float: {listed(left)}.\n"
            f"To quantize them, name them in a rule, for example config.rule('*{next(iter(names))}*'). To merge them "
            "after training, prepare the model before it gets adapters; see fakequant.nn.quantize_adapters.",
            UserWarning,
            stacklevel=3,
        )
    return found


def protect_merging(model: nn.Module) -> None:
    """Lets tuner layers refuse to merge adapters into weights that are quantized.

    Except in attention, whose tuner layers merge for the time of each forward pass.
    """
    merges_in_forward: set[nn.Module] = set()
    for path, tuner in tuner_layers(model):
        base: Any = tuner
        while hasattr(base, BASE):
            base = getattr(base, BASE)
        if isinstance(base, nn.MultiheadAttention):
            merges_in_forward.update(tuner.modules())
        elif tuner not in merges_in_forward and is_quantized(base):
            tuner.__dict__["merge"] = partial(_refuse_to_merge, path)


def allow_merging(model: nn.Module) -> None:
    """Undoes `protect_merging` and `quantize_adapters`."""
    float_adapters(model)
    for _, tuner in tuner_layers(model):
        tuner.__dict__.pop("merge", None)


def _refuse_to_merge(path: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        f"The adapters of {path or 'the model'} cannot be merged: its weight is quantized, and the sum of both would "
        "be rounded in another way than in training.\n"
        "Use fakequant.unprepare(model), merge, then prepare and calibrate the merged model. To train adapters that "
        "can be merged, prepare the model before it gets adapters, and then use fakequant.nn.quantize_adapters(model)."
    )
