"""Which tiles of the square a call has to visit, from the intervals of its rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rooftile._attention.call import Call

__all__ = ["KEY_TILE", "ROW_TILE", "Tile", "row_tiles", "tiles_of"]

#: Rows and keys of a tile: with 8 heads its fp32 scores are 2 MiB. Fewer rows leave room for more keys.
ROW_TILE = 128
KEY_TILE = 512
_LONGEST_KEY_TILE = 8192


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and keys ``[start, stop)``; ``masked`` where some of its pairs may be hidden by an interval."""

    rows: slice
    keys: slice
    masked: bool

    @property
    def width(self) -> int:
        """Keys of the tile."""
        return int(self.keys.stop - self.keys.start)

    def part(self, x: Tensor) -> Tensor:
        """The tile of a 4-d tensor that may be 1 where it is broadcast."""
        x = x if x.shape[2] == 1 else x[:, :, self.rows]
        return x if x.shape[3] == 1 else x[..., self.keys]

    def visible(self, call: Call) -> Tensor | None:
        """Visible pairs by intervals and booleans, broadcastable to (B, Hkv, G, rows, keys); None: all."""
        see, shown = call.visibility, None
        if self.masked and see.lo is not None and see.hi is not None:
            keys = torch.arange(self.keys.start, self.keys.stop, device=call.q.device)
            lo, hi = (end[:, self.rows].unsqueeze(-1) for end in (see.lo, see.hi))
            shown = ((keys >= lo) & (keys < hi))[:, None, None]
        if see.dense is not None:
            part = self.part(see.dense)
            part = part.unsqueeze(2) if part.shape[1] == 1 else part.unflatten(1, (-1, call.group))
            shown = part if shown is None else shown & part
        return shown


def row_tiles(q_len: int, kv_len: int) -> Iterator[Tile]:
    """All keys of a tile of rows at a time, masked throughout."""
    for start in range(0, q_len, ROW_TILE):
        yield Tile(slice(start, min(start + ROW_TILE, q_len)), slice(0, kv_len), True)


def tiles_of(call: Call) -> Iterator[tuple[slice, list[Tile]]]:
    """Each tile of rows with the key tiles that any of its rows, in any sequence, sees."""
    q_len, kv_len = call.q.shape[2], call.k.shape[2]
    key_tile = min(_LONGEST_KEY_TILE, max(KEY_TILE, KEY_TILE * ROW_TILE // max(q_len, 1)))
    see = call.visibility
    # One look from the host, before the first tile; without intervals every row is [0, Lk).
    lows = [[0] * q_len] if see.lo is None else see.lo.tolist()
    highs = [[kv_len] * q_len] if see.hi is None else see.hi.tolist()
    for start in range(0, q_len, ROW_TILE):
        rows = slice(start, min(start + ROW_TILE, q_len))
        first, last, all_from, all_to = _bounds(lows, highs, rows, kv_len)
        tiles = []
        for key in range(first // key_tile * key_tile, last, key_tile):
            keys = slice(max(key, first), min(key + key_tile, last))
            tiles.append(Tile(rows, keys, not (all_from <= keys.start and keys.stop <= all_to)))
        yield rows, tiles


def _bounds(lows: list[list[int]], highs: list[list[int]], rows: slice, kv_len: int) -> tuple[int, int, int, int]:
    """First and last key that a row sees, then the first and last that every row sees."""
    pairs = [
        (lo, hi) for low, high in zip(lows, highs, strict=True) for lo, hi in zip(low[rows], high[rows], strict=True)
    ]
    seen = [(lo, hi) for lo, hi in pairs if lo < hi]
    if not seen:
        return 0, 0, 0, 0
    first, last = min(lo for lo, _ in seen), max(hi for _, hi in seen)
    if len(seen) < len(pairs):
        return first, last, kv_len, 0  # a row that sees nothing: no tile is free of masking
    return first, last, max(lo for lo, _ in seen), min(hi for _, hi in seen)
