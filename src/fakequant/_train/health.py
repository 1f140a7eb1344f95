"""`health`: how well the grids of a model fit the tensors they quantize."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fakequant._backends.torch import tensor_functions
from fakequant._backends.torch.grid_values import number_of_values, places_of
from fakequant._train.model_snapshot import unchanged
from fakequant._train.running import Data, check_module, evaluating, run
from fakequant._train.unfit_ranges import find_problem, sample_of
from fakequant._util.text_table import table
from fakequant.nn._bounded_parameters import whole
from fakequant.nn._call_quantizers import further_calls
from fakequant.nn._deployed_bias import bias_error
from fakequant.nn._fake_quantize import FakeQuantize
from fakequant.nn._function_calls import unseen_calls
from fakequant.nn._model_quantizers import quantizers
from fakequant.nn._quantized_layer import QuantizedLayer
from fakequant.nn._quantizer import Quantizer
from fakequant.spec import QuantSpec


@dataclasses.dataclass(frozen=True)
class QuantizerHealth:
    """The health of one quantizer. Fields are None if it was given no data, or on the first call of `health`."""

    path: str
    # Share of values outside the range. Values less than a step outside count too: a symmetric grid can end half a
    # step before the largest value.
    clipped: float | None
    # Share of codes that occur: of a float format, share of its finite values.
    levels_used: float | None
    # Largest relative change of a scale since the previous call.
    scale_drift: float | None
    # Share of weights whose code changed and changed back over the last two calls.
    oscillating: float | None
    # Number of NaN and infinite values since the quantizer was created.
    nonfinite: int
    # For weights followed by a batch norm that will be folded: the error that rounding the bias causes in the batch
    # norm's output, in standard deviations of a channel, as root mean square over the channels.
    bias_error: float | None = None


@dataclasses.dataclass(frozen=True)
class Health:
    """The result of `health`. It prints as a table."""

    quantizers: list[QuantizerHealth]
    # Calls of functions whose results stay in float, because the model's code makes more of them than in the example:
    # the largest number in one call of the module, by the path of the module and the name of the function.
    unseen_calls: dict[str, int] = dataclasses.field(default_factory=dict)
    # By how much the number of calls of a module exceeds that in the example, by path. These calls have the quantizers
    # of the last call in the example.
    further_calls: dict[str, int] = dataclasses.field(default_factory=dict)
    # Why ranges do not fit, by the path of the quantizer of an activation: all values were 0, or most share a code or
    # two. The second is known only with data.
    unfit: dict[str, str] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Returns the fields of each `QuantizerHealth`, by the path of the quantizer."""
        return {q.path: dataclasses.asdict(q) for q in self.quantizers}

    def log(self, writer: Any, step: int) -> None:
        """Writes all values to `writer`, e.g. TensorBoard's SummaryWriter, by `add_scalar(name, value, step)`."""
        for quantizer in self.quantizers:
            for name, value in dataclasses.asdict(quantizer).items():
                if name != "path" and value is not None:
                    writer.add_scalar(f"{quantizer.path}/{name}", value, step)

    def __str__(self) -> str:
        header = ["quantizer", "clipped", "levels used", "scale drift", "oscillating", "bias error", "not finite"]
        rows = [
            [
                q.path,
                *map(_percent, (q.clipped, q.levels_used, q.scale_drift, q.oscillating, q.bias_error)),
                q.nonfinite,
            ]
            for q in self.quantizers
        ]
        notes = [
            f"{number} calls of {name} stay in float: they did not occur in the example of `prepare`"
            for name, number in self.unseen_calls.items()
        ]
        notes += [
            f"{path} is called {number} times more than in the example of `prepare`: these calls have the quantizers "
            "of the last call"
            for path, number in self.further_calls.items()
        ]
        notes += [f"the range of {path} does not fit: {words}" for path, words in self.unfit.items()]
        return "\n\n".join([table(header, rows), *notes])


class _Memory:
    """The state of a quantizer at earlier calls of `health`."""

    def __init__(self) -> None:
        self.scale: Tensor | None = None  # at the last call
        self.codes: list[Tensor] = []  # at the last two calls


_MEMORY: "WeakKeyDictionary[Quantizer, _Memory]" = WeakKeyDictionary()


@contextmanager
def memory_as_before(model: nn.Module) -> Iterator[None]:
    """Context after which the drift baseline is restored, so that drift counts from the user's calls of `health`."""
    before = {}
    for _, quantizer in quantizers(model):
        memory = _MEMORY.get(quantizer)
        before[quantizer] = None if memory is None else (memory.scale, memory.codes)
    try:
        yield
    finally:
        for quantizer, kept in before.items():
            _MEMORY.pop(quantizer, None)
            if kept is not None:
                memory = _MEMORY.setdefault(quantizer, _Memory())
                memory.scale, memory.codes = kept


