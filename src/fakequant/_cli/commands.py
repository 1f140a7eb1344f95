"""All commands: their arguments, and what they run."""

import argparse
import copy
import dataclasses
import re
import shlex
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fakequant._cli.loading import find, folder_to_write, load_config, load_data, load_model, load_state
from fakequant._cli.output import UsageError, shows_progress
from fakequant._cli.parser import (
    Answer,
    Commands,
    Parser,
    add_data,
    add_model,
    add_state,
    add_steps,
    whole_number,
)
from fakequant._info import info
from fakequant._runtimes import RUNTIMES, find as find_target

if TYPE_CHECKING:
    from torch import nn

    from fakequant.config import QuantConfig

# Optional packages. Their versions are read without importing them.
PACKAGES = tuple(
    dict.fromkeys((
        "onnx", "onnxscript", *(runtime.package for runtime in RUNTIMES.values()), "compressed-tensors", "gguf",
        "safetensors", "peft", "lightning", "triton", "matplotlib", "scikit-learn",
    ))
)  # fmt: skip
# The names of `fakequant.recipes`. Those not for integer kernels have a target of their own.
_INTEGER_RECIPES = ("int8", "int8_dynamic", "int4_weight_only", "w4a8")
_OTHER_RECIPES = ("fp8", "fp8_block", "mxfp8", "mxfp4_weight_only", "nvfp4", "nvfp4_weight_only", "gguf")
RECIPES = (*_INTEGER_RECIPES, *_OTHER_RECIPES)
ALL_RECIPES = f"{', '.join(RECIPES)}, lsq2 to lsq8"
# The defaults of `check` and `ptq`, and the target of integer recipes in every command.
_RECIPE, _TARGET = "int8", "onnxruntime-x86"
# The names of `fakequant.ptq._try_methods.METHODS`, which needs torch.
_METHODS = ("equalize", "smooth", "correct_bias", "adaround", "gptq")
# The state that the commands to type next write and read.
_STATE = "quantized.pt"


# --- without a model --------------------------------------------------------------------------------


def add_info(commands: Commands) -> None:
    commands.add(
        "info", run_info, "show versions, instruction set and threads, for bug reports", examples=["", "--json"]
    )


def run_info(options: argparse.Namespace) -> Answer:
    """Answers with the installed versions and the kernels in use."""
    found, installed = info(), _installed()
    names = ", ".join(f"{name} {number}" for name, number in installed.items() if number is not None)
    return Answer(f"{found}\n{'installed':<10} {names or '-'}", {**dataclasses.asdict(found), "installed": installed})


def _installed() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def add_demo(commands: Commands) -> None:
    parser = commands.add(
        "demo",
        run_demo,
        "train, quantize, export and verify a small network on real data, and write a report",
        about='Takes up to two minutes. Needs pip install "fakequant[demo]".',
        extra="demo",
        examples=["", "--out results --seed 1 --json"],
    )
    parser.add_argument(
        "--out", metavar="FOLDER", default="fakequant-demo", help="the folder to write to (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", metavar="N", type=whole_number(0), default=0, help="the seed of all random numbers (default: 0)"
    )


def run_demo(options: argparse.Namespace) -> Answer:
    """Runs the demo and answers with its table."""
    folder = folder_to_write(options.out)
    from fakequant._demo.run import run

    result = run(folder, seed=options.seed)
    return Answer(str(result), result.to_dict())


# --- what a recipe does to a model ------------------------------------------------------------------


def add_summary(commands: Commands) -> None:
    parser = commands.add(
        "summary",
        run_summary,
        "show what is quantized in a model, what is not, and why",
        examples=["train.py:make_model", "package.models:make_model --recipe int8 --data train.py:test_data"],
    )
    add_model(parser, prepared="a prepared model (a float model with --recipe)")
    add_recipe(parser, "show what a recipe would quantize in a float model")
    add_data(parser, "--data", words=", of which the first shows how data flows (for --recipe)")


