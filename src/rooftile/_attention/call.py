"""One validated call, as every kernel reads it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rooftile.masks import Visibility

__all__ = ["DTYPES", "Call", "accumulator", "empty_gradients", "empty_output", "empty_result"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class Call:
    """The operands, which keys are visible, and the scalars; shapes agree, dtypes and devices are one."""

    q: Tensor  # (B, Hq, Lq, D), any strides
    k: Tensor  # (B, Hkv, Lk, D)
    v: Tensor  # (B, Hkv, Lk, Dv)
    visibility: Visibility
    bias: Tensor | None  # 4-d, 1 where broadcast
    sinks: Tensor | None  # (Hq,)
    scale: float
    softcap: float  # 0: none
    dropout_p: float
    seed: Tensor | None  # int64, 0-dim, CPU; with dropout only

    @property
    def accumulator(self) -> torch.dtype:
        """Dtype of statistics, accumulators and LSE."""
        return accumulator(self.q.dtype)

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def is_empty(self) -> bool:
        """Whether there is no pair of query and key at all."""
        return self.q.shape[0] * self.q.shape[1] * self.q.shape[2] * self.k.shape[2] == 0


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, fp32 for the others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_output(q: Tensor, v: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Uninitialised out (B, Hq, Lq, Dv), in (B, Lq, Hq, Dv) memory so that merging heads is a view, and LSE."""
    batch, heads, rows, _ = q.shape
    width = v.shape[3]
    out = torch.empty_strided(
        (batch, heads, rows, width),
        (rows * heads * width, width, heads * width, 1),
        dtype=dtype or q.dtype,
        device=q.device,
    )
    return out, torch.empty((batch, heads, rows), dtype=accumulator(q.dtype), device=q.device)


def empty_result(call: Call, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """What a call without a single pair gives: zeros, and an LSE of nothing but the sinks."""
    out, lse = empty_output(call.q, call.v, dtype)
    if call.sinks is None:
        return out.zero_(), lse.fill_(-torch.inf)
    return out.zero_(), lse.copy_(call.sinks.view(1, -1, 1).expand(lse.shape))


def empty_gradients(call: Call, wanted: tuple[bool, ...] | list[bool]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised gradients in the order and strides of the inputs; of no elements where not wanted."""
    operands = (call.q, call.k, call.v, call.bias, call.sinks)
    made = [
        torch.empty_like(x) if want and x is not None else call.q.new_empty(0)
        for x, want in zip(operands, wanted, strict=True)
    ]
    return made[0], made[1], made[2], made[3], made[4]
