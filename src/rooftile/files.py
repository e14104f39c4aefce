"""Write a file whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from rooftile.errors import UsageError

__all__ = ["check_writable", "replaced"]


def check_writable(path: str | Path, option: str = "") -> None:
    """Raise UsageError now if ``path`` can't be written; call it before the long work starts.

    The check makes and removes a file beside ``path``: only trying tells. ``option`` is what the sentence calls it.
    """
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


@contextlib.contextmanager
def replaced(path: str | Path, option: str = "") -> Iterator[Path]:
    """A temporary name beside ``path``, renamed to it when the block ends well and removed when it does not."""
    target = _target(path)
    try:
        if _is_special(target):
            yield target
            return
        temporary = _temporary(target)
        try:
            open(temporary, "x").close()
            yield temporary
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)  # also after Ctrl-C
    except OSError as error:
        raise _unwritable(path, option, error) from None


def _target(path: str | Path) -> Path:
    # A link is followed: renaming over it would replace the link, not the file that it names.
    return Path(os.path.realpath(path))


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}.tmp")


def _is_special(target: Path) -> bool:
    """A pipe or a device such as /dev/null: there is nothing to rename over."""
    return target.exists() and not target.is_file()


def _unwritable(path: str | Path, option: str, error: OSError) -> UsageError:
    named = f"{option} {path}".strip()
    return UsageError(f"{named} can't be written: {error.strerror}; give a path in a folder that you may write to")
