"""`PACT`: clips activations at a learned value."""

import torch
from torch import Tensor, nn
from torch.types import Device

from fakequant._backends.checks import EPS, check_eps
from fakequant._backends.torch.tensor_functions import fake_quantize
from fakequant._backends.torch.torch_annotations import Function
from fakequant.nn._bounded_parameters import FunctionContext, keep_in_graph, keep_within, whole, within, write_back
from fakequant.nn._quantizer import Quantizer
from fakequant.nn._quantizer_state import StateDict
from fakequant.qparams import QParams
from fakequant.spec import QuantSpec


class _Clip(Function):
    """clamp(x, 0, alpha). The gradient of alpha is summed in float64."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, alpha: Tensor) -> Tensor:
        return torch.minimum(x.clamp(min=0), alpha.to(x.dtype))

    @staticmethod
    def setup_context(ctx: FunctionContext, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: FunctionContext, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, alpha = ctx.saved_tensors
        above = x > alpha.to(x.dtype)
        dx = torch.where((x >= 0) & ~above, dy, 0)
        return dx, torch.where(above, dy, 0).sum(dtype=torch.float64).to(alpha.dtype).reshape(alpha.shape)


class _ClipForward(_Clip):
    """`_Clip` with a forward-mode derivative, which torch.compile does not support."""

    @staticmethod
    def setup_context(ctx: FunctionContext, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: FunctionContext, x_t: Tensor | None, alpha_t: Tensor | None) -> Tensor:
        x, alpha = ctx.saved_tensors
        above = x > alpha.to(x.dtype)
        inside = torch.zeros_like(x) if x_t is None else torch.where((x >= 0) & ~above, x_t, 0)
        return inside if alpha_t is None else inside + torch.where(above, alpha_t.to(x.dtype), 0)


class PACT(Quantizer):
    """Clips activations at a learned `alpha` and quantizes them to the codes 0 to 2^bits - 1. Replaces a ReLU.

        y = fake_quantize(clamp(x, 0, alpha), scale = alpha / qmax, zero_point = 0)

        dx = dy where 0 <= x <= alpha, else 0        dalpha = sum of dy where x > alpha

    `alpha` has a given initial value and needs no data. It stays finite and at least `eps`, whatever the learning
    rate. It should have weight decay, so `param_groups` leaves it with the weights.

    Args:
        bits: The bit width.
        alpha: The initial value.
        eps: The smallest alpha.
        path: The path of the module in its model, for messages.
        device: The device of parameters and buffers.

    >>> fq = PACT(2, alpha=3.0)
    >>> fq(torch.tensor([-1.0, 1.2, 9.0]))
    tensor([0., 1., 3.], grad_fn=<FakeQuantizePassThroughBackward>)
    """

    _scale_name = "alpha"
    alpha: nn.Parameter
    last_alpha: Tensor

    def __init__(
        self, bits: int = 8, alpha: float = 10.0, *, eps: float = EPS, path: str | None = None, device: Device = None
    ) -> None:
        """Makes the buffers. The documentation of the class describes the arguments."""
        spec = QuantSpec(bits=bits, signed=False, symmetric=False)
        super().__init__(spec, observing=False, sync=False, process_group=None, path=path, device=device)
        check_eps(eps)
        self.eps = float(eps)
        self._blocks = ()
        self._largest = torch.finfo(torch.float32).max / 2
        if not isinstance(alpha, (int, float)) or not self.eps <= alpha <= self._largest:
            raise ValueError(f"`alpha` must be a finite number of at least `eps`, {eps}, got {alpha!r}.")
        self._start = float(alpha)
        self.alpha = nn.Parameter(torch.full((1,), float(alpha), dtype=torch.float32, device=device))
        self.register_buffer("last_alpha", self.alpha.detach().clone(), persistent=False)

    @property
    def scale(self) -> Tensor:
        """The scale, alpha / qmax."""
        return (self._current() / self.spec.qmax).reshape(())

    @property
    def zero_point(self) -> Tensor:
        """The zero point, always 0."""
        return torch.zeros((), dtype=torch.int32, device=self.last_alpha.device)

    def qparams(self) -> QParams[Tensor]:
        """Returns scale (float32) and zero point (int32).

        >>> PACT(8, alpha=2.55).qparams()
        QParams(scale=tensor(0.0100), zero_point=tensor(0, dtype=torch.int32))
        """
        return QParams(self.scale, self.zero_point)

    def _current(self) -> Tensor:
        if self._frozen:
            return self.last_alpha
        return within(whole(self.alpha), self.last_alpha, self.eps, self._largest)

    def _run(self, x: Tensor) -> Tensor:
        if not self._quantizing:
            return keep_in_graph(x.clamp(min=0), self.alpha)
        if self._frozen:
            x, alpha = keep_in_graph(x, self.alpha), self.last_alpha
        else:
            alpha = keep_within(self.alpha, self.last_alpha, self.eps, self._largest)
        clip = _Clip if torch.compiler.is_compiling() else _ClipForward
        clipped = clip.apply(x, alpha)
        scale = alpha.detach() / self.spec.qmax
        return fake_quantize(clipped, scale, 0, self.spec, gradient="pass")

    @torch.no_grad()
    def run_deferred(self) -> None:
        """Corrects an alpha that is frozen or invalid."""
        self.last_alpha.copy_(self._current())
        write_back(self.alpha, self.last_alpha)
        super().run_deferred()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Sets alpha to its initial value."""
        super().reset_parameters()
        self.alpha.fill_(self._start)
        self.last_alpha.fill_(self._start)

    def _find_mismatch(self, state_dict: StateDict, prefix: str) -> str | None:
        alpha = state_dict.get(prefix + "alpha")
        if alpha is not None and not bool(alpha.isfinite().all()):
            return (
                f"`alpha` is {alpha.tolist()} in the state, but it must be finite.\nThe state is damaged: use another."
            )
        return super()._find_mismatch(state_dict, prefix)

    @torch.no_grad()
    def _after_load(self) -> None:
        self.last_alpha.copy_(within(whole(self.alpha), self.last_alpha, self.eps, self._largest))
