"""The widths that the weights of a prepared model can have: their numbers of bits."""

import dataclasses
from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor, nn

from fakequant import _targets
from fakequant._diagnosis.units import Unit
from fakequant._prepare.first_last import FirstLast, give_spec
from fakequant._prepare.plan import config_of, read_weight
from fakequant._prepare.prepare import preparation
from fakequant._prepare.weight_widths import weight_at
from fakequant.config import LayerConfig, QuantConfig
from fakequant.nn._fake_quantize import FakeQuantize
from fakequant.nn._layer_kinds import LayerKind
from fakequant.nn._owned_product import stored_weight
from fakequant.nn._quantized_layer import kind_of
from fakequant.nn._quantizer import Quantizer
from fakequant.spec import QuantSpec

# The widest grid of a weight that is worth a search.
_WIDEST = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """A weight whose width can be chosen. Layers that share the weight share the choice."""

    units: list[Unit]
    # The specs of the units' weights: those of the config, and those of each width.
    own: list[QuantSpec]
    specs: dict[int, list[QuantSpec]]

    @torch.no_grad()
    def set(self, bits: int | None) -> None:
        """Gives the weight a grid of this width, with a new scale. None for the grid of the config."""
        for unit, spec in zip(self.units, self.own if bits is None else self.specs[bits], strict=True):
            quantizer = quantizer_of(unit)
            give_spec(quantizer, spec, unit.module, "weight_quantizer")
            if isinstance(quantizer, FakeQuantize) and not quantizer.is_dynamic:
                quantizer.train()  # in which it observes
                quantizer(weight_of(unit))
                quantizer.eval()


def checked_candidates(candidates: object) -> list[int]:
    """Returns the widths in ascending order. Raises an error that says what is allowed."""
    if isinstance(candidates, (str, bytes)) or not isinstance(candidates, Iterable):
        raise TypeError(f"`candidates` must be numbers of bits, such as (2, 4, 8), got {candidates!r}.")
    widths = list(candidates)
    if not widths or any(type(bits) is not int or not 1 <= bits <= _WIDEST for bits in widths):
        raise ValueError(
            f"`candidates` must be numbers of bits from 1 to {_WIDEST}, such as (2, 4, 8), got {candidates!r}."
        )
    return sorted(set(widths))


def find_choices(model: nn.Module, units: list[Unit], candidates: list[int]) -> list[Choice]:
    """Returns the choices of a prepared model, in its order, with the widths that each can have.

    A width that the target does not have becomes the one that it has instead. The layers that have `first_last_bits`
    keep at least those; if no candidate has as many, they keep the width that they have. So do weights in float formats
    and with block scales. Raises ValueError if all are such.
    """
    made = preparation(model)
    target, first_last = _targets.find(made.config.target), made.first_last
    tied: dict[int, list[Unit]] = {}
    for unit in units:
        if unit.weight_quantizer is not None:
            weight = stored_weight(unit.module, _kind(unit).weight_name)
            # A weight that is computed anew whenever it is read is tied to no other.
            tied.setdefault(id(weight if isinstance(weight, nn.Parameter) else unit), []).append(unit)
    if tied and not any(quantizer_of(unit).spec.is_integer for group in tied.values() for unit in group):
        raise ValueError(
            f"`candidates` are widths of integer grids, and no weight is on one, got {candidates} for weights in "
            f"{quantizer_of(next(iter(tied.values()))[0]).spec}.\n"
            "The width of a float format, of MX and of NVFP4 follows from the format. Leave out `candidates`, and "
            "compare configs with different formats instead."
        )
    return [_choice(group, candidates, target, made.config, first_last) for group in tied.values()]


def _choice(
    units: list[Unit], candidates: list[int], target: _targets.Target, config: QuantConfig, first_last: FirstLast | None
) -> Choice:
    fewest = 0
    for unit in units:
        spec = quantizer_of(unit).spec
        if spec.signed and candidates[0] < 2:
            raise ValueError(
                f"{unit.path or 'The model'} has signed weights ({spec}), which need at least 2 bits, got the "
                f"candidate {candidates[0]}.\nUse candidates from 2 on, or an unsigned, affine grid."
            )
        if first_last is not None and unit.path in first_last.wide:
            assert config.first_last_bits is not None
            fewest = max(fewest, min(config.first_last_bits, spec.bits))
    specs: dict[int, list[QuantSpec]] = {}
    for bits in candidates:
        found = [weight_at(quantizer_of(unit).spec, bits, target) for unit in units]
        if found[0].bits >= fewest:
            specs.setdefault(found[0].bits, found)
    if not specs:
        widest = max(quantizer_of(unit).spec.bits for unit in units)
        specs = {widest: [weight_at(quantizer_of(unit).spec, widest, target) for unit in units]}
    return Choice(units, [quantizer_of(unit).spec for unit in units], dict(sorted(specs.items())))


def quantizer_of(unit: Unit) -> Quantizer:
    """Returns the quantizer of the weight of a unit that has one."""
    assert unit.weight_quantizer is not None
    return unit.weight_quantizer


def weight_of(unit: Unit) -> Tensor:
    """Returns the weight of a layer that it multiplies by, in float."""
    return read_weight(unit.module, _kind(unit))


def _kind(unit: Unit) -> type[LayerKind]:
    kind = kind_of(unit.module)
    assert kind is not None
    return kind


def scales_of(unit: Unit) -> int:
    """Returns the number of scales of the weight."""
    return prod(quantizer_of(unit)._blocks or ())


def layer_config(model: nn.Module, unit: Unit) -> LayerConfig:
    """Returns the config of a layer with a quantized weight, with the grids that the target and `first_last_bits` gave.

    A rule with this config leaves the layer as it is.
    """
    made = preparation(model)
    use, _ = config_of(unit.path, unit.module, made.config)
    assert use is not None
    assert use.weight is not None
    # `prepare` turns axis 0 into the axis of the output channels.
    use = dataclasses.replace(use, weight=dataclasses.replace(quantizer_of(unit).spec, axis=use.weight.axis))
    first_last = made.first_last
    if first_last is None or unit.path not in first_last.wide or use.input is None:
        return use
    # Layers that a rule matches do not get `first_last_bits`, so the rule must have those of the input.
    _, wide = first_last.specs.get(f"{unit.path}.input_quantizer" if unit.path else "input_quantizer", (None, None))
    return use if wide is None else dataclasses.replace(use, input=dataclasses.replace(use.input, bits=wide.bits))
