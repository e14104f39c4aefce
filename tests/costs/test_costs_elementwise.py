"""Elementwise operators, copies, views, dropout, optimizers: FLOPs, bytes and reasons."""

from __future__ import annotations

import pytest
import torch
from costs_recorder import call, calls_of, meta

from rooftile.capture.trace import Call, TensorMeta
from rooftile.costs import Cost, cost_of
from rooftile.costs.elementwise import FLOPS_PER_ELEMENT

N = 6 * 8
X = meta((6, 8))


def cost(one: Call) -> Cost:
    found = cost_of(one)
    assert found is not None
    return found


def test_a_transcendental_is_one_flop_an_element() -> None:
    for name in ("exp", "tanh", "sqrt", "relu", "neg"):
        assert cost(call(f"aten.{name}.default", X, outputs=(X,))) == Cost(
            "elementwise", N, 4 * N, 4 * N, elementwise=True
        )


def test_broadcast_operands_are_read_once() -> None:
    row, column = TensorMeta((32, 128, 64), (64, 0, 1), "float32"), TensorMeta((32, 128, 64), (0, 64, 1), "float32")
    out = meta((32, 128, 64))
    expanded = cost(call("aten.add.Tensor", row, column, outputs=(out,)))
    assert expanded.bytes_read == 4 * (32 * 64 + 128 * 64)
    assert expanded.flops == 32 * 128 * 64
    unexpanded = cost(call("aten.add.Tensor", meta((32, 1, 64)), meta((1, 128, 64)), outputs=(out,)))
    assert unexpanded == expanded


def test_overlapping_windows_are_read_once() -> None:
    windows = TensorMeta((9, 4), (1, 1), "float32")  # unfold(0, 4, 1) of 12 elements
    assert cost(call("aten.relu.default", windows, outputs=(meta((9, 4)),))).bytes_read == 12 * 4


def test_an_in_place_operator_reads_and_writes_its_self() -> None:
    assert cost(call("aten.add_.Tensor", X, X, outputs=(X,))) == Cost("elementwise", N, 8 * N, 4 * N, elementwise=True)
    assert cost(call("aten.relu_.default", X, outputs=(X,))) == cost(call("aten.relu.default", X, outputs=(X,)))


def test_an_out_argument_is_written_and_not_read() -> None:
    with_out = cost(call("aten.add.out", X, X, outputs=(X,), out=X))
    assert with_out == cost(call("aten.add.Tensor", X, X, outputs=(X,)))


def test_overwriting_operators_do_not_read_what_they_overwrite() -> None:
    half = meta((6, 8), "float16")
    assert cost(call("aten.copy_.default", X, half, outputs=(X,))).bytes_read == 2 * N
    assert cost(call("aten.zero_.default", X, outputs=(X,))).bytes_read == 0
    assert cost(call("aten.zero_.default", X, outputs=(X,))).bytes_written == 4 * N
    assert cost(call("aten.zeros_like.default", X, outputs=(X,))).bytes == 4 * N


@pytest.mark.parametrize(
    ("operator", "reason", "moved"),
    [
        ("aten.view.default", "view", 0), ("aten.t.default", "view", 0), ("aten.expand.default", "view", 0),
        ("aten.detach.default", "view", 0), ("aten.empty_like.default", "allocation", 0),
        ("aten.clone.default", "copy", 8 * N), ("aten.fill_.Scalar", "fill", 4 * N),
        ("aten.bernoulli_.float", "random", 4 * N), ("aten._local_scalar_dense.default", "host", 0),
    ],
)  # fmt: skip
def test_an_operator_without_arithmetic_says_why(operator: str, reason: str, moved: int) -> None:
    found = cost(call(operator, X, outputs=(X,)))
    assert (found.flops, found.zero_reason, found.bytes) == (0, reason, moved)


def test_a_cast_reads_one_width_and_writes_the_other() -> None:
    found = cost(call("aten._to_copy.default", X, outputs=(meta((6, 8), "bfloat16"),), dtype="bfloat16"))
    assert found == Cost("copy", 0, 4 * N, 2 * N, zero_reason="cast", elementwise=True)


def test_native_dropout_writes_a_one_byte_mask_and_its_backward_reads_it() -> None:
    mask = meta((6, 8), "bool")
    forward = cost(call("aten.native_dropout.default", X, 0.1, True, outputs=(X, mask)))
    assert (forward.family, forward.flops, forward.bytes_read, forward.bytes_written) == (
        "dropout",
        3 * N,
        4 * N,
        5 * N,
    )
    backward = cost(call("aten.native_dropout_backward.default", X, mask, 1.1, outputs=(X,)))
    assert (backward.flops, backward.bytes_read, backward.bytes_written) == (2 * N, 5 * N, 4 * N)


