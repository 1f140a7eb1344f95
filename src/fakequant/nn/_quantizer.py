"""`Quantizer`: the base of all quantizer modules."""

import copy
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.types import Device

from fakequant._backends.blocks import blocks_of
from fakequant._backends.torch import tensor_functions
from fakequant._backends.torch.plain_memory import is_memory, is_transformed
from fakequant._backends.torch.process_ranks import ALONE, Ranks, ranks_of
from fakequant._backends.torch.tensor_checks import check_data
from fakequant._backends.torch.torch_private import without_modes
from fakequant.nn._recomputation import AHEAD, current_replay, note, runs, watch_checkpoints
from fakequant.nn._state_checks import (
    StateDict,
    encoded_spec,
    find_bad_qparams,
    find_mismatch,
    is_readable,
    missing_quantizers,
)
from fakequant.nn._switches import SWITCHES, Switched
from fakequant.qparams import QParams
from fakequant.spec import QuantSpec

# Values that decide how a quantizer behaves, to be compared with those of another. Subclasses append theirs.
Settings: TypeAlias = tuple[Any, ...]

# Returns a tensor if no mask is requested.
fake_quantize: Callable[..., Tensor] = tensor_functions.fake_quantize

# Errors of these types get the module's path; other types may need more than a message to be built.
_ERRORS = (ValueError, TypeError, IndexError, RuntimeError, NotImplementedError)

# Quantizers see few different shapes.
_cached_blocks_of = lru_cache(maxsize=1024)(blocks_of)


