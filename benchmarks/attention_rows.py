"""What every section of benchmarks/attention.py gives: rows with what is asked, and the records behind them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from rooftile.bench import Record


@dataclass(frozen=True)
class Row:
    """One line of a table: ``ratio`` is what its section says, at least ``minimum`` or, if ``at_most``, no more.

    ``low`` and ``high`` are the ratio's quartiles over the rounds; None: ours did not run. ``error`` is our mean error
    against FP64 over torch's.
    """

    what: str
    dtype: str
    threads: int
    path: str = "-"
    ours: str = "-"
    peer: str = "-"
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    minimum: float | None = None
    aim: float | None = None
    error: float | None = None
    at_most: bool = False
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.ratio is None:
            return "did not run"
        if self.minimum is None:
            return ""
        if self.at_most:
            return "ok" if self.ratio <= self.minimum else "MISSED"
        if self.aim is not None and self.ratio >= self.aim:
            return "aim"
        return "ok" if self.ratio >= self.minimum else "MISSED"


@dataclass
class Section:
    """A table: its title, what its ratio is, its rows, and the records that they were read from."""

    title: str
    ratio: str
    rows: list[Row] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)  # in order, each once


@dataclass(frozen=True)
class Setting:
    """How a section is to be run. ``shorter`` divides every length: 1 for figures, more to see that the script runs."""

    threads: tuple[int, ...]
    repeats: int
    budget: float
    kernel: str
    shorter: int
    say: Callable[[str], None]


def dtype_name(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
