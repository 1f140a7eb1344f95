"""`health`: how well the grids of a model fit the tensors they quantize; `History`: how that changes over training."""

import dataclasses
from inspect import signature
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from fakequant._backends.torch import tensor_functions
from fakequant._backends.torch.grid_values import number_of_values, places_of
from fakequant._model.running import Data, check_module, evaluating, run
from fakequant._model.snapshot import unchanged
from fakequant._model.unfit_ranges import find_problem, sample_of
from fakequant._paired_models.calls import watching_inputs
from fakequant._paired_models.errors import known_qparams, quantized_weights
from fakequant._util.shown import Shown
from fakequant._util.text import table
from fakequant.nn._bounded_parameters import whole
from fakequant.nn._call_quantizers import further_calls
from fakequant.nn._folding import bias_error
from fakequant.nn._function_calls import unseen_calls
from fakequant.nn._model_quantizers import named_quantizers
from fakequant.nn._quantized_layer import QuantizedLayer
from fakequant.nn._quantizer import Quantizer
from fakequant.spec import QuantSpec

# The recorded fields of `QuantizerHealth`.
_NAMES = ("clipped", "levels_used", "scale_drift", "oscillating", "nonfinite", "scale", "min", "max")
# Those that `History` prints.
_PRINTED = _NAMES[:5]
# The methods by which writers take several values at once: of Lightning's loggers and MLflow, of Lightning's modules
# and Fabric, of Weights & Biases and of the Trainer of transformers.
_METHODS = ("log_metrics", "log_dict", "log")


@dataclasses.dataclass(frozen=True)
class QuantizerHealth:
    """The health of one quantizer. Fields are None if it was given no data."""

    path: str
    # Share of values outside the range. Values less than a step outside count too: a symmetric grid can end half a
    # step before the largest value.
    clipped: float | None
    # Share of codes that occur: of a float format, share of its finite values.
    levels_used: float | None
    # Largest relative change of a scale since the last measurement of the same `History`. None without one.
    scale_drift: float | None
    # Share of weights whose code changed and changed back over the last two measurements of the same `History`.
    oscillating: float | None
    # Number of NaN and infinite values since the quantizer was created.
    nonfinite: int
    # For weights followed by a batch norm that will be folded: the error that rounding the bias causes in the batch
    # norm's output, in standard deviations of a channel, as root mean square over the channels.
    bias_error: float | None = None
    # The largest scale, and the ends of the grid: the smallest and the largest value that the quantizer can return.
    # None if scales follow each tensor.
    scale: float | None = None
    min: float | None = None
    max: float | None = None


@dataclasses.dataclass(frozen=True, repr=False)
class Health(Shown):
    """The result of `health`. It prints as a table."""

    quantizers: list[QuantizerHealth]
    # Calls of functions whose outputs stay in float, because the model's code makes more of them than in the example:
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
        """Writes all values, named `path/field`, to TensorBoard, Weights & Biases, MLflow or a trainer.

        `writer` needs one of the methods `add_scalar(name, value, step)`, `log_metrics(values, step)`,
        `log_dict(values)` and `log(values, step)`, where `values` is a dict. A trainer knows the step itself: where the
        method takes none, it is not passed.

        >>> import fakequant as fq
        >>> class Run:
        ...     def log(self, values, step=None):
        ...         print(step, values["0.weight_quantizer/clipped"])
        >>> model = fq.prepare(nn.Sequential(nn.Linear(4, 2)), fq.recipes.int8(), example=torch.ones(1, 4))
        >>> fq.health(model).log(Run(), step=100)
        100 0.0
        """
        values = {
            f"{quantizer.path}/{name}": value
            for quantizer in self.quantizers
            for name, value in dataclasses.asdict(quantizer).items()
            if name != "path" and value is not None
        }
        if hasattr(writer, "add_scalar"):
            for name, value in values.items():
                writer.add_scalar(name, value, step)
            return
        write = next((getattr(writer, name) for name in _METHODS if hasattr(writer, name)), None)
        if write is None:
            raise TypeError(
                f"`writer` must have one of the methods add_scalar, {', '.join(_METHODS)}, got "
                f"{type(writer).__name__}.\n"
                "Use a SummaryWriter, wandb.run, a logger of Lightning, or a trainer."
            )
        parameters = signature(write).parameters
        takes_step = "step" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        write(values, **({"step": step} if takes_step else {}))

    def __str__(self) -> str:
        shown = ["clipped", "levels_used", "scale_drift", "oscillating", "bias_error"]
        for name in ("scale_drift", "oscillating"):
            if all(getattr(q, name) is None for q in self.quantizers):  # there is no earlier measurement
                shown.remove(name)
        header = ["quantizer", *(name.replace("_", " ") for name in shown), "not finite"]
        rows = [[q.path, *(_percent(getattr(q, name)) for name in shown), q.nonfinite] for q in self.quantizers]
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


