"""Conversion of torch.ao's fake-quantize modules and their states, with bit-identical results.

    torch.ao                          here
    FakeQuantize                      FakeQuantize, numerics "torch"
    FusedMovingAvgObsFakeQuantize     FusedFakeQuantize, torch's own rule for the scale
    _LearnableFakeQuantize            LearnedFakeQuantize, numerics "torch"

`torch.ao` is not imported, as releases of torch may lack it: its modules are recognized by their attributes.
"""

from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from fakequant._backends.torch import tensor_functions, tensor_torch_names
from fakequant._backends.types import FusedArguments
from fakequant.nn._fake_quantize import FakeQuantize
from fakequant.nn._learned_fake_quantize import LearnedFakeQuantize
from fakequant.nn._quantizer import Quantizer, Settings
from fakequant.nn._quantizer_state import StateDict
from fakequant.observers._observer import Observer, State
from fakequant.observers._ranks import Ranks
from fakequant.observers._running import MinMax, MovingAverage
from fakequant.spec import QuantSpec

# A module or observer of torch.ao. Its class cannot be imported, see above.
TorchAoModule: TypeAlias = Any


class FusedFakeQuantize(FakeQuantize):
    """`FakeQuantize` with the arithmetic of torch's fused operator, for models that were trained with it.

    torch's fused operator chooses scales by another rule than torch's observers and fakequant. A symmetric grid has
    its zero point in the middle only if the data has both signs, and a very small range is widened. NaN and
    infinities change the range. Use `FakeQuantize` for everything else.

    Args:
        spec: The grid: affine, with numerics "torch", per tensor or per channel of axis 0.
        observer: A `MovingAverage`.
        symmetric: Whether torch's scheme is symmetric.
        options: Other arguments of `FakeQuantize`, except `gradient` and `eps`.

    >>> fq = FusedFakeQuantize(QuantSpec(symmetric=False, numerics="torch"), symmetric=True)
    >>> fq(torch.tensor([0.5, 1.0, 2.0]))
    tensor([0.5020, 0.9961, 2.0000])
    >>> fq.zero_point  # the data is positive
    tensor(-128, dtype=torch.int32)
    """

    observer: MovingAverage

    def __init__(
        self,
        spec: QuantSpec,
        observer: Observer | None = None,
        *,
        symmetric: bool = False,
        **options: Any,  # of several types, checked by `FakeQuantize`
    ) -> None:
        observer = observer or MovingAverage()
        if spec.symmetric or spec.numerics != "torch" or spec.group_size is not None:
            raise ValueError(
                'The fused operator needs QuantSpec(symmetric=False, numerics="torch") without groups: its zero point '
                f"can be any code, also with `symmetric=True`. Got {spec!r}."
            )
        if spec.axis not in (None, 0) or not isinstance(observer, MovingAverage):
            raise ValueError(
                "The fused operator supports scales per tensor or per channel of axis 0, and a moving average; "
                f"got {spec!r} and {observer}."
            )
        if {"gradient", "eps"} & options.keys():
            raise ValueError(
                "The fused operator clips gradients and has no eps: it takes neither `gradient` nor `eps`."
            )
        super().__init__(spec, observer, **options)
        self.symmetric = symmetric

    def _find_bad_qparams(self, state_dict: StateDict, prefix: str) -> None:
        """Accepts any scale: it is computed again after a state was loaded. torch observes non-finite values too."""

    def settings(self) -> Settings:
        """Adds whether torch's scheme is symmetric."""
        return *super().settings(), self.symmetric

    def extra_repr(self) -> str:
        """Adds whether torch's scheme is symmetric."""
        return f"{super().extra_repr()}; fused{', symmetric' if self.symmetric else ''}"

    def _quantize_with_seen_range(self, x: Tensor, ranks: Ranks) -> Tensor:
        if ranks.several or self.rounding is not None:
            return super()._quantize_with_seen_range(x, ranks)
        return self._operate(x, observe=True)

    def _observe(self, x: Tensor, ranks: Ranks) -> None:
        if ranks.several:
            super()._observe(x, ranks)
        else:
            with torch.no_grad():
                self._operate(x, observe=True)

    def _run_purely(self, x: Tensor, ranks: Ranks) -> Tensor:
        raise RuntimeError(
            "torch's fused operator changes its running range in place, which transforms of torch.func do not allow.\n"
            "Freeze the range: fakequant.nn.switch_quantizers(model, frozen=True), or use FakeQuantize."
        )

    def refresh(self) -> None:
        """Computes scale and zero point from the running range, by torch's rule."""
        with torch.no_grad():
            self._operate(torch.zeros(self.scale.numel(), 1, device=self.scale.device), observe=False)
            unseen = self.running_min > self.running_max
            self.scale.copy_(torch.where(unseen, torch.nan, self.scale))
            self.zero_point.copy_(torch.where(unseen, 0, self.zero_point))

    def _after_load(self) -> None:
        # Saved scales may be outdated: torch computes them from the running range whenever it quantizes.
        self.refresh()

    def _operate(self, x: Tensor, *, observe: bool) -> Tensor:
        on = torch.ones(1, dtype=torch.int64, device=x.device)
        per_row = self.spec.axis is not None
        state = (self.running_min, self.running_max, self.scale, self.zero_point)
        low, high, scale, zero_point = (t if per_row else t.view(1) for t in state)
        arguments = FusedArguments(
            on if observe else torch.zeros_like(on), on, low, high, scale, zero_point,
            self.observer.constant, self.spec.qmin, self.spec.qmax, 0 if per_row else -1, per_row, self.symmetric,
        )  # fmt: skip
        return tensor_torch_names.fused_moving_avg_obs_fake_quant(x, arguments)


