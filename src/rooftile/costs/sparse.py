"""Products with sparse matrices; what the matrices occupy is in ``layouts.py``."""

from __future__ import annotations

from rooftile.capture.trace import Call
from rooftile.costs.operands import keyword, reads, total_bytes, writes
from rooftile.costs.record import Cost
from rooftile.costs.registry import formula

__all__ = ["sparse_product"]


def sparse_product(call: Call) -> Cost | None:
    """Sparse (m, k) by dense (k, n): each non-zero meets n columns, a product and an addition each: ``2 nnz n``.

    ``addmm`` adds one FLOP per output where beta is not 0. The arithmetic is bound by the vector units.
    """
    adds = "addmm" in call.operator
    beta = keyword(call, "beta", 1) if adds else 0
    a, b = call.inputs[adds : adds + 2]
    sparse, dense = (a, b) if a.layout != "strided" else (b, a)
    if dense.layout != "strided" or sparse.nnz is None or not call.outputs:
        return None  # sparse by sparse: the fill-in is data
    columns = dense.shape[-1] if sparse is a else dense.shape[-2]
    outputs = call.outputs[0]
    products = 2 * sparse.nnz * columns
    read = total_bytes(reads(call)) - (total_bytes(call.inputs[:1]) if adds and beta == 0 else 0)
    extra = outputs.numel * ((beta != 0) + (beta not in (0, 1)))
    return Cost("sparse", products + extra, read, total_bytes(writes(call)), matmul_flops=products)


@formula("aten._sparse_mm", "aten._sparse_addmm")
def sparse_mm(call: Call) -> Cost | None:
    """``torch.sparse.mm`` and its addmm."""
    return sparse_product(call)


@formula("aten.sparse_sampled_addmm")
def sampled(call: Call) -> Cost | None:
    """``beta C + alpha (A B)`` at the non-zeros of C only: k products and additions for each, and the epilogue."""
    pattern, a, _ = call.inputs[:3]
    if pattern.nnz is None:
        return None
    products = 2 * pattern.nnz * a.shape[-1]
    beta, alpha = keyword(call, "beta", 1), keyword(call, "alpha", 1)
    extra = pattern.nnz * ((beta != 0) + (beta not in (0, 1)) + (alpha != 1))
    return Cost("sparse", products + extra, total_bytes(reads(call)), total_bytes(writes(call)), matmul_flops=products)


@formula("aten._to_sparse", "aten.to_sparse", "aten._to_sparse_csr", "aten._to_sparse_csc", zero_reason="copy")
def to_sparse(call: Call) -> Cost:
    """The dense matrix is read, the sparse one written."""
    return Cost("copy", 0, total_bytes(reads(call)), total_bytes(writes(call)), zero_reason="copy")
