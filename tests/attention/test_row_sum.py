"""The row sum is the sum of the probabilities that multiply V, rounded as they are: with V = 1 every average is 1."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import rooftile

from .inputs import Case, operands
from .support import EVERY_DTYPE, EVERY_KERNEL, attend

INPUTS = [
    Case(64, 64),
    Case(33, 500, heads=(6, 2), batch=2),
    Case(70, 1030, mask="causal"),
    Case(1, 2048, head_dim=128, heads=(8, 2)),
    Case(1, 2048, head_dim=128, heads=(8, 8)),
    Case(2, 1900, head_dim=64, heads=(2, 2)),
    Case(3, 1900, head_dim=33, heads=(2, 2)),
    Case(40, 300, values="outlier"),
    Case(130, 130, values="banded", mask="window"),
    Case(31, 97, head_dim=80, value_dim=24, batch=2, mask="padding-left"),
]


def ulps_from_one(x: Tensor) -> float:
    """Distance in units of the last place of FP32, those above 1."""
    return float((x.double() - 1).abs().max()) * 2.0**23


def ones(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = operands(case, torch.Generator().manual_seed(11))
    return q, k, torch.ones_like(v)


def without_empty_rows(out: Tensor, lse: Tensor) -> Tensor:
    return out[lse.isfinite()]


@EVERY_KERNEL
@EVERY_DTYPE
@pytest.mark.parametrize("case", INPUTS, ids=str)
def test_the_partial_state_of_equal_values_is_within_4_ulps(kernel: str, dtype: torch.dtype, case: Case):
    case = replace(case, dtype=dtype)
    q, k, v = ones(case)
    state = rooftile.AttentionState.of(q, k, v, mask=case.build_mask(), kernel=kernel)
    assert state.out.dtype == torch.float32
    assert ulps_from_one(without_empty_rows(state.out, state.lse)) <= 4


@EVERY_KERNEL
@EVERY_DTYPE
@pytest.mark.parametrize("case", INPUTS, ids=str)
def test_the_output_of_equal_values_is_that_value(kernel: str, dtype: torch.dtype, case: Case):
    """Exactly, in 16 bits; within 4 ulps in FP32."""
    case = replace(case, dtype=dtype)
    q, k, v = ones(case)
    out, lse = attend(kernel, q, k, v, mask=case.build_mask(), return_lse=True)
    assert ulps_from_one(without_empty_rows(out, lse)) <= (4 if dtype == torch.float32 else 0)


@EVERY_KERNEL
@EVERY_DTYPE
def test_merged_states_of_equal_values_are_within_8_ulps(kernel: str, dtype: torch.dtype):
    q, k, v = ones(Case(20, 400, dtype=dtype))
    cuts = (0, 7, 120, 121, 400)
    parts = [
        rooftile.AttentionState.of(q, k[:, :, a:b], v[:, :, a:b], kernel=kernel) for a, b in itertools.pairwise(cuts)
    ]
    assert ulps_from_one(rooftile.merge_all(parts).out) <= 8


def emulated(q: Tensor, k: Tensor, v: Tensor, round_the_row_sum: bool) -> Tensor:
    """A kernel's arithmetic in FP32: P rounded to the dtype for its product with V, and either sum."""
    s = q.float() @ k.float().mT * q.shape[-1] ** -0.5
    p = (s - s.amax(-1, keepdim=True)).exp()
    rounded = p.to(q.dtype).float()
    total = (rounded if round_the_row_sum else p).sum(-1, keepdim=True)
    return (rounded @ v.float()) / total


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_kernel_with_an_unrounded_row_sum_would_fail(dtype: torch.dtype):
    """The fault is worth thousands of ulps in FP32, and the 16-bit output hides it."""
    q, k, v = ones(Case(128, 33, dtype=dtype))
    right, wrong = (emulated(q, k, v, round_the_row_sum) for round_the_row_sum in (True, False))
    assert ulps_from_one(right) <= 4
    assert ulps_from_one(wrong) > 1000
    assert ulps_from_one(wrong) < 1.6e-3 * 2**23
    assert torch.equal(wrong.to(dtype), torch.ones_like(wrong, dtype=dtype))
