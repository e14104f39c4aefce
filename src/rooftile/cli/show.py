"""``rooftile show FILE``: a saved report, rendered again. Needs no torch."""

from __future__ import annotations

from typing import Annotated

import typer

from rooftile.cli.options import JsonOption
from rooftile.cli.output import STDOUT, check_writable, write_file

__all__ = ["register"]

File = Annotated[str, typer.Argument(metavar="FILE", help="A report that `rooftile audit --json FILE` wrote.")]


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command(short_help="Show a saved report again.")(show)


def show(file: File, json: JsonOption = None) -> None:
    """Render a saved report again, without capturing anything."""
    from rooftile.report import Report
    from rooftile.report.terminal import console, render

    check_writable(json)
    report = Report.load(file)
    if json is not None:
        write_file(json, report.to_json() + "\n")
    if json != STDOUT:
        render(report, console(), saved_as=file)