@torch.no_grad()
def health(model: nn.Module, data: Data | None = None, steps: int | None = None) -> Health:
    """Measures clip rates, codes in use, drift of scales, oscillating weights and errors of rounded biases.

    Weights are measured as they are. Activations are measured while `data` runs through the model in evaluation
    mode. Nothing is measured between calls, so training is not slowed down.

    Args:
        model: A prepared model.
        data: Batches as for `calibrate`. If None, only the scales of activations are compared.
        steps: The maximum number of batches. If None, all are used.

    >>> import fakequant as fq
    >>> model = fq.prepare(nn.Sequential(nn.Linear(4, 2)), fq.recipes.int8())
    >>> model = fq.calibrate(model, [torch.ones(3, 4)], progress=False)
    >>> found = health(model, [torch.full((3, 4), 2.0)])
    >>> found.to_dict()["0.input_quantizer"]["clipped"]
    1.0
    """
    check_module(model)
    if next(quantizers(model), None) is None:
        raise ValueError("The model has no quantizers to measure.\nUse fakequant.prepare(model, config) first.")
    weights = {
        module.weight_quantizer: whole(module._fakequant.kind.read_weight(module))
        for module in model.modules()
        if isinstance(module, QuantizedLayer) and module.weight_quantizer is not None
    }
    counts: dict[Quantizer, _Counts] = {q: _Counts(q) for _, q in quantizers(model)}
    for quantizer, weight in weights.items():
        counts[quantizer].add(weight)
    if data is not None:
        _watch(model, data, steps, {q: c for q, c in counts.items() if q not in weights})
    errors = {
        module.weight_quantizer: _bias_error(module)
        for module in model.modules()
        if isinstance(module, QuantizedLayer) and module.weight_quantizer is not None
    }
    return Health(
        [_health_of(path, q, counts[q], weights.get(q), errors.get(q)) for path, q in quantizers(model)],
        unseen_calls(model.named_modules()),
        further_calls(model.named_modules()),
        {
            path: problem.words
            for path, q in quantizers(model)
            if q not in weights and (problem := find_problem(q, counts[q].sample)) is not None
        },
    )


def _bias_error(layer: QuantizedLayer) -> float | None:
    found = bias_error(layer)
    if found is None or found[1] is None:
        return None
    change, norm = found
    deviation = torch.ones_like(change) if norm.weight is None else whole(norm.weight).to(change).abs()
    share = (change / deviation)[deviation > 0]
    return float(share.square().mean().sqrt()) if share.numel() else None


def _watch(model: nn.Module, data: Data, steps: int | None, counts: "dict[Quantizer, _Counts]") -> None:
    """Runs data through the model and counts the values that its activation quantizers receive."""
    handles = [
        quantizer.register_forward_pre_hook(lambda module, args: counts[module].add(args[0])) for quantizer in counts
    ]
    try:
        with evaluating(model), unchanged(model):  # `unchanged`: dynamic quantizers write their buffers
            run(model, data, steps)
    finally:
        for handle in handles:
            handle.remove()


class _Counts:
    """Counts of the values that one quantizer has received."""

    def __init__(self, quantizer: Quantizer) -> None:
        self.quantizer = quantizer
        self.total = self.clipped = 0
        self.used: Tensor | None = None
        self.codes: Tensor | None = None
        # Some of the first values.
        self.sample: Tensor | None = None

    def add(self, x: Tensor) -> None:
        spec = self.quantizer.spec
        found = qparams_for(self.quantizer, x)
        if found is None:
            return
        if self.sample is None and x.numel():
            self.sample = sample_of(x)
        x = x.detach()
        _, inside = tensor_functions.fake_quantize(x, *found, spec, mask="bool")
        self.codes = tensor_functions.quantize(x, *found, spec)
        self.total += x.numel()
        self.clipped += int((~inside).sum())
        if spec.bits <= 16:
            places = places_of(self.codes.flatten(), spec)
            used = torch.bincount(places[places >= 0], minlength=number_of_values(spec)) > 0
            self.used = used if self.used is None else self.used | used


class _Dynamic(Protocol):
    """A dynamic quantizer of a prepared model, or a dynamic `Grid` of a golden model."""

    spec: QuantSpec
    eps: float


def qparams_at_hand(quantizer: _Dynamic, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the scale and zero point that a dynamic quantizer computes from `x`."""
    seen = tensor_functions.min_max(x, quantizer.spec)
    empty = seen.min > seen.max
    lo, hi = seen.min.masked_fill(empty, 0), seen.max.masked_fill(empty, 0)
    return tensor_functions.choose_qparams(lo, hi, quantizer.spec, eps=quantizer.eps)


def qparams_for(quantizer: Quantizer, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Returns the scale and zero point that `x` would be quantized with, or None if there are none yet."""
    if isinstance(quantizer, FakeQuantize) and quantizer.is_dynamic:
        return qparams_at_hand(quantizer, x)
    try:
        return quantizer.qparams()
    except RuntimeError:
        return None


def _health_of(
    path: str, quantizer: Quantizer, counts: _Counts, weight: Tensor | None, bias_error: float | None
) -> QuantizerHealth:
    memory = _MEMORY.setdefault(quantizer, _Memory())
    drift = oscillating = None
    found = None
    if weight is not None:
        found = qparams_for(quantizer, weight)
    elif not quantizer.is_dynamic:
        found = qparams_for(quantizer, torch.zeros(0))
    scale = None if found is None else found[0]
    if scale is not None and memory.scale is not None and memory.scale.shape == scale.shape:
        drift = float((scale / memory.scale - 1).abs().max())
    memory.scale = scale
    if weight is not None and counts.codes is not None:
        if len(memory.codes) == 2 and memory.codes[0].shape == counts.codes.shape:
            before, last = memory.codes
            oscillating = float(((counts.codes == before) & (counts.codes != last)).float().mean())
        memory.codes = [*memory.codes[-1:], counts.codes]
    return QuantizerHealth(
        path,
        counts.clipped / counts.total if counts.total else None,
        None if counts.used is None else float(counts.used.float().mean()),
        drift,
        oscillating,
        quantizer.nonfinite,
        bias_error,
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"
