"""`check`: a dry run of the whole flow on a copy of a model, from `prepare` to `verify`."""

import copy
import dataclasses
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fakequant
from fakequant import recipes
from fakequant._convert.convert import convert
from fakequant._diagnosis.training_step import training_step
from fakequant._model.running import check_module
from fakequant._prepare.prepare import prepare, unprepare
from fakequant._prepare.summary import Amount, Summary, shares_in_words, summary
from fakequant._runtimes import RUNTIMES, find
from fakequant._train.calibrate import calibrate
from fakequant._util.shown import Shown
from fakequant._util.text import counted, shortened, table
from fakequant._verify.verdict import Verification
from fakequant._verify.verify import verify
from fakequant.config import QuantConfig


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage of the flow: whether it succeeded, and a note, which is the error if it failed."""

    name: str
    ok: bool
    note: str = ""


@dataclasses.dataclass(repr=False)
class Check(Shown):
    """The result of `check`. Prints as tables."""

    target: str
    stages: list[Stage] = dataclasses.field(default_factory=list)
    # Multiplications in layers and matmuls on the example: all, with quantized weights and inputs, and in layers that
    # the runtime computes in integers.
    multiplications: int = 0
    quantized_multiplications: int = 0
    integer_multiplications: int = 0
    # Parameters: all, quantized weights, and in layers that do not run in float in the runtime.
    parameters: int = 0
    quantized_parameters: int = 0
    integer_parameters: int = 0
    # Why modules stay in float, by path.
    floats: dict[str, str] = dataclasses.field(default_factory=dict)
    # Layers that are quantized but run in float in the runtime, with their kernel and the reason.
    float_kernels: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    # The lines of Python to write next, for this config and target. Empty if a stage failed.
    next: str = ""

    @property
    def ok(self) -> bool:
        """Whether all stages succeeded."""
        return all(stage.ok for stage in self.stages)

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields by name, as dicts, lists, numbers and strings."""
        return {**dataclasses.asdict(self), "ok": self.ok}

    def __str__(self) -> str:
        rows = [[stage.name, "ok" if stage.ok else "FAILED", stage.note] for stage in self.stages]
        parts = [table(["stage", "result", "note"], rows)]
        if self.parameters:
            is_verified = any(stage.name == "verify" and stage.ok for stage in self.stages)
            parts.append(
                shares_in_words(
                    Amount(self.multiplications, self.parameters),
                    Amount(self.quantized_multiplications, self.quantized_parameters),
                    Amount(self.integer_multiplications, self.integer_parameters) if is_verified else None,
                )
            )
        if self.float_kernels:
            rows = [[path, *found] for path, found in self.float_kernels.items()]
            parts.append(table(["quantized, but runs in float", "kernel", "why"], rows))
        if self.floats:
            parts.append(table(["in float", "why"], list(self.floats.items())))
        if self.next:
            parts.append(f"next:\n\n{self.next}")
        return "\n\n".join(parts)


def check(model: nn.Module, example: Any, config: QuantConfig | None = None) -> Check:
    """Tries the whole flow on a copy of a float model: prepare, calibrate, train, save, convert, export, verify.

    The model itself is not changed. A stage that fails is reported with its error, and the stages that need it are left
    out. The file is the one of the target, and it is run in the runtime of the target. TensorRT cannot be run here: its
    files are run in ONNX Runtime. Scales come from the example alone, so accuracy says nothing here.

    Args:
        model: The float model.
        example: A batch, as `calibrate` takes them: a tensor, a dict of keyword arguments, or a tuple.
        config: How the model is quantized. If None, `recipes.int8(target="onnxruntime-x86")`.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 2))
    >>> found = check(model, torch.ones(2, 4))
    >>> found.ok, found.integer_multiplications == found.multiplications
    (True, True)
    """
    check_module(model)
    if config is None:
        config = recipes.int8(target="onnxruntime-x86")
    found = Check(config.target)
    run = _Run(found, copy.deepcopy(model).eval(), example, config)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.all_stages()
    if found.ok:
        found.next = _next_lines(config)
    return found


