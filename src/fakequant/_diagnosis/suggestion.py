"""A config that spends more bits on the layers that need them."""

import dataclasses
import re
from collections.abc import Sequence
from numbers import Integral
from typing import Any

from fakequant import _targets
from fakequant.config import LayerConfig, QuantConfig, Rule


def suggested(
    config: QuantConfig, layers: Sequence[Any], keep: int | None, bits: int | None, precision: LayerConfig | None
) -> QuantConfig:
    """The config with the first of `layers` in `precision`: `keep` of them, or as many as `bits` allow."""
    if (keep is None) == (bits is None):
        raise ValueError(
            "Give either `keep`, how many layers are kept in higher precision, or `bits`, what all weights may have "
            f"together; got keep={keep!r}, bits={bits!r}."
        )
    if precision is not None and not isinstance(precision, LayerConfig):
        raise TypeError(f"`precision` must be a LayerConfig, or None for float, got {precision!r}.")
    higher = None if precision is None or precision.weight is None else precision.weight
    higher_bits = None if higher is None else _targets.find(config.target).fit_weight(higher).bits
    number = _within(layers, higher_bits, precision is None, bits) if keep is None else _checked(keep, len(layers))
    for layer in layers[:number]:
        if higher_bits is not None and layer.weights and higher_bits < layer.bits:
            raise ValueError(
                f"`precision` has weights of {higher_bits} bits, and {layer.path or 'the layer'} has {layer.bits} "
                "already.\nUse a LayerConfig with more bits, or None for float."
            )
    rules = [Rule(path=_literal(layer.path), use=precision if layer.weights else None) for layer in layers[:number]]
    return dataclasses.replace(config, rules=(*rules, *config.rules))


def total_bits(layers: Sequence[Any], number: int, higher_bits: int | None, in_float: bool) -> int:
    """What all weights have together, with the first `number` layers in higher precision.

    >>> from types import SimpleNamespace as Layer
    >>> rows = [Layer(path=p, weights=10, bits=4, float_bits=32, part_of=None) for p in "ab"]
    >>> total_bits(rows, 1, 8, False), total_bits(rows, 1, None, True)
    (120, 360)
    """
    kept = {layer.path for layer in layers[:number]}
    total = 0
    for layer in layers:
        bits = layer.bits
        if layer.path in kept:
            bits = layer.float_bits if higher_bits is None else higher_bits
        elif in_float and layer.part_of in kept:  # it stays in float with its attention
            bits = layer.float_bits
        total += layer.weights * bits
    return total


def _within(layers: Sequence[Any], higher_bits: int | None, in_float: bool, budget: Any) -> int:
    if not _is_whole(budget) or budget < 0:
        raise ValueError(f"`bits` must be a whole number of bits for all weights together, at least 0, got {budget!r}.")
    totals = [total_bits(layers, number, higher_bits, in_float) for number in range(len(layers) + 1)]
    if totals[0] > budget:
        raise ValueError(
            f"The weights have {totals[0]:,} bits as the config has them, and `bits` is {budget:,}.\n"
            "Use a config with fewer bits, or a larger budget."
        )
    return max(number for number, total in enumerate(totals) if total <= budget)


def _checked(keep: Any, layers: int) -> int:
    if not _is_whole(keep) or not 0 <= keep <= layers:
        raise ValueError(f"`keep` must be a whole number of layers, 0 to {layers}, got {keep!r}.")
    return int(keep)


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _literal(path: str) -> str:
    """A path as a pattern that matches nothing else."""
    return re.sub(r"([*?[])", r"[\1]", path)
