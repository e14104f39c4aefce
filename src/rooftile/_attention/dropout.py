"""Dropout without a state: the bits of each (batch, head, query, key) are a function of the seed and its indices.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Key: the two halves of the
seed. Counter: (key index // 4, query index, batch * Hq + head, 0); word ``key index % 4`` of the result belongs to the
pair. So forward, backward and every kernel see one mask without storing it.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["draw_seed", "drop_below", "keep_factor", "keep_mask", "philox"]

_WORD = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def draw_seed(generator: torch.Generator | None) -> Tensor:
    """63 random bits from ``generator`` (torch's default one if None): int64, 0-dim, on the CPU."""
    device = generator.device if generator is not None else torch.device("cpu")
    return torch.randint(0, 2**63 - 1, (), dtype=torch.int64, generator=generator, device=device).cpu()


def drop_below(p: float) -> int:
    """A pair is dropped where its 32 bits are below this."""
    return min(_WORD, round(p * 2.0**32))


def keep_factor(p: float) -> float:
    """What kept probabilities are multiplied by."""
    return 1.0 / (1.0 - p)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds over four int64 tensors (that broadcast) of 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(_ROUNDS):
        left, right = c0 * _M0, c2 * _M1  # 64-bit products; int64 wraps, and the shift's sign bits are masked off
        c0, c1, c2, c3 = (
            ((right >> 32) & _WORD) ^ c1 ^ k0,
            right & _WORD,
            ((left >> 32) & _WORD) ^ c3 ^ k1,
            left & _WORD,
        )
        k0, k1 = (k0 + _W0) & _WORD, (k1 + _W1) & _WORD
    return c0, c1, c2, c3


def keep_mask(seed: int, p: float, batch_heads: Tensor, rows: Tensor, keys: tuple[int, int]) -> Tensor:
    """Which pairs are kept: bool (batch_heads, rows, keys) for the keys ``[start, stop)``."""
    start, stop = keys
    first = start // 4
    quads = torch.arange(first, -(-stop // 4), device=rows.device).view(1, 1, -1)
    counter = (quads, rows.view(1, -1, 1), batch_heads.view(-1, 1, 1), torch.zeros_like(quads))
    words = torch.stack(torch.broadcast_tensors(*philox(counter, seed)), -1).flatten(-2)
    return words[..., start - 4 * first : stop - 4 * first] >= drop_below(p)
