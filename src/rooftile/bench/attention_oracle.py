"""Attention and its gradients in FP64, written from the definition, and how far a result is from them.

One kv head at a time, its rows in parts: memory stays small whatever the length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rooftile.bench.attention_case import Case, Inputs
from rooftile.bench.record import TensorError

__all__ = ["attention_errors", "heads_compared"]

_PART_BYTES = 64 << 20  # of FP64 scores
_FLOPS = 2e11  # that a comparison may take: seconds


@dataclass(slots=True)
class _Gap:
    """Absolute errors so far."""

    largest: float = 0.0
    total: float = 0.0
    elements: int = 0

    def add(self, found: Tensor, exact: Tensor) -> None:
        gap = (found.double() - exact).abs()
        # A NaN in the result stays: torch's max() and sum() keep it, Python's max() might not.
        largest = float(gap.max()) if gap.numel() else 0.0
        self.largest = largest if math.isnan(largest) else max(self.largest, largest)
        self.total += float(gap.sum())
        self.elements += gap.numel()


@dataclass(slots=True)
class _Exact:
    """One kv head's results; dk and dv are sums over its query heads."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def heads_compared(case: Case, backward: bool) -> int:
    """How many kv heads (of all sequences) FP64 is worked out for in reasonable time; 0: not one."""
    heads = case.batch * case.kv_heads
    return min(heads, int(_FLOPS / (case.flops(backward, case.square) / heads)))


def attention_errors(
    case: Case, inputs: Inputs, results: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, tuple[TensorError, ...]]:
    """Errors of each contender's tensors (``out``; ``dq``, ``dk``, ``dv``), on the first heads."""
    backward = any("dq" in found for found in results.values())
    gaps: dict[str, dict[str, _Gap]] = {who: {name: _Gap() for name in found} for who, found in results.items()}
    for head in range(heads_compared(case, backward)):
        b, h = divmod(head, case.kv_heads)
        exact = _exact_head(case, inputs, b, h, backward)
        group = slice(h * case.q_heads // case.kv_heads, (h + 1) * case.q_heads // case.kv_heads)
        part: dict[str, slice | int] = {"out": group, "dq": group, "dk": h, "dv": h}
        for who, found in results.items():
            for name, tensor in found.items():
                gaps[who][name].add(tensor[b, part[name]], getattr(exact, name))
    return {
        who: tuple(
            TensorError(name, gap.largest, gap.total / gap.elements, gap.elements)
            for name, gap in found.items()
            if gap.elements
        )
        for who, found in gaps.items()
    }


def _exact_head(case: Case, inputs: Inputs, b: int, h: int, backward: bool) -> _Exact:
    group = case.q_heads // case.kv_heads
    heads = slice(h * group, (h + 1) * group)
    q, dout = inputs.q[b, heads].double(), inputs.dout[b, heads].double()
    k, v = inputs.k[b, h].double(), inputs.v[b, h].double()
    exact = _Exact(torch.zeros_like(q), torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
    scale = case.head_dim**-0.5
    step = max(1, _PART_BYTES // (8 * group * case.kv_len))
    for start in range(0, case.q_len, step):
        rows = slice(start, start + step)
        p = _probabilities(scale * (q[:, rows] @ k.T), _shown(case, b, heads, rows))
        exact.out[:, rows] = p @ v
        if backward:
            _add_gradients(exact, p, q, k, v, dout, rows, scale)
    return exact


def _probabilities(scores: Tensor, shown: Tensor | None) -> Tensor:
    """Softmax over visible keys; zeros in a row that sees none."""
    if shown is None:
        return scores.softmax(-1)
    return scores.masked_fill(~shown, -torch.inf).softmax(-1).masked_fill(~shown, 0.0)


def _add_gradients(
    exact: _Exact, p: Tensor, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, rows: slice, scale: float
) -> None:
    do = dout[:, rows]
    ds = p * (do @ v.T - (do * exact.out[:, rows]).sum(-1, keepdim=True))
    exact.dq[:, rows] = scale * (ds @ k)
    exact.dk += scale * (ds.transpose(-1, -2) @ q[:, rows]).sum(0)
    exact.dv += (p.transpose(-1, -2) @ do).sum(0)


def _shown(case: Case, b: int, heads: slice, rows: slice) -> Tensor | None:
    """Visible pairs of some rows, broadcastable to (group, rows, keys); None: all."""
    if case.mask is None:
        return None
    see = case.mask.visibility(case.q_len, case.kv_len, torch.device("cpu"))
    shown = None
    if see.lo is not None and see.hi is not None:
        sequence = min(b, see.lo.shape[0] - 1)
        keys = torch.arange(case.kv_len)
        lo, hi = (end[sequence, rows, None] for end in (see.lo, see.hi))
        shown = ((keys >= lo) & (keys < hi)).unsqueeze(0)
    if see.dense is not None:
        size = (case.batch, case.q_heads, case.q_len, case.kv_len)
        part = see.dense.expand(size)[b, heads, rows]
        shown = part if shown is None else shown & part
    return shown
