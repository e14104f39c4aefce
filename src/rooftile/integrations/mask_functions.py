"""What transformers' mask functions say, as row intervals: each query row sees keys ``[lo, hi)``.

transformers describes a mask by a function of (batch, head, query position, key position), composed from a few of its
own: causal, sliding window, chunks, packed sequences. These are read here by name and by what they enclose, in time and
memory that grow with the length, not with its square. A function that is not one of them is evaluated, a block of rows
at a time, and is a set of intervals where every row turns out to be one.

A reading is trusted only if it agrees with the installed transformers: :func:`readings_agree` compares each with the
function itself on a small grid, once. A release that changes one is then evaluated instead.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile.integrations.row_masks import Band, Rows
from rooftile.masks import Mask

__all__ = ["MaskFunction", "Square", "contiguous", "evaluated", "packed_rows", "read", "readings_agree"]

#: (batch index, head index, query position, key position) -> bool, all of them tensors that broadcast.
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

#: Query rows that are evaluated at a time where a function can't be read.
_ROWS = 256

_MODULE = "transformers.masking_utils"


class Square(NamedTuple):
    """Which queries and keys: their counts, and the position of the first of each in the sequence."""

    batch: int
    q_len: int
    kv_len: int
    q_offset: int | Tensor
    kv_offset: int
    device: torch.device

    def positions(self) -> Tensor:
        """Positions of the query rows, (1, Lq) int64."""
        return (torch.arange(self.q_len, device=self.device) + self.q_offset).unsqueeze(0)

    def shifted(self, rows: int, start: int) -> Square:
        """The ``rows`` query rows from ``start`` on."""
        return self._replace(q_len=rows, q_offset=self.q_offset + start)

    def band(self, left: int | None, right: int | None) -> Mask | None:
        """Keys from ``left`` behind each query to ``right`` ahead; None where that hides nothing."""
        if isinstance(self.q_offset, Tensor):  # a static cache keeps count on the device
            at = self.positions() - self.kv_offset
            lo = torch.zeros_like(at) if left is None else at - left
            hi = torch.full_like(at, self.kv_len) if right is None else at + right + 1
            return Rows(lo, hi, ends_at_query=right == 0)
        shift = self.q_offset - self.kv_offset
        no_left = left is None or shift + self.q_len - 1 - left <= 0
        no_right = right is None or shift + right >= self.kv_len - 1
        # The one query of a decoding step sees all keys, mostly; that a mask ends at the query is still worth knowing.
        if no_left and no_right and not (right == 0 and self.q_len > 1):
            return None
        return Band(None if no_left else left, right, shift)


def read(function: MaskFunction, square: Square) -> tuple[Mask, ...] | None:
    """Masks whose intersection the function is over ``square``; None for a function that can't be read.

    torch.compile can tell which function it is, but not what one encloses: while compiling, the plain causal and
    bidirectional ones are read.
    """
    if torch.compiler.is_compiling():
        return _read_plain(function, square)
    if not readings_agree():
        return None
    return _read(function, square)


def _read_plain(function: MaskFunction, square: Square) -> tuple[Mask, ...] | None:
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if function is causal_mask_function:
        band = square.band(None, 0)
        return () if band is None else (band,)
    return () if function is bidirectional_mask_function else None


def _read(function: MaskFunction, square: Square) -> tuple[Mask, ...] | None:
    found = tuple(_parts(function, square))
    if None in found:
        return None
    return tuple(mask for mask in found if isinstance(mask, Mask))


_NOTHING_HIDDEN = object()


def _parts(function: MaskFunction, square: Square) -> Iterator[Mask | object | None]:
    """The function taken apart; None for what isn't known."""
    if getattr(function, "__module__", None) != _MODULE:
        yield None
        return
    inside = _enclosed(function)
    match getattr(function, "__qualname__", "").partition(".")[0]:
        case "causal_mask_function":
            yield square.band(None, 0) or _NOTHING_HIDDEN
        case "bidirectional_mask_function":
            yield _NOTHING_HIDDEN
        case "sliding_window_overlay":
            yield square.band(int(inside["sliding_window"]) - 1, None) or _NOTHING_HIDDEN
        case "sliding_window_bidirectional_overlay":
            yield square.band(int(inside["sliding_window"]), int(inside["sliding_window"])) or _NOTHING_HIDDEN
        case "chunked_overlay":
            yield _chunks(int(inside["chunk_size"]), inside["left_padding"], square)
        case "packed_sequence_mask_function":
            yield _documents(inside["packed_sequence_mask"])
        case "and_masks":
            yield from _joined(inside["mask_functions"], square)
        case _:
            yield None


def _joined(functions: tuple[MaskFunction, ...], square: Square) -> Iterator[Mask | object | None]:
    """The parts of an intersection. Positions that restart in every document are those of the whole square there:
    what a band says depends on differences only, and other documents are hidden by the document mask.
    """
    packed = any(_name(f) == "packed_sequence_mask_function" for f in functions)
    for function in functions:
        if packed and _name(function) == "remap_positions_for_packed_sequence":
            inner = _enclosed(function)["mask_function"]
            yield from _parts(inner, square) if _is_of_bands(inner) else (None,)
        else:
            yield from _parts(function, square)


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", "")).partition(".")[0]


