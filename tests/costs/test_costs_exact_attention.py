"""``rooftile::attention``: tiles by brute force, the gradients asked for, the bytes of the keys that rows reach."""

from __future__ import annotations

import numpy as np
import pytest
from costs_recorder import call, meta

from rooftile.capture.trace import VISIBLE_ROWS, Call, TensorMeta
from rooftile.costs import Cost, cost_of
from rooftile.costs.tiles import TILE

Ends = list[tuple[int, int]]
ALL = (True, True, True, False, False)


def blocks_of(ends: Ends) -> tuple[tuple[int, int], ...]:
    """The reach of each block of rows, as a capture records it."""
    found = []
    for start in range(0, len(ends), VISIBLE_ROWS):
        seen = [(lo, hi) for lo, hi in ends[start : start + VISIBLE_ROWS] if lo < hi]
        found.append((min(lo for lo, _ in seen), max(hi for _, hi in seen)) if seen else (0, 0))
    return tuple(found)


def make(
    q: tuple[int, int, int, int], kv_heads: int, keys: int, value_dim: int, *, ends: list[Ends] | None = None,
    backward: bool = False, wanted: tuple[bool, ...] = ALL, dropout: float = 0.0, softcap: float = 0.0,
    bias: TensorMeta | None = None, dense: TensorMeta | None = None, sinks: bool = False, kernel: str = "native",
    dout: bool = True, known: bool = True,
) -> Cost:  # fmt: skip
    batch, heads, rows, dim = q
    q_meta, k = meta(q, "bfloat16"), meta((batch, kv_heads, keys, dim), "bfloat16")
    v = meta((batch, kv_heads, keys, value_dim), "bfloat16")
    end = None if ends is None else meta((len(ends), rows), "int32")
    inputs = (q_meta, k, v, end, end, dense, bias, meta((heads,)) if sinks else None,
              meta((), "int64") if dropout else None, dim**-0.5, softcap, dropout, False, kernel)  # fmt: skip
    out, lse = meta((batch, heads, rows, value_dim), "bfloat16"), meta((batch, heads, rows))
    extra = {}
    if ends is not None and known:
        extra = {"visible_keys": tuple(b for own in ends for b in blocks_of(own)), "visible_evidence": "derived"}
    made: Call
    if backward:
        nothing = meta((0,), "bfloat16")
        grads = tuple(
            t if want and t is not None else nothing for t, want in zip((q_meta, k, v, bias, None), wanted, strict=True)
        )
        arguments = (out if dout else None, None if dout else lse, *inputs, out, lse, wanted)
        made = call("rooftile.attention_backward.default", *arguments, outputs=grads, **extra)
    else:
        made = call("rooftile.attention.default", *inputs, outputs=(out, lse), **extra)
    found = cost_of(made)
    assert found is not None
    return found


def causal(rows: int, keys: int) -> Ends:
    return [(0, min(keys, i + 1)) for i in range(rows)]


def window(rows: int, keys: int, size: int) -> Ends:
    return [(max(0, i + 1 - size), min(keys, i + 1)) for i in range(rows)]


@pytest.mark.parametrize("rows", [1, 128, 129, 300])
@pytest.mark.parametrize("keys", [1, 128, 301])
@pytest.mark.parametrize("size", [1, 100, 1000])
def test_scores_are_the_area_of_tiles_that_a_row_reaches(rows: int, keys: int, size: int):
    ends = window(rows, keys, size)
    column = np.arange(keys)
    visible = np.array([(column >= lo) & (column < hi) for lo, hi in ends])
    area = sum(
        tile.size
        for i in range(0, rows, TILE)
        for j in range(0, keys, TILE)
        if (tile := visible[i : i + TILE, j : j + TILE]).any()
    )
    assert make((2, 4, rows, 16), 2, keys, 24, ends=[ends]).matmul_flops == 2 * 4 * area * 2 * (16 + 24)


def test_causal_counts_what_torchs_tiled_kernels_do_and_keeps_the_dense_count_beside_it():
    rows, shape = 600, (2, 4, 600, 16)
    own, own_back = (make(shape, 4, rows, 16, ends=[causal(rows, rows)], backward=back) for back in (False, True))
    q = meta(shape, "bfloat16")
    out, lse, rng = q, meta(shape[:3]), meta((2,), "int64")
    tiled = cost_of(call("rooftile.tiled_attention.default", q, q, q, None, 0.0, True, 0.25, outputs=(out, lse, rng)))
    back = cost_of(
        call("rooftile.tiled_attention_backward.default", out, q, q, q, out, lse, rng, None, 0.0, True, 0.25, False,
             outputs=(q, q, q))
    )  # fmt: skip
    assert tiled is not None
    assert back is not None
    for mine, theirs in ((own, tiled), (own_back, back)):
        assert (mine.flops, mine.matmul_flops, mine.dense_flops) == (
            theirs.flops,
            theirs.matmul_flops,
            theirs.dense_flops,
        )
    assert own.bytes_read - tiled.bytes_read == 2 * rows * 4  # the ends of the intervals
    assert own.roof_dtype == "bfloat16"
    assert own.dense_flops == make(shape, 4, rows, 16).flops


