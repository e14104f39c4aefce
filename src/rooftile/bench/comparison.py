"""Two records side by side: refused unless everything but what is compared is the same. Needs no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rooftile.bench.record import Record, quartiles
from rooftile.errors import UsageError

__all__ = ["Comparison", "compare", "compare_all", "difference"]

#: What two records may differ in, because it is what a comparison is about: who ran, and the release of this library.
_COMPARED = {"contender", "kernel", "path", "versions.rooftile", "versions.native_core"}

#: Outcomes, and how many samples it took: not conditions.
_OUTCOMES = {"samples", "calls", "taken_at", "others_busy", "work", "errors"}


@dataclass(frozen=True, slots=True)
class Comparison:
    """``faster`` is how many times the speed of ``before`` that of ``after`` is.

    ``low`` and ``high`` are that ratio between the quartiles that are farthest from and nearest to each other, or, of
    figures that are the best of their rounds, between each best and the quartile next to it. Where they lie on both
    sides of 1, the two were not told apart.
    """

    before: Record
    after: Record
    faster: float
    low: float
    high: float


def compare(before: Record, after: Record) -> Comparison:
    """How much faster ``after`` is; UsageError that names the first condition in which the two differ."""
    found = difference(before, after)
    if found is not None:
        name, one, other = found
        raise UsageError(
            f"{before.task} of {before.contender} and of {after.contender} can't be compared: {name} is {_shown(one)} "
            f"in one and {_shown(other)} in the other; measure both under the same conditions"
        )
    (slow, fast), (slow_after, fast_after) = _ends(before), _ends(after)
    if before.is_rate:
        return Comparison(before, after, after.value / before.value, slow_after / fast, fast_after / slow)
    return Comparison(before, after, before.value / after.value, fast / slow_after, slow / fast_after)


def _ends(record: Record) -> tuple[float, float]:
    """The slow and the fast end of the samples that stand behind the figure."""
    low, _, high = quartiles(record.samples)
    slow, fast = (low, high) if record.is_rate else (high, low)
    return (fast, record.best) if record.statistic == "best" else (slow, fast)


def compare_all(before: Sequence[Record], after: Sequence[Record]) -> tuple[list[Comparison], list[Record]]:
    """Every measurement that both have, and those that only one of them has.

    A measurement is the same task of the same contender on the same input. Where no record of ``after`` was taken under
    the conditions of ``before``, UsageError names the first that differs.
    """
    compared, alone, met = [], [], set()
    for record in before:
        candidates = [other for other in after if _subject(other) == _subject(record)]
        if not candidates:
            alone.append(record)
            continue
        best = next((other for other in candidates if difference(record, other) is None), candidates[0])
        compared.append(compare(record, best))
        met.add(_subject(record))
    return compared, [*alone, *(other for other in after if _subject(other) not in met)]


def _subject(record: Record) -> tuple[object, ...]:
    return record.task, record.contender, record.dtype, record.shape, record.options


def difference(a: Record, b: Record) -> tuple[str, Any, Any] | None:
    """The first condition in which two records differ, with both values; None where they can be compared."""
    theirs = dict(_conditions(b))
    return next(((name, value, theirs[name]) for name, value in _conditions(a) if value != theirs[name]), None)


def _conditions(record: Record) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if dataclasses.is_dataclass(value):
            parts = [(f"{field.name}.{part.name}", getattr(value, part.name)) for part in dataclasses.fields(value)]
        else:
            parts = [(field.name, value)]
        yield from ((name, part) for name, part in parts if name not in _COMPARED | _OUTCOMES)


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str) else str(value)
