"""`python -m fakequant`."""

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from fakequant.information import info


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m fakequant",
        description="Fake quantization for quantization-aware training.",
        epilog="example: python -m fakequant info --json",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    about = commands.add_parser("info", help="versions, instruction set and threads")
    about.add_argument("--json", action="store_true", help="print JSON")
    about.set_defaults(run=_info)
    verify = commands.add_parser(
        "verify",
        help="whether an exported model computes what was trained, code by code",
        description="Exit code 0: it does. 1: codes differ. 2: it could not be found out.",
        epilog="example: python -m fakequant verify train.py:make_model model.onnx train.py:test_data",
    )
    verify.add_argument("model", help="FILE.py:NAME or MODULE:NAME, a prepared model or a function that returns it")
    verify.add_argument("onnx", help="the exported file")
    verify.add_argument("data", help="FILE.py:NAME or MODULE:NAME, batches or a function that returns them")
    verify.add_argument("--state", help="a file of torch.save(model.state_dict(), ...) to load into the model first")
    verify.add_argument("--steps", type=int, help="use at most so many batches")
    verify.add_argument("--json", action="store_true", help="print JSON")
    verify.set_defaults(run=_verify)
    options = parser.parse_args(arguments)
    return options.run(options)


def _info(options: argparse.Namespace) -> int:
    result = info()
    print(json.dumps(dataclasses.asdict(result), indent=2) if options.json else result)
    return 0


def _verify(options: argparse.Namespace) -> int:
    try:
        import torch

        from fakequant.workflow.verify import verify

        model = _find(options.model)
        model = model() if not isinstance(model, torch.nn.Module) else model
        if options.state:
            model.load_state_dict(torch.load(options.state, weights_only=True, map_location="cpu"))
        data = _find(options.data)
        found = verify(model, options.onnx, data() if callable(data) else data, steps=options.steps)
    except (Exception, SystemExit) as error:  # whatever it is, the exit code must not be that of a difference
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found.to_dict(), indent=2) if options.json else found)
    return 0 if found.ok else 1 if found.tensors else 2


@functools.cache
def _run(path: Path) -> Any:
    """A file as a module, once; its neighbours can be imported, as if it were run by itself."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(f"_fakequant_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


def _find(where: str) -> Any:
    """What FILE.py:NAME or MODULE:NAME stands for."""
    place, _, name = where.rpartition(":")
    if not place or not name:
        raise ValueError(f"Expected FILE.py:NAME or MODULE:NAME, got {where!r}.")
    if place.endswith(".py"):
        path = Path(place).resolve()
        if not path.is_file():
            raise FileNotFoundError(f"There is no file {place!r}.")
        module = _run(path)
    else:
        module = importlib.import_module(place)
    if not hasattr(module, name):
        raise AttributeError(f"{place} has no {name!r}.")
    return getattr(module, name)


if __name__ == "__main__":
    raise SystemExit(main())
