"""Pieces that the views share: headings, and tables that leave columns out rather than cut figures."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.table import Table
from rich.text import Text

__all__ = ["GAP", "WIDTH", "Beside", "Columns", "heading"]

#: The report is no wider than this, however wide the terminal is.
WIDTH = 100
#: Spaces between two columns.
GAP = 2
#: The narrowest that a column of text gets.
_LEAST = 8


def heading(title: str, aside: str = "") -> Text:
    """A section's title, and what its figures stand on; an empty line before it."""
    return Text.assemble(("\n" + title, "bold"), (f"  {aside}" if aside else "", "dim"))


class Columns:
    """A table without lines: the first column is text, the others are numbers unless ``left`` names them.

    Where the terminal is narrower than the table, the columns of ``spare`` are left out, the first of them first; then
    the first column's text goes over several lines. No figure is ever cut.
    """

    def __init__(self, *names: str, spare: Sequence[str] = (), left: Sequence[str] = ()) -> None:
        self.names, self._spare, self._left = names, spare, left
        self._rows: list[tuple[tuple[str, ...], str]] = []

    def add_row(self, *cells: str, style: str = "") -> None:
        """One row, a cell a column."""
        self._rows.append((cells, style))

    @property
    def width(self) -> int:
        """Columns of the terminal that the whole table takes."""
        return self._width_of(range(len(self.names)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.fitted(options.max_width)

    def fitted(self, room: int) -> Table:
        """The table in at most ``room`` columns of the terminal."""
        kept = list(range(len(self.names)))
        for name in self._spare:
            if self._width_of(kept) > room:
                kept.remove(self.names.index(name))
        over = self._width_of(kept) - room
        table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="dim")
        for index in kept:
            name = self.names[index]
            if index == 0 and over > 0:
                least = max(self._width_of(kept[:1]) - over, _LEAST)
                table.add_column(name, overflow="fold", max_width=least)
            else:
                justify: JustifyMethod = "left" if index == 0 or name in self._left else "right"
                table.add_column(name, justify=justify, no_wrap=True)
        for cells, style in self._rows:
            table.add_row(*(cells[index] for index in kept), style=style)
        return table

    def _width_of(self, kept: Sequence[int]) -> int:
        lines = [self.names, *(cells for cells, _ in self._rows)]
        return sum(max(Text(line[index]).cell_len for line in lines) for index in kept) + GAP * (len(kept) - 1)


class Beside:
    """Two tables side by side, or one under the other where the terminal has no room for both."""

    def __init__(self, one: Columns, other: Columns) -> None:
        self._both = (one, other)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        one, other = self._both
        if one.width + 2 * GAP + other.width > options.max_width:
            yield from self._both
            return
        grid = Table.grid(padding=(0, 2 * GAP))
        grid.add_row(one.fitted(one.width), other.fitted(other.width))
        yield grid
