"""`fakequant info`."""

import argparse
import dataclasses
from importlib.metadata import PackageNotFoundError, version

from fakequant._cli.command import Answer, Commands
from fakequant._info import info

# Optional packages. Their versions are read without importing them.
PACKAGES = ("onnx", "onnxruntime", "onnxscript", "safetensors", "matplotlib", "scikit-learn")


def add(commands: Commands) -> None:
    commands.add("info", run, "show versions, instruction set and threads, for bug reports", examples=["", "--json"])


def run(options: argparse.Namespace) -> Answer:
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
