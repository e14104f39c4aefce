"""Attention as it is defined: every score is written out. The oracle of the other kernels, on any dtype and device.

    s = softcap(scale * q k^T) + bias        p = exp(s - max)        out = p v / sum(p)        lse = max + log(sum(p))

The backward pass is written in torch operations that autograd can differentiate again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rooftile._attention.call import Call
from rooftile._attention.dropout import keep_factor, keep_mask
from rooftile._attention.kernel import Contract, Gradients, Kernel, Plan
from rooftile._attention.products import row_sum_product, visible_product

__all__ = ["Reference", "visible_pairs"]


@dataclass(frozen=True, slots=True)
class _Softmax:
    """Everything about the square of scores, (B, Hq, Lq, Lk) each."""

    weights: Tensor  # exp(s - top), 0 where hidden
    visible: Tensor  # bool
    capped: Tensor | None  # tanh(s / softcap)
    top: Tensor  # (B, Hq, Lq, 1), what was subtracted
    empty: Tensor  # bool (B, Hq, Lq, 1): the row sees nothing


class Reference(Kernel):
    """The materialised kernel; it runs only when it is named, because its memory grows with Lq * Lk."""

    name = "reference"
    differentiable_twice = True

    def refusals(self, call: Call, needs_grad: bool) -> tuple[str, ...]:
        """It takes every call."""
        return ()

    def forward(self, call: Call, out_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """``out`` and LSE."""
        v = _per_query_head(call.v, call)
        soft = _softmax(call)
        # The row sum as one more column of the product: both are then rounded alike, and V = 1 gives 1.
        columns = torch.cat((v, v.new_ones(*v.shape[:-1], 1)), -1)
        total = row_sum_product(soft.weights, columns, soft.visible)[..., -1:] + _sink_weight(call, soft)
        kept = _dropped(soft.weights, call)
        out = row_sum_product(kept, columns, soft.visible)[..., :-1] / _divisor(total, soft)
        lse = (soft.top + torch.log(total)).squeeze(-1)
        return _by_rows(out.to(out_dtype or call.q.dtype)), lse

    def backward(
        self, call: Call, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None, wanted: list[bool]
    ) -> Gradients:
        """dS = P (dP - D), D = rowsum(P dP) - dLSE: a function of the inputs and of dout and dlse alone."""
        q, k, v = call.q.to(call.accumulator), _per_query_head(call.k, call), _per_query_head(call.v, call)
        soft = _softmax(call)
        total = soft.weights.sum(-1, keepdim=True) + _sink_weight(call, soft)
        p = torch.where(soft.visible, soft.weights / _divisor(total, soft), 0)  # a sum of NaN stays with what is seen
        dv = torch.zeros_like(v)
        dp = torch.zeros_like(p)
        if dout is not None:
            dout = dout.to(call.accumulator)
            dv = visible_product(_dropped(p, call).mT, dout, soft.visible.mT)
            dp = _dropped(torch.where(soft.visible, dout @ v.mT, 0), call)
        d = (p * dp).sum(-1, keepdim=True)
        if dlse is not None:
            d = d - dlse.to(call.accumulator).unsqueeze(-1)
        ds = torch.where(soft.visible, p * (dp - d), 0)
        dscore = (ds if soft.capped is None else ds * (1 - soft.capped**2)) * call.scale
        grads = (
            visible_product(dscore, k, soft.visible) if wanted[0] else None,
            _of_kv_head(visible_product(dscore.mT, q, soft.visible.mT), call) if wanted[1] else None,
            _of_kv_head(dv, call) if wanted[2] else None,
            ds.sum_to_size(call.bias.shape) if wanted[3] and call.bias is not None else None,
            _sink_gradient(call, soft, total, d) if wanted[4] and call.sinks is not None else None,
        )
        return _as_inputs(grads, call)

    def contract(self, call: Call) -> Contract:
        """fp32 for 16-bit and fp32 inputs, fp64 for fp64."""
        acc = str(call.accumulator).removeprefix("torch.")
        stored = str(call.q.dtype).removeprefix("torch.")
        return Contract(stored, acc, acc, stored, "the same bits at a fixed number of threads")

    def plan(self, call: Call) -> Plan:
        """One tile: the square."""
        batch, heads, rows, _ = call.q.shape
        return Plan("materialised", rows, call.k.shape[2], batch * heads * rows * call.k.shape[2])


def visible_pairs(call: Call) -> Tensor:
    """The visible pairs as booleans, broadcastable to (B, Hq, Lq, Lk): mask and finite bias."""
    see = call.visibility
    keys = torch.arange(call.k.shape[2], device=call.q.device)
    pairs = torch.ones((1, 1, call.q.shape[2], call.k.shape[2]), dtype=torch.bool, device=call.q.device)
    if see.lo is not None and see.hi is not None:
        pairs = ((keys >= see.lo.unsqueeze(-1)) & (keys < see.hi.unsqueeze(-1))).unsqueeze(1)
    if see.dense is not None:
        pairs = pairs & see.dense
    if call.bias is not None:
        pairs = pairs & (call.bias != -torch.inf)
    return pairs


def _softmax(call: Call) -> _Softmax:
    q, k = call.q.to(call.accumulator), _per_query_head(call.k, call)
    s = (q @ k.mT) * call.scale
    visible = visible_pairs(call).expand(s.shape)
    capped = None
    if call.softcap:
        capped = torch.tanh(s / call.softcap)
        s = call.softcap * capped
    if call.bias is not None:
        s = s + call.bias.to(s.dtype)
    s = torch.where(visible, s, -torch.inf)
    empty = ~visible.any(-1, keepdim=True)
    top = s.detach().amax(-1, keepdim=True)
    if call.sinks is not None:
        top = torch.maximum(top, call.sinks.detach().to(s.dtype).view(1, -1, 1, 1))
    top = torch.where(empty & (top == -torch.inf), 0, top)
    return _Softmax(torch.where(visible, torch.exp(s - top), 0), visible, capped, top, empty)


def _sink_weight(call: Call, soft: _Softmax) -> Tensor | float:
    """exp(sink - top): what a sink adds to the row sum."""
    return 0.0 if call.sinks is None else torch.exp(call.sinks.to(soft.top.dtype).view(1, -1, 1, 1) - soft.top)


def _sink_gradient(call: Call, soft: _Softmax, total: Tensor, d: Tensor) -> Tensor:
    """-sum of the sink's own probability times D, over sequences and rows."""
    share = _sink_weight(call, soft) / torch.where(total == 0, 1, total)
    return -(share * torch.where(share == 0, 0, d)).sum((0, 2, 3))


