"""``rooftile.attention_varlen``: sequences of different lengths, packed one behind the other."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rooftile._attention.arguments import checked_call, short
from rooftile._attention.eager import attend
from rooftile._attention.function import needs_grad
from rooftile._attention.kernels import select
from rooftile._attention.sequences import check_mask, check_mask_lengths, has_values, sequence_intervals
from rooftile.errors import UsageError
from rooftile.masks import Mask, Visibility, documents
from rooftile.masks.base import signed

__all__ = ["attention_varlen"]


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    return_lse: bool = False,
    kernel: str | tuple[str, ...] = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention within each of many sequences that are packed one behind the other, in one call.

    Args:
        q: Queries (Tq, Hq, D): the tokens of all sequences.
        k: Keys (Tk, Hkv, D).
        v: Values (Tk, Hkv, Dv).
        cu_seqlens_q: Where the queries of each sequence start, and the end: int32 or int64 (sequences + 1,), from 0 to
            Tq, on q's device. A sequence may have none.
        cu_seqlens_k: The same for the keys.
        mask: A mask of positions (causal, window, prefix or an intersection), which each sequence reads with its own
            lengths; None: each query sees all keys of its sequence.
        scale: As in :func:`rooftile.attention`, and so are the following.
        softcap: See there.
        sinks: See there; every row of every sequence sees its head's.
        dropout_p: See there.
        generator: See there.
        return_lse: Also return the LSE.
        kernel: See there.

    Returns:
        ``out`` (Tq, Hq, Dv) in q's dtype, contiguous; with ``return_lse`` also the LSE (Hq, Tq).

    Raises:
        UsageError: Offsets that don't start at 0, decrease or don't end at the last token, masks that hold tensors, and
            what :func:`rooftile.attention` refuses.
    """
    for name, x, shape in (
        ("q", q, "(tokens, heads, D)"),
        ("k", k, "(tokens, heads, D)"),
        ("v", v, "(tokens, heads, Dv)"),
    ):
        if not isinstance(x, Tensor) or x.dim() != 3:
            raise UsageError(f"{name} is {short(x) if isinstance(x, Tensor) else type(x).__name__}: give {shape}")
    call = checked_call(
        _batched(q), _batched(k), _batched(v), None, None, scale, softcap, sinks, dropout_p, generator
    )  # fmt: skip
    if not isinstance(return_lse, bool):
        raise UsageError(f"return_lse={return_lse!r}: give True or False")
    _check_offsets("cu_seqlens_q", cu_seqlens_q, q)
    _check_offsets("cu_seqlens_k", cu_seqlens_k, k)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise UsageError(
            f"cu_seqlens_q is of {cu_seqlens_q.shape[0] - 1} sequences and cu_seqlens_k of "
            f"{cu_seqlens_k.shape[0] - 1}: each sequence needs both, and may be empty in either"
        )
    if mask is not None:
        check_mask(mask, "attention_varlen", "the offsets already say where each sequence ends")
        _check_alignment(mask, cu_seqlens_q.diff(), cu_seqlens_k.diff())
    see = _visibility(mask, cu_seqlens_q.long(), cu_seqlens_k.long(), q.shape[0])
    if mask is not None and cu_seqlens_q is cu_seqlens_k and not torch.compiler.is_compiling():
        # Of all tokens together the mask hides the same, and the sequences more.
        see = signed(lambda: mask & documents(cu_seqlens_q), see)
    call = replace(call, visibility=see)
    with_grad = needs_grad(q, k, v, sinks)
    out, lse = attend(call, False, select(kernel, call, with_grad), with_grad)
    out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0)
    return (out, lse) if return_lse else out


def _batched(x: Tensor) -> Tensor:
    """(tokens, heads, D) as one sequence (1, heads, tokens, D)."""
    return x.transpose(0, 1).unsqueeze(0)


def _visibility(mask: Mask | None, starts_q: Tensor, starts_k: Tensor, rows: int) -> Visibility:
    """Row t of sequence s sees its mask's interval behind the keys of the sequences before."""
    token = torch.arange(rows, device=starts_q.device)
    sequence = torch.searchsorted(starts_q, token, right=True) - 1
    lengths_q, lengths_k = starts_q.diff(), starts_k.diff()
    i = token - starts_q[sequence]
    lo, hi = sequence_intervals(mask, i, lengths_q[sequence], lengths_k[sequence])
    first = starts_k[sequence]
    lo, hi = ((first + end).to(torch.int32).unsqueeze(0) for end in (lo, hi))
    return Visibility(lo, hi)


# --------------------------------------------------------------------------------------------------------------- checks
def _check_offsets(name: str, offsets: object, tokens: Tensor) -> None:
    if not isinstance(offsets, Tensor) or offsets.dtype not in (torch.int32, torch.int64) or offsets.dim() != 1:
        what = f"{offsets.dtype} {short(offsets)}" if isinstance(offsets, Tensor) else type(offsets).__name__
        raise UsageError(f"{name} is {what}: give an int32 or int64 tensor (sequences + 1,)")
    if offsets.device != tokens.device:
        raise UsageError(f"{name} is on {offsets.device} and the tokens on {tokens.device}: move it there")
    if offsets.shape[0] == 0:
        raise UsageError(f"{name} is empty: it starts with 0 and ends with the number of tokens, {tokens.shape[0]}")
    if torch.compiler.is_compiling():
        rising = (offsets.diff() >= 0).all() & (offsets[0] == 0) & (offsets[-1] == tokens.shape[0])
        torch._assert_async(rising, f"{name} must rise from 0 to the number of tokens")
    elif has_values(offsets):
        _check_values(name, offsets.tolist(), tokens.shape[0])


def _check_values(name: str, offsets: list[int], tokens: int) -> None:
    if offsets[0] != 0:
        raise UsageError(f"{name} starts with {offsets[0]}: it must start with 0, where the first sequence does")
    for s in range(len(offsets) - 1):
        if offsets[s + 1] < offsets[s]:
            raise UsageError(
                f"{name} falls from {offsets[s]} to {offsets[s + 1]} at sequence {s}: it must be the running sum of "
                "lengths"
            )
    if offsets[-1] != tokens:
        raise UsageError(
            f"{name} ends with {offsets[-1]} and there are {tokens} tokens: it must end with their number, so that "
            "every token is in a sequence"
        )


def _check_alignment(mask: Mask, lengths_q: Tensor, lengths_k: Tensor) -> None:
    """The mask's check of every sequence; in a graph that is only being recorded, what it comes to when it runs."""
    if torch.compiler.is_compiling():
        if any(getattr(part, "align", None) is None for part in mask.parts):
            unequal = (lengths_q > 0) & (lengths_q != lengths_k)
            torch._assert_async(
                ~unequal.any(), "the mask needs align where a sequence has more queries than keys, or fewer"
            )
    elif has_values(lengths_q):
        check_mask_lengths(mask, lengths_q.tolist(), lengths_k.tolist())