def from_torch_ao(module: TorchAoModule) -> Quantizer:
    """Returns a quantizer with the settings and the state of a torch.ao fake-quantize module.

    `module` is a `FakeQuantize` with a min-max or moving-average observer, a `FusedMovingAvgObsFakeQuantize` or a
    `_LearnableFakeQuantize`. On finite data the results are bit-identical. Two differences are intended:

    - In evaluation mode the quantizer does not observe.
    - `FakeQuantize` ignores NaN and infinities, whereas torch.ao observes them. An end of the saved range that is
      not finite counts as not observed. The other end is kept. There is no scale until both ends are known.

    >>> import warnings
    >>> warnings.simplefilter("ignore")  # the deprecation warning of torch.ao
    >>> from torch.ao import quantization as ao
    >>> theirs = ao.FakeQuantize(ao.MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
    >>> x = torch.randn(100)
    >>> y = theirs(x)
    >>> ours = from_torch_ao(theirs)
    >>> torch.equal(ours(x), theirs(x)), ours
    (True, FakeQuantize(uint8, per tensor, torch numerics; observing, quantizing; MovingAverage(constant=0.01)))
    """
    observer = getattr(module, "activation_post_process", None)
    if observer is None or not hasattr(module, "fake_quant_enabled"):
        whole = "\nUse fakequant.load_torch_ao_state for a whole model." if isinstance(module, nn.Module) else ""
        raise TypeError(f"`module` must be a fake-quantize module of torch.ao, got {type(module).__name__}.{whole}")
    scheme = str(observer.qscheme)
    if "float_qparams" in scheme:
        raise ValueError("Zero points with a fraction (float_qparams) are not supported.")
    symmetric = "symmetric" in scheme
    axis = observer.ch_axis if "per_channel" in scheme else None
    channels = (None,) * (axis or 0) + (_channels(module, observer),) if axis is not None else None
    learned = hasattr(module, "learning_enabled")
    follows = None if learned else _observer(observer)
    eps = float(module.eps if learned else observer.eps)
    options: dict[str, Any] = {"shape": channels, "eps": eps, "device": module.scale.device}
    bounds = (int(module.quant_min), int(module.quant_max))
    ours: Quantizer
    if learned:
        options["grad_factor"] = None if module.use_grad_scaling else 1.0
        ours = LearnedFakeQuantize(_spec(*bounds, symmetric, axis), **options)
    elif hasattr(module, "is_symmetric_quant"):
        options["symmetric"] = symmetric
        del options["eps"]
        ours = FusedFakeQuantize(_spec(*bounds, False, axis), follows, **options)
    else:
        ours = FakeQuantize(_spec(*bounds, symmetric, axis), follows, **options)
    ours.load_state_dict(module.state_dict())
    return ours.train(module.training)


def _channels(module: TorchAoModule, observer: TorchAoModule) -> int:
    number: int = module.scale.numel() if hasattr(module, "learning_enabled") else observer.min_val.numel()
    if number == 0:
        raise ValueError(
            "The torch.ao module has not seen data, so it does not know how many channels there are.\n"
            "Run it once, or build FakeQuantize(spec, shape=...)."
        )
    return number


def _observer(observer: TorchAoModule) -> Observer:
    name = type(observer).__name__
    constant = getattr(observer, "averaging_constant", None)
    if name in ("MovingAverageMinMaxObserver", "MovingAveragePerChannelMinMaxObserver") and constant is not None:
        return MovingAverage(constant)
    if name in ("MinMaxObserver", "PerChannelMinMaxObserver"):
        return MinMax()
    raise ValueError(
        f"The state of {name} cannot be converted. Only min-max and moving-average observers are "
        "supported.\nBuild FakeQuantize with an observer of fakequant.observers and calibrate it."
    )


