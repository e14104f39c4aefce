"""One written number, cast into one format: value, code, neighbours, error. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from rooftile.errors import UsageError
from rooftile.formats.catalogue import get_format
from rooftile.formats.format import FloatFormat
from rooftile.formats.policy import Overflow, Rounding
from rooftile.formats.reference import encode_value, overflow_threshold, round_value, value_neighbours, value_spacing

__all__ = ["Cast", "cast_number", "parse_number"]

_LARGEST_EXPONENT = (
    5000  # decimal or binary, of a written number: fp64 ends near 10^308, and exact arithmetic must stay quick
)


@dataclass(frozen=True, slots=True)
class Cast:
    """What became of ``text`` in ``fmt``.

    ``code`` is None where the result has none. ``below`` and ``above`` are the values next to the number itself, both
    different from it, and ``error_ulps`` is (value - number) / spacing there; None where the number is not finite.
    ``saturated`` is the value under saturating overflow.
    """

    text: str
    fmt: str
    value: float
    code: int | None
    below: float | None
    above: float | None
    error_ulps: float | None
    saturated: float
    note: str


def parse_number(text: str) -> Fraction | float:
    """The exact number that is written (70000, -1e-8, 2^-26, 0x1.8p3), or an infinity, NaN or -0 as a float.

    Raises:
        UsageError: not a number, or an exponent beyond 5000.
    """
    base, power, exponent = text.partition("^")
    try:
        if power:
            return Fraction(base) ** _exponent(int(exponent))
        if "0x" in text.lower():
            return Fraction(float.fromhex(text))
        mantissa, _, exponent = text.lower().partition("e")
        as_float = float(text)
        if not any(digit.isdigit() for digit in text):
            return as_float  # inf, nan
        if not any(digit in mantissa for digit in "123456789"):
            return as_float  # a zero keeps its sign
        _exponent(int(exponent or 0))
        return Fraction(text)
    except (ValueError, ZeroDivisionError, OverflowError):
        raise UsageError(f"{text!r} is no number; write it like 70000, -1e-8, 2^-26, 0x1.8p3, inf or nan") from None


def _exponent(exponent: int) -> int:
    if abs(exponent) > _LARGEST_EXPONENT:
        raise ValueError
    return exponent


def cast_number(
    text: str, fmt: FloatFormat | str, rounding: Rounding = "nearest-even", overflow: Overflow = "ieee"
) -> Cast:
    """Read ``text`` exactly and round it once.

    Raises:
        UsageError: no number, an unknown format or policy.
    """
    fmt = get_format(fmt)
    x = parse_number(text)
    value = round_value(x, fmt, rounding, overflow)
    has_code = not math.isnan(value) or fmt.nan_code is not None
    finite = isinstance(x, Fraction) or math.isfinite(x)
    exact = Fraction(x) if finite else Fraction(0)
    below, above = value_neighbours(exact, fmt) if finite else (None, None)
    ulps = (Fraction(value) - exact) / value_spacing(abs(exact), fmt) if finite and math.isfinite(value) else None
    return Cast(
        text,
        fmt.name,
        value,
        encode_value(x, fmt, rounding, overflow) if has_code else None,
        below,
        above,
        None if ulps is None else float(ulps),
        round_value(x, fmt, rounding, "saturate"),
        _note(x, value, fmt),
    )


def _note(x: Fraction | float, value: float, fmt: FloatFormat) -> str:
    """What happened, in a word or two."""
    if isinstance(x, float) and not math.isfinite(x):
        return "kept" if math.isinf(value) else "not finite" if math.isnan(x) else "no Inf here"
    exact = Fraction(x)
    if exact < 0 and not fmt.signed:
        return "no sign here"
    if not math.isfinite(value):
        return f"overflow (saturates at {math.copysign(fmt.max, exact):g})"
    if value == 0 and exact != 0:
        return "flushed to zero"
    if abs(value) == fmt.max and abs(exact) >= overflow_threshold(fmt):
        return "saturated"
    if Fraction(value) == exact:
        return "exact"
    return "subnormal" if 0 < abs(value) < fmt.tiny else "rounded"