def _divisor(total: Tensor, soft: _Softmax) -> Tensor:
    """The row sum, 1 for a row that sees nothing: 0 / 1 is its result."""
    return torch.where(soft.empty & (total == 0), 1, total)


def _dropped(p: Tensor, call: Call) -> Tensor:
    if call.seed is None:
        return p
    batch, heads, rows, keys = p.shape
    keep = keep_mask(
        int(call.seed),
        call.dropout_p,
        torch.arange(batch * heads, device=p.device),
        torch.arange(rows, device=p.device),
        (0, keys),
    ).view(p.shape)
    return torch.where(keep, p * keep_factor(call.dropout_p), 0)


def _per_query_head(x: Tensor, call: Call) -> Tensor:
    """K or V with the head of query head i at i, in the accumulator's dtype."""
    return x.to(call.accumulator).repeat_interleave(call.group, 1)


def _of_kv_head(gradient: Tensor, call: Call) -> Tensor:
    """The sum over the query heads that share a kv head."""
    return gradient.unflatten(1, (-1, call.group)).sum(2)


def _by_rows(out: Tensor) -> Tensor:
    """The same values, rows before heads in memory."""
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _as_inputs(grads: tuple[Tensor | None, ...], call: Call) -> Gradients:
    operands = (call.q, call.k, call.v, call.bias, call.sinks)
    made = [
        call.q.new_empty(0) if grad is None or x is None else grad.to(x.dtype)
        for grad, x in zip(grads, operands, strict=True)
    ]
    return made[0], made[1], made[2], made[3], made[4]
