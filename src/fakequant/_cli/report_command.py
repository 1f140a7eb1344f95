"""`fakequant report`."""

import argparse
import sys

from fakequant._cli.command import Answer, Commands, add_float_state, add_model, add_state, add_steps
from fakequant._cli.loading import folder_to_write, load_data, load_model, load_state
from fakequant._cli.short_errors import Problem


def add(commands: Commands) -> None:
    parser = commands.add(
        "report",
        run,
        "write an HTML page about a prepared model: histograms, clipping, used codes",
        about='Needs pip install "fakequant[report]".',
        extra="report",
        examples=["train.py:make_model --data train.py:test_data --state model.pt --out report"],
    )
    add_model(parser)
    data = "FILE.py:NAME or MODULE:NAME of batches or a function that returns them"
    parser.add_argument("--data", metavar="DATA", required=True, help=data)
    parser.add_argument("--float", metavar="MODEL", help="the float model to compare layers with")
    add_state(parser)
    add_float_state(parser)
    parser.add_argument("--out", metavar="FOLDER", required=True, help="the folder for report.html and its figures")
    parser.add_argument("--title", help="the title of the page")
    add_steps(parser)


def run(options: argparse.Namespace) -> Answer:
    """Writes the report and answers with the path of the page."""
    folder = folder_to_write(options.out)
    if options.float_state and not options.float:
        raise Problem("--float-state needs a float model; use --float MODEL too")
    model = load_model(options.model)
    if options.state:
        load_state(model, options.state)
    float_model = load_model(options.float) if options.float else None
    if float_model is not None and options.float_state:
        load_state(float_model, options.float_state, prepared=False)
    data = load_data(options.data)
    import fakequant

    page = fakequant.report(
        model,
        folder,
        data,
        float_model=float_model,
        title=options.title,
        steps=options.steps,
        progress=sys.stderr is not None and sys.stderr.isatty(),
    )
    figures = sorted(str(path) for path in (folder / "figures").glob("*.png"))
    return Answer(f"{page}", {"report": str(page), "figures": figures})
