"""Masks that transformers' own are read into, beside those of :mod:`rooftile.masks`: a shifted band, and given rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rooftile.errors import UsageError
from rooftile.masks import Mask
from rooftile.masks.base import Interval

__all__ = ["Band", "Rows"]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Band(Mask):
    """Query ``i`` stands at key ``i + shift`` and sees ``left`` keys behind it to ``right`` ahead; None: no end there.

    With a cache that has room to spare, or that has dropped its first keys, neither the first nor the last query
    stands on a first or last key: ``shift`` is the position of query 0 minus that of key 0.
    """

    left: int | None
    right: int | None
    shift: int

    @property
    def ends_at_query(self) -> bool:
        """Whether no key after the query is seen."""
        return self.right == 0

    def sees(self, i: Tensor, j: Tensor, q_len: int, kv_len: int) -> Tensor:  # noqa: ARG002
        """Key ``j`` is at most ``left`` behind and ``right`` ahead."""
        ahead = j - (i + self.shift)
        seen = torch.ones_like(ahead, dtype=torch.bool)
        if self.left is not None:
            seen = seen & (ahead >= -self.left)
        return seen if self.right is None else seen & (ahead <= self.right)

    def interval(self, i: Tensor, q_len: int | Tensor, kv_len: int | Tensor) -> Interval:  # noqa: ARG002
        """``[position - left, position + right + 1)``."""
        at = i + self.shift
        return 0 if self.left is None else at - self.left, kv_len if self.right is None else at + (self.right + 1)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Rows(Mask):
    """Query ``i`` of sequence b sees the keys ``[lo, hi)``: integers (B or 1, Lq or 1), in order where not empty.

    Compares and hashes as itself: the values are not looked at.
    """

    lo: Tensor
    hi: Tensor
    ends_at_query: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The two ends."""
        return self.lo, self.hi

    @property
    def batch(self) -> int | None:
        """Sequences whose rows are given apart."""
        return self.lo.shape[0] if self.lo.shape[0] != 1 else None

    def check_lengths(self, q_len: int, kv_len: int) -> None:  # noqa: ARG002
        """One interval a query, or one for all."""
        if self.lo.shape[1] not in (1, q_len):
            raise UsageError(
                f"a mask of {self.lo.shape[1]} query rows was given for {q_len} queries; give one row each"
            )

    def sees(self, i: Tensor, j: Tensor, q_len: int, kv_len: int) -> Tensor:  # noqa: ARG002
        """Key ``j`` lies between the ends."""
        lo, hi = (end[:, None, :, None] for end in (self.lo, self.hi))
        return (j >= lo) & (j < hi)

    def interval(self, i: Tensor, q_len: int | Tensor, kv_len: int | Tensor) -> Interval:  # noqa: ARG002
        """The ends."""
        return self.lo, self.hi
