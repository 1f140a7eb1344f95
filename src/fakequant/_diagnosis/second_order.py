"""An estimate of the error of a model's output for each width of a weight, from one backward pass per batch.

For a small error d of a weight, the output changes by J d, where J is the derivative of the output. If rounding errors
are independent and have the mean 0, the expected square of the change is

    sum over the weights of (J^T J)_ii d_i^2

The diagonal of J^T J is the mean of (J^T e)^2 over vectors e of random signs, because all other products of their
elements have the mean 0: those of two elements of an output, and those of two samples. So the gradient of one weighted
sum over a whole batch is enough.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fakequant._diagnosis.output_error import output_of, relative
from fakequant._diagnosis.sums import exact
from fakequant._diagnosis.widths import Choice, quantizer_of, weight_of
from fakequant._train.model_snapshot import unchanged
from fakequant._train.running import Data, run


def estimated_costs(model: nn.Module, data: Data, choices: list[Choice]) -> list[tuple[float, dict[int, float]]]:
    """Returns for each choice the estimated relative squared error of the output: with its own grid, and by width.

    Args:
        model: A prepared model in evaluation mode, with all quantizers off.
        data: Batches, or a function that runs the model.
        choices: The weights, and their widths.
    """
    gradients = _Gradients(choices)
    hooks = [model.register_forward_hook(gradients.add)]
    for number, choice in enumerate(choices):
        for unit in choice.units:
            hooks.append(quantizer_of(unit).register_forward_hook(gradients.leaf(number)))
    try:
        with torch.enable_grad(), unchanged(model):
            run(model, data, None)
    finally:
        for hook in hooks:
            hook.remove()
    if gradients.outputs == 0:
        raise ValueError("`data` did not run the model, so there is no output to differentiate.")
    found = []
    for choice, squares in zip(choices, gradients.squares, strict=True):
        own = relative(_noise(choice, None, squares), gradients.signal)
        found.append((own, {b: relative(_noise(choice, b, squares), gradients.signal) for b in choice.specs}))
    return found


class _Gradients:
    """Sums of squared gradients of the output with respect to weights, over batches."""

    def __init__(self, choices: list[Choice]) -> None:
        self.squares: list[Tensor | None] = [None for _ in choices]
        self.signal = 0.0
        self.outputs = 0
        # The weights that the current call has used, with the numbers of their choices.
        self._used: list[tuple[int, Tensor]] = []
        self._random = torch.Generator().manual_seed(0)  # its own, so that results repeat and nothing else changes

    def leaf(self, number: int) -> Any:
        """Returns a forward hook for the quantizer of a weight, which makes its result a tensor with a gradient."""

        def hook(quantizer: nn.Module, args: Any, result: Tensor) -> Tensor:
            weight = result.detach().requires_grad_()
            self._used.append((number, weight))
            return weight

        return hook

    def add(self, model: nn.Module, args: Any, result: Any) -> None:
        """A forward hook for the model: differentiates its output."""
        y, used = output_of(result), self._used
        self._used = []
        self.outputs += 1
        self.signal += float(exact(y).square().sum())
        if not used:
            return
        if not y.requires_grad:
            raise ValueError(
                'The output of the model has no gradient, which measure="second_order" needs.\n'
                'Remove torch.no_grad() from `data` and from the model, or use measure="output".'
            )
        signs = torch.randint(0, 2, y.shape, generator=self._random).mul_(2).sub_(1).to(y.device, y.dtype)
        found = torch.autograd.grad(y, [weight for _, weight in used], signs, allow_unused=True)
        sums: dict[int, Tensor] = {}
        for (number, _), gradient in zip(used, found, strict=True):
            if gradient is not None:
                dense = gradient.to_dense().float()
                sums[number] = sums[number] + dense if number in sums else dense
        for number, gradient in sums.items():
            before = self.squares[number]
            self.squares[number] = gradient.square() if before is None else before + gradient.square()


@torch.no_grad()
def _noise(choice: Choice, bits: int | None, squares: Tensor | None) -> float:
    """Returns the estimated squared error of the output with a weight of this width."""
    if squares is None:  # the weight has no influence on the output
        return 0.0
    unit = choice.units[0]
    quantizer = quantizer_of(unit)
    choice.set(bits)
    quantizer.quantizing = True
    weight = weight_of(unit)
    error = exact(quantizer(weight)) - exact(weight)
    quantizer.quantizing = False
    return float((exact(squares) * error.square()).sum())
