"""`compare`: measures how far each layer of a quantized model is from the float model."""

import dataclasses
import math
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from fakequant._convert.folded_norm import Folded
from fakequant._convert.golden.integer_layer import IntegerLayer
from fakequant._diagnosis.inputs import changed_inputs, inputs_of
from fakequant._diagnosis.pairs import Pair, find_pairs, has_quantized_weight, reference
from fakequant._diagnosis.sums import Errors, Sums, decibels, exact
from fakequant._diagnosis.watching import (
    Args,
    Call,
    Kwargs,
    Result,
    first_tensor,
    in_single_steps,
    recording,
    watching,
    with_products,
)
from fakequant._prepare.attach import link_norms
from fakequant._train.model_snapshot import unchanged
from fakequant._train.running import Data, check_module, copied, evaluating, run
from fakequant._util.text_table import table
from fakequant.nn._batch_norm import factor_of
from fakequant.nn._call_quantizers import before_call, counting_from, quantizers_in
from fakequant.nn._deployed_bias import bias_error
from fakequant.nn._quantized_layer import QuantizedLayer, quantized_weight


@dataclasses.dataclass(frozen=True)
class LayerComparison:
    """The differences between one layer of the quantized model and the same layer of the float model."""

    path: str
    kind: str
    # SQNR of the weight in dB. None if it is not quantized.
    weight_sqnr: float | None
    # SQNR of the layer's result with respect to the rounding of its bias, in dB. None if the bias stays a float or the
    # model is converted.
    bias_sqnr: float | None
    # With the inputs that the layer has in the float model.
    isolated: Errors
    # With the inputs that the layer has in the quantized model, which include the errors of earlier layers.
    accumulated: Errors


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of `compare`. Prints as a table."""

    layers: list[LayerComparison]

    @property
    def worst(self) -> str:
        """The path of the layer with the lowest SQNR in isolation."""
        return min((layer for layer in self.layers if layer.isolated.sqnr is not None), key=_sqnr).path

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
        worst = next(layer for layer in self.layers if layer.path == self.worst)
        words = f"Worst by itself: {worst.path or 'the model'}, {_words(worst.isolated.sqnr, '.1f')} dB."
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
    accuracy. In the quantized model it gets the results of the quantized layers before it, which shows where errors
    grow. Both models run in evaluation mode and are not changed.

    If a batch norm follows a layer and will be folded into it, the result after the batch norm is compared, and weights
    are multiplied by its factors, because these enlarge the errors of small channels. The result of an attention
    includes its `out_proj`, which also has its own row. For a module that only quantizes its result, steps and clipped
    share are those of the result; in isolation it quantizes the result of the float model. If another module quantizes
    the input of a layer, the input is put on that grid in isolation, and cannot be clipped again in the model.

    Args:
        float_model: The model from which `quantized_model` was made: a copy from before `prepare`, or
            `unprepare(copy.deepcopy(model))`.
        quantized_model: A prepared model, calibrated or trained, or a converted model.
        data: Batches, such as a DataLoader or a list.
        steps: The number of batches to use. None for all.
        progress: Whether to show a progress bar.

    >>> import copy, fakequant as fq
    >>> model = nn.Sequential(nn.Linear(4, 2))
    >>> prepared = fq.prepare(copy.deepcopy(model), fq.recipes.int8())
    >>> prepared = fq.calibrate(prepared, [torch.ones(3, 4)], progress=False)
    >>> found = compare(model, prepared, [torch.full((3, 4), 2.0)], progress=False)
    >>> found.worst, found.layers[0].isolated.clipped
    ('0', 1.0)
    """
    check_module(float_model, "float_model")
    check_module(quantized_model, "quantized_model")
    if callable(data) and not isinstance(data, Iterable):
        raise TypeError("`data` must be an iterable of batches, because both models run on it, not a function.")
    link_norms(quantized_model)
    with with_products(float_model, quantized_model):
        return _compare(float_model, quantized_model, data, steps, progress)


def _compare(
    float_model: nn.Module, quantized_model: nn.Module, data: Data, steps: int | None, progress: bool
) -> Comparison:
    comparison = _Comparison(float_model, quantized_model, find_pairs(float_model, quantized_model))
    with unchanged(float_model, quantized_model), evaluating(float_model), evaluating(quantized_model):
        run(float_model, data, steps, "compare" if progress else None, comparison.add)
        if not comparison.batches:
            raise ValueError("`data` has no batches, so there is nothing to compare.")
        return comparison.result()


