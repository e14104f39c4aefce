"""The score table against quantise-dequantise, and its verdict on tensors whose answer is known."""

from __future__ import annotations

import json
import math
import statistics

import pytest
import torch

from rooftile import lowp
from rooftile.errors import UsageError
from rooftile.formats import get_format
from rooftile.lowp import native

NAMES = [name for name in lowp.RECIPES if name != "delayed"]


def tensor(seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(200, 333, generator=g) * torch.exp(2 * torch.randn(200, 1, generator=g))
    x[0, 0], x[1, 1], x[2] = math.nan, math.inf, 0.0
    return x


@pytest.mark.parametrize("name", NAMES)
def test_the_score_is_what_quantise_and_dequantise_would_show(name: str, path: str) -> None:
    x = tensor()
    x[0, 0] = x[1, 1] = 0.0
    row = lowp.score(x, [name])[name]
    values = lowp.quantize(x, name).dequantize().double()
    nonzero = x != 0
    error = ((values - x).abs() / x.abs())[nonzero]
    assert row.flushed == int((nonzero & (values == 0)).sum())
    assert row.median_error == pytest.approx(float(error.median()), rel=0.005)
    assert row.p99_error == pytest.approx(float(error.sort().values[math.ceil(0.99 * error.numel()) - 1]), rel=0.005)
    assert row.max_error == pytest.approx(float(error.max()), rel=1e-3)
    noise = float((values - x).square().sum())
    assert row.snr_db == pytest.approx(10 * math.log10(float(x.double().square().sum()) / noise), abs=0.01)
    assert row.bytes_per_value == lowp.quantize(x, name).bytes_per_value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_and_plain_torch_score_alike(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = tensor().clamp(-1e4, 1e4).to(dtype)
    fast = lowp.score(x, NAMES)
    monkeypatch.setattr(native, "available", lambda x: False)
    for a, b in zip(fast.rows, lowp.score(x, NAMES).rows, strict=True):
        assert (a.zeros, a.non_finite, a.flushed, a.saturated) == (b.zeros, b.non_finite, b.flushed, b.saturated)
        assert (a.median_error, a.p99_error, a.max_error) == (b.median_error, b.p99_error, b.max_error)
        assert a.snr_db == pytest.approx(b.snr_db, abs=1e-4)


def test_the_score_has_the_same_bits_on_one_thread_and_on_two() -> None:
    g, before = torch.Generator().manual_seed(3), torch.get_num_threads()
    found = []
    x = torch.randn(400, 333, generator=g)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            found.append(lowp.score(x))
        finally:
            torch.set_num_threads(before)
    assert found[0] == found[1]


@pytest.mark.parametrize("name", NAMES)
def test_one_long_row_is_scored_in_parts_that_cut_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(200_003, generator=torch.Generator().manual_seed(4))
    fast = lowp.score(x, [name]).rows[0]
    monkeypatch.setattr(native, "available", lambda x: False)
    plain = lowp.score(x, [name]).rows[0]
    assert (fast.flushed, fast.saturated, fast.median_error, fast.max_error) == (
        plain.flushed, plain.saturated, plain.median_error, plain.max_error,
    )  # fmt: skip
    assert fast.snr_db == pytest.approx(plain.snr_db, abs=1e-4)


def test_zeros_nan_and_inf_are_counted_apart_from_flushed(path: str) -> None:
    row = lowp.score(tensor(), ["tensor"])["tensor"]
    assert (row.zeros, row.non_finite) == (333, 2)
    assert row.nonzero == 200 * 333 - 335


def test_saturation_is_counted_where_the_scale_rule_allows_it(path: str) -> None:
    block = torch.ones(32)
    block[0] = 957.0
    table = lowp.score(block, ["mx-1x32", "mx-1x32-up"])
    assert (table["mx-1x32"].saturated, table["mx-1x32-up"].saturated) == (1, 0)
    assert table["mx-1x32"].max_error == pytest.approx((957 - 896) / 957, rel=1e-5)


def test_one_outlier_in_the_table_over_seeds(path: str) -> None:
    flushed, coarse, fine = [], [], []
    for seed in range(24):
        g = torch.Generator().manual_seed(100 + seed)
        x = torch.cat([torch.randn(1024, generator=g) * 0.001, torch.tensor([100.0])])
        table = lowp.score(x, ["tensor", "tile-1x128"])
        assert table.finer_scales_matter
        assert "finer scales matter" in table.reading
        flushed.append(table["tensor"].flushed / 1024)
        coarse.append(table["tensor"].median_error)
        fine.append(table["tile-1x128"].median_error)
    assert statistics.mean(flushed) == pytest.approx(0.172, abs=0.008)
    assert 0.14 < statistics.mean(coarse) < 0.16
    assert 0.020 < statistics.mean(fine) < 0.023


@pytest.mark.parametrize("seed", range(4))
def test_a_gaussian_tensor_needs_no_finer_scales(seed: int, path: str) -> None:
    table = lowp.score(torch.randn(64, 512, generator=torch.Generator().manual_seed(seed)))
    assert table.finer_scales_matter is False
    assert "don't matter" in table.reading


def test_without_a_pair_to_compare_there_is_no_verdict() -> None:
    assert lowp.score(torch.ones(4), ["mx-1x32"]).finer_scales_matter is None
    assert lowp.score(torch.zeros(4)).finer_scales_matter is None
    assert lowp.score(torch.empty(0, 4)).rows[0].total == 0


def test_values_that_the_format_holds_have_no_error(path: str) -> None:
    fmt = get_format("e4m3fn")
    x = torch.tensor([fmt.magnitude(code) for code in range(1, fmt.max_code + 1)])
    row = lowp.score(x, ["tensor"])["tensor"]
    assert (row.flushed, row.saturated, row.max_error, row.snr_db) == (0, 0, 0.0, math.inf)


def test_the_table_is_plain_json() -> None:
    table = lowp.score(tensor())
    data = json.loads(json.dumps(table.to_dict(), allow_nan=False))
    assert [row["recipe"] for row in data["rows"]] == [row.recipe for row in table.rows]


@pytest.mark.parametrize("recipes", [[], ["delayed"], ["nothing"]])
def test_bad_recipes_get_one_sentence(recipes: list[str]) -> None:
    with pytest.raises(UsageError):
        lowp.score(torch.ones(4), recipes)


def test_integers_are_refused() -> None:
    with pytest.raises(UsageError, match="int64"):
        lowp.score(torch.arange(4))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["nvfp4-1x16", "tensor"])
def test_finite_values_in_a_block_that_a_nan_destroys_are_lost_as_dequantize_says(
    bad: float, name: str, path: str
) -> None:
    x = torch.randn(4, 40, generator=torch.Generator().manual_seed(0))
    x[1, 3], x[2, 39], x[1, 5] = bad, bad, 0.0
    row = lowp.score(x, [name]).rows[0]
    back = lowp.quantize(x, name).dequantize()
    assert row.lost == int((x.isfinite() & ~back.isfinite()).sum())
    assert row.lost == (15 + 7 if name == "nvfp4-1x16" else 0)
    assert row.flushed == int((x.isfinite() & (x != 0) & (back == 0)).sum())
    assert (row.max_error == 1.0) == (row.lost > 0 or row.flushed > 0)


def test_a_reading_says_why_nothing_can_be_compared_and_what_is_not_finite() -> None:
    x = torch.randn(4, 40)
    assert "neither tensor nor row" in lowp.score(x, ["nvfp4-1x16"]).reading
    assert "no recipe is finer than tensor" in lowp.score(x, ["tensor", "nvfp4-1x16"]).reading
    assert "the tensor is empty" in lowp.score(x[:0]).reading
    assert "all finite values are zero" in lowp.score(x * 0).reading
    assert "none of the 160 values is finite" in lowp.score(x * float("nan")).reading
    x[0, :2] = float("inf")
    assert "(2 of 160 not finite)" in lowp.score(x).reading
