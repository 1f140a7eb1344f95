"""`compare`: measures how far each layer of a quantized model is from the float model."""

import dataclasses
import math
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from fakequant._convert.fold_batch_norm import Folded
from fakequant._convert.golden.integer_layer import IntegerLayer
from fakequant._model.running import Data, check_module, copied, evaluating, run
from fakequant._model.snapshot import unchanged
from fakequant._paired_models.calls import (
    Args,
    Kwargs,
    RecordedCall,
    Result,
    changed_inputs,
    first_tensor,
    inputs_of,
    recording,
    watching,
    watching_inputs,
)
from fakequant._paired_models.errors import ErrorSums, decibels, exact
from fakequant._paired_models.matched_models import (
    ComparedLayer,
    find_layers,
    float_call,
    has_quantized_weight,
    in_single_steps,
    with_products,
)
from fakequant._prepare.attach import link_norms
from fakequant._util.shown import Shown
from fakequant._util.text import table
from fakequant.nn._call_quantizers import before_call, counting_from, quantizers_in
from fakequant.nn._folding import bias_error, factor_of
from fakequant.nn._input_factors import scaled
from fakequant.nn._quantized_layer import QuantizedLayer, quantized_weight


@dataclasses.dataclass(frozen=True)
class Errors:
    """The errors of a layer. A field is None if the layer was not called, or if its input has no grid."""

    # 10 log10(sum y^2 / sum (y - y_quantized)^2) of the result, in dB. Infinite if both are equal.
    sqnr: float | None
    # The largest |x - x_quantized| of the input, in steps of the grid. Rounding alone gives at most 0.5.
    max_steps: float | None
    # The share of input values outside the range.
    clipped: float | None


