"""`fakequant bench`."""

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import fakequant
from fakequant._cli.command import Answer, Commands, whole_number
from fakequant._cli.contenders import Case, make_cases
from fakequant._util.text_table import table
from fakequant.testing.timing import best_times

ELEMENTS = 1 << 20
SECONDS = 0.4  # per row


@dataclasses.dataclass(frozen=True)
class Row:
    """The times of one operation with a number of threads."""

    operation: str
    threads: int
    microseconds: float
    # fakequant's time relative to a copy of the array, and torch's time relative to fakequant's.
    over_copy: float
    torch_over_ours: float | None
    # Whether results equal torch's bit by bit. None if torch is not installed.
    same_bits: bool | None


@dataclasses.dataclass(frozen=True)
class Bench:
    """The result of `fakequant bench`. Prints as a table."""

    elements: int
    torch: str | None
    info: fakequant.Info
    rows: list[Row]

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as dicts, lists, numbers and strings."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        header = ["float32", "threads", "microseconds", "relative to a copy", "torch / fakequant", "same bits as torch"]
        rows = [
            [
                row.operation,
                row.threads,
                f"{row.microseconds:.0f}",
                f"{row.over_copy:.2f}",
                "-" if row.torch_over_ours is None else f"{row.torch_over_ours:.1f}",
                {None: "-", True: "yes", False: "no"}[row.same_bits],
            ]
            for row in self.rows
        ]
        torch = f"torch {self.torch or 'not installed'}"
        on = f"{self.elements:,} elements, {self.info.target} on {self.info.machine}, {torch}"
        how = "Shortest of many calls, in alternation. Other load on the machine makes the times worse."
        return f"{on}\n\n{table(header, rows)}\n\n{how}"


def add(commands: Commands) -> None:
    parser = commands.add(
        "bench",
        run,
        "measure the speed on this machine, compared with a copy and with torch",
        about="Takes less than 20 seconds.",
        examples=["", "--threads 4 --json"],
        no="results differ from torch's",
    )
    parser.add_argument(
        "--threads", metavar="N", type=whole_number(1), help="measure 1 and N threads (default: the current number)"
    )


def run(options: argparse.Namespace) -> Answer:
    """Answers with a table of times."""
    found = measure(options.threads or fakequant.get_num_threads())
    return Answer(str(found), found.to_dict(), 1 if any(row.same_bits is False for row in found.rows) else 0)


def measure(threads: int) -> Bench:
    """Measures all operations with one thread and with `threads`."""
    torch = _torch()
    cases = make_cases(ELEMENTS, torch)
    plan = [(case, n) for n in sorted({1, threads}) for case in cases]
    rows = []
    for number, (case, n) in enumerate(plan):
        _show(f"{number + 1}/{len(plan)} {case.operation}")
        with _threads(n, torch):
            rows.append(_measure(case, n))
    _show("")
    return Bench(ELEMENTS, None if torch is None else torch.__version__, fakequant.info(), rows)


def _measure(case: Case, threads: int) -> Row:
    contenders = {"ours": case.ours, "copy": case.copy}
    if case.torch is not None:
        contenders["torch"] = case.torch
    best = best_times(contenders, seconds=SECONDS)
    ours = best["ours"]
    over = best["torch"] / ours if case.torch is not None else None
    return Row(case.operation, threads, ours * 1e6, ours / best["copy"], over, case.has_torchs_bits())


@contextmanager
def _threads(n: int, torch: ModuleType | None) -> Iterator[None]:
    """Sets the number of threads of fakequant and torch, and restores it at the end."""
    before = fakequant.get_num_threads()
    torchs = 1 if torch is None else torch.get_num_threads()
    try:
        for set_number in (fakequant.set_num_threads, *([] if torch is None else [torch.set_num_threads])):
            set_number(n)
        yield
    finally:
        fakequant.set_num_threads(before)
        if torch is not None:
            torch.set_num_threads(torchs)


def _torch() -> ModuleType | None:
    try:
        import torch
    except ImportError:
        return None
    return torch


def _show(text: str) -> None:
    """Shows the progress, on a terminal only."""
    if sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write(f"\r{text:<60}" if text else f"\r{'':<60}\r")
        sys.stderr.flush()