def test_scalars_that_are_one_cost_nothing() -> None:
    assert cost(call("aten.add.Tensor", X, X, outputs=(X,), alpha=2)).flops == 2 * N
    assert cost(call("aten.addcmul.default", X, X, X, outputs=(X,))).flops == 2 * N
    assert cost(call("aten.addcmul.default", X, X, X, outputs=(X,), value=0.5)).flops == 3 * N
    assert cost(call("aten.clamp.default", X, -1, 1, outputs=(X,))).flops == 2 * N
    assert cost(call("aten.clamp.default", X, None, 1, outputs=(X,))).flops == N


def test_no_backward_of_an_activation_takes_more_than_four_times_its_forward() -> None:
    pairs = [(name, f"{name}_backward") for name in FLOPS_PER_ELEMENT if f"{name}_backward" in FLOPS_PER_ELEMENT]
    assert len(pairs) >= 10
    for forward, backward in pairs:
        assert FLOPS_PER_ELEMENT[backward] <= 4 * FLOPS_PER_ELEMENT[forward], forward
    for kind in ("none", "tanh"):
        one = cost(call("aten.gelu.default", X, outputs=(X,), approximate=kind)).flops
        back = cost(call("aten.gelu_backward.default", X, X, outputs=(X,), approximate=kind)).flops
        assert one < back <= 4 * one


def test_list_operators_do_what_the_plain_ones_do_to_every_tensor() -> None:
    a, b = meta((10,)), meta((4, 5))
    plain = [cost(call("aten.mul_.Tensor", t, t, outputs=(t,))) for t in (a, b)]
    listed = cost(call("aten._foreach_mul_.List", (a, b), (a, b)))
    assert listed.flops == sum(one.flops for one in plain) == 30
    assert (listed.bytes_read, listed.bytes_written) == (
        sum(c.bytes_read for c in plain),
        sum(c.bytes_written for c in plain),
    )


def test_foreach_and_fused_adamw_differ_in_bytes_and_little_in_flops() -> None:
    def step(**kind: bool) -> tuple[int, int]:
        weight = torch.nn.Parameter(torch.zeros(1000))
        weight.grad = torch.zeros(1000)
        optimizer = torch.optim.AdamW([weight], lr=0.1, **kind)
        optimizer.step()
        found = [cost(one) for one in calls_of(optimizer.step)]
        return sum(one.flops for one in found), sum(one.bytes for one in found)

    fused, foreach, loop = step(fused=True), step(foreach=True), step(foreach=False)
    # One pass: p, g, m, v read, p, m, v written, 4 bytes each (and one step counter).
    assert fused[1] == pytest.approx(7 * 4 * 1000, abs=16)
    assert fused[0] == pytest.approx(14 * 1000, abs=8)
    for other in (foreach, loop):
        assert other[1] > 2 * fused[1]
        assert other[0] == pytest.approx(fused[0], rel=0.15)


def test_fused_adamw_with_a_gradient_scale_also_writes_the_gradients() -> None:
    lists = [(X,), (X,), (X,), (X,), (), (meta(()),)]
    options = {
        "lr": 0.1,
        "beta1": 0.9,
        "beta2": 0.99,
        "weight_decay": 0.0,
        "eps": 1e-8,
        "amsgrad": False,
        "maximize": False,
    }
    plain = cost(call("aten._fused_adamw_.default", *lists, **options))
    scaled = cost(call("aten._fused_adamw_.default", *lists, **options, grad_scale=meta(()), found_inf=meta(())))
    assert plain.flops == 13 * N
    assert scaled.flops == 14 * N
    assert scaled.bytes_written - plain.bytes_written == 4 * N


def test_unscaling_reads_and_writes_every_gradient() -> None:
    found = cost(call("aten._amp_foreach_non_finite_check_and_unscale_.default", (X, X), meta((1,)), meta(())))
    assert (found.family, found.flops) == ("optimizer", 4 * N)
    assert (found.bytes_read, found.bytes_written) == (8 * N + 8, 8 * N + 4)


def test_collectives_are_communication_without_flops() -> None:
    out = meta((24, 8))
    gathered = cost(call("_c10d_functional.all_gather_into_tensor.default", X, 4, "0", outputs=(out,)))
    assert gathered == Cost("communication", 0, 4 * N, 4 * 24 * 8, zero_reason="communication")
    assert cost(call("_c10d_functional.wait_tensor.default", out, outputs=(out,))).bytes == 0


def test_a_sparse_operand_of_an_elementwise_operator_is_unknown() -> None:
    sparse = TensorMeta((6, 8), (), "float32", "sparse_coo", 5)
    assert cost_of(call("aten.relu.default", sparse, outputs=(sparse,))) is None
