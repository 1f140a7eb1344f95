"""The error of a model's output, which needs no labels: measured, and estimated for each width of a weight.

The estimate takes one backward pass per batch. For a small error d of a weight, the output changes by J d, where J is
the derivative of the output. If rounding errors are independent and have the mean 0, the expected square of the change
is

    sum over the weights of (J^T J)_ii d_i^2

The diagonal of J^T J is the mean of (J^T e)^2 over vectors e of random signs, because the product of two different
elements of e has the mean 0, whether they belong to one sample or to two. So the gradient of one weighted sum over a
whole batch is enough.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fakequant._diagnosis.switched_layers import Choice, quantizer_of, weight_of
from fakequant._model.running import Data, run
from fakequant._model.snapshot import unchanged
from fakequant._paired_models.errors import exact


def kept(data: Data) -> Data:
    """Returns data that can be run several times with the same batches: a list of the batches, or the function."""
    if isinstance(data, (Tensor, Mapping)) or not isinstance(data, Iterable):
        return data
    return list(data)


def output_of(result: Any) -> Tensor:
    """Returns the first float tensor of a model's result, which may be a tensor, a tuple, a list or a dict.

    >>> import torch
    >>> output_of({"logits": torch.ones(2), "ids": torch.zeros(2)})
    tensor([1., 1.])
    """
    values = result.values() if isinstance(result, Mapping) else result if isinstance(result, (tuple, list)) else ()
    for value in (result, *values):
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    raise TypeError(
        f"The model must return a float tensor, or a tuple or dict with one, got {type(result).__name__}.\n"
        "Pass `evaluate`, a function that takes a model and returns a score."
    )


class OutputScore:
    """Minus the mean squared error of the output, relative to the mean square of the output of the first call."""

    def __init__(self, data: Data) -> None:
        self._data = data
        self._expected: list[Tensor] | None = None

    def __call__(self, model: nn.Module) -> float:
        """Runs the model on the data. The first call, whose output is the expected one, returns 0."""
        outputs: list[Tensor] = []
        hook = model.register_forward_hook(lambda module, args, result: outputs.append(output_of(result).detach()))
        try:
            run(model, self._data, None)
        finally:
            hook.remove()
        if self._expected is None:
            self._expected = [output.clone() for output in outputs]
            return 0.0
        shapes, expected = ([output.shape for output in found] for found in (outputs, self._expected))
        if shapes != expected:
            raise ValueError(
                f"The model returned outputs of {len(shapes)} calls with other shapes than before: {shapes[:3]} and "
                f"{expected[:3]}.\nPass `data` that is the same whenever it is read, such as a list of batches."
            )
        noise = signal = 0.0
        for output, y in zip(outputs, self._expected, strict=True):
            noise += float((exact(output) - exact(y)).square().sum())
            signal += float(exact(y).square().sum())
        return -relative(noise, signal)


def relative(noise: float, signal: float) -> float:
    """Returns the squared error relative to the square of the output."""
    if signal == 0:
        raise ValueError(
            "The output of the float model is 0 for all of `data`, so errors have no measure.\n"
            "Pass data like the data of the evaluation, or `evaluate`."
        )
    return noise / signal


def estimated_costs(model: nn.Module, data: Data, choices: list[Choice]) -> list[tuple[float, dict[int, float]]]:
    """Returns for each choice the estimated relative squared error of the output: with its own grid, and by width.

    The prepared model must be in evaluation mode, with all quantizers off.
    """
    gradients = _Gradients(choices)
    hooks = [model.register_forward_hook(gradients.add)]
    for number, choice in enumerate(choices):
        for layer in choice.layers:
            hooks.append(quantizer_of(layer).register_forward_hook(gradients.leaf(number)))
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
    layer = choice.layers[0]
    quantizer = quantizer_of(layer)
    choice.set(bits)
    quantizer.quantizing = True
    weight = weight_of(layer)
    error = exact(quantizer(weight)) - exact(weight)
    quantizer.quantizing = False
    return float((exact(squares) * error.square()).sum())
