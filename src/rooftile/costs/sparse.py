"""Sparse matrices: what they occupy and what a product with them takes.

CSR keeps ``nnz`` values, ``nnz`` column indices and ``rows + 1`` row pointers (CSC the other way round); COO keeps one
index per dimension and value. torch's indices are int64 unless they were made int32; a layout may say so in brackets
(``sparse_csr[int32]``).
"""

from __future__ import annotations

from math import prod

from rooftile.capture.trace import ITEMSIZE, Call, TensorMeta
from rooftile.costs.operands import NotCountableError, keyword, reads, total_bytes, writes
from rooftile.costs.record import Cost
from rooftile.costs.registry import formula
from rooftile.errors import UsageError

__all__ = ["csr_bytes", "sparse_bytes", "sparse_product"]


def csr_bytes(rows: int, nnz: int, itemsize: int, index_itemsize: int = 8) -> int:
    """Bytes of a CSR matrix: values and column indices for each non-zero, ``rows + 1`` row pointers."""
    if min(rows, nnz) < 0 or min(itemsize, index_itemsize) < 1:
        raise UsageError(f"a CSR matrix of {rows} rows and {nnz} non-zeros has no size; give counts of at least 0")
    return nnz * (itemsize + index_itemsize) + (rows + 1) * index_itemsize


def sparse_bytes(meta: TensorMeta) -> int:
    """Bytes of a sparse operand from its ``nnz``; :class:`NotCountableError` where that is unknown."""
    if meta.nnz is None:
        raise NotCountableError(f"a {meta.layout} tensor without nnz")
    layout, _, index = meta.layout.removesuffix("]").partition("[")
    index_itemsize = ITEMSIZE[index or "int64"]
    batch = prod(meta.shape[:-2])
    if layout in ("sparse_csr", "sparse_csc"):
        rows = meta.shape[-2 if layout == "sparse_csr" else -1]
        # Every matrix of a batch has nnz non-zeros and its own row pointers.
        return batch * csr_bytes(rows, meta.nnz, meta.itemsize, index_itemsize)
    if layout in ("sparse_coo", "sparse"):
        return meta.nnz * (meta.itemsize + len(meta.shape) * index_itemsize)
    raise NotCountableError(f"layout {meta.layout}")


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