def _next_lines(config: QuantConfig) -> str:
    """Returns the lines that quantize, train, write and verify a model with a config."""
    runtime = find(config.target).runtime
    target = f"target={config.target!r}"
    calls = [f"{name}({target})" for name in recipes.__all__] + [f"lsq({bits}, {target})" for bits in range(2, 9)]
    recipe = next((call for call in calls if _makes(call, config)), None)
    made = f"fq.recipes.{recipe}" if recipe else f"fq.QuantConfig.from_json({config.to_json()!r})"
    example = ", example" * runtime.takes_example
    path = f"model{runtime.suffix}"
    return "\n".join(
        [
            "import fakequant as fq",
            "",
            f"config = {made}",
            "model = fq.prepare(model, config, example)      # example: one batch",
            "model = fq.calibrate(model, data)               # data: some batches",
            "...                                             # train as before, or leave this out",
            f"fq.{runtime.exporter}(model, {path!r}{example})",
            f"print(fq.verify(model, {path!r}, data))",
        ]
    )


def _makes(call: str, config: QuantConfig) -> bool:
    """Returns True if a call of a recipe, as source code, makes this config."""
    try:
        return bool(eval(call, vars(recipes)) == config)
    except (TypeError, ValueError):  # it needs more arguments, or is for other targets
        return False


class _Run:
    """The stages, in order. Each method is one stage and returns its note."""

    def __init__(self, found: Check, model: nn.Module, example: Any, config: QuantConfig) -> None:
        self.found, self.model, self.example, self.config = found, model, example, config
        self.target = find(config.target)
        # Loads the state of the first copy.
        self.other = copy.deepcopy(model)

    def all_stages(self) -> None:
        for name, stage in (
            ("prepare", self._prepare),
            ("calibrate", self._calibrate),
            ("train", self._train),
            ("save and load", self._save_and_load),
            ("convert", self._convert),
        ):
            if not self._try(name, stage):
                return
        with tempfile.TemporaryDirectory() as folder:
            self.path = Path(folder) / f"model{self.target.runtime.suffix}"
            if self._try("export", self._export):
                self._try("verify", self._verify)
        self._try("unprepare", self._unprepare)

    def _try(self, name: str, stage: Callable[[], str]) -> bool:
        try:
            self.found.stages.append(Stage(name, True, stage()))
        except Exception as error:  # any error of any stage is a finding
            first = str(error).strip().split("\n")[0]
            words = [shortened(f"{type(error).__name__}: {first}", 120), *getattr(error, "__notes__", ())]
            self.found.stages.append(Stage(name, False, "; ".join(words)))
        return self.found.stages[-1].ok

    def _prepare(self) -> str:
        self.before = {name: value.clone() for name, value in self.model.state_dict().items()}
        prepare(self.model, self.config, self.example)
        prepare(self.other, self.config, self.example)
        seen: Summary = summary(self.model)
        self.found.floats = seen.floats
        self.found.multiplications = seen.multiplications
        self.found.quantized_multiplications = seen.quantized_multiplications
        self.found.parameters, self.found.quantized_parameters = seen.parameters, seen.quantized_parameters
        return f"{len(seen.layers)} layers and results quantized, {counted(len(seen.floats), 'module')} in float"

    def _calibrate(self) -> str:
        calibrate(self.model, [self.example], progress=False)
        return ""

    def _train(self) -> str:
        trained = copy.deepcopy(self.model).train()
        learned = [p for p in trained.parameters() if p.requires_grad]
        if not learned or not training_step(trained, self.example, torch.optim.SGD(learned, lr=1e-3)):
            return "no result has a gradient"
        count = sum(p.grad is not None for p in learned)
        return f"{count} of {sum(1 for _ in trained.parameters())} parameters have a gradient"

    def _save_and_load(self) -> str:
        self.other.load_state_dict(self.model.state_dict())
        return ""

    def _convert(self) -> str:
        convert(self.model)
        return ""

    def _export(self) -> str:
        export = getattr(fakequant, self.target.runtime.exporter)
        export(self.model, self.path, *[self.example] * self.target.runtime.takes_example)
        return ""

    def _verify(self) -> str:
        verified: Verification = verify(self.model, self.path, [self.example])
        if not verified.ok:
            raise ValueError(verified.problem)
        self.found.integer_multiplications = verified.integer_multiplications
        self.found.integer_parameters = verified.integer_parameters
        self.found.float_kernels = {
            path: (verified.kernels.get(path, "-"), why)
            for path, why in verified.floats.items()
            if path not in self.found.floats
        }
        codes = f"{sum(t.codes for t in verified.tensors):,} codes compared in {RUNTIMES[verified.runtime].name}"
        return codes if self.target.has_own_runtime else f"{codes}; {self.target.name} itself was not run"

    def _unprepare(self) -> str:
        state = unprepare(self.model).state_dict()
        if list(state) != list(self.before) or not all(_same(state[name], old) for name, old in self.before.items()):
            raise ValueError("The model is not what it was before prepare.")
        return ""


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())
