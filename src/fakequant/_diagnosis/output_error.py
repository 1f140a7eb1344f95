"""The error of a model's output, as a score that needs no labels."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from fakequant._diagnosis.sums import exact
from fakequant._train.running import Data, run


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
            "Pass data like that of the evaluation, or `evaluate`."
        )
    return noise / signal