class HealthMemory:
    """What earlier measurements of a model saw of its quantizers, by path."""

    def __init__(self) -> None:
        # At the last measurement.
        self.scales: dict[str, Tensor | None] = {}
        # Of weights, at the last two measurements.
        self.codes: dict[str, list[Tensor]] = {}

    def drift(self, path: str, scale: Tensor | None) -> float | None:
        """Returns the largest relative change of a scale since the last measurement, and remembers the scale."""
        before, self.scales[path] = self.scales.get(path), scale
        if scale is None or before is None or before.shape != scale.shape:
            return None
        return float((scale / before - 1).abs().max())

    def oscillating(self, path: str, codes: Tensor) -> float | None:
        """Returns the share of codes that changed and changed back, and remembers the codes."""
        known = self.codes.get(path, [])
        self.codes[path] = [*known[-1:], codes]
        if len(known) < 2 or known[0].shape != codes.shape:
            return None
        before, last = known
        return float(((codes == before) & (codes != last)).float().mean())


def health(model: nn.Module, data: Data | None = None, steps: int | None = None) -> Health:
    """Measures clip rates, codes in use, errors of rounded biases, and ranges that do not fit.

    Weights are measured as they are. Activations are measured while `data` runs through the model in evaluation
    mode. Nothing is measured between calls, so training is not slowed down. What changes during training, drift of
    scales and oscillating weights, needs several measurements: `History.measure`.

    Args:
        model: A prepared model.
        data: Batches as for `calibrate`. If None, only weights are measured.
        steps: The maximum number of batches. If None, all are used.

    >>> import fakequant as fq
    >>> model = fq.prepare(nn.Sequential(nn.Linear(4, 2)), fq.recipes.int8(), example=torch.ones(1, 4))
    >>> model = fq.calibrate(model, [torch.ones(3, 4)], progress=False)
    >>> found = health(model, [torch.full((3, 4), 2.0)])
    >>> found.to_dict()["0.input_quantizer"]["clipped"]
    1.0
    """
    return measured(model, data, steps, HealthMemory())


