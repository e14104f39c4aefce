"""Where a command's results go: files that are whole or not there, JSON, progress that never lands in a pipe."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer

from rooftile import files
from rooftile.errors import UsageError

__all__ = [
    "STDOUT",
    "check_distinct",
    "check_input_kept",
    "check_writable",
    "next_command",
    "progress",
    "typed_again",
    "write_file",
    "write_json",
]

#: The path that stands for standard output.
STDOUT = "-"


def check_writable(path: str | None, option: str = "--json") -> None:
    """Raise UsageError now if ``path`` can't be written; None and ``-`` are always fine."""
    if path is not None and path != STDOUT:
        files.check_writable(path, option)


def check_distinct(**paths: str | None) -> None:
    """Raise UsageError where two options (``json=``, ``save_trace=``) name one file: the later would replace it."""
    seen: dict[str, str] = {}
    for name, path in paths.items():
        if path is None or path in (STDOUT, os.devnull):
            continue
        option, real = "--" + name.replace("_", "-"), os.path.realpath(path)
        if real in seen:
            raise UsageError(f"{seen[real]} and {option} are both {path}; give each a file of its own")
        seen[real] = option


def check_input_kept(file: str, **outputs: str | None) -> None:
    """Raise UsageError where an option (``json=``, ``plot=``) names the input ``file``, which it would replace."""
    for name, path in outputs.items():
        if path is None or path in (STDOUT, os.devnull) or not (os.path.exists(path) and os.path.exists(file)):
            continue
        if os.path.samefile(path, file):
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{option} {path} is the input itself, which it would overwrite; give another path")


def write_file(path: str, text: str, option: str = "--json") -> None:
    """Write JSON ``text`` to ``path`` (``-``: standard output), whole or not at all; UsageError if it can't be done."""
    if path == STDOUT:
        if sys.stdout is None:
            raise UsageError(f"{option} - can't be written: standard output is closed; give the path of a file")
        sys.stdout.write(_escaped(text, sys.stdout.encoding))
        sys.stdout.flush()
        return
    with files.replaced(path, option) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _escaped(text: str, encoding: str | None) -> str:
    """JSON that ``encoding`` can hold: what it lacks is escaped as JSON does, so that no name changes."""
    try:
        text.encode(encoding or "utf-8")
    except UnicodeEncodeError:
        return "".join(c if c.isascii() else json.dumps(c)[1:-1] for c in text)
    return text


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


def typed_again(ctx: typer.Context, **changes: str) -> str:
    """The command line of ``ctx`` as a shell takes it, with every option that was given; ``changes`` replace some."""
    words = ctx.command_path.split()
    for parameter in ctx.command.params:
        given = ctx.params.get(parameter.name or "")
        value = changes.get(parameter.name or "", given)
        if value is None or value is False or value == []:
            continue
        if parameter.param_type_name == "argument":
            words.append(str(value))
        elif value is True:
            words.append(parameter.opts[0])
        else:
            for one in value if isinstance(value, list | tuple) else [value]:
                words += [parameter.opts[0], str(one)]
    return shlex.join(words)


def next_command(command: str, why: str) -> str:
    """The last line of every report: what to type next."""
    return f"next: {command}   ({why})"
