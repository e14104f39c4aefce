from __future__ import annotations

import math
from fractions import Fraction
from typing import get_args

import ml_dtypes
import numpy as np
import pytest
import torch

from rooftile.errors import UsageError
from rooftile.formats import native
from rooftile.formats.carrier import FP32
from rooftile.formats.catalogue import FORMATS
from rooftile.formats.format import FloatFormat
from rooftile.formats.policy import Rounding
from rooftile.formats.reference import overflow_threshold, round_value
from rooftile.formats.rounding import round_to, round_with_torch

from .values import nearest_even_by_search, random_values, same, tricky_values

SMALL = [fmt for fmt in FORMATS.values() if fmt.bits <= 8]
ODD_ONES = [
    FloatFormat("flushing", 4, 3, 7, subnormals=False),
    FloatFormat("p3109", 4, 3, 8, nan_codes="negative-zero"),
    FloatFormat("no_zero", 4, 2, 7, infinities=False, nan_codes="none", subnormals=False, zero=False),
    FloatFormat("deep", 4, 3, 140),  # its values reach below fp32's subnormals
    FloatFormat("unsigned", 5, 3, 15, signed=False),
    FloatFormat("powers", 4, 0, 7, infinities=False),
    FloatFormat("flushing_powers", 3, 0, 1, infinities=False, subnormals=False),
    FloatFormat("wide_powers", 8, 0, 127, infinities=False, nan_codes="all-ones"),
    FloatFormat("inf_without_nan", 3, 2, 3, nan_codes="none"),
]
DETERMINISTIC: list[Rounding] = [mode for mode in get_args(Rounding) if mode != "stochastic"]


def by_reference(x: torch.Tensor, fmt: FloatFormat, *policy: str) -> list[float]:
    return [round_value(value, fmt, *policy) for value in x.tolist()]  # type: ignore[arg-type]


@pytest.mark.parametrize("rounding", DETERMINISTIC)
@pytest.mark.parametrize("fmt", SMALL + ODD_ONES, ids=lambda fmt: fmt.name)
def test_every_code_midpoint_and_neighbour_rounds_as_the_reference_says(fmt: FloatFormat, rounding: Rounding) -> None:
    x = tricky_values(fmt)
    for overflow in ("saturate", "ieee"):
        for inf_input in ("keep", "saturate"):
            assert same(
                round_to(x, fmt, rounding, overflow, inf_input), by_reference(x, fmt, rounding, overflow, inf_input)
            )


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_every_16_bit_code_midpoint_and_neighbour_rounds_as_the_search_says(name: str) -> None:
    fmt = FORMATS[name]
    x = tricky_values(fmt)
    x = x[x.isfinite()]
    for overflow in ("saturate", "ieee"):
        assert same(round_to(x, fmt, overflow=overflow), nearest_even_by_search(x, fmt, overflow))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["fp16", "bf16", "tf32", "fp32", "fp64"])
def test_sampled_wide_values_round_as_the_reference_says_in_every_mode(name: str, generator: torch.Generator) -> None:
    fmt = FORMATS[name]
    x = torch.cat([random_values(fmt, 1500, generator), torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan])])
    for rounding in DETERMINISTIC:
        assert same(round_to(x, fmt, rounding, "ieee"), by_reference(x, fmt, rounding, "ieee"))


@pytest.mark.parametrize("fmt", [*FORMATS.values(), *ODD_ONES], ids=lambda fmt: fmt.name)
def test_a_million_random_values_round_to_the_nearest_even(fmt: FloatFormat, generator: torch.Generator) -> None:
    x = random_values(fmt, 1_000_000 if fmt.name in FORMATS else 100_000, generator)
    if fmt.name == "fp64":
        expected = x.numpy()
    elif fmt.name == "fp32":
        with np.errstate(over="ignore"):
            expected = np.clip(x.numpy().astype(np.float32).astype(np.float64), fmt.min, fmt.max)
    else:
        expected = nearest_even_by_search(x, fmt)
    assert same(round_to(x, fmt), expected)
    assert same(round_to(x[:2000], fmt), by_reference(x[:2000], fmt))


@pytest.mark.parametrize("rounding", DETERMINISTIC)
@pytest.mark.parametrize(
    "fmt",
    [f for f in [*FORMATS.values(), *ODD_ONES] if f.min_exponent >= -126 and f.fraction_bits < 23],
    ids=lambda f: f.name,
)
def test_every_instruction_set_gives_the_bits_of_the_torch_path(fmt: FloatFormat, rounding: Rounding) -> None:
    generator = torch.Generator().manual_seed(7)
    bits = torch.randint(-(2**31), 2**31, (33_001,), generator=generator, dtype=torch.int64).to(torch.int32)
    x = torch.cat([bits.view(torch.float32), tricky_values(fmt)[:6_000].float()])
    for overflow in ("saturate", "ieee"):
        for inf_input in ("keep", "saturate"):
            expected = round_with_torch(x, fmt, FP32, rounding, overflow, inf_input)  # type: ignore[arg-type]
            for isa in range(native.ISA_NAMES.index(native.status().isa) + 1):
                found = native.round_fp32(x, fmt, rounding, overflow, inf_input, isa)  # type: ignore[arg-type]
                assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