class _Comparison:
    """Runs both models batch by batch and sums the errors."""

    def __init__(self, float_model: nn.Module, quantized_model: nn.Module, pairs: list[Pair]) -> None:
        self.float_model, self.quantized_model = float_model, quantized_model
        self.pairs = {pair.path: pair for pair in pairs}
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
        with ExitStack() as undo:
            for pair in self.pairs.values():
                for quantizer in quantizers_in(pair.output_slot):
                    undo.callback(quantizer.register_forward_pre_hook(self._keep_given).remove)
            for pair in self.pairs.values():
                for number in range(len(calls.get(pair.path, ()))):
                    # If only the quantizer of the output is called, no hook counts the call.
                    counted = before_call(pair.module, number + (pair.output_slot is not None))
                    with counting_from(counted):
                        self._add_isolated(pair, reference(pair, calls, number))
            self._run_quantized(*given, calls)

    def _keep_given(self, quantizer: nn.Module, args: Args) -> None:
        self._given[quantizer] = args[0]

    def _find_norms(self, args: Args, kwargs: Kwargs) -> None:
        """Finds the layer of each folded batch norm: the one whose result is the input of the remaining identity."""
        results: list[tuple[Result, str]] = []

        def look(path: str, args: Args, kwargs: Kwargs, result: Result) -> None:
            if path in self.folded:
                layer = next((p for y, p in reversed(results) if args and y is args[0]), None)
                if layer is not None:
                    self.pairs[layer].norm = path
            elif isinstance(self.pairs[path].module, QuantizedLayer):
                results.append((result, path))

        with watching({**{p: pair.module for p, pair in self.pairs.items()}, **self.folded}, look):
            self.quantized_model(*args, **kwargs)

    def _run_float(self, args: Args, kwargs: Kwargs) -> dict[str, list[Call]]:
        modules = {path: pair.before for path, pair in self.pairs.items()}
        norms = {pair.norm for pair in self.pairs.values() if pair.norm is not None}
        modules.update({path: self.float_model.get_submodule(path) for path in norms | self.folded.keys()})
        like = {path: pair.module for path, pair in self.pairs.items()}
        with in_single_steps(self.float_model, like), recording(modules) as calls:
            self.float_model(*args, **kwargs)
        return calls

    def _add_isolated(self, pair: Pair, call: Call) -> None:
        if pair.output_slot is not None:  # layers inside the module have their own rows
            result = None if call.result is None else pair.output_slot(call.result)
            return self._add(pair, pair.isolated, call, call.args, call.kwargs, result)
        args, kwargs = call.args, call.kwargs
        grid = pair.input_grid
        if grid is not None and grid not in quantizers_in(getattr(pair.module, "input_quantizer", None)):
            args, kwargs = changed_inputs(pair.module, args, kwargs, grid)
        pair.input_dims = next((x.dim() for x in inputs_of(pair.module, args, kwargs)), None)
        result = pair.module(*args, **kwargs)
        self._add(pair, pair.isolated, call, call.args, call.kwargs, result)

    def _run_quantized(self, args: Args, kwargs: Kwargs, calls: dict[str, list[Call]]) -> None:
        numbers: dict[str, int] = {}

        def look(path: str, args: Args, kwargs: Kwargs, result: Result) -> None:
            number = numbers[path] = numbers.get(path, -1) + 1
            if number < len(calls.get(path, ())):  # otherwise the float model took another path
                pair = self.pairs[path]
                self._add(pair, pair.accumulated, reference(pair, calls, number), args, kwargs, result)

        with watching({path: pair.module for path, pair in self.pairs.items()}, look):
            self.quantized_model(*args, **kwargs)

    def _add(self, pair: Pair, sums: Sums, call: Call, args: Args, kwargs: Kwargs, result: Result) -> None:
        """Adds the errors of one call of a quantized layer to `sums`.

        Args:
            pair: The layer.
            sums: The sums of the pair, isolated or accumulated.
            call: The call of the float model's layer.
            args: The positional arguments of the quantized layer.
            kwargs: The keyword arguments of the quantized layer.
            result: The result of the quantized layer.
        """
        y = first_tensor(result)
        if pair.norm_to_come is not None and y is not None:
            y = pair.norm_to_come.forward(y)  # not called, because a hook may quantize its result
        sums.add_result(call.result, y)
        if pair.output_slot is not None:
            grid = pair.output_grid
            given = None if grid is None else self._given.pop(grid, None)
            if grid is not None and given is not None:
                sums.add_quantized(grid, given, call.result)
        elif pair.input_grid is not None:
            there, here = inputs_of(pair.module, call.args, call.kwargs), inputs_of(pair.module, args, kwargs)
            for expected, x in zip(there, here, strict=False):
                sums.add_quantized(pair.input_grid, x, expected)

    def result(self) -> Comparison:
        """Returns the errors of all layers."""
        if all(pair.isolated.errors().sqnr is None for pair in self.pairs.values()):
            raise ValueError(
                "No quantized layer received values while `float_model` ran on `data`, so there is nothing to "
                "compare.\nPass batches that are not empty and that reach the layers."
            )
        return Comparison(
            [
                LayerComparison(
                    p.path, p.kind, self._weight_sqnr(p), _bias_sqnr(p), p.isolated.errors(), p.accumulated.errors()
                )
                for p in self.pairs.values()
            ]
        )

    def _weight_sqnr(self, pair: Pair) -> float | None:
        layer: Any = pair.module
        if not has_quantized_weight(layer):
            return None
        kind = layer._fakequant.kind
        weight, quantized = exact(kind.read_weight(pair.before)), exact(quantized_weight(layer))
        of_channels = pair.norm_to_come is None or weight.dim() > 2 or pair.input_dims == 2  # not of tokens
        if pair.norm is not None and of_channels:
            weight = _scaled(weight, self.float_model.get_submodule(pair.norm), kind.channel_axis)
        if pair.norm_to_come is not None and of_channels:
            quantized = _scaled(quantized, pair.norm_to_come, kind.channel_axis)
        sums = Sums()
        sums.add_result(weight, quantized)
        return sums.errors().sqnr


def _bias_sqnr(pair: Pair) -> float | None:
    """Returns the SQNR of a prepared layer's result with respect to the rounding of its bias, or None."""
    is_prepared = isinstance(pair.module, QuantizedLayer) and not isinstance(pair.module, IntegerLayer)
    found = bias_error(pair.module) if is_prepared else None
    if found is None or not pair.isolated.results:
        return None
    return decibels(pair.isolated.signal / pair.isolated.results, float(found[0].square().mean()))


def _scaled(weight: Tensor, norm: nn.Module, axis: int) -> Tensor:
    """Returns a weight multiplied by the factors of a batch norm."""
    factor = factor_of(norm).to(weight.device)
    return weight * factor.reshape([-1 if a == axis else 1 for a in range(weight.dim())])
