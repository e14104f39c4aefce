"""The key/value cache that both families share: preallocated, written in place, returned beside the logits."""

from __future__ import annotations

from torch import Tensor

from rooftile.errors import UsageError

__all__ = ["KVCache", "LayerCache", "first_position", "store"]

#: One layer: keys and values, each (B, Hkv, length, D). The tokens of a call are the last ones of ``length``.
LayerCache = tuple[Tensor, Tensor]
KVCache = tuple[LayerCache, ...]


def first_position(tokens: Tensor, kv_cache: KVCache | None) -> int:
    """Position of the first of ``tokens`` (B, T): 0 without a cache, else so that the last one fills the cache.

    A call is a whole prompt (prefill) or one new token (decode), since those two need no mask but the causal one.
    """
    if kv_cache is None:
        return 0
    new, length = tokens.shape[1], kv_cache[0][0].shape[2]
    if new not in (1, length):
        raise UsageError(
            f"{new} tokens against a cache of {length}: pass the whole prompt (prefill) or one token (decode)"
        )
    return length - new


def store(cache: LayerCache, k: Tensor, v: Tensor) -> LayerCache:
    """Write ``k``, ``v`` (B, Hkv, T, D) into the last T rows of ``cache``; give the keys and values to attend to."""
    k_cache, v_cache = cache
    first = k_cache.shape[2] - k.shape[2]
    k_cache[:, :, first:].copy_(k)
    v_cache[:, :, first:].copy_(v)
    if first == 0:
        return k, v  # the prompt attends to what it has just computed
    return k_cache.to(k.dtype), v_cache.to(v.dtype)  # no copy where the cache is kept in the compute dtype
