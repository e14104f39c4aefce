"""Masks that only positions decide: causal, sliding window, prefix.

Positions need a meeting point as soon as there are more keys than queries, or fewer. ``align="bottom-right"`` puts the
last query on the last key (a decoder with a cache), ``align="top-left"`` the first query on the first key. There is no
default: libraries disagree, and a wrong one is a wrong result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.utils import _pytree

from rooftile.errors import UsageError
from rooftile.masks.base import Interval, Mask

__all__ = ["Align", "Causal", "Positional", "Prefix", "Window", "causal", "prefix", "window"]

#: More keys than any sequence has: distances beyond it say the same, and stay clear of the end of 64-bit integers.
_FARTHEST = 2**31

Align = Literal["bottom-right", "top-left"]
_ALIGNMENTS = ("bottom-right", "top-left")


class Positional(Mask):
    """A mask of positions: ``i`` + offset is where query ``i`` stands among the keys."""

    __slots__ = ()
    align: Align | None

    def check_lengths(self, q_len: int, kv_len: int) -> None:
        """An unset alignment is refused where it would matter."""
        if self.align is None and q_len != kv_len:
            raise UsageError(
                f"{self} of {q_len} queries and {kv_len} keys has two readings: align='bottom-right' puts the last "
                "query on the last key (decoding with a cache), align='top-left' the first query on the first key; "
                "say which"
            )

    def position(self, i: Tensor, q_len: int | Tensor, kv_len: int | Tensor) -> Tensor:
        """Where query ``i`` stands among the keys."""
        return i + (kv_len - q_len) if self.align == "bottom-right" else i


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Causal(Positional):
    """A query sees the keys up to its own position."""

    align: Align | None = None
    ends_at_query = True

    def __str__(self) -> str:
        return f"causal({_said(self.align)})"

    def sees(self, i: Tensor, j: Tensor, q_len: int, kv_len: int) -> Tensor:
        """Key ``j`` does not come after the query."""
        return j <= self.position(i, q_len, kv_len)

    def interval(self, i: Tensor, q_len: int | Tensor, kv_len: int | Tensor) -> Interval:
        """``[0, position + 1)``."""
        return 0, self.position(i, q_len, kv_len) + 1


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Window(Positional):
    """A query sees ``left`` keys before its position, its own, and ``right`` keys after it."""

    left: int
    right: int
    align: Align | None = None

    @property
    def ends_at_query(self) -> bool:
        """Whether no key after the query is seen."""
        return self.right == 0

    def __str__(self) -> str:
        size = f"{self.left + 1}" if self.right == 0 else f"left={self.left}, right={self.right}"
        return f"window({size}{_said(self.align, ', ')})"

    def sees(self, i: Tensor, j: Tensor, q_len: int, kv_len: int) -> Tensor:
        """Key ``j`` is at most ``left`` before and ``right`` after the query."""
        behind = self.position(i, q_len, kv_len) - j
        return (behind <= _within(self.left)) & (-behind <= _within(self.right))

    def interval(self, i: Tensor, q_len: int | Tensor, kv_len: int | Tensor) -> Interval:
        """``[position - left, position + right + 1)``."""
        at = self.position(i, q_len, kv_len)
        return at - _within(self.left), at + (_within(self.right) + 1)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Prefix(Positional):
    """A query sees the first ``length`` keys (all, where there are fewer) and those up to its own position."""

    length: int
    align: Align | None = None
    widens = True

    def __str__(self) -> str:
        return f"prefix({self.length}{_said(self.align, ', ')})"

    def sees(self, i: Tensor, j: Tensor, q_len: int, kv_len: int) -> Tensor:
        """Key ``j`` is of the prefix, or does not come after the query."""
        return (j < _within(self.length)) | (j <= self.position(i, q_len, kv_len))

    def interval(self, i: Tensor, q_len: int | Tensor, kv_len: int | Tensor) -> Interval:
        """``[0, max(length, position + 1))``."""
        return 0, (self.position(i, q_len, kv_len) + 1).clamp(min=_within(self.length))


def causal(align: Align | None = None) -> Causal:
    """Each query sees the keys up to its own position. ``align`` must be said where Lq and Lk differ."""
    return Causal(_alignment(align, "causal"))


def window(
    size: int | None = None, *, left: int | None = None, right: int | None = None, align: Align | None = None
) -> Window:
    """A sliding window: the ``size`` keys that end at the query's position, or ``left`` before and ``right`` after it.

    ``window(4)`` is four keys, the query's own among them, and is ``window(left=3, right=0)``. ``align`` must be said
    where Lq and Lk differ.
    """
    if size is not None:
        if left is not None or right is not None:
            raise UsageError(
                f"window({size}, left={left}, right={right}) says its size twice: give the number of keys, or both ends"
            )
        if _integer(size, "window", "size") < 1:
            raise UsageError(f"window({size}) shows no key: a window is a number of keys, at least 1")
        return Window(size - 1, 0, _alignment(align, "window"))
    if left is None or right is None:
        raise UsageError(
            f"window(left={left}, right={right}) is open at one end: give both, or a number of keys, or use causal()"
        )
    if _integer(left, "window", "left") < 0 or _integer(right, "window", "right") < 0:
        raise UsageError(f"window(left={left}, right={right}) leaves out the query's own position: both must be >= 0")
    return Window(left, right, _alignment(align, "window"))


def prefix(length: int, align: Align | None = None) -> Prefix:
    """Row ``i`` sees ``[0, max(length, i + 1))``: a prefix read in both directions, then causal (prefix-LM)."""
    if _integer(length, "prefix", "length") < 0:
        raise UsageError(f"prefix({length}) is no number of keys: give 0 or more")
    return Prefix(length, _alignment(align, "prefix"))


def _alignment(align: object, name: str) -> Align | None:
    if align is not None and align not in _ALIGNMENTS:
        raise UsageError(f"{name}(align={align!r}): align is 'bottom-right', 'top-left', or left out where Lq = Lk")
    return align  # type: ignore[return-value]


def _integer(value: object, name: str, argument: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise UsageError(f"{name}({argument}={value!r}) needs an integer, not {type(value).__name__}")
    return value  # type: ignore[return-value]


def _within(distance: int) -> int:
    return min(distance, _FARTHEST) if isinstance(distance, int) else distance


def _said(align: str | None, before: str = "") -> str:
    return f"{before}align={align!r}" if align else ""


for _mask in (Causal, Window, Prefix):  # an argument of an exported module: a constant of its graph
    _pytree.register_constant(_mask)
