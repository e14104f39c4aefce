"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from rooftile.errors import UsageError

__all__ = ["check_writable", "write_text"]


def check_writable(path: str | Path) -> None:
    """UsageError now, before an audit's work, if a file can't be made at ``path``."""
    target = Path(path)
    if target.is_dir():
        raise UsageError(f"{path} is a directory; give the name of a file")
    if not target.parent.is_dir():
        raise UsageError(
            f"{path} can't be written: there is no directory {target.parent}; make it, or give another path"
        )
    if not os.access(target.parent, os.W_OK):
        raise UsageError(f"{path} can't be written: no permission in {target.parent}; give another path")


def write_text(path: str | Path, text: str) -> None:
    """Write to a temporary name beside ``path`` and rename; UsageError where that fails."""
    check_writable(path)
    target = Path(path)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise UsageError(f"{path} can't be written ({error.strerror}); give another path") from None
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        # mkstemp makes the file private; a report has the permissions of any other new file.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"{path} can't be written ({error.strerror}); give another path") from None
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
