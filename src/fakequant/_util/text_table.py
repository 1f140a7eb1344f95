"""Plain-text tables."""

from collections.abc import Sequence


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
