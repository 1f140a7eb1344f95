"""The switches of a quantizer: Python bools, saved in a buffer."""

import torch
from torch import Tensor, nn
from torch.types import Device

from fakequant._backends.torch.plain_memory import is_eager
from fakequant.nn._recomputation import current_replay, runs
from fakequant.nn._state_checks import is_readable

SWITCHES = ("observing", "quantizing", "frozen")
_STALE, _TOKENS = 1, 2  # flags in the last element of the buffer `switches`


class Switched(nn.Module):
    """The base of `Quantizer`: three switches and two flags.

    They are Python bools, so a compiled model is compiled once for each combination that occurs. The buffer
    `switches` has the same content, so copying or loading the buffers copies everything.
    """

    switches: Tensor

    def _add_switches(self, *, observing: bool, device: Device) -> None:
        self._observing, self._quantizing, self._frozen = observing, True, False
        # True if something was observed that the scale does not reflect yet.
        self._stale = False
        # For the quantizer of a weight: whether the layer's inputs have more than two axes.
        self._has_tokens = False
        self.register_buffer(
            "switches", torch.tensor([observing, True, False, False], dtype=torch.uint8, device=device)
        )

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

    def run_deferred(self) -> None:
        """Runs deferred work. Called before the mode or a switch changes."""
        raise NotImplementedError

    @property
    def has_tokens(self) -> bool:
        """For the quantizer of a weight: whether the layer's input had more than two axes when last observed."""
        return self._has_tokens

    @torch.no_grad()
    def note_tokens(self, on: bool) -> None:
        """Records, in training and calibration, whether the layer's input has more than two axes."""
        if runs.stack and current_replay() is not None:
            return
        if self._has_tokens != on and self.training and not self._frozen and is_eager(self.switches):
            self._has_tokens = on
            self._write_flags()

    def _set_stale(self, stale: bool) -> None:
        self._stale = stale
        self._write_flags()

    def _write_flags(self) -> None:
        self.switches[len(SWITCHES)] = _STALE * self._stale + _TOKENS * self._has_tokens

    def _read_switches(self) -> None:
        """Sets switches and flags from the buffer, after it was loaded or copied from another model."""
        if is_readable(self.switches):
            *on, flags = self.switches.tolist()
            self._observing, self._quantizing, self._frozen = map(bool, on)
            self._stale, self._has_tokens = bool(flags & _STALE), bool(flags & _TOKENS)

    def _reset_flags(self) -> None:
        self._stale = self._has_tokens = False
        self.switches.copy_(torch.tensor([self._observing, self._quantizing, self._frozen, False]))
