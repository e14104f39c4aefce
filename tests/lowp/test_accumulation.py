"""Simulated accumulators against numpy's own fp32, exact sums and what is published of Hopper's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rooftile import lowp
from rooftile.errors import UsageError
from rooftile.formats import round_to


def operands(k: int, seed: int = 0, rows: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    a, b = torch.rand(rows, k, generator=g), torch.rand(rows, k, generator=g)
    return round_to(a, "e4m3fn"), round_to(b, "e4m3fn")


def test_fp32_is_numpys_serial_fp32_sum() -> None:
    a, b = operands(300)
    got = lowp.simulate_matmul(a, b, "fp32").values
    for i in range(6):
        total = np.float32(0)
        for k in range(300):
            total = np.float32(total + np.float32(a[i, k].item() * b[2, k].item()))  # exact product of two e4m3 values
        assert got[i, 2].item() == total


def test_bf16_stops_growing_where_a_term_is_half_a_spacing() -> None:
    ones = torch.ones(1, 1000)
    assert lowp.simulate_matmul(ones, ones, "bf16").values.item() == 256.0
    assert lowp.simulate_matmul(ones, ones, "fp32").values.item() == 1000.0


@pytest.mark.parametrize("seed", range(3))
def test_promotion_every_128_keeps_hoppers_narrow_sums_near_fp32(seed: int) -> None:
    a, b = operands(4096, seed)
    narrow, promoted, wide = (
        lowp.simulate_matmul(a, b, name) for name in ("hopper-fp8-unpromoted", "hopper-fp8", "fp32")
    )
    assert narrow.mean_error > 8 * promoted.mean_error > 8 * wide.mean_error
    assert narrow.bias < -0.9 * narrow.mean_error  # truncation shrinks every sum of positive terms


def test_random_operands_of_4096_terms_are_off_by_about_a_percent_at_most() -> None:
    # "Nearly 2 %" at most (DeepSeek-V3, section 3.3.2) is of this order; which matrices, it leaves open.
    worst = []
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        a, b = (round_to(torch.randn(6, 4096, generator=g), "e4m3fn") for _ in "ab")
        worst.append(lowp.simulate_matmul(a, b, "hopper-fp8-unpromoted").max_relative)
    assert 2e-3 < min(worst) <= max(worst) < 0.2


def test_truncation_cuts_a_product_below_13_bits_of_the_largest() -> None:
    a = torch.tensor([[1.0, 2.0**-14]])
    b = torch.ones(1, 2)
    assert lowp.simulate_matmul(a, b, "hopper-fp8").values.item() == 1.0
    a = torch.tensor([[1.0, 2.0**-13]])
    assert lowp.simulate_matmul(a, b, "hopper-fp8").values.item() == 1.0 + 2.0**-13


def test_an_exact_sum_has_no_error_and_the_fp64_product_stands_beside() -> None:
    a = torch.randint(-8, 8, (5, 64)).float()
    result = lowp.simulate_matmul(a, a, "hopper-fp8")
    assert result.max_error == 0
    assert torch.equal(result.exact, a.double() @ a.double().t())
    assert "64 terms" in result.reading
    assert lowp.simulate_matmul(a[:0], a, "fp32").max_error == 0


def test_bad_input_gets_one_sentence() -> None:
    ones = torch.ones(2, 3)
    with pytest.raises(UsageError, match=r"\(m, k\) and \(n, k\)"):
        lowp.simulate_matmul(ones, torch.ones(2, 4))
    with pytest.raises(UsageError, match="int64"):
        lowp.simulate_matmul(ones, torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(UsageError, match="near matches: fp32"):
        lowp.simulate_matmul(ones, ones, "fp3")
    with pytest.raises(UsageError, match="whole groups"):
        lowp.ACCUMULATORS["hopper-fp8"].promoted(100)


@pytest.mark.parametrize("name", ["fp32", "hopper-fp8", "hopper-fp8-unpromoted"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_sum_beyond_fp32_is_infinite_and_the_reading_counts_it(name: str, sign: float) -> None:
    a = torch.tensor([[3e38 * sign, 3e38 * sign], [1.0, 1.0]])
    result = lowp.simulate_matmul(a, torch.ones(1, 2), name)
    assert result.values.flatten().tolist() == [sign * float("inf"), 2.0]
    assert "1 of 2 results are not finite" in result.reading
    assert "nan" not in result.reading
    assert result.max_error == 0.0
    lost = lowp.simulate_matmul(torch.tensor([[float("inf"), 1.0]]), torch.ones(1, 2), name)
    assert "no error can be given" in lost.reading
