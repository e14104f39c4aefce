"""Memory, traffic, precision, KV cache and communication: what a Trace means, and closed forms beside it."""

from __future__ import annotations

from rooftile.ledgers.closed_forms import (
    ActivationsEstimate,
    KVCacheSize,
    States,
    activations_estimate,
    kv_cache_size,
    states,
)
from rooftile.ledgers.communication import collective

__all__ = [
    "ActivationsEstimate",
    "KVCacheSize",
    "States",
    "activations_estimate",
    "collective",
    "kv_cache_size",
    "states",
]
