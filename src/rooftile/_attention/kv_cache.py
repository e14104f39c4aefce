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
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from rooftile._attention.arguments import checked_scale, checked_sinks, checked_softcap
from rooftile._attention.cached_attention import CachedCall, attend_cached
from rooftile._attention.kv_storage import BLOCK, Contiguous, Paged, Storage
from rooftile._attention.sequences import check_mask
from rooftile.errors import UsageError
from rooftile.masks import Mask, window

__all__ = ["KVCache", "SlidingWindow"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Keep the last ``keys`` keys of a sequence, and forget older ones when their memory is wanted.

    Every query sees at most the ``keys`` keys that end at its own position, whatever still lies in memory: attention
    over the cache is attention over the whole sequence under ``masks.window(keys)``.
    """

    keys: int

    def __post_init__(self) -> None:
        _check_size("SlidingWindow", "keys", self.keys)


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
        _check_size("KVCache", "capacity", capacity)
        _check_eviction(eviction)
        slots = capacity
        if isinstance(eviction, SlidingWindow):
            if capacity < eviction.keys:
                raise UsageError(
                    f"a capacity of {capacity:,} can't hold the {eviction.keys:,} keys of {eviction}: make it at least "
                    "that, and larger by the longest chunk that is appended at once, less one"
                )
            slots = capacity + BLOCK - 1
        keys, values = _allocate(batch, kv_heads, slots, head_dim, value_dim, dtype, device)
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
            _check_size("KVCache.paged", name, size)
        _check_eviction(eviction)
        keys, values = _allocate(pages, kv_heads, page_size, head_dim, value_dim, dtype, device)
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
    def append(self, k: Tensor, v: Tensor, lengths: Tensor | Sequence[int] | None = None) -> None:
        """Append keys ``k`` (B, Hkv, L, D) and values ``v`` (B, Hkv, L, Dv), of which sequence b has the first
        ``lengths[b]``.

        All L by default. Raises :class:`~rooftile.errors.UsageError`, and leaves the cache as it was, for other shapes,
        dtypes or devices, for lengths outside [0, L], under autograd, and when the tokens don't fit.
        """
        self._check_operands(k, v)
        added = self._checked_lengths(lengths, k.shape[2])
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
        LSE of -inf), and they are its *last* tokens: their keys have been appended. One row needs no mask, it sees all
        keys of its sequence. Several rows need one of ``causal``, ``window`` and ``prefix`` (or an intersection), with
        its ``align`` said, which each sequence reads with its own lengths. No key is gathered: a contiguous cache is
        read as strided views, pages through their table, or, where the compiled kernel is missing, block by block.

        Raises :class:`~rooftile.errors.UsageError` for what :func:`rooftile.attention` refuses, for masks that hold
        tensors, for queries whose window reaches back beyond what the cache has kept, and under autograd.
        """
        self._check_queries(q)
        rows = self._checked_lengths(lengths, q.shape[2])
        self._check_rows(rows, q.shape[2], lengths is None)
        if sinks is not None:
            checked_sinks(sinks, q)
            self._check_no_gradient("sinks", sinks)
        call = CachedCall(
            storage=self._storage,
            q=q,
            rows=rows,
            seen=self._seen,
            mask=self._whole_mask(mask, q.shape[2]),
            sinks=sinks,
            scale=checked_scale(scale, q.shape[3]),
            softcap=checked_softcap(softcap),
            kernel=kernel,
        )
        out, lse = attend_cached(call)
        return (out, lse) if return_lse else out

    def _whole_mask(self, mask: Mask | None, rows: int) -> Mask | None:
        """The caller's mask and the window of the eviction policy."""
        if mask is not None:
            check_mask(
                mask, "attention over a cache", "each sequence has its own keys there, and lengths= says its rows"
            )
        elif rows > 1:
            raise UsageError(
                f"{rows} query rows and no mask: say mask=causal(align='bottom-right') for the last {rows} tokens of "
                "each sequence, or append and attend one token at a time"
            )
        if self._window is None:
            return mask
        kept = window(self._window, align="bottom-right")
        return kept if mask is None else mask & kept

    def _check_rows(self, rows: list[int], padded: int, all_real: bool) -> None:
        if all_real and self._ragged is not None and self._ragged[0] == padded and padded > 0:
            raise UsageError(
                f"the last append gave lengths {self._ragged[1]} of {padded} rows: say lengths= for the queries too, "
                "so that the rows behind them are no tokens"
            )
        for b, (row_count, seen) in enumerate(zip(rows, self._seen, strict=True)):
            needed = 0 if self._window is None else max(0, seen - row_count + 1 - self._window)
            if row_count > seen:
                raise UsageError(
                    f"sequence {b} has {row_count} queries and holds {seen} keys: append the keys of the queries first"
                )
            if needed < self._storage.oldest(b) and row_count:
                raise UsageError(
                    f"the first query of sequence {b} sees keys from position {needed:,}, and those before "
                    f"{self._storage.oldest(b):,} are forgotten: attend right after each append, with the same rows"
                )

    # ----------------------------------------------------------------------------------------------------------- checks
    def _checked_lengths(self, lengths: Tensor | Sequence[int] | None, padded: int) -> list[int]:
        if lengths is None:
            return [padded] * self.batch
        if isinstance(lengths, Tensor):
            if lengths.is_floating_point() or lengths.dtype == torch.bool or lengths.ndim != 1:
                raise UsageError(f"lengths is {lengths.dtype} {tuple(lengths.shape)}: pass integers ({self.batch},)")
            lengths = lengths.tolist()
        counts = list(lengths)
        if len(counts) != self.batch or not all(isinstance(n, int) and 0 <= n <= padded for n in counts):
            raise UsageError(
                f"lengths is {counts}: pass one integer from 0 to {padded} for each of the {self.batch} sequences"
            )
        return counts

    def _check_operands(self, k: Tensor, v: Tensor) -> None:
        for name, given, stored in (("k", k, self._storage.keys), ("v", v, self._storage.values)):
            self._check_tensor(name, given, stored)
            _, heads, _, dim = stored.shape
            if given.shape[1] != heads or given.shape[3] != dim:
                raise UsageError(
                    f"{name} is {tuple(given.shape)} and the cache holds {heads} heads of {dim}: pass "
                    f"({self.batch}, {heads}, L, {dim})"
                )
        if k.shape[2] != v.shape[2]:
            raise UsageError(f"k has {k.shape[2]} tokens and v {v.shape[2]}: append both of the same tokens")

    def _check_queries(self, q: Tensor) -> None:
        keys = self._storage.keys
        self._check_tensor("q", q, keys)
        if q.shape[3] != keys.shape[3] or q.shape[1] == 0 or q.shape[1] % keys.shape[1]:
            raise UsageError(
                f"q is {tuple(q.shape)} and the cache holds {keys.shape[1]} heads of {keys.shape[3]}: pass a multiple "
                f"of {keys.shape[1]} query heads of {keys.shape[3]}"
            )

    def _check_tensor(self, name: str, given: Tensor, stored: Tensor) -> None:
        if given.ndim != 4 or given.shape[0] != self.batch:
            raise UsageError(
                f"{name} is {tuple(given.shape)}: pass (B, H, L, D) with the cache's {self.batch} sequences"
            )
        if given.dtype != stored.dtype or given.device != stored.device:
            raise UsageError(
                f"{name} is {given.dtype} on {given.device} and the cache {stored.dtype} on {stored.device}: convert "
                f"{name}, or make the cache with that dtype and device"
            )
        self._check_no_gradient(name, given)

    @staticmethod
    def _check_no_gradient(name: str, given: Tensor) -> None:
        if given.requires_grad and torch.is_grad_enabled():
            raise UsageError(
                f"{name} requires a gradient and a cache has none: run under torch.no_grad(), or detach {name}"
            )


def _allocate(
    rows: int,
    kv_heads: int,
    slots: int,
    head_dim: int,
    value_dim: int | None,
    dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[Tensor, Tensor]:
    value_dim = head_dim if value_dim is None else value_dim
    for name, size in (("batch", rows), ("kv_heads", kv_heads), ("head_dim", head_dim), ("value_dim", value_dim)):
        _check_size("KVCache", name, size)
    if dtype not in _DTYPES:
        raise UsageError(f"KVCache(dtype={dtype}): attention takes {', '.join(map(str, _DTYPES))}")
    keys = torch.empty(rows, kv_heads, slots, head_dim, dtype=dtype, device=device)
    return keys, torch.empty(rows, kv_heads, slots, value_dim, dtype=dtype, device=device)


def _check_size(owner: str, name: str, size: int) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise UsageError(f"{owner}({name}={size!r}): pass a whole number, 1 or more")


def _check_eviction(eviction: object) -> None:
    if eviction != "refuse" and not isinstance(eviction, SlidingWindow):
        raise UsageError(f"eviction={eviction!r}: pass 'refuse' (an error at capacity) or SlidingWindow(n)")
