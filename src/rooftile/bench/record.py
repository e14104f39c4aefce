"""One measurement with everything that is needed to judge it, repeat it, or refuse to compare it. Needs no torch."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from rooftile.bench.machine import Hardware, Versions

__all__ = ["BUSY", "STATISTICS", "WIDE_SPREAD", "Option", "Record", "TensorError", "Unit", "quartiles"]

Option = bool | int | float | str
Unit = str

#: Statistics that a record's value may be: of times and rates that several contenders take turns in, the median; of a
#: ceiling, which other processes can only lower, the best round.
STATISTICS = ("median", "best")

#: An interquartile range above this share of the median is told with the figure.
WIDE_SPREAD = 0.1

#: Processors in use by others above which a figure is told to be disturbed.
BUSY = 0.2


def quartiles(samples: tuple[float, ...]) -> tuple[float, float, float]:
    """First quartile, median, third quartile (linear interpolation between the samples, their ends included)."""
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, median, high


@dataclass(frozen=True, slots=True)
class TensorError:
    """Absolute error of one result against FP64; ``elements`` of them were compared."""

    tensor: str
    largest: float
    mean: float
    elements: int


@dataclass(frozen=True, slots=True)
class Record:
    """What one contender took for one task, and under which conditions.

    ``samples`` are in ``unit``: seconds a call (``s``), or a rate (``FLOP/s``, ``B/s``, ``elements/s``). Each is the
    mean of ``calls`` calls in a row; ``warm_up`` samples went before them and were dropped. ``others_busy`` is how many
    processors other processes used meanwhile, None where the system does not say. ``work`` holds what one call does, by
    name (``visible FLOPs``). ``shape`` and ``options`` are the task's own. ``path`` is the code path that ran.
    """

    task: str
    contender: str
    samples: tuple[float, ...]
    unit: Unit
    statistic: str
    threads: int
    warm_up: int
    calls: int
    hardware: Hardware
    versions: Versions
    taken_at: str
    others_busy: float | None = None
    dtype: str = ""
    shape: tuple[int, ...] = ()
    options: tuple[tuple[str, Option], ...] = ()
    kernel: str = ""
    path: str = ""
    work: tuple[tuple[str, float], ...] = ()
    errors: tuple[TensorError, ...] = ()

    @property
    def repeats(self) -> int:
        """Samples that count."""
        return len(self.samples)

    @property
    def is_rate(self) -> bool:
        """Whether more is better."""
        return self.unit != "s"

    @property
    def median(self) -> float:
        """Median of the samples, in ``unit``."""
        return statistics.median(self.samples)

    @property
    def iqr(self) -> float:
        """Interquartile range, in ``unit``."""
        low, _, high = quartiles(self.samples)
        return high - low

    @property
    def best(self) -> float:
        """The fastest sample, in ``unit``."""
        return max(self.samples) if self.is_rate else min(self.samples)

    @property
    def value(self) -> float:
        """The figure that this record stands for: what ``statistic`` names."""
        return self.best if self.statistic == "best" else self.median

    @property
    def spread(self) -> float:
        """Interquartile range as a share of the median."""
        return self.iqr / self.median

    @property
    def wide(self) -> bool:
        """Whether the spread is too wide for the figure to be trusted to its printed digits."""
        return self.spread > WIDE_SPREAD

    @property
    def disturbed(self) -> bool:
        """Whether other processes used so much of the machine that the figure is theirs too."""
        return self.others_busy is not None and self.others_busy > BUSY

    @property
    def standard_error(self) -> float:
        """Of the median, from the interquartile range of a normal distribution: 1.2533 (IQR / 1.349) / sqrt(n)."""
        return 1.2533 * self.iqr / 1.349 / math.sqrt(self.repeats)

    def rate(self, work: str) -> float:
        """``work`` a second."""
        return dict(self.work)[work] / self.value
