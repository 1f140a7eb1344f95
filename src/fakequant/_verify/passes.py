"""Passes of the models that `verify` compares, with the codes of quantizers, and on the codes of another model."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from fakequant._convert.golden.integer_layer import IntegerLayer, KeptWeights
from fakequant._convert.golden.quantizer import GoldenQuantizer
from fakequant._convert.golden.tracked_codes import (
    Accumulated,
    GridOf,
    Origin,
    codes_of,
    dequantized,
    origin_of,
    plain,
    quantized,
)
from fakequant._model import leaves
from fakequant._model.running import Args, Kwargs, copied, hooked
from fakequant._runtimes.session import Array, Run, Session
from fakequant._verify.rounding_bounds import TORCHS_AMPLITUDE, Rounding
from fakequant.nn._quantizer import Quantizer
from fakequant.nn._recurrent import RecurrentProduct

# Which model is compared with the golden model.
Whose: TypeAlias = Literal["prepared", "runtime"]
# Positional and keyword arguments of a model.
Inputs: TypeAlias = tuple[Args, Kwargs]
_COMPUTED = "its scale is computed at run time, in float"
_WITHOUT_TYPE = "the file rounds it in float: runtimes have no type with so few bits"
_MERGED = "the file has no codes for it: it was merged with an equal quantizer, or its result is not used"


class Coded(NamedTuple):
    """The codes of a tensor, and their grid."""

    codes: Tensor
    grid: GridOf


# Codes by the path of the quantizer and the number of its call.
Codes: TypeAlias = dict[str, dict[int, Coded]]


@dataclasses.dataclass(kw_only=True)
class Difference:
    """Codes of the golden model and another model that differ at one call of a grid."""

    path: str
    call: int
    grid: GridOf
    # The grid's input, the origin of that input, and the sums of the layers that ran since the previous grid.
    x: Tensor
    origin: Origin | None
    before: list[Accumulated]
    golden: Tensor
    # The codes of the other model, with the zero point of `grid`.
    other: Tensor
    # The scale of the other model, which differs from that of `grid` if both were computed at run time.
    scale: Tensor


@dataclasses.dataclass
class Pass:
    """A run of the golden model on the codes of another model."""

    results: list[Tensor] = dataclasses.field(default_factory=list)
    # The number of compared codes, by quantizer path.
    compared: dict[str, int] = dataclasses.field(default_factory=dict)
    differences: list[Difference] = dataclasses.field(default_factory=list)
    # The sums of the layers after the last grid.
    sums: list[Accumulated] = dataclasses.field(default_factory=list)


class Passes:
    """Runs the prepared model and the golden model."""

    def __init__(self, model: nn.Module, golden: nn.Module, file: Session) -> None:
        self.model, self.golden, self.file = model, golden, file
        self.grids = {path: module for path, module in golden.named_modules() if isinstance(module, GoldenQuantizer)}
        # Why codes of quantizers are not compared, by path.
        self.skipped: dict[str, str] = {}
        # For the golden model, which computes with the same weights in every pass.
        self.weights = KeptWeights()

    @property
    def has_uncompared_grids(self) -> bool:
        """Whether some grids are not compared. Rounding may change a code there, and with it all later results."""
        return not all(
            ((grid.has_one_scale and _why_not_comparable(grid) is None) or path in self.file.dynamic_paths)
            and path not in self.file.unwatched
            for path, grid in self.grids.items()
        )

    def run_prepared(self, inputs: Inputs) -> tuple[Any, Codes]:
        """Runs the prepared model, and returns its result and codes."""
        return self._watched(self.model, Quantizer, inputs)

    def run_golden(self, inputs: Inputs) -> tuple[Any, Codes]:
        """Runs the golden model on its own codes, and returns its result and codes."""
        with self.weights.in_use():
            return self._watched(self.golden, GoldenQuantizer, inputs)

    def _watched(self, model: nn.Module, kind: type[nn.Module], inputs: Inputs) -> tuple[Any, Codes]:
        codes: Codes = {}

        def keep(path: str) -> Callable[..., None]:
            def hook(module: nn.Module, inputs: tuple[Tensor], y: Tensor) -> None:
                grid = self.grids[path].grid_for(plain(inputs[0].detach()).float())
                calls = codes.setdefault(path, {})
                calls[len(calls)] = Coded(codes_of(plain(y.detach()).float(), grid), grid)

            return hook

        watched = (
            (path, module)
            for path, module in model.named_modules()
            if isinstance(module, kind) and path in self.grids and _why_not_comparable(self.grids[path]) is None
        )
        with hooked(module.register_forward_hook(keep(path)) for path, module in watched):
            args, kwargs = copied(*inputs)
            return model(*args, **kwargs), codes

    def codes_of(self, run: Run) -> Codes:
        """Returns the codes of the runtime with their grids."""
        codes: Codes = {}
        for path, arrays in run.codes.items():
            if path not in self.grids:
                continue  # a copy of a quantizer that the export has added
            codes[path] = {}
            for call, array in arrays.items():
                grid = self.grids[path].grid_for(torch.zeros(1))
                if path in run.qparams:
                    scale, zero_point = run.qparams[path][call]
                    grid = GridOf(torch.from_numpy(np.array(scale)), torch.tensor(int(zero_point)), grid.spec)
                codes[path][call] = Coded(_codes_in(array, grid), grid)
        return codes

    def run_golden_on(self, codes: Codes, inputs: Inputs, whose: Whose) -> Pass:
        """Runs the golden model, compares the codes at every grid, and continues with those of the other model."""
        found = Pass()

        def visit(path: str, call: int, grid: GridOf, x: Tensor, y: Tensor, theirs: Coded) -> None:
            golden = codes_of(plain(y), grid)
            other = theirs.codes.reshape(golden.shape) + (grid.zero_point - theirs.grid.zero_point)
            found.compared[path] = found.compared.get(path, 0) + golden.numel()
            before = found.sums
            # Products of recurrent layers have an effect on all later steps.
            found.sums = [one for one in before if isinstance(one.layer, RecurrentProduct)]
            is_same = bool(((golden == other) | (golden.isnan() & other.isnan())).all())
            if not (is_same and torch.equal(theirs.grid.scale, grid.scale)):
                found.differences.append(
                    Difference(
                        path=path,
                        call=call,
                        grid=grid,
                        x=plain(x),
                        origin=origin_of(x),
                        before=before,
                        golden=golden,
                        other=other,
                        scale=theirs.grid.scale,
                    )
                )

        def remember(module: nn.Module, args: Any, y: Any) -> None:
            origin = origin_of(y) if isinstance(y, Tensor) else None
            if isinstance(origin, Accumulated):
                found.sums.append(origin)

        layers = (module for module in self.golden.modules() if isinstance(module, IntegerLayer))
        with self._substituting(codes, visit, whose), hooked(m.register_forward_hook(remember) for m in layers):
            found.results = self._results(inputs)
        return found

    def _results(self, inputs: Inputs) -> list[Tensor]:
        """Runs the golden model, and returns its results."""
        args, kwargs = copied(*inputs)
        with self.weights.in_use():
            return leaves.tensors(self.golden(*args, **kwargs))

    @contextmanager
    def _substituting(self, codes: Codes, visit: Callable[..., None], whose: Whose) -> Iterator[None]:
        """Makes every grid of the golden model return the dequantized codes of another model.

        `visit` is called at every grid for which there are codes, before they replace its result.
        """
        calls: dict[str, int] = {}

        def hook(path: str) -> Callable[[GoldenQuantizer, tuple[Tensor], Tensor], Tensor | None]:
            def take(module: GoldenQuantizer, args: tuple[Tensor], y: Tensor) -> Tensor | None:
                call = calls[path] = calls.get(path, -1) + 1
                other = codes.get(path, {}).get(call)
                why_not = _why_not_comparable(module)
                if why_not is not None:
                    self.skipped[path] = why_not
                    return _rounded_again(module, args[0], y)
                if other is None:
                    if whose == "runtime" and path not in codes:
                        reason = _MERGED if module.has_one_scale else _COMPUTED
                        self.skipped[path] = self.file.unwatched.get(path, reason)
                    return None
                visit(path, call, module.grid_for(args[0]), args[0], y, other)
                return dequantized(other.codes.reshape(y.shape), other.grid)

            return take

        with hooked(grid.register_forward_hook(hook(path)) for path, grid in self.grids.items()):
            yield

    def rounding(self, codes: Codes, inputs: Inputs, found: Pass) -> Rounding:
        """Measures the effect of rounding on inputs of grids that differ and on results, in one repetition."""
        wanted = {(d.path, d.call): number for number, d in enumerate(found.differences)}

        def compute() -> list[Tensor]:
            kept: dict[int, Tensor] = {}

            def visit(path: str, call: int, grid: GridOf, x: Tensor, y: Tensor, other: Coded) -> None:
                if (path, call) in wanted:
                    kept[wanted[path, call]] = plain(x)

            with self._substituting(codes, visit, "prepared"):
                results = self._results(inputs)
            return [*(kept[number] for number in range(len(wanted))), *results]

        exact = [*(difference.x for difference in found.differences), *found.results]
        return Rounding(compute, exact, repetitions=1)

    def rounding_of_prepared(self, inputs: Inputs, found: Pass) -> Rounding:
        """Measures the effect of rounding in the prepared model, whose quantizers return what they return without it.

        The golden model adds integers where this one has float rounding: a batch norm that was folded subtracts a mean
        that may be much larger than the result.
        """
        wanted = {(d.path, d.call): number for number, d in enumerate(found.differences)}
        values: dict[tuple[str, int], Tensor] = {}

        def compute() -> list[Tensor]:
            calls: dict[str, int] = {}
            kept: dict[int, Tensor] = {}

            def hook(path: str) -> Callable[..., Tensor]:
                def take(module: nn.Module, args: tuple[Tensor], y: Tensor) -> Tensor:
                    call = calls[path] = calls.get(path, -1) + 1
                    if (path, call) in wanted:
                        kept[wanted[path, call]] = args[0]
                    return values.setdefault((path, call), y)

                return take

            quantizers = [(p, m) for p, m in self.model.named_modules() if isinstance(m, Quantizer) and p in self.grids]
            with hooked(module.register_forward_hook(hook(path)) for path, module in quantizers):
                args, kwargs = copied(*inputs)
                results = leaves.tensors(self.model(*args, **kwargs))
            return [*(kept[number] for number in range(len(wanted))), *results]

        return Rounding(compute, compute(), TORCHS_AMPLITUDE)


def _codes_in(found: Array, grid: GridOf) -> Tensor:
    """Returns the codes that a file output. It outputs those of a float format as values."""
    value = torch.from_numpy(found).float()
    return value if grid.spec.format == "int" else codes_of(value, grid)


def _why_not_comparable(grid: GoldenQuantizer) -> str | None:
    """Returns why the codes of a grid cannot be compared, or None if they can: all elements have the same scale.

    The scale is fixed, or computed at run time if codes are integers. Files have no codes of FP6 and FP4.
    """
    if grid.spec.axis is not None and (grid.scale is None or grid.scale.dim() > 0):
        return "it has more than one scale"
    if grid.spec.format == "int":
        return None
    return _WITHOUT_TYPE if grid.spec.bits < 8 else _COMPUTED if grid.scale is None else None


def _rounded_again(module: GoldenQuantizer, x: Tensor, y: Tensor) -> Tensor | None:
    """Returns the result of a grid whose codes are not compared, for an input that rounding has moved at its ties.

    While rounding errors are added (see `Rounding`), they move the input after its scale was computed. Errors before
    that would move both together: the largest magnitude of a token, divided by a symmetric scale, always lies at a
    tie. Returns None, as a hook does, if nothing moves.
    """
    if module.scale is not None or not module.spec.is_integer:
        return None
    grid, exact = module.grid_for(x), plain(x)
    moved = quantized(exact * 1.0, grid) - quantized(exact, grid)
    return dequantized(codes_of(plain(y), grid) + moved, grid) if bool(moved.any()) else None
