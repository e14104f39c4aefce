"""What whole tiles and waves leave unused in matrix products (NVIDIA, Matrix Multiplication Background)."""

from __future__ import annotations

from dataclasses import dataclass

from rooftile.capture.trace import Call, Trace
from rooftile.costs.gemm import gemm_of, tile_quantisation, wave_quantisation
from rooftile.devices import Device

__all__ = ["TILE", "GemmQuantisation", "gemm_quantisation"]

#: Output tile of one thread block: the guide's most efficient size. Which one a library takes is its own choice.
TILE = (128, 128)


@dataclass(frozen=True, slots=True)
class GemmQuantisation:
    """Shares weighted by FLOPs over all matrix products; 1 is nothing lost. ``waves`` needs the number of SMs.

    A library that splits along k, or takes smaller tiles for small outputs, loses less: the shares are what a plain
    128 x 128 schedule would use, ``assumed``.
    """

    products: int
    flops: int
    tile: tuple[int, int]
    tiles: float | None  # share of the tiles' area that is output
    waves: float | None  # share of the SMs' time in whole waves of tiles
    evidence: str = "assumed"


def gemm_quantisation(trace: Trace, device: Device) -> GemmQuantisation:
    """Over every product of ``trace`` on ``device``."""
    shapes: dict[int, tuple[int, float, float] | None] = {}
    products = flops = 0
    tiles = waves = 0.0
    for op in trace.ops:
        key = id(op.call)
        if key not in shapes:
            shapes[key] = _shares(op.call, device.sm_count)
        shape = shapes[key]
        if shape is not None:
            products, flops = products + 1, flops + shape[0]
            tiles, waves = tiles + shape[0] * shape[1], waves + shape[0] * shape[2]
    return GemmQuantisation(
        products, flops, TILE, tiles / flops if flops else None, waves / flops if flops and device.sm_count else None
    )


def _shares(call: Call, sm_count: int | None) -> tuple[int, float, float] | None:
    gemm = gemm_of(call)
    if gemm is None or not gemm.flops:
        return None
    count, useful = tile_quantisation(gemm.m, gemm.n, *TILE)
    return gemm.flops, useful, wave_quantisation(count * gemm.batch, sm_count) if sm_count else 0.0
