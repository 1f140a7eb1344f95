"""`fakequant demo`."""

import argparse

from fakequant._cli.command import Answer, Commands, whole_number
from fakequant._cli.loading import folder_to_write


def add(commands: Commands) -> None:
    parser = commands.add(
        "demo",
        run,
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


def run(options: argparse.Namespace) -> Answer:
    """Runs the demo and answers with its table."""
    folder = folder_to_write(options.out)
    from fakequant._demo.run import run as run_demo

    result = run_demo(folder, seed=options.seed)
    return Answer(str(result), result.to_dict())
