"""Runs of a prepared model and of its float reference, layer by layer from the front."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fakequant._model.running import Bar, Data, call_arguments, check_steps, copied, evaluating, run
from fakequant._paired_models.calls import RecordedCall, float_tensors, recording
from fakequant._paired_models.matched_models import float_copy
from fakequant._paired_models.products import LayerProduct, watching_products
from fakequant._prepare.attach import link_norms, preparation
from fakequant._train.calibrate import require_scales
from fakequant.nn._call_quantizers import counting_from
from fakequant.nn._experts import Groups
from fakequant.nn._layer_kinds import AnyLayer
from fakequant.nn._quantized_layer import QuantizedLayer
from fakequant.observers._ranks import ranks_of

# What is kept of the reference may have this number of bytes. Otherwise the reference runs again for each layer.
_CACHE = 1 << 30


class _Enough(BaseException):
    """Ends a run of a model in which all products of interest were seen."""


class Pair(NamedTuple):
    """The same product in the prepared model and in the reference."""

    path: str
    quantized: LayerProduct
    # What `keep` returned for the product of the reference. None if the reference did not compute it: the models took
    # different paths.
    reference: Tensor | None


class _Kept(NamedTuple):
    """What is kept of a product of the reference, and what tells whether another product belongs to it."""

    shape: torch.Size
    part: int | None
    groups: Groups | None
    value: Tensor

    def belongs_to(self, product: LayerProduct) -> bool:
        """Returns True if a product multiplies the same rows of its input."""
        if product.x.shape != self.shape or product.part != self.part:
            return False
        if product.groups is None or self.groups is None:
            return product.groups is self.groups
        return torch.equal(product.groups.experts, self.groups.experts)


class PairedRuns:
    """Runs a prepared model and its float reference on the same batches, and pairs their products.

    Use it in a `with` statement, in which both models are in evaluation mode.

    Args:
        model: A prepared and calibrated model.
        data: Batches.
        steps: The maximum number of batches. If None, all are used.
        reference: A float model. If None, `model` with quantizers off, as it is now.
        keep: Returns what to keep of a product of the reference.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        steps: int | None,
        reference: nn.Module | None,
        keep: Callable[[LayerProduct], Tensor],
    ) -> None:
        preparation(model)
        if ranks_of().several:
            raise RuntimeError(
                "Several processes would choose different weights, because each has its own data.\n"
                "Run this method in one process, save the state of the model, and load it in all of them."
            )
        self.model = model
        self._keep = keep
        self._batches = _collected(model, data, steps)
        require_scales(model, "Call fakequant.calibrate(model, data) first.")
        link_norms(model)
        self._reference = float_copy(model, reference)
        self.layers: dict[str, AnyLayer] = {p: m for p, m in model.named_modules() if isinstance(m, QuantizedLayer)}
        # The paths of layers in the order of their first call; layers with the same input together.
        self.waves: list[list[str]] = []
        # How often each layer was called, per batch.
        self._calls: list[Counter[str]] = []
        # What is kept of the reference, per batch and path. Empty if it would need too much memory.
        self._kept: list[dict[str, list[_Kept]]] = []

    def __enter__(self) -> "PairedRuns":
        self._undo = ExitStack()
        with ExitStack() as undo:
            undo.enter_context(torch.no_grad())
            undo.enter_context(evaluating(self.model))
            undo.enter_context(evaluating(self._reference))
            self._explore()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._kept.clear()
        self._undo.close()

    def reference_weight(self, path: str) -> Tensor:
        """Returns the weight of a layer in the reference."""
        layer: AnyLayer = self._reference.get_submodule(path)
        weight: Tensor = layer._fakequant.kind.read_weight(layer)
        return weight.detach()

    def float_result(self, path: str, product: LayerProduct) -> Tensor:
        """Returns what the layer of the reference computes from the float input that it has in the quantized model."""
        layer: AnyLayer = self._reference.get_submodule(path)
        weight = self.reference_weight(path)
        bias: Tensor | None = getattr(layer, layer._fakequant.kind.bias_name, None)
        if product.part is not None:
            assert product.form is not None
            weight = weight.chunk(product.form.matrices)[product.part]
            bias = None if bias is None else bias.chunk(product.form.matrices)[product.part]
        return product.operator(product.source, weight, bias)

    @property
    def called(self) -> list[str]:
        """The paths of all layers that were called, in order."""
        return [path for wave in self.waves for path in wave]

    def each_wave(self, progress: str | None) -> Iterator[list[str]]:
        """Yields the waves, with a progress bar of this title over all layers, or none if it is None."""
        with Bar(total=len(self.called), desc=progress, disable=progress is None, leave=False) as bar:
            for wave in self.waves:
                yield wave
                bar.update(len(wave))

    def _explore(self) -> None:
        """Runs the reference once on all batches, to see which layers are called, and in which order."""
        known: set[str] = set()
        last: Tensor | None = None
        size = 0

        def note(path: str, product: LayerProduct) -> None:
            nonlocal last
            if path not in known:
                known.add(path)
                if product.source is last:
                    self.waves[-1].append(path)
                else:
                    self.waves.append([path])
                last = product.source

        for batch in self._batches:
            kept = self._expected(batch, None, None, note)
            self._calls.append(Counter({path: len(values) for path, values in kept.items()}))
            size += sum(one.value.nbytes for values in kept.values() for one in values)
            if size <= _CACHE:
                self._kept.append(kept)
            else:
                self._kept.clear()

    def pairs(self, paths: list[str]) -> Iterator[Pair]:
        """Runs both models on all batches, and yields the products of some layers. The models run no further."""
        is_kept = len(self._kept) == len(self._batches)
        for number, batch in enumerate(self._batches):
            wanted = Counter({path: self._calls[number][path] for path in paths})
            expected = self._kept[number] if is_kept else self._expected(batch, paths, wanted)
            found: dict[str, list[LayerProduct]] = {}
            _run(self.model, batch, paths, wanted, lambda path, p: found.setdefault(path, []).append(p))  # noqa: B023
            for path in paths:
                for product, other in zip_longest(found.get(path, []), expected.get(path, [])):
                    if product is not None:
                        is_same = other is not None and other.belongs_to(product)
                        yield Pair(path, product, other.value if is_same else None)

    def _expected(
        self,
        batch: Any,
        paths: list[str] | None,
        wanted: Counter[str] | None,
        note: Callable[[str, LayerProduct], None] = lambda path, product: None,
    ) -> dict[str, list[_Kept]]:
        """Runs the reference on a batch, and returns what is kept of its products."""
        kept: dict[str, list[_Kept]] = {}

        def see(path: str, product: LayerProduct) -> None:
            note(path, product)
            one = _Kept(product.x.shape, product.part, product.groups, self._keep(product))
            kept.setdefault(path, []).append(one)

        _run(self._reference, batch, paths, wanted, see)
        return kept

    def module_calls(self, path: str) -> list[RecordedCall]:
        """Returns the calls of a module: its arguments in the model, and its results in the reference."""
        found = []
        for batch in self._batches:
            given, expected = (_recorded(model, path, batch) for model in (self.model, self._reference))
            pairs = zip(given, expected, strict=False)
            found += [dataclasses.replace(call, result=other.result) for call, other in pairs]
        return found


