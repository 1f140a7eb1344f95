"""`FakeQuantize`: a quantizer whose scale comes from an observer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.types import Device

from fakequant._backends.checks import EPS, check_eps, check_gradient
from fakequant._backends.torch import compiled_nodes
from fakequant._backends.torch.plain_memory import is_eager
from fakequant._backends.torch.tensor_checks import check_device, kernel_numerics
from fakequant._backends.torch.tensor_functions import fake_quantize
from fakequant._backends.torch.tensor_kernels import zero_dtype
from fakequant._kernels import NUMERICS, SCALE_RULES, UPDATES, scale_rule_name
from fakequant.functional import Gradient
from fakequant.nn._quantizer import Quantizer, Settings, scale_shape
from fakequant.nn._quantizer_state import StateDict
from fakequant.nn._recomputation import as_first, current_replay, in_compiled_code, runs
from fakequant.nn._tensor_ranges import (
    choose,
    must_be_pure,
    observe_and_quantize,
    observe_compiled,
    quantize_purely,
    quantize_with_own_range,
)
from fakequant.observers._observer import Observer, State
from fakequant.observers._ranks import ALONE, Ranks
from fakequant.observers._running import Dynamic, MovingAverage
from fakequant.qparams import QParams
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
        observer: Finds the range. The default is `Dynamic` for scales per token and block scales, and for symmetric
            specs with an axis, as weights have, and `MovingAverage` for all others.
        shape: The shape of the tensors, with None for lengths that vary. Required if there is a scale per channel
            or group.
        gradient: "clipped" is 0 where the value was clipped and keeps 1 bit per element. "pass" keeps nothing.
            "auto" is "pass" while the range follows the current tensor (`Dynamic`), which clips almost nothing,
            and "clipped" otherwise. The default is "auto" for block scales (MX, NVFP4), "clipped" for all others.
        eps: The smallest scale.
        sync: Whether the batches of all ranks in the same step share one range, if torch.distributed
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
            follows_data = spec.granularity == "token" or spec.has_block_scales
            is_activation = spec.granularity == "tensor" or not (spec.symmetric or follows_data)
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
            zero_point = torch.zeros(blocks, dtype=zero_dtype(scale_rule_name(spec)), device=device)
            self.register_buffer("zero_point", zero_point)
            if not observer.needs_data:
                self.refresh()

    def _set_observer(self, observer: Observer) -> None:
        """Sets an observer that can continue with the current state."""
        self.observer = observer
        spec = self.spec
        # None if the kernel cannot update the range as this observer does.
        self._in_kernel = how = observer._in_kernel
        if how is not None:
            self._kernel_options = (
                spec.qmin, spec.qmax, NUMERICS[kernel_numerics(spec)], spec.symmetric,
                SCALE_RULES[scale_rule_name(spec)], UPDATES[how.update], how.constant, self.eps,
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

    @torch.no_grad()
    def set_qparams(self, scale: Tensor, zero_point: Tensor) -> None:
        """Sets scale and zero point, one per block, and freezes them.

        >>> from fakequant import QuantSpec
        >>> fq = FakeQuantize(QuantSpec())
        >>> fq.set_qparams(torch.tensor(0.5), torch.tensor(0))
        >>> fq(torch.tensor([0.7, 100.0]))
        tensor([ 0.5000, 63.5000])
        """
        spec = self.spec
        scale, zero_point = (value.reshape(self.scale.shape) for value in (scale, zero_point))
        # The range that the grid covers counts as observed. An observer would choose this scale for it, up to rounding.
        low, high = (spec.qmin, spec.qmax) if spec.format == "int" else (-spec.largest, spec.largest)
        if spec.is_integer and spec.symmetric:
            low, high = (spec.qmin - spec.qmax) / 2, (spec.qmax - spec.qmin) / 2
        self.running_min.copy_((low - zero_point) * scale)
        self.running_max.copy_((high - zero_point) * scale)
        self.frozen = True
        self.scale.copy_(scale)
        self.zero_point.copy_(zero_point)
        self._stale = False

    def _forget(self) -> None:
        assert self._blocks is not None
        for name, value in self.observer.init(self._blocks, self.scale.device).items():
            getattr(self, name).copy_(value)

    # --- forward ----------------------------------------------------------------------------------

    def _run(self, x: Tensor) -> Tensor:
        """Chooses the scale: the stored one, the one of the tensors seen or of `x` alone, or either without effects."""
        if self._blocks is None and self.rounding is not None:
            return self.rounding.tokens(x) if self._quantizing else x
        if not self._observes_now():
            return self._quantize(x, self._fixed) if self._quantizing else x
        # In evaluation a rank may run by itself; waiting for the other ranks would block.
        ranks = self.ranks() if self.training else ALONE
        is_dynamic = self.observer.dynamic
        if not is_dynamic and x.numel() == 0 and not ranks.several:
            return x
        if must_be_pure(self.training):
            return self._run_purely(x, ranks)
        if not self._quantizing:
            self._observe(x, ranks)
            return x
        return quantize_with_own_range(self, x, ranks) if is_dynamic else self._quantize_with_seen_range(x, ranks)

    def _quantize_with_seen_range(self, x: Tensor, ranks: Ranks) -> Tensor:
        """Quantizes with the range of all tensors seen, `x` included."""
        if ranks.several or self._in_kernel is None or self.rounding is not None:
            self._observe(x, ranks)
            return self._quantize(x, self._following)
        return observe_and_quantize(self, x, self.running_min, self.running_max, self.scale, self.zero_point)

    def _run_purely(self, x: Tensor, ranks: Ranks) -> Tensor:
        return quantize_purely(self, x, ranks)

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
        zero_point = 0 if self.spec.symmetric else self.zero_point
        if self.rounding is not None:
            x = self.rounding.moved(x, self.scale, self.zero_point, self.spec)
        if torch.compiler.is_compiling():
            self._last = None
            return fake_quantize(x, self.scale, zero_point, self.spec, gradient=gradient)
        self.__dict__["_last"] = None  # not by `setattr`, which is slow in a module
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

    def _qparams_for(self, y: Tensor) -> QParams[Tensor] | None:
        replay = current_replay() if runs.stack else None
        if replay is not None and self not in replay.changed and self._observes_now():
            return None  # it has quantized `y` before the checkpoint, and may have observed other tensors since
        return super()._qparams_for(y)

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
            if observe_compiled(self, x, *state, quantize=False) is not None:
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
        scale, zero_point = choose(self, lo, hi)
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
        from fakequant.nn._torch_ao import observed_state  # which imports this module

        return observed_state(self, old)

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
