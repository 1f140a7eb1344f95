"""`fakequant verify`."""

import argparse

from fakequant._cli.command import Answer, Commands, add_model, add_state, add_steps, whole_number
from fakequant._cli.loading import load_data, load_model, load_state


def add(commands: Commands) -> None:
    parser = commands.add(
        "verify",
        run,
        "check, code by code, that an exported model computes what was trained",
        examples=["train.py:make_model model.onnx train.py:test_data --state model.pt"],
        yes="the file computes what was trained",
        no="codes or results differ",
        extra="onnx",
    )
    add_model(parser)
    parser.add_argument("onnx", metavar="ONNX", help="the exported file")
    parser.add_argument(
        "data", metavar="DATA", help="FILE.py:NAME or MODULE:NAME of batches or a function that returns them"
    )
    add_state(parser)
    add_steps(parser)
    parser.add_argument(
        "--accuracy-level",
        metavar="N",
        type=whole_number(1),
        help="1 if sessions will have session.qdq_matmulnbits_accuracy_level=1, for weight-only models",
    )


def run(options: argparse.Namespace) -> Answer:
    """Answers with the tables of `fakequant.verify`."""
    model = load_model(options.model)
    if options.state:
        load_state(model, options.state)
    data = load_data(options.data)
    from fakequant._verify.verify import verify

    found = verify(model, options.onnx, data, steps=options.steps, accuracy_level=options.accuracy_level)
    return Answer(str(found), found.to_dict(), 0 if found.ok else 1)
