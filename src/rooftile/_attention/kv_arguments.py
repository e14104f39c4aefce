"""What a cache accepts. Whatever it can't honour is a UsageError: argument, value, way out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rooftile._attention.arguments import check_operand
from rooftile._attention.call import DTYPES
from rooftile._attention.kv_storage import Storage
from rooftile._attention.sequences import check_mask
from rooftile.errors import UsageError
from rooftile.masks import Mask

__all__ = [
    "SlidingWindow",
    "autocast_to",
    "check_eviction",
    "check_forgotten",
    "check_keys_and_values",
    "check_no_gradient",
    "check_queries",
    "check_row_mask",
    "check_size",
    "checked_lengths",
    "empty_memory",
]


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Keep the last ``keys`` keys of a sequence, and forget older ones when their memory is wanted.

    Every query sees at most the ``keys`` keys that end at its own position, whatever still lies in memory: attention
    over the cache is attention over the whole sequence under ``masks.window(keys)``.
    """

    keys: int

    def __post_init__(self) -> None:
        check_size("SlidingWindow", "keys", self.keys)


def check_size(owner: str, name: str, size: int) -> None:
    """A whole number from 1 on."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise UsageError(f"{owner}({name}={size!r}): pass a whole number, 1 or more")


def check_eviction(eviction: object) -> None:
    """One of the two policies."""
    if eviction != "refuse" and not isinstance(eviction, SlidingWindow):
        raise UsageError(f"eviction={eviction!r}: pass 'refuse' (an error at capacity) or SlidingWindow(n)")


def empty_memory(
    rows: int,
    kv_heads: int,
    slots: int,
    head_dim: int,
    value_dim: int | None,
    dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[Tensor, Tensor]:
    """Keys (rows, Hkv, slots, D) and values (rows, Hkv, slots, Dv) that nothing was written to."""
    value_dim = head_dim if value_dim is None else value_dim
    for name, size in (("batch", rows), ("kv_heads", kv_heads), ("head_dim", head_dim), ("value_dim", value_dim)):
        check_size("KVCache", name, size)
    if dtype not in DTYPES:
        raise UsageError(f"KVCache(dtype={dtype}): attention takes {', '.join(map(str, DTYPES))}")
    with torch.inference_mode(False):  # or it could be written to in inference mode alone
        keys = torch.empty(rows, kv_heads, slots, head_dim, dtype=dtype, device=device)
        return keys, torch.empty(rows, kv_heads, slots, value_dim, dtype=dtype, device=device)


def checked_lengths(lengths: Tensor | Sequence[int] | None, batch: int, padded: int) -> list[int]:
    """One number of tokens a sequence, ``padded`` of each by default."""
    if lengths is None:
        return [padded] * batch
    if isinstance(lengths, Tensor):
        if lengths.is_floating_point() or lengths.dtype == torch.bool or lengths.ndim != 1:
            raise UsageError(f"lengths is {lengths.dtype} {tuple(lengths.shape)}: pass integers ({batch},)")
        lengths = lengths.tolist()
    counts = list(lengths)
    if len(counts) != batch or not all(type(n) is int and 0 <= n <= padded for n in counts):
        raise UsageError(f"lengths is {counts}: pass one integer from 0 to {padded} for each of the {batch} sequences")
    return counts


def check_keys_and_values(k: Tensor, v: Tensor, storage: Storage, batch: int) -> None:
    """Tokens that the storage can hold."""
    for name, given, stored in (("k", k, storage.keys), ("v", v, storage.values)):
        _check_tensor(name, given, stored, batch)
        _, heads, _, dim = stored.shape
        if given.shape[1] != heads or given.shape[3] != dim:
            raise UsageError(
                f"{name} is {tuple(given.shape)} and the cache holds {heads} heads of {dim}: pass "
                f"({batch}, {heads}, L, {dim})"
            )
    if k.shape[2] != v.shape[2]:
        raise UsageError(f"k has {k.shape[2]} tokens and v {v.shape[2]}: append both of the same tokens")


def check_queries(q: Tensor, storage: Storage, batch: int) -> None:
    """Queries whose heads are a multiple of the storage's."""
    _check_tensor("q", q, storage.keys, batch)
    _, heads, _, dim = storage.keys.shape
    if q.shape[3] != dim or q.shape[1] == 0 or q.shape[1] % heads:
        raise UsageError(
            f"q is {tuple(q.shape)} and the cache holds {heads} heads of {dim}: pass a multiple of {heads} query heads "
            f"of {dim}"
        )


def check_row_mask(mask: Mask | None, rows: int) -> None:
    """One row sees everything without a mask; several must say what."""
    if mask is not None:
        check_mask(mask, "attention over a cache", "each sequence has its own keys there, and lengths= says its rows")
    elif rows > 1:
        raise UsageError(
            f"{rows} query rows and no mask: say mask=causal(align='bottom-right') for the last {rows} tokens of "
            "each sequence, or append and attend one token at a time"
        )


def check_forgotten(rows: Sequence[int], seen: Sequence[int], window: int | None, storage: Storage) -> None:
    """The queries are tokens of the cache, and their windows reach back to nothing that it has forgotten."""
    for b, (count, total) in enumerate(zip(rows, seen, strict=True)):
        if count > total:
            raise UsageError(
                f"sequence {b} has {count} queries and holds {total} keys: append the keys of the queries first"
            )
        needed = 0 if window is None else max(0, total - count + 1 - window)
        if count and needed < storage.oldest(b):
            raise UsageError(
                f"the first query of sequence {b} sees keys from position {needed:,}, and those before "
                f"{storage.oldest(b):,} are forgotten: attend right after each append, with the same rows"
            )


def check_no_gradient(name: str, given: Tensor) -> None:
    """A cache is no part of a graph."""
    if given.requires_grad and torch.is_grad_enabled():
        raise UsageError(
            f"{name} requires a gradient and a cache has none: run under torch.no_grad(), or detach {name}"
        )


def autocast_to(stored: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
    """In an autocast region of the cache's dtype fp32 tensors in that dtype, as :func:`rooftile.attention` casts."""
    kind = "cpu" if stored.device.type == "meta" else stored.device.type
    if not torch.is_autocast_enabled(kind) or torch.get_autocast_dtype(kind) != stored.dtype:
        return given
    return tuple(x.to(stored.dtype) if isinstance(x, Tensor) and x.dtype == torch.float32 else x for x in given)


def _check_tensor(name: str, given: Tensor, stored: Tensor, batch: int) -> None:
    check_operand(name, given)
    if given.shape[0] != batch:
        raise UsageError(f"{name} is {tuple(given.shape)}: pass (B, H, L, D) with the cache's {batch} sequences")
    if given.dtype != stored.dtype or given.device != stored.device:
        raise UsageError(
            f"{name} is {given.dtype} on {given.device} and the cache {stored.dtype} on {stored.device}: convert "
            f"{name}, or make the cache with that dtype and device"
        )
    check_no_gradient(name, given)
