from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch

from rooftile.errors import UsageError
from rooftile.formats.catalogue import FORMATS
from rooftile.formats.codec import decode, encode, fraction_bits_used, next_down, next_up, spacing
from rooftile.formats.format import FloatFormat
from rooftile.formats.reference import decode_code, encode_value, value_spacing

from .test_rounding import ODD_ONES
from .values import decoded, random_values, same, tricky_values

UP_TO_16 = [fmt for fmt in [*FORMATS.values(), *ODD_ONES] if fmt.bits <= 16]
SMALL = [fmt for fmt in UP_TO_16 if fmt.bits <= 8]


@pytest.mark.parametrize("fmt", UP_TO_16, ids=lambda f: f.name)
def test_decode_equals_the_reference_on_every_code(fmt: FloatFormat) -> None:
    codes = torch.arange(fmt.number_of_codes)
    assert same(decode(codes, fmt), decoded(fmt))


@pytest.mark.parametrize("fmt", UP_TO_16, ids=lambda f: f.name)
def test_encode_of_decode_gives_every_code_back(fmt: FloatFormat) -> None:
    """Apart from the other codes of a NaN, and of a zero where the format flushes its subnormals."""
    codes = torch.arange(fmt.number_of_codes)
    values = decode(codes, fmt)
    again = encode(values, fmt).long()
    ordinary = values.isfinite() & ((values != 0) | (codes & fmt.top_code == 0))
    assert torch.equal(again[ordinary], codes[ordinary])
    assert int((~ordinary).sum()) == sum(s.last - s.first + 1 for s in fmt.special_codes if s.meaning[-1] != "0") + (
        0 if fmt.subnormals or not fmt.zero else (1 + fmt.signed) * (fmt.tiny_code - 1)
    )
    assert same(decode(again, fmt), values)


@pytest.mark.parametrize(
    "name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]
)
def test_codes_are_the_bits_of_the_torch_dtype(name: str) -> None:
    dtype = getattr(torch, name)
    unsigned = torch.uint8 if dtype.itemsize == 1 else torch.int16
    codes = torch.arange(2 ** (8 * dtype.itemsize))
    theirs = codes.to(torch.uint8 if dtype.itemsize == 1 else torch.int32).to(unsigned).view(dtype).double()
    assert same(decode(codes, name), theirs)


@pytest.mark.parametrize("name", ["fp32", "fp64", "tf32"])
def test_wide_codes_are_the_bits_of_the_values(name: str, generator: torch.Generator) -> None:
    fmt = FORMATS[name]
    x = torch.cat(
        [random_values(fmt, 5000, generator), torch.tensor([0.0, -0.0, math.inf, -math.inf], dtype=torch.float64)]
    )
    codes = encode(x, fmt)
    if name == "fp64":
        assert torch.equal(codes, x.view(torch.int64))
        assert same(decode(codes, fmt), x)
        return
    single = decode(codes, fmt)
    bits = single.view(torch.int32).long() & 0xFFFFFFFF
    assert torch.equal(codes.long(), bits >> (23 - fmt.fraction_bits))
    assert codes.tolist()[:300] == [encode_value(v, fmt) for v in x[:300].tolist()]


@pytest.mark.parametrize("fmt", SMALL, ids=lambda f: f.name)
def test_encode_equals_the_reference_on_every_tricky_value(fmt: FloatFormat) -> None:
    x = tricky_values(fmt)
    if fmt.nan_code is None:
        x = x[~x.isnan()]
        if fmt.signed and not fmt.infinities:
            x = x[x.isfinite()]
    assert encode(x, fmt).tolist() == [encode_value(v, fmt) for v in x.tolist()]


@pytest.mark.parametrize("name", ["fp6_e2m3", "fp6_e3m2", "fp4_e2m1"])
def test_nan_and_inf_are_refused_as_codes_by_formats_that_have_neither(name: str) -> None:
    for value in (math.nan, math.inf):
        with pytest.raises(UsageError, match="neither Inf nor NaN"):
            encode(torch.tensor([1.0, value]), name)
        with pytest.raises(UsageError, match="neither Inf nor NaN"):
            encode_value(value, name)
    assert decode(encode(torch.tensor([-math.inf]), name, inf_input="saturate"), name).item() == FORMATS[name].min


def test_codes_outside_the_format_and_floats_are_refused() -> None:
    for bad in (torch.tensor([256]), torch.tensor([-1])):
        with pytest.raises(UsageError, match="codes run from 0 to 255"):
            decode(bad, "e4m3fn")
    with pytest.raises(UsageError, match="codes are integers"):
        decode(torch.tensor([1.0]), "e4m3fn")
    with pytest.raises(UsageError, match="codes run from 0 to 15"):
        decode_code(16, "fp4_e2m1")
    assert decode(torch.tensor([], dtype=torch.uint8), "e4m3fn").shape == (0,)


