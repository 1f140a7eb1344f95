"""The parser of the command line, the arguments that commands share, and the answer of a command."""

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, NoReturn

from fakequant._cli.output import complain

EXIT_CODES = """exit codes:
  0    {yes}{no}
  2    wrong usage or an error: one line on stderr says why
  130  interrupted"""


@dataclasses.dataclass(frozen=True)
class Answer:
    """The result of a command: as text, as data for JSON, and as an exit code."""

    text: str
    # Anything that JSON has; values of other types are written as strings.
    data: Any
    code: int = 0

    def as_json(self) -> str:
        """Returns the data as JSON. NaN and infinities become null.

        >>> print(Answer("", {"largest": float("inf"), "ok": False}).as_json())
        {
          "largest": null,
          "ok": false
        }
        """
        return json.dumps(_finite(self.data), indent=2, allow_nan=False, default=str)


class Parser(argparse.ArgumentParser):
    """An argument parser that reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        """Prints the message and exits with code 2."""
        complain(f"{self.prog}: {message}; see {self.prog} --help")
        raise SystemExit(2)


class Commands:
    """The commands of a parser."""

    def __init__(self, parser: Parser) -> None:
        self._actions = parser.add_subparsers(
            dest="command", required=True, metavar="COMMAND", parser_class=Parser, title="commands"
        )

    def add(
        self,
        name: str,
        run: Callable[[argparse.Namespace], Answer],
        help: str,
        *,
        examples: Sequence[str],
        about: str = "",
        yes: str = "success",
        no: str = "",
        extra: str = "torch",
    ) -> Parser:
        """Adds a command and returns its parser.

        `help` is one line that starts with a lower-case letter, and `about` has more sentences for the command's own
        help. `examples` are the arguments of calls. `yes` and `no` are the meanings of the exit codes 0 and 1; `no` is
        empty if the command does not use 1. `extra` installs all packages that the command needs.
        """
        codes = EXIT_CODES.format(yes=yes, no=no and f"\n  1    {no}")
        title = "examples" if len(examples) > 1 else "example"
        shown = "".join(f"\n  fakequant {name} {example}".rstrip() for example in examples)
        parser = self._actions.add_parser(
            name,
            help=help,
            description=f"{help[0].upper()}{help[1:]}.{about and f' {about}'}",
            epilog=f"{title}:{shown}\n\n{codes}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        parser.add_argument("--json", action="store_true", help="print JSON; everything else goes to stderr")
        _add_debug(parser, default=argparse.SUPPRESS)  # may also come before the command
        parser.set_defaults(run=run, prog=parser.prog, extra=extra)
        return parser


def make_parser(add_commands: Sequence[Callable[[Commands], None]]) -> Parser:
    """Returns the parser of the whole command line, to which each of the functions adds a command."""
    parser = Parser(
        prog="fakequant",
        description="Quantization-aware training and post-training quantization, checked code by code in the runtime.",
        epilog="examples:\n  fakequant info\n  fakequant demo\n  fakequant COMMAND --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"fakequant {version('fakequant')}")
    _add_debug(parser, default=False)
    commands = Commands(parser)
    for add in add_commands:
        add(commands)
    return parser


def _add_debug(parser: Parser, default: bool | str) -> None:
    parser.add_argument("--debug", action="store_true", default=default, help="show tracebacks of errors")


def whole_number(least: int) -> Callable[[str], int]:
    """Returns an argparse type that accepts whole numbers of at least `least`."""

    def convert(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
        return int(text)

    return convert


def add_model(parser: Parser, *, prepared: str = "a prepared model") -> None:
    parser.add_argument(
        "model", metavar="MODEL", help=f"FILE.py:NAME or MODULE:NAME of {prepared} or a function that returns one"
    )


def add_state(parser: Parser) -> None:
    parser.add_argument(
        "--state", metavar="FILE", help="a file written by torch.save(model.state_dict(), FILE), loaded into the model"
    )


def add_data(
    parser: Parser, name: str = "data", *, words: str = " or a function that returns them", **options: Any
) -> None:
    """Adds the argument, or the option, that names batches. `words` say which batches."""
    parser.add_argument(name, metavar="DATA", help=f"FILE.py:NAME or MODULE:NAME of batches{words}", **options)


def add_steps(parser: Parser) -> None:
    parser.add_argument("--steps", metavar="N", type=whole_number(1), help="use at most N batches")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
