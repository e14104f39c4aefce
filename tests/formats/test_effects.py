from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from rooftile.errors import UsageError
from rooftile.formats import (
    FORMATS,
    accumulate,
    apply_update,
    cancellation,
    collapsed_values,
    decode,
    encode,
    epsilon_in,
    exponent_histogram,
    flushed,
    loss_scale_window,
    overflowed,
    rank_recipes,
    round_to,
    softmax_in,
    spacing,
    subnormal,
    swallowed_updates,
    through_loss_scale,
    updates_over_steps,
)
from rooftile.formats.recipes import estimate_recipe, largest_safe_exponent
from rooftile.formats.reference import round_value
from rooftile.formats.single_rounding import add_scalars, add_tensors, exact_sum, round_scalar

from .values import random_values, same, tricky_values

ADDERS = ["fp32", "tf32", "fp16", "bf16", "fp8_e4m3fn", "fp8_e5m2fnuz", "fp4_e2m1"]


# --- Sums that are rounded once ---


@pytest.mark.parametrize("name", ADDERS)
def test_a_sum_is_the_exact_sum_rounded_once(name: str, generator: torch.Generator) -> None:
    fmt = FORMATS[name]
    a, b = random_values(fmt, 3000, generator), random_values(fmt, 3000, generator)
    a[:500] = round_to(a[:500], fmt)
    b[:500] = (torch.nextafter(a[:500].abs(), torch.tensor(math.inf, dtype=torch.float64)) - a[:500].abs()) * 2.0**-9
    exact = [Fraction(u) + Fraction(v) for u, v in zip(a.tolist(), b.tolist(), strict=True)]
    expected = np.array([round_value(e, fmt, overflow="ieee") for e in exact]) + 0.0
    assert same(add_tensors(a, b, fmt).double() + 0.0, expected)
    assert same(np.array([add_scalars(u, v, fmt) for u, v in zip(a.tolist(), b.tolist(), strict=True)]) + 0.0, expected)
    if fmt.name != "fp32":
        up = [round_value(e, fmt, "up", overflow="ieee") for e in exact]
        assert same(add_tensors(a, b, fmt, "up").double() + 0.0, np.array(up) + 0.0)


def test_an_fp64_sum_just_past_a_midpoint_is_not_rounded_twice() -> None:
    """1 + (2^-8 + 2^-70): fp64 alone would land on bf16's midpoint and go back to even."""
    a, b = torch.tensor([1.0 + 2.0**-8], dtype=torch.float64), torch.tensor([2.0**-70], dtype=torch.float64)
    assert round_to(a + b, "bf16").item() == 1.0
    assert add_tensors(a, b, FORMATS["bf16"]).item() == 1.0078125
    assert add_scalars(a.item(), b.item(), FORMATS["bf16"]) == 1.0078125


@pytest.mark.parametrize("name", [n for n in FORMATS if n not in ("e8m0", "fp64", "fp32", "tf32")])
def test_the_scalar_loop_rounds_as_the_reference(name: str) -> None:
    fmt = FORMATS[name]
    x = tricky_values(fmt).tolist() if fmt.bits <= 8 else tricky_values(fmt).tolist()[::41]
    found = [round_scalar(v, fmt) for v in x]
    expected = [round_value(v, fmt, overflow="ieee") for v in x]
    assert same(np.array(found) + 0.0, np.array(expected) + 0.0)


def test_the_exact_sum_rounds_as_a_sum_of_fractions(generator: torch.Generator) -> None:
    for name in ("fp16", "fp64"):
        for _ in range(50):
            terms = random_values(FORMATS["fp32"], 30, generator).tolist()
            exact = sum(map(Fraction, terms))
            assert round_value(exact_sum(terms), name) == round_value(exact, name)


# --- Updates ---


@pytest.mark.parametrize(("fmt", "update"), [("fp16", 1e-4), ("bf16", 1e-3), ("fp32", 1e-8)])
def test_the_published_updates_of_1_are_swallowed(fmt: str, update: float) -> None:
    weight, step = torch.ones(1), -round_to(torch.tensor([update], dtype=torch.float64), fmt)
    assert apply_update(weight, step, fmt).item() == 1.0
    counted = swallowed_updates(weight, step, fmt)
    assert (counted.swallowed, counted.effective, counted.fraction) == (1, 0, 1.0)


