"""Checks of a saved quantizer state, made before anything is loaded from it."""

import threading
from collections.abc import Mapping
from typing import TypeAlias

from torch import Tensor

from fakequant._backends.torch.torch_private import active_fake_mode
from fakequant.nn._bounded_parameters import whole
from fakequant.spec import QuantSpec

# The tensors of a `state_dict`, by name.
StateDict: TypeAlias = Mapping[str, Tensor]
_FORMAT = 1  # of the buffer `grid`


def encoded_spec(spec: QuantSpec) -> list[int]:
    """Returns the content of the buffer `grid`: the number of the format, and the spec as integers.

    >>> encoded_spec(QuantSpec())[0]
    1
    """
    return [_FORMAT, *spec.to_numbers()]


def find_mismatch(state: StateDict, prefix: str, spec: QuantSpec, tensors: Mapping[str, Tensor | None]) -> str | None:
    """Returns why a state belongs to another quantizer, or None if it fits.

    Args:
        state: The state of a whole model.
        prefix: The part of the keys that names the quantizer, e.g. `"0.weight_quantizer."`.
        spec: The spec of the quantizer.
        tensors: The quantizer's parameters and buffers, by name. Shapes and kinds of dtype are compared.
    """
    saved = state.get(prefix + "grid")
    if saved is not None:
        try:
            version, *numbers = saved.tolist()
            if version != _FORMAT:
                return f"the state has format {version}, but this version reads format {_FORMAT}."
            saved_spec = QuantSpec.from_numbers(numbers)
        except (ValueError, TypeError, IndexError):
            return f"`grid` is not an encoded QuantSpec: {saved}."
        if saved_spec != spec:
            return (
                f"the state is of a quantizer with the spec ({saved_spec}), this one has the spec ({spec}).\n"
                "Prepare the model with the config it was saved with."
            )
    for name, value in tensors.items():
        loaded = state.get(prefix + name)
        if value is None or loaded is None:
            continue
        if loaded.shape != value.shape:
            return (
                f"`{name}` has shape {tuple(loaded.shape)} in the state and {tuple(value.shape)} here, "
                f"where the spec is ({spec}).\n"
                "The state has another granularity, or is for a tensor of another size."
            )
        if _number_kind(loaded) != _number_kind(value):
            return (
                f"`{name}` holds {str(loaded.dtype)[6:]} in the state, and {str(value.dtype)[6:]} here.\n"
                "The state is from another kind of quantizer, or was converted after it was saved."
            )
    return None


def find_bad_qparams(state: StateDict, prefix: str, scale_name: str, spec: QuantSpec) -> str | None:
    """Returns what is wrong with the scales or zero points in a state, or None if they are valid.

    Args:
        state: The state of a whole model.
        prefix: The part of the keys that names the quantizer.
        scale_name: The name of the quantizer's scale in the state.
        spec: The spec of the quantizer.
    """
    scale = state.get(prefix + scale_name)
    if scale is None or not is_readable(scale):
        return None
    scale = whole(scale)
    # NaN is valid: nothing was observed yet.
    bad = ~((scale > 0) & scale.isfinite() | scale.isnan())
    if bool(bad.any()):
        return (
            f"`{scale_name}` is {_first_bad(scale, bad)} in the state, but a scale is finite and greater than 0, "
            "or NaN where nothing was observed.\nThe state is damaged: use another, or calibrate again."
        )
    zero_point = state.get(prefix + "zero_point")
    if zero_point is None or not is_readable(zero_point):
        return None
    low, high = (0, 0) if spec.symmetric else (spec.qmin, spec.qmax)
    bad = ((zero_point < low) | (zero_point > high)) & scale.isfinite().to(zero_point.device)
    if bool(bad.any()):
        return (
            f"`zero_point` is {_first_bad(zero_point, bad)} in the state, but it must be between {low} and {high} "
            f"({spec}).\nThe state is damaged: use another, or calibrate again."
        )
    return None


def is_readable(tensor: Tensor) -> bool:
    """Returns True if the tensor has values, i.e. is neither a meta tensor nor seen under a fake tensor mode."""
    return not tensor.is_meta and active_fake_mode() is None


def _number_kind(tensor: Tensor) -> str:
    if tensor.is_floating_point():
        return "floats"
    return "complex numbers" if tensor.is_complex() else "integers"


def _first_bad(values: Tensor, bad: Tensor) -> str:
    index = int(bad.flatten().int().argmax())
    value = values.flatten()[index].item()
    return f"{value:g}" if values.numel() == 1 else f"{value:g} at index {index}"


class MissingQuantizers(threading.local):
    """Decides whether quantizers that a state does not mention are reported as missing keys.

    The state of a model without any quantizers may be loaded; a state that has one quantizer must have all.
    Each quantizer sees only its own part of the state, in the order of the modules. So the keys of absent
    quantizers wait here until the first quantizer is found. `load_state_dict` passes the same list of missing
    keys to all modules, and a new list in each call, so the list identifies the call.
    """

    def __init__(self) -> None:
        self._missing: list[str] | None = None
        self._found = False
        self._absent: list[str] = []

    def absent(self, missing: list[str], keys: list[str]) -> None:
        """Notes that a quantizer, which saves `keys`, does not occur in the state."""
        self._start(missing)
        (missing if self._found else self._absent).extend(keys)

    def present(self, missing: list[str]) -> None:
        """Notes that a quantizer occurs in the state, and reports those that were absent so far."""
        self._start(missing)
        self._found = True
        missing.extend(self._absent)
        self._absent = []

    def _start(self, missing: list[str]) -> None:
        if self._missing is not missing:
            self._missing, self._found, self._absent = missing, False, []


missing_quantizers = MissingQuantizers()
