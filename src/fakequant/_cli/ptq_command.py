"""`fakequant ptq`."""

import argparse
import dataclasses
import sys
from pathlib import Path

from fakequant._cli.command import Answer, Commands, add_model, add_steps
from fakequant._cli.loading import find, folder_to_write, load_data, load_model, load_state
from fakequant._cli.short_errors import Problem
from fakequant._cli.summary_command import ALL_RECIPES, find_recipe, recipe_name

# The names of `fakequant.ptq._trial.METHODS`, which needs torch.
_METHODS = ("equalize", "smooth", "correct_bias", "adaround", "gptq")


def add(commands: Commands) -> None:
    parser = commands.add(
        "ptq",
        run,
        "quantize a float model without training, and show what each post-training method gains",
        about="Methods are applied one after the other to a prepared and calibrated copy of the model.",
        examples=[
            "train.py:make_model train.py:batches --state float.pt",
            "train.py:make_model train.py:batches --recipe w4a8 --method adaround --method correct_bias "
            "--evaluate train.py:accuracy --out quantized.pt",
        ],
    )
    add_model(parser, prepared="a float model")
    parser.add_argument("data", metavar="DATA", help="FILE.py:NAME or MODULE:NAME of batches, without labels or with")
    parser.add_argument(
        "--recipe",
        metavar="RECIPE",
        type=recipe_name,
        default="w4a8",
        help=f"how to quantize: {ALL_RECIPES}, or FILE.py:NAME of a QuantConfig (default: w4a8)",
    )
    parser.add_argument("--target", metavar="TARGET", help="what the model will run on (default: that of the recipe)")
    parser.add_argument(
        "--method",
        metavar="METHOD",
        action="append",
        choices=_METHODS,
        help=f"a method to apply, may be repeated: {', '.join(_METHODS)} (default: adaround)",
    )
    parser.add_argument(
        "--evaluate", metavar="FUNCTION", help="FILE.py:NAME of a function that takes a model and returns a score"
    )
    parser.add_argument(
        "--state", metavar="FILE", help="a file written by torch.save(model.state_dict(), FILE), loaded into the model"
    )
    parser.add_argument("--out", metavar="FILE", help="where to save the state of the quantized model")
    add_steps(parser)


def run(options: argparse.Namespace) -> Answer:
    """Answers with the SQNR, and the score, of the float model and of the model after each method."""
    if options.out:
        folder_to_write(str(Path(options.out).absolute().parent))
    model = load_model(options.model)
    if options.state:
        load_state(model, options.state, prepared=False)
    data = load_data(options.data)
    evaluate = find(options.evaluate) if options.evaluate else None
    if evaluate is not None and not callable(evaluate):
        raise Problem(f"{options.evaluate} is of type {type(evaluate).__name__}; name a function that takes a model")
    config = find_recipe(options.recipe)
    if options.target:
        config = dataclasses.replace(config, target=options.target)
    import torch

    from fakequant.ptq._trial import try_methods

    quantized, trial = try_methods(
        model,
        config,
        data,
        options.method or ["adaround"],
        evaluate=evaluate,
        steps=options.steps,
        progress=sys.stderr is not None and sys.stderr.isatty(),
    )
    if options.out:
        torch.save(quantized.state_dict(), options.out)
    return Answer(str(trial), trial.to_dict())
