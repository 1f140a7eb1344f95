"""`correct_bias`: moves the mean error of each layer's output into its bias."""

import dataclasses
import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from fakequant._backends.torch.tensor_functions import fake_quantize
from fakequant._model.running import Data
from fakequant._paired_models.errors import decibels
from fakequant._paired_models.products import LayerProduct
from fakequant._paired_models.runs import Pair, PairedRuns
from fakequant.nn._folding import BatchNorm, will_fold
from fakequant.nn._layer_kinds import AnyLayer
from fakequant.nn._owners import OwnedProduct
from fakequant.ptq._layer_changes import Changes, LayerChange, layer_filter, undone_on_error
from fakequant.ptq._rounding import layer_rows, note_on, weight_grid

_NO_PLACE = "it has no bias, and no batch norm follows"


def correct_bias(
    model: nn.Module,
    data: Data,
    *,
    layers: str | Sequence[str] = "*",
    steps: int | None = None,
    reference: nn.Module | None = None,
    progress: bool = True,
) -> Changes:
    """Moves the mean error of each layer's output into its bias, in place, without labels.

    Rounding the weights of a layer, and clipping its input, shift the mean of its output. The shift is the difference
    between the means of the output in the quantized and in the float model, per channel:

        bias = bias - (mean of y - mean of y in the float model)

    Layers are corrected in the order in which they run, each with the inputs that it has after all layers before it
    were corrected. If a batch norm follows that `convert` will fold, its running mean changes instead, which has the
    same effect on the folded bias. Layers with neither are left as they are.

    Args:
        model: A prepared and calibrated model.
        data: Batches, as for `fakequant.calibrate`. The benchmarks use 512 images, or 128 lines of text.
        layers: Patterns of the paths of the layers to correct, such as "encoder.*".
        steps: The maximum number of batches. If None, all are used.
        reference: The float model. If None, `model` with quantizers off, as it is when the function is called. Pass
            it if the weights are points of their grids, as `adaround` and `gptq` leave them. After `smooth` or
            `equalize`, it must have their weights: `unprepare(copy.deepcopy(model))`.
        progress: Whether to show a progress bar.

    Returns:
        The SQNR of each layer's output before and after.

    >>> import fakequant as fq
    >>> config = fq.QuantConfig(default=fq.LayerConfig(weight=fq.presets.int8()))
    >>> model = fq.prepare(nn.Sequential(nn.Linear(2, 1)), config)
    >>> with torch.no_grad():
    ...     _ = model[0].weight.copy_(torch.tensor([[127.0, 0.25]]))  # 0.25 is rounded to 0
    ...     _ = model[0].bias.zero_()
    >>> changes = fq.ptq.correct_bias(model, [torch.tensor([[1.0, 1.0], [2.0, 3.0]])], progress=False)
    >>> model[0].bias
    Parameter containing:
    tensor([0.5000], requires_grad=True)
    """
    chosen = layer_filter("layers", layers)
    with undone_on_error(model), PairedRuns(model, data, steps, reference, _result_of) as runs:
        if reference is None:
            _warn_if_rounded(runs.layers)
        reasons = {path: why for path, layer in runs.layers.items() if (why := _reason(layer)) is not None}
        changes: dict[str, LayerChange] = {}
        for wave in runs.each_wave("correct_bias" if progress else None):
            paths = [path for path in wave if path not in reasons and chosen(path)]
            found = _means_of(runs.pairs(paths), runs) if paths else {}
            for path in paths:
                means = found.get(path)
                if means is None:
                    reasons[path] = _NO_PLACE
                    continue
                means.correct()
                changes[path] = LayerChange.of(path, runs.layers[path], means.decibels())
    return Changes("correct_bias", "SQNR dB", layer_rows(runs, changes, reasons, chosen), note_on(runs))


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where the correction of a layer goes: its bias, or the running mean of the batch norm that folds into it."""

    value: Tensor
    is_mean: bool

    @torch.no_grad()
    def subtract(self, shift: Tensor) -> None:
        """Lowers the output of the layer by `shift`. A batch norm subtracts its running mean."""
        change = shift.to(self.value.dtype).view(self.value.shape)
        self.value.add_(change if self.is_mean else -change)


class _Means:
    """Sums over the positions of a result, per channel, in float64."""

    def __init__(self, place: _Place) -> None:
        self.place = place
        self.signal = 0.0
        channels, device = place.value.numel(), place.value.device
        self.count, self.error, self.square = (
            torch.zeros(channels, dtype=torch.float64, device=device) for _ in range(3)
        )

    def add(self, product: LayerProduct, expected: Tensor) -> None:
        """Adds the errors of the result of a product."""
        y, z = (product.channels_last(t).double() for t in (product.y, expected))
        self.signal += float(z.square().sum())
        self.count += self._sums(product, torch.ones_like(y))
        self.error += self._sums(product, y - z)
        self.square += self._sums(product, (y - z).square())

    def _sums(self, product: LayerProduct, rows: Tensor) -> Tensor:
        """Returns the sums of rows of channels, with one element for each element of the bias."""
        if product.groups is not None:
            experts = rows.new_zeros(product.groups.number, rows.shape[1])
            return experts.index_add_(0, product.groups.experts, rows).flatten()
        if product.part is None:
            return rows.sum(0)
        whole = torch.zeros_like(self.count)
        whole.view(-1, rows.shape[1])[product.part] = rows.sum(0)
        return whole

    def correct(self) -> None:
        """Moves the mean error into the bias."""
        self.place.subtract(self._shift())

    def decibels(self) -> tuple[float, float]:
        """Returns the SQNR before and after the correction."""
        left = self.square - self._shift().square() * self.count
        return decibels(self.signal, float(self.square.sum())), decibels(self.signal, float(left.clamp(min=0).sum()))

    def _shift(self) -> Tensor:
        return self.error / self.count.clamp(min=1)


def _result_of(product: LayerProduct) -> Tensor:
    """Returns a copy of the result of a product, which the model may change in place."""
    return product.y.clone()


def _means_of(pairs: Iterable[Pair], runs: PairedRuns) -> dict[str, _Means]:
    """Returns the errors of layers by path, without layers that have no place for a correction."""
    found: dict[str, _Means] = {}
    for path, product, reference in pairs:
        if path not in found:
            place = _place(runs.layers[path], product)
            if place is None:
                continue
            found[path] = _Means(place)
        found[path].add(product, runs.float_result(path, product) if reference is None else reference)
    return found


def _place(layer: AnyLayer, product: LayerProduct) -> _Place | None:
    norm: BatchNorm | None = layer._fakequant.norm
    if norm is not None and will_fold(norm, product.x, layer._fakequant.kind.read_weight(layer)):
        return _Place(norm.running_mean, is_mean=True)
    name: str = layer._fakequant.kind.bias_name
    bias = getattr(layer, name, None)
    if bias is None:
        return None
    return _Place(getattr(layer.owner, layer.names[name]) if isinstance(layer, OwnedProduct) else bias, is_mean=False)


def _reason(layer: AnyLayer) -> str | None:
    if layer.weight_quantizer is None and layer.input_quantizer is None and layer._fakequant.input_grid is None:
        return "it is not quantized"
    if not layer._fakequant.kind.has_input:
        return "it looks up rows of its weight"
    has_bias = getattr(layer, layer._fakequant.kind.bias_name, None) is not None
    return None if has_bias or layer._fakequant.norm is not None else _NO_PLACE


def _warn_if_rounded(layers: dict[str, AnyLayer]) -> None:
    """Warns if all weights are on their grids, so that the model does not show its own rounding errors."""
    rounded = [x for x in layers.values() if x.weight_quantizer is not None and x.weight_quantizer.quantizing]
    if rounded and all(map(_is_rounded, rounded)):
        warnings.warn(
            "All weights are on their grids already, as after `adaround` or `gptq`, so the errors of rounding them "
            "cannot be seen.\nPass the float model: correct_bias(model, data, reference=float_model).",
            UserWarning,
            stacklevel=3,
        )


def _is_rounded(layer: AnyLayer) -> bool:
    grid = weight_grid(layer)
    return torch.equal(fake_quantize(grid.weight, *grid.qparams, grid.quantizer.spec), grid.weight)