def brute_next_up(x: float, finite: np.ndarray, fmt: FloatFormat) -> float:
    """By looking at every value of the format."""
    if math.isnan(x):
        return math.nan
    if x == math.inf:
        return math.inf if fmt.infinities else math.nan
    above = finite[finite > x]
    if above.size:
        if above[0] == 0 and fmt.negative_zero:
            return -0.0
        return float(above[0])
    return math.inf if fmt.infinities else math.nan


@pytest.mark.parametrize("fmt", SMALL, ids=lambda f: f.name)
def test_next_up_and_next_down_find_the_neighbour_that_a_search_over_all_values_finds(fmt: FloatFormat) -> None:
    x = tricky_values(fmt)
    values = decoded(fmt)
    finite = np.unique(values[np.isfinite(values)])
    assert same(next_up(x, fmt), [brute_next_up(v, finite, fmt) for v in x.tolist()])
    if fmt.signed:
        expected = [-brute_next_up(-v, finite, fmt) for v in x.tolist()]
        expected = [0.0 if v == 0 and not fmt.negative_zero else v for v in expected]
        assert same(next_down(x, fmt), expected)
    else:
        below = [finite[finite < v].max(initial=-math.inf) for v in x.tolist()]
        expected = [math.nan if math.isinf(b) or math.isnan(v) else b for b, v in zip(below, x.tolist(), strict=True)]
        found = next_down(x, fmt)
        finite_input = torch.from_numpy(np.isfinite(x.numpy()))
        assert same(found[finite_input], np.array(expected)[finite_input.numpy()])


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_neighbours_are_those_of_torch_nextafter(name: str, generator: torch.Generator) -> None:
    dtype = getattr(torch, name)
    x = random_values(FORMATS["fp16"], 3000, generator).to(dtype)
    x = torch.cat([x, torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan], dtype=dtype)])
    for ours, target in ((next_up, math.inf), (next_down, -math.inf)):
        theirs = torch.nextafter(x, torch.tensor(target, dtype=dtype))
        moved = ours(x, name)
        assert moved.dtype == dtype
        assert torch.equal(moved.nan_to_num(7.0), theirs.nan_to_num(7.0))


@pytest.mark.parametrize("fmt", SMALL, ids=lambda f: f.name)
def test_spacing_is_the_gap_of_the_binade_by_the_reference(fmt: FloatFormat) -> None:
    from fractions import Fraction

    x = tricky_values(fmt)
    expected = [
        float(value_spacing(abs(Fraction(v)), fmt)) if math.isfinite(v) and abs(v) <= fmt.max else math.nan
        for v in x.tolist()
    ]
    assert same(spacing(x, fmt), expected)


def test_the_spacing_doubles_with_the_exponent_and_is_numpys() -> None:
    x = torch.tensor([2.0**-10, 1.0, 2.0**10, 0.0, 1e-310, 1.5e308], dtype=torch.float64)
    assert same(spacing(x, "fp64"), np.spacing(x.numpy()))
    assert spacing(torch.tensor([2.0**-10, 1.0, 2.0**10]), "fp16").tolist() == [2.0**-20, 2.0**-10, 1.0]
    assert spacing(torch.tensor([2.0**-10, 1.0, 2.0**10]), "bf16").tolist() == [2.0**-17, 2.0**-7, 8.0]


def test_fraction_bits_used_counts_to_the_last_set_bit() -> None:
    x = torch.tensor([1.0, 1.5, 1.25, 0.0, -0.0, 2.0**-149, 3 * 2.0**-149, 1 + 2.0**-23, math.inf, math.nan, -1.625])
    assert fraction_bits_used(x).tolist() == [0, 1, 2, 0, 0, 0, 1, 23, -1, -1, 3]
    noise = torch.randn(4000, generator=torch.Generator().manual_seed(0))
    assert fraction_bits_used(noise.bfloat16().float()).max() <= 7
    assert fraction_bits_used(noise.half()).max() == 10
    assert fraction_bits_used(noise.double() + 2.0**-52).max() > 40
    assert fraction_bits_used(torch.empty(0)).shape == (0,)


@pytest.mark.parametrize(
    "function", [*(functools.partial(f, fmt="bf16") for f in (spacing, next_up, next_down, encode)), fraction_bits_used]
)
def test_integers_are_refused_and_odd_shapes_taken(function: object) -> None:
    assert callable(function)
    with pytest.raises(UsageError, match="floating tensor"):
        function(torch.arange(3))
    assert function(torch.tensor(1.5)).shape == ()
    assert function(torch.empty(0, 2)).shape == (0, 2)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    assert torch.equal(function(x.t()), function(x.t().contiguous()))
