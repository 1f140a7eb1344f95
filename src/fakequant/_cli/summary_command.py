"""`fakequant summary`."""

import argparse
import copy
import re
from typing import TYPE_CHECKING

from fakequant._cli.command import Answer, Commands, add_model
from fakequant._cli.loading import load_config, load_model
from fakequant._cli.short_errors import Problem

if TYPE_CHECKING:
    from fakequant.config import QuantConfig

# Not for the integer kernels of a target.
FLOAT_RECIPES = ("fp8", "mxfp8", "mxfp4_weight_only", "nvfp4")
RECIPES = ("int8", "int8_dynamic", "int4_weight_only", "w4a8", *FLOAT_RECIPES)
ALL_RECIPES = f"{', '.join(RECIPES)}, lsq2 to lsq8"


def add(commands: Commands) -> None:
    parser = commands.add(
        "summary",
        run,
        "show what is quantized in a model, what is not, and why",
        examples=["train.py:make_model", "package.models:make_model --recipe int8"],
    )
    add_model(parser, prepared="a prepared model (a float model with --recipe)")
    parser.add_argument(
        "--recipe",
        metavar="RECIPE",
        type=recipe_name,
        help=f"show what a recipe would quantize in a float model: {ALL_RECIPES}, or FILE.py:NAME of a QuantConfig",
    )


def run(options: argparse.Namespace) -> Answer:
    """Answers with the tables of `fakequant.summary`."""
    model = load_model(options.model)
    from fakequant._prepare.prepare import is_prepared, prepare
    from fakequant._prepare.summary import summary

    if options.recipe is None and not is_prepared(model):
        raise Problem(
            f"{options.model} is not prepared; name the module that was passed to fakequant.prepare, or use "
            "--recipe int8 to see what would be quantized"
        )
    if options.recipe is not None:
        if is_prepared(model):
            raise Problem(f"{options.model} is already prepared; remove --recipe")
        model = prepare(copy.deepcopy(model), find_recipe(options.recipe))
    found = summary(model)
    return Answer(str(found), found.to_dict())


def recipe_name(text: str) -> str:
    """The argparse type of recipes: returns `text` if it names one, or a config to load."""
    if text in RECIPES or ":" in text or re.fullmatch("lsq[2-8]", text):
        return text
    raise argparse.ArgumentTypeError(f"expected {ALL_RECIPES} or FILE.py:NAME, got {text!r}")


def find_recipe(recipe: str) -> "QuantConfig":
    """Returns the config of a recipe."""
    if ":" in recipe:
        return load_config(recipe)
    from fakequant import recipes

    return recipes.lsq(int(recipe[3:])) if recipe.startswith("lsq") else getattr(recipes, recipe)()
