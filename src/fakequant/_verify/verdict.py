"""The result of `verify`: counts per quantizer, differences of the model's results, and the verdict."""

import dataclasses
from typing import Any

from fakequant._prepare.summary import Amount, shares_in_words
from fakequant._util.shown import Shown
from fakequant._util.text import table
from fakequant._verify.explain_codes import OVERFLOW, SATURATION

# Codes of a whole model that may differ at ties: a constant number plus a share of all codes. Where codes have more
# than 8 bits, float rounding is a larger part of a step, so ties are as much more frequent.
_SOME, _SHARE = 4, 1e-4
# The share of a model's codes that may be one step off besides because kernels round otherwise than floats.
_ROUNDED_SHARE = 0.02


def tolerated_ties(codes: int) -> int:
    """Returns how many of a model's codes may differ at ties.

    >>> tolerated_ties(1_000), tolerated_ties(1_000_000)
    (4, 104)
    """
    return _SOME + int(_SHARE * codes)


@dataclasses.dataclass
class TensorReport:
    """The differences between the codes of one quantizer, counted with equal codes at the inputs of its layer."""

    path: str
    codes: int = 0
    # The number of bits of the codes.
    bits: int = 8
    # Prepared and golden model: the number of codes that differ, the largest difference in steps, the number of ties,
    # and how many ties only repeat another one (`repeated_ties`).
    prepared_differ: int = 0
    prepared_steps: int = 0
    prepared_ties: int = 0
    prepared_repeated_ties: int = 0
    # Further codes of prepared and golden model that are one step off because the runtime's kernels round twice.
    prepared_rounded: int = 0
    # The same for golden model and runtime.
    runtime_differ: int = 0
    runtime_steps: int = 0
    runtime_ties: int = 0
    runtime_repeated_ties: int = 0
    # The reasons for the differences; empty if there are none.
    why_prepared: str = ""
    why_runtime: str = ""

    @property
    def why(self) -> str:
        """The reasons for the differences, those of the runtime first."""
        return "; ".join(dict.fromkeys(reason for reason in (self.why_runtime, self.why_prepared) if reason))

    @property
    def is_equal_but_for_ties(self) -> bool:
        """Whether every code that differs is at a tie: one step apart, and within rounding of the midpoint."""
        return self.prepared_differ == self.prepared_ties and self.runtime_differ == self.runtime_ties


@dataclasses.dataclass
class OutputReport:
    """The differences between the results of the models."""

    # The number of compared elements.
    numbers: int = 0
    # The largest differences from the golden model, each model run on its own codes.
    prepared_difference: float = 0.0
    runtime_difference: float = 0.0
    # The largest finite result of the golden model.
    largest: float = 0.0
    # Results of the prepared model that rounding does not explain, with the golden model run on its codes, and why.
    prepared_unexplained: int = 0
    why_prepared: str = ""
    # The same for the runtime.
    runtime_unexplained: int = 0
    why: str = ""
    # Whether the runtime's results equal those of the golden model bit by bit.
    runtime_is_equal: bool = True
    # The largest change of the runtime's results, beyond rounding, when it also outputs its codes.
    disturbance: float = 0.0
    # The largest change of the runtime's results at its default accuracy level.
    level_difference: float = 0.0
    # The number of rows of two-dimensional results, and of rows with the same argmax in prepared model and runtime.
    rows: int = 0
    agreeing: int = 0
    # The perplexity of texts in prepared model and runtime. None if it was not measured.
    perplexity: float | None = None
    runtime_perplexity: float | None = None


