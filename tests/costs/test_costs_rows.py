"""Normalisations, softmax, losses, reductions, embeddings, indexing, pooling."""

from __future__ import annotations

import pytest
import torch
from costs_recorder import call, calls_of, meta

from rooftile.capture.trace import Call
from rooftile.costs import Cost, cost_of

ROWS, WIDTH = 6, 8
N = ROWS * WIDTH
TABLE, SMALL, ROWS_5 = meta((1000, 8)), meta((100, 8)), meta((5, 8))
FIVE, PLACES = meta((5,), "int64"), meta((5, 8), "int64")
X, W, STAT = meta((ROWS, WIDTH)), meta((WIDTH,)), meta((ROWS, 1))


def cost(one: Call) -> Cost:
    found = cost_of(one)
    assert found is not None
    return found


def only(calls: list[Call], name: str) -> Call:
    (one,) = [item for item in calls if item.operator.startswith(name)]
    return one


def test_layer_norm_counts_statistics_and_affine_and_keeps_its_statistics() -> None:
    full = cost(call("aten.native_layer_norm.default", X, (WIDTH,), W, W, 1e-5, outputs=(X, STAT, STAT)))
    assert (full.family, full.flops) == ("normalization", 8 * N)
    assert (full.bytes_read, full.bytes_written) == (4 * (N + 2 * WIDTH), 4 * (N + 2 * ROWS))
    bare = cost(call("aten.native_layer_norm.default", X, (WIDTH,), None, None, 1e-5, outputs=(X, STAT, STAT)))
    assert bare.flops == 6 * N


def layer_norm_backward(mask: tuple[bool, bool, bool]) -> Cost:
    wanted = tuple(t for t, on in zip((X, W, W), mask, strict=True) if on)
    return cost(
        call("aten.native_layer_norm_backward.default", X, X, (WIDTH,), STAT, STAT, W, W, mask, outputs=wanted)
    )  # fmt: skip


def test_the_backward_of_a_norm_follows_its_output_mask() -> None:
    assert layer_norm_backward((True, True, True)).flops == (10 + 2 + 1) * N
    assert layer_norm_backward((True, False, False)).flops == 10 * N
    assert layer_norm_backward((False, True, False)).flops == 2 * N
    only_bias = layer_norm_backward((False, False, True))
    assert only_bias.flops == N
    assert layer_norm_backward((True, True, True)).bytes_read - only_bias.bytes_read == X.nbytes
    assert layer_norm_backward((False, False, False)).zero_reason


def test_rms_norm_costs_the_same_as_torchs_operator_and_as_rooftiles() -> None:
    ours = cost(call("rooftile.rms_norm.default", X, (WIDTH,), W, 1e-5, outputs=(X, STAT)))
    theirs = cost(call("aten._fused_rms_norm.default", X, (WIDTH,), W, 1e-5, outputs=(X, STAT)))
    assert ours == theirs
    assert ours.flops == 4 * N
    backward = cost(call("rooftile.rms_norm_backward.default", X, X, STAT, W, (WIDTH,), outputs=(X, W)))
    mask = (True, True)
    assert backward == cost(
        call("aten._fused_rms_norm_backward.default", X, X, (WIDTH,), STAT, W, mask, outputs=(X, W))
    )
    assert backward.flops == (7 + 2) * N
    no_weight = call("rooftile.rms_norm_backward.default", X, X, STAT, None, (WIDTH,), outputs=(X, meta((0,))))
    assert cost(no_weight).flops == 6 * N


def test_batch_norm_in_evaluation_mode_only_applies_its_statistics() -> None:
    with torch.device("meta"):
        norm, x = torch.nn.BatchNorm2d(4), torch.empty(2, 4, 3, 3, requires_grad=True)
    training = calls_of(lambda: norm(x).sum().backward())
    evaluation = calls_of(lambda: norm.eval()(x).sum().backward())
    count = 2 * 4 * 9

    def forward_and_backward(calls: list[Call]) -> list[int]:
        return [cost(one).flops for one in calls if "batch_norm" in one.operator]

    assert forward_and_backward(training) == [8 * count, (10 + 2 + 1) * count]
    assert forward_and_backward(evaluation) == [4 * count, (2 + 2 + 1) * count]


def test_group_norm_forward_and_backward_are_counted() -> None:
    with torch.device("meta"):
        norm, x = torch.nn.GroupNorm(2, 4), torch.empty(2, 4, 3, 3, requires_grad=True)
    calls = [one for one in calls_of(lambda: norm(x).sum().backward()) if "group_norm" in one.operator]
    assert [cost(one).flops for one in calls] == [8 * 72, 13 * 72]


def test_softmax_and_its_backward_pass_over_their_rows_once() -> None:
    forward = cost(call("aten._softmax.default", X, -1, False, outputs=(X,)))
    assert forward == Cost("softmax", 5 * N, 4 * N, 4 * N)
    backward = cost(call("aten._softmax_backward_data.default", X, X, -1, "float32", outputs=(X,)))
    assert backward == Cost("softmax", 4 * N, 8 * N, 4 * N)


def test_a_negative_log_likelihood_gathers_one_value_a_target_and_writes_a_whole_gradient() -> None:
    logits, target, scalar = meta((100, 50257)), meta((100,), "int64"), meta(())
    forward = cost(call("aten.nll_loss_forward.default", logits, target, None, 1, -100, outputs=(scalar, scalar)))
    assert forward.bytes_read == 100 * 4 + 100 * 8
    assert forward.flops == 200
    arguments = (scalar, logits, target, None, 1, -100, scalar)
    backward = cost(call("aten.nll_loss_backward.default", *arguments, outputs=(logits,)))
    assert backward.bytes_written == logits.nbytes
    assert backward.bytes_read == 100 * 8 + 8