def test_every_sequence_counts_by_its_own_rows():
    short, long = [(0, 100)] * 256, [(0, 400)] * 256
    both = make((2, 4, 256, 16), 4, 400, 16, ends=[short, long])
    alone = [make((1, 4, 256, 16), 4, 400, 16, ends=[ends]) for ends in (short, long)]
    assert both.matmul_flops == sum(cost.matmul_flops for cost in alone)


def test_keys_that_no_row_reaches_are_not_read():
    """A decoding step in a cache of 4,096 with a window of 256: two tiles and the one that they begin in."""
    whole = make((1, 8, 1, 64), 2, 4096, 64)
    windowed = make((1, 8, 1, 64), 2, 4096, 64, ends=[[(1000, 1256)]])
    reached = 1280 - 896
    assert whole.bytes_read - (windowed.bytes_read - 2 * 4) == 2 * 2 * (4096 - reached) * 64 * 2


def test_a_row_that_sees_nothing_costs_nothing():
    cost = make((1, 4, 128, 16), 4, 128, 16, ends=[[(0, 0)] * 128])
    assert cost.matmul_flops == 0


def test_intervals_that_nobody_knows_count_whole_as_an_upper_bound():
    known = make((1, 4, 300, 16), 4, 300, 16, ends=[causal(300, 300)])
    unknown = make((1, 4, 300, 16), 4, 300, 16, ends=[causal(300, 300)], known=False)
    assert unknown.flops == unknown.dense_flops == known.dense_flops
    assert unknown.bytes_read == known.bytes_read


def test_only_the_gradients_asked_for_are_counted():
    def products(*wanted: bool, dout: bool = True) -> float:
        cost = make((1, 2, 64, 16), 2, 64, 24, backward=True, wanted=wanted, dout=dout)
        return cost.matmul_flops / (2 * 2 * 64 * 64)

    d, dv = 16, 24
    assert products(True, True, True, False, False) == 3 * d + 2 * dv
    assert products(False, False, True, False, False) == d + dv  # Q K^T again, dV
    assert products(True, False, False, False, False) == 2 * d + dv  # Q K^T again, dP, dQ
    assert products(False, False, False, True, False) == d + dv  # Q K^T again, dP
    assert products(True, True, False, False, False, dout=False) == 3 * d  # the LSE's gradient alone: no dP


@pytest.mark.parametrize(
    ("options", "forward", "backward"),
    [
        ({"bias": meta((1, 2, 64, 64), "bfloat16")}, 1, 1),
        ({"dense": meta((1, 1, 64, 64), "bool")}, 1, 1),
        ({"dropout": 0.1}, 3, 5),
        ({"softcap": 30.0}, 3, 6),
    ],
    ids=["bias", "dense mask", "dropout", "softcap"],
)
def test_an_option_adds_its_operations_to_every_score(options: dict, forward: int, backward: int):
    scores = 2 * 64 * 64
    for back, expected in ((False, forward), (True, backward)):
        plain = make((1, 2, 64, 16), 2, 64, 16, backward=back)
        with_it = make((1, 2, 64, 16), 2, 64, 16, backward=back, **options)
        assert with_it.flops - plain.flops == expected * scores
        assert with_it.matmul_flops == plain.matmul_flops


def test_sinks_are_two_operations_a_row():
    assert make((1, 2, 64, 16), 2, 64, 16, sinks=True).flops - make((1, 2, 64, 16), 2, 64, 16).flops == 2 * 2 * 64


def test_the_reference_kernel_skips_nothing_and_moves_its_scores():
    tiled = make((1, 2, 300, 16), 2, 300, 16, ends=[causal(300, 300)])
    reference = make((1, 2, 300, 16), 2, 300, 16, ends=[causal(300, 300)], kernel="reference")
    assert reference.flops == reference.dense_flops == tiled.dense_flops
    assert reference.bytes - tiled.bytes == 2 * 2 * 2 * 300 * 300 * 4  # two passes, written and read, fp32


def test_an_empty_call_costs_nothing():
    cost = make((0, 2, 5, 16), 2, 5, 16)
    assert (cost.flops, cost.zero_reason) == (0, "empty")


def test_the_blocks_that_a_capture_records_are_tiles():
    assert VISIBLE_ROWS == TILE
