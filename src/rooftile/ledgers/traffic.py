"""Traffic: the bytes that cross the device-memory boundary, by operator family and phase, and what would remove them.

``unfused``: every op reads its inputs and writes its outputs once. ``fused``: chains of elementwise ops keep their
intermediates on chip. Both are derived; neither is a measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rooftile.capture.trace import PHASES, Trace
from rooftile.costs.record import Cost
from rooftile.ledgers.materialized import MaterializedAttention

__all__ = ["FamilyTraffic", "TrafficLedger", "traffic"]


@dataclass(frozen=True, slots=True)
class FamilyTraffic:
    """Bytes of one family under both schedules, and how many ops they are."""

    family: str
    ops: int
    unfused: int
    fused: int


@dataclass(frozen=True, slots=True)
class TrafficLedger:
    """Bytes at the device-memory boundary. ``unknown_ops`` counts ops without a cost: then every sum is a lower bound.

    ``fusion_removes`` is unfused minus fused. ``tiling_removes`` is what materialised attention moves for its scores,
    unfused; part of it may also be in ``fusion_removes``, so the two don't add.
    """

    unfused: int
    fused: int
    by_family: tuple[FamilyTraffic, ...]
    by_phase: dict[str, int]
    fusion_removes: int
    tiling_removes: int
    unknown_ops: int


def traffic(
    trace: Trace,
    costs: Sequence[Cost | None],
    fused_bytes: Sequence[int],
    attention: Sequence[MaterializedAttention] = (),
) -> TrafficLedger:
    """Sum the bytes of a step. ``costs`` and ``fused_bytes`` have one entry an op; an unknown op has no cost."""
    ops: dict[str, int] = {}
    unfused: dict[str, int] = {}
    fused: dict[str, int] = {}
    by_phase: dict[str, int] = {}
    unknown = 0
    for op, cost, kept in zip(trace.ops, costs, fused_bytes, strict=True):
        if cost is None:
            unknown += 1
            continue
        family = cost.family
        ops[family] = ops.get(family, 0) + 1
        unfused[family] = unfused.get(family, 0) + cost.bytes
        fused[family] = fused.get(family, 0) + kept
        by_phase[op.phase] = by_phase.get(op.phase, 0) + cost.bytes
    total, total_fused = sum(unfused.values()), sum(fused.values())
    return TrafficLedger(
        unfused=total,
        fused=total_fused,
        by_family=tuple(
            FamilyTraffic(family, ops[family], unfused[family], fused[family])
            for family in sorted(unfused, key=lambda f: -unfused[f])
        ),
        by_phase={phase: by_phase[phase] for phase in PHASES if phase in by_phase},
        fusion_removes=total - total_fused,
        tiling_removes=sum(a.moved_bytes for a in attention),
        unknown_ops=unknown,
    )
