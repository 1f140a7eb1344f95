"""A trial: one network goes through the whole flow, from `prepare` to `verify`, for one target with one recipe."""

import dataclasses
import re
import sys
import tempfile
import time
import traceback
import types
import warnings
from pathlib import Path
from typing import Literal, NamedTuple

import fakequant as fq
from fakequant._verify import explain_codes

# The steps of a trial, as source. A failure is printed as a script that consists of them, so both are the same.
STEPS = {
    "prepare": """\
torch.manual_seed(0)
model, example = Network(), inputs(SIZES[0])
fq.prepare(model, fq.recipes.{recipe}, example)
""",
    "calibrate": """\
fq.calibrate(model, [inputs(SIZES[0]) for _ in range(4)], progress=False)
""",
    "train": """

def tensors(y):
    parts = y.values() if isinstance(y, dict) else y if isinstance(y, list | tuple) else []
    return [y] if isinstance(y, torch.Tensor) else [leaf for part in parts for leaf in tensors(part)]


model.train()
results = tensors(model(*inputs(max(SIZES))))
sum(y.square().mean() for y in results if y.requires_grad).backward()
if nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
    torch.optim.SGD(model.parameters(), 1e-3).step()
model.eval()
""",
    "copies": """\
reloaded = fq.prepare(Network(), fq.recipes.{recipe}, example)
reloaded.load_state_dict(model.state_dict())
copies = {{"deepcopy": copy.deepcopy(model), "pickle": pickle.loads(pickle.dumps(model)), "state_dict": reloaded}}
digest = digest_of_parameters(fq.convert(model))
different = [name for name, other in copies.items() if digest_of_parameters(fq.convert(other)) != digest]
""",
    "export": """\
fq.{export}
""",
    "verify": """\
found = fq.verify({verify})
""",
}
HEAD = """\
import copy
import pickle

import fakequant as fq
from fakequant._export.notes import digest_of_parameters
"""

# Groups of weights would need wider layers than the networks have.
RECIPES = {
    "int8": "int8(target={target!r})",
    "int16x8": "int8(activation_bits=16, target={target!r})",
    "w4a8": "w4a8(target={target!r})",
    "lsq2": "lsq(2, target={target!r})",
    "lsq3": "lsq(3, target={target!r})",
    "lsq4": "lsq(4, target={target!r})",
    "int8_dynamic": "int8_dynamic(target={target!r})",
    "int4_weight_only": "int4_weight_only(None, target={target!r})",
    "fp8": "fp8()",
}
# LiteRT's own kernels round twice. With weights of few bits, so many codes are one step off that `verify` refuses.
FIXED_POINT = ("litert-builtin", "litert-reference")
TARGETS = (
    "generic", "onnxruntime-x86", "onnxruntime-vnni", "openvino", "openvino-vnni", "xnnpack", "litert", *FIXED_POINT
)  # fmt: skip


class Pair(NamedTuple):
    """A target, and a recipe to train with."""

    target: str
    recipe: str


# What each target can be trained with; the others must refuse what they get.
PAIRS = [
    Pair(target, recipe)
    for recipe in RECIPES
    for target in TARGETS
    if (recipe != "fp8" or target == "generic")
    and (recipe != "int8_dynamic" or not target.startswith("openvino"))
    and (recipe != "int16x8" or target.startswith("litert"))
    and (recipe in ("int8", "int16x8") or target not in FIXED_POINT)
]


