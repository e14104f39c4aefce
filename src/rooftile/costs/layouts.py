"""What a sparse matrix occupies.

CSR keeps ``nnz`` values, ``nnz`` column indices and ``rows + 1`` row pointers (CSC the other way round); COO keeps one
index per dimension and value. torch's indices are int64 unless they were made int32; a layout may say so in brackets
(``sparse_csr[int32]``).
"""

from __future__ import annotations

from math import prod

from rooftile.capture.trace import ITEMSIZE, TensorMeta
from rooftile.costs.record import NotCountableError
from rooftile.errors import UsageError

__all__ = ["csr_bytes", "sparse_bytes"]


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
