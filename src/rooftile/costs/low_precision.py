"""Scaled low precision: making codes and scales, and the product of two scaled matrices."""

from __future__ import annotations

from rooftile.capture.trace import Call, TensorMeta
from rooftile.costs.operands import reads, tensor, total_bytes, writes
from rooftile.costs.record import Cost, NotCountableError
from rooftile.costs.registry import formula

__all__: list[str] = []


@formula("rooftile.quantize")
def quantize(call: Call) -> Cost:
    """Per element one comparison for the block's maximum and one multiplication; the cast is the store.

    A block stays on chip between the two, so the matrix is read once; under one scale for the whole tensor it is read
    twice, unless the maximum is given (delayed scaling).
    """
    x = tensor(call, 0, "x")
    whole = call.argument(1, "block_rows") == 0 and call.argument(2, "block_cols") == 0
    given = isinstance(call.argument(6, "amax"), TensorMeta)
    twice = whole and not given
    return Cost(
        "elementwise",
        flops=2 * x.numel,
        bytes_read=total_bytes(reads(call)) + (total_bytes([x]) if twice else 0),
        bytes_written=total_bytes(writes(call)),
    )


@formula("rooftile.requantize")
def requantize(call: Call) -> Cost:
    """Per element a multiplication to decode, a comparison for the new maximum and a multiplication to encode."""
    codes = tensor(call, 0, "codes")
    return Cost(
        "elementwise",
        flops=3 * codes.numel,
        bytes_read=total_bytes(reads(call)),
        bytes_written=total_bytes(writes(call)),
    )


@formula("rooftile.scaled_mm")
def scaled_product(call: Call) -> Cost:
    """C = A B^T: 2mnk in the matrix units, and per output the scales.

    One multiplication per output where a scale serves the whole contraction; otherwise each block of it is a partial
    sum that is scaled and added, two operations. Matrix units read 8-bit operands along the contraction only: one that
    lies across (a transposed view) is first copied, read and written once more.
    """
    a, b = tensor(call, 0, "a"), tensor(call, 4, "b")
    blocks = (call.argument(2, "a_block"), call.argument(6, "b_block"))
    if len(a.shape) != 2 or len(b.shape) != 2 or not all(isinstance(block, tuple) for block in blocks):
        raise NotCountableError("operands that are no matrices with blocks")
    m, k, n = a.shape[0], a.shape[1], b.shape[0]
    widths = [block[1] for block in blocks if block[1]]
    per_output = 2 * -(-k // min(widths)) if widths else 1
    across = 2 * sum(meta.numel * meta.itemsize for meta in (a, b) if meta.stride[1] != 1 and meta.shape[1] > 1)
    return Cost(
        "matmul",
        flops=2 * m * n * k + per_output * m * n,
        bytes_read=total_bytes(reads(call)) + across // 2,
        bytes_written=total_bytes(writes(call)) + across // 2,
        matmul_flops=2 * m * n * k,
        roof="matmul",
        roof_dtype=a.dtype,
    )