def _is_of_bands(function: MaskFunction) -> bool:
    if _name(function) == "and_masks":
        return all(_is_of_bands(part) for part in _enclosed(function)["mask_functions"])
    return _name(function) in ("causal_mask_function", "bidirectional_mask_function", "sliding_window_overlay")


def _enclosed(function: Any) -> dict[str, Any]:
    """Names and values that a closure encloses."""
    cells = getattr(function, "__closure__", None) or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))


def _chunks(size: int, left_padding: Tensor, square: Square) -> Rows:
    """Keys of the query's own chunk of ``size``; chunks start at each sequence's first token."""
    first = left_padding.to(square.device).unsqueeze(1)
    chunk = torch.div(square.positions() - first, size, rounding_mode="floor")
    lo = chunk * size + first - square.kv_offset
    return Rows(lo, lo + size)


def _documents(ids: Tensor) -> Rows:
    """Keys of the query's own document: ``ids`` (B, L) never decrease, queries and keys are the same tokens."""
    ids = ids.contiguous()
    return Rows(torch.searchsorted(ids, ids), torch.searchsorted(ids, ids, right=True))


def packed_rows(cumulative: Tensor, length: int) -> Rows:
    """Sequences packed into one by their cumulative lengths (n + 1,), 0 first: a query sees the keys of its own.

    Tokens after the last one belong together, as a sequence of their own.
    """
    ends = cumulative.to(torch.int64)
    at = torch.arange(length, device=ends.device)
    index = torch.searchsorted(ends, at, right=True)
    bounds = torch.cat((ends, ends.new_full((1,), length)))
    return Rows(bounds[index - 1].unsqueeze(0), bounds[index].unsqueeze(0))


def evaluated(block: Callable[[int, int], Tensor], rows: int, keys: int) -> Rows | None:
    """Intervals of a mask that is given as ``block(first row, rows) -> (B, 1, rows, keys)`` bool; None if it has none.

    None too where the ends decrease from one row to the next, which the tiled kernels don't take.
    """
    los: list[Tensor] = []
    his: list[Tensor] = []
    for start in range(0, rows, _ROWS):
        found = _runs(block(start, min(_ROWS, rows - start))[:, 0], keys)
        if found is None:
            return None
        los.append(found.lo)
        his.append(found.hi)
    if not los:
        return None
    whole = Rows(torch.cat(los, -1), torch.cat(his, -1))
    return whole if _never_decreases(whole) else None


def _runs(visible: Tensor, keys: int) -> Rows | None:
    """The run of True in the last dimension, (0, 0) where there is none; None if a row has several."""
    count = visible.sum(-1)
    if not keys:
        return Rows(count, count)
    seen = visible.to(torch.uint8)
    empty = count == 0
    lo = seen.argmax(-1).masked_fill(empty, 0)
    hi = (keys - seen.flip(-1).argmax(-1)).masked_fill(empty, 0)
    return Rows(lo, hi) if bool((hi - lo == count).all()) else None


def contiguous(keys: Tensor) -> Rows | None:
    """Real tokens, bool (B, Lk), as one interval for all rows of a sequence; None where padding stands between them."""
    return _runs(keys.unsqueeze(1), keys.shape[-1])


def _never_decreases(rows: Rows) -> bool:
    """Whether both ends are in order over the rows that see something."""
    empty = rows.lo >= rows.hi
    for end in (rows.lo, rows.hi):
        reached = end.masked_fill(empty, 0).cummax(-1).values
        if not bool((empty | (end == reached)).all()):
            return False
    return True


@functools.cache
def readings_agree() -> bool:
    """Whether every reading gives what the installed transformers' own function does, on grids of 12 x 12."""
    from transformers import masking_utils as hf

    ids = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2], [0] * 12])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2], list(range(12))])
    packed = hf.packed_sequence_mask_function(ids)
    remapped = hf.remap_positions_for_packed_sequence
    functions = [
        hf.causal_mask_function,
        hf.bidirectional_mask_function,
        hf.sliding_window_causal_mask_function(4),
        hf.sliding_window_bidirectional_mask_function(3),
        hf.chunked_causal_mask_function(5, torch.tensor([0, 3])),
        hf.and_masks(remapped(hf.causal_mask_function, positions), packed),
        hf.and_masks(remapped(hf.sliding_window_causal_mask_function(2), positions), packed),
    ]
    square = Square(2, 12, 12, 0, 0, torch.device("cpu"))
    return all(_agrees(function, square) for function in functions)


def _agrees(function: MaskFunction, square: Square) -> bool:
    try:
        parts = _read(function, square)
    except (AttributeError, KeyError, TypeError, ValueError):  # it encloses something else than it did
        return False
    if parts is None:
        return False
    index = torch.arange(square.q_len)
    batch = torch.arange(square.batch)[:, None, None, None]
    said = function(batch, index[:1], index[:, None], index[None, :])
    one = torch.ones((), dtype=torch.bool)
    own = functools.reduce(operator.and_, (part.materialize(square.q_len, square.kv_len) for part in parts), one)
    return bool((own == said).all())
