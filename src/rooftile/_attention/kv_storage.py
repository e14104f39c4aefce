"""Where the keys and values of a cache lie: one run of slots a sequence, or pages out of a pool.

Both storages answer the same questions. A *position* is a token's place in its sequence, from 0 and for good; a
*coordinate* is the index by which attention addresses the key. Attention reads whole blocks of :data:`BLOCK`
coordinates, and what a storage forgets leaves every other key in its place within its block: that is why results don't
depend, to the bit, on capacity, page size or what has been evicted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["BLOCK", "Contiguous", "Paged", "Span", "Storage"]

#: Keys of a block: a multiple of the key tiles of every kernel (96 and 128 in the compiled one).
BLOCK = 768


@dataclass(frozen=True, slots=True)
class Span:
    """``length`` keys of one sequence that lie side by side: in ``row`` of the storage, from ``slot`` on."""

    row: int
    slot: int
    length: int


class Storage(ABC):
    """Keys (rows, Hkv, slots, D) and values (rows, Hkv, slots, Dv). Unwritten memory has any content."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys
        self.values = values

    @abstractmethod
    def shortage(self, seen: Sequence[int], added: Sequence[int], keep_from: Sequence[int]) -> str | None:
        """Why ``added`` tokens a sequence don't fit behind the ``seen`` ones, or None. Changes nothing.

        ``keep_from``: positions below it may be forgotten.
        """

    @abstractmethod
    def make_room(self, seen: Sequence[int], added: Sequence[int], keep_from: Sequence[int]) -> None:
        """Forget what must be, and take what ``added`` tokens a sequence need. Only after ``shortage`` said None."""

    @abstractmethod
    def spans(self, sequence: int, position: int, count: int) -> Iterator[Span]:
        """Where positions ``position`` to ``position + count`` of a sequence lie."""

    @abstractmethod
    def origin(self, sequence: int) -> int:
        """The position that has coordinate 0."""

    @abstractmethod
    def oldest(self, sequence: int) -> int:
        """The oldest position that is still there."""

    @abstractmethod
    def spanning(self, batch: int, extent: int) -> tuple[Tensor, Tensor]:
        """Keys (B, Hkv, extent, D) and values of the first ``extent`` coordinates, without a copy.

        Pages give the shape alone: that of every key is the memory of one.
        """

    @abstractmethod
    def block(self, start: int) -> tuple[Tensor, Tensor]:
        """Keys and values from coordinate ``start`` on: (B, Hkv, BLOCK, D), a copy with any content beyond the end."""

    @abstractmethod
    def clear(self, sequence: int) -> None:
        """Forget the whole sequence."""


