"""Which keys an attention call visits, where its schema alone doesn't say: row intervals are tensors.

``rooftile::attention`` takes the ends of each row's interval. A capture on tensors without values asks the mask that
they were made from: what depends on positions only (causal, windows, prefixes) is known, what depends on data (padding,
documents) is not, and the call is then recorded as if those hid nothing, ``assumed``. A capture on real tensors looks.

The recorder adds to the Call's keyword arguments, by these names:

``visible_keys``      ``(first, last + 1)`` key that any of :data:`~rooftile.capture.trace.VISIBLE_ROWS` query rows
                      sees, block after block: of one sequence, if all of the batch see alike, or of each in turn
``visible_evidence``  ``derived`` from positions, ``observed`` in values, or ``assumed``
``visible_causal``    whether no query sees a later key, as the mask itself says
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from rooftile.capture.trace import VISIBLE_ROWS, Op
from rooftile.masks import Mask
from rooftile.masks.base import mask_of

__all__ = ["INTERVAL_OPERATORS", "Places", "assumptions", "exact_attention_calls", "visible_keys"]


class Places(NamedTuple):
    """Where an operator's schema has its operands; ``hi`` follows ``lo``. None: no such operand."""

    q: int
    lo: int
    dense: int | None
    kv_len: int | None  # else it is k's length, and k follows q


#: Operators with row intervals.
INTERVAL_OPERATORS = {
    "rooftile.attention.default": Places(0, 3, 5, None),
    "rooftile.attention_backward.default": Places(2, 5, 7, None),
    "rooftile.paged_attention.default": Places(0, 4, None, 9),
}

Block = tuple[int, int]


def visible_keys(args: tuple[Any, ...], places: Places) -> tuple[tuple[str, Any], ...]:
    """What to add to the keyword arguments of a call of :data:`INTERVAL_OPERATORS`; nothing if its schema says all."""
    q, lo, hi = args[places.q], args[places.lo], args[places.lo + 1]
    dense = None if places.dense is None else args[places.dense]
    kv_len = args[places.q + 1].shape[2] if places.kv_len is None else args[places.kv_len]
    if not isinstance(lo, Tensor) or not isinstance(hi, Tensor):
        return (("visible_evidence", "assumed"),) if _hides_keys(dense) else ()
    mask = mask_of(lo)
    with _disable_current_modes():
        if _has_values(lo):
            blocks, evidence = _blocks(lo, hi), "observed"
        else:
            blocks, evidence = _of_positions(mask, q.shape[2], kv_len)
    causal = mask is not None and any(_ends_at_query(part) for part in mask.parts)
    evidence = "assumed" if _hides_keys(dense) else evidence
    return ("visible_keys", blocks), ("visible_evidence", evidence), ("visible_causal", causal)


def _has_values(tensor: Tensor) -> bool:
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def _hides_keys(dense: Any) -> bool:
    """Whether this is padding whose values aren't there: with them it would mostly be intervals, and skip tiles."""
    return isinstance(dense, Tensor) and dense.shape[-2] == 1 and not _has_values(dense)


def _ends_at_query(part: Mask) -> bool:
    """A prefix mask is causal after its prefix: text is generated from it too."""
    return bool(getattr(part, "ends_at_query", False) or getattr(part, "widens", False))


def _of_positions(mask: Mask | None, q_len: int, kv_len: int) -> tuple[tuple[Block, ...], str]:
    """What the parts of a mask that hold no tensors leave visible; without any of them, everything."""
    parts = () if mask is None else mask.parts
    lo, hi = torch.zeros((1, q_len), dtype=torch.int64), torch.full((1, q_len), kv_len, dtype=torch.int64)
    i = torch.arange(q_len).unsqueeze(0)
    for part in parts:
        ends = None if part.tensors else part.interval(i, q_len, kv_len)
        if ends is not None:
            lo, hi = torch.maximum(lo, torch.as_tensor(ends[0])), torch.minimum(hi, torch.as_tensor(ends[1]))
    # A dense mask hides pairs, but no tile is skipped for it.
    known = bool(parts) and not any(part.tensors and part.dense_part() is None for part in parts)
    return _blocks(lo, hi), "derived" if known else "assumed"


def _blocks(lo: Tensor, hi: Tensor) -> tuple[Block, ...]:
    """The reach of every block of rows, ``(0, 0)`` where none of its rows sees a key."""
    found: list[Block] = []
    for lows, highs in zip(lo.tolist(), hi.tolist(), strict=True):
        for start in range(0, len(lows), VISIBLE_ROWS):
            rows = zip(lows[start : start + VISIBLE_ROWS], highs[start : start + VISIBLE_ROWS], strict=True)
            seen = [(first, last) for first, last in rows if first < last]
            found.append((min(s[0] for s in seen), max(s[1] for s in seen)) if seen else (0, 0))
    return tuple(found)


def exact_attention_calls(ops: Iterable[Op]) -> list[dict[str, Any]]:
    """Forward calls of ``rooftile::attention``, as entries of the settings' ``attention_decision``."""
    kernels = Counter(
        call.operator == "rooftile.attention.default" and call.argument(13, "kernel") == "reference"
        for op in ops
        if (call := op.call).operator in ("rooftile.attention.default", "rooftile.paged_attention.default")
    )
    told = {
        False: ("rooftile", "the model calls rooftile.attention"),
        True: ("rooftile reference", "the model calls rooftile.attention with kernel='reference', which writes scores"),
    }
    return [
        {"kernel": told[slow][0], "materialized": slow, "reason": told[slow][1], "count": count}
        for slow, count in sorted(kernels.items())
    ]


def assumptions(ops: Iterable[Op]) -> str:
    """What was taken for granted about the keys that rows see; empty where nothing was."""
    count = sum(("visible_evidence", "assumed") in op.call.kwargs for op in ops)
    if not count:
        return ""
    return (
        f"{count} {'operator' if count == 1 else 'operators'} of rooftile.attention (each pass counts) with padding or "
        "sequences of different lengths, which are data: FLOPs and bytes are counted as if those hid nothing, an upper "
        "bound (assumed); a live capture (--live) looks at the values"
    )
