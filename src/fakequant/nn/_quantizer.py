"""`Quantizer`: the base of all quantizer modules."""

import warnings
import weakref
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.types import Device

from fakequant._backends.blocks import blocks_of
from fakequant._backends.torch.plain_memory import is_memory, is_transformed
from fakequant._backends.torch.tensor_checks import check_data
from fakequant._backends.torch.tensor_functions import fake_quantize
from fakequant._backends.torch.torch_private import without_modes
from fakequant._runtimes.rounding import Rounding
from fakequant.nn._quantizer_state import SWITCHES, QuantizerState, is_readable
from fakequant.nn._recomputation import AHEAD, current_replay, note, runs, watch_checkpoints
from fakequant.observers._ranks import ALONE, Ranks, ranks_of
from fakequant.qparams import QParams
from fakequant.spec import QuantSpec


def scale_shape(spec: QuantSpec, shape: tuple[int | None, ...] | None) -> tuple[int, ...] | None:
    """Returns the shape of the scales for tensors of `shape`, or None if it depends on each tensor.

    In `shape`, None stands for any length.

    >>> scale_shape(QuantSpec(axis=1), (None, 64, None, None))
    (64,)
    """
    if spec.granularity == "token" or (spec.has_block_scales and (shape is None or None in shape)):
        return None
    if spec.axis is None:
        return ()
    if shape is None:
        raise ValueError(
            f"A quantizer per {spec.granularity} must know the shape of its scales: "
            "pass `shape`, the shape of the tensors it will see.\n"
            f"Use e.g. shape=weight.shape, or None for lengths that vary: shape=(None, 64, None, None)."
        )
    lengths = tuple(0 if n is None else n for n in shape)
    blocks = blocks_of(lengths, spec).parameters
    if 0 in blocks:
        raise ValueError(
            f"The scales of a quantizer per {spec.granularity} on axis {spec.axis} have no fixed shape for tensors of "
            f"shape {tuple(shape)}.\nGive the lengths of the axes that have several scales, or use `spec.per_token()` "
            "and ranges computed for every tensor (Dynamic)."
        )
    return blocks


# Values that decide how a quantizer behaves, for comparing two quantizers. Subclasses append theirs.
Settings: TypeAlias = tuple[Any, ...]

# The part of a step that rounding errors of floats do not reach.
_SMALL_PART = 1e-3

# Errors of these types get the module's path; other types may need more than a message to be built.
_ERRORS = (ValueError, TypeError, IndexError, RuntimeError, NotImplementedError)

# Quantizers see few different shapes.
_cached_blocks_of = lru_cache(maxsize=1024)(blocks_of)


class LastTensor(NamedTuple):
    """What a quantizer knows about the tensor that it has quantized last. Operators that save its codes ask for it."""

    # Whether the tensor was checked and held neither NaN nor infinity.
    only_finite: bool
    # The quantized tensor, and its scale and zero point, if the quantizer has stored none for it.
    result: "weakref.ref[Tensor] | None" = None
    qparams: QParams[Tensor] | None = None


ONLY_FINITE = LastTensor(True)


class Quantizer(QuantizerState):
    """A module that quantizes one tensor of a model.

    It has three switches, which can be read and set and are saved with the state:

        observing     tensors are observed in training mode
        quantizing    tensors are quantized; if off, they are returned unchanged
        frozen        scale and zero point are constant, whatever the other switches say

    Scales per token are always computed from the current tensor.

    The switches are Python bools: a compiled model is compiled once for each combination that occurs.
    """

    # Whether results are (codes - zero point) * scale. A class of your own whose grid has other steps sets it to False:
    # then nothing takes results for codes, `convert` stores weights as floats, and activations cannot be converted.
    has_equal_steps = True
    # The path of the module in its model, for messages. `name_quantizers(model)` sets it.
    path: str | None
    # The shape of the scales, or None if it depends on each tensor.
    _blocks: tuple[int, ...] | None
    # How the runtime quantizes floats. None if it follows the rule of ONNX. `prepare` sets it for the model's
    # inputs, for fractions such as results of softmax, and for scales per token.
    rounding: Rounding | None = None
    # What is known about the last tensor. A thread that finds the tensor of another thread here finds no scales.
    _last: LastTensor | None

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
        """Initializes the switches and the buffer with the spec. `FakeQuantize` documents the arguments."""
        if not isinstance(spec, QuantSpec):
            raise TypeError(
                f"`spec` must be a QuantSpec, got {type(spec).__name__}.\nUse e.g. fakequant.presets.uint8()."
            )
        super().__init__(spec, observing=observing, device=device)
        watch_checkpoints()
        self.path = path
        self.sync = sync
        self.process_group = process_group
        self._last = None

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
    def is_own_class(self) -> bool:
        """Whether the class is not one of fakequant, so that what it returns must be checked where it is exported."""
        return type(self).__module__.partition(".")[0] != __name__.partition(".")[0]

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

    def set_qparams(self, scale: Tensor, zero_point: Tensor) -> None:
        """Sets scale and zero point, one per block."""
        raise NotImplementedError

    def _qparams_for(self, y: Tensor) -> QParams[Tensor] | None:
        """Returns scale and zero point of `y`, a result of this quantizer that was just computed, or None if unknown.

        They are tensors that later calls do not change.
        """
        if self._blocks is not None:
            return QParams(self.scale.clone(), self.zero_point.clone())
        return self.last_qparams(y)

    def last_qparams(self, y: Tensor) -> QParams[Tensor] | None:
        """Returns scale and zero point of `y` if it is the last result and they are not stored, otherwise None."""
        last = self._last  # read once: another thread may replace it
        if last is None or last.result is None:
            return None
        return last.qparams if last.result() is y else None

    def _forget_last(self, result: "weakref.ref[Tensor]") -> None:
        if self._last is not None and self._last.result is result:
            self._last = None

    @property
    def saw_only_finite(self) -> bool:
        """Whether the last tensor was checked and held neither NaN nor infinity."""
        return self._last is not None and self._last.only_finite

    def without_rounding_errors(self, y: Tensor) -> Tensor | None:
        """Returns a result of this quantizer exactly on the grid. None if it is further from it than rounding explains.

        x + (y - x).detach(), by which classes of users choose their gradient, is y only up to rounding.
        """
        scale, zero_point = self.qparams()
        on_grid = fake_quantize(y, scale, 0 if self.spec.symmetric else zero_point, self.spec)
        return on_grid if bool(((y - on_grid).abs() <= _SMALL_PART * scale.max()).all()) else None

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

    def run_deferred(self) -> None:
        """Runs deferred work: range searches and one-time warnings."""
        self._warn_of_nonfinite()
