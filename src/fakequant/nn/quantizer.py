"""What every quantizer module has: a spec, three switches, a path, and a state that loads or says why not."""

from collections.abc import Iterator
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from fakequant.layout import blocks_of
from fakequant.spec import NUMERICS, QuantSpec

_SWITCHES = ("observing", "quantizing", "frozen")
_ABSENT = -(2**31)
_FORMAT = 1  # of the buffer `grid`


class Quantizer(nn.Module):
    """A module that quantizes one tensor of a model.

        observing     it looks at the tensors that pass, if it is in training mode
        quantizing    it quantizes them; else they pass as they are
        frozen        scale and zero point stay as they are, whatever the others say

    All three can be read and set, are saved with the state, and are Python bools: a compiled model is
    compiled once for each combination that occurs.
    """

    spec: QuantSpec
    # Where the module is in its model, for messages; `name_quantizers(model)` sets it.
    path: str | None
    # The keys of a state_dict that are of this class's making, besides parameters and buffers of children.
    grid: Tensor
    switches: Tensor

    def __init__(self, spec: QuantSpec, *, observing: bool, path: str | None, device: Any) -> None:
        super().__init__()
        if not isinstance(spec, QuantSpec):
            raise TypeError(
                f"`spec` must be a QuantSpec, got {type(spec).__name__}.\nUse e.g. fakequant.presets.uint8()."
            )
        self.spec = spec
        self.path = path
        self._observing, self._quantizing, self._frozen = observing, True, False
        self.register_buffer("grid", torch.tensor(_encode(spec), dtype=torch.int32, device=device))
        self.register_buffer("switches", torch.tensor([observing, True, False], dtype=torch.uint8, device=device))

    # --- switches ---------------------------------------------------------------------------------

    @property
    def observing(self) -> bool:
        """Whether it looks at the tensors that pass in training mode."""
        return self._observing

    @observing.setter
    def observing(self, on: bool) -> None:
        self._switch("observing", on)

    @property
    def quantizing(self) -> bool:
        """Whether it quantizes the tensors that pass."""
        return self._quantizing

    @quantizing.setter
    def quantizing(self, on: bool) -> None:
        self._switch("quantizing", on)

    @property
    def frozen(self) -> bool:
        """Whether scale and zero point stay as they are."""
        return self._frozen

    @frozen.setter
    def frozen(self, on: bool) -> None:
        self._switch("frozen", on)

    def _switch(self, name: str, on: bool) -> None:
        if not isinstance(on, bool):
            raise TypeError(f"`{name}` is a switch: True or False, got {on!r}.")
        self.settle()
        setattr(self, f"_{name}", on)
        with torch.no_grad():
            self.switches[_SWITCHES.index(name)] = on

    def _read_switches(self) -> None:
        """The switches as the buffer has them, after it was loaded or copied from another model."""
        if not self.switches.is_meta:
            self._observing, self._quantizing, self._frozen = map(bool, self.switches.tolist())

    def settle(self) -> None:
        """Does what can wait until nobody is in a hurry: what is said once, and searches."""

    def train(self, mode: bool = True) -> "Quantizer":
        """Training mode, or evaluation mode, in which nothing is observed."""
        if mode != self.training:
            self._read_switches()
            self.settle()
        super().train(mode)
        return self

    def extra_repr(self) -> str:
        """The spec and what is switched on."""
        state = [name for name in _SWITCHES if getattr(self, name)] or ["off"]
        return f"{self.spec}; {', '.join(state)}"

    # --- messages ---------------------------------------------------------------------------------

    @property
    def where(self) -> str:
        """The module in a message."""
        return f"{type(self).__name__} at {self.path}" if self.path else type(self).__name__

    def _refuse(self, error: Exception) -> NoReturn:
        """The same error with the path of the module."""
        raise type(error)(f"{self.where}: {error}") from error

    # --- state ------------------------------------------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True) -> "Quantizer":
        # `model.half()` is about the data: scales stay float32.
        return super()._apply(lambda t: _keep_dtype(fn, t), recurse)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.settle()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        if not any(key.startswith(prefix) for key in state_dict):
            return  # the state of a model without quantizers: they stay as they are
        problem = self._misfit(state_dict, prefix)
        if problem is not None:
            errors.append(f"{prefix[:-1] or self.where}: {problem}")
            return
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)
        self._read_switches()

    def _misfit(self, state_dict: Any, prefix: str) -> str | None:
        """Why a state cannot be loaded, if it cannot."""
        saved = state_dict.get(prefix + "grid")
        if saved is not None:
            numbers = saved.tolist()
            if numbers[0] != _FORMAT:
                return f"the state is of format {numbers[0]}, this version reads format {_FORMAT}."
            spec = _decode(numbers)
            if spec != self.spec:
                return (
                    f"the state is of a quantizer with the spec ({spec}), this one has the spec ({self.spec}).\n"
                    "Prepare the model with the config it was saved with."
                )
        for name, value in (*self._parameters.items(), *self._buffers.items()):
            loaded = state_dict.get(prefix + name)
            if value is not None and loaded is not None and loaded.shape != value.shape:
                return (
                    f"`{name}` has shape {tuple(loaded.shape)} in the state and {tuple(value.shape)} here, "
                    f"where the spec is ({self.spec}).\n"
                    "The state is of another granularity, or of a tensor of another size."
                )
        return None