def run_summary(options: argparse.Namespace) -> Answer:
    """Answers with the tables of `fakequant.summary`."""
    _require_recipe(options)
    model = load_model(options.model)
    from fakequant._prepare.attach import is_prepared
    from fakequant._prepare.prepare import MissingExampleError, prepare
    from fakequant._prepare.summary import summary

    if options.recipe is None and not is_prepared(model):
        raise UsageError(
            f"{options.model} is not prepared; name the module that was passed to fakequant.prepare, or use "
            "--recipe int8 --data DATA to see what would be quantized"
        )
    if options.recipe is not None:
        if is_prepared(model):
            raise UsageError(f"{options.model} is already prepared; remove --recipe")
        example = None if options.data is None else next(iter(load_data(options.data)))
        try:
            model = prepare(copy.deepcopy(model), find_config(options), example)
        except MissingExampleError as error:
            raise UsageError(
                f"{options.recipe} needs batches, of which the first shows how data flows through the model; add "
                "--data FILE.py:NAME"
            ) from error
    found = summary(model)
    return Answer(str(found), found.to_dict())


def add_recipe(parser: Parser, words: str, default: str | None = None) -> None:
    """Adds the options that name a recipe and its target. `words` say what the recipe is for."""
    shown = "" if default is None else f" (default: {default})"
    parser.add_argument(
        "--recipe",
        metavar="RECIPE",
        type=recipe_name,
        default=default,
        help=f"{words}: {ALL_RECIPES}, or FILE.py:NAME of a QuantConfig{shown}",
    )
    parser.add_argument(
        "--target",
        metavar="TARGET",
        help=f"what the model will run on (default: {_TARGET} for integer recipes, otherwise the target of the recipe)",
    )


def recipe_name(text: str) -> str:
    """The argparse type of recipes: returns `text` if it names one, or a config to load."""
    if text in RECIPES or ":" in text or re.fullmatch("lsq[2-8]", text):
        return text
    raise argparse.ArgumentTypeError(f"expected {ALL_RECIPES} or FILE.py:NAME, got {text!r}")


def find_config(options: argparse.Namespace) -> "QuantConfig":
    """Returns the config that the options of `add_recipe` describe."""
    recipe, target = options.recipe, options.target
    if ":" in recipe:
        config = load_config(recipe)
    else:
        from fakequant import recipes

        config = recipes.lsq(int(recipe[3:])) if recipe.startswith("lsq") else getattr(recipes, recipe)()
        target = target or (None if recipe in _OTHER_RECIPES else _TARGET)
    return dataclasses.replace(config, target=target or config.target)


def _require_recipe(options: argparse.Namespace) -> None:
    """Raises UsageError for a target without a recipe."""
    if options.target and not options.recipe:
        raise UsageError("--target is for float models; use it with --recipe")


def given(options: argparse.Namespace, *names: str) -> list[str]:
    """Returns options as words of a command line, without those that have no value."""
    values = ((name, getattr(options, name)) for name in names)
    several = ((name, value if isinstance(value, list) else [value]) for name, value in values if value is not None)
    return [word for name, found in several for value in found for word in (f"--{name}", str(value))]


def add_check(commands: Commands) -> None:
    parser = commands.add(
        "check",
        run_check,
        "try the whole flow on a copy of a float model, and show what would run in integers",
        examples=["train.py:make_model train.py:test_data", "package.models:net train.py:batches --recipe w4a8"],
        yes="every stage succeeds",
        no="a stage fails",
        extra="onnx",
    )
    add_model(parser, prepared="a float model")
    add_data(parser, words=", of which the first is used")
    add_recipe(parser, "how to quantize", _RECIPE)


def run_check(options: argparse.Namespace) -> Answer:
    """Answers with the tables of `fakequant.check`."""
    model = load_model(options.model)
    example = next(iter(load_data(options.data)))
    from fakequant._diagnosis.check import check

    found = check(model, example, find_config(options))
    if found.ok:
        words = [options.model, options.data, *given(options, "recipe", "target"), "--out", _STATE]
        found.next = shlex.join(["fakequant", "ptq", *words])
    return Answer(str(found), found.to_dict(), 0 if found.ok else 1)


def add_ptq(commands: Commands) -> None:
    parser = commands.add(
        "ptq",
        run_ptq,
        "quantize a float model without training, and show what each post-training method gains",
        about="Methods are applied one after the other to a prepared and calibrated copy of the model.",
        examples=[
            "train.py:make_model train.py:batches --state float.pt",
            "train.py:make_model train.py:batches --recipe w4a8 --method adaround --method correct_bias "
            "--evaluate train.py:accuracy --out quantized.pt",
        ],
    )
    add_model(parser, prepared="a float model")
    add_data(parser, words=", with or without labels")
    add_recipe(parser, "how to quantize", _RECIPE)
    parser.add_argument(
        "--method",
        metavar="METHOD",
        action="append",
        choices=_METHODS,
        help=f"a method to apply, may be repeated: {', '.join(_METHODS)} (default: adaround)",
    )
    add_evaluate(parser)
    add_state(parser)
    parser.add_argument("--out", metavar="FILE", help="where to save the state of the quantized model")
    add_steps(parser)