class Quantizer(Switched):
    """A module that quantizes one tensor of a model.

    It has three switches, which can be read and set and are saved with the state:

        observing     tensors are observed in training mode
        quantizing    tensors are quantized; if off, they are returned unchanged
        frozen        scale and zero point are constant, whatever the other switches say

    Scales per token are always computed from the current tensor.

    The switches are Python bools: a compiled model is compiled once for each combination that occurs.
    """

    spec: QuantSpec
    # The path of the module in its model, for messages. `name_quantizers(model)` sets it.
    path: str | None
    grid: Tensor
    # The shape of the scales, or None if it depends on each tensor.
    _blocks: tuple[int, ...] | None
    # The name of the scale in a state.
    _scale_name = "scale"
    # How the runtime rounds at ties: a key of `runtime_rounding.RULES`. None if it follows the rule of ONNX.
    # `prepare` sets it for quantizers of the model's inputs.
    rounding: str | None = None

    if TYPE_CHECKING:  # nn.Module's accepts and returns anything

        def __call__(self, x: Tensor) -> Tensor:
            """Calls `forward` and the hooks."""

        # Buffers of `FakeQuantize`, properties of quantizers with a learned scale.
        @property
        def scale(self) -> Tensor:
            """The scale, float32."""

        @property
        def zero_point(self) -> Tensor:
            """The zero point, int32."""

    def __init__(
        self,
        spec: QuantSpec,
        *,
        observing: bool,
        sync: bool,
        process_group: "dist.ProcessGroup | None",
        path: str | None,
        device: Device,
    ) -> None:
        """Initializes the switches and the buffer with the spec.

        Args:
            spec: The grid.
            observing: The first value of the switch `observing`.
            sync: Whether the batches of all ranks count as one.
            process_group: The ranks that do; None for all.
            path: The path of the module in its model, for messages.
            device: The device of the buffers.
        """
        super().__init__()
        watch_checkpoints()
        if not isinstance(spec, QuantSpec):
            raise TypeError(
                f"`spec` must be a QuantSpec, got {type(spec).__name__}.\nUse e.g. fakequant.presets.uint8()."
            )
        self.spec = spec
        self.path = path
        self.sync = sync
        self.process_group = process_group
        # Not a buffer: every rank counts the values it has seen itself.
        self._nonfinite = torch.zeros((), dtype=torch.int64, device=device)
        # Whether the warning about non-finite values was shown.
        self._told = False
        # Whether the last tensor was checked and held neither NaN nor infinity.
        self.saw_only_finite = False
        self.register_buffer("grid", torch.tensor(encoded_spec(spec), dtype=torch.int32, device=device))
        self._add_switches(observing=observing, device=device)

    # --- forward ----------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        """Returns `x`, observed and quantized according to the switches."""
        if torch.compiler.is_compiling():
            if torch.onnx.is_in_onnx_export():
                raise RuntimeError(f"{self.where} has no ONNX operator.\nUse fakequant.export_onnx(model, path, x).")
            return self._run(x)
        try:
            check_data(x)
            return self._run_in_checkpoint(x) if runs.stack else self._run(x)
        except (ValueError, TypeError, IndexError, RuntimeError) as error:
            self._raise_with_path(error)

    def _run(self, x: Tensor) -> Tensor:
        """The forward pass of checked data. `forward` adds the path of the module to error messages."""
        raise NotImplementedError

    def _observes_now(self) -> bool:
        """Returns True if a call changes what is stored about the tensors seen."""
        return False

    def _check_blocks(self, x: Tensor) -> tuple[int, ...]:
        """Returns the shape of the scales for `x`. Raises ValueError if the scales have another shape."""
        shape = tuple(x.shape)
        try:
            find = blocks_of if torch.compiler.is_compiling() else _cached_blocks_of
            blocks = find(shape, self.spec).parameters
        except TypeError:  # symbolic sizes cannot be hashed
            blocks = blocks_of(shape, self.spec).parameters
        if self._blocks is not None and blocks != self._blocks:
            raise ValueError(
                f"scales have shape {self._blocks} here ({self.spec}), but a tensor of shape {shape} needs scales of "
                f"shape {blocks}."
            )
        return blocks

    def ranks(self) -> Ranks:
        """Returns the processes whose batches count as one."""
        return ranks_of(self.process_group) if self.sync else ALONE

    # --- in checkpoints ---------------------------------------------------------------------------

    def _run_in_checkpoint(self, x: Tensor) -> Tensor:
        """Runs inside `torch.utils.checkpoint`. What is computed again is quantized as before, and not observed."""
        if is_transformed() or not self._observes_now():
            return self._run(x)
        replay = current_replay()
        if replay is None:
            y = self._run_first(x)
            with without_modes():
                used = self._used()
        else:
            used = replay.next(self)
            if used is AHEAD:
                return x
            with without_modes():
                replay.until_the_end(self, self._begin_replay)
            y = self._run_again(x, used)
        note(self, used)
        return y

    def _run_first(self, x: Tensor) -> Tensor:
        """Runs in the forward pass."""
        return self._run(x)

    def _used(self) -> Any:
        """Returns everything that `_run_again` needs to return what `_run_first` has just returned."""
        return None

    def _begin_replay(self) -> Any:
        """Called before the first `_run_again` in a checkpoint. Returns what `end_replay` puts back."""
        return None

    def _run_again(self, x: Tensor, used: Any) -> Tensor:
        """Does what a call of `_run` has done, but observes nothing."""
        raise NotImplementedError

    def end_replay(self, before: Any) -> None:
        """Puts back what `_run_again` has changed."""

    # --- properties -------------------------------------------------------------------------------

    @property
    def is_initialized(self) -> bool:
        """Whether the scale is learned and initialized. Such a scale must not be observed again."""
        return False

    @property
    def is_dynamic(self) -> bool:
        """Whether the scale is computed from the current tensor, in evaluation too."""
        return False

    def qparams(self) -> QParams[Tensor]:
        """Returns scale (float32) and zero point (int32)."""
        raise NotImplementedError

    def _qparams_for(self, y: Tensor) -> QParams[Tensor] | None:
        """Returns scale and zero point of `y`, a result of this quantizer that was just computed, or None if unknown.

        They are tensors that later calls do not change.
        """
        return None if self._blocks is None else QParams(self.scale.clone(), self.zero_point.clone())

    def settings(self) -> Settings:
        """Returns everything that decides how tensors are quantized, except what was observed or learned."""
        return type(self), self.spec, self._observing, self._quantizing, self._frozen

    def is_like(self, other: "Quantizer") -> bool:
        """Returns True if `other` has the same settings, so that both do the same with the same tensors."""
        return self.settings() == other.settings()

    def extra_repr(self) -> str:
        """Returns the spec and the switches that are on."""
        state = [name for name in SWITCHES if getattr(self, name)] or ["off"]
        return f"{self.spec}; {', '.join(state)}"

    # --- messages ---------------------------------------------------------------------------------

    @property
    def where(self) -> str:
        """The class name and the path, for messages."""
        return f"{type(self).__name__} at {self.path}" if self.path else type(self).__name__

    def _raise_with_path(self, error: Exception) -> NoReturn:
        """Raises the same error with the path of the module in its message."""
        if type(error) not in _ERRORS or str(error).startswith(self.where):
            raise error
        raise type(error)(f"{self.where}: {error}") from error

    @property
    def nonfinite(self) -> int:
        """The number of observed values that were NaN or infinite and were left out of the range."""
        return int(self._nonfinite)

    def _count_nonfinite(self, number: Tensor) -> None:
        if torch.compiler.is_exporting() or is_transformed():
            return  # the counter must not be changed there
        if torch.compiler.is_compiling() or not is_memory(number):
            self._nonfinite.add_(number)
        elif number:
            self._nonfinite.add_(number)
            self._warn_of_nonfinite()

    def _warn_of_nonfinite(self) -> None:
        if not self._told and is_readable(self._nonfinite) and self.nonfinite:
            self._told = True
            warnings.warn(
                f"{self.where} has observed {self.nonfinite} values that are NaN or infinite and left them out of the "
                "range. This warning is shown once; `nonfinite` keeps counting.",
                RuntimeWarning,
                stacklevel=2,
            )

    # --- modes and copies -------------------------------------------------------------------------

    def run_deferred(self) -> None:
        """Runs deferred work: range searches and one-time warnings."""
        self._warn_of_nonfinite()

    def train(self, mode: bool = True) -> "Quantizer":
        """Sets training mode, or evaluation mode, in which static quantizers do not observe."""
        self._read_switches()
        self.run_deferred()
        super().train(mode)
        return self

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Forgets everything that was observed or learned. Initializes all buffers, also after `to_empty`."""
        self.grid.copy_(torch.tensor(encoded_spec(self.spec), dtype=torch.int32))
        self._reset_flags()
        self._nonfinite.zero_()
        self._told = False

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Quantizer":
        # `model.half()` is meant for the data: scales stay float32.
        apply: Callable[[Callable[[Tensor], Tensor], bool], nn.Module] = super()._apply
        apply(lambda t: _with_same_dtype(fn, t), recurse)
        self._nonfinite = _with_same_dtype(fn, self._nonfinite)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "process_group": None}  # which cannot leave its process

    def __setstate__(self, state: dict[str, Any]) -> None:
        watch_checkpoints()  # in a process that has only loaded quantizers
        super().__setstate__(state)  # type: ignore[no-untyped-call]

    def __copy__(self) -> "Quantizer":
        # A shallow copy would share the buffers but not the switches in Python.
        return copy.deepcopy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Quantizer":
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