def _keep_dtype(fn: Any, tensor: Tensor) -> Tensor:
    moved = fn(tensor)
    return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)


def _encode(spec: QuantSpec) -> list[int]:
    axis, group = (_ABSENT if v is None else v for v in (spec.axis, spec.group_size))
    flags = (spec.signed, spec.symmetric, spec.narrow)
    return [_FORMAT, spec.bits, *map(int, flags), axis, group, NUMERICS.index(spec.numerics)]


def _decode(numbers: list[int]) -> QuantSpec:
    _, bits, signed, symmetric, narrow, axis, group, numerics = numbers
    return QuantSpec(
        bits=bits,
        signed=bool(signed),
        symmetric=bool(symmetric),
        narrow=bool(narrow),
        axis=None if axis == _ABSENT else axis,
        group_size=None if group == _ABSENT else group,
        numerics=NUMERICS[numerics],
    )


def parameter_shape(spec: QuantSpec, shape: tuple[int | None, ...] | None) -> tuple[int, ...] | None:
    """The shape of the scales for tensors of `shape`, in which None is any length; None: another for every tensor.

    >>> parameter_shape(QuantSpec(axis=1), (None, 64, None, None))
    (64,)
    """
    if spec.granularity == "token":
        return None
    if spec.axis is None:
        return ()
    if shape is None:
        raise ValueError(
            f"A quantizer per {spec.granularity} has scales of a fixed shape, and needs to know it: "
            "pass `shape`, the shape of the tensors it will see.\n"
            f"Use e.g. shape=weight.shape, or None for lengths that vary: shape=(None, 64, None, None)."
        )
    lengths = tuple(0 if n is None else n for n in shape)
    blocks = blocks_of(lengths, spec).parameters
    if 0 in blocks:
        raise ValueError(
            f"The scales of a quantizer per {spec.granularity} on axis {spec.axis} have no fixed shape for tensors of "
            f"shape {tuple(shape)}.\nGive the lengths that scales differ along, or use group_size=-1 and ranges "
            "found for every tensor (Memoryless)."
        )
    return blocks


def quantizers(model: nn.Module) -> Iterator[tuple[str, Quantizer]]:
    """The quantizers of a model and their paths.

    >>> from fakequant import nn as fqnn, presets
    >>> model = nn.Sequential(nn.Linear(4, 4), fqnn.FakeQuantize(presets.uint8()))
    >>> [path for path, _ in quantizers(model)]
    ['1']
    """
    for path, module in model.named_modules():
        if isinstance(module, Quantizer):
            yield path, module


def name_quantizers(model: nn.Module) -> None:
    """Tells every quantizer of a model its path, for messages.

    >>> from fakequant import nn as fqnn, presets
    >>> model = nn.Sequential(nn.Linear(4, 4), fqnn.FakeQuantize(presets.uint8()))
    >>> name_quantizers(model)
    >>> model[1].path
    '1'
    """
    for path, module in quantizers(model):
        module.path = path


def set_state(
    model: nn.Module,
    *,
    observing: bool | None = None,
    quantizing: bool | None = None,
    frozen: bool | None = None,
) -> None:
    """Sets the switches of every quantizer of a model; None leaves one as it is.

    >>> from fakequant import nn as fqnn, presets
    >>> model = nn.Sequential(nn.Linear(4, 4), fqnn.FakeQuantize(presets.uint8()))
    >>> set_state(model, frozen=True)
    >>> model[1]
    FakeQuantize(uint8, per tensor; observing, quantizing, frozen; MovingAverage(constant=0.01))
    """
    for _, module in quantizers(model):
        for name, on in zip(_SWITCHES, (observing, quantizing, frozen), strict=True):
            if on is not None:
                setattr(module, name, on)


GradientRule = Literal["clipped", "pass"]