@dataclasses.dataclass(frozen=True)
class LayerComparison:
    """The differences between one layer of the quantized model and the same layer of the float model."""

    path: str
    kind: str
    # SQNR of the weight in dB. None if it is not quantized.
    weight_sqnr: float | None
    # SQNR of the layer's output with respect to the rounding of its bias, in dB. None if the bias stays a float or the
    # model is converted.
    bias_sqnr: float | None
    # With the inputs that the layer has in the float model.
    isolated: Errors
    # With the inputs that the layer has in the quantized model, which include the errors of earlier layers.
    accumulated: Errors


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """The result of `compare`. Prints as a table."""

    layers: list[LayerComparison]

    @property
    def worst(self) -> str:
        """The path of the layer with the lowest SQNR in isolation."""
        return self.worst_layer.path

    @property
    def worst_layer(self) -> LayerComparison:
        """The layer with the lowest SQNR in isolation."""
        return min((layer for layer in self.layers if layer.isolated.sqnr is not None), key=_sqnr)

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as dicts, lists, numbers and strings."""
        return {**dataclasses.asdict(self), "worst": self.worst}

    def __str__(self) -> str:
        measured = ["steps", "clipped"]
        header = ["layer", "kind", "weight dB", "bias dB", "by itself dB", *measured, "in the model dB", *measured]
        rows = [
            [
                x.path,
                x.kind,
                *(_words(y, ".1f") for y in (x.weight_sqnr, x.bias_sqnr)),
                *_row(x.isolated),
                *_row(x.accumulated),
            ]
            for x in self.layers
        ]
        sqnr = _words(self.worst_layer.isolated.sqnr, ".1f")
        words = f"Worst by itself: {self.worst or 'the model'}, {sqnr} dB."
        return f"{table(header, rows)}\n\n{words}"


def _sqnr(layer: LayerComparison) -> float:
    """Returns a sort key that ranks NaN below every number."""
    value = layer.isolated.sqnr
    assert value is not None
    return -math.inf if math.isnan(value) else value


def _row(errors: Errors) -> list[str]:
    return [_words(errors.sqnr, ".1f"), _words(errors.max_steps, ".1f"), _words(errors.clipped, ".2%")]


def _words(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


@torch.no_grad()
def compare(
    float_model: nn.Module,
    quantized_model: nn.Module,
    data: Data,
    *,
    steps: int | None = None,
    progress: bool = True,
) -> Comparison:
    """Runs both models on data and measures how far each quantized layer is from the float one.

    Each layer is measured twice. In isolation it gets the inputs of the float model, which shows the layers that lose
    accuracy. In the quantized model it gets the outputs of the quantized layers before it, which shows where errors
    grow. Both models run in evaluation mode and are not changed.

    If a batch norm follows a layer and will be folded into it, the output after the batch norm is compared, and weights
    are multiplied by its factors, because these enlarge the errors of small channels. The output of an attention
    includes its `out_proj`, which also has its own row. For a module that only quantizes its output, steps and clipped
    share describe the output; in isolation it quantizes the output of the float model. If another module quantizes the
    input of a layer, the input is put on that grid in isolation, and cannot be clipped again in the model.

    Args:
        float_model: The model from which `quantized_model` was made: a copy from before `prepare`, or
            `unprepare(copy.deepcopy(model))`.
        quantized_model: A prepared model, calibrated or trained, or a converted model.
        data: Batches, such as a DataLoader or a list.
        steps: The maximum number of batches. If None, all are used.
        progress: Whether to show a progress bar.

    >>> import copy, fakequant as fq
    >>> model = nn.Sequential(nn.Linear(4, 2))
    >>> x = torch.ones(3, 4)
    >>> prepared = fq.prepare(copy.deepcopy(model), fq.recipes.int8(), example=x)
    >>> prepared = fq.calibrate(prepared, [x], progress=False)
    >>> found = compare(model, prepared, [torch.full((3, 4), 2.0)], progress=False)
    >>> found.worst, found.layers[0].isolated.clipped
    ('0', 1.0)
    """
    check_module(float_model, "float_model")
    check_module(quantized_model, "quantized_model")
    if callable(data) and not isinstance(data, Iterable):
        raise TypeError("`data` must be an iterable of batches, because both models run on it, not a function.")
    link_norms(quantized_model)
    with ExitStack() as undo:
        undo.enter_context(with_products(float_model, quantized_model))
        comparison = _Comparison(float_model, quantized_model, find_layers(float_model, quantized_model))
        for context in (unchanged(float_model, quantized_model), evaluating(float_model), evaluating(quantized_model)):
            undo.enter_context(context)
        run(float_model, data, steps, "compare" if progress else None, comparison.add)
        if not comparison.batches:
            raise ValueError("`data` has no batches, so there is nothing to compare.")
        return comparison.result()


class _Comparison:
    """Runs both models batch by batch and sums the errors."""

    def __init__(self, float_model: nn.Module, quantized_model: nn.Module, layers: list[ComparedLayer]) -> None:
        self.float_model, self.quantized_model = float_model, quantized_model
        self.layers = {compared.path: compared for compared in layers}
        self.folded = {path: m for path, m in quantized_model.named_modules() if isinstance(m, Folded)}
        self.batches = 0
        # The last inputs of the output quantizers of modules that quantize nothing else.
        self._given: dict[nn.Module, Tensor] = {}

    def add(self, *args: Any, **kwargs: Any) -> None:
        self.batches += 1
        given = copied(args, kwargs)  # a model may change its input in place
        if self.folded:
            self._find_norms(*copied(*given))
        calls = self._run_float(args, kwargs)
        outputs = [q for compared in self.layers.values() for q in quantizers_in(compared.output_slot)]
        with watching_inputs(outputs, self._given.__setitem__):
            for compared in self.layers.values():
                for number in range(len(calls.get(compared.path, ()))):
                    # If only the quantizer of the output is called, no hook counts the call.
                    counted = before_call(compared.module, number + (compared.output_slot is not None))
                    with counting_from(counted):
                        self._add_isolated(compared, float_call(compared, calls, number))
            self._run_quantized(*given, calls)

    def _find_norms(self, args: Args, kwargs: Kwargs) -> None:
        """Finds the layer of each folded batch norm: the one whose result is the input of the remaining identity."""
        results: list[tuple[Result, str]] = []

        def look(path: str, args: Args, kwargs: Kwargs, result: Result) -> None:
            if path in self.folded:
                layer = next((p for y, p in reversed(results) if args and y is args[0]), None)
                if layer is not None:
                    self.layers[layer].norm = path
            elif isinstance(self.layers[path].module, QuantizedLayer):
                results.append((result, path))

        with watching({**{p: compared.module for p, compared in self.layers.items()}, **self.folded}, look):
            self.quantized_model(*args, **kwargs)

    def _run_float(self, args: Args, kwargs: Kwargs) -> dict[str, list[RecordedCall]]:
        modules = {path: compared.before for path, compared in self.layers.items()}
        norms = {compared.norm for compared in self.layers.values() if compared.norm is not None}
        modules.update({path: self.float_model.get_submodule(path) for path in norms | self.folded.keys()})
        like = {path: compared.module for path, compared in self.layers.items()}
        with in_single_steps(self.float_model, like), recording(modules) as calls:
            self.float_model(*args, **kwargs)
        return calls

    def _add_isolated(self, compared: ComparedLayer, call: RecordedCall) -> None:
        if compared.output_slot is not None:  # layers inside the module have their own rows
            result = None if call.result is None else compared.output_slot(call.result)
            return self._add(compared, compared.isolated, call, call.args, call.kwargs, result)
        args, kwargs = call.args, call.kwargs
        grid = compared.input_grid
        if grid is not None and grid not in quantizers_in(getattr(compared.module, "input_quantizer", None)):
            args, kwargs = changed_inputs(compared.module, args, kwargs, grid)
        compared.input_dims = next((x.dim() for x in inputs_of(compared.module, args, kwargs)), None)
        result = compared.module(*args, **kwargs)
        self._add(compared, compared.isolated, call, call.args, call.kwargs, result)

    def _run_quantized(self, args: Args, kwargs: Kwargs, calls: dict[str, list[RecordedCall]]) -> None:
        numbers: dict[str, int] = {}

        def look(path: str, args: Args, kwargs: Kwargs, result: Result) -> None:
            number = numbers[path] = numbers.get(path, -1) + 1
            if number < len(calls.get(path, ())):  # otherwise the float model took another path
                compared = self.layers[path]
                self._add(compared, compared.accumulated, float_call(compared, calls, number), args, kwargs, result)

        with watching({path: compared.module for path, compared in self.layers.items()}, look):
            self.quantized_model(*args, **kwargs)

    def _add(
        self, compared: ComparedLayer, sums: ErrorSums, call: RecordedCall, args: Args, kwargs: Kwargs, result: Result
    ) -> None:
        """Adds the errors of one call of a quantized layer to `sums`: with respect to `call`, of the float layer."""
        y = first_tensor(result)
        if compared.norm_to_come is not None and y is not None:
            y = compared.norm_to_come.forward(y)  # not called, because a hook may quantize its result
        sums.add_result(call.result, y)
        if compared.output_slot is not None:
            grid = compared.output_grid
            given = None if grid is None else self._given.pop(grid, None)
            if grid is not None and given is not None:
                sums.add_quantized(grid, given, call.result)
        elif compared.input_grid is not None:
            there = [scaled(compared.module, x) for x in inputs_of(compared.module, call.args, call.kwargs)]
            is_float = args is call.args and kwargs is call.kwargs
            here = there if is_float else inputs_of(compared.module, args, kwargs)
            for expected, x in zip(there, here, strict=False):
                sums.add_quantized(compared.input_grid, x, expected)

    def result(self) -> Comparison:
        """Returns the errors of all layers."""
        if not any(compared.isolated.results for compared in self.layers.values()):
            raise ValueError(
                "No quantized layer received values while `float_model` ran on `data`, so there is nothing to "
                "compare.\nPass batches that are not empty and that reach the layers."
            )
        return Comparison(
            [
                LayerComparison(
                    path=compared.path,
                    kind=compared.kind,
                    weight_sqnr=self._weight_sqnr(compared),
                    bias_sqnr=_bias_sqnr(compared),
                    isolated=_errors(compared.isolated),
                    accumulated=_errors(compared.accumulated),
                )
                for compared in self.layers.values()
            ]
        )

    def _weight_sqnr(self, compared: ComparedLayer) -> float | None:
        layer: Any = compared.module
        if not has_quantized_weight(layer):
            return None
        kind = layer._fakequant.kind
        weight, quantized = exact(kind.read_weight(compared.before)), scaled(layer, exact(quantized_weight(layer)))
        of_channels = compared.norm_to_come is None or weight.dim() > 2 or compared.input_dims == 2  # not of tokens
        if compared.norm is not None and of_channels:
            weight = _scaled(weight, self.float_model.get_submodule(compared.norm), kind.channel_axis)
        if compared.norm_to_come is not None and of_channels:
            quantized = _scaled(quantized, compared.norm_to_come, kind.channel_axis)
        sums = ErrorSums()
        sums.add_result(weight, quantized)
        return _errors(sums).sqnr


def _errors(sums: ErrorSums) -> Errors:
    """Returns the errors over all calls."""
    return Errors(
        sqnr=sums.sqnr if sums.results else None,
        max_steps=sums.steps,
        clipped=sums.clipped / sums.total if sums.total else None,
    )


def _bias_sqnr(compared: ComparedLayer) -> float | None:
    """Returns the SQNR of a prepared layer's output with respect to the rounding of its bias, or None."""
    is_prepared = isinstance(compared.module, QuantizedLayer) and not isinstance(compared.module, IntegerLayer)
    found = bias_error(compared.module) if is_prepared else None
    if found is None or not compared.isolated.results:
        return None
    return decibels(compared.isolated.signal / compared.isolated.results, float(found[0].square().mean()))


def _scaled(weight: Tensor, norm: nn.Module, axis: int) -> Tensor:
    """Returns a weight multiplied by the factors of a batch norm."""
    factor = factor_of(norm).to(weight.device)
    return weight * factor.reshape([-1 if a == axis else 1 for a in range(weight.dim())])
