"""`FakeQuantize`: a quantizer whose scale comes from an observer."""

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.types import Device

from fakequant._backends.blocks import group_length, has_short_block
from fakequant._backends.kernel_enums import NUMERICS, SCALE_RULES, scale_rule_name
from fakequant._backends.torch import compiled_nodes, gradients, tensor_functions
from fakequant._backends.torch.operator_calls import ops
from fakequant._backends.torch.plain_memory import is_eager
from fakequant._backends.torch.process_ranks import ALONE, Ranks
from fakequant._backends.torch.runtime_rounding import moved_from_ties, xnnpack_tokens
from fakequant._backends.torch.tensor_checks import block_shape, check_device, kernel_numerics
from fakequant._backends.torch.tensor_kernels import Observation, Observed, updated_range
from fakequant._backends.torch.torch_private import innermost_transform
from fakequant.functional import UPDATES, Gradient, check_gradient
from fakequant.nn._quantizer import Quantizer, Settings, fake_quantize
from fakequant.nn._recomputation import as_first, current_replay, in_compiled_code, runs
from fakequant.nn._scale_shape import scale_shape
from fakequant.nn._state_checks import StateDict
from fakequant.nn._torch_ao_states import check_scale, observed_tensors
from fakequant.observers._dynamic import Dynamic
from fakequant.observers._moving_average import MovingAverage
from fakequant.observers._observer import Observer, State
from fakequant.qparams import EPS, QParams, check_eps
from fakequant.spec import QuantSpec


