"""Derived closed forms: the published figures, and that a measurement above its roof is an error."""

from __future__ import annotations

import pytest
import torch
from costs_recorder import calls_of

from rooftile.costs import cost_of, flops
from rooftile.errors import UnitError, UsageError

LLAMA = {
    "params": 8_030_261_248,
    "embedding_params": 128_256 * 4096,
    "layers": 32,
    "heads": 32,
    "head_dim": 128,
    "seq": 8192,
}


def matmul_flops(module: torch.nn.Module, x: torch.Tensor) -> int:
    return sum(cost.matmul_flops for one in calls_of(lambda: module(x)) if (cost := cost_of(one)))


def test_torchtitans_llama_needs_57_914_gflop_a_token_and_reached_33_7_percent() -> None:
    per_token = flops.model_per_token(**LLAMA)
    assert per_token / 1e9 == pytest.approx(57.914, abs=5e-4)
    assert flops.mfu(5762, per_token, 989e12) == pytest.approx(0.337, abs=5e-4)


def test_causal_halves_the_attention_term_only() -> None:
    dense, causal = flops.model_per_token(**LLAMA), flops.model_per_token(**LLAMA, causal=True)
    assert dense - causal == 6 * 32 * 32 * 128 * 8192


def test_doubling_the_sequence_more_than_doubles_the_work_of_a_sequence() -> None:
    short, long = (flops.model_per_token(**{**LLAMA, "seq": seq}) * seq for seq in (8192, 16384))
    assert long > 2.2 * short


def test_a_utilisation_above_one_is_an_error_in_the_units() -> None:
    with pytest.raises(UnitError, match="check units"):
        flops.mfu(5762, 57.914e9, 989)  # the peak in TFLOP/s
    with pytest.raises(UnitError):
        flops.mfu(20_000, 57.914e9, 989e12)
    with pytest.raises(UsageError, match="above 0"):
        flops.mfu(1, 1, 0)


def test_layer_formulas_are_what_the_captured_layers_do() -> None:
    with torch.device("meta"):
        layer, x = torch.nn.Linear(12, 20), torch.empty(6, 12)
        conv, image = torch.nn.Conv2d(3, 8, 5, padding=2, stride=2), torch.empty(4, 3, 32, 32)
        seq = torch.empty(2, 10, 16)
        weights = [torch.empty(16, 16) for _ in range(4)]
    assert matmul_flops(layer, x) == flops.linear(6, 12, 20) == 2 * 6 * 12 * 20
    assert matmul_flops(conv, image) == flops.conv2d(4, 16, 16, 5, 3, 8)

    def attention() -> torch.Tensor:
        q, k, v = (seq @ w for w in weights[:3])
        return torch.softmax(q @ k.mT, -1) @ v @ weights[3]

    products = sum(cost.matmul_flops for one in calls_of(attention) if (cost := cost_of(one)))
    assert products == flops.self_attention(2, 10, 16) == 2 * (4 * 10**2 * 16 + 8 * 10 * 16**2)


def test_dense_layers_reach_a_work_ratio_of_two_within_the_bound_of_four() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(8)))
        x = torch.empty(128, 64, requires_grad=True)

    def matmuls(backward: bool) -> int:
        run = (
            (lambda: torch.autograd.backward(model(x), torch.empty(128, 64, device="meta")))
            if backward
            else (lambda: model(x))
        )
        return sum(cost.flops for one in calls_of(run) if (cost := cost_of(one)) and cost.family == "matmul")

    forward = matmuls(False)
    ratio = flops.work_ratio(forward, matmuls(True) - forward)
    assert (ratio.backward, ratio.total) == (2, 3)
    assert ratio.within
    assert (ratio.backward_bound, ratio.total_bound) == (4, 5)
    assert not flops.work_ratio(1, 4.5).within
    assert forward * 3 == 6 * 8 * 64 * 64 * 128  # 6 P per row


@pytest.mark.parametrize("change", [{"params": -1}, {"embedding_params": 10**11}, {"seq": float("nan")}])
def test_impossible_models_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        flops.model_per_token(**{**LLAMA, **change})
    with pytest.raises(UsageError):
        flops.work_ratio(0, 1)
