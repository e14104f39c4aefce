"""Attention kernels: tiles by brute force, the published traffic, and the eager compositions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from costs_recorder import Recorder, call, calls_of, meta
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from rooftile.capture.trace import TensorMeta
from rooftile.costs import Cost, attention, cost_of, trace_costs
from rooftile.costs.attention_traffic import flash_traffic, score_matrix_bytes, tensor_sizes
from rooftile.costs.tiles import visited_scores
from rooftile.errors import UsageError

FP16 = "float16"


def tiled(b: int, h: int, hkv: int, lq: int, lk: int, d: int, dv: int, *, causal: bool = False,
          bias: TensorMeta | None = None, dropout: float = 0.0) -> Cost:  # fmt: skip
    q, k, v = meta((b, h, lq, d), FP16), meta((b, hkv, lk, d), FP16), meta((b, hkv, lk, dv), FP16)
    out, lse = meta((b, h, lq, dv), FP16), meta((b, h, lq))
    arguments = (q, k, v, bias, dropout, causal, d**-0.5)
    found = cost_of(call("rooftile.tiled_attention.default", *arguments, outputs=(out, lse, meta((2,), "int64"))))
    assert found is not None
    return found


def tiled_backward(b: int, h: int, hkv: int, lq: int, lk: int, d: int, dv: int, *, causal: bool = False) -> Cost:
    q, k, v = meta((b, h, lq, d), FP16), meta((b, hkv, lk, d), FP16), meta((b, hkv, lk, dv), FP16)
    out, lse, rng = meta((b, h, lq, dv), FP16), meta((b, h, lq)), meta((2,), "int64")
    arguments = (out, q, k, v, out, lse, rng, None, 0.0, causal, d**-0.5)
    found = cost_of(call("rooftile.tiled_attention_backward.default", *arguments, outputs=(q, k, v)))
    assert found is not None
    return found


@pytest.mark.parametrize("rows", [1, 5, 128, 129, 300])
@pytest.mark.parametrize("keys", [1, 127, 128, 256, 301])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 64, 128, 129, 1000])
def test_visited_scores_are_the_area_of_tiles_with_a_visible_score(
    rows: int, keys: int, causal: bool, window: int | None
) -> None:
    row, key = np.arange(rows)[:, None], np.arange(keys)[None, :]
    visible = np.ones((rows, keys), bool)
    if causal or window is not None:
        visible &= key <= row
    if window is not None:
        visible &= key > row - window
    area = 0
    for i in range(0, rows, 128):
        for j in range(0, keys, 128):
            tile = visible[i : i + 128, j : j + 128]
            area += tile.size if tile.any() else 0
    assert visited_scores(rows, keys, causal=causal, window=window) == area


def test_dense_products_equal_torchs_formula_for_sdpa() -> None:
    q, k, v = (2, 4, 96, 32), (2, 4, 160, 32), (2, 4, 160, 48)
    assert tiled(2, 4, 4, 96, 160, 32, 48).matmul_flops == sdpa_flop_count(q, k, v)
    backward = sdpa_backward_flop_count((2, 4, 96, 48), q, k, v)
    assert tiled_backward(2, 4, 4, 96, 160, 32, 48).matmul_flops == backward


def test_grouped_queries_do_all_the_products_and_read_only_the_key_value_heads() -> None:
    full, grouped = tiled(1, 8, 8, 256, 256, 64, 64), tiled(1, 8, 2, 256, 256, 64, 64)
    assert grouped.flops == full.flops
    assert full.bytes_read - grouped.bytes_read == 2 * 6 * 256 * 64 * 2
    assert grouped.bytes_read == (8 + 2 + 2) * 256 * 64 * 2
    assert grouped.bytes_written == 8 * 256 * 64 * 2 + 8 * 256 * 4 + 16


def test_causal_counts_visited_tiles_and_keeps_the_dense_count_beside_it() -> None:
    causal, dense = tiled(1, 1, 1, 1024, 1024, 64, 64, causal=True), tiled(1, 1, 1, 1024, 1024, 64, 64)
    tiles = 8 * 9 // 2  # eight row tiles, each up to its diagonal
    assert causal.matmul_flops == tiles * 128 * 128 * 4 * 64
    assert causal.dense_flops == dense.flops == dense.dense_flops
    assert causal.bytes == dense.bytes


def flash_kernel(rows: int, keys: int, causal: bool, **window: int) -> Cost | None:
    q, k = meta((2, rows, 4, 64), FP16), meta((2, keys, 4, 64), FP16)
    arguments = (q, k, k, None, None, rows, keys, 0.0, causal, False)
    return cost_of(call("aten._flash_attention_forward.default", *arguments, outputs=(q,), **window))


def test_a_window_makes_the_work_linear_in_the_sequence() -> None:
    short, long = (flash_kernel(n, n, True, window_size_left=255, window_size_right=0) for n in (4096, 8192))
    assert short is not None
    assert long is not None
    assert long.flops / short.flops == pytest.approx(2, rel=0.02)
    # each tile of 128 rows sees its own keys and the 255 before its first: three tiles, after the first two
    assert short.matmul_flops == 4 * 64 * (2 * 4) * 128 * 128 * (1 + 2 + 30 * 3)


def test_a_window_or_an_alignment_without_a_tile_count_is_unknown() -> None:
    assert flash_kernel(256, 256, False, window_size_left=64, window_size_right=64) is None
    assert flash_kernel(256, 256, False, window_size_right=0) is None
    assert flash_kernel(128, 256, True) is None
    assert flash_kernel(128, 256, False, window_size_left=-1, window_size_right=-1) is not None


def test_doubling_the_tokens_more_than_doubles_the_work() -> None:
    first, second = tiled(1, 1, 1, 8192, 8192, 64, 64), tiled(1, 1, 1, 16384, 16384, 64, 64)
    assert second.matmul_flops == 4 * first.matmul_flops


def test_a_broadcast_bias_is_read_once_and_adds_one_per_score() -> None:
    bias = TensorMeta((2, 4, 256, 256), (0, 0, 256, 1), FP16)
    with_bias, without = tiled(2, 4, 4, 256, 256, 64, 64, bias=bias), tiled(2, 4, 4, 256, 256, 64, 64)
    assert with_bias.bytes_read - without.bytes_read == 256 * 256 * 2
    assert with_bias.flops - without.flops == 2 * 4 * 256 * 256


def test_the_cpu_kernel_that_torchs_counter_misses_is_counted() -> None:
    q = torch.zeros(2, 4, 32, 16, requires_grad=True)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    calls = calls_of(lambda: sdpa(q, q, q, is_causal=True).sum().backward())
    forward, backward = (one for one in calls if "attention" in one.operator)
    assert cost_of(forward).matmul_flops == 2 * 2 * (2 * 4 * 32 * 32 * 16)  # type: ignore[union-attr]
    assert cost_of(backward).matmul_flops == 5 * 2 * (2 * 4 * 32 * 32 * 16)  # type: ignore[union-attr]


def test_packed_documents_are_unknown_because_their_lengths_are_data() -> None:
    q, lengths = meta((100, 4, 64), FP16), meta((3,), "int32")
    packed = call(
        "aten._flash_attention_forward.default", q, q, q, lengths, lengths, 60, 60, 0.0, True, False, outputs=(q,)
    )
    assert cost_of(packed) is None
    assert flash_kernel(128, 128, False).matmul_flops == 4 * 2 * 4 * 128 * 128 * 64  # type: ignore[union-attr]


def schema(name: str) -> list[str]:
    return [argument.name for argument in getattr(torch.ops.aten, name.removeprefix("aten.")).default._schema.arguments]


@pytest.mark.parametrize(
    "table", [attention._HEADS_FIRST_FORWARD, attention._HEADS_FIRST_BACKWARD, attention._ROWS_FIRST]
)
def test_every_option_stands_where_torchs_schema_has_it(table: dict[str, tuple[int | None, ...]]) -> None:
    for name, (dropout, causal, bias, *lengths) in table.items():
        if name.startswith("rooftile."):
            continue
        names = schema(name)
        first = 1 if name.endswith("backward") else 0
        assert names[first : first + 3] == ["query", "key", "value"]
        assert names[dropout or 0] == "dropout_p"
        assert names[causal or 0] in ("is_causal", "custom_mask_type")
        assert bias is None or names[bias] in ("attn_bias", "bias")
        assert all(names[at or 0] in ("cum_seq_q", "cu_seqlens_q") for at in lengths)


def test_flash_attention_moves_4_38_gb_by_its_own_algorithm() -> None:
    traffic = flash_traffic(batch=64, heads=16, seq=1024, head_dim=64)
    assert (traffic.block_columns, traffic.block_rows) == (384, 64)
    assert traffic.total / 1e9 == pytest.approx(4.38, abs=0.005)
    assert traffic.total / 1e9 == pytest.approx(4.4, rel=0.05)


def test_more_memory_on_chip_means_fewer_passes_and_too_little_is_refused() -> None:
    small, large = (flash_traffic(1, 1, 8192, 64, on_chip_elements=m).total for m in (16_384, 262_144))
    assert small > 10 * large
    with pytest.raises(UsageError, match="at least 256"):
        flash_traffic(1, 1, 1024, 64, on_chip_elements=100)


def test_score_matrices_have_the_published_sizes() -> None:
    assert score_matrix_bytes(8192) == 134_217_728
    mib = 2**20
    for seq, scores, linear in ((512, 1, 0.25), (2048, 16, 1), (4096, 64, 2)):
        assert tensor_sizes(seq, 64) == (scores * mib, linear * mib)
    assert tensor_sizes(2048, 64, heads=32).scores_and_probabilities == 512 * mib


def eager(scale: bool, mask: bool, dropout: bool) -> float:
    """GB moved by attention written by hand, forward and backward, at the shape of FlashAttention's Fig. 2."""
    with torch.device("meta"):
        q, k, v = (torch.empty(64, 16, 1024, 64, dtype=torch.float16, requires_grad=True) for _ in range(3))
        hidden = torch.empty(1024, 1024, dtype=torch.bool)
        grad = torch.empty(64, 16, 1024, 64, dtype=torch.float16)
        with Recorder() as recorder:
            scores = q @ k.transpose(-2, -1)
            if scale:
                scores = scores * 0.125
            if mask:
                scores = scores.masked_fill(hidden, float("-inf"))
            p = torch.softmax(scores, -1)
            if dropout:
                p = torch.ops.aten.native_dropout(p, 0.1, True)[0]
            # Not backward(): a leaf would copy its gradient into its own strides, which projections do not.
            torch.autograd.grad(p @ v, (q, k, v), grad)
    return sum(cost.bytes for cost in trace_costs(recorder.trace()) if cost) / 1e9


@pytest.mark.parametrize(
    ("composition", "gigabytes"),
    [
        ({"scale": False, "mask": False, "dropout": False}, 25.2),
        ({"scale": False, "mask": False, "dropout": True}, 36.0),
        ({"scale": True, "mask": False, "dropout": True}, 44.6),
        ({"scale": True, "mask": True, "dropout": True}, 53.2),
    ],
)
def test_eager_attention_moves_what_its_composition_says(composition: dict[str, bool], gigabytes: float) -> None:
    assert eager(**composition) == pytest.approx(gigabytes, abs=0.06)


def test_the_encoder_fast_paths_that_torchs_counter_misses_are_counted() -> None:
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    heads = torch.nn.MultiheadAttention(32, 4, batch_first=True).eval()
    x = torch.zeros(2, 5, 32)
    with torch.inference_mode():
        fused_layer, fused_heads = calls_of(lambda: (layer(x), heads(x, x, x)))
    attention = 2 * 10 * (4 * 32 * 32) + 4 * 2 * 5 * 5 * 32
    assert cost_of(fused_heads).matmul_flops == attention  # type: ignore[union-attr]
    assert cost_of(fused_layer).matmul_flops == attention + 2 * 10 * (2 * 32 * 64)  # type: ignore[union-attr]
