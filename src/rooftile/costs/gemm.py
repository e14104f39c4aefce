"""The matrix product behind an operator: its dimensions, ideal intensity, tiles, waves and alignment."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple

from rooftile.capture.trace import ITEMSIZE, Call, TensorMeta
from rooftile.costs.operands import keyword, split_operator, tensor
from rooftile.costs.record import NotCountableError
from rooftile.errors import UsageError

__all__ = [
    "Alignment",
    "Gemm",
    "alignment",
    "gemm_of",
    "ideal_intensity",
    "tile_quantisation",
    "wave_quantisation",
]


class Gemm(NamedTuple):
    """``batch`` products of (m, k) by (k, n). ``reads_c``: the output starts from a full (m, n) operand times beta."""

    batch: int
    m: int
    n: int
    k: int
    dtype: str
    out_dtype: str
    reads_c: bool = False

    @property
    def flops(self) -> int:
        """A multiply and an add for each of m n k terms."""
        return 2 * self.batch * self.m * self.n * self.k


def _product(call: Call, position: int, names: tuple[str, str], *, batched: bool, c: TensorMeta | None = None) -> Gemm:
    """The Gemm of two matrix arguments that stand at ``position`` and the next."""
    a, b = tensor(call, position, names[0]), tensor(call, position + 1, names[1])
    if len(a.shape) != (3 if batched else 2) or len(b.shape) != len(a.shape):
        raise NotCountableError("matrix operands of other ranks")
    out = call.outputs[0] if call.outputs else a
    m, k = a.shape[-2:]
    # A bias of shape (n,) or (1, n) is broadcast; only a whole C adds mn elements of traffic.
    whole = c is not None and c.distinct == out.numel and keyword(call, "beta", 1) != 0
    return Gemm(a.shape[0] if batched else 1, m, b.shape[-1], k, a.dtype, out.dtype, whole)


def _grouped(call: Call) -> Gemm:
    """A grouped product: only the rows that are present count, whatever the number of groups.

    (M, K) x (G, K, N): M rows in all, each through its own group's matrix. (G, M, K) x (K, N) splits the N columns,
    (M, K) x (K, N) the K terms among the groups: M N K terms in all each time. (G, M, K) x (G, K, N) is a bmm.
    """
    a, b = tensor(call, 0, "self"), tensor(call, 1, "mat2")
    batch = a.shape[0] if len(a.shape) == len(b.shape) == 3 else 1
    return Gemm(batch, a.shape[-2], b.shape[-1], a.shape[-1], a.dtype, call.outputs[0].dtype)


def _weight_only(call: Call) -> Gemm:
    """(m, k) by a quantised (n, k)."""
    a, b = tensor(call, 0, "self"), tensor(call, 1, "mat2")
    return Gemm(1, a.shape[0], b.shape[0], a.shape[1], a.dtype, call.outputs[0].dtype)


def _vector(m: int, n: int, k: int, call: Call) -> Gemm:
    dtype = call.inputs[0].dtype
    return Gemm(1, m, n, k, dtype, call.outputs[0].dtype if call.outputs else dtype)


def _mv(call: Call) -> Gemm:
    matrix = tensor(call, 0, "self")
    return _vector(matrix.shape[0], 1, matrix.shape[1], call)


def _addmv(call: Call) -> Gemm:
    matrix = tensor(call, 1, "mat")
    return _vector(matrix.shape[0], 1, matrix.shape[1], call)._replace(reads_c=keyword(call, "beta", 1) != 0)


def _outer(call: Call) -> Gemm:
    first = 1 if split_operator(call.operator)[1].startswith("addr") else 0
    x, y = tensor(call, first, "vec1"), tensor(call, first + 1, "vec2")
    return _vector(x.shape[0], y.shape[0], 1, call)


_GEMMS: dict[str, Callable[[Call], Gemm]] = {
    "mm": lambda call: _product(call, 0, ("self", "mat2"), batched=False),
    "_int_mm": lambda call: _product(call, 0, ("self", "mat2"), batched=False),
    "_scaled_mm": lambda call: _product(call, 0, ("self", "mat2"), batched=False),
    "_scaled_mm_v2": lambda call: _product(call, 0, ("self", "mat2"), batched=False),
    "_weight_int8pack_mm": _weight_only,
    "bmm": lambda call: _product(call, 0, ("self", "mat2"), batched=True),
    "addmm": lambda call: _product(call, 1, ("mat1", "mat2"), batched=False, c=tensor(call, 0, "self")),
    "_addmm_activation": lambda call: _product(call, 1, ("mat1", "mat2"), batched=False, c=tensor(call, 0, "self")),
    "baddbmm": lambda call: _product(call, 1, ("batch1", "batch2"), batched=True, c=tensor(call, 0, "self")),
    "addbmm": lambda call: _product(call, 1, ("batch1", "batch2"), batched=True),
    "_grouped_mm": _grouped,
    "_scaled_grouped_mm": _grouped,
    "mv": _mv,
    "addmv": _addmv,
    "dot": lambda call: _vector(1, 1, tensor(call, 0, "self").shape[0], call),
    "vdot": lambda call: _vector(1, 1, tensor(call, 0, "self").shape[0], call),
    "outer": _outer,
    "ger": _outer,
    "addr": _outer,
}


def gemm_of(call: Call) -> Gemm | None:
    """The matrix product of ``call``; None for operators that are none and for sparse operands."""
    namespace, base, _ = split_operator(call.operator)
    found = _GEMMS.get(base.rstrip("_")) if namespace == "aten" else None
    if found is None or any(meta.layout != "strided" for meta in call.inputs):
        return None
    try:
        return found(call)
    except NotCountableError:
        return None


def ideal_intensity(m: int, n: int, k: int, itemsize: float, read_c: bool = False) -> float:
    """FLOP per byte of C = A B (+ C) with each matrix crossing the boundary once.

    ``2mnk / (s (mk + kn + mn))``; reading C first adds another mn. A square fp16 product gives n/3, or n/4 with C.
    Raises :class:`~rooftile.errors.UsageError` for a dimension below 1.
    """
    if min(m, n, k) < 1 or itemsize <= 0:
        raise UsageError(f"a product of {m} x {k} by {k} x {n} with {itemsize} bytes an element has no intensity")
    elements = m * k + k * n + m * n * (2 if read_c else 1)
    return 2 * m * n * k / (itemsize * elements)


def tile_quantisation(m: int, n: int, tile_m: int = 128, tile_n: int = 128) -> tuple[int, float]:
    """Output tiles of an (m, n) result, and the share of their area that is result."""
    _positive(m=m, n=n, tile_m=tile_m, tile_n=tile_n)
    tiles = -(-m // tile_m) * -(-n // tile_n)
    return tiles, m * n / (tiles * tile_m * tile_n)


def wave_quantisation(blocks: int, sm_count: int) -> float:
    """Share of the multiprocessors' time that is used when ``blocks`` equal blocks run in full waves."""
    _positive(blocks=blocks, sm_count=sm_count)
    waves = -(-blocks // sm_count)
    return blocks / (waves * sm_count)


def _positive(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise UsageError(f"{name} is {value}; give a size of at least 1")


class Alignment(NamedTuple):
    """Which of m, n, k are no multiple of ``granule`` elements (16 bytes), and what padding them costs."""

    granule: int
    misaligned: tuple[str, ...]
    padded: tuple[int, int, int]  # (m, n, k)
    padded_share: float  # FLOPs that padding adds, as a share of the padded product


def alignment(gemm: Gemm) -> Alignment:
    """Alignment of the three dimensions to 16 bytes (8 elements of fp16, 4 of fp32, 16 of fp8).

    Source: NVIDIA's matrix-multiplication guide: tensor cores are most efficient with dimensions in whole 16 bytes.
    """
    granule = max(1, 16 // ITEMSIZE[gemm.dtype])
    sizes = (gemm.m, gemm.n, gemm.k)
    padded = tuple(-(-size // granule) * granule for size in sizes)
    names = tuple(name for name, size in zip("mnk", sizes, strict=True) if size % granule)
    whole = prod(padded)
    share = 1 - prod(sizes) / whole if whole else 0.0
    return Alignment(granule, names, (padded[0], padded[1], padded[2]), share)
