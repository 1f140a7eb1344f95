"""Runs of a prepared model and of its float reference, layer by layer from the front."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from itertools import groupby, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fakequant._backends.torch.compiled_nodes import release_memory
from fakequant._backends.torch.grouped_linear import Groups
from fakequant._model.running import Bar, Data, call_arguments, check_steps, copied, evaluating, run
from fakequant._paired_models.calls import RecordedCall, float_tensors, recording, watching
from fakequant._paired_models.chains import Chain, find_chains, is_in_order, is_inside, possible_blocks
from fakequant._paired_models.matched_models import float_copy
from fakequant._paired_models.products import LayerProduct, watching_products
from fakequant._prepare.attach import link_norms, preparation
from fakequant._train.calibrate import require_scales
from fakequant.nn._call_quantizers import counting_from
from fakequant.nn._layer_kinds import AnyLayer
from fakequant.nn._quantized_layer import QuantizedLayer
from fakequant.observers._ranks import ranks_of

# What is kept of the reference may have this number of bytes. Otherwise the reference runs again for each layer, or
# only the block that the layer is in, which takes little time.
_CACHE = 1 << 30
_CACHE_OF_BLOCK = 1 << 26


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

    If the model is a chain of blocks, the results of blocks are kept, so that each block runs a few times only. Then
    layers must be asked for in the order in which they run, and layers of earlier blocks must not change.

    Use it in a `with` statement, in which both models are in evaluation mode.

    Args:
        model: A prepared and calibrated model.
        data: Batches.
        steps: The maximum number of batches. If None, all are used.
        reference: A float model. If None, `model` with quantizers off, as it is now.
        keep: Returns what to keep of a product of the reference.
        modules: The paths of other modules whose calls are needed, see `module_calls`.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        steps: int | None,
        reference: nn.Module | None,
        keep: Callable[[LayerProduct], Tensor],
        modules: Iterable[str] = (),
    ) -> None:
        preparation(model)
        if ranks_of().several:
            raise RuntimeError(
                "Several processes would choose different weights, because each has its own data.\n"
                "Run this method in one process, save the state of the model, and load it in all of them."
            )
        self.model = model
        self._keep = keep
        self._modules = list(modules)
        self._batches = _collected(model, data, steps)
        require_scales(model, "Call fakequant.calibrate(model, data) first.")
        link_norms(model)
        self._reference = float_copy(model, reference)
        self._shared = _SharedParameters(model, self._reference)
        self.layers: dict[str, AnyLayer] = _quantized_layers(model)
        self._layers = {model: self.layers, self._reference: _quantized_layers(self._reference)}
        # The paths of layers in the order of their first call; layers with the same input together.
        self.waves: list[list[str]] = []
        # How often each layer was called, per batch.
        self._calls: list[Counter[str]] = []
        self._chains: list[Chain] = []
        # How many blocks of each chain are done for the layers that were asked for last.
        self._entered: tuple[int, ...] | None = None
        # What is kept of the reference, per batch and path. None if it would need too much memory.
        self._kept: list[dict[str, list[_Kept]]] | None = None

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
        self._kept = None
        for chain in self._chains:
            chain.forget()
        self._undo.close()

    @property
    def in_blocks(self) -> bool:
        """Whether results of blocks are kept, so that models need not run from their first layer for every layer."""
        return bool(self._chains)

    def reference_weight(self, path: str) -> Tensor:
        """Returns the weight of a layer in the reference."""
        self._separate([path])
        layer = self._layers[self._reference][path]
        weight: Tensor = layer._fakequant.kind.read_weight(layer)
        return weight.detach()

    def float_result(self, path: str, product: LayerProduct) -> Tensor:
        """Returns what the layer of the reference computes from the float input that it has in the quantized model."""
        layer = self._layers[self._reference][path]
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
            release_memory()
            for wave in self.waves:
                yield wave
                bar.update(len(wave))
                release_memory()

    def pairs(self, paths: list[str]) -> Iterator[Pair]:
        """Runs both models on all batches, and yields the products of some layers. The models run no further.

        Afterwards the layers of the model may change.
        """
        self._enter(paths)
        self._separate(paths)
        for number in range(len(self._batches)):
            wanted = Counter({path: self._calls[number][path] for path in paths})
            expected = self._expected(number, paths, wanted) if self._kept is None else self._kept[number]
            found: dict[str, list[LayerProduct]] = {}
            self._run(self.model, number, paths, wanted, lambda path, p: found.setdefault(path, []).append(p))  # noqa: B023
            for path in paths:
                for product, other in zip_longest(found.get(path, []), expected.get(path, [])):
                    if product is not None:
                        is_same = other is not None and other.belongs_to(product)
                        yield Pair(path, product, other.value if is_same else None)
            product = None  # whose result may be large, and is not needed while the next batch runs
            found.clear()

    def module_calls(self, path: str) -> list[RecordedCall]:
        """Returns the calls of a module: its arguments in the model, and its results in the reference."""
        found = []
        for number in range(len(self._batches)):
            given, expected = (self._recorded(model, path, number) for model in (self.model, self._reference))
            pairs = zip(given, expected, strict=False)
            found += [dataclasses.replace(call, result=other.result) for call, other in pairs]
        return found

    # --- finding out how data flows -----------------------------------------------------------------

    def _explore(self) -> None:
        """Runs the reference on all batches, to see which layers are called, in which order, and in which blocks."""
        known: set[str] = set()
        last: Tensor | None = None
        digests: list[dict[str, list[int]]] = []
        kept: list[dict[str, list[_Kept]]] | None = []
        size = 0
        calls: list[tuple[str, Any]] = []

        for number in range(len(self._batches)):
            counts: Counter[str] = Counter()
            of_batch: dict[str, list[_Kept]] = {}
            seen: dict[str, list[int]] = {}

            def see(path: str, product: LayerProduct) -> None:
                nonlocal last
                if path not in known:
                    known.add(path)
                    if product.source is last:
                        self.waves[-1].append(path)
                    else:
                        self.waves.append([path])
                    last = product.source
                counts[path] += 1  # noqa: B023
                if number == 0 or self._chains:  # noqa: B023
                    seen.setdefault(path, []).append(_digest(product.x))  # noqa: B023
                if kept is not None:  # noqa: B023
                    self._remember(of_batch, path, product)  # noqa: B023

            def look(path: str, args: Any, kwargs: Any, result: Any) -> None:
                calls.append((path, result))

            blocks = possible_blocks(self._reference) if number == 0 else {}
            with watching(blocks, look):
                self._run(self._reference, number, None, None, see)
            if number == 0:
                self._chains = self._possible_chains(calls)
                calls.clear()
            self._calls.append(counts)
            digests.append(seen)
            if self._chains or kept is None:
                kept = None
                continue
            kept.append(of_batch)
            size += _bytes(of_batch)
            if size > _CACHE:
                kept = None
        last = None
        self._kept = kept
        if self._chains and not self._agree(digests):
            self._chains = []
            self._kept = self._kept_of(self.called)

    def _possible_chains(self, calls: list[tuple[str, Any]]) -> list[Chain]:
        return [
            chain
            for chain in find_chains(self._reference, calls, self.waves)
            if not any(is_inside(block, path) and block != path for block in chain.blocks for path in self._modules)
        ]

    def _agree(self, digests: list[dict[str, list[int]]]) -> bool:
        """Returns True if all layers of the reference have the same inputs, bit by bit, when blocks are replaced."""
        if not all(is_in_order(chain, self.waves) for chain in self._chains):
            return False  # a later batch reached other layers
        stages = [[path for wave in group for path in wave] for _, group in groupby(self.waves, self._stage)]
        try:
            for paths in stages:
                self._advance(self._reference, self._stage([paths[0]]))
                for number, expected in enumerate(digests):
                    found: dict[str, list[int]] = {}
                    wanted = Counter({path: self._calls[number][path] for path in paths})

                    def see(path: str, product: LayerProduct) -> None:
                        found.setdefault(path, []).append(_digest(product.x))  # noqa: B023

                    self._run(self._reference, number, paths, wanted, see)
                    if found != {path: expected[path] for path in paths if path in expected}:
                        return False
        except Exception:  # whatever code does that was given a tensor it cannot read
            return False
        finally:
            for chain in self._chains:
                chain.forget()
        return True

    # --- running from block to block ------------------------------------------------------------------

    def _stage(self, paths: list[str]) -> tuple[int, ...]:
        """Returns how many blocks of each chain are done when these layers run."""
        return tuple(self._blocks_before(chain, paths[0]) for chain in self._chains)

    def _blocks_before(self, chain: Chain, path: str) -> int:
        number = chain.position(path)
        if number is not None:
            return number
        called = self.called
        first = next(at for at, other in enumerate(called) if chain.position(other) is not None)
        return 0 if called.index(path) < first else len(chain.blocks)

    def _enter(self, paths: list[str]) -> None:
        """Keeps the results of all blocks before some layers, and what is needed of the reference."""
        if not self._chains:
            return
        stage = self._stage(paths)
        if stage == self._entered:
            return
        if any(number < chain.done(self.model) for number, chain in zip(stage, self._chains, strict=True)):
            raise RuntimeError(f"{paths[0]} runs before layers that were asked for already.")
        self._kept, self._entered = None, stage
        self._advance(self._reference, stage)
        self._advance(self.model, stage)
        for number, chain in zip(stage, self._chains, strict=True):
            for block in chain.blocks[:number]:
                self._shared.share(block)
        together = [path for wave in self.waves if self._stage(wave) == stage for path in wave]
        self._kept = self._kept_of(together)

    def _kept_of(self, paths: list[str]) -> list[dict[str, list[_Kept]]] | None:
        """Runs the reference, and returns what is kept of layers per batch. None if it would need too much memory."""
        kept = []
        size = 0
        for number, calls in enumerate(self._calls):
            kept.append(self._expected(number, paths, Counter({path: calls[path] for path in paths})))
            size += _bytes(kept[-1])
            if size > (_CACHE_OF_BLOCK if self._chains else _CACHE):
                return None
        return kept

    def _advance(self, model: nn.Module, stage: tuple[int, ...]) -> None:
        """Runs a model from the blocks whose results are kept to those before a stage, and keeps their results."""
        for chain, number in zip(self._chains, stage, strict=True):
            if number != chain.done(model):
                last = chain.blocks[number - 1]
                chain.keep(model, number, (self._result(model, last, batch) for batch in range(len(self._batches))))

    def _result(self, model: nn.Module, path: str, number: int) -> Any:
        """Runs a model on a batch up to the end of a module, and returns its result."""
        found: list[Any] = []

        def look(path: str, args: Any, kwargs: Any, result: Any) -> None:
            found.append(result)
            raise _Enough

        with watching({path: model.get_submodule(path)}, look):
            self._run(model, number, [], None, lambda path, product: None)
        return found[0]

    def _separate(self, paths: list[str]) -> None:
        """Gives layers of the reference their own parameters, because the parameters of the model may change."""
        for path in paths:
            self._shared.separate(path)

    def _expected(self, number: int, paths: list[str], wanted: Counter[str]) -> dict[str, list[_Kept]]:
        """Runs the reference on a batch, and returns what is kept of its products."""
        kept: dict[str, list[_Kept]] = {}
        self._run(self._reference, number, paths, wanted, lambda path, product: self._remember(kept, path, product))
        return kept

    def _remember(self, kept: dict[str, list[_Kept]], path: str, product: LayerProduct) -> None:
        value = self._keep(product)
        # Layers with the same input have the same rows.
        last = next((values[-1].value for values in reversed(kept.values())), None)
        if last is not None and last.shape == value.shape and torch.equal(last, value):
            value = last
        kept.setdefault(path, []).append(_Kept(product.x.shape, product.part, product.groups, value))

    def _run(
        self,
        model: nn.Module,
        number: int,
        paths: list[str] | None,
        wanted: Counter[str] | None,
        see: Callable[[str, LayerProduct], None],
    ) -> None:
        """Runs a model on a batch, and calls `see(path, product)` for the products of these layers, or of all.

        With `wanted`, the run ends after this number of products of each layer.
        """
        layers = {self._layers[model][path]: path for path in (self._layers[model] if paths is None else paths)}
        left = None if wanted is None else wanted.copy()

        def look(layer: AnyLayer, product: LayerProduct) -> None:
            path = layers[layer]
            see(path, product)
            if left is not None:
                left[path] -= 1
                if all(number <= 0 for number in left.values()):
                    raise _Enough

        args, kwargs = copied(*call_arguments(model, self._batches[number]))
        # torch does not call the hooks that end counting for a BaseException.
        with ExitStack() as undo:
            for chain in self._chains:
                undo.enter_context(chain.replaced(model, number))
            undo.enter_context(watching_products(list(layers), look))
            undo.enter_context(counting_from({}))
            undo.enter_context(suppress(_Enough))
            model(*args, **kwargs)

    def _recorded(self, model: nn.Module, path: str, number: int) -> list[RecordedCall]:
        """Runs a model on a batch, and returns the calls of a module."""
        block = next((b for chain in self._chains for b in chain.blocks if is_inside(path, b)), None)
        with recording({path: model.get_submodule(path)}, float_tensors, before_hooks=True) as calls:
            if block is not None:
                self._result(model, block, number)
            else:
                self._run(model, number, [], None, lambda path, product: None)
        return calls.get(path, [])


class _SharedParameters:
    """Parameters that the reference shares with the model, until they are about to change.

    Methods write biases in place, and give weights other memory: `separate` copies biases only.
    """

    def __init__(self, model: nn.Module, reference: nn.Module) -> None:
        own = {id(parameter) for parameter in model.parameters()}
        # The places of each parameter in the reference: the path of the module, its parameters, and the name.
        self._places: dict[int, tuple[nn.Parameter, list[tuple[str, dict[str, Any], str]]]] = {}
        for path, module in reference.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in own:
                    _, places = self._places.setdefault(id(parameter), (parameter, []))
                    places.append((path, module._parameters, name))

    def separate(self, path: str) -> None:
        """Gives a module of the reference, and the module that owns it, their own parameters."""
        for original, places in self._places.values():
            is_near = any(is_inside(there, path) or there == path.rpartition(".")[0] for there, _, _ in places)
            if is_near and places[0][1][places[0][2]] is original:
                value = original.detach()
                value = value.clone() if value.dim() < 2 else value
                copy = nn.Parameter(value, requires_grad=original.requires_grad)
                for _, parameters, name in places:
                    parameters[name] = copy

    def share(self, path: str) -> None:
        """Undoes `separate` for a module that runs no more, to save memory."""
        for original, places in self._places.values():
            for there, parameters, name in places:
                if is_inside(there, path):
                    parameters[name] = original


def _quantized_layers(model: nn.Module) -> dict[str, AnyLayer]:
    return {path: module for path, module in model.named_modules() if isinstance(module, QuantizedLayer)}


def _bytes(kept: dict[str, list[_Kept]]) -> int:
    return sum({id(one.value): one.value.nbytes for values in kept.values() for one in values}.values())


def _digest(x: Tensor) -> int:
    """Returns a number that depends on all bits of a tensor."""
    size = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return int(x.detach().contiguous().view(size).sum(dtype=torch.int64))


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
