"""Pieces that the views share."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

__all__ = ["columns", "heading"]


def heading(title: str, aside: str = "") -> Text:
    """A section's title, and what its figures stand on; an empty line before it."""
    return Text.assemble(("\n" + title, "bold"), (f"  {aside}" if aside else "", "dim"))


def columns(*names: str) -> Table:
    """A table without lines: the first column is text, the others are numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for index, name in enumerate(names):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    return table
