"""Collectives in a ring: bytes that each rank sends, and the least time a link allows. ``derived``, per rank.

Source: Patarin and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009): no algorithm
sends less per rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rooftile.devices import Link
from rooftile.errors import UsageError

__all__ = ["Collective", "CollectiveCost", "collective"]

Collective = Literal["all_reduce", "reduce_scatter", "all_gather"]

#: How often the tensor goes round: an all-reduce is a reduce-scatter and then an all-gather.
_ROUNDS: dict[Collective, int] = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """One collective as one rank sees it; ``seconds`` is a bound (bandwidth alone, no latency), None without a link."""

    operation: Collective
    ranks: int
    bytes_per_rank: float
    seconds: float | None
    convention: str
    unit: str = "bytes sent per rank"
    evidence: str = "derived"


def collective(operation: Collective, nbytes: float, ranks: int, link: Link | None = None) -> CollectiveCost:
    """Ring ``operation`` over ``ranks`` on a tensor of ``nbytes``: the whole one, before scattering or after gathering.

    Each rank sends ``(n - 1)/n`` of it, twice in an all-reduce, over one direction of ``link``. One rank sends nothing.
    Raises UsageError for an unknown operation, negative bytes or less than one rank.
    """
    if operation not in _ROUNDS:
        raise UsageError(f"operation is {operation!r}; choose one of {', '.join(_ROUNDS)}")
    if not nbytes >= 0 or ranks < 1:
        raise UsageError(f"nbytes is {nbytes} and ranks is {ranks}; bytes have to be 0 or more, ranks 1 or more")
    rounds = _ROUNDS[operation]
    sent = rounds * nbytes * (ranks - 1) / ranks
    return CollectiveCost(
        operation=operation,
        ranks=ranks,
        bytes_per_rank=sent,
        seconds=None if link is None else sent / link.one_direction,
        convention=f"ring, {rounds if rounds > 1 else ''}(n-1)/n of the whole tensor"
        + (f", one direction of {link.name}" if link else ""),
    )