def add_evaluate(parser: Parser) -> None:
    parser.add_argument(
        "--evaluate", metavar="FUNCTION", help="FILE.py:NAME of a function that takes a model and returns a score"
    )


def find_evaluate(where: str | None) -> Any:
    """Returns the function that `--evaluate` names, or None."""
    found = find(where) if where else None
    if found is not None and not callable(found):
        raise UsageError(f"{where} is of type {type(found).__name__}; name a function that takes a model")
    return found


def run_ptq(options: argparse.Namespace) -> Answer:
    """Answers with the SQNR, and the score, of the float model and of the model after each method."""
    if options.out:
        folder_to_write(str(Path(options.out).absolute().parent))
    model = load_model(options.model, options.state, prepared=False)
    data = load_data(options.data)
    evaluate = find_evaluate(options.evaluate)
    config = find_config(options)
    import torch

    from fakequant.ptq._try_methods import try_methods

    quantized, trial = try_methods(
        model,
        config,
        data,
        options.method or ["adaround"],
        evaluate=evaluate,
        steps=options.steps,
        progress=shows_progress(),
    )
    if options.out:
        torch.save(quantized.state_dict(), options.out)
    following = _after_ptq(options, f"model{find_target(config.target).runtime.suffix}")
    return Answer(f"{trial}\n\nnext:\n\n{following}", {**trial.to_dict(), "next": following})


def _after_ptq(options: argparse.Namespace, file: str) -> str:
    """Returns the commands that write, verify and show the model as `file`."""
    model, data, recipe = options.model, options.data, given(options, "recipe", "target")
    state, steps, evaluate = options.out or _STATE, given(options, "steps"), given(options, "evaluate")
    prepared = [*recipe, "--state", state]
    floats = ["--float", model, "--float-state", options.state] if options.state else []
    lines = [
        ["export", model, data, file, *prepared],
        ["verify", model, file, data, *prepared, *steps],
        ["card", model, data, file, *prepared, *floats, *evaluate, *steps],
    ]
    if not options.out:  # nothing was saved
        again = given(options, "method", "state")
        lines.insert(0, ["ptq", model, data, *recipe, *again, *evaluate, *steps, "--out", state])
    return "\n".join(shlex.join(["fakequant", *line]) for line in lines)


# --- what a prepared model computes -----------------------------------------------------------------


def add_prepared(parser: Parser) -> None:
    """Adds the options that make a prepared model: a state, and a recipe for float models."""
    add_state(parser)
    add_recipe(parser, "prepare a float model like this, as `fakequant ptq` did; the state is then loaded into it")


def prepared_model(options: argparse.Namespace, first: Any) -> "nn.Module":
    """Returns the prepared model that the options of `add_prepared` describe. `first` shows how data flows."""
    _require_recipe(options)
    model = load_model(options.model)
    from fakequant._prepare.attach import is_prepared
    from fakequant._prepare.prepare import prepare

    if options.recipe is None:
        if not is_prepared(model):
            raise UsageError(f"{options.model} is not prepared; add the --recipe and --target of `fakequant ptq`")
        if options.state:
            load_state(model, options.state)
        return model
    if is_prepared(model):
        raise UsageError(f"{options.model} is already prepared; remove --recipe")
    model = prepare(model, find_config(options), first)
    if options.state:
        load_state(model, options.state)
    return model


def add_export(commands: Commands) -> None:
    parser = commands.add(
        "export",
        run_export,
        "write a prepared model as the file of its target, and run it once",
        about="The target of the model decides on the format.",
        examples=[
            "train.py:make_model train.py:batches model.onnx --state model.pt",
            "train.py:make_float train.py:batches model.onnx --recipe w4a8 --state quantized.pt",
        ],
        extra="onnx",
    )
    add_model(parser)
    add_data(parser, words=", of which the first shows the shapes of inputs")
    parser.add_argument("file", metavar="FILE", help="the file or folder to write")
    add_prepared(parser)
    parser.add_argument(
        "--base",
        metavar="FILE",
        help="a float GGUF file to start from, for architectures that export_gguf does not know",
    )


