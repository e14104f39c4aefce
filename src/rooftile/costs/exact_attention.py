"""``rooftile::attention`` and its backward pass: the tiles that the row intervals reach, and no others.

Per score the counts of :mod:`rooftile.costs.attention`, and 3 more for a softcap (divide, tanh, multiply; 6 backward,
with its derivative), 1 for a dense mask. Sinks take 2 per row (3 backward). A gradient that nobody asked for is not
computed: its matrix product isn't counted. K and V are read where a row reaches them, everything else once.

Which keys a row sees stands in tensors; what the capture knows of them it says in ``visible_keys`` (blocks of rows, see
:mod:`rooftile.capture.visible`). Without it all scores count, an upper bound.
"""

from __future__ import annotations

from typing import NamedTuple

from rooftile.capture.trace import ITEMSIZE, VISIBLE_ROWS, Call, TensorMeta
from rooftile.costs.operands import bytes_of, keyword, reads, tensor, total_bytes, writes
from rooftile.costs.record import Cost, NotCountableError
from rooftile.costs.registry import formula
from rooftile.costs.tiles import TILE

__all__: list[str] = []


class _Call(NamedTuple):
    """One call: shapes, and whether each option is there."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int
    softcap: bool
    dropout: bool
    bias: bool
    dense: bool
    sinks: bool
    writes_scores: bool  # the reference kernel


def _described(call: Call, q_at: int) -> _Call:
    q, k, v = (tensor(call, q_at + place, name) for place, name in enumerate("qkv"))
    if not len(q.shape) == len(k.shape) == len(v.shape) == 4:
        raise NotCountableError("attention operands that are not 4-dimensional")
    is_given = {
        name: isinstance(call.argument(q_at + place, name), TensorMeta)
        for place, name in ((5, "dense"), (6, "bias"), (7, "sinks"))
    }
    return _Call(
        *q.shape[:3], k.shape[2], q.shape[3], v.shape[3],
        softcap=call.argument(q_at + 10, "softcap", 0.0) > 0,
        dropout=call.argument(q_at + 11, "dropout_p", 0.0) > 0,
        **is_given,
        writes_scores=call.argument(q_at + 13, "kernel", "") == "reference",
    )  # fmt: skip


def _reached(call: Call, what: _Call) -> tuple[int, float]:
    """Scores of one head over the whole batch, and the share of K and V that some row reaches."""
    square = what.batch * what.q_len * what.kv_len
    blocks = keyword(call, "visible_keys")
    if blocks is None or what.writes_scores or not square:
        return square, 1.0
    per_sequence = -(-what.q_len // VISIBLE_ROWS)
    scores, keys = 0, 0
    for start in range(0, len(blocks), per_sequence):
        own = [_tiles(first, end, what.kv_len) for first, end in blocks[start : start + per_sequence]]
        rows = [min(VISIBLE_ROWS, what.q_len - block * VISIBLE_ROWS) for block in range(per_sequence)]
        scores += sum(count * (end - first) for count, (first, end) in zip(rows, own, strict=True))
        keys += _union(own)
    sequences = len(blocks) // per_sequence  # one, where all of the batch share it
    return scores * what.batch // sequences, keys / (sequences * what.kv_len)


def _tiles(first: int, end: int, kv_len: int) -> tuple[int, int]:
    """The interval, widened to whole tiles."""
    return (first // TILE * TILE, min(kv_len, -(-end // TILE) * TILE)) if first < end else (0, 0)


def _union(intervals: list[tuple[int, int]]) -> int:
    """Keys that at least one of the intervals has."""
    covered, reach = 0, 0
    for first, end in sorted(intervals):
        covered += max(0, end - max(first, reach))
        reach = max(reach, end)
    return covered


def _bytes_read(call: Call, q_at: int, share: float) -> int:
    """Every tensor once, K and V as far as rows reach."""
    cached = bytes_of(tensor(call, q_at + 1, "k")) + bytes_of(tensor(call, q_at + 2, "v"))
    return total_bytes(reads(call)) - round((1.0 - share) * cached)


def _score_bytes(call: Call, what: _Call, passes: int) -> int:
    """What the reference kernel moves besides: ``passes`` over scores in the accumulator's dtype."""
    lse = next(meta for meta in (*call.outputs, *call.inputs) if meta.dtype in ("float32", "float64"))
    scores = what.batch * what.heads * what.q_len * what.kv_len
    return passes * scores * ITEMSIZE[lse.dtype] if what.writes_scores else 0


