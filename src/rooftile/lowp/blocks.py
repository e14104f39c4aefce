"""Matrices cut into blocks: how a tensor is seen as a matrix, the largest magnitude of each block, scales spread out.

A grid of blocks has one number a block: ``(ceil(rows / block_rows), ceil(cols / block_cols))``. Blocks at the right and
lower edge are cut off; nothing is padded with values that could enter a maximum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

__all__ = ["any_nonfinite", "as_matrix", "block_amax", "grid_of", "largest", "resolve_block", "spread", "times_scales"]

Block = tuple[int, int]


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """``x`` as (rows, columns): the last dimension are the columns, all others the rows; a scalar is 1 x 1."""
    if x.dim() == 0:
        return x.reshape(1, 1)
    rows = 1
    for size in x.shape[:-1]:
        rows *= size
    return x.reshape(rows, x.shape[-1])


def resolve_block(block: tuple[int | None, int | None], rows: int, cols: int) -> Block:
    """The block's sizes, None (or 0) replaced by the whole extent; at least 1 also for an empty matrix."""
    return block[0] or max(1, rows), block[1] or max(1, cols)


def grid_of(shape: Sequence[int], block: Block) -> tuple[int, int]:
    """Shape of the grid of blocks of a matrix."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def _tiled(x: torch.Tensor, block: Block) -> torch.Tensor:
    """(grid rows, block rows, grid columns, block columns), zeros beyond the edge."""
    rows, cols = x.shape
    grid = grid_of(x.shape, block)
    below, right = grid[0] * block[0] - rows, grid[1] * block[1] - cols
    if below or right:
        x = pad(x, (0, right, 0, below))
    return x.reshape(grid[0], block[0], grid[1], block[1])


def block_amax(x: torch.Tensor, block: Block) -> torch.Tensor:
    """Largest finite magnitude of each block as fp32 (fp64 beyond fp32's range: its largest value); 0 if none is."""
    magnitude = x.abs()
    magnitude = torch.where(magnitude.isfinite(), magnitude, 0)
    if x.numel() == 0:
        return torch.zeros(grid_of(x.shape, block), dtype=torch.float32, device=x.device)
    largest = _tiled(magnitude, block).amax(dim=(1, 3))
    return largest.clamp(max=torch.finfo(torch.float32).max).float() if x.dtype == torch.float64 else largest.float()


def largest(amaxes: torch.Tensor) -> torch.Tensor:
    """The largest of a grid of magnitudes, 0-dim; 0 of an empty one."""
    return amaxes.amax() if amaxes.numel() else amaxes.new_zeros(())


def any_nonfinite(x: torch.Tensor, block: Block) -> torch.Tensor:
    """Whether a block holds NaN or Inf, as a grid of booleans."""
    if x.numel() == 0:
        return torch.zeros(grid_of(x.shape, block), dtype=torch.bool, device=x.device)
    return _tiled((~x.isfinite()).to(torch.uint8), block).amax(dim=(1, 3)).bool()


def spread(scales: torch.Tensor, block: Block, rows: int, cols: int) -> torch.Tensor:
    """The grid as one number per element, (rows, cols)."""
    wide = scales.repeat_interleave(block[0], 0)[:rows] if block[0] != 1 else scales
    return wide.repeat_interleave(block[1], 1)[:, :cols] if block[1] != 1 else wide


def times_scales(x: torch.Tensor, scales: torch.Tensor, block: Block) -> torch.Tensor:
    """``x`` (rows, cols) times its blocks' scales in x's dtype; whole blocks are broadcast, not spread out first."""
    rows, cols = x.shape
    scales = scales.to(x.dtype)
    if rows % block[0] or cols % block[1] or not x.numel():
        return x * spread(scales, block, rows, cols)
    grid = grid_of(x.shape, block)
    tiled = x.reshape(grid[0], block[0], grid[1], block[1]) * scales[:, None, :, None]
    return tiled.reshape(rows, cols)
