"""Results that show themselves: as their text in a terminal, and as HTML tables in a notebook."""

import dataclasses
import re
from html import escape
from typing import Any

# The line below the header of a table that `fakequant._util.text.table` made.
_RULE = re.compile(r"-+(\+-+)*")
_NUMBER = re.compile(r"[+-]?[\d,]+(\.\d+)?(e[+-]?\d+)?( ?%)?|-|")
# Lines in columns, and code.
_ALIGNED = re.compile(r"\S  |^import ")
# No colors, so that the tables fit light and dark pages.
_FRAME = "max-height: 32em; overflow: auto"
_LINE = "margin: 0.2em 0; white-space: pre-wrap"
_CODE = "margin: 0.4em 0; overflow: auto"
_TABLE = "border-collapse: collapse; margin: 0.4em 0"
_HEADER = "text-align: {}; padding: 0.15em 0.8em 0.15em 0; border-bottom: 1px solid currentColor"
_CELL = "text-align: {}; padding: 0.1em 0.8em 0.1em 0; vertical-align: top"


class Shown:
    """The base class of results, which print as text with tables.

    The text is the representation too, because that is what the Python prompt shows. Derived dataclasses are
    declared with `repr=False`.
    """

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """Returns HTML for notebooks, without scripts and colors."""
        return html_of(str(self))


def short_repr(value: Any, *always: str) -> str:
    """Returns the call that makes a dataclass, with the fields in `always` and those that differ from their defaults.

    >>> @dataclasses.dataclass(repr=False)
    ... class Grid:
    ...     bits: int = 8
    ...     signed: bool = True
    ...     __repr__ = short_repr
    >>> Grid(bits=4)
    Grid(bits=4)
    """
    given = ((f.name, getattr(value, f.name), f.default) for f in dataclasses.fields(value))
    shown = (f"{name}={v!r}" for name, v, default in given if v != default or name in always)
    return f"{type(value).__name__}({', '.join(shown)})"


def html_of(text: str) -> str:
    """Returns a text with tables as HTML.

    >>> from fakequant._util.text import table
    >>> "<p" in html_of("two layers"), "<table" in html_of(table(["layer", "bits"], [["fc", 8]]))
    (True, True)
    """
    lines = text.split("\n")
    parts = []
    while lines:
        if len(lines) > 1 and _is_header(lines[0], lines[1]):
            rows = [lines.pop(0)]
            rule = lines.pop(0)
            while lines and lines[0]:
                rows.append(lines.pop(0))
            parts.append(_table(rows, rule))
        else:
            block = []
            while lines and lines[0] and not (len(lines) > 1 and _is_header(lines[0], lines[1])):
                block.append(lines.pop(0))
            if not block:
                lines.pop(0)
            elif any(map(_ALIGNED.search, block)):
                parts.append(f'<pre style="{_CODE}">{escape(chr(10).join(block))}</pre>')
            else:
                parts += [f'<p style="{_LINE}">{escape(line)}</p>' for line in block]
    return f'<div style="{_FRAME}">{"".join(parts)}</div>'


def _is_header(line: str, rule: str) -> bool:
    places = [place for place, sign in enumerate(rule) if sign == "+"]
    return _RULE.fullmatch(rule) is not None and all(line[place : place + 1] == "|" for place in places)


def _table(lines: list[str], rule: str) -> str:
    """Returns a table. The rule has the places of its columns. Columns of numbers behind the first end at the right."""
    header, *rows = (_cells(line, rule) for line in lines)
    sides = ["left"] * len(header)
    for number, column in enumerate(zip(*rows, strict=True)):
        if number and all(map(_NUMBER.fullmatch, column)):
            sides[number] = "right"
    cells = [
        "".join(f'<td style="{_CELL.format(side)}">{escape(cell)}</td>' for cell, side in zip(row, sides, strict=True))
        for row in rows
    ]
    heads = zip(header, sides, strict=True)
    head = "".join(f'<th style="{_HEADER.format(side)}">{escape(cell)}</th>' for cell, side in heads)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f'<table style="{_TABLE}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _cells(line: str, rule: str) -> list[str]:
    ends = [place for place, sign in enumerate(rule) if sign == "+"]
    starts = [0, *(end + 1 for end in ends)]
    return [line[start:end].strip() for start, end in zip(starts, [*ends, None], strict=True)]