ML_DTYPES = {
    "fp8_e4m3fn": "float8_e4m3fn",
    "fp8_e4m3fnuz": "float8_e4m3fnuz",
    "fp8_e5m2": "float8_e5m2",
    "fp8_e5m2fnuz": "float8_e5m2fnuz",
    "fp8_e3m4": "float8_e3m4",
    "fp6_e2m3": "float6_e2m3fn",
    "fp6_e3m2": "float6_e3m2fn",
    "fp4_e2m1": "float4_e2m1fn",
    "e8m0": "float8_e8m0fnu",
    "bf16": "bfloat16",
}


@pytest.mark.parametrize("name", ML_DTYPES)
def test_ml_dtypes_agrees_on_every_fp32_input_but_for_the_listed_differences(name: str) -> None:
    """ml_dtypes 0.6.0 differs in three places: NaN in a format without NaN becomes -0 and Inf its largest value; zero
    in e8m0 becomes NaN (here: the smallest value); float64 inputs are rounded twice, so float32 inputs are compared.
    """
    fmt = FORMATS[name]
    x = tricky_values(fmt).float()
    with np.errstate(over="ignore", invalid="ignore"):
        theirs = x.numpy().astype(getattr(ml_dtypes, ML_DTYPES[name])).astype(np.float64)
    ours = round_to(x, fmt, overflow="saturate" if fmt.nan_codes == "none" else "ieee")
    compared = torch.ones_like(x, dtype=torch.bool)
    if fmt.nan_codes == "none":
        compared = x.isfinite()
    if not fmt.zero:
        compared = x != 0
    assert compared.float().mean() > 0.95
    assert same(ours[compared], theirs[compared.numpy()])


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_torch_agrees_inside_the_range_on_fp32_inputs(name: str) -> None:
    """Outside the range torch's casts saturate or give NaN depending on its release: no oracle there."""
    x = tricky_values(FORMATS[{"float16": "fp16", "bfloat16": "bf16"}.get(name, name.replace("float8", "fp8"))]).float()
    fmt = FORMATS[{"float16": "fp16", "bfloat16": "bf16"}.get(name, name.replace("float8", "fp8"))]
    x = x[x.abs() <= fmt.max]
    assert same(round_to(x, fmt), x.to(getattr(torch, name)).double())


def test_464_rounds_to_448_and_465_is_nan_unless_saturating(path: str) -> None:
    x = torch.tensor([464.0, 465.0, -465.0])
    assert same(round_to(x, "e4m3fn", overflow="ieee"), [448.0, math.nan, math.nan])
    assert same(round_to(x, "e4m3fn", overflow="saturate"), [448.0, 448.0, -448.0])


def test_a_float64_just_inside_a_tie_is_rounded_once_not_twice() -> None:
    x = torch.tensor([-431.99999999999994], dtype=torch.float64)
    assert round_to(x, "e4m3fn").item() == -416.0
    assert round_to(x.float(), "e4m3fn").item() == -448.0  # what rounding to fp32 first makes of it


def test_70000_is_inf_in_fp16_and_70144_in_bf16(path: str) -> None:
    x = torch.tensor(70_000.0)
    assert round_to(x, "fp16", overflow="ieee").item() == math.inf
    assert round_to(x, "fp16").item() == 65504.0
    assert round_to(x, "bf16", overflow="ieee").item() == 70144.0


def test_2_to_minus_26_vanishes_in_fp16_and_stays_in_bf16(path: str) -> None:
    x = torch.tensor(2.0**-26)
    assert round_to(x, "fp16").item() == 0.0
    assert round_to(x, "bf16").item() == 1.4901161193847656e-08


def test_1e_minus_8_is_lost_in_fp16_and_survives_a_scale_of_1024(path: str) -> None:
    assert round_to(torch.tensor(1e-8), "fp16").item() == 0.0
    assert round_to(torch.tensor(1e-8 * 1024), "fp16").item() > 0.0
    scaled = round_to(torch.tensor(1e-8 * 4096), "fp16").item()
    assert 0 < scaled < FORMATS["fp16"].tiny  # a subnormal
    assert round_to(torch.tensor(2.0**-25), "fp16").item() == 0.0
    assert round_to(torch.nextafter(torch.tensor(2.0**-25), torch.tensor(1.0)), "fp16").item() == 2.0**-24


def test_1_plus_a_thousandth_is_1_in_bf16(path: str) -> None:
    assert round_to(torch.tensor(1.001), "bf16").item() == 1.0


def test_minus_zero_stays_minus_zero_in_fn_and_becomes_plus_zero_in_fnuz(path: str) -> None:
    zero = torch.tensor([-0.0, -1e-30])
    assert torch.signbit(round_to(zero, "e4m3fn")).tolist() == [True, True]
    assert torch.signbit(round_to(zero, "e4m3fnuz")).tolist() == [False, False]


