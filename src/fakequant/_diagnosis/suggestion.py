"""Builds configs from the sensitivity of layers: more bits for some of them, or a width for each."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeGuard

from fakequant import _targets
from fakequant._diagnosis.mixed_precision import within_budget
from fakequant._prepare.weight_widths import weight_at
from fakequant.config import LayerConfig, QuantConfig, Rule

if TYPE_CHECKING:
    from fakequant._diagnosis.sensitivity_table import LayerSensitivity


def suggested(
    config: QuantConfig,
    layers: "Sequence[LayerSensitivity]",
    keep: int | None,
    bits: float | None,
    bytes: int | None,
    latency: float | None,
    times: Mapping[Any, Any] | None,
    precision: LayerConfig | None,
) -> QuantConfig:
    """Returns the config with new rules before its own; see `Sensitivity.suggest`."""
    budgets = {"keep": keep, "bits": bits, "bytes": bytes, "latency": latency}
    if sum(value is not None for value in budgets.values()) != 1:
        got = ", ".join(f"{name}={value!r}" for name, value in budgets.items())
        raise ValueError(
            "Pass either `keep`, the number of layers in higher precision, or one budget: `bits`, `bytes` or "
            f"`latency`, got {got}."
        )
    if (latency is None) != (times is None):
        raise ValueError(
            "`latency` is a limit for the sum of `times`, the time of each layer at each width: pass both, got "
            f"latency={latency!r}, times={'None' if times is None else 'a table'}.\n"
            "Use times={path: {bits: time}} or {(path, bits): time}."
        )
    if times is not None and not isinstance(times, Mapping):
        raise TypeError(f"`times` must be a dict, {{path: {{bits: time}}}} or {{(path, bits): time}}, got {times!r}.")
    if precision is not None and not isinstance(precision, LayerConfig):
        raise TypeError(f"`precision` must be a LayerConfig, or None for float, got {precision!r}.")
    if keep is None and any(layer.costs is not None for layer in layers):
        if precision is not None:
            raise ValueError(
                "`precision` is for tables without widths: here every layer has one of the measured widths.\n"
                "Leave it out, or pass `keep`."
            )
        return _with_widths(config, layers, within_budget(layers, bits, bytes, latency, times))
    if bytes is not None or latency is not None:
        raise ValueError(
            f"`{'latency' if bytes is None else 'bytes'}` needs the cost of every layer at several widths.\n"
            "Measure them: fakequant.sensitivity(..., candidates=(2, 4, 8))."
        )
    return _with_worst_kept(config, layers, keep, bits, precision)


def _with_widths(config: QuantConfig, layers: "Sequence[LayerSensitivity]", widths: Mapping[str, int]) -> QuantConfig:
    """Returns the config with a rule for every layer whose weight has another width than the config gives it."""
    target, rules = _targets.find(config.target), []
    for layer in layers:
        bits = widths.get(layer.path)
        if bits is not None and bits != layer.bits:
            assert layer.config is not None
            assert layer.config.weight is not None
            use = dataclasses.replace(layer.config, weight=weight_at(layer.config.weight, bits, target))
            rules.append(Rule(path=_literal(layer.path), use=use))
    return dataclasses.replace(config, rules=(*rules, *config.rules))


def _with_worst_kept(
    config: QuantConfig,
    layers: "Sequence[LayerSensitivity]",
    keep: int | None,
    bits: float | None,
    precision: LayerConfig | None,
) -> QuantConfig:
    """Returns the config with the first of `layers` in `precision`, or in float if it is None.

    Args:
        config: The config to extend. Its rules come after the new ones.
        layers: `LayerSensitivity` rows, the most sensitive first.
        keep: The number of layers in `precision`. None if `bits` decides.
        bits: A limit for the bits of all weights together. None if `keep` decides.
        precision: The precision of these layers. None for float.
    """
    higher = None if precision is None or precision.weight is None else precision.weight
    higher_bits = None if higher is None else _targets.find(config.target).fit_weight(higher).bits
    number = _within(layers, higher_bits, precision is None, bits) if keep is None else _checked(keep, len(layers))
    for layer in layers[:number]:
        if higher_bits is not None and layer.weights and higher_bits < layer.bits:
            raise ValueError(
                f"`precision` has weights of {higher_bits} bits, but {layer.path or 'the layer'} already has "
                f"{layer.bits}.\nUse a LayerConfig with more bits, or None for float."
            )
    rules = [Rule(path=_literal(layer.path), use=precision if layer.weights else None) for layer in layers[:number]]
    return dataclasses.replace(config, rules=(*rules, *config.rules))


def total_bits(layers: "Sequence[LayerSensitivity]", number: int, higher_bits: int | None, in_float: bool) -> int:
    """Returns the bits of all weights together, with the first `number` layers in higher precision.

    Args:
        layers: `LayerSensitivity` rows.
        number: The number of layers in higher precision.
        higher_bits: The bits of a weight in higher precision. None for those of its float type.
        in_float: Whether higher precision means float, also for layers inside a kept attention.

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
        elif in_float and layer.part_of in kept:  # stays in float with its attention
            bits = layer.float_bits
        total += layer.weights * bits
    return total


def _within(layers: "Sequence[LayerSensitivity]", higher_bits: int | None, in_float: bool, budget: float | None) -> int:
    if not _is_whole(budget) or budget < 0:
        raise ValueError(f"`bits` must be a whole number of bits for all weights together, at least 0, got {budget!r}.")
    totals = [total_bits(layers, number, higher_bits, in_float) for number in range(len(layers) + 1)]
    if totals[0] > budget:
        raise ValueError(
            f"The weights have {totals[0]:,} bits with the config alone, more than `bits`, which is {budget:,}.\n"
            "Use a config with fewer bits, or a larger budget. For `bits` per weight, measure widths: "
            "fakequant.sensitivity(..., candidates=(2, 4, 8))."
        )
    return max(number for number, total in enumerate(totals) if total <= budget)


def _checked(keep: object, layers: int) -> int:
    if not _is_whole(keep) or not 0 <= keep <= layers:
        raise ValueError(f"`keep` must be a whole number of layers, 0 to {layers}, got {keep!r}.")
    return int(keep)


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _literal(path: str) -> str:
    """Returns a pattern that matches only this path."""
    return re.sub(r"([*?[])", r"[\1]", path)
