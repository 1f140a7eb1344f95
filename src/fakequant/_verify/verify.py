"""`verify`: compares the codes and results of a prepared model, its golden model and an exported file."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fakequant._convert import result_leaves
from fakequant._convert.convert import WIDENED, conversion
from fakequant._convert.golden.fixed_grid import Grid
from fakequant._convert.golden.integer_layer import IntegerLayer
from fakequant._convert.golden.tracked_codes import Accumulated, GridOf, Origin, codes_of, dequantized, origin_of, plain
from fakequant._onnx.call_names import call_name
from fakequant._prepare.layer_calls import is_note_on_weights
from fakequant._prepare.prepare import preparation
from fakequant._prepare.shares import quantized_parameters
from fakequant._prepare.summary import summary
from fakequant._train.running import Data, check_module, copied, evaluating, run
from fakequant._verify.explain_codes import (
    LARGE_BIAS,
    NAN,
    READ_WEIGHT,
    SCALE,
    TIE,
    UNKNOWN,
    UNSTEADY,
    repeated_ties,
    ties,
    why_prepared,
    why_runtime,
    why_sums,
    within,
)
from fakequant._verify.file_of_model import open_file_of
from fakequant._verify.float_layers import layers_in_float
from fakequant._verify.repeatability import Outcome, require_repeating, require_repeating_file, require_same
from fakequant._verify.result_differences import beyond, is_same, largest_difference, require_comparable
from fakequant._verify.rounding_bounds import Rounding
from fakequant._verify.runtimes.interface import Array, Run, Runtime
from fakequant._verify.verdict import OutputReport, TensorReport, Verification
from fakequant.nn._quantizer import Quantizer
from fakequant.nn._recurrent_product import RecurrentProduct


class Coded(NamedTuple):
    """The codes of a tensor, and their grid."""

    codes: Tensor
    grid: GridOf


# Codes by the path of the quantizer and the number of its call.
Codes = dict[str, dict[int, Coded]]
_Whose = Literal["prepared", "runtime"]
# Positional and keyword arguments of a model, which are any nesting of tensors and constants.
_Inputs = tuple[tuple[Any, ...], dict[str, Any]]
_COMPUTED = "its scale is computed at run time, in float"
_WITHOUT_TYPE = "the file rounds it in float: runtimes have no type with so few bits"
_MERGED = "the file has no codes for it: it was merged with an equal quantizer, or its result is not used"
# 32 repetitions in all, with the first 4. The chance that errors leave a tie on the same side every time is 2^-32.
_MORE_REPETITIONS = 28


@torch.no_grad()
def verify(
    model: nn.Module,
    path: str | os.PathLike[str],
    data: Data,
    *,
    steps: int | None = None,
    runtime: str | None = None,
    accuracy_level: int | None = None,
) -> Verification:
    """Runs a prepared model, its golden model and an exported file on data, and compares every code and result.

    Each quantizer is compared separately. The golden model runs once with every layer's input replaced by the codes of
    the prepared model, and once with those of the runtime, so a difference is counted only where it arises. Results
    after the last quantizers are compared in the same way. Codes may differ at ties, and results by rounding. The
    rounding allowed for each element is measured by repeating the computation with random rounding errors. Any other
    difference is explained, if possible, by simulating its likely causes: sums that overflow or saturate, unfused
    operations, multiplication by a reciprocal.

    All of this assumes that models repeat themselves, so that is checked first: every model and the file run twice on
    each batch. Random numbers and state in the forward pass are allowed if codes and results do not depend on them.

    Codes of FP8 are compared too; 0 and -0 count as the same code. Codes of activations with block scales (MX, NVFP4)
    are not: their scales are computed in the file, and only the results are compared.

    Args:
        model: A prepared and calibrated model.
        path: The file that `export_onnx` or `export_executorch` wrote for this model.
        data: Batches, such as a DataLoader or a list. A batch is a tensor, a dict of keyword arguments, or a tuple.
        steps: The number of batches to use; None for all.
        runtime: "onnxruntime", "openvino" or "executorch". None for the runtime of the file's target.
        accuracy_level: None for the default settings of the runtime. ONNX Runtime and OpenVINO then round the float
            inputs of weight-only layers to 8 bits. 1 if you will prevent that, with the session's config entry
            `session.qdq_matmulnbits_accuracy_level` 1, or OpenVINO's property `DYNAMIC_QUANTIZATION_GROUP_SIZE` 0.

    Returns:
        A `Verification`. Its `ok` is True if the file computes the same as the prepared model.

    Raises:
        ValueError: If the file does not belong to the model, or if the model or the file does not return the same for
            the same batch each time. The message says what changes: random numbers, an attribute, a buffer.

    Needs `pip install "fakequant[onnx]"`, and the extra `openvino` or `executorch` for files of these runtimes.

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
    if accuracy_level not in (None, 1):
        raise ValueError(f"`accuracy_level` must be 1, or None for the default of the runtime, got {accuracy_level!r}.")
    file, golden = open_file_of(model, path, runtime)
    comparison = _Comparison(model, golden, file, is_exact_level=accuracy_level is not None)
    if callable(data) and not isinstance(data, Iterable):
        raise TypeError("`data` must be an iterable of batches, because three models run on it, not a function.")
    with evaluating(model), torch.autocast("cpu", enabled=False):
        run(model, data, steps, call=comparison.compare)
    if not comparison.batches:
        raise ValueError("`data` has no batches, so there is nothing to compare.")
    found = comparison.result()
    if not found.outputs.numbers and not any(t.codes for t in found.tensors):
        raise ValueError("The batches of `data` are empty, so there is nothing to compare.")
    return found