def _spec(qmin: int, qmax: int, symmetric: bool, axis: int | None) -> QuantSpec:
    """Returns the spec with this range of codes. Raises ValueError if there is none."""
    bits = qmax.bit_length() + (qmin < 0)
    if symmetric and qmin >= 0:
        raise ValueError(
            f"torch.ao's symmetric scheme for codes {qmin} to {qmax} has its zero point in the middle of them, which "
            "is not a symmetric grid.\nBuild FakeQuantize with QuantSpec(signed=False, symmetric=False)."
        )
    for narrow in (False, True) if qmin < 0 else (False,):
        spec = QuantSpec(
            bits=max(bits, 1 + (qmin < 0)), signed=qmin < 0, symmetric=symmetric, narrow_range=narrow, axis=axis,
            numerics="torch",
        )  # fmt: skip
        if (spec.qmin, spec.qmax) == (qmin, qmax):
            return spec
    raise ValueError(
        f"The codes {qmin} to {qmax} are not the full range of a bit width.\nA QuantSpec has codes 0 to 2^bits - 1, or "
        "-2^(bits-1) to 2^(bits-1) - 1, without the lowest if narrow_range is True."
    )


# --- states ---------------------------------------------------------------------------------------


def observed_state(quantizer: FakeQuantize, old: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the state of a torch.ao module with an observer as a state of `quantizer`, or raises ValueError."""
    blocks, observer, spec = quantizer._blocks, quantizer.observer, quantizer.spec
    if blocks is None or set(quantizer._names) != {"running_min", "running_max"}:
        raise ValueError(
            f"the state is from a torch.ao module, and {observer} cannot continue from it.\n"
            "Use MovingAverage or MinMax, or calibrate again."
        )
    observed = _observed_tensors(old, spec, observer.init(blocks, quantizer.scale.device))
    is_same_size = observed["scale"].numel() == quantizer.scale.numel()
    if is_same_size and not isinstance(quantizer, FusedFakeQuantize):  # which computes the scale again
        _check_scale(observed, spec, quantizer.eps)
    if quantizer.scale.numel() == 1:  # torch.ao has shape (1,) or ()
        observed = {name: v.reshape(blocks) if v.numel() == 1 else v for name, v in observed.items()}
    switches = [bool(old["observer_enabled"]), bool(old["fake_quant_enabled"]), False, False]
    return {**observed, "grid": quantizer.grid, "switches": torch.tensor(switches, dtype=torch.uint8)}


def _observed_tensors(old: dict[str, Tensor], spec: QuantSpec, empty: State) -> dict[str, Tensor]:
    """Returns the running range, scale and zero point of a torch.ao module, with fakequant's names and dtypes.

    Raises ValueError if the module has no running range, or if the zero points do not fit the spec. `empty` is the
    running range of the quantizer before anything was observed.
    """
    if "learning_enabled" in old or "activation_post_process.min_val" not in old:
        raise ValueError(
            "the state is from a torch.ao module without a running range.\n"
            "Use LearnedFakeQuantize for a learned scale, FakeQuantize(spec, Fixed(lo, hi)) for a fixed one."
        )
    lo, hi = (old[f"activation_post_process.{end}_val"] for end in ("min", "max"))
    scale, zero_point = old["scale"], old["zero_point"]
    if zero_point.is_floating_point():
        raise ValueError("the zero point of the state is not an integer.")
    if lo.numel() == 0:  # nothing was observed, so the scale of 1 has no meaning
        lo, hi = empty["running_min"], empty["running_max"]
        scale, zero_point = torch.full_like(lo, torch.nan), torch.zeros_like(lo, dtype=torch.int32)
    # An end that is not finite counts as not observed. The other end is kept.
    lo = torch.where(lo.isfinite(), lo, torch.inf)
    hi = torch.where(hi.isfinite(), hi, -torch.inf)
    known = lo <= hi
    if known.shape == scale.shape or known.numel() == scale.numel() == 1:
        scale = torch.where(known.reshape(scale.shape), scale, torch.nan)
        zero_point = torch.where(known.reshape(scale.shape), zero_point, 0)
    if spec.symmetric and bool(zero_point.any()):
        raise ValueError(
            f"the zero point is not 0 everywhere, but the spec is symmetric ({spec}).\n"
            "torch's fused operator chooses such zero points for data of one sign: use "
            "fakequant.nn.FusedFakeQuantize, or QuantSpec(symmetric=False)."
        )
    return {"running_min": lo, "running_max": hi, "scale": scale, "zero_point": zero_point.to(torch.int32)}


def _check_scale(observed: dict[str, Tensor], spec: QuantSpec, eps: float) -> None:
    """Raises ValueError if `choose_qparams` does not find the same scale and zero point for the running range."""
    lo, hi, scale, zero_point = (
        observed[name].reshape(-1) for name in ("running_min", "running_max", "scale", "zero_point")
    )
    known = lo <= hi
    if not bool(known.any()):
        return
    scale, zero_point = scale[known], zero_point[known]
    expected = tensor_functions.choose_qparams(lo[known], hi[known], spec, eps=eps)
    if not torch.equal(expected.scale, scale) or not torch.equal(expected.zero_point, zero_point):
        raise ValueError(
            f"the scale of the state is {scale[0]:g}, but for its range this grid has "
            f"{expected.scale[0]:g} ({spec}, eps={eps:g}).\n"
            "It has another range of codes (bits, narrow_range), another eps, or was fused (FusedFakeQuantize)."
        )