def pairs_of(seed: int) -> list[Pair]:
    """Returns the pairs that a network is tried with: one, or two for every second seed. All are equally frequent.

    >>> from collections import Counter
    >>> set(Counter(pair for seed in range(2 * len(PAIRS)) for pair in pairs_of(seed)).values())
    {3}
    """
    return [PAIRS[seed % len(PAIRS)], PAIRS[(seed // 2 + 7) % len(PAIRS)]][: 2 - seed % 2]


# Kinds of outcomes that may happen rarely.
RARE = ("refused", "explained")
# Differences that the model makes necessary.
REASONS = (explain_codes.LARGE_BIAS, explain_codes.READ_WEIGHT, explain_codes.UNSTEADY)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a trial ended.

    - ok: the file computes what the prepared model computes.
    - refused: fakequant raised an error that names a part of the model, before there was a file.
    - crash: any other error, or the process ended or did not answer.
    - explained: `verify` found a difference and says why it cannot be avoided.
    - not ok: `verify` found another difference, or a copy of the model converts to other codes.
    - unloadable: the runtime cannot load the file, or cannot run it.
    """

    kind: Literal["ok", "refused", "explained", "crash", "not ok", "unloadable"]
    step: str = ""
    message: str = ""
    seconds: float = 0.0

    @property
    def has_failed(self) -> bool:
        """Whether this must never happen. A refusal may, if it is rare."""
        return self.kind not in ("ok", *RARE)

    @property
    def key(self) -> tuple[str, str, str]:
        """What failures with one cause have in common: the message without names and numbers."""
        text = re.sub(r"\b(The file takes|Use) .*", "", self.message)
        text = re.sub(r"/\S+|(?<!\w)'[^']*'|`[^`]*`|\"[^\"]*\"|\([^()]*\)|\[[^\[\]]*\]", "_", text)
        # The kind of a layer is kept: "linear2.input_quantizer" becomes "linear.input_quantizer".
        text = re.sub(r"(?<=[a-z_])\d+\b|[-+]?\b\d[\d.,e+-]*|\b[xyzuvw]\b", "", text)
        return self.kind, self.step, " ".join(text.split())[:200]


def run(source: str, target: str, recipe: str, *, train: bool = True, copies: bool = False) -> Outcome:
    """Runs the steps of a trial on the source of a network.

    Args:
        source: The source, as `random_networks.network` returns it.
        target: A name in `TARGETS`.
        recipe: A name in `RECIPES`.
        train: Whether to train for a step before the export.
        copies: Whether to check that a copied, a pickled and a reloaded model convert to the same codes.
    """
    start = time.monotonic()
    module = types.ModuleType("fuzzed_network")
    sys.modules[module.__name__] = module  # pickle finds the class there
    scope = vars(module)
    skipped = {step for step, is_wanted in (("train", train), ("copies", copies)) if not is_wanted}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(HEAD + source, scope)
        texts = _steps(target, recipe, f"{folder}/network")
        for step, text in texts.items():
            if step in skipped:
                continue
            try:
                exec(text, scope)
            except Exception as error:
                kind = _kind_of(error, step, source)
                name = type(error).__name__
                where = "" if kind == "refused" else f"\nraised in {_place(error)}{_cause(error)}"
                return Outcome(kind, step, f"{name}: {error}{where}", time.monotonic() - start)
            if step == "copies" and scope["different"]:
                message = f"other codes after: {', '.join(scope['different'])}"
                return Outcome("not ok", step, message, time.monotonic() - start)
    problem = scope["found"].problem or ""
    kind = "ok" if not problem else "explained" if any(reason in problem for reason in REASONS) else "not ok"
    return Outcome(kind, "verify", problem, time.monotonic() - start)


def script(source: str, target: str, recipe: str, outcome: Outcome, *, train: bool = True) -> str:
    """Returns a script that reproduces a failure by itself."""
    lines = f"{outcome.kind} ({outcome.step}): {outcome.message}".splitlines()[:8]
    comment = "\n".join(f"# {line}"[:160].rstrip() for line in [f"{target}, {recipe}", *lines])
    wanted = list(STEPS)[: list(STEPS).index(outcome.step) + 1] if outcome.step in STEPS else list(STEPS)
    texts = _steps(target, recipe, "/tmp/network")
    steps = [
        texts[step] for step in wanted if (step != "train" or train) and (step != "copies" or outcome.step == "copies")
    ]
    ending = {"verify": "print(found.verdict())\n", "copies": "print(different)\n"}.get(outcome.step, "")
    head = HEAD if outcome.step == "copies" else "import fakequant as fq\n"
    return f"{comment}\n{head}{source}\n\n{''.join(steps)}{ending}"


def _steps(target: str, recipe: str, stem: str) -> dict[str, str]:
    """Returns the source of each step, for a target and a recipe."""
    if target == "xnnpack":
        path, export = f"{stem}.pte", "export_executorch(model, {!r}, example, max_batch=8)"
    elif target.startswith("litert"):
        path, export = f"{stem}.tflite", "export_litert(model, {!r}, example, dynamic_batch=True)"
    else:
        path, export = f"{stem}.onnx", "export_onnx(model, {!r}, example)"
    # Otherwise runtimes round the float inputs of weight-only layers, as they do by default.
    level = ", accuracy_level=1" if recipe == "int4_weight_only" else ""
    given = {
        "recipe": RECIPES[recipe].format(target=target),
        "export": export.format(path),
        "verify": f"model, {path!r}, [inputs(size) for size in SIZES]{level}",
    }
    return {step: text.format(**given) for step, text in STEPS.items()}


def _kind_of(error: Exception, step: str, source: str) -> Literal["refused", "crash", "unloadable"]:
    if step == "verify" and isinstance(error, ValueError) and re.search(r"cannot (load|run)", str(error)):
        return "unloadable"
    is_possible = step in ("prepare", "calibrate", "export") and isinstance(
        error, ValueError | TypeError | NotImplementedError
    )
    return "refused" if is_possible and _is_ours(error) and _names_a_part(str(error), source) else "crash"


def _is_ours(error: Exception) -> bool:
    """Whether fakequant raised an error, rather than a library that it called."""
    frames = traceback.extract_tb(error.__traceback__)
    return Path(frames[-1].filename).is_relative_to(Path(fq.__file__).parent)


def _place(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}, {frame.name}"


def _cause(error: Exception) -> str:
    """Returns the last line of the error that led to an error: runtimes say there what they refuse."""
    lines = str(error.__cause__ or "").strip().splitlines()
    return f", because of: {lines[-1]}" if lines and lines[-1] not in str(error) else ""


def _names_a_part(message: str, source: str) -> bool:
    """Whether a message names a module, an input, a layer type or an operator of a network, or an argument."""
    parts = re.findall(r"self\.(\w+)|(?:nn|F|torch)\.(\w+)|\.(\w+)\(", source)
    words = {word for found in parts for word in found if word} | {"example", "dynamic_batch", "max_batch", "target"}
    inputs = re.search(r"def forward\(self, (.*)\):", source).group(1).split(", ")
    quoted = {text for x in inputs for text in (f"'{x}'", f"`{x}`", f'"{x}"', f"{x}:")}
    return not words.isdisjoint(re.findall(r"\w+", message)) or any(text in message for text in quoted)