def test_a_pointwise_loss_that_reduces_also_sums() -> None:
    assert cost(call("aten.mse_loss.default", X, X, outputs=(meta(()),))).flops == 3 * N
    assert cost(call("aten.mse_loss.default", X, X, 0, outputs=(X,))).flops == 2 * N


def test_reductions_take_one_flop_an_input_element() -> None:
    assert cost(call("aten.sum.dim_IntList", X, (0,), outputs=(W,))) == Cost("reduction", N, 4 * N, 4 * WIDTH)
    assert cost(call("aten.var_mean.correction", X, (0,), outputs=(W, W))).flops == 4 * N
    assert cost(call("aten.max.other", X, X, outputs=(X,))).flops == N
    assert cost(call("aten._foreach_norm.Scalar", (X, W), 2, outputs=(meta(()), meta(())))).flops == 2 * (N + WIDTH)
    stretched = X._replace(stride=(0, 1))  # a broadcast tensor is read once and summed in full
    found = cost(call("aten.sum.default", stretched, outputs=(meta(()),)))
    assert (found.flops, found.bytes_read) == (N, 4 * WIDTH)


def test_an_embedding_moves_the_gathered_rows_and_never_the_vocabulary() -> None:
    table, tokens = meta((50257, 768), "bfloat16"), meta((2, 16), "int64")
    out = meta((2, 16, 768), "bfloat16")
    found = cost(call("aten.embedding.default", table, tokens, outputs=(out,)))
    assert found == Cost("embedding", 0, 32 * 768 * 2 + 32 * 8, 32 * 768 * 2, zero_reason="lookup")
    backward = cost(call("aten.embedding_dense_backward.default", out, tokens, 50257, -1, False, outputs=(table,)))
    assert backward.flops == 32 * 768
    assert backward.bytes_written == table.nbytes
    assert backward.bytes_read == out.nbytes + 32 * 8


def test_an_embedding_bag_adds_the_rows_that_it_gathers() -> None:
    bag = torch.nn.EmbeddingBag(1000, 16, mode="sum")
    tokens, offsets = torch.zeros(12, dtype=torch.long), torch.tensor([0, 5])
    calls = calls_of(lambda: bag(tokens, offsets).sum().backward())
    forward, backward = only(calls, "aten._embedding_bag."), only(calls, "aten._embedding_bag_backward")
    assert cost(forward).flops == 12 * 16
    assert 12 * 16 * 4 < cost(forward).bytes_read < 1000
    assert cost(backward).flops == 12 * 16
    assert cost(backward).bytes_written == 1000 * 16 * 4


@pytest.mark.parametrize(
    ("operator", "arguments", "outputs", "read", "written", "flops"),
    [
        ("aten.index_select.default", (TABLE, 0, FIVE), (ROWS_5,), 200, 160, 0),
        ("aten.gather.default", (TABLE, 0, PLACES), (ROWS_5,), 480, 160, 0),
        ("aten.index.Tensor", (TABLE, (FIVE,)), (ROWS_5,), 200, 160, 0),
        # in place only the places named are touched
        ("aten.index_put_.default", (TABLE, (FIVE,), ROWS_5), (TABLE,), 200, 160, 0),
        ("aten.index_put_.default", (TABLE, (FIVE,), ROWS_5, True), (TABLE,), 360, 160, 40),
        ("aten.index_add_.default", (TABLE, 0, FIVE, ROWS_5), (TABLE,), 360, 160, 40),
        ("aten.scatter_.src", (TABLE, 0, PLACES, ROWS_5), (TABLE,), 480, 160, 0),
        ("aten.put_.default", (TABLE, FIVE, meta((5,)), True), (TABLE,), 80, 20, 5),
        # out of place the target is copied
        ("aten.scatter_add.default", (SMALL, 0, PLACES, ROWS_5), (SMALL,), 3680, 3200, 40),
    ],
)  # fmt: skip
def test_indexing_moves_the_elements_that_it_touches(
    operator: str, arguments: tuple[object, ...], outputs: tuple[object, ...], read: int, written: int, flops: int
) -> None:
    found = cost(call(operator, *arguments, outputs=outputs))  # type: ignore[arg-type]
    assert (found.bytes_read, found.bytes_written, found.flops) == (read, written, flops)
    assert bool(found.zero_reason) is (flops == 0)


def test_pooling_works_through_its_windows() -> None:
    with torch.device("meta"):
        x = torch.empty(2, 4, 8, 8, requires_grad=True)
    calls = calls_of(lambda: torch.nn.functional.max_pool2d(x, 2).sum().backward())
    assert cost(only(calls, "aten.max_pool2d_with_indices.")).flops == 2 * 4 * 16 * 4
    assert cost(only(calls, "aten.max_pool2d_with_indices_backward")).flops == 2 * 4 * 16
    averaged = calls_of(lambda: torch.nn.functional.avg_pool2d(x, (2, 4)).sum().backward())
    assert cost(only(averaged, "aten.avg_pool2d.")).flops == 2 * 4 * 8 * 8
    assert cost(only(averaged, "aten.avg_pool2d_backward")).flops == 2 * 4 * 8 * 8
