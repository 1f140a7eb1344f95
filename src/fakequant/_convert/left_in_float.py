"""Quantizers that `convert` removes, because the prepared model computes in float at that point too."""

import warnings

from torch import nn

from fakequant.nn._call_quantizers import CallQuantizers, quantizers_in
from fakequant.nn._model_quantizers import has_scale, quantizers
from fakequant.nn._quantized_layer import ATTENTION_QUANTIZERS, QUANTIZERS, QuantizedLayer, input_grids_of
from fakequant.nn._quantizer import Quantizer


def leave_in_float(model: nn.Module, *, strict: bool) -> list[str]:
    """Removes the quantizers that do not quantize from a copy of a prepared model, in place.

    These are quantizers that are switched off, and quantizers that no data has reached. Warns about them, or raises
    ValueError if `strict` is True.

    Returns:
        One note per removed quantizer.
    """
    _require_any(model)
    reasons = {path: "is switched off" for path, quantizer in quantizers(model) if not quantizer.quantizing}
    out = {model.get_submodule(path) for path in reasons}
    paths = {quantizer: path for path, quantizer in quantizers(model)}
    for layer in unreached_layers(model).values():
        for name in (*QUANTIZERS, *ATTENTION_QUANTIZERS):
            for quantizer in quantizers_in(layer._modules.get(name)):
                if quantizer not in out:
                    out.add(quantizer)
                    reasons[paths[quantizer]] = "has seen no data"
    of_weights = _weight_quantizers(model)
    for path, quantizer in quantizers(model):
        if quantizer not in out and quantizer not in of_weights and not has_scale(quantizer):
            out.add(quantizer)
            reasons[path] = "has seen no data"
    for module in model.modules():
        for name, child in list(module._modules.items()):
            if child in out:
                module._modules[name] = None
        if isinstance(module, QuantizedLayer) and module._fakequant.input_grid in out:
            module._fakequant.input_grid = None
        if isinstance(module, CallQuantizers):
            module.borrowed = {turn: quantizer for turn, quantizer in module.borrowed.items() if quantizer not in out}
    notes = [f"{path} {reason}: its tensor stays in float" for path, reason in reasons.items()]
    if notes:
        more = f"\n  and {len(notes) - 5} more" if len(notes) > 5 else ""
        shown = "\n  ".join(notes[:5]) + more
        if strict:
            raise ValueError(f"Some tensors would not be quantized in the converted model:\n  {shown}\n{_ADVICE}")
        warnings.warn(
            f"Some tensors are not quantized in the converted model, just as in the prepared model:\n  {shown}\n"
            f"{_ADVICE}",
            UserWarning,
            stacklevel=3,
        )
    return notes


_ADVICE = (
    "Switch quantizers on with fakequant.nn.switch_quantizers(model, quantizing=True). Layers that are never called "
    "cannot be quantized: use config.skip(path)."
)


def unreached_layers(model: nn.Module) -> dict[str, QuantizedLayer]:
    """Returns the layers whose input has no scale, by path. In a calibrated model, no data has reached them."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, QuantizedLayer):
            grids = [grid for grid in input_grids_of(module) if isinstance(grid, Quantizer)]
            if grids and not any(map(has_scale, grids)):
                found[path] = module
    return found


def _require_any(model: nn.Module) -> None:
    """Raises RuntimeError if all quantizers are switched off, or if no activation has a scale."""
    found = dict(quantizers(model))
    if not any(quantizer.quantizing for quantizer in found.values()):
        raise RuntimeError(
            "All quantizers of the model are switched off: the converted model would be the float model.\n"
            "Use fakequant.nn.switch_quantizers(model, quantizing=True) first."
        )
    of_weights = _weight_quantizers(model)
    static = {path: q for path, q in found.items() if not q.is_dynamic and q not in of_weights}
    missing = [path for path, quantizer in static.items() if not has_scale(quantizer)]
    if missing and len(missing) == len(static):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise RuntimeError(
            f"The model is not calibrated: {', '.join(missing[:3])}{more} have no scale.\n"
            "Use fakequant.calibrate(model, data), or train the model, before you convert it."
        )


def _weight_quantizers(model: nn.Module) -> set[Quantizer | None]:
    return {module.weight_quantizer for module in model.modules() if isinstance(module, QuantizedLayer)}
