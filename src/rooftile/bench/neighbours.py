"""How much of the machine other processes used while something was measured. Needs no torch."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType

__all__ = ["Neighbours"]

_STAT = Path("/proc/stat")
_BUSY = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal; the others are idle, iowait, guests
_SHORTEST = 0.1


class Neighbours:
    """``with Neighbours() as others: ...; others.busy``: processors that others used, None where it is unknown.

    The system counts in steps of a hundredth of a second: a block of half a second is told to a few percent, one
    shorter than a tenth not at all.
    """

    def __init__(self) -> None:
        self.busy: float | None = None

    def __enter__(self) -> Neighbours:
        self._before = _seconds()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        after = _seconds()
        if self._before is None or after is None:
            return
        wall, machine, own = (b - a for a, b in zip(self._before, after, strict=True))
        if wall >= _SHORTEST:
            self.busy = round(max(0.0, machine - own) / wall, 2)


def _seconds() -> tuple[float, float, float] | None:
    """Wall clock, and processor time of the whole machine and of this process with its threads."""
    try:
        fields = [int(field) for field in _STAT.read_text().partition("\n")[0].split()[1:]]
        machine = sum(fields[index] for index in _BUSY) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
    return time.perf_counter(), machine, time.process_time()