def test_strides_and_shapes_do_not_matter(path: str, generator: torch.Generator) -> None:
    x = torch.randn(6, 10, 4, generator=generator) * 100
    expected = round_to(x, "e4m3fn")
    for view, back in (
        (x.transpose(0, 2), lambda y: y.transpose(0, 2)),
        (x.flip(0), lambda y: y.flip(0)),
        (torch.cat([x, x], dim=2)[:, :, :4], lambda y: y),
    ):
        assert torch.equal(back(round_to(view, "e4m3fn")), expected)
    expanded = torch.tensor([465.0]).expand(3, 5)
    assert round_to(expanded, "e4m3fn").tolist() == [[448.0] * 5] * 3
    assert round_to(torch.tensor(3.3), "fp4_e2m1").shape == ()
    assert round_to(torch.empty(0, 3), "bf16").shape == (0, 3)
    assert round_to(torch.randn(5, requires_grad=True), "bf16").requires_grad is False


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64])
def test_an_integer_boolean_or_complex_tensor_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UsageError, match="floating tensor"):
        round_to(torch.ones(3).to(dtype), "bf16")


def test_a_misspelt_policy_or_format_is_refused_with_the_choices() -> None:
    x = torch.ones(2)
    with pytest.raises(UsageError, match="nearest-even, toward-zero"):
        round_to(x, "bf16", rounding="nearest")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="saturate, ieee"):
        round_to(x, "bf16", overflow="wrap")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="fp8_e4m3fn"):
        round_to(x, "fp8_e4m3")
    with pytest.raises(UsageError, match=r"torch\.Tensor"):
        round_to([1.0], "bf16")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="meta"):
        round_to(torch.ones(2, device="meta"), "bf16")


def test_the_result_has_the_input_dtype_only_where_that_holds_every_value() -> None:
    assert round_to(torch.ones(1, dtype=torch.float16), "e4m3fn").dtype == torch.float16
    assert round_to(torch.ones(1, dtype=torch.bfloat16), "fp16").dtype == torch.float32
    assert round_to(torch.tensor([65504.0], dtype=torch.float16), "bf16").item() == 65536.0
    assert round_to(torch.tensor([70144.0], dtype=torch.bfloat16), "fp16").item() == 65504.0
    assert round_to(torch.ones(1), "fp64").dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2fnuz])
def test_every_16_and_8_bit_input_rounds_as_its_float64_value(dtype: torch.dtype) -> None:
    if dtype.itemsize == 2:
        x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    else:
        x = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    for name in ("bf16", "fp16", "fp8_e4m3fn", "fp4_e2m1"):
        assert same(round_to(x, name).double(), round_to(x.double(), name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stochastic_rounding_lands_on_a_neighbour_and_is_right_on_average(
    dtype: torch.dtype, generator: torch.Generator
) -> None:
    for value in (1.03, -0.0009, 300.7, 2.0**-11):  # the last two: a coarse binade, and below the smallest subnormal
        x = torch.full((60_000,), value, dtype=dtype)
        y = round_to(x, "e4m3fn", rounding="stochastic", generator=generator).double()
        low, high = round_to(x[:1], "e4m3fn", "down").item(), round_to(x[:1], "e4m3fn", "up").item()
        assert set(y.unique().tolist()) == {low, high}
        chance = (x[0].item() - low) / (high - low)
        deviation = math.sqrt(chance * (1 - chance) / x.numel())
        assert abs(((y == high).double().mean() - chance).item()) < 5 * deviation
    exact = torch.tensor([0.0, -0.0, 1.25, math.nan, math.inf], dtype=dtype)
    assert same(round_to(exact, "fp8_e5m2", "stochastic").double(), exact.double())


def test_stochastic_rounding_repeats_with_the_generator_and_equals_the_reference_draw() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    first = round_to(x, "bf16", "stochastic", generator=torch.Generator().manual_seed(5))
    assert torch.equal(first, round_to(x, "bf16", "stochastic", generator=torch.Generator().manual_seed(5)))
    draws = torch.randint(0, 1 << 62, x.shape, generator=torch.Generator().manual_seed(5), dtype=torch.int64)
    expected = [
        round_value(v, "bf16", "stochastic", draw=Fraction(d, 1 << 62))
        for v, d in zip(x.tolist(), draws.tolist(), strict=True)
    ]
    assert same(first, expected)


def test_the_overflow_edge_is_where_the_format_says(path: str) -> None:
    edges = {"fp8_e4m3fn": 464, "fp8_e4m3fnuz": 248, "fp8_e5m2": 61440, "fp16": 65520, "fp6_e2m3": 7.75, "fp4_e2m1": 7}
    for name, edge in edges.items():
        assert overflow_threshold(FORMATS[name]) == edge


def test_a_huge_denormal_flushing_setting_changes_nothing() -> None:
    x = torch.tensor([1e-40, -3e-39, 2.0**-133, 2.0**-149])
    expected = round_to(x, "bf16")
    torch.set_flush_denormal(True)
    try:
        found = round_to(x, "bf16")
        plain = round_with_torch(x, FORMATS["bf16"], FP32, "nearest-even", "saturate", "keep")
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    assert torch.equal(plain.view(torch.int32), expected.view(torch.int32))
