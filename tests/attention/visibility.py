"""Every kind of mask twice: as the package builds it, and as a predicate over (sequence, head, row, key).

The predicates are the definitions. Their alignment is written out: a row's *aligned position* is the key that it stands
at, ``i`` (top-left) or ``i + Lk - Lq`` (bottom-right).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rooftile import masks

from .oracle import Predicate


@dataclass(frozen=True)
class Sizes:
    """What a mask may depend on."""

    batch: int
    q_len: int
    kv_len: int

    @property
    def offset(self) -> int:
        """From a row's index to its aligned position, bottom-right."""
        return self.kv_len - self.q_len

    def lengths(self) -> Tensor:
        """(B,) keys of each sequence: full, a third, two thirds, ..., never the same for neighbours."""
        thirds = torch.arange(self.batch) % 3
        return torch.where(thirds == 0, self.kv_len, (self.kv_len * thirds) // 3)

    def document_ids(self) -> tuple[Tensor, Tensor]:
        """(B, Lq) and (B, Lk): documents of uneven lengths, another cut in each sequence."""

        def ids(length: int) -> Tensor:
            cuts = torch.tensor([0.15, 0.2, 0.55, 0.9]) * length
            shift = torch.arange(self.batch)[:, None] * 3
            positions = torch.arange(length).expand(self.batch, length) + shift
            return (positions[..., None] >= cuts.long()).sum(-1)

        return ids(self.q_len), ids(self.kv_len)


@dataclass(frozen=True)
class Kind:
    """``build`` makes the package's mask, ``predicate`` the oracle's."""

    build: Callable[[Sizes], Any]
    predicate: Callable[[Sizes], Predicate]


def _padding(side: str) -> Kind:
    def predicate(n: Sizes) -> Predicate:
        lengths = n.lengths().numpy()
        if side == "right":
            return lambda b, h, i, j: (j < lengths[b]) & (i >= 0)
        return lambda b, h, i, j: (j >= n.kv_len - lengths[b]) & (i >= 0)

    return Kind(lambda n: masks.padding(n.lengths(), side=side), predicate)


def _documents(n: Sizes) -> Predicate:
    q_ids, kv_ids = (ids.numpy() for ids in n.document_ids())
    return lambda b, h, i, j: q_ids[b][i] == kv_ids[b][j]


def _both(first: Kind, second: Kind) -> Kind:
    def predicate(n: Sizes) -> Predicate:
        left, right = first.predicate(n), second.predicate(n)
        return lambda b, h, i, j: left(b, h, i, j) & right(b, h, i, j)

    return Kind(lambda n: first.build(n) & second.build(n), predicate)


def _dense(n: Sizes) -> Tensor:
    """(B, 1, Lq, Lk): two pairs of three, no interval of any kind; every eleventh row sees nothing."""
    generator = torch.Generator().manual_seed(7)
    seen = torch.rand(n.batch, 1, n.q_len, n.kv_len, generator=generator) < 0.67
    seen[:, :, 5::11] = False
    return seen


def _dense_predicate(n: Sizes) -> Predicate:
    seen = _dense(n).numpy()
    return lambda b, h, i, j: seen[b, 0][i, j]


CAUSAL = Kind(
    lambda n: masks.causal(align="bottom-right"),
    lambda n: lambda b, h, i, j: j <= i + n.offset,
)
WINDOW = Kind(
    lambda n: masks.window(32, align="bottom-right"),
    lambda n: lambda b, h, i, j: (j <= i + n.offset) & (j > i + n.offset - 32),
)
DENSE = Kind(lambda n: masks.dense(_dense(n)), _dense_predicate)

KINDS: dict[str, Kind] = {
    "causal": CAUSAL,
    "causal-top-left": Kind(lambda n: masks.causal(align="top-left"), lambda n: lambda b, h, i, j: j <= i),
    "window": WINDOW,
    "window-top-left": Kind(
        lambda n: masks.window(5, align="top-left"), lambda n: lambda b, h, i, j: (j <= i) & (j > i - 5)
    ),
    "window-sides": Kind(
        lambda n: masks.window(left=70, right=9, align="bottom-right"),
        lambda n: lambda b, h, i, j: (j >= i + n.offset - 70) & (j <= i + n.offset + 9),
    ),
    "padding": _padding("right"),
    "padding-left": _padding("left"),
    "documents": Kind(lambda n: masks.documents(*n.document_ids()), _documents),
    "prefix": Kind(lambda n: masks.prefix(20), lambda n: lambda b, h, i, j: j < np.maximum(20, i + 1)),
    "dense": DENSE,
    "causal & window": _both(CAUSAL, WINDOW),
    "causal & padding": _both(CAUSAL, _padding("right")),
    "causal & padding-left": _both(CAUSAL, _padding("left")),
    "causal & documents": _both(CAUSAL, Kind(lambda n: masks.documents(*n.document_ids()), _documents)),
    "window & padding-left": _both(WINDOW, _padding("left")),
    "causal & dense": _both(CAUSAL, DENSE),
}
