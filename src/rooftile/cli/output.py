"""Where a command's results go: files that are whole or not there, JSON, progress that never lands in a pipe."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rooftile import files

__all__ = ["STDOUT", "check_writable", "next_command", "progress", "write_file", "write_json"]

#: The path that stands for standard output.
STDOUT = "-"


def check_writable(path: str | None, option: str = "--json") -> None:
    """Raise UsageError now if ``path`` can't be written; None and ``-`` are always fine."""
    if path is not None and path != STDOUT:
        files.check_writable(path, option)


def write_file(path: str, text: str, option: str = "--json") -> None:
    """Write ``text`` to ``path`` (``-``: standard output), whole or not at all; UsageError if that can't be done."""
    if path == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    with files.replaced(path, option) as temporary:
        temporary.write_text(text, encoding="utf-8")


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
