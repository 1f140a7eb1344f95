"""Text for people: tables, and lists and values that are cut short; and the values of JSON texts."""

import json
from collections.abc import Sequence
from typing import Any

MAX_IN_MESSAGE = 100  # characters of a value that a message quotes


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Formats rows as a table whose columns are as wide as their longest cell.

    >>> print(table(["layer", "bits"], [["fc", 8]]))
    layer | bits
    ------+-----
    fc    | 8
    """
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([lines[0], "-+-".join("-" * width for width in widths), *lines[1:]])


def counted(number: int, one: str, several: str = "") -> str:
    """Returns a number of things, in words.

    >>> counted(1, "layer"), counted(2, "layer"), counted(2, "batch", "batches")
    ('1 layer', '2 layers', '2 batches')
    """
    return f"{number} {one if number == 1 else several or f'{one}s'}"


def listed(names: Sequence[str], most: int = 3) -> str:
    """Joins names, and says how many more there are than `most`.

    >>> listed(["a", "b"]), listed(["a", "b", "c"], most=2)
    ('a, b', 'a, b and 1 more')
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def indented(lines: Sequence[str], most: int = 5) -> str:
    r"""Returns one line each, indented, and says how many more there are than `most`.

    >>> indented(["a", "b", "c"], most=2)
    '  a\n  b\n  and 1 more'
    """
    more = [f"and {len(lines) - most} more"] if len(lines) > most else []
    return "\n".join(f"  {line}" for line in [*lines[:most], *more])


def shortened(text: str, length: int = MAX_IN_MESSAGE) -> str:
    """Returns `text`, cut to at most `length` characters.

    >>> shortened("x" * 1000, 10)
    'xxxxxxx...'
    """
    return text if len(text) <= length else f"{text[: length - 3]}..."


def read_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text. Raises ValueError if it is not valid JSON or is nested too deeply.

    >>> read_json("[" * 100000)
    Traceback (most recent call last):
    ValueError: The text is nested too deeply to be read as JSON.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("The text is nested too deeply to be read as JSON.") from None
