"""torch's own CPU kernel behind ``F.scaled_dot_product_attention``: a peer to compare with, which runs only when named.

Its operator is called directly, because the public function keeps the LSE to itself. What it lacks of the contract is
in :attr:`Sdpa.lacks`, and a call that needs more is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile._attention.call import Call
from rooftile._attention.kernel import Contract, Gradients, Kernel, Plan
from rooftile._attention.reference import visible_pairs
from rooftile.errors import UsageError

__all__ = ["Sdpa"]

_KEY_TILE = 512


class Sdpa(Kernel):
    """torch's flash attention for CPUs."""

    name = "sdpa"
    lacks = (
        "the row sum is that of unrounded probabilities, so 16-bit outputs are biased",
        "a NaN in a hidden key can reach the output",
        "16-bit gradients are accumulated in the input's dtype",
        "masks other than plain causal are written out, Lq x Lk, and no tile is skipped",
        "the LSE has no gradient",
    )

    def refusals(self, call: Call, needs_grad: bool) -> tuple[str, ...]:
        """What torch's operator has no argument for."""
        reasons = []
        if call.q.device.type != "cpu":
            reasons.append(f"it is torch's kernel for CPUs, and q is on {call.q.device}")
        if call.q.shape[3] != call.v.shape[3]:
            reasons.append(f"its head dims must be equal, and they are {call.q.shape[3]} and {call.v.shape[3]}")
        if call.softcap:
            reasons.append("it has no softcap")
        if call.sinks is not None:
            reasons.append("it has no sinks")
        if call.dropout_p:
            reasons.append("it has no dropout")
        if needs_grad and call.bias is not None and call.bias.requires_grad:
            reasons.append("its bias has no gradient")
        return tuple(reasons)

    def forward(self, call: Call, out_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """``out`` and LSE."""
        causal, mask = _masking(call)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            call.q, *_expanded(call), 0.0, causal, attn_mask=mask, scale=call.scale
        )
        if mask is not None:
            empty = ~visible_pairs(call).any(-1)  # torch leaves 0 there
            lse = torch.where(empty, -torch.inf, lse)
        rows_first = out.transpose(1, 2).to(out_dtype or call.q.dtype).contiguous()  # in the order of every kernel here
        return rows_first.transpose(1, 2), lse.contiguous()

    def backward(
        self, call: Call, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None, wanted: list[bool]
    ) -> Gradients:
        """Gradients of q, k and v from that of ``out`` alone."""
        if dlse is not None or dout is None:
            raise UsageError("kernel 'sdpa' has no gradient of the LSE: name another kernel, or leave the LSE out")
        causal, mask = _masking(call)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout.to(call.q.dtype), call.q, *_expanded(call), out.to(call.q.dtype),
            torch.where(lse == -torch.inf, 0, lse), 0.0, causal, attn_mask=mask, scale=call.scale,
        )  # fmt: skip
        made = []
        for x, grad, want in zip((call.q, call.k, call.v), grads, wanted[:3], strict=True):
            total = grad if x is call.q else grad.unflatten(1, (-1, call.group)).sum(2)
            made.append(torch.empty_like(x).copy_(total) if want else x.new_empty(0))
        return made[0], made[1], made[2], call.q.new_empty(0), call.q.new_empty(0)

    def contract(self, call: Call) -> Contract:
        """fp32 statistics; probabilities of 16-bit inputs are rounded to their dtype."""
        stored = str(call.q.dtype).removeprefix("torch.")
        acc = str(call.accumulator).removeprefix("torch.")
        return Contract(stored, stored, acc, stored, "declared by torch, not by rooftile")

    def plan(self, call: Call) -> Plan:
        """Its fixed key tile; it visits every one, but for plain causal masks."""
        batch, heads, rows, _ = call.q.shape
        keys = call.k.shape[2]
        tile = 32 if rows < 192 else 64 if rows < 768 else 256
        visited = rows * keys
        if _masking(call)[0]:
            ends = (min(start + tile, rows) for start in range(0, rows, tile))
            visited = sum((end - start) * min(keys, end) for start, end in zip(range(0, rows, tile), ends, strict=True))
        return Plan("torch", min(tile, rows), min(_KEY_TILE, keys), batch * heads * visited)


def _expanded(call: Call) -> tuple[Tensor, Tensor]:
    """K and V with one head for each query head, as ``enable_gqa`` does it."""
    if call.group == 1:
        return call.k, call.v
    return call.k.repeat_interleave(call.group, 1), call.v.repeat_interleave(call.group, 1)


def _masking(call: Call) -> tuple[bool, Tensor | None]:
    """``is_causal`` and ``attn_mask``."""
    see, bias = call.visibility, call.bias
    if see.lo is None and see.dense is None:
        return False, None if bias is None else bias.to(call.q.dtype)
    rows, keys = call.q.shape[2], call.k.shape[2]
    if see.dense is None and bias is None and see.lo is not None and see.hi is not None and see.lo.shape[0] == 1:
        causal = torch.arange(1, rows + 1, device=see.hi.device).clamp(max=keys)
        if not bool(see.lo.any()) and torch.equal(see.hi[0].to(causal.dtype), causal):
            return True, None
    shown = visible_pairs(call)
    added = torch.zeros((), dtype=call.q.dtype) if bias is None else bias.to(call.q.dtype)
    return False, torch.where(shown, added, -torch.inf)
