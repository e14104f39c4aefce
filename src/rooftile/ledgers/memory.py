"""Memory: how many bytes are alive during every op, when the peak is, and what it is made of.

Bytes are *allocated* bytes: live storages. What the allocator rounds up or keeps in reserve is not counted, and what
the device's context takes is a line of its own (:class:`Fit`). All figures are derived from observed lifetimes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from rooftile.capture.trace import PHASES, Op, Phase, Role, Storage, Trace
from rooftile.ledgers.modules import module_group

__all__ = ["Fit", "MemoryLedger", "PeakAt", "PhasePeak", "States", "TimelinePoint", "downsample", "fit", "memory"]

#: Points that a phase gets on a timeline however short it is.
_LEAST_POINTS = 8


@dataclass(frozen=True, slots=True)
class PeakAt:
    """Where the peak is. ``op`` is an index of ``Trace.ops``, -1 where the step has no ops at all."""

    op: int
    module: str
    phase: str
    operator: str

    def __str__(self) -> str:
        if self.op < 0:
            return "before the step"
        return f"{self.phase} · {self.module or '(top level)'} · {self.operator}"


@dataclass(frozen=True, slots=True)
class PhasePeak:
    """The most bytes alive during one phase, and at which op."""

    phase: Phase
    peak_bytes: int
    op: int


@dataclass(frozen=True, slots=True)
class States:
    """Bytes that a training step must keep between its phases: the most alive at once of each role."""

    weights: int
    buffers: int
    gradients: int
    optimizer_state: int
    master_weights: int

    @property
    def total(self) -> int:
        """Sum of the five; the roles need not be at their largest at the same op."""
        return self.weights + self.buffers + self.gradients + self.optimizer_state + self.master_weights


@dataclass(frozen=True, slots=True)
class TimelinePoint:
    """A run of consecutive ops of one phase: the most bytes alive during any of them."""

    first_op: int
    phase: str
    live_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryLedger:
    """Live bytes per op and what the peak is made of.

    ``live`` has one entry an op. ``by_role`` and ``by_module`` split ``peak_bytes`` exactly; ``role_peaks`` are the
    most bytes of each role alive at once, whenever that was. ``resident_bytes`` were there before the step.
    """

    live: tuple[int, ...]
    peak_bytes: int
    peak_at: PeakAt
    by_role: dict[str, int]
    by_module: dict[str, int]
    role_peaks: dict[str, int]
    phase_peaks: tuple[PhasePeak, ...]
    states: States
    resident_bytes: int
    phases: tuple[str, ...]

    def timeline(self, points: int = 80) -> tuple[TimelinePoint, ...]:
        """About ``points`` runs of ops, phases kept apart; the peak is always one of them."""
        return downsample(self.live, self.phases, points)


@dataclass(frozen=True, slots=True)
class Fit:
    """The peak against what the device offers; every figure in bytes.

    ``context_bytes`` is what the driver's context takes, None where the device's data does not know it: then ``fits``
    speaks of live tensors alone. ``fits`` is None where the visible capacity is unknown.
    """

    peak_bytes: int
    visible_bytes: int | None
    context_bytes: int | None
    fits: bool | None
    headroom_bytes: int | None


def memory(trace: Trace, *, without: Collection[int] = ()) -> MemoryLedger:
    """The memory ledger of a trace, in time linear in its ops and storages.

    ``without`` names storages (ids) that a response would not allocate: the ledger of the transformed step.
    """
    dropped = frozenset(without)
    storages = tuple(s for s in trace.storages if s.id not in dropped) if dropped else trace.storages
    count = len(trace.ops)
    live = _live(storages, count)
    resident = sum(s.nbytes for s in storages if s.born < 0)
    peak_bytes = max(live, default=resident)
    peak_op = live.index(peak_bytes) if live else -1
    alive = [s for s in storages if _alive(s, peak_op)]
    phases = tuple(op.phase for op in trace.ops)
    role_peaks = _role_peaks(storages, count)
    return MemoryLedger(
        live=tuple(live),
        peak_bytes=peak_bytes,
        peak_at=_peak_at(trace.ops, peak_op),
        by_role=_sums((s.role, s.nbytes) for s in alive),
        by_module=_sums((module_group(s.module), s.nbytes) for s in alive),
        role_peaks=role_peaks,
        phase_peaks=_phase_peaks(live, phases),
        states=States(
            weights=role_peaks.get("parameter", 0),
            buffers=role_peaks.get("buffer", 0),
            gradients=role_peaks.get("gradient", 0),
            optimizer_state=role_peaks.get("optimizer_state", 0),
            master_weights=role_peaks.get("master_weight", 0),
        ),
        resident_bytes=resident,
        phases=phases,
    )


def fit(peak_bytes: int, visible_bytes: int | None, context_bytes: int | None = None) -> Fit:
    """Compare a peak with the visible capacity, context included where it is known."""
    if visible_bytes is None:
        return Fit(peak_bytes, None, context_bytes, None, None)
    headroom = visible_bytes - peak_bytes - (context_bytes or 0)
    return Fit(peak_bytes, visible_bytes, context_bytes, headroom >= 0, headroom)


def downsample(live: Sequence[int], phases: Sequence[str], points: int) -> tuple[TimelinePoint, ...]:
    """Cut the ops into pieces of one phase each and keep the maximum of every piece.

    A run of one phase gets points in proportion to its ops, but a short one enough to be seen (an optimizer of twelve
    foreach ops beside thousands of others), so the result may exceed ``points`` a little.
    """
    runs = [(phase, len(list(run))) for phase, run in groupby(phases)]
    least = max(1, min(_LEAST_POINTS, points // (2 * len(runs)))) if runs else 1
    result: list[TimelinePoint] = []
    first = 0
    for phase, length in runs:
        pieces = min(length, max(least, round(points * length / len(live))))
        for piece in range(pieces):
            start, end = first + piece * length // pieces, first + (piece + 1) * length // pieces
            result.append(TimelinePoint(start, phase, max(live[start:end])))
        first += length
    return tuple(result)


def _alive(storage: Storage, op: int) -> bool:
    """Alive during ``op``: a storage counts at both ends of its life."""
    return storage.born <= op and (storage.died is None or storage.died >= op)


def _live(storages: Iterable[Storage], count: int) -> list[int]:
    """Bytes alive during each of ``count`` ops, by prefix sums over births and deaths."""
    change = [0] * (count + 1)
    for s in storages:
        if s.died is not None and s.died < max(s.born, 0):
            continue  # gone before the first op: never alive during any
        change[min(max(s.born, 0), count)] += s.nbytes
        if s.died is not None and s.died < count:
            change[s.died + 1] -= s.nbytes
    return list(accumulate(change[:count]))


def _role_peaks(storages: Sequence[Storage], count: int) -> dict[str, int]:
    by_role: dict[Role, list[Storage]] = {}
    for s in storages:
        by_role.setdefault(s.role, []).append(s)
    peaks = {
        role: max(_live(members, count), default=sum(s.nbytes for s in members if s.born < 0))
        for role, members in by_role.items()
    }
    return dict(sorted(peaks.items(), key=lambda item: -item[1]))


def _phase_peaks(live: Sequence[int], phases: Sequence[str]) -> tuple[PhasePeak, ...]:
    best: dict[str, tuple[int, int]] = {}
    for index, (nbytes, phase) in enumerate(zip(live, phases, strict=True)):
        if phase not in best or nbytes > best[phase][0]:
            best[phase] = (nbytes, index)
    return tuple(PhasePeak(phase, *best[phase]) for phase in PHASES if phase in best)


def _peak_at(ops: Sequence[Op], index: int) -> PeakAt:
    if index < 0:
        return PeakAt(-1, "", "", "")
    op = ops[index]
    return PeakAt(index, op.module, op.phase, op.operator)


def _sums(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for key, nbytes in pairs:
        totals[key] = totals.get(key, 0) + nbytes
    return dict(sorted(totals.items(), key=lambda item: -item[1]))
