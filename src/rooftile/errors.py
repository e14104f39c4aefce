"""The one exception family: what was wrong, with which value, and what to do.

Every error that a user can cause derives from :class:`RooftileError` and carries the exit code that the
command line returns for it (0 fine, 1 asked for by ``--fail-on``, 2 usage, 3 target could not be captured).
"""

from __future__ import annotations

__all__ = ["CaptureError", "RooftileError", "UnitError", "UsageError"]


class RooftileError(Exception):
    """Base of the family; ``exit_code`` is what the command line exits with."""

    exit_code = 2


class UsageError(RooftileError, ValueError):
    """An argument, a file or a name that can't be taken as it is (exit code 2)."""


class CaptureError(RooftileError):
    """The target is a step, but it could not be run without data (exit code 3)."""

    exit_code = 3


class UnitError(RooftileError, ValueError):
    """A figure above its roof: units, dtype, count or scope are wrong (exit code 2)."""