class Contiguous(Storage):
    """One run of slots a sequence: (B, Hkv, slots, D), of which ``capacity`` may be in use."""

    def __init__(self, keys: Tensor, values: Tensor, capacity: int) -> None:
        super().__init__(keys, values)
        self.capacity = capacity
        self._origin = [0] * keys.shape[0]

    def shortage(self, seen: Sequence[int], added: Sequence[int], keep_from: Sequence[int]) -> str | None:
        """See :class:`Storage`."""
        for b, (old, new, first) in enumerate(zip(seen, added, keep_from, strict=True)):
            if old - first + new > self.capacity:
                held, most = old - first, self.capacity
                return f"sequence {b} keeps {held:,} keys, and {new:,} more exceed the capacity of {most:,}"
        return None

    def make_room(self, seen: Sequence[int], added: Sequence[int], keep_from: Sequence[int]) -> None:
        """Move a sequence to the front by whole blocks, only when it would run over the end."""
        for b, (old, new) in enumerate(zip(seen, added, strict=True)):
            origin = self._moved_origin(b, old + new, keep_from[b])
            moved, kept = origin - self._origin[b], old - origin
            self._origin[b] = origin
            if moved and kept > 0:
                for stored in (self.keys, self.values):
                    stored[b, :, :kept] = stored[b, :, moved : moved + kept].clone()  # the two runs may overlap

    def _moved_origin(self, sequence: int, end: int, keep_from: int) -> int:
        """The origin that a sequence which ends at position ``end`` has: today's, unless that overruns the slots."""
        origin = self._origin[sequence]
        return origin if end - origin <= self.keys.shape[2] else max(origin, keep_from - keep_from % BLOCK)

    def spans(self, sequence: int, position: int, count: int) -> Iterator[Span]:
        """See :class:`Storage`; always one."""
        yield Span(sequence, position - self._origin[sequence], count)

    def origin(self, sequence: int) -> int:
        """See :class:`Storage`."""
        return self._origin[sequence]

    def oldest(self, sequence: int) -> int:
        """See :class:`Storage`."""
        return self._origin[sequence]

    def spanning(self, batch: int, extent: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """See :class:`Storage`."""
        return self.keys[:, :, :extent], self.values[:, :, :extent]

    def block(self, start: int) -> tuple[Tensor, Tensor]:
        """See :class:`Storage`."""
        held = slice(start, start + BLOCK)
        return _whole_block(self.keys[:, :, held]), _whole_block(self.values[:, :, held])

    def clear(self, sequence: int) -> None:
        """See :class:`Storage`."""
        self._origin[sequence] = 0


class Paged(Storage):
    """Pages (pages, Hkv, page_size, D) that the sequences of a batch take as they grow.

    The table of a sequence has an entry for every page that it ever had, so coordinates are positions; the entry of a
    page that was given back is 0, any valid page, and no row sees a key of it.
    """

    def __init__(self, keys: Tensor, values: Tensor, batch: int) -> None:
        super().__init__(keys, values)
        self.page_size = keys.shape[2]
        self._free = list(range(keys.shape[0] - 1, -1, -1))
        self._tables: list[list[int]] = [[] for _ in range(batch)]
        self._given_back = [0] * batch
        self._table: Tensor | None = None

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free)

    @property
    def table(self) -> Tensor:
        """int32 (B, pages of the longest sequence) on the cache's device: the page of each page index."""
        if self._table is None:
            longest = max((len(table) for table in self._tables), default=0)
            padded = [table + [0] * (longest - len(table)) for table in self._tables]
            self._table = torch.tensor(padded, dtype=torch.int32).reshape(len(padded), longest).to(self.keys.device)
        return self._table

    def shortage(self, seen: Sequence[int], added: Sequence[int], keep_from: Sequence[int]) -> str | None:
        """See :class:`Storage`."""
        wanted = sum(self._missing(b, old + new) for b, (old, new) in enumerate(zip(seen, added, strict=True)))
        returned = sum(self._stale(b, first) - self._given_back[b] for b, first in enumerate(keep_from))
        if wanted <= len(self._free) + returned:
            return None
        return (
            f"{sum(added):,} more tokens want {wanted:,} pages of {self.page_size}, and of {self.keys.shape[0]:,} "
            f"pages {len(self._free) + returned:,} are free"
        )

    def make_room(self, seen: Sequence[int], added: Sequence[int], keep_from: Sequence[int]) -> None:
        """Give back the pages that lie wholly below ``keep_from``, then take the missing ones."""
        for b, first in enumerate(keep_from):
            for index in range(self._given_back[b], self._stale(b, first)):
                self._free.append(self._tables[b][index])
                self._tables[b][index] = 0
                self._table = None
            self._given_back[b] = max(self._given_back[b], self._stale(b, first))
        for b, (old, new) in enumerate(zip(seen, added, strict=True)):
            for _ in range(self._missing(b, old + new)):
                self._tables[b].append(self._free.pop())
                self._table = None

    def _missing(self, sequence: int, end: int) -> int:
        return max(0, -(-end // self.page_size) - len(self._tables[sequence]))

    def _stale(self, sequence: int, keep_from: int) -> int:
        """Pages at the front of the table of which no key is to be kept."""
        return max(self._given_back[sequence], min(keep_from // self.page_size, len(self._tables[sequence])))

    def spans(self, sequence: int, position: int, count: int) -> Iterator[Span]:
        """See :class:`Storage`; one a page."""
        end = position + count
        while position < end:
            index, slot = divmod(position, self.page_size)
            length = min(self.page_size - slot, end - position)
            yield Span(self._tables[sequence][index], slot, length)
            position += length

    def origin(self, sequence: int) -> int:  # noqa: ARG002
        """See :class:`Storage`."""
        return 0

    def oldest(self, sequence: int) -> int:
        """See :class:`Storage`."""
        return self._given_back[sequence] * self.page_size

    def spanning(self, batch: int, extent: int) -> tuple[Tensor, Tensor]:
        """See :class:`Storage`; the shape alone."""
        keys, values = (stored[:1, :, :1].expand(batch, -1, extent, -1) for stored in (self.keys, self.values))
        return keys, values

    def block(self, start: int) -> tuple[Tensor, Tensor]:
        """See :class:`Storage`."""
        coordinates = torch.arange(start, start + BLOCK, device=self.keys.device)
        index = (coordinates // self.page_size).clamp(max=self.table.shape[1] - 1)
        pages, slots = self.table[:, index].long(), coordinates % self.page_size
        keys, values = self.keys[pages, :, slots], self.values[pages, :, slots]  # (B, BLOCK, Hkv, D)
        return _whole_block(keys.transpose(1, 2)), _whole_block(values.transpose(1, 2))

    def clear(self, sequence: int) -> None:
        """See :class:`Storage`."""
        self._free.extend(reversed(self._tables[sequence][self._given_back[sequence] :]))
        self._tables[sequence], self._given_back[sequence], self._table = [], 0, None


def _whole_block(keys: Tensor) -> Tensor:
    """In a layout of its own: a matrix product may round differently on other strides."""
    batch, heads, held, dim = keys.shape
    block = keys.new_empty(batch, heads, BLOCK, dim)
    block[:, :, :held] = keys
    return block
