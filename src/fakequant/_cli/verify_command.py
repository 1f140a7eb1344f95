"""`fakequant verify`."""

import argparse
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any

from fakequant._cli.command import Answer, Commands, add_model, add_state, add_steps, whole_number
from fakequant._cli.loading import load_data, load_model, load_state
from fakequant._cli.short_errors import Problem

if TYPE_CHECKING:
    from torch import nn

RUNTIMES = ("onnxruntime", "openvino", "executorch")


def add(commands: Commands) -> None:
    parser = commands.add(
        "verify",
        run,
        "check, code by code, that an exported model computes what was trained",
        examples=[
            "train.py:make_model model.onnx train.py:test_data --state model.pt",
            "train.py:make_model model.pte train.py:test_data --time --threads 2",
        ],
        yes="the file computes what was trained",
        no="codes or results differ",
        extra="onnx",
    )
    add_model(parser)
    parser.add_argument("onnx", metavar="ONNX", help="the exported file, or a program (.pte)")
    parser.add_argument(
        "data", metavar="DATA", help="FILE.py:NAME or MODULE:NAME of batches or a function that returns them"
    )
    add_state(parser)
    add_steps(parser)
    parser.add_argument("--runtime", choices=RUNTIMES, help="the runtime (default: that of the file's target)")
    parser.add_argument(
        "--accuracy-level",
        metavar="N",
        type=whole_number(1),
        help="1 if the runtime will not round the float inputs of weight-only layers; fakequant.verify says how",
    )
    parser.add_argument(
        "--time", action="store_true", help="also measure the time for the first batch, beside that of the float model"
    )
    parser.add_argument("--threads", metavar="N", type=whole_number(1), help="with --time: use N threads (default: 1)")


def run(options: argparse.Namespace) -> Answer:
    """Answers with the tables of `fakequant.verify`, and of `fakequant.latency` if asked for."""
    if options.threads is not None and not options.time:
        raise Problem("--threads is for measuring the time; use it with --time")
    model = load_model(options.model)
    if options.state:
        load_state(model, options.state)
    data = load_data(options.data)
    first = None
    if options.time:
        first, data = _first(options.data, data)
    from fakequant._verify.verify import verify

    settings = {"runtime": options.runtime, "accuracy_level": options.accuracy_level}
    found = verify(model, options.onnx, data, steps=options.steps, **settings)
    text, answer = str(found), found.to_dict()
    if options.time:
        text, answer = _add_time(model, options, first, settings, text, answer)
    return Answer(text, answer, 0 if found.ok else 1)


def _add_time(
    model: "nn.Module", options: argparse.Namespace, batch: Any, settings: Any, text: str, answer: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Returns the text and the data of an answer with the time for a batch."""
    from fakequant._verify.latency import latency

    time = latency(model, options.onnx, batch, threads=options.threads or 1, **settings)
    return f"{text}\n\n{time}", {**answer, "latency": time.to_dict()}


def _first(name: str, data: Iterable[Any]) -> tuple[Any, Iterable[Any]]:
    """Returns the first batch, and all batches, also of data that can be iterated over only once."""
    from torch import Tensor

    if isinstance(data, Tensor) and data.dim() > 0:
        return data, data  # it is one batch
    batches = iter(data)
    try:
        first = next(batches)
    except StopIteration:
        raise Problem(f"{name} has no batches; give it at least one") from None
    return first, chain([first], batches) if batches is data else data
