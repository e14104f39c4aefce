"""Standard output as it really is: of any encoding, full, closed, or a pipe whose reader has left."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator

from rooftile.errors import UsageError

__all__ = ["prepare", "spelled"]

#: What a character is spelled as where the encoding of the terminal or the pipe lacks it.
_PLAIN = {
    "·": "|", "→": "->", "≤": "<=", "≥": ">=", "–": "-", "…": "~", "µ": "u", "│": "|", "└": "+", "┘": "+", "─": "-",
    "×": "x", " ": " ", "▁": "1", "▂": "2", "▃": "3", "▄": "4", "▅": "5", "▆": "6", "▇": "7", "█": "#",
}  # fmt: skip
_HANDLER = "rooftile-plain"


def spelled(error: UnicodeError) -> tuple[str, int]:
    """An error handler of :mod:`codecs`: our own signs in ASCII, any other character as Python escapes it."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    cut = error.object[error.start : error.end]
    return "".join(_PLAIN.get(c) or c.encode("ascii", "backslashreplace").decode() for c in cut), error.end


def prepare() -> None:
    """Make the process's streams take every character, and let a reader that leaves end the process in silence."""
    codecs.register_error(_HANDLER, spelled)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None where it was closed before the start
            stream.reconfigure(errors=_HANDLER)
    if isinstance(sys.stdout, io.TextIOWrapper):
        encoding, lines = sys.stdout.encoding, sys.stdout.line_buffering
        sys.stdout = _Output(sys.stdout.detach(), encoding, _HANDLER, line_buffering=lines)
    if hasattr(signal, "SIGPIPE"):  # Windows has none
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)


class _Output(io.TextIOWrapper):
    """Standard output whose failures are told apart from those of any other file, and are a sentence."""

    def write(self, text: str, /) -> int:
        with _told(self):
            return super().write(text)

    def flush(self) -> None:
        with _told(self):
            super().flush()


@contextlib.contextmanager
def _told(stream: io.TextIOWrapper) -> Iterator[None]:
    """An OSError becomes a UsageError, and the rest goes nowhere: the interpreter would try again as it exits."""
    try:
        yield
    except OSError as error:
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
        raise UsageError(f"standard output can't be written: {error.strerror}; what it holds is cut off") from None
