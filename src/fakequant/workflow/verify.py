"""`verify`: whether what was trained, what was converted and what runs have the same codes."""

import dataclasses
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fakequant.integer.grid import Grid
from fakequant.integer.layer import IntegerLayer, start_export
from fakequant.integer.values import Accumulated, GridOf, codes_of, on_grid, origin_of, plain
from fakequant.nn.quantizer import Quantizer
from fakequant.workflow.convert import convert
from fakequant.workflow.explain import SATURATION, TIE, UNKNOWN, did_saturate, why_prepared, why_runtime
from fakequant.workflow.prepare import link_norms
from fakequant.workflow.running import Data, check_module, copied, evaluating, run
from fakequant.workflow.runtime import INTEGER_KERNELS, Runtime
from fakequant.workflow.table import table

# Of the largest result: what float32 operations after the last quantizer may differ by, in another order.
_ROUNDING = 1e-5
# Of the codes of one tensor, each layer by itself: what float sums in training may differ from exact ones.
_TOLERATED = 1e-4


@dataclasses.dataclass
class TensorReport:
    """The codes of one quantizer, its layer by itself: the one before it started from equal codes."""

    path: str
    codes: int = 0
    # Prepared model and golden model: how many differ, and by how many steps at most.
    prepared_differ: int = 0
    prepared_steps: int = 0
    # Golden model and runtime.
    runtime_differ: int = 0
    runtime_steps: int = 0
    # Why, where they differ.
    why_prepared: str = ""
    why_runtime: str = ""

    @property
    def why(self) -> str:
        """Why there are differences, those of the runtime first."""
        return "; ".join(dict.fromkeys(reason for reason in (self.why_runtime, self.why_prepared) if reason))

    @property
    def is_equal_but_for_ties(self) -> bool:
        """Whether nothing differs, or little, by one step, and where floats are summed in another order."""
        few = max(1, _TOLERATED * self.codes)
        runtime = self.runtime_differ == 0 or (self.why_runtime == TIE and self.runtime_differ <= few)
        return runtime and self.prepared_differ <= few and max(self.prepared_steps, self.runtime_steps) <= 1


@dataclasses.dataclass
class OutputReport:
    """The results of the model."""

    # The largest differences, each model by itself on the data.
    prepared_difference: float = 0.0
    runtime_difference: float = 0.0
    # The largest result of the golden model.
    largest: float = 0.0
    # Of the runtime, if its codes are looked at and if not: optimizations may differ.
    disturbance: float = 0.0
    # Why results of the runtime are not those of the golden model that starts from its last codes; empty: they are.
    why: str = ""
    # Rows whose largest number is in the same place, of prepared model and runtime; None: no classes.
    rows: int = 0
    agreeing: int = 0


