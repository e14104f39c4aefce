"""Names to devices: the packaged data, and a user's own file beside it."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from rooftile._names import unknown_name
from rooftile.devices.device import Device, Link
from rooftile.devices.parse import device_from_table, link_from_table
from rooftile.errors import UsageError

__all__ = ["from_toml", "link", "links", "load", "names"]

_FAMILIES = ("nvidia", "amd", "tpu")


def names(file: str | Path | None = None) -> list[str]:
    """Names that :func:`load` takes: those of ``file`` first, then the packaged ones, family by family."""
    own = list(from_toml(file)) if file is not None else []
    return own + [name for name in _packaged() if name not in own]


def load(name: str | None = None, file: str | Path | None = None) -> Device:
    """The device called ``name``, looked up in ``file`` first and then in the packaged data.

    ``name`` may be left out where ``file`` holds exactly one device. Raises UsageError: for an unknown name with its
    near matches (never another device instead), for a file that can't be read or does not describe a device.
    """
    own = from_toml(file) if file is not None else {}
    if name is None:
        if len(own) != 1:
            raise UsageError(f"no device is named; choose one of {', '.join(own or _packaged())}")
        return next(iter(own.values()))
    if name in own:
        return own[name]
    try:
        return _packaged()[name]
    except KeyError:
        raise unknown_name("device", name, names(file), see="`rooftile devices` lists all") from None


def from_toml(file: str | Path) -> dict[str, Device]:
    """Every device of a TOML file, by name: one table each, with the keys of the packaged ones."""
    try:
        with open(file, "rb") as stream:
            tables = tomllib.load(stream)
    except OSError as error:
        raise UsageError(f"device file {file} can't be read: {error.strerror}; give a readable TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"device file {file} is not valid TOML: {error}") from None
    if not tables:
        raise UsageError(f"device file {file} is empty; give one table a device, such as [my-card]")
    loose = next((key for key, value in tables.items() if not isinstance(value, dict)), None)
    if loose is not None:
        raise UsageError(
            f"device file {file} has the key {loose!r} outside a table; put it under a name such as [my-card]"
        )
    return {name: device_from_table(name, values, _links(), str(file)) for name, values in tables.items()}


def link(name: str) -> Link:
    """The link called ``name``; UsageError with near matches if there is none."""
    try:
        return _links()[name]
    except KeyError:
        raise unknown_name("link", name, list(_links())) from None


def links() -> list[str]:
    """Names that :func:`link` takes."""
    return list(_links())


@cache
def _packaged() -> dict[str, Device]:
    return {
        name: device_from_table(name, values, _links(), f"{family}.toml")
        for family in _FAMILIES
        for name, values in _data(family).items()
    }


@cache
def _links() -> dict[str, Link]:
    return {name: link_from_table(name, values) for name, values in _data("links").items()}


def _data(stem: str) -> dict[str, Any]:
    text = (resources.files(__package__) / "data" / f"{stem}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
