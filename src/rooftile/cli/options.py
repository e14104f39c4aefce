"""Options that several verbs share, so that they look and complete alike everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

from rooftile import devices, zoo
from rooftile.errors import UsageError

__all__ = [
    "DeviceFileOption",
    "DeviceName",
    "DeviceOption",
    "JsonOption",
    "chosen_device",
    "complete_device",
    "complete_target",
]


def complete_device(incomplete: str) -> list[str]:
    """Device names that begin with what is typed."""
    return [name for name in devices.names() if name.startswith(incomplete)]


def chosen_device(name: str | None, file: str | None) -> devices.Device:
    """The device of ``--device`` and ``--device-file``; UsageError where neither says which."""
    if name is None and (file is None or len(devices.from_toml(file)) > 1):
        known = devices.names(file)
        shown = ", ".join(known[:6])
        raise UsageError(
            f"no device is named; add --device NAME, one of {shown}{', ...' if len(known) > 6 else ''} "
            "(`rooftile devices` lists all)"
        )
    return devices.load(name, file)


def complete_target(incomplete: str) -> list[str]:
    """Names of built-in models that begin with what is typed."""
    return [name for name in zoo.names() if name.startswith(incomplete)]


JsonOption = Annotated[
    str | None,
    typer.Option("--json", metavar="PATH|-", help="Write the result as JSON to a file, or to standard output."),
]

DeviceFileOption = Annotated[
    str | None,
    typer.Option("--device-file", metavar="PATH", help="TOML file with devices of your own."),
]

DeviceName = Annotated[
    str, typer.Argument(metavar="NAME", help="A name that `rooftile devices` lists.", autocompletion=complete_device)
]

DeviceOption = Annotated[
    str | None,
    typer.Option("--device", metavar="NAME", help="The target device.", autocompletion=complete_device),
]
