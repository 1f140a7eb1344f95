"""The state of a quantizer: its switches, and how it is saved, loaded and copied.

A state is checked before anything is loaded from it.
"""

import copy
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.types import Device

from fakequant._backends.torch.tensor_kernels import dtype_name
from fakequant._backends.torch.torch_private import active_fake_mode
from fakequant.nn._bounded_parameters import whole
from fakequant.nn._recomputation import watch_checkpoints
from fakequant.spec import QuantSpec

# The tensors of a `state_dict`, by name.
StateDict: TypeAlias = Mapping[str, Tensor]
_FORMAT = 1  # of the buffer `grid`
SWITCHES = ("observing", "quantizing", "frozen")


def encoded_spec(spec: QuantSpec) -> list[int]:
    """Returns the content of the buffer `grid`: the number of the format, and the spec as integers.

    >>> encoded_spec(QuantSpec())[0]
    1
    """
    return [_FORMAT, *spec.to_numbers()]


def find_mismatch(state: StateDict, prefix: str, spec: QuantSpec, tensors: Mapping[str, Tensor | None]) -> str | None:
    """Returns why a state belongs to another quantizer, or None if it fits.

    `state` is the state of a whole model, in which `prefix` names the quantizer. `tensors` are the quantizer's
    parameters and buffers, of which shapes and kinds of dtype are compared.
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
                f"`{name}` holds {dtype_name(loaded.dtype)} in the state, and {dtype_name(value.dtype)} here.\n"
                "The state is from another kind of quantizer, or was converted after it was saved."
            )
    return None


def find_bad_qparams(state: StateDict, prefix: str, scale_name: str, spec: QuantSpec) -> str | None:
    """Returns what is wrong with the scales or zero points in a state, or None if they are valid."""
    scale = state.get(prefix + scale_name)
    if scale is None or not is_readable(scale):
        return None
    scale = whole(scale)
    # NaN is valid: nothing was observed yet.
    has_sign = spec.ggml_type is not None
    bad = ~(((scale > 0) | has_sign) & scale.isfinite() | scale.isnan())
    if bool(bad.any()):
        return (
            f"`{scale_name}` is {_first_bad(scale, bad)} in the state, but a scale is finite"
            f"{'' if has_sign else ' and greater than 0'}, "
            "or NaN where nothing was observed.\nThe state is damaged: use another, or calibrate again."
        )
    zero_point = state.get(prefix + "zero_point")
    if zero_point is None or not is_readable(zero_point):
        return None
    low, high = (-math.inf, math.inf) if spec.has_offset else (0, 0) if spec.symmetric else (spec.qmin, spec.qmax)
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


# --- the quantizer --------------------------------------------------------------------------------


class QuantizerState(nn.Module):
    """The base of `Quantizer`: everything of it that is saved, loaded and copied.

    The switches are Python bools, so a compiled model is compiled once for each combination that occurs. The buffer
    `switches` has the same content, so copying or loading the buffers copies everything. Its last element says whether
    something was observed that the scale does not reflect yet.
    """

    spec: QuantSpec
    grid: Tensor
    switches: Tensor
    process_group: "dist.ProcessGroup | None"
    # The name of the scale in a state.
    _scale_name = "scale"

    def __init__(self, spec: QuantSpec, *, observing: bool, device: Device) -> None:
        super().__init__()
        self.spec = spec
        self._observing, self._quantizing, self._frozen = observing, True, False
        self._stale = False
        # Not a buffer: every rank counts the values it has seen itself.
        self._nonfinite = torch.zeros((), dtype=torch.int64, device=device)
        # Whether the warning about non-finite values was shown.
        self._told = False
        self.register_buffer("grid", torch.tensor(encoded_spec(spec), dtype=torch.int32, device=device))
        on = torch.tensor([observing, True, False, False], dtype=torch.uint8, device=device)
        self.register_buffer("switches", on)

    @property
    def where(self) -> str:
        """The class name and the path, for messages."""
        raise NotImplementedError

    def run_deferred(self) -> None:
        """Runs deferred work. Called before the mode or a switch changes."""
        raise NotImplementedError

    # --- switches and modes -----------------------------------------------------------------------

    @property
    def observing(self) -> bool:
        """Whether tensors are observed in training mode."""
        return self._observing

    @observing.setter
    def observing(self, on: bool) -> None:
        self._switch("observing", on)

    @property
    def quantizing(self) -> bool:
        """Whether tensors are quantized. If not, they are returned unchanged."""
        return self._quantizing

    @quantizing.setter
    def quantizing(self, on: bool) -> None:
        self._switch("quantizing", on)

    @property
    def frozen(self) -> bool:
        """Whether scale and zero point are constant."""
        return self._frozen

    @frozen.setter
    def frozen(self, on: bool) -> None:
        self._switch("frozen", on)

    def _switch(self, name: str, on: bool) -> None:
        if not isinstance(on, bool):
            raise TypeError(f"`{name}` is a switch: True or False, got {on!r}.")
        self.run_deferred()
        setattr(self, f"_{name}", on)
        with torch.no_grad():
            self.switches[SWITCHES.index(name)] = on

    def _set_stale(self, stale: bool) -> None:
        self._stale = stale
        self.switches[len(SWITCHES)] = stale

    def _read_switches(self) -> None:
        """Sets the switches from the buffer, after it was loaded or copied from another model."""
        if is_readable(self.switches):
            self._observing, self._quantizing, self._frozen, self._stale = map(bool, self.switches.tolist())

    def train(self, mode: bool = True) -> Self:
        """Sets training mode, or evaluation mode, in which static quantizers do not observe."""
        self._read_switches()
        self.run_deferred()
        super().train(mode)
        return self

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Forgets everything that was observed or learned. Initializes all buffers, also after `to_empty`."""
        self.grid.copy_(torch.tensor(encoded_spec(self.spec), dtype=torch.int32))
        self._stale = False
        self.switches.copy_(torch.tensor([self._observing, self._quantizing, self._frozen, False]))
        self._nonfinite.zero_()
        self._told = False

    # --- copies -----------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `model.half()` is meant for the data: scales stay float32.
        apply: Callable[[Callable[[Tensor], Tensor], bool], nn.Module] = super()._apply
        apply(lambda t: _with_same_dtype(fn, t), recurse)
        self._nonfinite = _with_same_dtype(fn, self._nonfinite)
        return self

    def __getstate__(self) -> dict[str, Any]:
        # A process group cannot leave its process, and the last tensor belongs to a graph.
        return self.__dict__ | {"_last": None, "process_group": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        watch_checkpoints()  # in a process that has only loaded quantizers
        super().__setstate__(state)  # type: ignore[no-untyped-call]

    def __copy__(self) -> Self:
        # A shallow copy would share the buffers but not the switches in Python.
        return copy.deepcopy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__getstate__(), memo), process_group=self.process_group)
        return new

    # --- saving and loading -----------------------------------------------------------------------

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.run_deferred()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: StateDict,
        prefix: str,
        metadata: Any,  # torch's own
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        if not any(key.startswith(prefix) for key in state_dict):
            # The state of a model without quantizers leaves them unchanged; a state with one must have all.
            missing_quantizers.absent(missing, [prefix + name for name in self._saved_names()])
            return
        missing_quantizers.present(missing)
        problem = None
        is_of_torch_ao = prefix + "fake_quant_enabled" in state_dict
        if is_of_torch_ao:
            old = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
            try:
                state_dict = {prefix + key: value for key, value in self._from_torch_ao(old).items()}
            except ValueError as error:
                problem = str(error)
        problem = problem or self._find_mismatch(state_dict, prefix)
        if problem is None and not is_of_torch_ao:
            problem = self._find_bad_qparams(state_dict, prefix)
        if problem is not None:
            errors.append(f"{prefix[:-1] or self.where}: {problem}")
            return
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)
        self._restore_dtypes_and_devices()
        self._read_switches()
        self._after_load()

    def _saved_names(self) -> list[str]:
        saved = {n: v for n, v in self._buffers.items() if n not in self._non_persistent_buffers_set}
        return [name for name, value in {**self._parameters, **saved}.items() if value is not None]

    def _from_torch_ao(self, old: dict[str, Tensor]) -> dict[str, Tensor]:
        """Converts the state of a torch.ao module. Raises ValueError if this quantizer has no counterpart there."""
        raise ValueError(f"the state is from torch.ao, which has no module like {type(self).__name__}.")

    def _find_mismatch(self, state_dict: StateDict, prefix: str) -> str | None:
        """Returns why a state belongs to another quantizer, or None if it fits."""
        return find_mismatch(state_dict, prefix, self.spec, {**self._parameters, **self._buffers})

    def _find_bad_qparams(self, state_dict: StateDict, prefix: str) -> str | None:
        """Returns what is wrong with the scales or zero points in a state, or None if they are valid."""
        return find_bad_qparams(state_dict, prefix, self._scale_name, self.spec)

    def _restore_dtypes_and_devices(self) -> None:
        """Undoes two effects of `load_state_dict(assign=True)`.

        Tensors have the dtype of the state, and tensors that are not in the state stay on the meta device.
        """
        device = self.grid.device
        own: tuple[dict[str, Any], ...] = (self._parameters, self._buffers)
        for tensors in own:
            for name, value in tensors.items():
                if value is None:
                    continue
                if value.is_floating_point() and name not in self._non_persistent_buffers_set:
                    value.data = value.data.float()
                if value.is_meta and device.type != "meta":
                    tensors[name] = torch.zeros_like(value, device=device)
        if self._nonfinite.is_meta:
            self._nonfinite = torch.zeros_like(self._nonfinite, device=device)

    def _after_load(self) -> None:
        """Called after a state was loaded into the parameters and buffers."""


def _with_same_dtype(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    moved = fn(tensor)
    return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)