class FakeQuantize(Quantizer):
    """Observes a tensor, chooses scale and zero point, and fake-quantizes with them.

        lo, hi             = observer.range of the tensors seen
        scale, zero_point  = choose_qparams(lo, hi, spec)
        y                  = fake_quantize(x, scale, zero_point, spec)

    In training mode every call takes all three steps; `MinMax`, `MovingAverage` and `Dynamic` need one pass over
    the data. In evaluation mode a call takes only the last step, unless the observer is dynamic (`Dynamic`).
    Quantizing before anything was observed is an error, as there is no scale.

    Data may be float32, float64, bfloat16 or float16. Scales are always float32.

    Under a transform of `torch.func`, and in a program of `torch.export` for evaluation, ranges are computed in the
    same way, but nothing is stored or counted. Under `vmap` every example has its own range.

    Args:
        spec: The grid.
        observer: Finds the range. The default is `Dynamic` for scales per token and for symmetric specs with an
            axis, as weights have, and `MovingAverage` for all others.
        shape: The shape of the tensors, with None for lengths that vary. Required if there is a scale per channel
            or group.
        gradient: "clipped" is 0 where the value was clipped and keeps 1 bit per element. "pass" keeps nothing.
            "auto" is "pass" while the range is that of the current tensor (`Dynamic`), which clips almost nothing,
            and "clipped" otherwise. The default is "auto" for block scales (MX, NVFP4), "clipped" for all others.
        eps: The smallest scale.
        sync: Whether ranges are those of the batches of all ranks together, in the same step, if torch.distributed
            is initialized.
        process_group: The ranks to synchronize; None for all.
        path: The path of the module in its model, for messages.
        device: The device of the buffers.

    >>> from fakequant import presets
    >>> fq = FakeQuantize(presets.uint8())
    >>> fq(torch.tensor([-1.0, 0.3, 4.1]))
    tensor([-1.0000,  0.3000,  4.1000])
    >>> fq.eval()(torch.tensor([-9.0, 0.301, 9.0]))
    tensor([-1.0000,  0.3000,  4.1000])
    >>> fq
    FakeQuantize(uint8, per tensor; observing, quantizing; MovingAverage(constant=0.01))
    """

    scale: Tensor
    zero_point: Tensor
    running_min: Tensor
    running_max: Tensor
    # The number of tensors seen within `averaging_evenly`.
    _tensors: int | None = None
    # The last result of a quantizer that stores no scales, and its scale and zero point. A thread that finds the result
    # of another thread here finds no scales.
    _last: tuple["weakref.ref[Tensor]", Tensor, Tensor] | None = None

    def __init__(
        self,
        spec: QuantSpec,
        observer: Observer | None = None,
        *,
        shape: tuple[int | None, ...] | None = None,
        gradient: Gradient | Literal["auto"] | None = None,
        eps: float = EPS,
        sync: bool = True,
        process_group: "dist.ProcessGroup | None" = None,
        path: str | None = None,
        device: Device = None,
    ) -> None:
        """Makes the buffers. The documentation of the class describes the arguments."""
        super().__init__(spec, observing=True, sync=sync, process_group=process_group, path=path, device=device)
        if observer is None:
            is_activation = spec.granularity == "tensor" or not (spec.symmetric or spec.granularity == "token")
            observer = MovingAverage() if is_activation else Dynamic()
        if not isinstance(observer, Observer):
            raise TypeError(f"`observer` must be an Observer, such as MovingAverage(), got {observer!r}.")
        if (spec.granularity == "token" or spec.has_block_scales) and not isinstance(observer, Dynamic):
            what = "Ranges per token" if spec.granularity == "token" else f"Scales of the format {spec.scale_format!r}"
            raise ValueError(
                f"{what} are computed for each tensor, but {observer} keeps a range for several.\n"
                "Use observer=Dynamic()."
            )
        if gradient is None:
            gradient = "auto" if spec.has_block_scales else "clipped"
        if gradient != "auto":
            check_gradient(gradient)
        check_eps(eps)
        self.gradient = gradient
        # The gradients used while the range follows each tensor, and while it is fixed.
        self._following: Gradient = gradient if gradient != "auto" else "pass" if observer.dynamic else "clipped"
        self._fixed: Gradient = "clipped" if gradient == "auto" else gradient
        self.eps = float(eps)
        self._set_observer(observer)
        blocks = scale_shape(spec, shape)
        self._blocks = blocks
        self._names: tuple[str, ...] = ()
        if blocks is None:
            self.register_buffer("scale", None)
            self.register_buffer("zero_point", None)
        else:
            state = observer.init(blocks, device)
            self._names = tuple(state)
            for name, value in state.items():
                self.register_buffer(name, value)
            # NaN until there is a range, so that using it by mistake shows in the results.
            self.register_buffer("scale", torch.full(blocks, torch.nan, dtype=torch.float32, device=device))
            self.register_buffer("zero_point", torch.zeros(blocks, dtype=torch.int32, device=device))
            if not observer.needs_data:
                self.refresh()

    def _set_observer(self, observer: Observer) -> None:
        """Sets an observer that can continue with the current state."""
        self.observer = observer
        spec, numerics = self.spec, kernel_numerics(self.spec)
        low, high = spec.qmin, spec.qmax
        # None if the kernel cannot update the range as this observer does.
        self._in_kernel = how = observer._in_kernel
        if how is not None:
            rule = scale_rule_name(spec)
            self._options = (low, high, numerics, spec.symmetric, rule, how.update, how.constant, self.eps)
            self._kernel_options = (
                low, high, NUMERICS[numerics], spec.symmetric, SCALE_RULES[rule], UPDATES[how.update], how.constant,
                self.eps,
            )  # fmt: skip

    @contextmanager
    def averaging_evenly(self) -> Iterator[None]:
        """Within this context, a moving average is the mean over the tensors seen in it, whatever its constant."""
        if not isinstance(self.observer, MovingAverage):
            yield
            return
        before, self._tensors = self.observer, 0
        try:
            yield
        finally:
            self._tensors = None
            self._set_observer(before)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Forgets everything that was observed."""
        super().reset_parameters()
        if self._blocks is not None:
            self._forget()
            self.scale.fill_(torch.nan)
            self.zero_point.zero_()
            if not self.observer.needs_data:
                self.refresh()

    def _forget(self) -> None:
        assert self._blocks is not None
        for name, value in self.observer.init(self._blocks, self.scale.device).items():
            getattr(self, name).copy_(value)

    # --- forward ----------------------------------------------------------------------------------

    def _run(self, x: Tensor) -> Tensor:
        if self._blocks is None and self.rounding is not None:
            return xnnpack_tokens(x) if self._quantizing else x
        if not self._observes_now():
            return self._quantize(x, self._fixed) if self._quantizing else x
        # In evaluation a rank may run by itself; waiting for the other ranks would block.
        ranks = self.ranks() if self.training else ALONE
        if x.numel() == 0 and not ranks.several and not self.observer.dynamic:
            return x
        if self._must_be_pure():
            return self._run_purely(x, ranks)
        if not self._quantizing:
            self._observe(x, ranks)
            return x
        if self._in_kernel is None and self.observer.dynamic:
            return self._quantize_by_observer(x, ranks)
        if self._blocks is None or not self.training:
            return self._quantize_with_own_range(x)
        if ranks.several or self._in_kernel is None or self.rounding is not None:
            self._observe(x, ranks)
            return self._quantize(x, self._following)
        return self._observe_and_quantize(x)

    @property
    def is_dynamic(self) -> bool:
        """Whether the scale is computed from the current tensor, in evaluation too."""
        return self.observer.dynamic and (not self._frozen or self._blocks is None)

    def _observes_now(self) -> bool:
        """Returns True if the current tensor has an influence on its scale."""
        if self._blocks is None:
            return True
        if not self._observing or self._frozen or not self.observer.needs_data:
            return False
        if in_compiled_code.recomputes and torch.compiler.is_compiling() and not self.observer.dynamic:
            return False
        return self.training or self.observer.dynamic

    # Used in checkpoints. Buffers are replaced rather than changed, because graphs may have saved them.

    def _run_first(self, x: Tensor) -> Tensor:
        if is_eager(x) or self.observer.dynamic:
            return self._run(x)
        # A mode may compare the operations that run again with the first ones. Quantizing is then an operation of its
        # own, because observing does not run again.
        in_kernel, self._in_kernel = self._in_kernel, None
        try:
            return self._run(x)
        finally:
            self._in_kernel = in_kernel

    def _follows_own_tensors(self) -> bool:
        """Returns True if the scale depends on the current tensor of this rank only."""
        return self.observer.dynamic and not (self.training and self.ranks().several)

    def _used(self) -> tuple[Tensor, Tensor] | None:
        return None if self._follows_own_tensors() else (self.scale.clone(), self.zero_point.clone())

    def _begin_replay(self) -> dict[str, Any]:
        names = (*self._names, "scale", "zero_point")
        buffers = {name: self._buffers[name] for name in names}
        before = {"buffers": buffers, "_nonfinite": self._nonfinite, "_stale": self._stale}
        if self._follows_own_tensors():
            self._buffers.update({name: None if value is None else value.clone() for name, value in buffers.items()})
            self._nonfinite = self._nonfinite.clone()
        return before

    def _run_again(self, x: Tensor, used: tuple[Tensor, Tensor] | None) -> Tensor:
        if used is None:
            return self._run(x)
        self._use(*used)
        if not self._quantizing or (x.numel() == 0 and not self.ranks().several):
            return x
        return self._quantize(x, self._following)

    def _use(self, scale: Tensor, zero_point: Tensor) -> None:
        self._buffers["scale"], self._buffers["zero_point"] = scale, zero_point
        self._stale = False

    def restore_scale(self) -> None:
        """In a checkpoint that runs again, sets scale and zero point to their values here in the first run."""
        if not runs.stack or self._blocks is None:
            return
        if self._stale:
            self.refresh()
        first = as_first((self, "scale"), self.scale, self.zero_point)
        replay = current_replay()
        if replay is not None:
            replay.until_the_end(self, self._begin_replay)
            self._use(first[0], first[1])

    def end_replay(self, before: dict[str, Any]) -> None:
        """Puts back the buffers, the flag and the counter."""
        self._buffers.update(before["buffers"])
        self._nonfinite, self._stale = before["_nonfinite"], before["_stale"]

    def _quantize(self, x: Tensor, gradient: Gradient) -> Tensor:
        """Quantizes with the stored scale and zero point."""
        if self._stale:
            self.refresh()
        self.saw_only_finite = False
        zero_point = 0 if self.spec.symmetric else self.zero_point
        if self.rounding is not None:
            x = moved_from_ties(x, self.scale, self.zero_point, self.spec, self.rounding)
        if torch.compiler.is_compiling():
            return fake_quantize(x, self.scale, zero_point, self.spec, gradient=gradient)
        if self.spec.numerics == "torch":  # which accepts any scale, NaN too
            self._require_range()
        try:
            y = compiled_nodes.fake_quantize(x, self.scale, zero_point, self.spec, gradient == "clipped")
            if y is not None:
                return y
            return fake_quantize(x, self.scale, zero_point, self.spec, gradient=gradient)
        except ValueError:
            self._require_range()
            raise

    def _observe_and_quantize(self, x: Tensor) -> Tensor:
        """Observes and quantizes in one pass, with an observer that the kernel implements."""
        return self._fused(x, self.running_min, self.running_max, self.scale, self.zero_point)

    def _quantize_with_own_range(self, x: Tensor) -> Tensor:
        """Quantizes with the range of `x` alone.

        The range is computed in new tensors, not in the buffers: several threads may evaluate one model.
        """
        blocks = self._check_blocks(x)
        lo = torch.full(blocks, torch.inf, dtype=torch.float32, device=x.device)
        scale, zero_point = torch.empty_like(lo), torch.empty_like(lo, dtype=torch.int32)
        hi = -lo
        y = self._fused(x, lo, hi, scale, zero_point)
        if self._blocks is None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # Not by `setattr`, which is slow in a module.
            self.__dict__["_last"] = weakref.ref(y, self._forget_last), scale, zero_point
        if self._blocks is not None:
            buffers = (self.running_min, self.running_max, self.scale, self.zero_point)
            for buffer, value in zip(buffers, (lo, hi, scale, zero_point), strict=True):
                buffer.copy_(value)
        return y

    def _forget_last(self, result: "weakref.ref[Tensor]") -> None:
        if self._last is not None and self._last[0] is result:
            self._last = None

    def _qparams_for(self, y: Tensor) -> QParams[Tensor] | None:
        replay = current_replay() if runs.stack else None
        if replay is not None and self not in replay.changed and self._observes_now():
            return None  # it has quantized `y` before the checkpoint, and may have observed other tensors since
        last = self._last  # read once: another thread may replace it
        if self._blocks is not None or last is None:
            return super()._qparams_for(y)
        return QParams(*last[1:]) if last[0]() is y else None

    def _quantize_by_observer(self, x: Tensor, ranks: Ranks, *, remember: bool = True) -> Tensor:
        """Quantizes with the range that the observer finds in `x` alone: 0 to 0 if there is no finite value."""
        state = self.observer.init(self._check_blocks(x), x.device)
        nonfinite = self.observer.update(state, x.detach(), self.spec, ranks)
        lo, hi = self.observer.range(state, self.spec)
        scale, zero_point = self._choose(lo, hi)
        self.saw_only_finite = False
        if remember:
            self._count_nonfinite(nonfinite)
            for name, value in {**state, "scale": scale, "zero_point": zero_point}.items():
                getattr(self, name).copy_(value)
        return fake_quantize(x, scale, zero_point, self.spec, gradient=self._following)

    def _choose(self, lo: Tensor, hi: Tensor) -> QParams[Tensor]:
        """Chooses scale and zero point. An empty range (lo > hi) counts as 0 to 0."""
        seen = lo <= hi
        return tensor_functions.choose_qparams(
            torch.where(seen, lo, 0), torch.where(seen, hi, 0), self.spec, eps=self.eps
        )

    # --- forward without changes of state ---------------------------------------------------------

    def _must_be_pure(self) -> bool:
        """Returns True under `torch.func`, and in a model exported for evaluation: no tensor may be changed there."""
        if torch.compiler.is_compiling():
            return torch.compiler.is_exporting() and not self.training
        return innermost_transform() is not None

    def _run_purely(self, x: Tensor, ranks: Ranks) -> Tensor:
        """Returns what the forward pass would return, but stores nothing."""
        if not self.observer.dynamic and not torch.compiler.is_compiling():
            warnings.warn(
                "Quantizers that observe under a transform of torch.func do not remember what they see.\n"
                "Call `calibrate` first, and freeze the ranges: fakequant.nn.switch_quantizers(model, frozen=True).",
                RuntimeWarning,
                stacklevel=2,
            )
        if ranks.several:
            raise RuntimeError(
                "ranges are exchanged between processes, which a transform of torch.func cannot do.\n"
                "Freeze them: fakequant.nn.switch_quantizers(model, frozen=True)."
            )
        if not self._quantizing:
            return x
        if self._in_kernel is None and self.observer.dynamic:
            return self._quantize_by_observer(x, ranks, remember=False)
        if self._in_kernel is None:
            raise RuntimeError(
                f"{self.observer} cannot observe under a transform of torch.func: it changes its state in place.\n"
                "Call `calibrate` first, and freeze the ranges: fakequant.nn.switch_quantizers(model, frozen=True)."
            )
        self._check_blocks(x)
        seen = tensor_functions.min_max(x, self.spec)
        how = Observation(*self._in_kernel, self.eps, self.spec.symmetric, scale_rule_name(self.spec))
        lo, hi = updated_range(*self._range_before(seen.min), seen.min, seen.max, how)
        scale, zero_point = tensor_functions.choose_qparams(lo, hi, self.spec, eps=self.eps)
        self.saw_only_finite = False
        return fake_quantize(x, scale, zero_point, self.spec, gradient=self._following)

    def _range_before(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the running range, or an empty range if none is stored."""
        if self._blocks is not None:
            return self.running_min, self.running_max
        lo = torch.full_like(like, torch.inf, dtype=torch.float32)
        return lo, -lo

    # --- observing and quantizing in one pass -----------------------------------------------------

    def _fused(self, x: Tensor, running_min: Tensor, running_max: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        """Quantizes `x` after updating the running range, scale and zero point with it, in place."""
        if self.spec.group_size is not None:
            self._check_blocks(x)
        self.saw_only_finite = False  # unless the fast path finds that out
        if self.spec.has_block_scales and has_short_block(tuple(x.shape), self.spec):
            return self._fused_short_blocks(x, running_min, running_max, scale, zero_point)
        y = self._observe_compiled(x, running_min, running_max, scale, zero_point, quantize=True)
        if y is not None:
            return y
        result = self._observe_operator(x, self._as_blocks(x, running_min), self._as_blocks(x, running_max))
        self._count_nonfinite(result.nonfinite)
        scale.copy_(result.scale.reshape(scale.shape))
        zero_point.copy_(result.zero_point.reshape(zero_point.shape))
        return result.y

    def _fused_short_blocks(
        self, x: Tensor, running_min: Tensor, running_max: Tensor, scale: Tensor, zero_point: Tensor
    ) -> Tensor:
        """Does the same as `_fused` for data whose last blocks are shorter than the others."""
        result = tensor_functions.observe_fake_quantize(
            x, self.spec, running_min, running_max, update="dynamic", averaging_constant=0.0, eps=self.eps,
            gradient=self._following,
        )  # fmt: skip
        self._count_nonfinite(torch.as_tensor(result.nonfinite))
        scale.copy_(result.scale)
        zero_point.copy_(result.zero_point)
        return result.y

    def _observe_compiled(self, x: Tensor, *state: Tensor, quantize: bool) -> Tensor | None:
        """The fast path: observes ordinary memory in compiled code. Returns None if it does not apply.

        Args:
            x: The tensor to observe.
            state: Running minimum and maximum, scale and zero point. Updated in place.
            quantize: Whether to return `x` quantized. If not, `x` itself is returned.
        """
        if compiled_nodes.compiled is None or torch.compiler.is_compiling():
            return None
        axis, group = self.spec.axis, self.spec.group_size
        clipped = self._following == "clipped"
        found: tuple[Tensor | None, int] | None = compiled_nodes.compiled.observe(
            x, *state, *self._kernel_options, axis + x.dim() if axis is not None and axis < 0 else axis,
            group if axis is None or group is None else group_length(x.shape[axis], self.spec), quantize, clipped,
        )  # fmt: skip
        if found is None:
            return None
        y, nonfinite = found
        self.saw_only_finite = not nonfinite
        if nonfinite:
            self._count_nonfinite(torch.tensor(nonfinite))
        return x if y is None else y

    def _observe_operator(self, x: Tensor, running_min: Tensor, running_max: Tensor) -> Observed:
        clipped = self._following == "clipped" and gradients.is_differentiating(x)
        check_device(x, "running_min", running_min)
        if torch.compiler.is_compiling() or not is_eager(x):
            return Observed(*ops.observe_fake_quantize(x, running_min, running_max, *self._options, clipped))
        return gradients.observe(x, running_min, running_max, (*self._options, clipped))

    def _as_blocks(self, x: Tensor, value: Tensor) -> Tensor:
        """Returns a view of `value`, which has one entry per scale, that broadcasts with the blocks of `x`."""
        if self._blocks == ():
            return value
        self._check_blocks(x)
        return value.view(block_shape(tuple(x.shape), self.spec))

    # --- observing --------------------------------------------------------------------------------

    @torch.no_grad()
    def _observe(self, x: Tensor, ranks: Ranks) -> None:
        """Updates the range. Scale and zero point are updated too, or later if they require a search."""
        if self._blocks is None:
            return
        self._check_blocks(x)
        check_device(x, "scale", self.scale)
        if self._tensors is not None:
            if self._tensors == 0:
                self._forget()
            self._tensors += 1
            self._set_observer(MovingAverage(1 / self._tensors))
        if self._in_kernel is not None and not ranks.several:
            state = (self.running_min, self.running_max, self.scale, self.zero_point)
            if self._observe_compiled(x, *state, quantize=False) is not None:
                return
        if self._in_kernel is None and self.observer.dynamic:
            self._forget()
        self._count_nonfinite(self.observer.update(self._state(), x.detach(), self.spec, ranks))
        if self.observer.searches:
            self._set_stale(True)
            self.scale.fill_(torch.nan)  # rather than an outdated scale
        else:
            self.refresh()

    def _state(self) -> State:
        return {name: getattr(self, name) for name in self._names}

    @torch.no_grad()
    def refresh(self) -> None:
        """Computes scale and zero point from everything observed. The scale is NaN where nothing was observed."""
        if self._blocks is None:
            return
        lo, hi = self.observer.range(self._state(), self.spec)
        scale, zero_point = self._choose(lo, hi)
        self.scale.copy_(torch.where(lo <= hi, scale, torch.nan))
        self.zero_point.copy_(zero_point)
        if self.observer.searches:
            self._set_stale(False)

    def qparams(self) -> QParams[Tensor]:
        """Returns scale (float32) and zero point (int32) for everything observed so far.

        >>> from fakequant import presets
        >>> fq = FakeQuantize(presets.uint8())
        >>> y = fq(torch.tensor([0.0, 2.55]))
        >>> fq.qparams()
        QParams(scale=tensor(0.0100), zero_point=tensor(0, dtype=torch.int32))
        """
        if self._blocks is None:
            raise RuntimeError(f"{self.where} is dynamic: it computes scales for each input and stores none.")
        if self._stale:
            self.refresh()
        self._require_range()
        return QParams(self.scale.clone(), self.zero_point.clone())

    def _require_range(self) -> None:
        if self._blocks is None or self.scale.is_meta:
            return
        unseen = int(self.scale.isnan().sum())
        if unseen:
            raise RuntimeError(
                f"{self.where} has not observed a finite value"
                f"{f' in {unseen} of {self.scale.numel()} blocks' if self._blocks else ''}, so it has no scale.\n"
                "Run some data through the model in training mode or calibrate it first, or load a state."
            )

    # --- state ------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_last"}

    def run_deferred(self) -> None:
        """Updates the scale if necessary, and warns once of non-finite values."""
        # Also if the scale is not stale: a model average (EMA) averages ranges, but not integer zero points.
        if self._stale or (self._may_write() and not self._frozen and not self.observer.searches):
            self.refresh()
        super().run_deferred()

    def _may_write(self) -> bool:
        """Returns True if buffers can be changed: those made in inference mode cannot, outside of it."""
        return self.scale is None or torch.is_inference_mode_enabled() or not self.scale.is_inference()

    def _from_torch_ao(self, old: dict[str, Tensor]) -> dict[str, Tensor]:
        if self._blocks is None or set(self._names) != {"running_min", "running_max"}:
            raise ValueError(
                f"the state is from a torch.ao module, and {self.observer} cannot continue from it.\n"
                "Use MovingAverage or MinMax, or calibrate again."
            )
        observed = observed_tensors(old, self.spec, self.observer.init(self._blocks, self.scale.device))
        self._check_scale(observed)
        if self.scale.numel() == 1:  # torch.ao has shape (1,) or ()
            observed = {name: v.reshape(self._blocks) if v.numel() == 1 else v for name, v in observed.items()}
        switches = [bool(old["observer_enabled"]), bool(old["fake_quant_enabled"]), False, False]
        return {**observed, "grid": self.grid, "switches": torch.tensor(switches, dtype=torch.uint8)}

    def _check_scale(self, observed: dict[str, Tensor]) -> None:
        if observed["scale"].numel() == self.scale.numel():
            check_scale(observed, self.spec, self.eps)

    def _find_mismatch(self, state_dict: StateDict, prefix: str) -> str | None:
        if not self.observer.needs_data and not self.scale.is_meta:
            for name in self._names:
                saved = state_dict.get(prefix + name)
                if saved is not None and not torch.equal(saved.cpu(), getattr(self, name).cpu()):
                    return f"`{name}` is {saved.tolist()} in the state, but the range is fixed here: {self.observer}."
        return super()._find_mismatch(state_dict, prefix)

    def settings(self) -> Settings:
        """Adds the observer, the gradient and eps."""
        return *super().settings(), self.observer, self.gradient, self.eps

    def extra_repr(self) -> str:
        """Returns the spec, the switches that are on, and the observer."""
        return f"{super().extra_repr()}; {self.observer}"