def _recorded(model: nn.Module, path: str, batch: Any) -> list[RecordedCall]:
    """Runs a model on a batch, and returns the calls of a module."""
    args, kwargs = copied(*call_arguments(model, batch))
    with recording({path: model.get_submodule(path)}, float_tensors, before_hooks=True) as calls:
        model(*args, **kwargs)
    return calls.get(path, [])


def _run(
    model: nn.Module,
    batch: Any,
    paths: list[str] | None,
    wanted: Counter[str] | None,
    see: Callable[[str, LayerProduct], None],
) -> None:
    """Runs a prepared model on a batch, and calls `see(path, product)` for the products of these layers, or of all.

    With `wanted`, the run ends after this number of products of each layer.
    """
    layers = {module: path for path, module in model.named_modules() if isinstance(module, QuantizedLayer)}
    watched = [module for module, path in layers.items() if paths is None or path in paths]
    left = None if wanted is None else wanted.copy()

    def look(layer: AnyLayer, product: LayerProduct) -> None:
        path = layers[layer]
        see(path, product)
        if left is not None:
            left[path] -= 1
            if all(number <= 0 for number in left.values()):
                raise _Enough

    args, kwargs = copied(*call_arguments(model, batch))
    # torch does not call the hooks that end counting for a BaseException.
    with watching_products(watched, look), counting_from({}), suppress(_Enough):
        model(*args, **kwargs)


def _collected(model: nn.Module, data: Data, steps: int | None) -> list[Any]:
    """Returns the batches as a list, because several models run on them, several times."""
    check_steps(steps)
    if callable(data) and not isinstance(data, Iterable):
        raise TypeError("`data` must be an iterable of batches, because the model runs on it several times.")
    batches: list[Any] = []

    def keep(*args: Any, **kwargs: Any) -> None:
        batches.append(kwargs if kwargs else args)

    run(model, data, steps, call=keep)
    if not batches:
        raise ValueError("`data` has no batches, so there is nothing to measure.")
    return batches
