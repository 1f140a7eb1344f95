"""What every quantizer module has: a spec, three switches, a path, and a state that loads or says why not."""

import copy
import threading
import warnings
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fakequant._backends.blocks import blocks_of
from fakequant._backends.torch.plain_memory import is_eager, is_memory, is_transformed
from fakequant._backends.torch.process_ranks import ALONE, Ranks, ranks_of
from fakequant._backends.torch.tensor_checks import check_data
from fakequant._backends.torch.torch_private import active_fake_mode
from fakequant.nn._bounded_parameters import whole
from fakequant.qparams import QParams
from fakequant.spec import QuantSpec

_SWITCHES = ("observing", "quantizing", "frozen")
_ERRORS = (ValueError, TypeError, IndexError, RuntimeError, NotImplementedError)
_FORMAT = 1  # of the buffer `grid`
_STALE, _TOKENS = 1, 2  # flags in the last element of the buffer `switches`

# Quantizers see the same shapes again and again.
_known_blocks_of = lru_cache(maxsize=1024)(blocks_of)


class Quantizer(nn.Module):
    """A module that quantizes one tensor of a model.

        observing     it looks at the tensors that pass, if it is in training mode
        quantizing    it quantizes them; else they pass as they are
        frozen        scale and zero point stay as they are, whatever the others say

    Scales per token are those of the tensor at hand in any case.

    All three can be read and set, are saved with the state, and are Python bools: a compiled model is
    compiled once for each combination that occurs.
    """

    spec: QuantSpec
    # Where the module is in its model, for messages; `name_quantizers(model)` sets it.
    path: str | None
    grid: Tensor
    switches: Tensor
    # The shape of the scales; None: another for every tensor.
    _blocks: tuple[int, ...] | None
    # What a scale is called in a state.
    _scale_name = "scale"

    def __init__(
        self, spec: QuantSpec, *, observing: bool, sync: bool, process_group: Any, path: str | None, device: Any
    ) -> None:
        super().__init__()
        if not isinstance(spec, QuantSpec):
            raise TypeError(
                f"`spec` must be a QuantSpec, got {type(spec).__name__}.\nUse e.g. fakequant.presets.uint8()."
            )
        self.spec = spec
        self.path = path
        self.sync = sync
        self.process_group = process_group
        # Not a buffer: every rank counts what it has seen itself.
        self._nonfinite = torch.zeros((), dtype=torch.int64, device=device)
        self._told = False  # that there were values that are not finite
        self._observing, self._quantizing, self._frozen = observing, True, False
        # Whether the last tensor was looked at and had no NaN and no infinity in it.
        self.saw_only_finite = False
        # Something was observed that the scale does not show yet.
        self._stale = False
        # Of a weight's quantizer: whether the layer is given tokens, inputs with more than two axes.
        self._has_tokens = False
        self.register_buffer("grid", torch.tensor([_FORMAT, *spec.to_numbers()], dtype=torch.int32, device=device))
        # The three switches and the flags _STALE and _TOKENS: copies of the buffers are copies of all there is to know.
        self.register_buffer(
            "switches", torch.tensor([observing, True, False, False], dtype=torch.uint8, device=device)
        )

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
        self.run_deferred()
        setattr(self, f"_{name}", on)
        with torch.no_grad():
            self.switches[_SWITCHES.index(name)] = on

    def _set_stale(self, stale: bool) -> None:
        self._stale = stale
        self._write_flags()

    @property
    def has_tokens(self) -> bool:
        """Of a weight's quantizer: whether the layer's input had more than two axes when it was last observed."""
        return self._has_tokens

    @torch.no_grad()
    def note_tokens(self, on: bool) -> None:
        """Remembers, in training and calibration, whether the layer is given tokens."""
        if self._has_tokens != on and self.training and not self._frozen and is_eager(self.switches):
            self._has_tokens = on
            self._write_flags()

    def _write_flags(self) -> None:
        self.switches[len(_SWITCHES)] = _STALE * self._stale + _TOKENS * self._has_tokens

    def _read_switches(self) -> None:
        """The switches as the buffer has them, after it was loaded or copied from another model."""
        if _is_readable(self.switches):
            *on, flags = self.switches.tolist()
            self._observing, self._quantizing, self._frozen = map(bool, on)
            self._stale, self._has_tokens = bool(flags & _STALE), bool(flags & _TOKENS)

    def run_deferred(self) -> None:
        """Runs deferred work: range searches and one-time warnings."""
        self._tell()

    def ranks(self) -> Ranks:
        """The processes whose batches count as one."""
        return ranks_of(self.process_group) if self.sync else ALONE

    def train(self, mode: bool = True) -> "Quantizer":
        """Training mode, or evaluation mode, in which nothing is observed."""
        self._read_switches()
        self.run_deferred()
        super().train(mode)
        return self

    def settings(self) -> tuple[Any, ...]:
        """What decides how tensors are quantized, apart from what was observed or learned."""
        return type(self), self.spec, self._observing, self._quantizing, self._frozen

    def is_like(self, other: "Quantizer") -> bool:
        """Whether another quantizer has the same settings: shown the same tensors, both do the same."""
        return self.settings() == other.settings()

    def extra_repr(self) -> str:
        """The spec and what is switched on."""
        state = [name for name in _SWITCHES if getattr(self, name)] or ["off"]
        return f"{self.spec}; {', '.join(state)}"

    # --- forward ----------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        """`x`, observed and quantized as the switches say."""
        if torch.compiler.is_compiling():
            return self._run(x)
        try:
            check_data(x)
            return self._run(x)
        except (ValueError, TypeError, IndexError, RuntimeError) as error:
            self._refuse(error)

    def _run(self, x: Tensor) -> Tensor:
        """The forward pass; messages need not name the module."""
        raise NotImplementedError

    # --- messages ---------------------------------------------------------------------------------

    @property
    def is_initialized(self) -> bool:
        """Whether there is a learned scale, which must not be observed again."""
        return False

    @property
    def is_dynamic(self) -> bool:
        """Whether the scale is that of the tensor at hand, also in evaluation."""
        return False

    def qparams(self) -> QParams[Tensor]:
        """Scale (float32) and zero point (int32)."""
        raise NotImplementedError

    @property
    def where(self) -> str:
        """The module in a message."""
        return f"{type(self).__name__} at {self.path}" if self.path else type(self).__name__

    def _check_blocks(self, x: Tensor) -> tuple[int, ...]:
        """The shape of the scales for `x`; an error if there are scales of another shape."""
        shape = tuple(x.shape)
        try:
            find = blocks_of if torch.compiler.is_compiling() else _known_blocks_of
            blocks = find(shape, self.spec).parameters
        except TypeError:  # symbolic sizes cannot be hashed
            blocks = blocks_of(shape, self.spec).parameters
        if self._blocks is not None and blocks != self._blocks:
            raise ValueError(
                f"scales have the shape {self._blocks} here ({self.spec}), but a tensor of shape {shape} needs them in "
                f"the shape {blocks}."
            )
        return blocks

    def _refuse(self, error: Exception) -> NoReturn:
        """The same error with the path of the module."""
        if type(error) not in _ERRORS or str(error).startswith(self.where):
            raise error
        raise type(error)(f"{self.where}: {error}") from error

    # --- what was not finite ----------------------------------------------------------------------

    @property
    def nonfinite(self) -> int:
        """How many values were observed that were NaN or infinite, and left out of the range."""
        return int(self._nonfinite)

    def _count(self, found: Tensor) -> None:
        if torch.compiler.is_exporting() or is_transformed():
            return  # the counter is a tensor from outside, which must not be changed there
        if torch.compiler.is_compiling() or not is_memory(found):
            self._nonfinite.add_(found)
        elif found:
            self._nonfinite.add_(found)
            self._tell()

    def _tell(self) -> None:
        if not self._told and _is_readable(self._nonfinite) and self.nonfinite:
            self._told = True
            warnings.warn(
                f"{self.where} has observed {self.nonfinite} values that are NaN or infinite and left them out of the "
                "range. This is said once; `nonfinite` goes on counting.",
                RuntimeWarning,
                stacklevel=2,
            )

    # --- state ------------------------------------------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True) -> "Quantizer":
        # `model.half()` is about the data: scales stay float32.
        super()._apply(lambda t: _keep_dtype(fn, t), recurse)
        self._nonfinite = _keep_dtype(fn, self._nonfinite)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "process_group": None}  # which cannot leave its process

    def __copy__(self) -> "Quantizer":
        # A copy that shared its tensors would share a part of its state: the switches are in Python too.
        return copy.deepcopy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Quantizer":
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__getstate__(), memo), process_group=self.process_group)
        return new

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Forgets everything that was observed or learned; afterwards no buffer is as `to_empty` left it."""
        self.grid.copy_(torch.tensor([_FORMAT, *self.spec.to_numbers()], dtype=torch.int32))
        self._stale = self._has_tokens = False
        self.switches.copy_(torch.tensor([self._observing, self._quantizing, self._frozen, False]))
        self._nonfinite.zero_()
        self._told = False

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.run_deferred()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        if not any(key.startswith(prefix) for key in state_dict):
            # The state of a model without quantizers leaves them as they are; one with some has to have all.
            _load.absent(missing, [prefix + name for name in self._saved_names()])
            return
        _load.present(missing)
        problem = None
        is_torchs = prefix + "fake_quant_enabled" in state_dict  # the state of a module of torch.ao
        if is_torchs:
            old = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
            try:
                state_dict = {prefix + key: value for key, value in self._from_torch_ao(old).items()}
            except ValueError as error:
                problem = str(error)
        problem = problem or self._misfit(state_dict, prefix)
        if problem is None and not is_torchs:
            problem = self._invalid(state_dict, prefix)
        if problem is not None:
            errors.append(f"{prefix[:-1] or self.where}: {problem}")
            return
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)
        self._restore_dtypes_and_places()
        self._read_switches()
        self._loaded()

    def _loaded(self) -> None:
        """Called when a state was loaded: parameters and buffers are new."""

    def _restore_dtypes_and_places(self) -> None:
        """After `assign=True` tensors have the state's dtype, and what is not in a state is where it was."""
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

    def _from_torch_ao(self, old: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state of a module of torch.ao in the names and shapes of this one."""
        raise ValueError(f"the state is of torch.ao, which has nothing like {type(self).__name__}.")

    def _misfit(self, state_dict: Any, prefix: str) -> str | None:
        """Why a state cannot be loaded, if it cannot."""
        saved = state_dict.get(prefix + "grid")
        if saved is not None:
            try:
                version, *numbers = saved.tolist()
                if version != _FORMAT:
                    return f"the state is of format {version}, this version reads format {_FORMAT}."
                spec = QuantSpec.from_numbers(numbers)
            except (ValueError, TypeError, IndexError):
                return f"`grid` is not an encoded QuantSpec: {saved}."
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
            if value is not None and loaded is not None and _kind(loaded) != _kind(value):
                return (
                    f"`{name}` holds {str(loaded.dtype)[6:]} in the state, and {str(value.dtype)[6:]} here.\n"
                    "The state is not one of this quantizer, or was converted after it was saved."
                )
        return None

    def _saved_names(self) -> list[str]:
        """The names of what is saved."""
        saved = {n: v for n, v in self._buffers.items() if n not in self._non_persistent_buffers_set}
        return [name for name, value in {**self._parameters, **saved}.items() if value is not None]

    def _invalid(self, state_dict: Any, prefix: str) -> str | None:
        """What is wrong with the scales and zero points of a state, if anything is."""
        scale = state_dict.get(prefix + self._scale_name)
        if scale is None or not _is_readable(scale):
            return None
        scale = whole(scale)
        # NaN: nothing was observed yet.
        bad = ~((scale > 0) & scale.isfinite() | scale.isnan())
        if bool(bad.any()):
            return (
                f"`{self._scale_name}` is {_first(scale, bad)} in the state, but a scale is finite and greater than 0, "
                "or NaN where nothing was observed.\nThe state is damaged: use another, or calibrate anew."
            )
        zero_point = state_dict.get(prefix + "zero_point")
        if zero_point is None or not _is_readable(zero_point):
            return None
        low, high = (0, 0) if self.spec.symmetric else (self.spec.qmin, self.spec.qmax)
        bad = ((zero_point < low) | (zero_point > high)) & scale.isfinite().to(zero_point.device)
        if bool(bad.any()):
            return (
                f"`zero_point` is {_first(zero_point, bad)} in the state, but it must be between {low} and {high} "
                f"({self.spec}).\nThe state is damaged: use another, or calibrate anew."
            )
        return None


class _Load(threading.local):
    """Which quantizers a call of `load_state_dict` has found in a state so far.

    A module is shown its own part of the state only, but the list of missing keys is one for all modules:
    it tells one call from another.
    """

    def __init__(self) -> None:
        self._missing: Any = None
        self._found = False
        self._absent: list[str] = []

    def absent(self, missing: list[str], keys: list[str]) -> None:
        """A quantizer of which the state has nothing."""
        self._start(missing)
        (missing if self._found else self._absent).extend(keys)

    def present(self, missing: list[str]) -> None:
        """A quantizer of which the state has something: those that were absent before are missing."""
        self._start(missing)
        self._found = True
        missing.extend(self._absent)
        self._absent = []

    def _start(self, missing: list[str]) -> None:
        if self._missing is not missing:
            self._missing, self._found, self._absent = missing, False, []


_load = _Load()


def _kind(tensor: Tensor) -> str:
    if tensor.is_floating_point():
        return "floats"
    return "complex numbers" if tensor.is_complex() else "integers"


def _first(values: Tensor, bad: Tensor) -> str:
    """The first bad value, and where it is if there are several."""
    index = int(bad.flatten().int().argmax())
    value = values.flatten()[index].item()
    return f"{value:g}" if values.numel() == 1 else f"{value:g} at index {index}"


def _is_readable(tensor: Tensor) -> bool:
    """Whether its values are there to be looked at."""
    return not tensor.is_meta and active_fake_mode() is None


def _keep_dtype(fn: Any, tensor: Tensor) -> Tensor:
    moved = fn(tensor)
    return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)


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
            "found for every tensor (Dynamic)."
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


def switch_quantizers(
    model: nn.Module,
    *,
    observing: bool | None = None,
    quantizing: bool | None = None,
    frozen: bool | None = None,
) -> None:
    """Sets the switches of every quantizer of a model; None leaves one as it is.

    Learned scales that are initialized have nothing to observe: `observing=True` is not for them.

    >>> from fakequant import nn as fqnn, presets
    >>> model = nn.Sequential(nn.Linear(4, 4), fqnn.FakeQuantize(presets.uint8()))
    >>> switch_quantizers(model, frozen=True)
    >>> model[1]
    FakeQuantize(uint8, per tensor; observing, quantizing, frozen; MovingAverage(constant=0.01))
    """
    for _, module in quantizers(model):
        for name, on in zip(_SWITCHES, (observing, quantizing, frozen), strict=True):
            if on is None or (name == "observing" and on and module.is_initialized):
                continue
            setattr(module, name, on)