def test_half_an_ulp_of_bf16_is_asymmetric_around_1() -> None:
    updates = torch.tensor([-0.0019, -0.00196, 0.0038, 0.0040])
    after = apply_update(torch.ones(4), updates, "bf16")
    assert after.tolist() == [1.0, 0.99609375, 1.0, 1.0078125]
    counted = swallowed_updates(torch.ones(4), updates, "bf16")
    assert (counted.total, counted.swallowed, counted.effective) == (4, 2, 2)
    assert "2 of 4 non-zero updates" in counted.reading


def test_bf16_weights_of_1_never_move_at_learning_rate_6e_4_but_their_fp32_masters_do() -> None:
    weight, update = torch.ones(768), torch.full((768,), -6e-4)
    after = updates_over_steps(weight, update, "bf16", steps=100)
    assert (after.moved, after.total, after.reached) == (0, 768, 0)
    assert updates_over_steps(weight, update, "fp32", steps=100).moved == 768
    assert "0 of 768 bf16 weights have moved" in after.reading


def test_zero_updates_are_counted_apart_from_swallowed_ones_and_decay_is_an_update_of_its_own() -> None:
    weight = torch.tensor([1.0, 1.0, 1.0, math.inf, 0.0])
    update = torch.tensor([0.0, 1e-4, 0.5, 1.0, 0.0])
    counted = swallowed_updates(weight, update, "bf16", weight_decay=1e-4)
    assert (counted.zero, counted.swallowed, counted.effective, counted.non_finite) == (2, 1, 1, 1)
    assert counted.decay is not None
    assert (counted.decay.zero, counted.decay.swallowed, counted.decay.effective) == (1, 3, 0)
    assert "of weight decay alone, 3 of 3" in counted.reading
    strong = swallowed_updates(weight, update, "bf16", weight_decay=0.1)
    assert strong.decay is not None
    assert strong.decay.effective == 3


def test_decay_is_rounded_before_the_update_is_added() -> None:
    """Each alone is below half an ulp of 1 and swallowed, together they would pass it."""
    weight, update = torch.ones(1), torch.tensor([-0.0015])
    counted = swallowed_updates(weight, update, "bf16", weight_decay=0.0015)
    assert counted.decay is not None
    assert (counted.decay.swallowed, counted.swallowed) == (1, 1)
    assert apply_update(weight, update - 0.0015, "bf16").item() != 1.0


def test_stochastic_rounding_moves_weights_on_average(generator: torch.Generator) -> None:
    weight, update = torch.ones(768), torch.full((768,), -6e-4)
    after = updates_over_steps(weight, update, "bf16", 100, "stochastic", generator)
    assert after.moved > 700


def test_updates_of_another_shape_or_dtype_are_refused() -> None:
    with pytest.raises(UsageError, match="equal shapes"):
        swallowed_updates(torch.ones(3), torch.ones(2), "bf16")
    with pytest.raises(UsageError, match="floating tensor"):
        apply_update(torch.ones(3, dtype=torch.int32), torch.ones(3), "bf16")
    with pytest.raises(UsageError, match="steps is 0"):
        updates_over_steps(torch.ones(1), torch.ones(1), "bf16", 0)
    with pytest.raises(UsageError, match="rounded to nearest only"):
        apply_update(torch.ones(1), torch.ones(1), "fp64", "up")
    assert swallowed_updates(torch.empty(0), torch.empty(0), "bf16").fraction == 0.0


# --- Accumulation ---


def test_ten_thousand_serial_additions_of_an_eighth_stop_at_256_in_fp16() -> None:
    terms = torch.full((10_000,), 0.125)
    result = accumulate(terms, "fp16")
    assert result.serial == 256.0
    assert result.wide == 1250.0
    assert result.exact == result.best == 1250.0
    assert result.stagnant == 10_000 - 2048
    assert accumulate(terms, "fp32").serial == 1250.0
    assert abs(result.pairwise - 1250) <= 1
    assert result.wide_ulps == 0.0
    assert "serial fp16 gives 256" in result.reading


