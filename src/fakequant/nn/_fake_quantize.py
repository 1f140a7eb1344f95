"""`FakeQuantize`: a quantizer whose scale follows what an observer sees."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from fakequant._backends.torch import compiled_nodes, gradients, tensor_functions
from fakequant._backends.torch.operator_calls import ops
from fakequant._backends.torch.plain_memory import is_eager
from fakequant._backends.torch.process_ranks import ALONE, Ranks
from fakequant._backends.torch.tensor_checks import block_shape, check_device, kernel_numerics
from fakequant._backends.torch.tensor_kernels import NUMERICS, Observation, Observed, updated_range
from fakequant._backends.torch.torch_private import innermost_transform
from fakequant.functional import UPDATES, Gradient, check_gradient
from fakequant.nn._quantizer import Quantizer, parameter_shape
from fakequant.observers._dynamic import Dynamic
from fakequant.observers._moving_average import MovingAverage
from fakequant.observers._observer import Observer, State
from fakequant.qparams import EPS, QParams, check_eps
from fakequant.spec import WHOLE_AXIS, QuantSpec


class FakeQuantize(Quantizer):
    """Observes a tensor, chooses scale and zero point, and fake-quantizes with them.

        lo, hi             = observer.range of what was seen
        scale, zero_point  = choose_qparams(lo, hi, spec)
        y                  = fake_quantize(x, scale, zero_point, spec)

    In training mode all three happen at every call, with `MinMax`, `MovingAverage` and `Dynamic` in
    one pass. In evaluation mode only the last does, unless the observer is dynamic (`Dynamic`).
    Before anything was observed there is no scale, and quantizing is an error. Without an `observer`, a
    symmetric spec with an axis, the grid of weights, has `Dynamic`, every other `MovingAverage`.

    `shape` is needed if there is a scale per channel or group: that of the tensors to come, with None
    for lengths that vary. `gradient` is "clipped" (0 where the value was clipped; 1 bit per element is
    kept), "pass" (nothing is kept) or "auto": "pass" while the range is that of the tensor at hand
    (`Dynamic`), which leaves nothing far outside, else "clipped". With torch.distributed
    initialized, ranges are those of the batches of all ranks of `process_group` together, in the same
    step, unless `sync` is False.

    Data may be float32, float64, bfloat16 or float16; scales are float32 whatever the model is.

    Under a transform of `torch.func`, and in a program of `torch.export` for evaluation, ranges are found in
    the same way, but nothing is remembered or counted. Under `vmap` every example has a range of its own.

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
    # While a mean is computed: how many tensors were seen.
    _tensors: int | None = None

    def __init__(
        self,
        spec: QuantSpec,
        observer: Observer | None = None,
        *,
        shape: tuple[int | None, ...] | None = None,
        gradient: Gradient | Literal["auto"] = "clipped",
        eps: float = EPS,
        sync: bool = True,
        process_group: Any = None,
        path: str | None = None,
        device: Any = None,
    ) -> None:
        super().__init__(spec, observing=True, sync=sync, process_group=process_group, path=path, device=device)
        if observer is None:
            is_activation = spec.granularity == "tensor" or not (spec.symmetric or spec.granularity == "token")
            observer = MovingAverage() if is_activation else Dynamic()
        if not isinstance(observer, Observer):
            raise TypeError(f"`observer` must be an Observer, such as MovingAverage(), got {observer!r}.")
        if spec.granularity == "token" and not isinstance(observer, Dynamic):
            raise ValueError(
                f"Ranges per token belong to the tensor at hand; {observer} would have to remember them.\n"
                "Use observer=Dynamic()."
            )
        if gradient != "auto":
            check_gradient(gradient)
        check_eps(eps)
        self.gradient = gradient
        # The gradient while the range follows the tensor, and while it does not.
        self._following: Gradient = gradient if gradient != "auto" else "pass" if observer.dynamic else "clipped"
        self._fixed: Gradient = "clipped" if gradient == "auto" else gradient
        self.eps = float(eps)
        self._set_observer(observer)
        blocks = parameter_shape(spec, shape)
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
            # Not a number until there is a range: what is computed with it shows.
            self.register_buffer("scale", torch.full(blocks, torch.nan, dtype=torch.float32, device=device))
            self.register_buffer("zero_point", torch.zeros(blocks, dtype=torch.int32, device=device))
            if not observer.needs_data:
                self.refresh()

    def _set_observer(self, observer: Observer) -> None:
        """An observer that continues with the same state."""
        self.observer = observer
        spec, numerics = self.spec, kernel_numerics(self.spec)
        low, high = spec.qmin, spec.qmax
        # How the kernel follows the range, if it can.
        self._in_kernel = how = observer._in_kernel
        if how is not None:
            self._options = (low, high, numerics, spec.symmetric, how.update, how.constant, self.eps)
            self._kernel_options = (
                low, high, NUMERICS[numerics], spec.symmetric, UPDATES[how.update], how.constant, self.eps,
            )  # fmt: skip

    @contextmanager
    def averaging_evenly(self) -> Iterator[None]:
        """While it lasts, a moving average is the mean over the tensors seen since, whatever its constant."""
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
        if not self._looks():
            return self._quantize(x, self._fixed) if self._quantizing else x
        # In evaluation a rank may run alone; waiting for the others would block.
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
            return self._quantize_alone(x)
        if ranks.several or self._in_kernel is None:
            self._observe(x, ranks)
            return self._quantize(x, self._following)
        return self._observe_and_quantize(x)

    @property
    def is_dynamic(self) -> bool:
        """Whether the scale is that of the tensor at hand, also in evaluation."""
        return self.observer.dynamic and (not self._frozen or self._blocks is None)

    def _looks(self) -> bool:
        """Whether the tensor at hand counts for its scale."""
        if self._blocks is None:
            return True  # there is no other way
        if not self._observing or self._frozen or not self.observer.needs_data:
            return False
        return self.training or self.observer.dynamic

    def _quantize(self, x: Tensor, gradient: Gradient) -> Tensor:
        """With scale and zero point as they are."""
        if self._stale:
            self.refresh()
        self.saw_only_finite = False
        zero_point: Any = 0 if self.spec.symmetric else self.zero_point
        if torch.compiler.is_compiling():
            return tensor_functions.fake_quantize(x, self.scale, zero_point, self.spec, gradient=gradient)
        if self.spec.numerics == "torch":  # which computes with any scale
            self._require_range()
        try:
            y = compiled_nodes.fake_quantize(x, self.scale, zero_point, self.spec, gradient == "clipped")
            if y is not None:
                return y
            return tensor_functions.fake_quantize(x, self.scale, zero_point, self.spec, gradient=gradient)
        except ValueError:
            self._require_range()
            raise

    def _observe_and_quantize(self, x: Tensor) -> Tensor:
        """In one pass, where the kernel can follow the range."""
        return self._fused(x, self.running_min, self.running_max, self.scale, self.zero_point)

    def _quantize_alone(self, x: Tensor) -> Tensor:
        """With a range of this tensor's own, in memory of its own: several threads may evaluate one model."""
        blocks = self._check_blocks(x)
        lo = torch.full(blocks, torch.inf, dtype=torch.float32, device=x.device)
        scale, zero_point = torch.empty_like(lo), torch.empty_like(lo, dtype=torch.int32)
        hi = -lo
        y = self._fused(x, lo, hi, scale, zero_point)
        if self._blocks is not None:
            buffers = (self.running_min, self.running_max, self.scale, self.zero_point)
            for buffer, value in zip(buffers, (lo, hi, scale, zero_point), strict=True):
                buffer.copy_(value)
        return y

    def _quantize_by_observer(self, x: Tensor, ranks: Ranks, *, remember: bool = True) -> Tensor:
        """With the range that the observer finds in this tensor alone; without a finite value it is 0 to 0."""
        state = self.observer.init(self._check_blocks(x), x.device)
        nonfinite = self.observer.update(state, x.detach(), self.spec, ranks)
        lo, hi = self.observer.range(state, self.spec)
        scale, zero_point = self._choose(lo, hi)
        self.saw_only_finite = False
        if remember:
            self._count(nonfinite)
            for name, value in {**state, "scale": scale, "zero_point": zero_point}.items():
                getattr(self, name).copy_(value)
        return tensor_functions.fake_quantize(x, scale, zero_point, self.spec, gradient=self._following)

    def _choose(self, lo: Tensor, hi: Tensor) -> QParams[Tensor]:
        """Scale and zero point, as if a range of nothing were 0 to 0."""
        seen = lo <= hi
        return tensor_functions.choose_qparams(
            torch.where(seen, lo, 0), torch.where(seen, hi, 0), self.spec, eps=self.eps
        )

    # --- without changing anything ----------------------------------------------------------------

    def _must_be_pure(self) -> bool:
        """Whether nothing may be remembered: under `torch.func`, and in a model exported for evaluation."""
        if torch.compiler.is_compiling():
            return torch.compiler.is_exporting() and not self.training
        return innermost_transform() is not None

    def _run_purely(self, x: Tensor, ranks: Ranks) -> Tensor:
        """The same result, with the same range, but what was observed is forgotten."""
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
                f"{self.observer} cannot observe under a transform of torch.func: it changes what it keeps.\n"
                "Call `calibrate` first, and freeze the ranges: fakequant.nn.switch_quantizers(model, frozen=True)."
            )
        self._check_blocks(x)
        seen = tensor_functions.min_max(x, self.spec)
        how = Observation(*self._in_kernel, self.eps, self.spec.symmetric)
        lo, hi = updated_range(*self._range_before(seen.min), seen.min, seen.max, how)
        scale, zero_point = tensor_functions.choose_qparams(lo, hi, self.spec, eps=self.eps)
        self.saw_only_finite = False
        return tensor_functions.fake_quantize(x, scale, zero_point, self.spec, gradient=self._following)

    def _range_before(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """The running range, if one is remembered."""
        if self._blocks is not None:
            return self.running_min, self.running_max
        lo = torch.full_like(like, torch.inf, dtype=torch.float32)
        return lo, -lo

    # --- in one pass ------------------------------------------------------------------------------

    def _fused(self, x: Tensor, running_min: Tensor, running_max: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        """Changes the four by what is in `x`, and quantizes it."""
        if self.spec.group_size is not None:
            self._check_blocks(x)
        found = self._observe_shortly(x, running_min, running_max, scale, zero_point, quantize=True)
        if found is not None:
            return found[0]
        result = self._observe_operator(x, self._as_blocks(x, running_min), self._as_blocks(x, running_max))
        self._count(result.nonfinite)
        scale.copy_(result.scale.reshape(scale.shape))
        zero_point.copy_(result.zero_point.reshape(zero_point.shape))
        return result.y

    def _observe_shortly(self, x: Tensor, *state: Tensor, quantize: bool) -> tuple[Any, int] | None:
        """The fused fast path on ordinary memory, with or without quantizing; None if it does not apply."""
        if compiled_nodes.compiled is None or torch.compiler.is_compiling():
            return None
        axis, group = self.spec.axis, self.spec.group_size
        clipped = self._following == "clipped"
        found = compiled_nodes.compiled.observe(
            x, *state, *self._kernel_options, axis + x.dim() if axis is not None and axis < 0 else axis,
            x.shape[axis] if group == WHOLE_AXIS and axis is not None else group, quantize, clipped,
        )  # fmt: skip
        if found is not None:
            self.saw_only_finite = not found[1]
            if found[1]:
                self._count(torch.tensor(found[1]))
        return found

    def _observe_operator(self, x: Tensor, running_min: Tensor, running_max: Tensor) -> Observed:
        clipped = self._following == "clipped" and gradients.is_differentiating(x)
        check_device(x, "running_min", running_min)
        if torch.compiler.is_compiling() or not is_eager(x):
            return Observed(*ops.observe_fake_quantize(x, running_min, running_max, *self._options, clipped))
        return gradients.observe(x, running_min, running_max, (*self._options, clipped))

    def _as_blocks(self, x: Tensor, value: Tensor) -> Tensor:
        """Values per block in a shape that broadcasts by blocks of `x`."""
        if self._blocks == ():
            return value
        self._check_blocks(x)
        return value.view(block_shape(tuple(x.shape), self.spec))

    # --- observing --------------------------------------------------------------------------------

    @torch.no_grad()
    def _observe(self, x: Tensor, ranks: Ranks) -> None:
        """Only that; scale and zero point follow at once, or when needed if they have to be searched for."""
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
            if self._observe_shortly(x, *state, quantize=False) is not None:
                return
        if self._in_kernel is None and self.observer.dynamic:
            self._forget()
        self._count(self.observer.update(self._state(), x.detach(), self.spec, ranks))
        if self.observer.searches:
            self._set_stale(True)
            self.scale.fill_(torch.nan)  # rather than one that is old
        else:
            self.refresh()

    def _state(self) -> State:
        return {name: getattr(self, name) for name in self._names}

    @torch.no_grad()
    def refresh(self) -> None:
        """Scale and zero point from what was observed so far; where that is nothing the scale is NaN."""
        if self._blocks is None:
            return
        lo, hi = self.observer.range(self._state(), self.spec)
        scale, zero_point = self._choose(lo, hi)
        self.scale.copy_(torch.where(lo <= hi, scale, torch.nan))
        self.zero_point.copy_(zero_point)
        if self.observer.searches:
            self._set_stale(False)

    def qparams(self) -> QParams[Tensor]:
        """Scale (float32) and zero point (int32) for what was observed so far.

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
        """Finds the scale if that is due, and tells of values that were not finite."""
        # Also where nothing is: in an averaged model ranges are averages, but zero points are not.
        if self._stale or (self._may_write() and not self._frozen and not self.observer.searches):
            self.refresh()
        super().run_deferred()

    def _may_write(self) -> bool:
        """Whether buffers can be changed here: not those of inference mode outside it."""
        return self.scale is None or torch.is_inference_mode_enabled() or not self.scale.is_inference()

    def _from_torch_ao(self, old: dict[str, Tensor]) -> dict[str, Tensor]:
        if self._blocks is None or set(self._names) != {"running_min", "running_max"}:
            raise ValueError(
                f"the state is of torch.ao, which cannot be continued by {self.observer}.\n"
                "Use MovingAverage or MinMax, or calibrate anew."
            )
        if "learning_enabled" in old or "activation_post_process.min_val" not in old:
            raise ValueError(
                "the state is of a torch.ao module that does not follow a range.\n"
                "Use LearnedFakeQuantize for a learned scale, FakeQuantize(spec, Fixed(lo, hi)) for a fixed one."
            )
        lo, hi = (old[f"activation_post_process.{end}_val"] for end in ("min", "max"))
        scale, zero_point = old["scale"], old["zero_point"]
        if zero_point.is_floating_point():
            raise ValueError("the zero point of the state is not an integer.")
        if lo.numel() == 0:  # it has seen nothing, and its scale of 1 means nothing
            empty = self.observer.init(self._blocks, self.scale.device)
            lo, hi = empty["running_min"], empty["running_max"]
            scale, zero_point = torch.full_like(self.scale, torch.nan), torch.zeros_like(self.zero_point)
        # An end that is not finite is one that nothing was seen of yet; the other end stays.
        lo = torch.where(lo.isfinite(), lo, torch.inf)
        hi = torch.where(hi.isfinite(), hi, -torch.inf)
        known = lo <= hi
        if known.shape == scale.shape or known.numel() == scale.numel() == 1:
            scale = torch.where(known.reshape(scale.shape), scale, torch.nan)
            zero_point = torch.where(known.reshape(scale.shape), zero_point, 0)
        if self.spec.symmetric and bool(zero_point.any()):
            raise ValueError(
                f"the zero point is not 0 everywhere, but the spec is symmetric ({self.spec}).\n"
                "torch's fused operator chooses such zero points for data of one sign: use "
                "fakequant.nn.FusedFakeQuantize, or QuantSpec(symmetric=False)."
            )
        self._check_scale(lo, hi, scale, zero_point)
        switches = [bool(old["observer_enabled"]), bool(old["fake_quant_enabled"]), False, False]
        values = {"running_min": lo, "running_max": hi, "scale": scale, "zero_point": zero_point.to(torch.int32)}
        one = self.scale.numel() == 1
        return {
            **{name: v.reshape(self._blocks) if one and v.numel() == 1 else v for name, v in values.items()},
            "grid": self.grid,
            "switches": torch.tensor(switches, dtype=torch.uint8),
        }

    def _check_scale(self, lo: Tensor, hi: Tensor, scale: Tensor, zero_point: Tensor) -> None:
        """That a scale of torch.ao is the one this grid has for the range."""
        known = (lo <= hi).reshape(-1)
        if scale.numel() != self.scale.numel() or not bool(known.any()):
            return
        scale, zero_point = scale.reshape(-1)[known], zero_point.reshape(-1)[known]
        found = tensor_functions.choose_qparams(lo.reshape(-1)[known], hi.reshape(-1)[known], self.spec, eps=self.eps)
        if not torch.equal(found.scale, scale) or not torch.equal(found.zero_point, zero_point.int()):
            raise ValueError(
                f"the scale of the state is {scale[0]:g}, but for its range this grid has "
                f"{found.scale[0]:g} ({self.spec}, eps={self.eps:g}).\n"
                "It has another range of codes (bits, narrow), another eps, or was fused (FusedFakeQuantize)."
            )

    def _misfit(self, state_dict: Any, prefix: str) -> str | None:
        if not self.observer.needs_data and not self.scale.is_meta:
            for name in self._names:
                saved = state_dict.get(prefix + name)
                if saved is not None and not torch.equal(saved.cpu(), getattr(self, name).cpu()):
                    return f"`{name}` is {saved.tolist()} in the state, but the range is fixed here: {self.observer}."
        return super()._misfit(state_dict, prefix)

    def settings(self) -> tuple[Any, ...]:
        """Also the observer, the gradient and eps."""
        return *super().settings(), self.observer, self.gradient, self.eps

    def extra_repr(self) -> str:
        """The spec, what is switched on, and the observer."""
        return f"{super().extra_repr()}; {self.observer}"
