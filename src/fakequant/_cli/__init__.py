"""The command line `fakequant`. Slow imports happen only in the commands that need them."""

import traceback

from fakequant._cli.commands import COMMANDS
from fakequant._cli.output import complain, flush, one_line, only_for_results, write
from fakequant._cli.parser import Answer, make_parser

UNKNOWN, INTERRUPTED = 2, 130


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    The codes are 0 for success, 1 if the answer is no, 2 for an error, and 130 if interrupted.

    >>> main(["info", "--json", "--wrong"])
    2
    """
    parser = make_parser(COMMANDS)
    try:
        options = parser.parse_args(arguments)
    except SystemExit as stop:  # after help, the version or a wrong argument
        flush()
        return stop.code if isinstance(stop.code, int) else UNKNOWN
    try:
        with only_for_results():
            answer: Answer = options.run(options)
        write(answer.as_json() if options.json else answer.text)
    except KeyboardInterrupt:
        complain(traceback.format_exc() if options.debug else f"{options.prog}: interrupted")
        return INTERRUPTED
    except (Exception, SystemExit) as error:  # exit code 1 is an answer, so every error must map to 2
        complain(traceback.format_exc() if options.debug else f"{options.prog}: {one_line(error, options.extra)}")
        return UNKNOWN
    return answer.code