def test_serial_sums_equal_a_loop_in_the_torch_dtype(generator: torch.Generator) -> None:
    for dtype, name in ((torch.float16, "fp16"), (torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        terms = torch.randn(400, generator=generator).to(dtype)
        total = torch.zeros((), dtype=dtype)
        for term in terms:
            total = total + term
        assert accumulate(terms, name).serial == total.item()


def test_the_order_of_a_cancelling_sum_decides_its_fp32_result() -> None:
    assert accumulate(torch.tensor([1e8, -1e8, 1.0]), "fp32").serial == 1.0
    assert accumulate(torch.tensor([1e8, 1.0, -1e8]), "fp32").serial == 0.0
    assert accumulate(torch.tensor([1e8, 1.0, -1e8]), "fp32").exact == 1.0


def test_a_dot_product_in_fp16_overflows_where_a_wide_accumulator_does_not() -> None:
    x, y = torch.full((64,), 64.0), torch.cat([torch.full((32,), 64.0), torch.full((32,), -64.0)])
    result = accumulate(x, "fp16", other=y)
    assert result.serial == math.inf
    assert result.serial_ulps == math.inf
    assert result.wide == 0.0
    assert result.exact == 0.0
    rounded = accumulate(torch.tensor([1 + 2.0**-10]), "fp32", other=torch.tensor([1 + 2.0**-10]), product="fp16")
    assert rounded.serial == 1 + 2.0**-9
    assert (
        accumulate(torch.tensor([1 + 2.0**-10]), "fp32", other=torch.tensor([1 + 2.0**-10])).serial
        == (1 + 2.0**-10) ** 2
    )


def test_pairwise_errs_less_than_serial_on_many_equal_terms() -> None:
    result = accumulate(torch.full((4096,), 0.1), "bf16")
    assert result.pairwise_ulps < result.serial_ulps / 10
    assert accumulate(torch.tensor([0.1]), "bf16").pairwise == round_value(float(np.float32(0.1)), "bf16")
    assert accumulate(torch.tensor([1.0, 2.0, 4.0]), "bf16").pairwise == 7.0
    empty = accumulate(torch.empty(0), "bf16")
    assert (empty.serial, empty.pairwise, empty.exact, empty.stagnant) == (0.0, 0.0, 0.0, 0)


def test_bad_sums_are_refused() -> None:
    with pytest.raises(UsageError, match="flatten it"):
        accumulate(torch.ones(2, 2), "fp16")
    with pytest.raises(UsageError, match="Inf or NaN"):
        accumulate(torch.tensor([1.0, math.inf]), "fp16")
    with pytest.raises(UsageError, match="no sign or no zero"):
        accumulate(torch.ones(2), "e8m0")
    with pytest.raises(UsageError, match="not exact"):
        accumulate(torch.ones(2).double(), "fp16", other=torch.ones(2))
    with pytest.raises(UsageError, match="equally many"):
        accumulate(torch.ones(2), "fp16", other=torch.ones(3))
    with pytest.raises(UsageError, match="give other"):
        accumulate(torch.ones(2), "fp16", product="fp16")


def test_the_condition_number_of_a_sum() -> None:
    found = cancellation(torch.tensor([1e8, 1.0, -1e8]))
    assert found.condition == 2e8 + 1
    assert 27 < found.bits_lost < 28
    assert found.trusted_digits("fp32") < 0 + 0.1
    assert found.trusted_digits("fp64") > 7
    assert cancellation(torch.tensor([1.0, 2.0])).condition == 1.0
    assert cancellation(torch.tensor([1.0, -1.0])).condition == math.inf
    assert "no digit" in cancellation(torch.tensor([1.0, -1.0])).reading
    assert cancellation(torch.empty(0)).condition == 1.0
    with pytest.raises(UsageError, match="Inf or NaN"):
        cancellation(torch.tensor([math.nan]))


# --- Softmax ---


@pytest.mark.parametrize(
    ("fmt", "expected"),
    [("fp16", [0.0900, 0.2448, 0.6650]), ("fp32", [0.0900, 0.2447, 0.6652]), ("bf16", [0.3340, 0.3340, 0.3340])],
)
def test_softmax_of_1000_1001_1002(fmt: str, expected: list[float]) -> None:
    found = softmax_in(torch.tensor([1000.0, 1001.0, 1002.0]), fmt)
    assert [round(p, 4) for p in found.stable.tolist()] == expected
    assert found.direct_broken_rows == 1
    assert not found.direct.isfinite().all()
    assert (found.distinct_before, found.distinct_after) == ((3, 1) if fmt == "bf16" else (3, 3))
    assert found.stored.tolist() == ([1000.0] * 3 if fmt == "bf16" else [1000.0, 1001.0, 1002.0])
    assert ("storage erased 2 of 3" in found.reading) == (fmt == "bf16")


def test_small_logits_keep_the_direct_form_finite_and_rows_are_counted() -> None:
    logits = torch.tensor([[10.0, 11.0, 12.0], [10000.0, 10001.0, 10002.0]])
    found = softmax_in(logits, "fp32")
    assert (found.rows, found.direct_broken_rows) == (2, 1)
    assert found.direct[0].isfinite().all()
    assert softmax_in(logits[0], "fp64").direct_broken_rows == 0
    assert softmax_in(logits, "fp16").distinct_after == 4  # at 10,000 fp16 is spaced by 8
    assert softmax_in(torch.empty(0, 3), "fp16").rows == 0
    with pytest.raises(UsageError, match="scalar"):
        softmax_in(torch.tensor(1.0), "fp16")


# --- Collapse, eps, loss scale ---


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_512_positions_from_65536_collapse_to_2_in_bf16(dtype: torch.dtype) -> None:
    found = collapsed_values(65_536 + torch.arange(512, dtype=dtype), "bf16")
    assert (found.distinct_before, found.distinct_after, found.collapsed) == (512, 2, 510)
    assert found.exact_integers == 256
    assert "exact up to 256" in found.reading


def test_exact_integers_are_exact_and_the_next_one_is_not() -> None:
    for name in ("bf16", "fp16", "fp32", "fp8_e4m3fn", "fp4_e2m1"):
        top = collapsed_values(torch.arange(3), name).exact_integers
        assert round_to(torch.tensor(float(top), dtype=torch.float64), name).item() == top
        assert round_to(torch.tensor(float(top + 1), dtype=torch.float64), name).item() != top + 1
        low = torch.arange(min(top, 5000) + 1).double()
        assert torch.equal(round_to(low, name), low.to(round_to(low, name).dtype))


def test_ids_beyond_fp64_and_nan_are_refused() -> None:
    with pytest.raises(UsageError, match=r"2\^53"):
        collapsed_values(torch.tensor([2**53 + 1]), "bf16")
    with pytest.raises(UsageError, match="NaN"):
        collapsed_values(torch.tensor([math.nan]), "bf16")
    with pytest.raises(UsageError, match="floating"):
        collapsed_values(torch.tensor([True]), "bf16")


def test_an_eps_of_1e_minus_8_is_zero_in_fp16_and_not_in_bf16() -> None:
    assert epsilon_in(1e-8, "fp16").is_zero
    assert "protects no division" in epsilon_in(1e-8, "fp16").reading
    assert not epsilon_in(1e-8, "bf16").is_zero
    assert epsilon_in(2.0**-25, "fp16").is_zero
    assert not epsilon_in(1e-7, "fp16").is_zero
    with pytest.raises(UsageError, match="eps is 0"):
        epsilon_in(0.0, "fp16")


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("eps", [1e-3, 1e-5, 1e-6, 2.0**-20, 3e-7])
def test_an_eps_is_lost_from_the_stated_magnitude_on_and_not_one_binade_below(name: str, eps: float) -> None:
    found = epsilon_in(eps, name)
    fmt = FORMATS[name]
    assert add_scalars(found.absorbed_from, found.stored, fmt) == found.absorbed_from
    assert add_scalars(found.absorbed_from / 2, found.stored, fmt) != found.absorbed_from / 2


def test_2_to_minus_26_returns_exactly_through_fp16_under_a_loss_scale_of_4096() -> None:
    x = torch.tensor([2.0**-26])
    assert through_loss_scale(x, "fp16", 1.0).flushed == 1
    scaled = through_loss_scale(x, "fp16", 2.0**12)
    assert (scaled.flushed, scaled.overflowed, scaled.exact) == (0, 0, 1)
    assert through_loss_scale(torch.tensor([100.0]), "fp16", 2.0**12).overflowed == 1
    assert through_loss_scale(torch.tensor([1e-8, 0.0, math.nan]), "fp16", 1024).nonzero == 1
    with pytest.raises(UsageError, match="encode_scale"):
        through_loss_scale(x, "fp16", 0.0)


# --- Recipes ---


@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3fn", "fp8_e5m2", "fp6_e3m2", "fp4_e2m1"])
@pytest.mark.parametrize("exponent", [0, 6, -6, 20])
def test_the_estimated_error_is_near_the_measured_one(name: str, exponent: int) -> None:
    """The only assumption is an even spread inside each binade, which a Gaussian nearly has."""
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 2.0**exponent
    h = exponent_histogram(x)
    y = round_to(x, name)
    measured = ((y - x).abs() / x.abs()).mean().item()
    assert estimate_recipe(h, name).relative_error == pytest.approx(measured, rel=0.05)


def test_the_largest_safe_scale_does_not_saturate_and_twice_it_would() -> None:
    for amax in (1.0, 0.75, 447.0, 448.0, 449.0, 3e-9, 2e20):
        h = exponent_histogram(torch.tensor([amax]))
        for name in ("fp8_e4m3fn", "fp8_e5m2", "fp16", "fp4_e2m1"):
            scale = 2.0 ** largest_safe_exponent(h, name)
            assert float(np.float32(amax)) * scale <= FORMATS[name].max
            assert float(np.float32(amax)) * scale * 2 > FORMATS[name].max
    assert largest_safe_exponent(exponent_histogram(torch.zeros(2)), "fp16") == 0


def test_recipes_are_ranked_by_their_error_and_scaling_helps_small_tensors() -> None:
    h = exponent_histogram(torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 1e-5)
    ranked = rank_recipes(h, ("fp8_e4m3fn", "fp8_e5m2"))
    errors = [r.relative_error for r in ranked]
    assert errors == sorted(errors)
    assert ranked[0].fmt == "fp8_e4m3fn"
    assert ranked[0].encode_scale > 1
    assert ranked[0].decode_scale * ranked[0].encode_scale == 1
    assert ranked[-1].relative_error == 1.0
    assert rank_recipes(h)[0].fmt == "fp16"
    with pytest.raises(UsageError, match="power of two"):
        estimate_recipe(h, "fp16", 3.0)
    with pytest.raises(UsageError, match="scales only"):
        estimate_recipe(h, "e8m0")


@pytest.mark.parametrize(
    ("row", "fmt", "reason"),
    [
        ([math.inf, 1.0], "fp16", "NaN or +Inf among the logits"),
        ([math.nan, 1.0], "bf16", "NaN or +Inf among the logits"),
        ([-math.inf, -math.inf], "fp16", "a row that sees nothing"),
        ([-math.inf, -math.inf], "e4m3fn", "a row that sees nothing"),
        ([70000.0, 1.0], "fp16", "became Inf or NaN in storage"),
    ],
)
def test_a_row_without_a_finite_softmax_is_told_with_its_reason(row: list[float], fmt: str, reason: str) -> None:
    alone = softmax_in(torch.tensor([row]), fmt)
    assert not alone.stable.isfinite().any()
    assert reason in alone.reading
    assert "direct form is finite" not in alone.reading
    beside = softmax_in(torch.tensor([row, [0.0, 1.0]]), fmt)
    assert "1 of 2 rows NaN in either form" in beside.reading
    assert "the direct form is finite in the other 1 of 2 rows" in beside.reading
    assert (beside.non_finite_rows + beside.masked_rows + beside.lost_rows, beside.direct_broken_rows) == (1, 0)
    masked_in_part = softmax_in(torch.tensor([[0.0, -math.inf]]), "fp16")
    assert "the direct form is finite;" in masked_in_part.reading


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused_like_sparse_ones(layout: torch.layout) -> None:
    x = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    ids = torch.nested.nested_tensor([torch.ones(2).int(), torch.ones(3).int()], layout=layout)
    calls = [
        lambda: round_to(x, "fp16"),
        lambda: encode(x, "fp16"),
        lambda: decode(ids, "fp16"),
        lambda: spacing(x, "fp16"),
        lambda: exponent_histogram(x),
        lambda: softmax_in(x, "fp16"),
        lambda: collapsed_values(x, "fp16"),
        lambda: collapsed_values(ids, "fp16"),
        lambda: accumulate(x, "fp16"),
        lambda: swallowed_updates(x, x, "fp16"),
        lambda: through_loss_scale(x, "fp16", 2.0),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="is a nested tensor; give"):
            call()


@pytest.mark.parametrize("scale", ["x", None, 0, -1.0, math.inf, math.nan, 1j])
def test_a_scale_that_is_no_positive_number_is_refused(scale: object) -> None:
    h = exponent_histogram(torch.ones(3))
    for call in (flushed, subnormal, overflowed):
        with pytest.raises(UsageError, match=r"encode_scale is .*; give a positive finite number"):
            call(h, "fp16", scale)
    with pytest.raises(UsageError, match="encode_scale is"):
        through_loss_scale(torch.ones(3), "fp16", scale)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="eps is"):
        epsilon_in(scale, "fp16")  # type: ignore[arg-type]
    assert flushed(h, "fp16", np.float32(2.0**-25)).high == 3


def test_steps_and_weight_decay_that_mean_nothing_are_refused() -> None:
    w = torch.ones(3)
    for steps in (1.5, 0, "2", math.nan):
        with pytest.raises(UsageError, match=r"steps is .*; give a whole number"):
            updates_over_steps(w, w, "bf16", steps)  # type: ignore[arg-type]
    for decay in (math.nan, -1, math.inf, "x"):
        with pytest.raises(UsageError, match="weight_decay is"):
            swallowed_updates(w, w, "bf16", weight_decay=decay)  # type: ignore[arg-type]
    assert swallowed_updates(w, w, "bf16", weight_decay=0).decay is not None


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_ids_are_counted_as_signed_ones(dtype: torch.dtype) -> None:
    ids = torch.arange(60_000, 60_512)
    assert collapsed_values(ids.to(dtype), "bf16") == collapsed_values(ids, "bf16")
    huge = torch.tensor([1, 2**63 + 5], dtype=torch.uint64)
    with pytest.raises(UsageError, match=r"larger than 2\^53"):
        collapsed_values(huge, "bf16")


def test_histograms_add_up_with_sum() -> None:
    one, two = exponent_histogram(torch.ones(3)), exponent_histogram(torch.full((2,), 5.0))
    assert sum([one, two]) == one + two
    for wrong in (1, "x", 0.5):
        with pytest.raises(TypeError):
            one + wrong
        with pytest.raises(TypeError):
            wrong + one


def test_a_loss_scale_window_of_data_with_inf_says_so() -> None:
    bad = loss_scale_window(exponent_histogram(torch.tensor([1.0, math.inf, -math.inf, math.nan])))
    assert "every finite value" in bad.reading
    assert "the data hold 2 Inf and 1 NaN, which no scale brings back" in bad.reading
    assert (bad.infs, bad.nans) == (2, 1)
    good = loss_scale_window(exponent_histogram(torch.ones(1)))
    assert "Inf" not in good.reading
    with pytest.raises(UsageError, match="1 Inf and no finite non-zero value"):
        loss_scale_window(exponent_histogram(torch.tensor([math.inf, 0.0])))
