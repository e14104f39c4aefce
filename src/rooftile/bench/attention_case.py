"""One attention call to be measured: its shape, its inputs, and how much work its visible pairs are."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from rooftile.bench.record import Option
from rooftile.errors import UsageError
from rooftile.masks import Mask, causal

__all__ = ["DTYPES", "Case", "Inputs", "parse_shape"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}

_SHAPE = re.compile(r"(\d+),(\d+)(?:/(\d+))?,(\d+)(?:/(\d+))?,(\d+)")


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a call reads: q (B, Hq, Lq, D), k and v (B, Hkv, Lk, D), and the gradient of its output, as q."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


@dataclass(frozen=True, slots=True)
class Case:
    """An attention call; ``mask_name`` is how a mask that is not plain causal is told."""

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    dtype: torch.dtype
    mask: Mask | None = None
    mask_name: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, Hq, Lq, D)."""
        return self.batch, self.q_heads, self.q_len, self.head_dim

    @property
    def name(self) -> str:
        """``1 x 32/8 x 1/4096 x 128``: query heads / kv heads and queries / keys where they differ."""
        heads = str(self.q_heads) if self.q_heads == self.kv_heads else f"{self.q_heads}/{self.kv_heads}"
        lengths = str(self.q_len) if self.q_len == self.kv_len else f"{self.q_len}/{self.kv_len}"
        return f"{self.batch} x {heads} x {lengths} x {self.head_dim}"

    @property
    def options(self) -> tuple[tuple[str, Option], ...]:
        """The rest of the shape and the mask, as a record holds them."""
        return (("kv_heads", self.kv_heads), ("kv_len", self.kv_len), ("mask", self.mask_name or "none"))

    @property
    def square(self) -> int:
        """Query-key pairs of all query heads, visible or not."""
        return self.batch * self.q_heads * self.q_len * self.kv_len

    @property
    def visible_pairs(self) -> int:
        """Query-key pairs that the mask shows, of all query heads."""
        if self.mask is None:
            return self.square
        see = self.mask.visibility(self.q_len, self.kv_len, torch.device("cpu"))
        if see.dense is None and see.lo is not None and see.hi is not None:
            rows = (see.hi - see.lo).clamp(min=0).to(torch.int64)
            return int(rows.sum()) * self.batch // rows.shape[0] * self.q_heads
        shown = self.mask.materialize(self.q_len, self.kv_len)
        return int(shown.sum()) * self.batch // shown.shape[0] * self.q_heads // shown.shape[1]

    def flops(self, backward: bool, pairs: int) -> float:
        """FLOPs of the matrix products over ``pairs``: two products of D forward, five backward (S is made again)."""
        return 2.0 * (5 if backward else 2) * self.head_dim * pairs

    def inputs(self, seed: int = 0) -> Inputs:
        """Standard normal values, contiguous, the same for a seed."""
        generator = torch.Generator().manual_seed(seed)

        def normal(heads: int, length: int) -> Tensor:
            shape = (self.batch, heads, length, self.head_dim)
            return torch.randn(shape, generator=generator).to(self.dtype)

        return Inputs(
            normal(self.q_heads, self.q_len),
            normal(self.kv_heads, self.kv_len),
            normal(self.kv_heads, self.kv_len),
            normal(self.q_heads, self.q_len),
        )


def parse_shape(text: str, dtype: torch.dtype, is_causal: bool) -> Case:
    """The case of ``B,H,L,D``; ``32/8`` for H: query heads and kv heads, ``1/4096`` for L: queries and keys."""
    found = _SHAPE.fullmatch(text.replace(" ", ""))
    if found is None:
        raise UsageError(
            f"shape {text!r} is not B,H,L,D; give four numbers such as 1,8,2048,64, or 1,32/8,1/4096,128 "
            "(query heads / kv heads, queries / keys)"
        )
    batch, q_heads, kv_heads, q_len, kv_len, head_dim = (int(part) if part else 0 for part in found.groups())
    kv_heads, kv_len = kv_heads or q_heads, kv_len or q_len
    if min(batch, q_heads, q_len, head_dim) == 0 or q_heads % kv_heads:
        raise UsageError(f"shape {text!r} has a 0, or query heads that are no multiple of its kv heads; give others")
    mask = None
    if is_causal:
        mask = causal(align="bottom-right" if q_len != kv_len else None)
    return Case(batch, q_heads, kv_heads, q_len, kv_len, head_dim, dtype, mask, "causal" if is_causal else "")
