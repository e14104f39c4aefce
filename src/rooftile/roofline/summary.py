"""A whole step under the roofs: total, per family, and the operators that weigh most."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rooftile.capture.trace import Call, Phase, Trace
from rooftile.costs.record import Cost, Family
from rooftile.devices import Device
from rooftile.errors import UsageError
from rooftile.roofline.bound import Bound, Limit, bound_of, ridges

__all__ = ["FamilyRow", "OpRow", "RooflineSummary", "summary"]


@dataclass(frozen=True, slots=True)
class FamilyRow:
    """All operators of one family: sums of their FLOPs, bytes and bounds (seconds)."""

    family: Family
    ops: int
    flops: int
    bytes: int
    bound_s: float
    compute_bound_s: float  # the part of bound_s whose operators are bound by arithmetic

    @property
    def intensity(self) -> float | None:
        """FLOP/byte; None where nothing moves."""
        return self.flops / self.bytes if self.bytes else None

    @property
    def limit(self) -> Limit:
        """What bounds the larger part of its time."""
        return "compute" if self.compute_bound_s > self.bound_s / 2 else "memory"


@dataclass(frozen=True, slots=True)
class OpRow:
    """Executions of one Call at one place of the model: ``module`` has ``*`` for the numbers of repeated layers."""

    call: Call
    module: str
    phase: Phase
    family: Family
    count: int
    flops: int  # of all executions
    bytes: int
    bound_s: float
    limit: Limit
    roof: str  # input dtype of the peak it stands under, "memory" where bytes bound it

    @property
    def operator(self) -> str:
        """The full operator name, such as ``aten.mm.default``."""
        return self.call.operator

    @property
    def intensity(self) -> float | None:
        """FLOP/byte; None where nothing moves."""
        return self.flops / self.bytes if self.bytes else None


@dataclass(frozen=True, slots=True)
class RooflineSummary:
    """Bounds of a step in seconds, summed operator by operator (``max(FLOPs/roof, bytes/bandwidth)`` each).

    ``lower_bound`` is true where something is missing from the sum: operators without a formula (``unknown_ops``,
    by name) or dtypes whose peak is not published (``unknown_roofs``).
    """

    device: str
    schedule: str
    bound_s: float
    compute_bound_s: float
    flops: int
    bytes: int
    ridge: dict[str, float]  # FLOP/byte by input dtype
    families: tuple[FamilyRow, ...]  # the one that bounds longest first
    heaviest: tuple[OpRow, ...]
    unknown_ops: tuple[str, ...]
    unknown_roofs: tuple[str, ...]

    @property
    def lower_bound(self) -> bool:
        """Whether FLOPs, bytes and bound leave something out."""
        return bool(self.unknown_ops or self.unknown_roofs)

    @property
    def intensity(self) -> float | None:
        """FLOP/byte of the whole step; None where nothing moves."""
        return self.flops / self.bytes if self.bytes else None

    @property
    def limit(self) -> Limit:
        """What bounds the larger part of the step."""
        return "compute" if self.compute_bound_s > self.bound_s / 2 else "memory"


@dataclass(frozen=True, slots=True)
class _Group:
    """Equal executions: one Call at one place, with the same bytes."""

    call: Call
    module: str
    phase: Phase
    cost: Cost
    bytes: int  # of one execution
    count: int


def summary(
    trace: Trace,
    costs: Sequence[Cost | None],
    device: Device,
    *,
    allow_tf32: bool = False,
    op_bytes: Sequence[int] | None = None,
    schedule: str = "unfused",
    top: int = 10,
) -> RooflineSummary:
    """Place a step under the roofs of ``device``.

    ``costs`` has one entry an op (None: no formula); ``op_bytes`` replaces their bytes, one entry an op, for another
    ``schedule``. ``top`` is how many of the heaviest rows to keep. Raises UsageError for a dtype that the device lacks.
    """
    if len(costs) != len(trace.ops) or (op_bytes is not None and len(op_bytes) != len(trace.ops)):
        raise UsageError(
            f"{len(trace.ops)} ops, {len(costs)} costs and {'no' if op_bytes is None else len(op_bytes)} byte counts; "
            "give one cost (and one byte count) an op"
        )
    groups, unknown = _grouped(trace, costs, op_bytes)
    bounds: dict[tuple[Cost, int], Bound] = {}
    rows: list[tuple[_Group, Bound]] = []
    for group in groups:
        key = (group.cost, group.bytes)
        if key not in bounds:
            bounds[key] = bound_of(group.cost, device, allow_tf32=allow_tf32, bytes_moved=group.bytes)
        rows.append((group, bounds[key]))
    families = _family_rows(rows)
    return RooflineSummary(
        device=device.name,
        schedule=schedule,
        bound_s=sum(row.bound_s for row in families),
        compute_bound_s=sum(row.compute_bound_s for row in families),
        flops=sum(row.flops for row in families),
        bytes=sum(row.bytes for row in families),
        ridge=ridges(device),
        families=families,
        heaviest=_heaviest(rows)[:top],
        unknown_ops=unknown,
        unknown_roofs=_unknown_roofs(rows, device),
    )


def _grouped(
    trace: Trace, costs: Sequence[Cost | None], op_bytes: Sequence[int] | None
) -> tuple[list[_Group], tuple[str, ...]]:
    """Ops counted by what they are (50,000 come to a few hundred groups), and the operators without a cost."""
    # Calls are shared by the equal layers of a model, so identity is a cheap key; equal ones meet later.
    counts: Counter[tuple[int, str, Phase, int]] = Counter()
    seen: dict[int, tuple[Call, Cost]] = {}
    unknown: dict[str, None] = {}
    patterns: dict[str, str] = {}
    moved: Iterable[int | None] = op_bytes if op_bytes is not None else (None,) * len(costs)
    for op, cost, nbytes in zip(trace.ops, costs, moved, strict=True):
        call = op.call
        if cost is None:
            unknown[call.operator] = None
            continue
        pattern = patterns.get(op.module)
        if pattern is None:
            pattern = patterns[op.module] = re.sub(r"\b\d+\b", "*", op.module)
        seen[id(call)] = (call, cost)
        counts[id(call), pattern, op.phase, cost.bytes if nbytes is None else nbytes] += 1
    groups = [
        _Group(seen[call_id][0], module, phase, seen[call_id][1], nbytes, count)
        for (call_id, module, phase, nbytes), count in counts.items()
    ]
    return groups, tuple(sorted(unknown))


def _family_rows(rows: list[tuple[_Group, Bound]]) -> tuple[FamilyRow, ...]:
    by_family: dict[Family, list[tuple[_Group, Bound]]] = {}
    for group, bound in rows:
        by_family.setdefault(group.cost.family, []).append((group, bound))
    made = [
        FamilyRow(
            family=family,
            ops=sum(group.count for group, _ in members),
            flops=sum(group.cost.flops * group.count for group, _ in members),
            bytes=sum(group.bytes * group.count for group, _ in members),
            bound_s=sum(bound.seconds * group.count for group, bound in members),
            compute_bound_s=sum(bound.seconds * group.count for group, bound in members if bound.limit == "compute"),
        )
        for family, members in by_family.items()
    ]
    return tuple(sorted(made, key=lambda row: -row.bound_s))


def _heaviest(rows: list[tuple[_Group, Bound]]) -> tuple[OpRow, ...]:
    by_place: dict[tuple[Call, str, Phase], list[tuple[_Group, Bound]]] = {}
    for group, bound in rows:
        by_place.setdefault((group.call, group.module, group.phase), []).append((group, bound))
    made = []
    for (call, module, phase), members in by_place.items():
        group, bound = max(members, key=lambda member: member[1].seconds * member[0].count)
        by_bytes = bound.limit == "memory" or bound.roof is None
        made.append(
            OpRow(
                call=call,
                module=module,
                phase=phase,
                family=group.cost.family,
                count=sum(g.count for g, _ in members),
                flops=sum(g.cost.flops * g.count for g, _ in members),
                bytes=sum(g.bytes * g.count for g, _ in members),
                bound_s=sum(b.seconds * g.count for g, b in members),
                limit=bound.limit,
                roof="memory" if by_bytes or bound.roof is None else bound.roof.input,
            )
        )
    return tuple(sorted(made, key=lambda row: -row.bound_s))


def _unknown_roofs(rows: list[tuple[_Group, Bound]], device: Device) -> tuple[str, ...]:
    """What has FLOPs but no published peak on the device."""
    missing: dict[str, None] = {}
    for group, bound in rows:
        if bound.compute_seconds is None:
            if group.cost.roof == "matmul" and not device.supports(group.cost.roof_dtype):
                missing[f"{group.cost.roof_dtype} products"] = None
            else:
                missing["fp32 vector arithmetic"] = None
    return tuple(missing)
