"""Masks of sequences that each have lengths of their own, as packed batches and caches hold them.

A mask of positions (causal, window, prefix, or an intersection) is read by every sequence with its own number of
queries and keys, so its alignment is that of the sequence, not of the tensor that holds many of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from rooftile.errors import UsageError
from rooftile.masks import Mask
from rooftile.masks.positional import Positional

__all__ = ["check_mask", "check_mask_lengths", "has_values", "sequence_intervals"]


def check_mask(mask: object, what: str, instead: str) -> None:
    """Refuse what is no mask of positions; ``what`` is the caller, ``instead`` what to do."""
    if not isinstance(mask, Mask):
        raise UsageError(f"mask is {type(mask).__name__}: pass one of rooftile.masks, such as causal()")
    for part in mask.parts:
        if not isinstance(part, Positional):
            raise UsageError(f"{what} takes causal, window and prefix masks, and {part} is none: {instead}")


def check_mask_lengths(mask: Mask, q_lens: Sequence[int], kv_lens: Sequence[int]) -> None:
    """The mask's own check of each sequence that has queries: an alignment unsaid."""
    for s, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        if q_len:
            try:
                mask.check_lengths(q_len, kv_len)
            except UsageError as error:
                raise UsageError(f"sequence {s}: {error}") from None


def sequence_intervals(mask: Mask | None, i: Tensor, q_len: Tensor, kv_len: Tensor) -> tuple[Tensor, Tensor]:
    """``lo`` and ``hi``, int64, of row ``i`` of a sequence with ``q_len`` queries and ``kv_len`` keys; all broadcast.

    Both lie inside ``[0, kv_len]``. A row that is none of its sequence's (``i >= q_len``) sees nothing.
    """
    pair = None if mask is None else mask.interval(i, q_len, kv_len)
    lo, hi = (0, kv_len) if pair is None else pair
    shape = torch.broadcast_shapes(i.shape, q_len.shape, kv_len.shape)
    lo, hi = (_inside(end, kv_len).expand(shape) for end in (lo, hi))
    real = i < q_len
    return torch.where(real, lo, 0), torch.where(real, hi, 0)


def has_values(x: Tensor) -> bool:
    """Whether there are values to look at: neither on meta nor of a fake tensor."""
    return x.device.type != "meta" and not is_fake(x)


def _inside(end: Tensor | int, kv_len: Tensor) -> Tensor:
    end = torch.full_like(kv_len, end) if isinstance(end, int) else end
    return torch.minimum(end.clamp(min=0), kv_len)
