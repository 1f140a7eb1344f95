"""`LearnedFakeQuantize`: a quantizer whose scale and zero point are parameters of the model."""

from math import inf

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.types import Device

from fakequant._backends.checks import EPS, check_eps
from fakequant._backends.torch import tensor_functions
from fakequant._backends.torch.ggml_formula import to_super_blocks
from fakequant._backends.torch.plain_memory import is_transformed
from fakequant._backends.torch.tensor_checks import check_data, check_device
from fakequant._backends.torch.tensor_functions import fake_quantize
from fakequant.formats import SUPER_BLOCKS
from fakequant.nn._bounded_parameters import keep_in_graph, keep_within, put, replaced, whole, within, write_back
from fakequant.nn._initial_scales import Init, largest_scale, start_for
from fakequant.nn._quantizer import Quantizer, Settings, scale_shape
from fakequant.nn._quantizer_state import StateDict
from fakequant.observers._observer import State
from fakequant.qparams import QParams
from fakequant.spec import QuantSpec

_LARGEST = torch.finfo(torch.float32).max


class LearnedFakeQuantize(Quantizer):
    """Fake quantization with a learned step size (LSQ), and with a learned zero point (LSQ+).

        y = fake_quantize(x, scale, zero_point, spec)

        inside     dx = dy    dscale = dy * ((q - zero_point) - x / scale)    dzero_point = 0
        outside    dx = 0     dscale = dy * (bound - zero_point)              dzero_point = -dy * scale

    dscale and dzero_point are summed over the elements that share a scale and multiplied by `grad_factor`.

    The optimizer changes the parameters `step_size` and `offset`. `scale` and `zero_point` are their valid values:
    a finite scale of at least `eps`, and an integer zero point within the range of codes. A step size that leaves
    these bounds is clamped; one that is NaN or infinite is reset to its last valid value. In ordinary memory this
    happens in the next forward pass. In compiled code and on other devices the forward pass uses the valid value, and
    the parameter is corrected when the mode changes or the state is saved. A symmetric grid has no offset.

    The weights of ggml (`presets.q4_0` and others) have the scales of GGUF files: values are computed with the scale
    rounded to float16, and the scales of K-quants are moved to the nearest ones that a file can hold. Both have the
    gradient of the identity. A scale of `q4_0` and `q6_k` keeps the sign that it starts with.

    The scale is initialized by `initialize(x)`, or by data passed while `observing` is True, which is returned
    unchanged. Quantizing before that is an error. Initialize before building the optimizer, so that it sees the final
    parameters; `param_groups(model)` puts them in a separate group.

    Args:
        spec: The grid.
        shape: The shape of the tensors, with None for lengths that vary. Required if there is a scale per channel
            or group.
        init: How the first scale is found. "lsq" is LSQ's rule, `2 * mean(|x|) / sqrt(largest)`, with zero point 0. An
            observer gives its range. None is the least squared error. On a symmetric grid this is, per scale, LSQ's
            rule or a search for the best range, whichever has the smaller error. On an affine grid it is the search
            (`Histogram`, or `MSE` if there are many scales), or LSQ's rule if the zero point is fixed.
        learn_zero_point: Whether to learn the zero point of an affine grid. The default is True for affine grids.
        grad_factor: The factor of dscale and dzero_point. The default is LSQ's, `1 / sqrt(x.numel() * largest)`.
        eps: The smallest scale.
        sync: Whether the batches of all ranks count as one in the initialization.
        process_group: The ranks that do; None for all.
        path: The path of the module in its model, for messages.
        device: The device of parameters and buffers.

    >>> from fakequant import QuantSpec
    >>> fq = LearnedFakeQuantize(QuantSpec(bits=4)).initialize(torch.tensor([-1.0, 0.5, 3.0]))
    >>> fq.scale
    tensor(0.4000)
    >>> fq(torch.tensor([0.5, 9.0])).sum().backward()
    >>> fq.step_size.grad
    tensor([1.8040])
    """

    _scale_name = "step_size"
    step_size: nn.Parameter
    # A parameter if it is learned, a buffer if it is fixed, None if the grid is symmetric.
    offset: Tensor | None
    last_scale: Tensor
    _blocks: tuple[int, ...]
    last_offset: Tensor

    def __init__(
        self,
        spec: QuantSpec,
        *,
        shape: tuple[int | None, ...] | None = None,
        init: Init = None,
        learn_zero_point: bool | None = None,
        grad_factor: float | None = None,
        eps: float = EPS,
        sync: bool = True,
        process_group: "dist.ProcessGroup | None" = None,
        path: str | None = None,
        device: Device = None,
    ) -> None:
        """Makes the buffers. The documentation of the class describes the arguments."""
        super().__init__(spec, observing=False, sync=sync, process_group=process_group, path=path, device=device)
        if learn_zero_point is None:
            learn_zero_point = not spec.symmetric
        if learn_zero_point and spec.symmetric:
            raise ValueError(
                "The zero point of a symmetric grid is 0 and cannot be learned.\n"
                "Use QuantSpec(symmetric=False) to learn one."
            )
        check_eps(eps)
        if grad_factor is not None and not (isinstance(grad_factor, (int, float)) and 0 <= grad_factor < inf):
            raise ValueError(f"`grad_factor` must be a finite number >= 0, or None for LSQ's, got {grad_factor!r}.")
        if not spec.has_learnable_scales:
            raise ValueError(
                f"Scales of the format {spec.scale_format!r} follow every tensor; they cannot be learned.\n"
                "Use FakeQuantize, scale_format='float32', or a spec of ggml's weights, such as q4_0."
            )
        blocks = scale_shape(spec, shape)
        if blocks is None:
            raise ValueError(
                "Scales per token are dynamic, computed for each input; they cannot be learned.\nUse FakeQuantize."
            )
        self.init = init
        self.learn_zero_point = learn_zero_point
        self.grad_factor = grad_factor
        self.eps = float(eps)
        self._set_start()
        self._blocks = blocks
        # At least one axis: FSDP does not accept scalar parameters.
        self._shape = blocks or (1,)
        unknown = torch.full(self._shape, torch.nan, dtype=torch.float32, device=device)
        self.step_size = nn.Parameter(unknown)
        self.register_buffer("last_scale", unknown.clone(), persistent=False)
        if spec.symmetric:
            self.register_buffer("offset", None)
        else:
            zero = torch.zeros_like(unknown)
            if learn_zero_point:
                self.offset = nn.Parameter(zero)
            else:
                self.register_buffer("offset", zero)
            self.register_buffer("last_offset", zero.clone(), persistent=False)
        self._names: tuple[str, ...] = ()
        for name, value in self._new_statistics(device).items():
            self._names = (*self._names, name)
            self.register_buffer(f"seen_{name}", value, persistent=False)

    def _set_start(self) -> None:
        """Sets the rule for the first scale, on the grid of `spec`."""
        self._start = start_for(self.init, self.spec, self.eps, learn_zero_point=self.learn_zero_point)

    def _switch(self, name: str, on: bool) -> None:
        if name == "observing" and on is True and self.is_initialized:
            raise RuntimeError(
                f"{self.where} has a scale, which observing would overwrite.\n"
                "Call `reset_parameters()` first, or `initialize(x)`."
            )
        super()._switch(name, on)

    @property
    def is_initialized(self) -> bool:
        """Whether the scale is initialized."""
        return not bool(self.scale.isnan().any())

    # --- scale and zero point ---------------------------------------------------------------------

    @property
    def scale(self) -> Tensor:
        """The scale: float32 and finite, or NaN before it is initialized. Positive, except in some types of ggml.

        Those of `q4_0` and `q6_k` have a sign, and a small scale of a K-quant may be 0.
        """
        if self._stale:
            self.refresh()
        if self._frozen:
            return self._stored(self.last_scale.reshape(self._blocks).clone())
        value = whole(self.step_size)
        return self._stored(within(value, self.last_scale, self.eps, self._largest).reshape(self._blocks))

    def _stored(self, scale: Tensor) -> Tensor:
        """Returns the scales that a file can hold, if they are those of K-quants."""
        rule = self.spec.scale_rule
        return to_super_blocks(scale, rule) if rule in SUPER_BLOCKS else scale

    @property
    def zero_point(self) -> Tensor:
        """The zero point: int32, within the range of codes. The offsets of ggml are float32."""
        if self.offset is None:
            return torch.zeros(self._blocks, dtype=torch.int32, device=self.last_scale.device)
        value = self.last_offset if self._frozen else whole(self.offset)
        value = within(value, self.last_offset, *self._offsets)
        if self.spec.has_offset:
            return -self._stored(-value.reshape(self._blocks))
        return tensor_functions.round_zero_point(value, self.spec).reshape(self._blocks)

    def qparams(self) -> QParams[Tensor]:
        """Returns scale (float32) and zero point (int32).

        >>> fq = LearnedFakeQuantize(QuantSpec(bits=2)).initialize(torch.tensor([-1.0, 3.0]))
        >>> fq.qparams()
        QParams(scale=tensor(4.), zero_point=tensor(0, dtype=torch.int32))
        """
        self.run_deferred()
        self._require_scale()
        return QParams(self.scale, self.zero_point)

    @property
    def _offsets(self) -> tuple[float, float]:
        """The lowest and highest valid offset. torch's numerics do not bound the parameter, only its use."""
        if self.spec.has_offset:
            return -self._largest, 0.0 if self.spec.scale_rule in SUPER_BLOCKS else self._largest
        return (-_LARGEST, _LARGEST) if self.spec.numerics == "torch" else (self.spec.qmin, self.spec.qmax)

    @property
    def _largest(self) -> float:
        return largest_scale(self.spec)

    def _require_scale(self) -> None:
        if not self.last_scale.is_meta and not self.is_initialized:
            raise RuntimeError(
                f"{self.where} has no scale yet.\n"
                "Use fakequant.calibrate(model, data) before the optimizer is built. For a single quantizer, use "
                "`initialize(x)`, or pass data while `observing` is True."
            )

    @torch.no_grad()
    def set_qparams(self, scale: Tensor, zero_point: Tensor) -> None:
        """Sets scale and zero point, one per block. Training continues from them.

        >>> fq = LearnedFakeQuantize(QuantSpec(bits=2))
        >>> fq.set_qparams(torch.tensor(0.5), torch.tensor(0))
        >>> fq.scale
        tensor(0.5000)
        """
        self.observing = False
        self.step_size.copy_(scale.reshape(self.step_size.shape))
        if self.offset is not None:
            self.offset.copy_(zero_point.reshape(self.offset.shape))
        self._stale = False
        self._after_load()

    # --- forward ----------------------------------------------------------------------------------

    def _observes_now(self) -> bool:
        return self._observing and self.training and not self._frozen

    def _run_again(self, x: Tensor, used: None) -> Tensor:
        return keep_in_graph(x, self.step_size, self.offset)

    def _run(self, x: Tensor) -> Tensor:
        if self._observes_now():
            if is_transformed():
                raise RuntimeError(
                    "a scale cannot be initialized under a transform of torch.func, which stores nothing.\n"
                    "Call `initialize(x)`, or `fakequant.calibrate`, before it."
                )
            self._observe(x)
            return keep_in_graph(x, self.step_size, self.offset)
        if not self._quantizing:
            return keep_in_graph(x, self.step_size, self.offset)
        if self._stale:
            self.refresh()
        if torch.compiler.is_compiling():
            return self._quantize(x)
        try:
            return self._quantize(x)
        except ValueError:
            self._require_scale()
            raise

    def _quantize(self, x: Tensor) -> Tensor:
        if self.rounding is not None:
            x = self.rounding.moved(x, self.scale, self.zero_point, self.spec)
        if self._frozen:
            x = keep_in_graph(x, self.step_size, self.offset)
            if self.spec.numerics == "torch":  # its learnable operator has another gradient of x
                offset = 0 if self.offset is None else self.last_offset
                return tensor_functions.fake_quantize_learned(x, self.last_scale, offset, self.spec)
            return fake_quantize(x, self.scale, self.zero_point, self.spec)
        scale = keep_within(self.step_size, self.last_scale, self.eps, self._largest)
        zero_point: Tensor | int = 0
        if self.offset is not None:
            zero_point = keep_within(self.offset, self.last_offset, *self._offsets)
        if self.spec.scale_rule in SUPER_BLOCKS:
            scale = replaced(scale, self._stored(scale.detach()))
            if isinstance(zero_point, Tensor):
                zero_point = replaced(zero_point, -self._stored(-zero_point.detach()))
        return tensor_functions.fake_quantize_learned(x, scale, zero_point, self.spec, grad_factor=self.grad_factor)

    # --- initialization ---------------------------------------------------------------------------

    def initialize(self, x: Tensor) -> "LearnedFakeQuantize":
        """Sets scale and zero point from `x` alone, or from the `x` of all ranks. Returns the module.

        >>> LearnedFakeQuantize(QuantSpec(bits=2)).initialize(torch.tensor([-1.0, 3.0])).scale
        tensor(4.)
        """
        if self._frozen:
            raise RuntimeError(f"{self.where} is frozen: set `frozen` to False before it is initialized again.")
        try:
            check_data(x)
            return self._initialize(x)
        except (ValueError, TypeError, IndexError, RuntimeError) as error:
            self._raise_with_path(error)

    def _initialize(self, x: Tensor) -> "LearnedFakeQuantize":
        before = [value.clone() for value in (self.last_scale, *self._statistics().values())]
        for name, value in self._new_statistics(self.last_scale.device).items():
            getattr(self, f"seen_{name}").copy_(value)
        self._observe(x)
        if bool(self._found().scale.isnan().any()):
            for value, old in zip((self.last_scale, *self._statistics().values()), before, strict=True):
                value.copy_(old)
            self._set_stale(False)
            raise RuntimeError("`x` has blocks without a finite value, so their scales cannot be initialized.")
        self.run_deferred()
        return self

    def _new_statistics(self, device: Device) -> State:
        return self._start.init(self._blocks, device)

    def _statistics(self) -> State:
        return {name: getattr(self, f"seen_{name}") for name in self._names}

    @torch.no_grad()
    def _observe(self, x: Tensor) -> None:
        self._check_blocks(x)
        check_device(x, "scale", self.last_scale)
        ranks = self.ranks()
        if x.numel() == 0 and not ranks.several:
            return
        self._count_nonfinite(self._start.update(self._statistics(), x.detach(), ranks))
        self._set_stale(True)

    @torch.no_grad()
    def refresh(self) -> None:
        """Sets scale and zero point from everything observed."""
        scale, zero_point = self._found()
        for value in (self.step_size, self.last_scale):
            put(value, scale.reshape(self._shape))
        if self.offset is not None:
            for value in (self.offset, self.last_offset):
                put(value, zero_point.reshape(self._shape).float())
        self._set_stale(False)

    def _found(self) -> QParams[Tensor]:
        return self._start.qparams(self._statistics())

    # --- state ------------------------------------------------------------------------------------

    @torch.no_grad()
    def run_deferred(self) -> None:
        """Initializes the scale if data was observed, and corrects parameters that are frozen or invalid."""
        if self._stale:
            self.refresh()
        if not self._frozen:
            self._remember()
        write_back(self.step_size, self.last_scale)
        if self.offset is not None:
            write_back(self.offset, self.last_offset)
        super().run_deferred()

    def _remember(self) -> None:
        self.last_scale.copy_(within(whole(self.step_size), self.last_scale, self.eps, self._largest))
        if self.offset is not None:
            self.last_offset.copy_(within(whole(self.offset), self.last_offset, *self._offsets))

    def _find_bad_qparams(self, state_dict: StateDict, prefix: str) -> str | None:
        offset = state_dict.get(prefix + "offset")
        if offset is not None and not offset.is_meta:
            low, high = self._offsets
            offset = whole(offset)
            if not bool(((offset >= low) & (offset <= high)).all()):
                return (
                    f"`offset` is {offset.tolist()} in the state, but it must be finite, and between {low:g} and "
                    f"{high:g} ({self.spec}).\nThe state is damaged: use another, or calibrate again."
                )
        return super()._find_bad_qparams(state_dict, prefix)

    @torch.no_grad()
    def _after_load(self) -> None:
        loaded = whole(self.step_size)  # whose signs are those of the scales of ggml
        has_sign = self.spec.ggml_type is not None
        self.last_scale.copy_(torch.where(loaded.isfinite() & has_sign, loaded, torch.nan))
        self._remember()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Forgets scale and zero point. They must be initialized again."""
        super().reset_parameters()
        for name, value in self._new_statistics(self.last_scale.device).items():
            getattr(self, f"seen_{name}").copy_(value)
        self.step_size.fill_(torch.nan)
        self.last_scale.fill_(torch.nan)
        if self.offset is not None:
            self.offset.zero_()
            self.last_offset.zero_()

    def _from_torch_ao(self, old: dict[str, Tensor]) -> dict[str, Tensor]:
        if "learning_enabled" not in old:
            raise ValueError("the state is from a torch.ao module that does not learn its scale.\nUse FakeQuantize.")
        if bool(old["static_enabled"]):
            raise ValueError(
                "the state is from a torch.ao module that still takes its scale from an observer.\n"
                "Call its enable_param_learning() before it is saved."
            )
        switches = [False, bool(old["fake_quant_enabled"]), not bool(old["learning_enabled"]), False]
        new = {"grid": self.grid, "switches": torch.tensor(switches, dtype=torch.uint8), "step_size": old["scale"]}
        # torch resets the zero point of a symmetric grid before using it.
        return new if self.offset is None else {**new, "offset": old["zero_point"].to(torch.float32)}

    def settings(self) -> Settings:
        """Adds what is learned and how, but not `init`, which only decides where the scale starts."""
        return *super().settings(), self.learn_zero_point, self.grad_factor, self.eps

    def extra_repr(self) -> str:
        """Returns the spec, the switches that are on, and what is learned."""
        learned = "scale and zero point" if self.learn_zero_point else "scale"
        return f"{super().extra_repr()}; learns {learned}"