@formula("rooftile.attention")
def forward(call: Call) -> Cost:
    """O and LSE: Q K^T and P V."""
    what = _described(call, 0)
    per_head, share = _reached(call, what)
    scores = what.heads * per_head
    square = what.heads * what.batch * what.q_len * what.kv_len

    extra = _score_bytes(call, what, 2)  # scores and probabilities
    read = _bytes_read(call, 0, share) + extra
    return _cost(call, 0, _forward_flops(what, scores), _forward_flops(what, square)[0], read, extra)


def _forward_flops(what: _Call, scores: int) -> tuple[int, int]:
    """(all, in matrix products)."""
    matmul = 2 * scores * (what.head_dim + what.value_dim)
    per_score = 5 + what.bias + what.dense + 3 * what.dropout + 3 * what.softcap
    rows = what.batch * what.heads * what.q_len
    return matmul + per_score * scores + rows * (what.value_dim + 2 * what.sinks), matmul


@formula("rooftile.paged_attention")
def paged(call: Call) -> Cost:
    """The same over a cache's pages (pages, Hkv, page size, D): rows reach keys through a table, and read no others."""
    q, keys, values = (tensor(call, place, name) for place, name in enumerate(("q", "keys", "values")))
    kv_len = call.argument(9, "kv_len")
    if not len(q.shape) == len(keys.shape) == len(values.shape) == 4 or not isinstance(kv_len, int):
        raise NotCountableError("paged attention operands that are not 4-dimensional")
    what = _Call(
        *q.shape[:3], kv_len, q.shape[3], values.shape[3],
        softcap=call.argument(8, "softcap", 0.0) > 0, dropout=False, bias=False, dense=False,
        sinks=isinstance(call.argument(6, "sinks"), TensorMeta), writes_scores=False,
    )  # fmt: skip
    per_head, share = _reached(call, what)
    square = what.heads * what.batch * what.q_len * kv_len
    a_key = keys.shape[1] * (keys.shape[3] + values.shape[3]) * ITEMSIZE[keys.dtype]
    pool = bytes_of(keys) + bytes_of(values)
    read = total_bytes(reads(call)) - pool + round(share * what.batch * kv_len * a_key)
    return _cost(call, 0, _forward_flops(what, what.heads * per_head), _forward_flops(what, square)[0], read, 0)


@formula("rooftile.attention_backward")
def backward(call: Call) -> Cost:
    """The gradients asked for: Q K^T again, dP = dO V^T, dV = P^T dO, dQ = dS K, dK = dS^T Q."""
    what = _described(call, 2)
    per_head, share = _reached(call, what)
    wanted = call.argument(18, "wanted")
    if not isinstance(wanted, tuple) or len(wanted) != 5:
        raise NotCountableError("which gradients are wanted")
    scores = what.heads * per_head
    square = what.heads * what.batch * what.q_len * what.kv_len
    extra = _score_bytes(call, what, 3)  # scores, dP, dS

    def flops(scores: int) -> tuple[int, int]:
        return _backward_flops(what, scores, wanted, isinstance(call.argument(0, "dout"), TensorMeta))

    return _cost(call, 2, flops(scores), flops(square)[0], _bytes_read(call, 2, share) + extra, extra)


def _backward_flops(what: _Call, scores: int, wanted: tuple[bool, ...], has_dout: bool) -> tuple[int, int]:
    """(all, in matrix products). Per score: P = exp(scale S - LSE) 3, dS = P (dP - delta) 2, scale 1; dropout draws its
    mask again 3 and applies it to P and dP, 1 each. delta = rowsum(dO * O): 2 per output element.
    """
    dq, dk, dv, dbias, dsinks = wanted
    needs_ds = dq or dk or dbias
    matmul = what.head_dim * (1 + dq + dk) + what.value_dim * has_dout * (dv + needs_ds)
    per_score = 3 + 2 * needs_ds + (dq or dk) + what.bias + dbias + what.dense
    per_score += 5 * what.dropout + (3 + 3 * needs_ds) * what.softcap
    rows = what.batch * what.heads * what.q_len
    per_row = 2 * what.value_dim * has_dout + 3 * dsinks
    return 2 * scores * matmul + per_score * scores + rows * per_row, 2 * scores * matmul


def _cost(call: Call, q_at: int, flops: tuple[int, int], dense: int, read: int, written: int) -> Cost:
    total, matmul = flops
    return Cost(
        "attention",
        flops=total,
        bytes_read=read,
        bytes_written=total_bytes(writes(call)) + written,
        matmul_flops=matmul,
        dense_flops=dense,
        roof="matmul",
        roof_dtype=tensor(call, q_at, "q").dtype,
    )
