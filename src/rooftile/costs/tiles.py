"""Which tiles of a score matrix an attention kernel visits.

Convention: tiles of 128 x 128, cut off at the matrix edge. A tile with one visible score is worked through in full
(so the diagonal tiles of a causal mask count whole), a tile with none is skipped. Causal is torch's ``is_causal``:
aligned at the top left, query row i sees keys 0..i. ``window`` n keeps the n keys that end at that position.
"""

from __future__ import annotations

__all__ = ["TILE", "visited_scores"]

TILE = 128


def visited_scores(rows: int, keys: int, *, causal: bool = False, window: int | None = None, tile: int = TILE) -> int:
    """Scores worked out for one head: (rows, keys) in full, or the area of the tiles that have a visible score."""
    if not causal and window is None:
        return rows * keys
    visited = 0
    for first in range(0, rows, tile):
        end = min(first + tile, rows)
        # The last row of the band reaches furthest right, the first row furthest left.
        visible_end = min(keys, end)
        visible_start = 0 if window is None else max(0, first - window + 1)
        if visible_start >= visible_end:
            continue
        left = visible_start // tile * tile
        right = min(keys, -(-visible_end // tile) * tile)
        visited += (end - first) * (right - left)
    return visited
