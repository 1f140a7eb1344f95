"""Trying factors for the input channels of a layer, without changing the model.

    error = |layer quantized(x / s) - layer(x)|^2        over all batches

Activations and weights are quantized as configured, with ranges for the scaled values.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from fakequant._diagnosis.inputs import changed_inputs, inputs_of
from fakequant._diagnosis.sums import Sums, decibels
from fakequant._diagnosis.watching import Args, Kwargs, Result, first_tensor
from fakequant.nn._quantized_layer import QuantizedLayer, input_grid_of
from fakequant.nn._quantizer import Quantizer
from fakequant.ptq._channels import channel_axis, parameters_of, scale_inputs
from fakequant.ptq._ranges import observe_again, observing, observing_copy


@dataclasses.dataclass(eq=False)
class Trial:
    """One choice of factors for a layer, with its quantizers and its errors."""

    # One per input channel.
    factors: Tensor
    activation: Quantizer | None
    weight: Quantizer | None
    sums: Sums = dataclasses.field(default_factory=Sums)

    @property
    def sqnr(self) -> float:
        """The signal to quantization noise ratio of the layer's result, in dB."""
        return decibels(self.sums.signal, self.sums.noise)


class LayerTrials:
    """The trials of one layer."""

    def __init__(self, layer: QuantizedLayer, choices: list[Tensor]) -> None:
        self.layer = layer
        self.trials = [self._trial(factors) for factors in choices]

    def _trial(self, factors: Tensor) -> Trial:
        grid, of_weight = input_grid_of(self.layer), self.layer.weight_quantizer
        made = None if of_weight is None else observing_copy(of_weight)
        if made is not None:
            observe_again(made, self._weight(factors))
        return Trial(factors, None if grid is None else observing_copy(grid), made)

    def _weight(self, factors: Tensor) -> Tensor:
        weight = parameters_of(self.layer)[0].detach().clone()
        scale_inputs(self.layer, factors, weight)
        return weight

    def _scaled(self, trial: Trial, x: Tensor) -> Tensor:
        shape = [1] * x.dim()
        shape[channel_axis(self.layer, x.dim())] = -1
        return x / trial.factors.to(x).reshape(shape)

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Context in which the quantizers of the trials observe the inputs of the layer."""
        static = [t for t in self.trials if t.activation is not None and not t.activation.is_dynamic]

        def look(layer: nn.Module, args: Args, kwargs: Kwargs) -> None:
            for x in inputs_of(layer, args, kwargs):
                for trial in static:
                    assert trial.activation is not None
                    trial.activation(self._scaled(trial, x))

        handle = self.layer.register_forward_pre_hook(look, with_kwargs=True)
        with ExitStack() as undo:
            undo.callback(handle.remove)
            undo.enter_context(observing(trial.activation for trial in static if trial.activation is not None))
            yield

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Context in which every call of the layer is repeated with each trial, and errors are summed."""

        def look(layer: nn.Module, args: Args, kwargs: Kwargs, result: Result) -> None:
            for trial in self.trials:
                trial.sums.add_result(first_tensor(result), self._result(trial, args, kwargs))

        handle = self.layer.register_forward_hook(look, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _result(self, trial: Trial, args: Args, kwargs: Kwargs) -> Tensor | None:
        def quantized(x: Tensor) -> Tensor:
            x = self._scaled(trial, x)
            return x if trial.activation is None else trial.activation(x)

        args, kwargs = changed_inputs(self.layer, args, kwargs, quantized)
        weight = self._weight(trial.factors)
        parameter = parameters_of(self.layer)[0]
        before = parameter.data
        try:
            parameter.data = weight if trial.weight is None else trial.weight(weight)
            return first_tensor(type(self.layer).forward(self.layer, *args, **kwargs))  # without hooks
        finally:
            parameter.data = before
