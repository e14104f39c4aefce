"""Philox4x32-10 (Salmon et al., SC 2011, section 3.3) in numpy, and the dropout bits that attention draws from it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
_LOW = np.uint64(0xFFFFFFFF)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox4x32(counter: list[Words], key: tuple[int, int], rounds: int = 10) -> list[Words]:
    """Four output words, 32 bits each in arrays of uint64, of four counter words and two key words."""
    x = [np.asarray(word, dtype=np.uint64) for word in counter]
    for number in range(rounds):
        k0, k1 = (np.uint64((word + number * step) & 0xFFFFFFFF) for word, step in zip(key, _WEYL, strict=True))
        first, second = _MULTIPLIERS[0] * x[0], _MULTIPLIERS[1] * x[2]
        high = np.uint64(32)
        x = [(second >> high) ^ x[1] ^ k0, second & _LOW, (first >> high) ^ x[3] ^ k1, first & _LOW]
    return x


def dropout_bits(seed: int, plane: int, q_len: int, kv_len: int) -> Words:
    """(q_len, kv_len): the 32 bits of each pair of one head; ``plane`` is sequence * query heads + head. Four
    neighbouring keys share one draw.
    """
    shape = (q_len, -(-kv_len // 4))
    row, quad = (axis.astype(np.uint64) for axis in np.indices(shape))
    counter = [quad, row, np.full(shape, plane, np.uint64), np.zeros(shape, np.uint64)]
    words = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))
    return np.stack(words, axis=-1).reshape(q_len, -1)[:, :kv_len]


def dropout_factor(seed: int, p: float, plane: int, q_len: int, kv_len: int) -> npt.NDArray[np.float64]:
    """0 where the pair is dropped, 1 / (1 - p) where it is kept."""
    drop_below = min(2**32 - 1, round(p * 2**32))
    return np.where(dropout_bits(seed, plane, q_len, kv_len) < drop_below, 0.0, 1.0 / (1.0 - p))