def run_export(options: argparse.Namespace) -> Answer:
    """Answers with what the exporter of the model's target has written."""
    first, _ = _first(options.data, load_data(options.data))
    model = prepared_model(options, first)
    import fakequant
    from fakequant._prepare.attach import preparation

    runtime = find_target(preparation(model).config.target).runtime
    export = getattr(fakequant, runtime.exporter)
    settings = {} if options.base is None else {"base": options.base}
    if not settings.keys() <= signature(export).parameters.keys():
        raise UsageError(f"--base is for GGUF files, which {runtime.name} does not read; remove it")
    found = export(model, options.file, *([first] if runtime.takes_example else []), **settings)
    return Answer(str(found), dataclasses.asdict(found))


def add_verify(commands: Commands) -> None:
    parser = commands.add(
        "verify",
        run_verify,
        "check, code by code, that an exported model computes what was trained",
        examples=[
            "train.py:make_model model.onnx train.py:test_data --state model.pt",
            "train.py:make_float model.onnx train.py:test_data --recipe w4a8 --state quantized.pt",
            "train.py:make_model model.pte train.py:test_data --time --threads 2",
        ],
        yes="the file computes what was trained",
        no="codes or results differ",
        extra="onnx",
    )
    add_model(parser)
    suffixes = ", ".join(dict.fromkeys(runtime.suffix for runtime in RUNTIMES.values() if runtime.suffix))
    parser.add_argument("file", metavar="FILE", help=f"the exported file ({suffixes}) or folder")
    add_data(parser)
    add_prepared(parser)
    add_steps(parser)
    parser.add_argument("--runtime", choices=RUNTIMES, help="the runtime (default: the runtime of the file's target)")
    add_accuracy_level(parser)
    parser.add_argument(
        "--time", action="store_true", help="also measure the time for the first batch, compared with the float model"
    )
    parser.add_argument("--threads", metavar="N", type=whole_number(1), help="with --time: use N threads (default: 1)")


def add_accuracy_level(parser: Parser) -> None:
    parser.add_argument(
        "--accuracy-level",
        metavar="N",
        type=whole_number(1),
        help="1 if the runtime will not round the float inputs of weight-only layers; fakequant.verify says how",
    )


def run_verify(options: argparse.Namespace) -> Answer:
    """Answers with the tables of `fakequant.verify`, and of `fakequant.latency` if asked for."""
    if options.threads is not None and not options.time:
        raise UsageError("--threads is for measuring the time; use it with --time")
    data = load_data(options.data)
    first = None
    if options.time or options.recipe:
        first, data = _first(options.data, data)
    model = prepared_model(options, first)
    from fakequant._verify.verify import verify

    settings = {"runtime": options.runtime, "accuracy_level": options.accuracy_level}
    found = verify(model, options.file, data, steps=options.steps, **settings)
    text, answer = str(found), found.to_dict()
    if options.time:
        from fakequant._verify.latency import latency

        time = latency(model, options.file, first, threads=options.threads or 1, **settings)
        text, answer = f"{text}\n\n{time}", {**answer, "latency": time.to_dict()}
    return Answer(text, answer, 0 if found.ok else 1)


def _first(name: str, data: Iterable[Any]) -> tuple[Any, Iterable[Any]]:
    """Returns the first batch, and all batches, also of data that can be iterated over only once."""
    from torch import Tensor

    if isinstance(data, Tensor) and data.dim() > 0:
        return data, data  # it is one batch
    batches = iter(data)
    try:
        first = next(batches)
    except StopIteration:
        raise UsageError(f"{name} has no batches; give it at least one") from None
    return first, chain([first], batches) if batches is data else data