@dataclasses.dataclass(repr=False)
class Verification(Shown):
    """The result of `verify`. Prints as tables."""

    target: str
    tensors: list[TensorReport]
    # The runtime's kernel for each layer, by path.
    kernels: dict[str, str]
    outputs: OutputReport
    # Quantizers that are not compared, with the reason.
    skipped: dict[str, str]
    # Whether the file was changed after it was exported, or comes from a version that stored no hash.
    is_changed: bool = False
    # Layers that compute products in float in the runtime, by path, each with the reason. Some are not quantized.
    floats: dict[str, str] = dataclasses.field(default_factory=dict)
    # Multiplications on the example of `prepare`: all, those with a quantized weight and input, and those that the
    # runtime computes in integers. 0 without an example.
    multiplications: int = 0
    quantized_multiplications: int = 0
    integer_multiplications: int = 0
    # Parameters of the float model: all, quantized weights, and those of layers that do not run in float.
    parameters: int = 0
    quantized_parameters: int = 0
    integer_parameters: int = 0
    # Layers whose float inputs the runtime rounds to 8 bits at its default accuracy level. Empty if `verify` was told
    # that the session has accuracy level 1.
    rounded: list[str] = dataclasses.field(default_factory=list)
    # The setting of the runtime that prevents it.
    exact_setting: str = ""
    # Layers that the runtime computes in integers.
    integers: list[str] = dataclasses.field(default_factory=list)
    # The runtime, as an argument of `verify`.
    runtime: str = "onnxruntime"

    @property
    def ok(self) -> bool:
        """Whether the runtime computes the same as the prepared model.

        If True, all codes are equal except for a few ties, and every element of the results is equal up to rounding.
        For a file that was changed after the export, all codes and results are equal bit by bit. Parameters are always
        equal: `verify` raises ValueError if they are not.
        """
        return self.problem is None

    @property
    def problem(self) -> str | None:
        """A sentence that says why `ok` is False. None if it is True."""
        out = self.outputs
        codes = sum(t.codes for t in self.tensors)
        failed = next((t for t in self.tensors if t.runtime_differ > t.runtime_ties), None)
        if failed is not None:
            return f"The runtime's codes differ from the golden model's, first at {failed.path}: {failed.why_runtime}."
        failed = next((t for t in self.tensors if t.prepared_differ > t.prepared_ties + t.prepared_rounded), None)
        if failed is not None:
            return (
                f"The golden model differs from the prepared one by more than rounding, first at {failed.path}: "
                f"{failed.why_prepared}."
            )
        if out.disturbance:
            return (
                f"The runtime's results change by {out.disturbance:.3g} when its codes are read, because it merges "
                "quantizers that follow each other.\nGive them the same spec and observer."
            )
        if out.runtime_unexplained:
            return f"The runtime's results differ from the golden model's after the last quantizer: {out.why}."
        if out.prepared_unexplained:
            return f"The golden model's results differ from the prepared model's: {out.why_prepared}."
        for whose, name in (("runtime", "runtime and golden model"), ("prepared", "prepared and golden model")):
            separate = {
                t.path: getattr(t, f"{whose}_ties") - getattr(t, f"{whose}_repeated_ties") for t in self.tensors
            }
            ties = sum(separate.values())
            tolerated = tolerated_ties(sum(t.codes * 2 ** max(t.bits - 8, 0) for t in self.tensors))
            if ties > tolerated:
                most = max(separate, key=lambda path: separate[path])
                return (
                    f"{ties} of {codes} codes of {name} differ at ties, most of them at {most}; at most "
                    f"{tolerated} are tolerated."
                )
        rounded = sum(t.prepared_rounded for t in self.tensors)
        if rounded > _SOME + _ROUNDED_SHARE * codes:
            return (
                f"{rounded} of {codes} codes of prepared and golden model differ because the runtime's kernels round "
                f"otherwise; at most {_SOME + int(_ROUNDED_SHARE * codes)} are tolerated.\nUse a target whose kernels "
                "round once, or weights of more bits: more codes differ where multipliers are large."
            )
        if self.rounded and out.level_difference:
            return (
                f"The runtime rounds the float inputs of {len(self.rounded)} layers to 8 bits by default, first of "
                f"{self.rounded[0]}. Results differ by {out.level_difference:.3g}; the largest is {out.largest:.3g}.\n"
                f"Set {self.exact_setting}, and use verify(..., accuracy_level=1)."
            )
        if self.is_changed and not (self.first_difference is None and out.runtime_is_equal):
            return (
                "The file was changed after it was exported, or an older version exported it, and its "
                "results are not equal bit by bit, so a change cannot be distinguished from rounding.\n"
                "Export the model again and verify the new file."
            )
        return None

    @property
    def is_exact(self) -> bool:
        """Whether golden model and runtime have the same codes everywhere."""
        return bool(self.tensors) and self.first_difference is None

    @property
    def saturates(self) -> bool:
        """Whether kernels saturated on this CPU."""
        return self._is_named(SATURATION)

    @property
    def overflows(self) -> bool:
        """Whether sums of products did not fit in 32 bits."""
        return self._is_named(OVERFLOW)

    def _is_named(self, reason: str) -> bool:
        return any(reason in t.why_runtime for t in self.tensors) or self.outputs.why == reason

    @property
    def first_difference(self) -> str | None:
        """The first quantizer, in the model's order, at which runtime and golden model differ, ties included."""
        return next((t.path for t in self.tensors if t.runtime_differ), None)

    @property
    def layers(self) -> int:
        """The number of layers that compute products, in integers or in float."""
        return len(self.floats) + len(self.integers)

    def shares(self) -> str:
        """Returns the shares of the model that are quantized and run in integers, and how many layers do not."""
        words = shares_in_words(
            Amount(self.multiplications, self.parameters),
            Amount(self.quantized_multiplications, self.quantized_parameters),
            Amount(self.integer_multiplications, self.integer_parameters),
        )
        if self.floats:
            words += f"\n{len(self.floats)} OF {self.layers} LAYERS RUN IN FLOAT HERE"
        return words

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as dicts, lists, numbers and strings."""
        return {
            **dataclasses.asdict(self),
            "ok": self.ok,
            "layers": self.layers,
            "first_difference": self.first_difference,
        }

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
        parts = [self.shares()]
        if self.floats:
            floats = [[path, self.kernels.get(path, "-"), why] for path, why in self.floats.items()]
            parts.append(table(["runs in float", "kernel", "why"], floats))
        parts.append(table(["quantizer", "codes", "prepared / golden", "golden / runtime", "why"], rows))
        parts.append(table(["layer", "kernel"], [[path, kernel] for path, kernel in self.kernels.items()]))
        parts += [f"{path} is not compared: {reason}" for path, reason in self.skipped.items()]
        parts.append(self.verdict())
        return "\n\n".join(parts)

    def verdict(self) -> str:
        """Returns a summary in words: the differences of the results, and `problem` if there is one."""
        out = self.outputs
        lines = [
            f"results: prepared / golden differ by {out.prepared_difference:.3g} at most, golden / runtime by "
            f"{out.runtime_difference:.3g}"
        ]
        if out.rows:
            lines.append(f"argmax: the same in {out.agreeing} of {out.rows} rows")
        if out.perplexity is not None:
            lines.append(f"perplexity: {out.perplexity:.6g} prepared, {out.runtime_perplexity:.6g} in the runtime")
        if self.problem is not None:
            lines.append(self.problem)
        elif not self.tensors:
            lines.append(
                "No activation has a fixed scale. The weights have the same codes, and the results agree up to "
                "rounding."
            )
        else:
            ties = sum(t.runtime_differ for t in self.tensors)
            lines.append("The runtime computes what was trained" + (f", except for {ties} ties." if ties else "."))
        return "\n".join(lines)


def _count(number: int, steps: int) -> str:
    return "equal" if number == 0 else f"{number} differ, by {steps}" if steps else f"{number} differ"
