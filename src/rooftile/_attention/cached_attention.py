"""Attention over a cache: which coordinates each row sees, and how the keys are reached without gathering them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rooftile._attention.call import Call, empty_result
from rooftile._attention.eager import attend
from rooftile._attention.kernels import select
from rooftile._attention.kv_storage import BLOCK, Paged, Storage
from rooftile._attention.paged import paged_attention
from rooftile._attention.sequences import check_mask_lengths, has_values, sequence_intervals
from rooftile._attention.state import AttentionState, merge
from rooftile.masks import Mask, Visibility, causal, window
from rooftile.masks.base import signed

__all__ = ["CachedCall", "attend_cached"]


@dataclass(frozen=True, slots=True)
class CachedCall:
    """One checked call of :meth:`~rooftile._attention.kv_cache.KVCache.attend`."""

    storage: Storage
    q: Tensor  # (B, Hq, Lq, D)
    rows: Sequence[int]  # of q that are tokens of the sequence, its last ones
    seen: Sequence[int]  # tokens of the sequence
    mask: Mask | None  # the caller's; None, of one row only: every key
    window: int | None  # the keys that the eviction policy lets a row see
    sinks: Tensor | None
    scale: float
    softcap: float
    kernel: object


def attend_cached(cached: CachedCall) -> tuple[Tensor, Tensor]:
    """``out`` (B, Hq, Lq, Dv) in q's dtype and the LSE (B, Hq, Lq)."""
    origins = [cached.storage.origin(b) for b in range(len(cached.seen))]
    extent = max(seen - origin for seen, origin in zip(cached.seen, origins, strict=True))
    keys, values = cached.storage.spanning(len(cached.seen), extent)
    call = Call(cached.q, keys, values, Visibility(), None, cached.sinks, cached.scale, cached.softcap, 0.0, None)
    if call.is_empty:
        return empty_result(call)
    name = select(cached.kernel, call, needs_grad=False)
    lo, hi = _coordinates(cached, origins)
    shapes_alone = not has_values(cached.q)  # an audit without data: one call, as the compiled kernel makes it
    if name != "native" and not shapes_alone:
        return _block_by_block(call, lo, hi, cached.storage, name)
    see = Visibility(*(end.to(cached.q.device) for end in (lo, hi)))
    alike = len(set(cached.seen)) == len(set(cached.rows)) == 1
    if alike and (cached.mask is None or not any(origins)):  # then a mask says what the rows see of the storage
        see = signed(lambda: _mask_of_all(cached), see)
    call = replace(call, visibility=see)
    if isinstance(cached.storage, Paged):
        return paged_attention(call, cached.storage.keys, cached.storage.values, cached.storage.table)
    return attend(call, False, name, with_grad=False)


def _mask_of_all(cached: CachedCall) -> Mask:
    """What the rows see of their sequence; one row without a mask sees what a causal one does."""
    mask = causal(align="bottom-right") if cached.mask is None else cached.mask
    return mask if cached.window is None else mask & window(cached.window, align="bottom-right")


def _coordinates(cached: CachedCall, origins: Sequence[int]) -> tuple[Tensor, Tensor]:
    """``lo`` and ``hi`` of every row as coordinates of the storage, int32 (B, Lq), on the CPU."""
    if cached.mask is None:  # one row, which sees what there is: worth no tensor arithmetic in every step of a decoder
        ends = [
            seen - origin if rows else 0 for rows, seen, origin in zip(cached.rows, cached.seen, origins, strict=True)
        ]
        starts = [0 if cached.window is None else max(0, end - cached.window) for end in ends]
        return torch.tensor(starts, dtype=torch.int32)[:, None], torch.tensor(ends, dtype=torch.int32)[:, None]
    mask = _mask_of_all(cached)
    check_mask_lengths(mask, cached.rows, cached.seen)
    rows, seen, origin = (torch.tensor(list(counts)).unsqueeze(1) for counts in (cached.rows, cached.seen, origins))
    lo, hi = sequence_intervals(mask, torch.arange(cached.q.shape[2]).unsqueeze(0), rows, seen)
    lo, hi = ((end - origin).clamp(min=0).to(torch.int32) for end in (lo, hi))
    return lo, hi


def _block_by_block(call: Call, lo: Tensor, hi: Tensor, storage: Storage, name: str) -> tuple[Tensor, Tensor]:
    """Any kernel on one block of keys after another, merged in their order.

    Visibility is given as booleans, so that the kernel's tiles are those of the whole block: tiles cut to what the
    longest sequence sees would round differently beside a longer neighbour. A block without a key that a sequence sees
    merges into it as nothing.
    """
    first, last = 0, call.k.shape[2]
    if has_values(lo):
        sees = lo < hi
        if not bool(sees.any()):
            return empty_result(call)
        first, last = int(lo[sees].min()), int(hi[sees].max())
    lo, hi = (end.to(call.q.device).unsqueeze(-1) for end in (lo, hi))  # (B, Lq, 1)
    states: AttentionState | None = None
    for start in range(first // BLOCK * BLOCK, last, BLOCK):
        keys, values = storage.block(start)
        j = torch.arange(start, start + BLOCK, device=call.q.device)
        visible = ((j >= lo) & (j < hi)).unsqueeze(1)  # (B, 1, Lq, BLOCK)
        part = replace(call, k=keys, v=values, visibility=Visibility(dense=visible), sinks=None)
        block = AttentionState(*attend(part, True, name, with_grad=False))
        states = block if states is None else merge(states, block)
    assert states is not None  # some row sees a key
    return states.finish(call.q.dtype, call.sinks)
