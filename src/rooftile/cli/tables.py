"""Plain tables for the terminal: aligned, at most 100 columns, the same with and without colour."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["WIDTH", "gigabytes", "number", "printable", "table"]

WIDTH = 100

#: What stands where there is no figure.
NOTHING = "-"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Columns two spaces apart; the first ``left`` are aligned to the left, the others to the right."""
    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    made = []
    for line in lines:
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        made.append("  ".join(cells).rstrip())
    return "\n".join(made)


def printable(text: str) -> str:
    """``text`` on one line and without control characters: each of them is spelled as Python escapes it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def number(value: float | None, digits: int = 1) -> str:
    """``value`` with thousands separated and no needless zeros after the point; ``-`` for None."""
    if value is None:
        return NOTHING
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def gigabytes(nbytes: float) -> str:
    """Both spellings: ``85.90 GB (80.00 GiB)``."""
    return f"{nbytes / 1e9:,.2f} GB ({nbytes / 2**30:,.2f} GiB)"
