"""`fakequant check`."""

import argparse
import dataclasses

from fakequant._cli.command import Answer, Commands, add_model
from fakequant._cli.loading import load_data, load_model
from fakequant._cli.summary_command import ALL_RECIPES, FLOAT_RECIPES, find_recipe, recipe_name


def add(commands: Commands) -> None:
    parser = commands.add(
        "check",
        run,
        "try the whole flow on a copy of a float model, and show what would run in integers",
        examples=["train.py:make_model train.py:test_data", "package.models:net train.py:batches --recipe w4a8"],
        yes="every stage succeeds",
        no="a stage fails",
        extra="onnx",
    )
    add_model(parser, prepared="a float model")
    parser.add_argument(
        "data", metavar="DATA", help="FILE.py:NAME or MODULE:NAME of batches, of which the first is used"
    )
    parser.add_argument(
        "--recipe",
        metavar="RECIPE",
        type=recipe_name,
        default="int8",
        help=f"how to quantize: {ALL_RECIPES}, or FILE.py:NAME of a QuantConfig (default: int8)",
    )
    parser.add_argument(
        "--target", metavar="TARGET", help="what the model will run on (default: onnxruntime-x86 for integer recipes)"
    )


def run(options: argparse.Namespace) -> Answer:
    """Answers with the tables of `fakequant.check`."""
    model = load_model(options.model)
    example = next(iter(load_data(options.data)))
    from fakequant._diagnosis.check import check

    config = find_recipe(options.recipe)
    has_own_target = ":" in options.recipe or options.recipe in FLOAT_RECIPES
    target = options.target or (config.target if has_own_target else "onnxruntime-x86")
    found = check(model, example, dataclasses.replace(config, target=target))
    return Answer(str(found), found.to_dict(), 0 if found.ok else 1)
