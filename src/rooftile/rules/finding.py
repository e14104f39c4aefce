"""The records of a finding and of the rule that makes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from rooftile.capture.options import CaptureOptions
from rooftile.capture.trace import Trace
from rooftile.costs.record import Cost
from rooftile.devices import Device
from rooftile.ledgers.bundle import Ledgers

__all__ = ["FAMILIES", "Context", "Family", "Finding", "Recapture", "Rule", "Saving", "Severity"]

Family = Literal["KER", "MEM", "MOV", "GEM", "LAY", "NUM", "COM"]
FAMILIES: dict[Family, str] = {
    "KER": "kernels",
    "MEM": "memory",
    "MOV": "movement",
    "GEM": "matmul shapes",
    "LAY": "layout and broadcasting",
    "NUM": "numerics",
    "COM": "communication",
}

#: ``error``: the step can't run as it stands; ``warning``: it wastes much or computes what was not meant; ``note``.
Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Saving:
    """What the response saves, each figure None where it is not predicted; a negative figure is what it costs.

    ``peak_bytes``: off the peak of live bytes. ``moved_bytes``: off the bytes moved, unfused. ``evidence``:
    ``derived`` from this trace (or from a capture with the response applied).
    """

    peak_bytes: int | None = None
    moved_bytes: int | None = None
    evidence: str = "derived"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact that somebody can act on. ``where`` is a module path, or several joined by a comma."""

    code: str
    title: str
    evidence: str
    response: str
    severity: Severity
    where: str
    saving: Saving = Saving()


class Recapture(Protocol):
    """Audit the same step again with some options changed; the answers are kept, so that rules share them.

    Takes fields of :class:`~rooftile.capture.options.CaptureOptions`, and ``batch`` where the target can be built for
    another batch. Returns None where the change can't be made (the target is a Step with a fixed batch).
    """

    def __call__(self, **changes: object) -> Trace | None:
        """The trace with ``changes``; None where they can't be made."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a rule may read. ``costs`` has one entry an op, None for an operator without a formula."""

    trace: Trace
    costs: Sequence[Cost | None]
    device: Device
    ledgers: Ledgers
    options: CaptureOptions
    recapture: Recapture


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: its code, what it looks for, and the function that looks.

    ``explanation`` is what ``rooftile explain CODE`` prints: what is seen, why it matters, what to do.
    """

    code: str
    title: str
    explanation: str
    check: Callable[[Context], list[Finding]]

    @property
    def family(self) -> Family:
        """The three letters before the number."""
        return next(family for family in FAMILIES if self.code.startswith(family))
