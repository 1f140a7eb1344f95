"""What `verify` found: counts per quantizer, the results, and the verdict."""

import dataclasses
from typing import Any

from fakequant._util.text_table import table
from fakequant._verify.explain_codes import OVERFLOW, SATURATION
from fakequant._verify.onnxruntime_session import INTEGER_KERNELS

# How many codes of a whole model may lie on the other side of a tie: some, and a share of all codes.
_SOME, _SHARE = 4, 1e-4


def tolerated_ties(codes: int) -> int:
    """How many of a model's codes may differ at ties.

    >>> tolerated_ties(1_000), tolerated_ties(1_000_000)
    (4, 104)
    """
    return _SOME + int(_SHARE * codes)


@dataclasses.dataclass
class TensorReport:
    """The codes of one quantizer, its layer by itself: the one before it started from equal codes."""

    path: str
    codes: int = 0
    # Prepared model and golden model: how many differ, by how many steps at most, and how many of them are ties.
    prepared_differ: int = 0
    prepared_steps: int = 0
    prepared_ties: int = 0
    # Golden model and runtime.
    runtime_differ: int = 0
    runtime_steps: int = 0
    runtime_ties: int = 0
    # Why, where they differ.
    why_prepared: str = ""
    why_runtime: str = ""

    @property
    def why(self) -> str:
        """Why there are differences, those of the runtime first."""
        return "; ".join(dict.fromkeys(reason for reason in (self.why_runtime, self.why_prepared) if reason))

    @property
    def is_equal_but_for_ties(self) -> bool:
        """Whether every code that differs is at a tie: one step apart, and within rounding of the middle."""
        return self.prepared_differ == self.prepared_ties and self.runtime_differ == self.runtime_ties


@dataclasses.dataclass
class OutputReport:
    """The results of the model."""

    # How many numbers were compared.
    numbers: int = 0
    # The largest differences, each model by itself on the data.
    prepared_difference: float = 0.0
    runtime_difference: float = 0.0
    # The largest finite result of the golden model.
    largest: float = 0.0
    # From the codes of the prepared model: how many of its results rounding cannot explain, and why they differ.
    prepared_unexplained: int = 0
    why_prepared: str = ""
    # The same of the runtime, from its codes.
    runtime_unexplained: int = 0
    why: str = ""
    # Whether the runtime's results are those of the golden model, bit by bit.
    runtime_is_equal: bool = True
    # How far the runtime's results change, beyond rounding, when its codes are looked at.
    disturbance: float = 0.0
    # Rows of two-dimensional results, and how many have their largest number in the same place in prepared model and
    # runtime.
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
    # The file is not as `export_onnx` wrote it, or it was written before files said so.
    is_changed: bool = False

    @property
    def ok(self) -> bool:
        """Whether the runtime computes what was trained.

        The parameters are equal, or the file would not belong to the model. All codes are equal, but for a few that
        rounding put on the other side of a tie. All results are equal up to what rounding can explain, element by
        element. In a file that was changed after it was written, codes and results are equal bit by bit.
        """
        return self.problem is None

    @property
    def problem(self) -> str | None:
        """What is wrong, in a sentence; None if all is well."""
        out = self.outputs
        codes = sum(t.codes for t in self.tensors)
        failed = next((t for t in self.tensors if t.runtime_differ > t.runtime_ties), None)
        if failed is not None:
            return f"The runtime computes something else, first at {failed.path}: {failed.why_runtime}."
        failed = next((t for t in self.tensors if t.prepared_differ > t.prepared_ties), None)
        if failed is not None:
            return (
                f"The golden model differs from the prepared one by more than rounding, first at {failed.path}: "
                f"{failed.why_prepared}."
            )
        if out.disturbance:
            return (
                f"The runtime's results change by {out.disturbance:.3g} when its codes are looked at: it merges "
                "quantizers that follow each other.\nGive them the same spec and observer."
            )
        if out.runtime_unexplained:
            return f"The runtime has other results after the last quantizer: {out.why}."
        if out.prepared_unexplained:
            return f"The golden model has other results than the prepared one: {out.why_prepared}."
        for whose, name in (("runtime", "runtime and golden model"), ("prepared", "prepared and golden model")):
            ties = sum(getattr(t, f"{whose}_ties") for t in self.tensors)
            if ties > tolerated_ties(codes):
                most = max(self.tensors, key=lambda t: getattr(t, f"{whose}_ties"))
                return (
                    f"{ties} of {codes} codes of {name} are on other sides of ties, most of them at {most.path}; "
                    f"{tolerated_ties(codes)} would be usual."
                )
        if self.is_changed and not (self.first_difference is None and out.runtime_is_equal):
            return (
                "The file was changed after fakequant.export_onnx wrote it, or an older version wrote it, and its "
                "results are not equal bit by bit: what was changed cannot be told from rounding.\n"
                "Export the model again, and verify that file."
            )
        return None

    @property
    def is_exact(self) -> bool:
        """Whether golden model and runtime have the same codes everywhere."""
        return bool(self.tensors) and self.first_difference is None

    @property
    def saturates(self) -> bool:
        """Whether the kernels of this CPU saturated."""
        return self._is_named(SATURATION)

    @property
    def overflows(self) -> bool:
        """Whether sums did not fit 32 bits."""
        return self._is_named(OVERFLOW)

    def _is_named(self, reason: str) -> bool:
        return any(reason in t.why_runtime for t in self.tensors) or self.outputs.why == reason

    @property
    def first_difference(self) -> str | None:
        """The first quantizer, in the order of the model, where runtime and golden model differ; ties count."""
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
            lines.append(f"largest number of a row: the same in {out.agreeing} of {out.rows} rows")
        if self.problem is not None:
            lines.append(self.problem)
        elif not self.tensors:
            lines.append(
                "No activation has a fixed scale: the weights have the same codes, and the results agree up to "
                "rounding."
            )
        else:
            ties = sum(t.runtime_differ for t in self.tensors)
            lines.append("The runtime computes what was trained" + (f", but for {ties} ties." if ties else "."))
        return "\n".join(lines)


def _count(number: int, steps: int) -> str:
    return "equal" if number == 0 else f"{number} differ, by {steps}" if steps else f"{number} differ"
