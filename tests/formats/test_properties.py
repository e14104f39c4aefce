"""What must hold for any format and any value, searched for by hypothesis."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from rooftile.errors import UsageError
from rooftile.formats import (
    FORMATS,
    FloatFormat,
    decode,
    encode,
    exponent_histogram,
    flushed,
    next_down,
    next_up,
    overflowed,
    round_to,
)
from rooftile.formats.reference import decode_code, encode_value, round_value

settings.register_profile("formats", max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("formats")

DETERMINISTIC = ("nearest-even", "toward-zero", "up", "down")


@st.composite
def formats(draw: st.DrawFn) -> FloatFormat:
    """The catalogue's formats, and any other combination of fields that is a format."""
    if draw(st.booleans()):
        return draw(st.sampled_from(list(FORMATS.values())))
    exponent_bits, zero = draw(st.integers(1, 8)), draw(st.booleans())
    try:
        return FloatFormat(
            "drawn",
            exponent_bits,
            draw(st.integers(0, 12)),
            draw(st.integers(-40, 160)),
            signed=draw(st.booleans()),
            infinities=draw(st.booleans()),
            nan_codes=draw(st.sampled_from(["ieee", "all-ones", "negative-zero", "none"])),
            subnormals=zero and draw(st.booleans()),
            zero=zero,
        )
    except UsageError:
        assume(False)
        raise


@st.composite
def values(draw: st.DrawFn, fmt: FloatFormat) -> float:
    """Any float, or one near a value of the format."""
    if draw(st.booleans()):
        return draw(st.floats())
    code = draw(st.integers(0, fmt.max_code))
    x = fmt.magnitude(code) * draw(st.sampled_from([1.0, 0.5, 1.5, 1 + fmt.eps / 2, 1 - fmt.eps / 4, 2.0]))
    for _ in range(draw(st.integers(0, 2))):
        x = math.nextafter(x, draw(st.sampled_from([0.0, math.inf])))
    return -x if draw(st.booleans()) else x


def equal(a: float, b: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))


@given(st.data())
def test_the_tensor_version_equals_the_reference_for_any_format_value_and_policy(data: st.DataObject) -> None:
    fmt = data.draw(formats())
    x = data.draw(values(fmt))
    rounding = data.draw(st.sampled_from(DETERMINISTIC))
    overflow = data.draw(st.sampled_from(["saturate", "ieee"]))
    inf_input = data.draw(st.sampled_from(["keep", "saturate"]))
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        tensor = torch.tensor(x, dtype=torch.float64).to(dtype)
        found = round_to(tensor, fmt, rounding, overflow, inf_input).item()
        assert equal(found, round_value(tensor.item(), fmt, rounding, overflow, inf_input))


@given(st.data())
def test_codes_of_any_format_go_there_and_back(data: st.DataObject) -> None:
    fmt = data.draw(formats())
    code = data.draw(st.integers(0, fmt.number_of_codes - 1))
    value = decode_code(code, fmt)
    signed = code - 2**64 if code >= 2**63 else code
    assert equal(decode(torch.tensor([signed]), fmt).item(), value)
    if math.isfinite(value) and value != 0:
        assert encode_value(value, fmt) == code
        assert encode(torch.tensor([value], dtype=torch.float64), fmt).item() == signed


@given(st.data())
def test_nearest_is_no_farther_than_either_directed_result(data: st.DataObject) -> None:
    fmt = data.draw(formats())
    x = data.draw(values(fmt))
    assume(math.isfinite(x) and abs(x) <= fmt.max and (fmt.signed or x >= 0) and (fmt.zero or abs(x) >= fmt.tiny))
    near, up, down = (round_value(x, fmt, mode) for mode in ("nearest-even", "up", "down"))
    assert down <= x <= up
    assert near in (up, down)
    assert abs(Fraction(near) - Fraction(x)) == min(Fraction(up) - Fraction(x), Fraction(x) - Fraction(down))
    assert round_value(near, fmt, data.draw(st.sampled_from(DETERMINISTIC))) == near


@given(st.data())
def test_rounding_keeps_the_order(data: st.DataObject) -> None:
    fmt = data.draw(formats())
    x, y = sorted(data.draw(values(fmt)) for _ in range(2))
    assume(not math.isnan(x + y) and fmt.signed)
    rounding = data.draw(st.sampled_from(DETERMINISTIC))
    pair = torch.tensor([x, y], dtype=torch.float64)
    low, high = round_to(pair, fmt, rounding, "saturate", "saturate").tolist()
    assert low <= high


@given(st.data())
def test_next_down_undoes_next_up_on_values_of_the_format(data: st.DataObject) -> None:
    fmt = data.draw(formats())
    assume(fmt.smallest_code < fmt.max_code)
    code = data.draw(st.integers(fmt.smallest_code, fmt.max_code - 1))
    value = torch.tensor([fmt.magnitude(code)], dtype=torch.float64)
    above = next_up(value, fmt)
    assert above.item() == fmt.magnitude(code + 1)
    assert next_down(above.double(), fmt).item() == value.item()


@given(st.lists(st.floats(width=32), max_size=60), st.integers(-30, 30), st.sampled_from(sorted(FORMATS)))
def test_the_histogram_bounds_what_rounding_does(numbers: list[float], shift: int, name: str) -> None:
    assume(name != "e8m0")
    x = torch.tensor(numbers, dtype=torch.float32)
    h = exponent_histogram(x)
    exact = [Fraction(v) * Fraction(2) ** shift for v in numbers if math.isfinite(v) and v != 0]
    rounded = [round_value(v, name, overflow="ieee") for v in exact]
    lost, over = flushed(h, name, 2.0**shift), overflowed(h, name, 2.0**shift)
    assert lost.low <= sum(v == 0 for v in rounded) <= lost.high
    assert over.low <= sum(not math.isfinite(v) for v in rounded) <= over.high
    assert h.total == len(numbers)


@given(st.lists(st.floats(width=32), max_size=60), st.integers(0, 60))
def test_merging_the_parts_gives_the_whole(numbers: list[float], cut: int) -> None:
    x = torch.tensor(numbers, dtype=torch.float32)
    parts = exponent_histogram(x[:cut]) + exponent_histogram(x[cut:])
    whole = exponent_histogram(x)
    assert parts == whole