@dataclasses.dataclass
class Verification:
    """What `verify` found; prints as tables."""

    target: str
    tensors: list[TensorReport]
    # The kernel of every layer in the runtime.
    kernels: dict[str, str]
    outputs: OutputReport
    # Quantizers that are not compared, and why.
    skipped: dict[str, str]

    @property
    def ok(self) -> bool:
        """Whether all three have the same codes, but for a few that float sums put on the other side of a tie.

        The codes of weights are equal, or the file would not belong to the model. If no others can be compared, the
        results decide.
        """
        out = self.outputs
        if not self.tensors and out.prepared_difference > _ROUNDING * out.largest:
            return False
        return out.disturbance == 0 and not out.why and all(t.is_equal_but_for_ties for t in self.tensors)

    @property
    def is_exact(self) -> bool:
        """Whether golden model and runtime have the same codes everywhere."""
        return bool(self.tensors) and self.first_difference is None

    @property
    def saturates(self) -> bool:
        """Whether the kernels of this CPU saturated."""
        return any(SATURATION in t.why_runtime for t in self.tensors) or self.outputs.why == SATURATION

    @property
    def first_difference(self) -> str | None:
        """The first quantizer, in the order of the model, where runtime and golden model differ."""
        return next((t.path for t in self.tensors if t.runtime_differ), None)

    @property
    def floats(self) -> list[str]:
        """Layers that the runtime computes in float."""
        return [path for path, kernel in self.kernels.items() if kernel not in INTEGER_KERNELS]

    def to_dict(self) -> dict[str, Any]:
        """The same as dicts, lists, numbers and strings."""
        return {**dataclasses.asdict(self), "ok": self.ok, "first_difference": self.first_difference}

    def __str__(self) -> str:
        rows = [
            [
                t.path,
                t.codes,
                _count(t.prepared_differ, t.prepared_steps),
                _count(t.runtime_differ, t.runtime_steps),
                t.why,
            ]
            for t in self.tensors
        ]
        parts = [table(["quantizer", "codes", "prepared / golden", "golden / runtime", "why"], rows)]
        parts.append(table(["layer", "kernel"], [[path, kernel] for path, kernel in self.kernels.items()]))
        parts += [f"{path} is not compared: {reason}" for path, reason in self.skipped.items()]
        parts.append(self.verdict())
        return "\n\n".join(parts)

    def verdict(self) -> str:
        """In words: whether all codes are equal, and how far results are apart."""
        out = self.outputs
        lines = [
            f"results: prepared / golden differ by {out.prepared_difference:.3g} at most, golden / runtime by "
            f"{out.runtime_difference:.3g}"
        ]
        if out.rows:
            lines.append(f"classes: {out.agreeing} of {out.rows} agree between prepared model and runtime")
        if not self.tensors:
            equal = "agree up to rounding" if self.ok else "do not agree"
            lines.append(f"No activation has a fixed scale: the weights have the same codes, and the results {equal}.")
        elif self.ok:
            ties = sum(t.runtime_differ for t in self.tensors)
            lines.append("The runtime computes what was trained" + (f", but for {ties} ties." if ties else "."))
        elif self.outputs.disturbance:
            lines.append(
                f"The runtime's results change by {self.outputs.disturbance:.3g} when its codes are looked at: it "
                "merges quantizers that follow each other.\nGive them the same spec and observer."
            )
        elif self.first_difference is None and self.outputs.why:
            lines.append(f"The runtime has other results after the last quantizer: {self.outputs.why}.")
        elif self.first_difference is not None:
            lines.append(f"The runtime computes something else, first at {self.first_difference}.")
        else:
            lines.append("The golden model differs from the prepared one by more than rounding.")
        return "\n".join(lines)


def _count(number: int, steps: int) -> str:
    return "equal" if number == 0 else f"{number} differ, by {steps}"


@torch.no_grad()
def verify(
    model: nn.Module, onnx_path: str | os.PathLike[str], data: Data, *, steps: int | None = None
) -> Verification:
    """Runs a prepared model, its golden model and an exported file on data, and compares every code.

    Each quantizer is looked at by itself: the golden model is given the codes of the prepared model, and in a
    second pass those of the runtime, before every layer, so that a difference is counted where it arises and
    not in everything after it. The reasons are found by computing what would be if: with saturating sums, with
    operations one by one, with a reciprocal, at ties. Needs `pip install "fakequant[onnx]"`.

    >>> import tempfile, fakequant as fq
    >>> model = fq.prepare(nn.Sequential(nn.Linear(4, 2)), fq.recipes.int8(target="onnxruntime-x86"))
    >>> model = fq.calibrate(model, [torch.ones(3, 4)], progress=False)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fq.export_onnx(model, f"{folder}/model.onnx", torch.ones(1, 4))
    ...     found = fq.verify(model, f"{folder}/model.onnx", [torch.randn(8, 4)])
    >>> found.ok, found.kernels
    (True, {'0': 'QGemm'})
    """
    check_module(model)
    link_norms(model)
    runtime = Runtime(onnx_path)
    golden = convert(model, target=runtime.target)
    _require_same(golden, runtime, onnx_path)
    comparison = _Comparison(model, golden, runtime)
    if callable(data) and not isinstance(data, Iterable):
        raise TypeError("`data` must be batches here, which all three models are run on, not a function.")
    with evaluating(model):
        run(model, data, steps, call=comparison.compare)
    if not comparison.batches:
        raise ValueError("`data` has no batches: there was nothing to compare.")
    return comparison.result()