@torch.no_grad()
def measured(model: nn.Module, data: Data | None, steps: int | None, memory: HealthMemory) -> Health:
    """Returns the health of a model, compared with what `memory` has of earlier measurements, which is updated."""
    check_module(model)
    if next(named_quantizers(model), None) is None:
        raise ValueError("The model has no quantizers to measure.\nUse fakequant.prepare(model, config) first.")
    weights = quantized_weights(model)
    counts: dict[Quantizer, _Counts] = {q: _Counts(q) for _, q in named_quantizers(model)}
    for quantizer, weight in weights.items():
        counts[quantizer].add(weight)
    if data is not None:
        activations = [q for q in counts if q not in weights]
        # `unchanged`, because dynamic quantizers write their buffers.
        with watching_inputs(activations, lambda q, x: counts[q].add(x)), evaluating(model), unchanged(model):
            run(model, data, steps)
    errors = {
        module.weight_quantizer: _bias_error(module)
        for module in model.modules()
        if isinstance(module, QuantizedLayer) and module.weight_quantizer is not None
    }
    found = [
        _health_of(path, q, counts[q], weights.get(q), errors.get(q), memory) for path, q in named_quantizers(model)
    ]
    return Health(
        quantizers=found,
        unseen_calls=unseen_calls(model.named_modules()),
        further_calls=further_calls(model.named_modules()),
        unfit={
            path: problem.words
            for path, q in named_quantizers(model)
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
        found = known_qparams(self.quantizer, x)
        if found is None:
            return
        if self.sample is None and x.numel():
            self.sample = sample_of(x)
        x = x.detach()
        _, inside = tensor_functions.fake_quantize_and_mask(x, *found, spec, mask="bool")
        self.codes = tensor_functions.quantize(x, *found, spec)
        self.total += x.numel()
        self.clipped += int((~inside).sum())
        if spec.bits <= 16:
            places = places_of(self.codes.flatten(), spec)
            used = torch.bincount(places[places >= 0], minlength=number_of_values(spec)) > 0
            self.used = used if self.used is None else self.used | used


def _health_of(
    path: str,
    quantizer: Quantizer,
    counts: _Counts,
    weight: Tensor | None,
    bias_error: float | None,
    memory: HealthMemory,
) -> QuantizerHealth:
    found = None
    if weight is not None:
        found = known_qparams(quantizer, weight)
    elif not quantizer.is_dynamic:
        found = known_qparams(quantizer, torch.zeros(0))
    codes = None if weight is None else counts.codes
    scale, low, high = (None, None, None) if found is None else _ends(quantizer.spec, *found)
    return QuantizerHealth(
        path=path,
        clipped=counts.clipped / counts.total if counts.total else None,
        levels_used=None if counts.used is None else float(counts.used.float().mean()),
        scale_drift=memory.drift(path, None if found is None else found[0]),
        oscillating=None if codes is None else memory.oscillating(path, codes),
        nonfinite=quantizer.nonfinite,
        bias_error=bias_error,
        scale=scale,
        min=low,
        max=high,
    )


def _ends(spec: QuantSpec, scale: Tensor, zero_point: Tensor) -> tuple[float | None, float | None, float | None]:
    """Returns the largest scale of a grid, and its smallest and largest value. None if there is no scale yet."""
    if spec.ggml_type is not None or not scale.numel() or not bool(scale.isfinite().all()):
        return None, None, None
    first, last = (spec.qmin, spec.qmax) if spec.format == "int" else (-spec.largest, spec.largest)
    low, high = ((end - zero_point.double()) * scale.double() for end in (first, last))
    return float(scale.max()), float(low.min()), float(high.max())


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


@dataclasses.dataclass(repr=False)
class History(Shown):
    """The health of a model at several training steps. `fakequant.report` plots it.

    It remembers scales and codes of the last measurements, with which it compares the next one.

    >>> import torch, fakequant as fq
    >>> model = fq.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2)), fq.recipes.int8(), example=torch.ones(1, 4))
    >>> history = fq.History()
    >>> for step in (0, 100):
    ...     found = history.measure(step, model)
    >>> history.series("0.weight_quantizer", "clipped")
    ([0, 100], [0.0, 0.0])
    >>> history.series("0.weight_quantizer", "scale_drift")  # the first measurement has nothing to compare with
    ([100], [0.0])
    """

    steps: list[int] = dataclasses.field(default_factory=list)
    # By path: the steps and the health at each step.
    quantizers: dict[str, list[tuple[int, QuantizerHealth]]] = dataclasses.field(default_factory=dict)
    _memory: HealthMemory = dataclasses.field(default_factory=HealthMemory, init=False, repr=False, compare=False)

    def measure(self, step: int, model: nn.Module, data: Data | None = None, steps: int | None = None) -> Health:
        """Adds the health of a model at a training step, with the changes since the last measurement, and returns it.

        Args:
            step: The training step. It must be larger than the last one.
            model: A prepared model.
            data: Batches, as for `health`.
            steps: The maximum number of batches. If None, all are used.
        """
        self._checked(step)
        found = measured(model, data, steps, self._memory)
        self.add(step, found)
        return found

    def add(self, step: int, health: Health) -> None:
        """Adds a result of `health`, which says nothing about changes. `measure` does."""
        step = self._checked(step)
        if not isinstance(health, Health):
            raise TypeError(
                f"`health` must be what fakequant.health(model) returns, got {type(health).__name__}.\n"
                "Use history.measure(step, model)."
            )
        self.steps.append(step)
        for quantizer in health.quantizers:
            self.quantizers.setdefault(quantizer.path, []).append((step, quantizer))

    def _checked(self, step: int) -> int:
        if isinstance(step, bool) or not isinstance(step, Integral):
            raise TypeError(f"`step` must be a whole number of steps, got {step!r}.")
        step = int(step)  # NumPy integers cannot be written as JSON
        if self.steps and step <= self.steps[-1]:
            raise ValueError(
                f"`step` must be larger than the last one, {self.steps[-1]}, got {step}.\n"
                "Use a new History for each training run."
            )
        return step

    @property
    def paths(self) -> list[str]:
        """The quantizers, in the order in which they were first seen."""
        return list(self.quantizers)

    def series(self, path: str, name: str) -> tuple[list[int], list[float]]:
        """Returns the steps at which a value of a quantizer is known, and the values.

        Args:
            path: The path of the quantizer.
            name: A field of `QuantizerHealth`, such as "clipped".
        """
        if name not in _NAMES:
            raise ValueError(f"`name` must be one of {', '.join(_NAMES)}, got {name!r}.")
        if path not in self.quantizers:
            known = ", ".join(self.paths[:5]) + (", ..." if len(self.paths) > 5 else "")
            raise KeyError(f"There is no quantizer {path!r} in this history, which has {known or 'none'}.")
        found = [(step, getattr(q, name)) for step, q in self.quantizers[path] if getattr(q, name) is not None]
        return [step for step, _ in found], [value for _, value in found]

    def to_dict(self) -> dict[str, dict[str, dict[str, list[Any]]]]:
        """Returns {"steps": [...], "values": [...]} by path and name."""
        return {
            path: {name: dict(zip(("steps", "values"), self.series(path, name), strict=True)) for name in _NAMES}
            for path in self.paths
        }

    def __str__(self) -> str:
        header = ["quantizer", "steps", "clipped", "levels used", "scale drift", "oscillating", "not finite"]
        rows = [
            [path, len(self.quantizers[path]), *(self._change(path, name) for name in _PRINTED)] for path in self.paths
        ]
        return table(header, rows)

    def _change(self, path: str, name: str) -> str:
        """Returns the first and the last value as text."""
        _, values = self.series(path, name)
        if not values:
            return "-"
        first, last = (str(v) if name == "nonfinite" else f"{v:.2%}" for v in (values[0], values[-1]))
        return first if len(values) == 1 else f"{first} to {last}"
