"""A cache of keys and values that decoding attends to where it lies, contiguous or in pages.

    cache = KVCache(batch, kv_heads, capacity, head_dim, dtype=torch.bfloat16)
    cache.append(k, v)                                          # the prompt, (B, Hkv, L, D)
    out = cache.attend(q, mask=causal(align="bottom-right"))    # its queries, (B, Hq, L, D)
    cache.append(k, v); out = cache.attend(q)                   # one more token, again and again

Nothing of a sequence's result depends on the capacity, on the page size, on what other sequences of the batch hold, or
on what lies in memory that no key was written to: not a bit of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, Self

import torch
from torch import Tensor

from rooftile._attention.arguments import checked_scale, checked_sinks, checked_softcap
from rooftile._attention.cached_attention import CachedCall, attend_cached
from rooftile._attention.kv_arguments import (
    SlidingWindow,
    autocast_to,
    check_eviction,
    check_forgotten,
    check_keys_and_values,
    check_no_gradient,
    check_queries,
    check_row_mask,
    check_size,
    checked_lengths,
    empty_memory,
)
from rooftile._attention.kv_storage import BLOCK, Contiguous, Paged, Storage
from rooftile.errors import UsageError
from rooftile.masks import Mask

__all__ = ["KVCache", "SlidingWindow"]

_NO_GRAPH = "the lengths of a KVCache are Python integers, and a graph would be compiled anew for each"


class KVCache:
    """Keys (B, Hkv, capacity, D) and values (B, Hkv, capacity, Dv) of one layer, of which each sequence fills its part.

    ``capacity`` is the number of keys a sequence may hold. When it is reached ``eviction`` decides: "refuse" raises,
    and :class:`SlidingWindow` forgets what its window has left behind; then ``capacity`` must hold the window and a
    chunk of appended tokens less one, and the storage is :data:`~rooftile._attention.kv_storage.BLOCK` - 1 keys longer,
    so that forgetting moves whole blocks. The cache has no gradient, and no call of it may run under autograd.

    Raises :class:`~rooftile.errors.UsageError` for sizes below 1 and for dtypes that attention doesn't take.
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        eviction: Literal["refuse"] | SlidingWindow = "refuse",
    ) -> None:
        check_size("KVCache", "capacity", capacity)
        check_eviction(eviction)
        slots = capacity
        if isinstance(eviction, SlidingWindow):
            if capacity < eviction.keys:
                raise UsageError(
                    f"a capacity of {capacity:,} can't hold the {eviction.keys:,} keys of {eviction}: make it at least "
                    "that, and larger by the longest chunk that is appended at once, less one"
                )
            slots = capacity + BLOCK - 1
        keys, values = empty_memory(batch, kv_heads, slots, head_dim, value_dim, dtype, device)
        self._set_up(Contiguous(keys, values, capacity), batch, eviction)

    @classmethod
    def paged(
        cls,
        batch: int,
        kv_heads: int,
        pages: int,
        page_size: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        eviction: Literal["refuse"] | SlidingWindow = "refuse",
    ) -> Self:
        """A cache in ``pages`` pages of ``page_size`` keys that all sequences draw from: (pages, Hkv, page_size, D).

        A sequence takes pages as it grows, and gives them back when it is cleared or when a window has left them
        behind.
        """
        for name, size in (("batch", batch), ("pages", pages), ("page_size", page_size)):
            check_size("KVCache.paged", name, size)
        check_eviction(eviction)
        keys, values = empty_memory(pages, kv_heads, page_size, head_dim, value_dim, dtype, device)
        cache = cls.__new__(cls)
        cache._set_up(Paged(keys, values, batch), batch, eviction)
        return cache

    def _set_up(self, storage: Storage, batch: int, eviction: Literal["refuse"] | SlidingWindow) -> None:
        self._storage = storage
        self._window = eviction.keys if isinstance(eviction, SlidingWindow) else None
        self._seen = [0] * batch
        self._ragged: tuple[int, list[int]] | None = None  # rows and lengths of the last append, if it gave lengths

    # ---------------------------------------------------------------------------------------------------- what it holds
    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self._seen)

    @property
    def positions(self) -> Tensor:
        """int64 (B,): tokens appended to each sequence, which is the position of its next token."""
        return torch.tensor(self._seen, dtype=torch.int64)

    @property
    def lengths(self) -> Tensor:
        """int64 (B,): keys of each sequence, at most those that the window keeps."""
        return torch.tensor([self._length(b) for b in range(self.batch)], dtype=torch.int64)

    def _length(self, sequence: int) -> int:
        seen = self._seen[sequence]
        return seen if self._window is None else min(seen, self._window)

    @property
    def bytes(self) -> int:
        """Bytes of the memory that the cache occupies, whether or not a key was written to it."""
        return sum(stored.numel() * stored.element_size() for stored in (self._storage.keys, self._storage.values))

    @property
    def used_bytes(self) -> int:
        """Bytes of the keys and values that :attr:`lengths` counts."""
        keys, values = self._storage.keys, self._storage.values
        return (
            sum(map(self._length, range(self.batch)))
            * keys.shape[1]
            * (keys.shape[3] + values.shape[3])
            * keys.itemsize
        )

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds. Raises :class:`~rooftile.errors.UsageError` for a contiguous cache."""
        if not isinstance(self._storage, Paged):
            raise UsageError("a contiguous cache has no pages: ask for lengths, or make the cache with KVCache.paged")
        return self._storage.free_pages

    def __repr__(self) -> str:
        keys = self._storage.keys
        return (
            f"KVCache({type(self._storage).__name__.lower()}, keys {tuple(keys.shape)} {keys.dtype}, "
            f"lengths {self.lengths.tolist()}, {self.used_bytes:,} of {self.bytes:,} bytes used)"
        )

    # ---------------------------------------------------------------------------------------------------------- writing
    @torch.compiler.disable(reason=_NO_GRAPH)  # type: ignore[untyped-decorator]
    def append(self, k: Tensor, v: Tensor, lengths: Tensor | Sequence[int] | None = None) -> None:
        """Append keys ``k`` (B, Hkv, L, D) and values ``v`` (B, Hkv, L, Dv), of which sequence b has the first
        ``lengths[b]``.

        All L by default. Raises :class:`~rooftile.errors.UsageError`, and leaves the cache as it was, for other shapes,
        dtypes or devices, for lengths outside [0, L], under autograd, and when the tokens don't fit.
        """
        k, v = autocast_to(self._storage.keys, k, v)
        check_keys_and_values(k, v, self._storage, self.batch)
        added = checked_lengths(lengths, self.batch, k.shape[2])
        keep_from = [0 if self._window is None else max(0, seen + 1 - self._window) for seen in self._seen]
        shortage = self._storage.shortage(self._seen, added, keep_from)
        if shortage is not None:
            raise UsageError(f"{shortage}: {self._way_out()}")
        self._storage.make_room(self._seen, added, keep_from)
        for b, (seen, new) in enumerate(zip(self._seen, added, strict=True)):
            taken = 0
            for span in self._storage.spans(b, seen, new):
                where, source = slice(span.slot, span.slot + span.length), slice(taken, taken + span.length)
                self._storage.keys[span.row, :, where] = k[b, :, source]
                self._storage.values[span.row, :, where] = v[b, :, source]
                taken += span.length
        self._seen = [seen + new for seen, new in zip(self._seen, added, strict=True)]
        self._ragged = None if lengths is None else (k.shape[2], added)

    def clear(self, sequences: Iterable[int] | None = None) -> None:
        """Forget the given ``sequences`` of the batch (all by default); the next token of each has position 0."""
        if sequences is not None and not isinstance(sequences, Iterable):
            raise UsageError(f"clear({sequences!r}): pass the sequences' numbers in a list")
        chosen = range(self.batch) if sequences is None else list(sequences)
        for b in chosen:
            if not 0 <= b < self.batch:
                raise UsageError(f"there is no sequence {b} to clear: the batch has sequences 0 to {self.batch - 1}")
        for b in chosen:
            self._storage.clear(b)
            self._seen[b] = 0
        self._ragged = None

    def _way_out(self) -> str:
        grow = "more pages" if isinstance(self._storage, Paged) else "a larger capacity"
        if self._window is None:
            return f"make the cache with {grow}, clear() a sequence, or let it forget with eviction=SlidingWindow(n)"
        return f"append fewer tokens at once, or make the cache with {grow}"

    # -------------------------------------------------------------------------------------------------------- attention
    @torch.compiler.disable(reason=_NO_GRAPH)  # type: ignore[untyped-decorator]
    def attend(
        self,
        q: Tensor,
        *,
        lengths: Tensor | Sequence[int] | None = None,
        mask: Mask | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        return_lse: bool = False,
        kernel: str | tuple[str, ...] = "auto",
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of queries ``q`` (B, Hq, Lq, D) over the cached keys: (B, Hq, Lq, Dv) in q's dtype, and the LSE.

        The queries of sequence b are its first ``lengths[b]`` rows (all Lq by default; a row beyond them gives 0 and an
        LSE of -inf, its sink where there are sinks), and they are its *last* tokens: their keys have been appended.
        One row needs no mask, it sees all keys of its sequence. Several rows need one of ``causal``, ``window`` and
        ``prefix`` (or an intersection), with its ``align`` said, which each sequence reads with its own lengths. No key
        is gathered: a contiguous cache is read as strided views, pages through their table, or, where the compiled
        kernel is missing, block by block.

        Raises :class:`~rooftile.errors.UsageError` for what :func:`rooftile.attention` refuses, for masks that hold
        tensors, for queries whose window reaches back beyond what the cache has kept, and under autograd.
        """
        (q,) = autocast_to(self._storage.keys, q)
        check_queries(q, self._storage, self.batch)
        rows = checked_lengths(lengths, self.batch, q.shape[2])
        if lengths is None and self._ragged is not None and self._ragged[0] == q.shape[2] > 0:
            raise UsageError(
                f"the last append gave lengths {self._ragged[1]} of {q.shape[2]} rows: say lengths= for the queries "
                "too, so that the rows behind them are no tokens"
            )
        check_forgotten(rows, self._seen, self._window, self._storage)
        check_row_mask(mask, q.shape[2])
        if sinks is not None:
            checked_sinks(sinks, q)
            check_no_gradient("sinks", sinks)
        call = CachedCall(
            storage=self._storage,
            q=q,
            rows=rows,
            seen=self._seen,
            mask=mask,
            window=self._window,
            sinks=sinks,
            scale=checked_scale(scale, q.shape[3]),
            softcap=checked_softcap(softcap),
            kernel=kernel,
        )
        out, lse = attend_cached(call)
        return (out, lse) if return_lse else out