@dataclasses.dataclass
class _Difference:
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
class _Pass:
    """A run of the golden model on the codes of another model."""

    results: list[Tensor]
    # The number of compared codes, by quantizer path.
    compared: dict[str, int]
    differences: list[_Difference]
    # The sums of the layers after the last grid.
    sums: list[Accumulated]


class _Comparison:
    """Runs the three models batch by batch and collects the differences."""

    def __init__(self, model: nn.Module, golden: nn.Module, runtime: Runtime, *, is_exact_level: bool) -> None:
        self.model, self.golden, self.runtime = model, golden, runtime
        self.rounded = [] if is_exact_level else runtime.rounded
        self.grids = {path: module for path, module in golden.named_modules() if isinstance(module, Grid)}
        self.reports: dict[str, TensorReport] = {}
        # Reasons for differing codes, in the order found, by quantizer path and model.
        self.reasons: dict[tuple[str, _Whose], dict[str, None]] = {}
        self.skipped: dict[str, str] = {}
        self.outputs = OutputReport()
        self.batches = 0

    @property
    def has_uncompared_grids(self) -> bool:
        """Whether some grids are not compared. Rounding may change a code there, and with it all later results."""
        return not all(
            ((grid.has_one_scale and _why_not_comparable(grid) is None) or path in self.runtime.dynamic_paths)
            and path not in self.runtime.unwatched
            for path, grid in self.grids.items()
        )

    def compare(self, *args: Any, **kwargs: Any) -> None:
        self.batches += 1
        inputs = args, kwargs
        prepared, prepared_codes = self._run_prepared(inputs)
        self._require_repeating("prepared", (prepared, prepared_codes), lambda: self._run_prepared(inputs))
        golden, golden_codes = self._run_golden(inputs)
        self._require_repeating("golden", (golden, golden_codes), lambda: self._run_golden(inputs))
        run = self._run_file(inputs)
        require_repeating_file(self.runtime, run.results, args, kwargs)
        if repr(result_leaves.constants(prepared)) != repr(result_leaves.constants(golden)):  # NaN equals NaN
            raise ValueError(
                "The prepared and the golden model return different constants, so they cannot be compared."
            )
        ran = [torch.from_numpy(np.array(value)) for value in run.results]
        names = result_leaves.names(golden)
        require_comparable(result_leaves.tensors(golden), names, ran, self.runtime.results)
        self._judge("prepared", prepared_codes, result_leaves.tensors(prepared), None, inputs)
        seen = [torch.from_numpy(np.array(value)) for value in run.watched]
        self._judge("runtime", self._codes_of(run), ran, seen, inputs)
        self._compare_outputs(result_leaves.tensors(prepared), result_leaves.tensors(golden), ran)
        if self.rounded:
            for a, b in zip(run.results, self.runtime.run_with_rounding(args, kwargs) or [], strict=True):
                difference = largest_difference(torch.from_numpy(np.array(a)), torch.from_numpy(np.array(b)))
                self.outputs.level_difference = max(self.outputs.level_difference, difference)

    def _run_file(self, inputs: _Inputs) -> Run:
        """Runs the file. If its codes differ from the golden model's, they are read again, one by one if necessary."""
        run = self.runtime.run(*inputs)
        if not self.runtime.may_misread or not self._run_golden_on(self._codes_of(run), inputs, "runtime").differences:
            return run
        return self.runtime.run(*inputs) if self.runtime.read_one_by_one() else run

    def _run_prepared(self, inputs: _Inputs) -> tuple[Any, Codes]:
        """Runs the prepared model, and returns its result and codes."""
        return self._watched(self.model, Quantizer, inputs)

    def _run_golden(self, inputs: _Inputs) -> tuple[Any, Codes]:
        """Runs the golden model on its own codes, and returns its result and codes."""
        return self._watched(self.golden, Grid, inputs)

    def _watched(self, model: nn.Module, kind: type[nn.Module], inputs: _Inputs) -> tuple[Any, Codes]:
        codes: Codes = {}

        def keep(path: str) -> Callable[..., None]:
            def hook(module: nn.Module, inputs: tuple[Tensor], y: Tensor) -> None:
                grid = self.grids[path].grid_for(plain(inputs[0].detach()).float())
                calls = codes.setdefault(path, {})
                calls[len(calls)] = Coded(codes_of(plain(y.detach()).float(), grid), grid)

            return hook

        handles = []
        for path, module in model.named_modules():
            if isinstance(module, kind) and path in self.grids and _why_not_comparable(self.grids[path]) is None:
                handles.append(module.register_forward_hook(keep(path)))
        try:
            args, kwargs = copied(*inputs)
            return model(*args, **kwargs), codes
        finally:
            for handle in handles:
                handle.remove()

    def _require_repeating(
        self, whose: Literal["prepared", "golden"], first: tuple[Any, Codes], run: Callable[[], tuple[Any, Codes]]
    ) -> None:
        model = self.model if whose == "prepared" else self.golden
        require_repeating(f"{whose} model", model, _outcome(*first), lambda: _outcome(*run()))

    def _codes_of(self, run: Run) -> Codes:
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

    # --- the golden model on the codes of another model --------------------------------------------

    def _run_golden_on(self, codes: Codes, inputs: _Inputs, whose: _Whose) -> _Pass:
        """Runs the golden model, compares the codes at every grid, and continues with those of the other model."""
        found = _Pass([], {}, [], [])

        def visit(path: str, call: int, grid: GridOf, x: Tensor, y: Tensor, theirs: Coded) -> None:
            golden = codes_of(plain(y), grid)
            other = theirs.codes.reshape(golden.shape) + (grid.zero_point - theirs.grid.zero_point)
            found.compared[path] = found.compared.get(path, 0) + golden.numel()
            before = found.sums
            # Products of recurrent layers have an effect on all later steps.
            found.sums = [one for one in before if isinstance(one.layer, RecurrentProduct)]
            is_same = bool(((golden == other) | (golden.isnan() & other.isnan())).all())
            scale = theirs.grid.scale
            if not (is_same and torch.equal(scale, grid.scale)):
                seen = path, call, grid, plain(x), origin_of(x), before, golden, other, scale
                found.differences.append(_Difference(*seen))

        def remember(module: nn.Module, args: Any, y: Any) -> None:
            origin = origin_of(y) if isinstance(y, Tensor) else None
            if isinstance(origin, Accumulated):
                found.sums.append(origin)

        with self._substituting(codes, visit, whose):
            handles = [m.register_forward_hook(remember) for m in self.golden.modules() if isinstance(m, IntegerLayer)]
            try:
                args, kwargs = copied(*inputs)
                found.results = result_leaves.tensors(self.golden(*args, **kwargs))
            finally:
                for handle in handles:
                    handle.remove()
        return found

    @contextmanager
    def _substituting(self, codes: Codes, visit: Callable[..., None], whose: _Whose) -> Iterator[None]:
        """Makes every grid of the golden model return the dequantized codes of another model.

        `visit` is called at every grid for which there are codes, before they replace its result.
        """
        calls: dict[str, int] = {}

        def hook(path: str) -> Callable[[Grid, tuple[Tensor], Tensor], Tensor | None]:
            def take(module: Grid, args: tuple[Tensor], y: Tensor) -> Tensor | None:
                call = calls[path] = calls.get(path, -1) + 1
                other = codes.get(path, {}).get(call)
                why_not = _why_not_comparable(module)
                if why_not is not None:
                    self.skipped[path] = why_not
                    return None
                if other is None:
                    if whose == "runtime" and path not in codes:
                        reason = _MERGED if module.has_one_scale else _COMPUTED
                        self.skipped[path] = self.runtime.unwatched.get(path, reason)
                    return None
                visit(path, call, module.grid_for(args[0]), args[0], y, other)
                return dequantized(other.codes.reshape(y.shape), other.grid)

            return take

        handles = [grid.register_forward_hook(hook(path)) for path, grid in self.grids.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    # --- judging ------------------------------------------------------------------------------------

    def _judge(
        self, whose: _Whose, codes: Codes, results: list[Tensor], watched: list[Tensor] | None, inputs: _Inputs
    ) -> None:
        """Counts the differences between another model and the golden model run on that model's codes.

        Args:
            whose: Which model is compared with the golden model.
            codes: The codes of that model.
            results: The results of that model.
            watched: The runtime's results in the session that also outputs codes. None for the prepared model.
            inputs: The positional and keyword arguments of the batch.
        """
        found = self._run_golden_on(codes, inputs, whose)
        for path, number in found.compared.items():
            report = self.reports.setdefault(path, TensorReport(path))
            report.codes += number if whose == "prepared" else 0
        same = all(map(is_same, found.results, results))
        is_steady = watched is None or all(map(is_same, watched, results))
        if whose == "runtime":
            self.outputs.runtime_is_equal &= same
        if same and is_steady and not found.differences:
            return
        rounding = self._rounding(codes, inputs, found)
        if self.has_uncompared_grids and not self._is_explained(found, results, rounding):
            rounding.repeat(_MORE_REPETITIONS)
        # State that the first passes did not find would have counted as rounding.
        require_same("golden model", *rounding.without_errors())
        for number, difference in enumerate(found.differences):
            self._count(whose, difference, rounding.tolerance(number))
        first = len(found.differences)
        self._count_results(whose, found, results, rounding, first)
        for number, (a, b) in enumerate(zip(watched or [], results, strict=False)):
            far = beyond(a, b, 2 * rounding.tolerance(first + number), rounding.unsteady[first + number])
            if bool(far.any()):
                self.outputs.disturbance = max(self.outputs.disturbance, largest_difference(a, b))

    def _is_explained(self, found: _Pass, results: list[Tensor], rounding: Rounding) -> bool:
        """Returns True if rounding explains all differences between the results."""
        first = len(found.differences)
        return not any(
            bool(beyond(a, b, rounding.tolerance(first + number), rounding.unsteady[first + number]).any())
            for number, (a, b) in enumerate(zip(found.results, results, strict=True))
        )

    def _rounding(self, codes: Codes, inputs: _Inputs, found: _Pass) -> Rounding:
        """Measures the effect of rounding on the inputs of the grids that differ and on the results."""
        wanted = {(d.path, d.call): number for number, d in enumerate(found.differences)}

        def compute() -> list[Tensor]:
            kept: dict[int, Tensor] = {}

            def visit(path: str, call: int, grid: GridOf, x: Tensor, y: Tensor, other: Coded) -> None:
                if (path, call) in wanted:
                    kept[wanted[path, call]] = plain(x)

            with self._substituting(codes, visit, "prepared"):
                args, kwargs = copied(*inputs)
                results = result_leaves.tensors(self.golden(*args, **kwargs))
            return [*(kept[number] for number in range(len(wanted))), *results]

        return Rounding(compute, [*(difference.x for difference in found.differences), *found.results])

    def _count(self, whose: _Whose, found: _Difference, tolerance: Tensor) -> None:
        report = self.reports[found.path]
        golden, other = found.golden, found.other
        differ = (golden != other) & ~(golden.isnan() & other.isnan())
        off = (found.scale.double() - found.grid.scale.double()).abs()
        has_other_scale = bool(off > _scale_tolerance(found, tolerance))
        if has_other_scale:
            # Every code stands for another value, except that of 0. The state that a recurrent layer starts with is 0.
            differ |= other != found.grid.zero_point
        if not bool(differ.any()):
            return
        tolerance = tolerance + found.x.double().abs() * (off / found.grid.scale.double())
        at_tie = differ & ties(found.x, found.grid, tolerance, golden, other)
        steps = (golden - other).abs()[differ].nan_to_num(0)
        _add(report, f"{whose}_differ", int(differ.sum()))
        _add(report, f"{whose}_ties", int(at_tie.sum()))
        _add(report, f"{whose}_repeated_ties", repeated_ties(found.x, other, at_tie))
        most = max(getattr(report, f"{whose}_steps"), int(steps.max()))
        setattr(report, f"{whose}_steps", most)
        rest, reason = differ & ~at_tie, TIE
        if has_other_scale:
            reason = SCALE
        elif bool(rest.any()):
            why = why_runtime if whose == "runtime" else why_prepared
            reason = self._or_known(why(found.origin, found.x, found.grid, found.before, golden, other, rest))
            if reason == UNKNOWN and bool(within(found.x, found.grid, tolerance, other)[rest].all()):
                reason = UNSTEADY
        reasons = self.reasons.setdefault((found.path, whose), {})
        reasons[reason] = None
        # Ties are mentioned only if there is no other reason.
        setattr(report, f"why_{whose}", "; ".join([one for one in reasons if one != TIE] or [TIE]))

    def _or_known(self, reason: str) -> str:
        """Returns the reason, or one that was known when the model was prepared or converted if it is not explained."""
        if reason == UNKNOWN and any(map(is_note_on_weights, preparation(self.model).notes)):
            return READ_WEIGHT
        if reason == UNKNOWN and any(note.endswith(WIDENED) for note in conversion(self.golden).notes):
            return LARGE_BIAS
        return reason

    def _count_results(
        self, whose: _Whose, found: _Pass, results: list[Tensor], rounding: Rounding, first: int
    ) -> None:
        for number, (a, b) in enumerate(zip(found.results, results, strict=True)):
            far = beyond(a, b, rounding.tolerance(first + number), rounding.unsteady[first + number])
            if not bool(far.any()):
                continue
            _add(self.outputs, f"{whose}_unexplained", int(far.sum()))
            has_nan = a.is_floating_point() and bool((a.isnan() != b.isnan())[far].any())
            reason = NAN if has_nan else (whose == "runtime" and why_sums(found.sums)) or self._or_known(UNKNOWN)
            name = "why" if whose == "runtime" else "why_prepared"
            setattr(self.outputs, name, getattr(self.outputs, name) or reason)

    def _compare_outputs(self, prepared: list[Tensor], golden: list[Tensor], runtime: list[Tensor]) -> None:
        out = self.outputs
        for a, b, c in zip(prepared, golden, runtime, strict=True):
            out.numbers += b.numel()
            out.prepared_difference = max(out.prepared_difference, largest_difference(a, b))
            out.runtime_difference = max(out.runtime_difference, largest_difference(b, c))
            if not b.is_floating_point() or not b.numel():
                continue
            out.largest = max(out.largest, float(b.double().abs().nan_to_num(0, 0, 0).max()))
            if a.dim() == 2 and a.shape[1] > 1:
                out.rows += len(a)
                out.agreeing += int((a.argmax(1) == c.argmax(1)).sum())

    def result(self) -> Verification:
        """Returns all counts, in the order of the model."""
        target, tensors = self.runtime.target or "generic", list(self.reports.values())
        changed = not self.runtime.is_as_written
        seen, kernels = summary(self.model), self.runtime.kernels
        floats = layers_in_float(self.model, self.golden, self.runtime)
        counts = preparation(self.model).multiplications
        return Verification(
            target,
            tensors,
            kernels,
            self.outputs,
            self.skipped,
            changed,
            floats,
            seen.multiplications,
            seen.quantized_multiplications,
            sum(counts.get(path, 0) for path in self.runtime.integers),
            seen.parameters,
            seen.quantized_parameters,
            quantized_parameters(self.model, without=floats),
            self.rounded,
            self.runtime.exact_setting,
            [path for path in kernels if path in self.runtime.integers],
            self.runtime.key,
        )


def _outcome(result: Any, codes: Codes) -> Outcome:
    """Returns everything that may differ between two passes of a model, by name."""
    # Copies, because a model may return a tensor that its next pass changes.
    results = [tensor.clone() for tensor in result_leaves.tensors(result)]
    found: Outcome = dict(zip(result_leaves.names(result), results, strict=True))
    found["a constant in the result"] = result_leaves.constants(result)
    for path, calls in codes.items():
        for call, coded in calls.items():
            found[f"the codes of {call_name(path, call)}"] = coded.codes
    return found


def _codes_in(found: Array, grid: GridOf) -> Tensor:
    """Returns the codes that a file output. It outputs those of a float format as values."""
    value = torch.from_numpy(found).float()
    return value if grid.spec.format == "int" else codes_of(value, grid)


def _why_not_comparable(grid: Grid) -> str | None:
    """Returns why the codes of a grid cannot be compared, or None if they can: all elements have the same scale.

    The scale is fixed, or computed at run time if codes are integers. Files have no codes of FP6 and FP4.
    """
    if grid.spec.axis is not None and (grid.scale is None or grid.scale.dim() > 0):
        return "it has more than one scale"
    if grid.spec.format == "int":
        return None
    return _WITHOUT_TYPE if grid.spec.bits < 8 else _COMPUTED if grid.scale is None else None


def _scale_tolerance(found: _Difference, tolerance: Tensor) -> Tensor:
    """Returns by how much rounding may change the scale of a tensor: by that of its range, and its own."""
    spec = found.grid.spec
    width = spec.qmax - spec.qmin if spec.format == "int" else 2 * spec.largest
    moved = 2 * tolerance.max() / width
    return moved + found.grid.scale.double() * 2.0**-22


def _add(report: TensorReport | OutputReport, name: str, number: int) -> None:
    setattr(report, name, getattr(report, name) + number)
