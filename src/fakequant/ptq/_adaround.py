"""`adaround`: learns for each weight whether it is rounded up or down, layer by layer or for all layers of a block.

Rounding up or down is relaxed to a number between 0 and 1:

    h(v) = clip(sigmoid(v) * (1 + 2 c) - c, 0, 1)        c = 0.1, so that h reaches 0 and 1

    regularization = sum of 1 - |2 h(v) - 1|^beta        0 if all h are 0 or 1
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fakequant._model.running import Data, copied
from fakequant._paired_models.calls import RecordedCall, float_tensors
from fakequant._paired_models.errors import decibels
from fakequant.nn._call_quantizers import counting_from
from fakequant.nn._quantized_layer import QuantizedLayer
from fakequant.nn._quantizer import Quantizer
from fakequant.ptq._layer_changes import Changes, layer_filter
from fakequant.ptq._quadratic_error import RoundingProblem
from fakequant.ptq._rounding import Blocks, WeightGrid, round_layers, weight_grid

_STRETCH = 0.1
# The rate of Adam.
_RATE = 0.1
# The weight of the regularization of a weight, relative to the error of the nearest codes of its output channel.
_REGULARIZATION = 0.1
# The share of iterations without regularization, and the first and last beta.
_WARM_UP, _BETAS = 0.2, (20.0, 2.0)


def adaround(
    model: nn.Module,
    data: Data,
    *,
    blocks: str | Sequence[str] = (),
    iterations: int = 500,
    damping: float = 0.01,
    layers: str | Sequence[str] = "*",
    steps: int | None = None,
    reference: nn.Module | None = None,
    progress: bool = True,
) -> Changes:
    """Learns for each weight whether it is rounded up or down (AdaRound), in place, without labels.

    The rounding of a layer is chosen so that its output on the data is as close as possible to its output in the float
    model. It is relaxed to numbers between 0 and 1 at first; a regularization drives these to 0 or 1:

        code = floor(w / scale) + h(v) + zero_point        0 <= h(v) <= 1
        loss = error(code) / error(nearest) + r * sum(1 - |2 h(v) - 1|^beta)        beta falls from 20 to 2

    The error is a quadratic form of the weights, so every iteration uses all data, and their number does not matter for
    its time. Finally, single codes are changed where this lowers the error. Layers are rounded in the order in which
    they run, with the inputs of the quantized model, so that a layer also compensates for errors before it.

    Weights become points of their grids, and scales of weights are frozen. The model trains, converts and exports as
    before. Weights in float formats, whose steps are not equal, are not changed: `gptq` rounds them.

    Args:
        model: A prepared and calibrated model.
        data: Batches, as for `fakequant.calibrate`. The benchmarks use 512 images, or 128 lines of text.
        blocks: Patterns of the paths of modules, such as "layers.*", whose layers are rounded together, so that the
            output of the module stays close to its output in the float model (BRECQ). First they are rounded one by
            one. This takes longer, because every step runs the module on a batch, forward and backward.
        iterations: The number of steps of the optimizer per layer or block.
        damping: How strongly weights are kept near the float weights, relative to the mean square of the inputs.
        layers: Patterns of the paths of the layers to round, such as "encoder.*".
        steps: The maximum number of batches. If None, all are used.
        reference: The float model. If None, `model` with quantizers off, as it is when the function is called. After
            `smooth` or `equalize`, it must have their weights: `unprepare(copy.deepcopy(model))`.
        progress: Whether to show a progress bar.

    Returns:
        The SQNR of each layer's output, with the nearest codes and with the chosen ones.

    >>> import fakequant as fq
    >>> x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    >>> config = fq.QuantConfig(default=fq.LayerConfig(weight=fq.QuantSpec(bits=3, axis=0)))
    >>> model = fq.calibrate(fq.prepare(nn.Sequential(nn.Linear(8, 4)), config), [x], progress=False)
    >>> changes = fq.ptq.adaround(model, [x], progress=False)
    >>> changes.layers[0].after > changes.layers[0].before
    True
    """
    if type(iterations) is not int or iterations < 1:
        raise ValueError(f"`iterations` must be a number of steps, at least 1, got {iterations!r}.")
    solve = partial(_learn_rounding, iterations=iterations)
    return round_layers(
        model,
        data,
        "adaround",
        lambda a: solve,
        blocks=_find_blocks(model, blocks, iterations),
        damping=damping,
        layers=layers,
        steps=steps,
        reference=reference,
        progress=progress,
        needs_equal_steps=True,
    )


def _find_blocks(model: nn.Module, patterns: str | Sequence[str], iterations: int) -> Blocks:
    """Returns the outermost modules that match one of the patterns, with their layers."""
    matches = layer_filter("blocks", patterns)
    found: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        if matches(path) and not any(path.startswith(f"{outer}.") or outer == "" for outer in found):
            layers = [name for name, m in module.named_modules(prefix=path) if isinstance(m, QuantizedLayer)]
            if layers:
                found[path] = layers
    if patterns and not found:
        raise ValueError(
            f"`blocks` matches no module with quantized layers: {patterns!r}.\n"
            "Use patterns of paths as in `model.named_modules()`, such as 'layers.*'."
        )
    return Blocks(found, partial(_round_block, iterations=iterations))


def _learn_rounding(problem: RoundingProblem, iterations: int) -> Tensor:
    """Returns the codes that AdaRound chooses."""
    scale, zero_point = problem.scale, problem.zero_point
    a, b = problem.moments.a.float(), problem.moments.b.float()
    down = torch.floor(problem.weight / scale)
    least = problem.moments.error(problem.values(problem.nearest()))
    unit = torch.where(least > 0, least, 1.0)[..., None].float()
    v = nn.Parameter(initial_rounding(problem.weight / scale - down))
    optimizer = torch.optim.Adam([v], lr=_RATE)
    for iteration in range(iterations):
        s = torch.sigmoid(v.detach())
        stretched = s * (1 + 2 * _STRETCH) - _STRETCH
        h = stretched.clamp(0, 1)
        codes = down + h + zero_point
        inside = (codes >= problem.qmin) & (codes <= problem.qmax)
        slope = 2 * (problem.values(codes.clamp(problem.qmin, problem.qmax)) @ a - b) / unit * scale * inside
        beta = exponent_at(iteration / iterations)
        if beta is not None:
            u = 2 * h - 1
            slope = slope - _REGULARIZATION * 2 * beta * u.abs() ** (beta - 1) * u.sign()
        v.grad = slope * (h == stretched) * (1 + 2 * _STRETCH) * s * (1 - s)
        optimizer.step()
    return (down + (soft_rounding(v.detach()) >= 0.5) + zero_point).clamp(problem.qmin, problem.qmax)


def soft_rounding(v: Tensor) -> Tensor:
    """Returns h(v).

    >>> soft_rounding(torch.tensor([-9.0, 0.0, 9.0]))
    tensor([0.0000, 0.5000, 1.0000])
    """
    return (torch.sigmoid(v) * (1 + 2 * _STRETCH) - _STRETCH).clamp(0, 1)


def initial_rounding(fraction: Tensor) -> Tensor:
    """Returns v with h(v) = fraction, or nearly so if it is close to 0 or 1.

    >>> soft_rounding(initial_rounding(torch.tensor([0.0, 0.25, 0.5])))
    tensor([0.0100, 0.2500, 0.5000])
    """
    inner = (fraction.clamp(0.01, 0.99) + _STRETCH) / (1 + 2 * _STRETCH)
    return torch.log(inner / (1 - inner))


def regularization(v: Tensor, beta: float) -> Tensor:
    """Returns the sum of 1 - |2 h(v) - 1|^beta.

    >>> regularization(torch.tensor([-9.0, 0.0, 9.0]), 2.0)
    tensor(1.)
    """
    return (1 - (2 * soft_rounding(v) - 1).abs() ** beta).sum()


def exponent_at(progress: float) -> float | None:
    """Returns beta after a share of the iterations. None before the regularization starts.

    >>> exponent_at(0.1), exponent_at(0.2), exponent_at(1.0)
    (None, 20.0, 2.0)
    """
    if progress < _WARM_UP:
        return None
    first, last = _BETAS
    return last + (first - last) * 0.5 * (1 + math.cos(math.pi * (progress - _WARM_UP) / (1 - _WARM_UP)))


class _SoftWeight:
    """The weight of a layer with rounding that is being learned.

    Args:
        grid: The float weight and its grid.
        codes: The codes to start from.
    """

    def __init__(self, grid: WeightGrid, codes: Tensor) -> None:
        self.grid = grid
        self.scale, self.zero_point = grid.scales(), grid.zero_points().float()
        steps = grid.weight.float() / self.scale
        self.down = torch.floor(steps)
        up = (codes - self.zero_point - self.down).clamp(0, 1)
        self.v = initial_rounding((steps - self.down + up) / 2).requires_grad_()
        # Codes to use instead of the soft ones. None while the rounding is learned.
        self.fixed: Tensor | None = None

    def value(self) -> Tensor:
        codes = self._within(soft_rounding(self.v)) if self.fixed is None else self.fixed
        return ((codes - self.zero_point) * self.scale).to(self.grid.weight.dtype)

    def learned(self) -> Tensor:
        return self._within((soft_rounding(self.v.detach()) >= 0.5).float())

    def _within(self, h: Tensor) -> Tensor:
        spec = self.grid.quantizer.spec
        return (self.down + h + self.zero_point).clamp(spec.qmin, spec.qmax)


def _round_block(
    block: nn.Module, grids: list[WeightGrid], calls: list[RecordedCall], iterations: int
) -> tuple[float, float]:
    """Learns the rounding of all layers of a block in evaluation mode, in place. Their weights are rounded already.

    Every iteration uses one of the calls of the block. Returns the SQNR of the block's output in dB, with the nearest
    codes and with the chosen ones: the learned ones, or the present ones if these are better.
    """
    present = {grid.layer: grid.codes(weight_grid(grid.layer).weight) for grid in grids}
    soft = [_SoftWeight(grid, present[grid.layer]) for grid in grids]
    signal = sum(float(y.double().square().sum()) for call in calls for y in call.result)
    with _weights_from(soft):
        nearest = _error(block, soft, calls, [grid.codes(grid.weight) for grid in grids])
        least = _error(block, soft, calls, list(present.values()))
        if least > 0:
            _learn(block, soft, calls, least / len(calls), iterations)
            codes = [weight.learned() for weight in soft]
            error = _error(block, soft, calls, codes)
            if error < least:
                least, present = error, dict(zip(present, codes, strict=True))
    for grid in grids:
        grid.write(present[grid.layer])
    return decibels(signal, nearest), decibels(signal, least)


def _learn(
    block: nn.Module, weights: list[_SoftWeight], calls: list[RecordedCall], unit: float, iterations: int
) -> None:
    for weight in weights:
        weight.fixed = None
    parameters = [weight.v for weight in weights]
    optimizer = torch.optim.Adam(parameters, lr=_RATE)
    # The error covers the whole block, so each output channel has a share of it.
    strength = _REGULARIZATION / sum(len(weight.v) for weight in weights)
    order: list[int] = []
    generator = torch.Generator().manual_seed(0)
    for iteration in range(iterations):
        if not order:
            order = torch.randperm(len(calls), generator=generator).tolist()
        with torch.enable_grad():
            loss = _error_of(block, calls[order.pop()]) / unit
            beta = exponent_at(iteration / iterations)
            if beta is not None:
                loss = loss + strength * torch.stack([regularization(v, beta) for v in parameters]).sum()
            # Not `backward`, which would also add to the gradients of the model's own parameters.
            slopes = torch.autograd.grad(loss, parameters, allow_unused=True)
        for v, slope in zip(parameters, slopes, strict=True):
            v.grad = slope
        optimizer.step()


def _error(block: nn.Module, weights: list[_SoftWeight], calls: list[RecordedCall], codes: list[Tensor]) -> float:
    """Returns the squared error of a block's outputs with these codes."""
    for weight, fixed in zip(weights, codes, strict=True):
        weight.fixed = fixed
    with torch.no_grad():
        return sum(float(_error_of(block, call)) for call in calls)


def _error_of(block: nn.Module, call: RecordedCall) -> Tensor:
    args, kwargs = copied(call.args, call.kwargs)
    with counting_from(call.counted):
        found = float_tensors(block(*args, **kwargs))
    pairs = zip(found, call.result, strict=False)
    return torch.stack([(y - z).float().square().sum() for y, z in pairs]).sum()


@contextmanager
def _weights_from(soft: list[_SoftWeight]) -> Iterator[None]:
    """Context in which layers multiply by the soft weights."""
    with ExitStack() as undo:
        for weight in soft:
            record = weight.grid.layer._fakequant
            undo.callback(setattr, record, "save_codes", record.save_codes)
            record.save_codes = False  # the backward pass would quantize the weight again
            undo.callback(weight.grid.quantizer.register_forward_hook(_returning(weight)).remove)
        yield


def _returning(weight: _SoftWeight) -> Any:
    def hook(quantizer: Quantizer, args: Any, result: Tensor) -> Tensor:
        return weight.value()

    return hook
