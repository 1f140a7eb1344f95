"""`adaround`: learns for each weight whether it is rounded up or down."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fakequant._train.running import Data
from fakequant.nn._quantized_layer import QuantizedLayer
from fakequant.ptq._changes import Changes
from fakequant.ptq._rounding import Blocks, Problem, layer_filter, round_layers
from fakequant.ptq._soft_rounding import RATE, REGULARIZATION, STRETCH, exponent_at, initial_rounding, soft_rounding


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

    The rounding of a layer is chosen so that its result on the data is as close as possible to its result in the float
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
            result of the module stays close to that of the float model (BRECQ). They are rounded one by one first.
            This takes longer: every step runs the module on a batch, forward and backward.
        iterations: The number of steps of the optimizer per layer or block.
        damping: How strongly weights are kept near those of the float model, relative to the mean square of the inputs.
        layers: Patterns of the paths of the layers to round, such as "encoder.*".
        steps: The maximum number of batches. If None, all are used.
        reference: The float model. If None, `model` with quantizers off, as it is when the function is called. After
            `smooth` or `equalize`, it must have their weights: `unprepare(copy.deepcopy(model))`.
        progress: Whether to show a progress bar.

    Returns:
        The SQNR of each layer's result, with the nearest codes and with the chosen ones.

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
        solve,
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
    return Blocks(found, iterations)


def _learn_rounding(problem: Problem, iterations: int) -> Tensor:
    """Returns the codes that AdaRound chooses."""
    scale, zero_point = problem.scale, problem.zero_point
    a, b = problem.moments.a.float(), problem.moments.b.float()
    down = torch.floor(problem.weight / scale)
    least = problem.moments.error(problem.values(problem.nearest()))
    unit = torch.where(least > 0, least, 1.0)[..., None].float()
    v = nn.Parameter(initial_rounding(problem.weight / scale - down))
    optimizer = torch.optim.Adam([v], lr=RATE)
    for iteration in range(iterations):
        s = torch.sigmoid(v.detach())
        stretched = s * (1 + 2 * STRETCH) - STRETCH
        h = stretched.clamp(0, 1)
        codes = down + h + zero_point
        inside = (codes >= problem.qmin) & (codes <= problem.qmax)
        slope = 2 * (problem.values(codes.clamp(problem.qmin, problem.qmax)) @ a - b) / unit * scale * inside
        beta = exponent_at(iteration / iterations)
        if beta is not None:
            u = 2 * h - 1
            slope = slope - REGULARIZATION * 2 * beta * u.abs() ** (beta - 1) * u.sign()
        v.grad = slope * (h == stretched) * (1 + 2 * STRETCH) * s * (1 - s)
        optimizer.step()
    return (down + (soft_rounding(v.detach()) >= 0.5) + zero_point).clamp(problem.qmin, problem.qmax)
