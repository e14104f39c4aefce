"""Coverage: which share of ops, of arithmetic and of bytes stands on a known formula."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rooftile.capture.trace import Trace
from rooftile.costs.record import Cost

__all__ = ["coverage_section"]


def coverage_section(trace: Trace, costs: Sequence[Cost | None]) -> dict[str, Any]:
    """Fractions 0..1, and the operators without a formula by name and number.

    ``ops`` is of all ops; ``flops`` of the ops that compute, an unknown one counted as computing; ``bytes`` of bytes,
    an unknown op standing for its operands and results read and written once.
    """
    unknown: Counter[str] = Counter()
    known_bytes = unknown_bytes = arithmetic = 0
    for op, cost in zip(trace.ops, costs, strict=True):
        if cost is None:
            unknown[op.call.operator] += 1
            unknown_bytes += sum(meta.nbytes for meta in (*op.call.inputs, *op.call.outputs))
        else:
            known_bytes += cost.bytes
            arithmetic += cost.flops > 0
    missing = unknown.total()
    return {
        "ops": _fraction(len(trace.ops) - missing, len(trace.ops)),
        "flops": _fraction(arithmetic, arithmetic + missing),
        "bytes": _fraction(known_bytes, known_bytes + unknown_bytes),
        "unknown_ops": sorted(unknown),
        "unknown_counts": dict(sorted(unknown.items())),
        "ops_total": len(trace.ops),
    }


def _fraction(part: int, whole: int) -> float:
    """An empty whole is covered."""
    return part / whole if whole else 1.0
