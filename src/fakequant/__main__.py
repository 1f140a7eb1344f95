"""`python -m fakequant`."""

import argparse
import dataclasses
import json

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
    options = parser.parse_args(arguments)

    result = info()
    print(json.dumps(dataclasses.asdict(result), indent=2) if options.json else result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
