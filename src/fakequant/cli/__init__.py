"""The command line `fakequant`. Starting it imports nothing that is slow to import; commands do."""

import traceback

from fakequant.cli import bench, demo, info, report, summary, verify
from fakequant.cli.command import make_parser
from fakequant.cli.errors import one_line
from fakequant.cli.output import complain, flush, only_for_results, write

UNKNOWN, INTERRUPTED = 2, 130


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    0: fine; 1: the answer is no; 2: it could not be found out; 130: interrupted.

    >>> main(["info", "--json", "--wrong"])
    2
    """
    parser = make_parser([info, demo, bench, summary, verify, report])
    try:
        options = parser.parse_args(arguments)
    except SystemExit as stop:  # after help, the version or a wrong argument
        flush()
        return stop.code if isinstance(stop.code, int) else UNKNOWN
    try:
        with only_for_results():
            answer = options.run(options)
        write(answer.as_json() if options.json else answer.text)
    except KeyboardInterrupt:
        complain(traceback.format_exc() if options.debug else f"{options.prog}: interrupted")
        return INTERRUPTED
    except (Exception, SystemExit) as error:  # whatever it is, the exit code must not be that of an answer
        complain(traceback.format_exc() if options.debug else f"{options.prog}: {one_line(error, options.extra)}")
        return UNKNOWN
    return answer.code