def _require_same(golden: nn.Module, runtime: Runtime, path: Any) -> None:
    """That the file is of this model: the same codes and the same bits of every scale."""
    for name, module in golden.named_modules():
        pairs: list[tuple[str, Tensor]] = []
        if isinstance(module, IntegerLayer) and module._fakequant.weight_spec is not None:
            start_export(module, 8)
            start, exported = f"{name}." if name else "", module._fakequant.exported
            pairs = [(f"{start}weight_scale", module.weight_scale), (f"{start}weight_codes", exported.codes)]
        elif isinstance(module, Grid) and module.scale is not None:
            pairs = [(f"{name}_scale", module.scale)]
        for tensor, value in pairs:
            there = runtime.initializer(tensor)
            if there is None and isinstance(module, Grid):
                continue  # one of two that are equal
            if there is None or there.size != value.numel() or not np.array_equal(there.ravel(), value.numpy().ravel()):
                raise ValueError(
                    f"{path} does not belong to the model: {tensor} is {_how(there)} there.\n"
                    "Export the model again with fakequant.export_onnx, or pass the model that was exported."
                )


def _how(tensor: Any) -> str:
    return "absent" if tensor is None else "another"


class _Comparison:
    """Counts over batches."""

    def __init__(self, model: nn.Module, golden: nn.Module, runtime: Runtime) -> None:
        self.model, self.golden, self.runtime = model, golden, runtime
        self.reports: dict[str, TensorReport] = {}
        self.skipped: dict[str, str] = {}
        self.outputs = OutputReport()
        self.batches = 0

    def compare(self, *args: Any, **kwargs: Any) -> None:
        """One batch."""
        self.batches += 1
        prepared, expected = self._run_prepared(*copied(args, kwargs))
        results, codes = self.runtime.run(args, kwargs)
        own, given = copied(args, kwargs)
        free = self.golden(*own, **given)
        self._force(expected, "prepared", why_prepared, *copied(args, kwargs))
        forced, ran = self._force(_as_tensors(codes), "runtime", why_runtime, *copied(args, kwargs))
        self._judge_results(forced, results, ran)
        self._compare_outputs(prepared, free, results)

    def _run_prepared(self, args: Any, kwargs: Any) -> tuple[Any, dict[str, list[Tensor]]]:
        grids = {path: module for path, module in self.golden.named_modules() if isinstance(module, Grid)}
        codes: dict[str, list[Tensor]] = {}

        def keep(path: str, grid: GridOf) -> Callable[..., None]:
            return lambda module, inputs, y: codes.setdefault(path, []).append(codes_of(y.detach(), grid))

        handles = []
        for path, module in self.model.named_modules():
            if isinstance(module, Quantizer) and path in grids and grids[path].has_one_scale:
                handles.append(module.register_forward_hook(keep(path, grids[path].grid_for(torch.zeros(1)))))
        try:
            return self.model(*args, **kwargs), codes
        finally:
            for handle in handles:
                handle.remove()

    def _judge_results(self, forced: Any, runtime: list[Any], ran: list[Accumulated]) -> None:
        """Whether results are right where no quantizer follows: from the same codes, up to float rounding."""
        for a, b in zip(_tensors(forced), runtime, strict=False):
            theirs = torch.from_numpy(np.asarray(b))
            if _largest(a, theirs) > _ROUNDING * _magnitude(a):
                self.outputs.why = SATURATION if any(did_saturate(sums) for sums in ran) else UNKNOWN

    def _force(
        self, codes: dict[str, list[Tensor]], whose: str, why: Any, args: Any, kwargs: Any
    ) -> tuple[Any, list[Accumulated]]:
        """Runs the golden model, compares at every grid, and goes on with the codes of the other.

        Returns its result, and the sums of layers after the last quantizer.
        """
        calls: dict[str, int] = {}

        def look(path: str) -> Callable[..., Any]:
            def hook(module: Any, inputs: Any, y: Tensor) -> Any:
                number = calls[path] = calls.get(path, -1) + 1
                theirs = codes.get(path)
                if not module.has_one_scale:
                    self.skipped[path] = "its scale is found at run time, or there are several"
                    return None
                if theirs is None or number >= len(theirs):
                    if whose == "runtime":
                        self.skipped[path] = "the file has no codes of its own for it: another quantizer has the same"
                    return None
                grid = module.grid_for(inputs[0])
                mine = codes_of(plain(y), grid)
                x = inputs[0]
                ran, sums[:] = list(sums), []
                self._count(path, whose, mine, theirs[number], partial(why, origin_of(x), plain(x), grid, ran))
                return on_grid((theirs[number] - grid.zero_point) * grid.scale, grid)

            return hook

        sums: list[Accumulated] = []

        def remember(module: Any, inputs: Any, y: Any) -> None:
            if isinstance(y, Tensor) and isinstance(origin_of(y), Accumulated):
                sums.append(origin_of(y))  # type: ignore[arg-type]

        handles = [m.register_forward_hook(look(p)) for p, m in self.golden.named_modules() if isinstance(m, Grid)]
        handles += [m.register_forward_hook(remember) for m in self.golden.modules() if isinstance(m, IntegerLayer)]
        try:
            return self.golden(*args, **kwargs), sums
        finally:
            for handle in handles:
                handle.remove()

    def _count(self, path: str, whose: str, mine: Tensor, theirs: Tensor, why: Callable[[Tensor, Tensor], str]) -> None:
        report = self.reports.setdefault(path, TensorReport(path))
        if whose == "prepared":
            report.codes += mine.numel()
        theirs = theirs.reshape(mine.shape)
        steps = (mine - theirs).abs().nan_to_num(0)
        number = int((steps > 0).sum())
        if number:
            setattr(report, f"{whose}_differ", getattr(report, f"{whose}_differ") + number)
            setattr(report, f"{whose}_steps", max(getattr(report, f"{whose}_steps"), int(steps.max())))
            reason, before = why(mine, theirs), getattr(report, f"why_{whose}")
            if reason not in before:
                setattr(report, f"why_{whose}", f"{before}; {reason}" if before else reason)

    def _compare_outputs(self, prepared: Any, golden: Any, runtime: list[Any]) -> None:
        theirs = [torch.from_numpy(np.asarray(value)) for value in runtime]
        for a, b, c in zip(_tensors(prepared), _tensors(golden), theirs, strict=False):
            out = self.outputs
            out.prepared_difference = max(out.prepared_difference, _largest(a, b))
            out.runtime_difference = max(out.runtime_difference, _largest(b, c))
            out.largest = max(out.largest, _magnitude(b))
            if a.dim() == 2 and a.shape[1] > 1:
                out.rows += len(a)
                out.agreeing += int((a.argmax(1) == c.argmax(1)).sum())

    def result(self) -> Verification:
        """Everything that was counted, in the order of the model."""
        self.outputs.disturbance = self.runtime.disturbance
        target, tensors = self.runtime.target or "generic", list(self.reports.values())
        return Verification(target, tensors, self.runtime.kernels, self.outputs, self.skipped)


def _as_tensors(codes: dict[str, list[Any]]) -> dict[str, list[Tensor]]:
    return {path: [torch.from_numpy(c).float() for c in arrays] for path, arrays in codes.items()}


def _magnitude(value: Tensor) -> float:
    return float(value.double().abs().nan_to_num().max()) if value.numel() else 0.0


def _largest(a: Tensor, b: Tensor) -> float:
    """The largest difference; what is NaN on one side only is infinitely far."""
    if not a.numel():
        return 0.0
    a, b = a.double(), b.double()
    far = torch.where(a.isnan() != b.isnan(), torch.inf, (a - b).abs().nan_to_num(0, torch.inf))
    return float(torch.where(a == b, 0, far).max())


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [plain(result)]
    values = result.values() if isinstance(result, dict) else result if isinstance(result, (tuple, list)) else []
    return [tensor for value in values for tensor in _tensors(value)]
