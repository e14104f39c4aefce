"""``rooftile.attention``."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile._attention.arguments import checked_call
from rooftile._attention.eager import attend
from rooftile._attention.kernels import select
from rooftile.errors import UsageError
from rooftile.masks import Mask

__all__ = ["attention", "needs_grad"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    return_lse: bool = False,
    kernel: str | tuple[str, ...] = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention: ``softmax(softcap(scale * q k^T) + bias, over the visible keys) v``.

    Args:
        q: Queries (B, Hq, Lq, D); fp32, bf16, fp16 or fp64, any strides.
        k: Keys (B, Hkv, Lk, D). Query head i reads kv head ``i // (Hq / Hkv)``.
        v: Values (B, Hkv, Lk, Dv); Dv may differ from D.
        mask: Which keys each query sees, from :mod:`rooftile.masks`; None: all.
        bias: Added to the scores, 4-d, 1 where it is the same for all; in q's dtype or fp32. It has a gradient, and
            -inf hides the pair.
        scale: Factor of the scores; None: 1 / sqrt(D).
        softcap: ``s`` becomes ``softcap * tanh(s / softcap)``, before the bias; None: no cap.
        sinks: One logit a query head, (Hq,): it takes part in every row's softmax and carries no value. It has a
            gradient.
        dropout_p: Share of the probabilities to drop, in [0, 1).
        generator: Where the dropout's seed is drawn from; None: torch's default generator, which alone stays inside a
            compiled graph.
        return_lse: Also return the natural log of the sum of exponentials of each row.
        kernel: "auto", a kernel's name, or names in order of preference.

    Returns:
        ``out`` (B, Hq, Lq, Dv) in q's dtype, with (B, Lq, Hq, Dv) memory; with ``return_lse`` also the LSE (B, Hq, Lq),
        fp32 (fp64 for fp64), differentiable. A row that sees no key is 0 and its LSE -inf.

    Raises:
        UsageError: An argument that can't be honoured (a ValueError), or a call that no kernel asked for can take.

    Source: Dao, "FlashAttention-2" (2023), algorithms 1 and 2; the contract is in the manual.
    """
    call = checked_call(q, k, v, mask, bias, scale, softcap, sinks, dropout_p, generator)
    if not isinstance(return_lse, bool):
        raise UsageError(f"return_lse={return_lse!r}: give True or False")
    with_grad = needs_grad(q, k, v, bias, sinks)
    out, lse = attend(call, False, select(kernel, call, with_grad), with_grad)
    return (out, lse) if return_lse else out


def needs_grad(*operands: Tensor | None) -> bool:
    """Whether autograd will ask for a backward pass."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands)