def add_card(commands: Commands) -> None:
    parser = commands.add(
        "card",
        run_card,
        "show float beside exported files: accuracy, bytes, time, what runs in integers, and the verdict of verify",
        about="Without --evaluate, results are compared with those of the float model.",
        examples=[
            "train.py:make_model train.py:test_data model.onnx --state model.pt --evaluate train.py:accuracy",
            "train.py:make_float train.py:batches model.onnx model.pte --recipe int8 --state quantized.pt "
            "--threads 1 --threads 4 --format markdown",
        ],
        yes="every file computes what was trained",
        no="a file does not; the card says which and why",
        extra="onnx",
    )
    add_model(parser)
    add_data(parser, words=", of which the first is timed")
    parser.add_argument("files", metavar="FILE", nargs="+", help="a file or folder that an exporter wrote")
    add_prepared(parser)
    add_evaluate(parser)
    add_float(parser, "the float model (default: MODEL with --recipe, otherwise the prepared model without quantizers)")
    add_accuracy_level(parser)
    parser.add_argument(
        "--threads", metavar="N", type=whole_number(1), action="append", help="may be repeated (default: 1)"
    )
    parser.add_argument(
        "--no-time", action="store_true", help="measure no times, which takes an export of the float model per file"
    )
    parser.add_argument(
        "--format", choices=("text", "markdown", "html"), default="text", help="how to print (default: %(default)s)"
    )
    add_steps(parser)


def run_card(options: argparse.Namespace) -> Answer:
    """Answers with the table of `fakequant.card`."""
    evaluate = find_evaluate(options.evaluate)
    first, data = _first(options.data, load_data(options.data))
    model = prepared_model(options, first)
    float_model = find_float(options)
    if float_model is None and options.recipe:
        float_model = load_model(options.model)
    from fakequant._diagnosis.card import card

    found = card(
        model,
        options.files,
        data,
        evaluate,
        float_model=float_model,
        accuracy_level=options.accuracy_level,
        threads=options.threads or [1],
        seconds=0.0 if options.no_time else 1.0,
        steps=options.steps,
    )
    text = {"text": str(found), "markdown": found.to_markdown(), "html": found.to_html()}[options.format]
    return Answer(text, found.to_dict(), 0 if found.ok else 1)


def add_audit(commands: Commands) -> None:
    parser = commands.add(
        "audit",
        run_audit,
        "show how far a converter has moved each weight of a trained model",
        examples=["train.py:make_model model.onnx --state model.pt", "train.py:make_model converted-folder --json"],
        yes="the file has every trained weight, bit by bit",
        no="a weight differs",
        extra="onnx",
    )
    add_model(parser)
    parser.add_argument("file", metavar="FILE", help="an ONNX file, or a folder of compressed-tensors")
    add_state(parser)


def run_audit(options: argparse.Namespace) -> Answer:
    """Answers with the table of `fakequant.audit`."""
    model = load_model(options.model, options.state)
    from fakequant._diagnosis.audit import audit

    found = audit(model, options.file)
    return Answer(str(found), found.to_dict(), 0 if found.ok else 1)


def add_report(commands: Commands) -> None:
    parser = commands.add(
        "report",
        run_report,
        "write an HTML page about a prepared model: histograms, clipping, used codes",
        about='Needs pip install "fakequant[report]".',
        extra="report",
        examples=["train.py:make_model --data train.py:test_data --state model.pt --out report"],
    )
    add_model(parser)
    add_data(parser, "--data", required=True)
    add_float(parser, "the float model to compare layers with")
    add_state(parser)
    parser.add_argument("--out", metavar="FOLDER", required=True, help="the folder for report.html and its figures")
    parser.add_argument("--title", help="the title of the page")
    add_steps(parser)


def add_float(parser: Parser, words: str) -> None:
    parser.add_argument("--float", metavar="MODEL", help=words)
    parser.add_argument("--float-state", metavar="FILE", help="a file as for --state, loaded into the float model")


def find_float(options: argparse.Namespace) -> "nn.Module | None":
    """Returns the float model that the options of `add_float` describe, or None."""
    if options.float_state and not options.float:
        raise UsageError("--float-state needs a float model; use --float MODEL too")
    if not options.float:
        return None
    return load_model(options.float, options.float_state, prepared=False, option="--float-state")


def run_report(options: argparse.Namespace) -> Answer:
    """Writes the report and answers with the path of the page."""
    folder = folder_to_write(options.out)
    model = load_model(options.model, options.state)
    float_model = find_float(options)
    data = load_data(options.data)
    import fakequant

    page = fakequant.report(
        model,
        folder,
        data,
        float_model=float_model,
        title=options.title,
        steps=options.steps,
        progress=shows_progress(),
    )
    figures = sorted(str(path) for path in (folder / "figures").glob("*.png"))
    return Answer(f"{page}", {"report": str(page), "figures": figures})


# In the order of the help.
COMMANDS = (
    add_info, add_demo, add_check, add_summary, add_ptq, add_export, add_verify, add_card, add_audit, add_report
)  # fmt: skip
