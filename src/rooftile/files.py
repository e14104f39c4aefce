"""Write a file whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rooftile.errors import UsageError

__all__ = ["check_writable", "replaced"]


def check_writable(path: str | Path) -> Path:
    """The path, if a file can be written there; said before the long work starts, not after it."""
    path = Path(path)
    folder = path.parent
    if path.is_dir():
        raise UsageError(f"{str(path)!r} is a directory; give the name of a file to write.")
    if not folder.is_dir():
        raise UsageError(f"can't write {str(path)!r}: there is no directory {str(folder)!r}; create it first.")
    if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise UsageError(f"can't write {str(path)!r}: no permission; choose another path.")
    return path


@contextlib.contextmanager
def replaced(path: str | Path) -> Iterator[Path]:
    """A temporary name beside ``path``, renamed to it when the block ends well and removed when it does not."""
    path = check_writable(path)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise UsageError(f"can't write {str(path)!r}: {error.strerror}; choose another path.") from error
    os.close(handle)
    temporary = Path(name)
    mask = os.umask(0)
    os.umask(mask)
    temporary.chmod(0o666 & ~mask)  # mkstemp's 0600 is for secrets
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise UsageError(f"can't write {str(path)!r}: {error.strerror}; choose another path.") from error
    finally:
        temporary.unlink(missing_ok=True)
