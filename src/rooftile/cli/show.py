"""``rooftile show FILE``: a saved report, or a saved trace, rendered again. Needs no torch."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from rooftile.cli.options import DeviceFileOption, JsonOption, chosen_device, complete_device
from rooftile.cli.output import STDOUT, check_writable, write_file
from rooftile.errors import UsageError

if TYPE_CHECKING:
    from rooftile.report import Report

__all__ = ["register"]

File = Annotated[
    str,
    typer.Argument(metavar="FILE", help="What `rooftile audit` wrote with --json FILE or --save-trace FILE."),
]
TraceDevice = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="Read a trace on this device [default: the one it was captured for].",
        autocompletion=complete_device,
    ),
]

_GZIP = b"\x1f\x8b"


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command(short_help="Show a saved report or trace again.")(show)


def show(file: File, device: TraceDevice = None, device_file: DeviceFileOption = None, json: JsonOption = None) -> None:
    """Render a saved report or trace again, without capturing anything."""
    from rooftile.report.terminal import console, render

    check_writable(json)
    report = _read(file, device, device_file)
    if json is not None:
        write_file(json, report.to_json() + "\n")
    if json != STDOUT:
        following = "rooftile explain" if json is None else shlex.join(["rooftile", "show", json])
        render(report, console(), next_command=following)


def _read(file: str, device: str | None, device_file: str | None) -> Report:
    """The report in ``file``, or the one that its trace gives."""
    from rooftile.report import Report

    if not _is_gzip(file):
        if device is not None or device_file is not None:
            raise UsageError(f"{file} is a report, which has its device; --device and --device-file are for a trace")
        return Report.load(file)
    from rooftile.capture.trace_file import load_trace
    from rooftile.devices import from_toml
    from rooftile.report.read import read_trace

    trace = load_trace(file)
    own = trace.settings.get("device")
    if device_file is not None and own not in from_toml(device_file):
        own = None  # a file of devices is given for one of them
    return read_trace(trace, chosen_device(device or own, device_file))


def _is_gzip(file: str) -> bool:
    """Traces are compressed, reports are not. A file that can't be opened is left to its reader."""
    try:
        with open(file, "rb") as stream:
            return stream.read(2) == _GZIP
    except OSError:
        return False
