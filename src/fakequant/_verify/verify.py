"""`verify`: compares the codes and results of a prepared model, its golden model and an exported file."""

import dataclasses
import os
from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fakequant._convert.convert import WIDENED, conversion
from fakequant._convert.golden.quantizer import GoldenQuantizer
from fakequant._export.notes import call_name
from fakequant._model import leaves
from fakequant._model.running import Data, check_module, evaluating, run
from fakequant._prepare.attach import preparation
from fakequant._prepare.flow_graph import is_note_on_weights
from fakequant._prepare.summary import quantized_parameters, summary
from fakequant._runtimes.session import Array, Run, Session, session_for
from fakequant._verify.explain_codes import (
    KERNEL,
    LARGE_BIAS,
    NAN,
    READ_WEIGHT,
    SCALE,
    TIE,
    UNKNOWN,
    UNSTEADY,
    Differing,
    differing,
    repeated_ties,
    why_prepared,
    why_runtime,
    why_sums,
    within,
)
from fakequant._verify.file_of_model import check_accuracy_level, open_file_of, require_comparable
from fakequant._verify.float_layers import layers_in_float
from fakequant._verify.passes import Codes, Difference, Inputs, Pass, Passes, Whose
from fakequant._verify.repeatability import Outcome, require_repeating, require_repeating_file, require_same
from fakequant._verify.rounding_bounds import REPETITIONS, Rounding, is_same, largest_difference
from fakequant._verify.verdict import OutputReport, TensorReport, Verification
from fakequant._verify.verify_gguf import verify_gguf
from fakequant._verify.verify_weights import verify_weights

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

    Engines that multiply dequantized weights have no codes to read. For their folders, every stored tensor, every
    parameter that the engine loads and every output must have the expected bits. For GGUF files, all metadata and
    tensors and all dequantized weights must. Outputs must be no further from the prepared model's than
    those move when errors of the size of rounding are added; docs/guides/language-models.md has the limits.

    Args:
        model: A prepared and calibrated model.
        path: The file or folder that an exporter, such as `export_onnx`, wrote for this model.
        data: Batches, such as a DataLoader or a list. A batch is a tensor, a dict of keyword arguments, or a tuple.
        steps: The number of batches to use; None for all.
        runtime: The runtime to use, such as "onnxruntime". docs/guides/runtimes.md lists them. If None, the one that
            the file was written for.
        accuracy_level: None for the default settings of the runtime. Some runtimes then round the float inputs of
            weight-only layers to 8 bits. 1 if you will prevent that: for ONNX Runtime with the session's config entry
            `session.qdq_matmulnbits_accuracy_level` 1, for others with the setting that `problem` names.

    Returns:
        A `Verification`. Its `ok` is True if the file computes the same as the prepared model.

    Raises:
        ValueError: If the file does not belong to the model, or if the model or the file does not return the same for
            the same batch each time. The message says what changes: random numbers, an attribute, a buffer.

    Needs the extra of the runtime, such as `pip install "fakequant[onnx]"`.

    >>> import tempfile, fakequant as fq
    >>> model = fq.prepare(nn.Sequential(nn.Linear(4, 2)), fq.recipes.int8(target="onnxruntime-x86"), torch.ones(1, 4))
    >>> model = fq.calibrate(model, [torch.ones(3, 4)], progress=False)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     written = fq.export_onnx(model, f"{folder}/model.onnx", torch.ones(1, 4))
    ...     found = fq.verify(model, f"{folder}/model.onnx", [torch.randn(8, 4)])
    >>> found.ok, found.kernels
    (True, {'0': 'QGemm'})
    """
    check_module(model)
    check_accuracy_level(accuracy_level)
    session = session_for(path, runtime)
    if session.run_tokens is not None:
        return verify_gguf(model, path, data, session, steps=steps)
    if session.dequantizes:
        return verify_weights(model, path, data, steps=steps)
    file, golden = open_file_of(model, path, session.key)
    comparison = _Comparison(model, golden, file, is_exact_level=accuracy_level is not None)
    if callable(data) and not isinstance(data, Iterable):
        raise TypeError("`data` must be an iterable of batches, because three models run on it, not a function.")
    try:
        with evaluating(model), torch.autocast("cpu", enabled=False):
            run(model, data, steps, call=comparison.compare)
    finally:
        comparison.passes.weights.clear()  # now, and not when the garbage collector finds it
    if not comparison.batches:
        raise ValueError("`data` has no batches, so there is nothing to compare.")
    found = comparison.result()
    if not found.outputs.numbers and not any(t.codes for t in found.tensors):
        raise ValueError("The batches of `data` are empty, so there is nothing to compare.")
    return found


@dataclasses.dataclass
class _Counts:
    """The codes of one quantizer that differ between another model and the golden model."""

    differ: int = 0
    # The largest difference in steps.
    steps: int = 0
    ties: int = 0
    # Ties that only repeat another one.
    repeated_ties: int = 0
    # Codes that are one step off because kernels round twice.
    rounded: int = 0
    # In the order found.
    reasons: dict[str, None] = dataclasses.field(default_factory=dict)

    @property
    def why(self) -> str:
        # Ties are mentioned only if there is no other reason.
        return "; ".join([reason for reason in self.reasons if reason != TIE] or self.reasons)


@dataclasses.dataclass
class _Side:
    """One of the two models that are compared with the golden model: all that differs."""

    # By the path of the quantizer.
    tensors: dict[str, _Counts] = dataclasses.field(default_factory=dict)
    # The elements of results that rounding does not explain, and why.
    unexplained: int = 0
    why: str = ""


def _disturbance(found: Pass, results: list[Tensor], watched: list[Tensor] | None, rounding: Rounding) -> float:
    """Returns by how much results change when codes are read too, beyond rounding."""
    pairs = enumerate(zip(watched or [], results, strict=False), len(found.differences))
    far = [largest_difference(a, b) for n, (a, b) in pairs if bool(rounding.beyond(n, a, b, times=2).any())]
    return max(far, default=0.0)


class _Comparison:
    """Runs the three models batch by batch and collects the differences."""

    def __init__(self, model: nn.Module, golden: nn.Module, runtime: Session, *, is_exact_level: bool) -> None:
        self.model, self.golden, self.runtime = model, golden, runtime
        self.passes = Passes(model, golden, runtime)
        self.rounded = [] if is_exact_level else runtime.rounded
        # The number of codes of each quantizer, by path.
        self.codes: dict[str, int] = {}
        self.sides: dict[Whose, _Side] = {"prepared": _Side(), "runtime": _Side()}
        self.outputs = OutputReport()
        self.batches = 0

    def compare(self, *args: Any, **kwargs: Any) -> None:
        self.batches += 1
        inputs = args, kwargs
        prepared, prepared_codes = self.passes.run_prepared(inputs)
        self._require_repeating("prepared", (prepared, prepared_codes), lambda: self.passes.run_prepared(inputs))
        golden, golden_codes = self.passes.run_golden(inputs)
        self._require_repeating("golden", (golden, golden_codes), lambda: self.passes.run_golden(inputs))
        run = self._run_file(inputs)
        require_repeating_file(self.runtime, run.results, args, kwargs)
        if repr(leaves.constants(prepared)) != repr(leaves.constants(golden)):  # NaN equals NaN
            raise ValueError(
                "The prepared and the golden model return different constants, so they cannot be compared."
            )
        ran = _tensors(run.results)
        names = leaves.names(golden)
        require_comparable(leaves.tensors(golden), names, ran, self.runtime.results)
        self._judge("prepared", prepared_codes, leaves.tensors(prepared), None, inputs)
        self._judge("runtime", self.passes.codes_of(run), ran, _tensors(run.watched), inputs)
        self._compare_outputs(leaves.tensors(prepared), leaves.tensors(golden), ran)
        if self.rounded:
            for a, b in zip(ran, _tensors(self.runtime.run_with_rounding(args, kwargs) or []), strict=True):
                self.outputs.level_difference = max(self.outputs.level_difference, largest_difference(a, b))

    def _run_file(self, inputs: Inputs) -> Run:
        """Runs the file. If its codes differ from the golden model's, they are read again, one by one if necessary."""
        run = self.runtime.run(*inputs)
        if not self.runtime.may_misread:
            return run
        found = self.passes.run_golden_on(self.passes.codes_of(run), inputs, "runtime")
        return self.runtime.run(*inputs) if found.differences and self.runtime.read_one_by_one() else run

    def _require_repeating(
        self, whose: Literal["prepared", "golden"], first: tuple[Any, Codes], run: Callable[[], tuple[Any, Codes]]
    ) -> None:
        model = self.model if whose == "prepared" else self.golden
        require_repeating(f"{whose} model", model, _outcome(*first), lambda: _outcome(*run()))

    def _judge(
        self, whose: Whose, codes: Codes, results: list[Tensor], watched: list[Tensor] | None, inputs: Inputs
    ) -> None:
        """Counts the differences between another model and the golden model run on that model's codes.

        `watched` has the runtime's results in the session that also outputs codes. It is None for the prepared model.
        """
        found = self.passes.run_golden_on(codes, inputs, whose)
        for path, number in found.compared.items():
            self.codes[path] = self.codes.get(path, 0) + (number if whose == "prepared" else 0)
        same = all(map(is_same, found.results, results))
        is_steady = watched is None or all(map(is_same, watched, results))
        if whose == "runtime":
            self.outputs.runtime_is_equal &= same
        if same and is_steady and not found.differences:
            return
        rounding = self.passes.rounding(codes, inputs, found)
        while rounding.repetitions < REPETITIONS and not (
            self._is_explained(whose, found, results, rounding) and not _disturbance(found, results, watched, rounding)
        ):
            rounding.repeat(1)
        if self.passes.has_uncompared_grids and not self._is_explained(whose, found, results, rounding):
            rounding.repeat(_MORE_REPETITIONS)
        if whose == "prepared" and not self._is_explained(whose, found, results, rounding):
            rounding.include(self.passes.rounding_of_prepared(inputs, found))
        # State that the first passes did not find would have counted as rounding.
        require_same("golden model", *rounding.without_errors())
        for number, difference in enumerate(found.differences):
            self._count(whose, difference, rounding.tolerance(number))
        self._count_results(whose, found, results, rounding)
        self.outputs.disturbance = max(self.outputs.disturbance, _disturbance(found, results, watched, rounding))

    def _is_explained(self, whose: Whose, found: Pass, results: list[Tensor], rounding: Rounding) -> bool:
        """Returns True if rounding explains all differences between the codes, as ties, and between the results."""
        return all(
            torch.equal(*self._differing(whose, difference, rounding.tolerance(number))[:2])
            for number, difference in enumerate(found.differences)
        ) and not any(
            bool(rounding.beyond(number, a, b).any())
            for number, (a, b) in enumerate(zip(found.results, results, strict=True), len(found.differences))
        )

    def _differing(self, whose: Whose, found: Difference, tolerance: Tensor) -> Differing:
        arithmetic = self._grid(found.path).arithmetic_in_use if whose == "prepared" else None
        return differing(found, tolerance, arithmetic)

    def _count(self, whose: Whose, found: Difference, tolerance: Tensor) -> None:
        golden, other = found.golden, found.other
        differ, at_tie, by_kernel, tolerance, has_other_scale = self._differing(whose, found, tolerance)
        if not bool((differ | by_kernel).any()):
            return
        counts = self.sides[whose].tensors.setdefault(found.path, _Counts())
        counts.differ += int((differ | by_kernel).sum())
        if bool(by_kernel.any()):
            counts.rounded += int(by_kernel.sum())
            counts.steps = max(counts.steps, 1)
            counts.reasons[KERNEL] = None
        if not bool(differ.any()):
            return
        counts.ties += int(at_tie.sum())
        counts.repeated_ties += repeated_ties(found.x, other, at_tie)
        counts.steps = max(counts.steps, int((golden - other).abs()[differ].nan_to_num(0).max()))
        rest, reason = differ & ~at_tie, TIE
        if has_other_scale:
            reason = SCALE
        elif bool(rest.any()):
            why = why_runtime if whose == "runtime" else why_prepared
            reason = self._or_known(why(found.origin, found.x, found.grid, found.before, golden, other, rest))
            if reason == UNKNOWN and bool(within(found.x, found.grid, tolerance, other)[rest].all()):
                reason = UNSTEADY
        counts.reasons[reason] = None

    def _or_known(self, reason: str) -> str:
        """Returns the reason, or one that was known when the model was prepared or converted if it is not explained."""
        if reason == UNKNOWN and any(map(is_note_on_weights, preparation(self.model).notes)):
            return READ_WEIGHT
        if reason == UNKNOWN and any(note.endswith(WIDENED) for note in conversion(self.golden).notes):
            return LARGE_BIAS
        return reason

    def _count_results(self, whose: Whose, found: Pass, results: list[Tensor], rounding: Rounding) -> None:
        side = self.sides[whose]
        for number, (a, b) in enumerate(zip(found.results, results, strict=True), len(found.differences)):
            far = rounding.beyond(number, a, b)
            if not bool(far.any()):
                continue
            side.unexplained += int(far.sum())
            has_nan = a.is_floating_point() and bool((a.isnan() != b.isnan())[far].any())
            reason = NAN if has_nan else (whose == "runtime" and why_sums(found.sums)) or self._or_known(UNKNOWN)
            side.why = side.why or reason

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
        prepared, runtime = self.sides["prepared"], self.sides["runtime"]
        self.outputs.prepared_unexplained, self.outputs.why_prepared = prepared.unexplained, prepared.why
        self.outputs.runtime_unexplained, self.outputs.why = runtime.unexplained, runtime.why
        seen, file = summary(self.model), self.runtime
        floats = layers_in_float(self.model, self.golden, file)
        counts = preparation(self.model).multiplications
        return Verification(
            target=file.target or "generic",
            tensors=[self._report(path) for path in self.codes],
            kernels=file.kernels,
            outputs=self.outputs,
            skipped=self.passes.skipped,
            is_changed=not file.is_as_written,
            floats=floats,
            multiplications=seen.multiplications,
            quantized_multiplications=seen.quantized_multiplications,
            integer_multiplications=sum(counts.get(path, 0) for path in file.integers),
            parameters=seen.parameters,
            quantized_parameters=seen.quantized_parameters,
            integer_parameters=quantized_parameters(self.model, without=floats),
            rounded=self.rounded,
            exact_setting=file.exact_setting,
            integers=[path for path in file.kernels if path in file.integers],
            runtime=file.key,
        )

    def _grid(self, path: str) -> GoldenQuantizer:
        grid = self.golden.get_submodule(path)
        assert isinstance(grid, GoldenQuantizer)
        return grid

    def _report(self, path: str) -> TensorReport:
        prepared, runtime = (side.tensors.get(path, _Counts()) for side in self.sides.values())
        return TensorReport(
            path=path,
            bits=self._grid(path).spec.bits,
            codes=self.codes[path],
            prepared_differ=prepared.differ,
            prepared_steps=prepared.steps,
            prepared_ties=prepared.ties,
            prepared_rounded=prepared.rounded,
            prepared_repeated_ties=prepared.repeated_ties,
            runtime_differ=runtime.differ,
            runtime_steps=runtime.steps,
            runtime_ties=runtime.ties,
            runtime_repeated_ties=runtime.repeated_ties,
            why_prepared=prepared.why,
            why_runtime=runtime.why,
        )


def _tensors(arrays: Iterable[Array]) -> list[Tensor]:
    return [torch.from_numpy(np.array(array)) for array in arrays]


def _outcome(result: Any, codes: Codes) -> Outcome:
    """Returns everything that may differ between two passes of a model, by name."""
    # Copies, because a model may return a tensor that its next pass changes.
    results = [tensor.clone() for tensor in leaves.tensors(result)]
    found: Outcome = dict(zip(leaves.names(result), results, strict=True))
    found["a constant in the result"] = leaves.constants(result)
    for path, calls in codes.items():
        for call, coded in calls.items():
            found[f"the codes of {call_name(path, call)}"] = coded.codes
    return found
