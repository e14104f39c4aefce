"""Where a command's results go: files that are whole or not there, JSON, progress that never lands in a pipe."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rooftile.errors import UsageError

__all__ = ["STDOUT", "check_writable", "next_command", "progress", "write_file", "write_json"]

#: The path that stands for standard output.
STDOUT = "-"


def check_writable(path: str | None, option: str = "--json") -> None:
    """Raise UsageError now if ``path`` can't be written; call it before the long work starts.

    None and ``-`` are always fine. The check makes and removes a file beside ``path``: only trying tells.
    """
    if path is None or path == STDOUT:
        return
    target = _target(path)
    try:
        if target.is_dir():
            raise IsADirectoryError(None, "it is a directory")
        if _is_special(target):  # opening a pipe would wait for its reader
            if not os.access(target, os.W_OK):
                raise PermissionError(None, "it may not be written to")
            return
        temporary = _temporary(target)
        open(temporary, "x").close()
        temporary.unlink()
    except OSError as error:
        raise _unwritable(path, option, error) from None


def write_file(path: str, text: str, option: str = "--json") -> None:
    """Write ``text`` to ``path`` (``-``: standard output), whole or not at all; UsageError if that can't be done."""
    if path == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    target = _target(path)
    try:
        if _is_special(target):
            target.write_text(text, encoding="utf-8")
            return
        temporary = _temporary(target)
        try:
            with open(temporary, "x", encoding="utf-8") as stream:
                stream.write(text)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)  # also after Ctrl-C
    except OSError as error:
        raise _unwritable(path, option, error) from None


def write_json(path: str, value: Any, option: str = "--json") -> None:
    """Write ``value`` as JSON to ``path`` or, for ``-``, to standard output. NaN and infinities are refused."""
    write_file(path, json.dumps(value, indent=2, allow_nan=False) + "\n", option)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """``with progress() as say: say("capturing")``: one line on stderr, only on a terminal, gone at the end."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda _: None
        return

    def say(what: str) -> None:
        sys.stderr.write(f"\r\x1b[2K{what[:99]}")
        sys.stderr.flush()

    try:
        yield say
    finally:
        sys.stderr.write("\r\x1b[2K")
        sys.stderr.flush()


def next_command(command: str, why: str) -> str:
    """The last line of every report: what to type next."""
    return f"next: {command}   ({why})"


def _target(path: str) -> Path:
    # A link is followed: renaming over it would replace the link, not the file that it names.
    return Path(os.path.realpath(path))


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}.tmp")


def _is_special(target: Path) -> bool:
    """A pipe or a device such as /dev/null: there is nothing to rename over."""
    return target.exists() and not target.is_file()


def _unwritable(path: str, option: str, error: OSError) -> UsageError:
    return UsageError(
        f"{option} {path} can't be written: {error.strerror}; give a path in a folder that you may write to"
    )
