"""One written number, cast into one format: value, code, neighbours, error. No torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from rooftile.errors import UsageError
from rooftile.formats.catalogue import get_format
from rooftile.formats.format import FloatFormat
from rooftile.formats.policy import Overflow, Rounding
from rooftile.formats.reference import encode_value, overflow_threshold, round_value, value_neighbours, value_spacing

__all__ = ["Cast", "cast_number", "parse_number"]

# Of a written number: fp64 ends near 10^308 = 2^1024, and exact arithmetic must stay quick.
_LARGEST_EXPONENT = 5000  # decimal or binary
_MOST_DIGITS = 4000  # Python itself refuses to read integers of 4301 digits and more
_MOST_BITS = 100_000  # of a power
_HEXADECIMAL = re.compile(r"([+-]?)0x([0-9a-f]*)\.?([0-9a-f]*)(?:p([+-]?[0-9]+))?")


class _TooLargeError(Exception):
    """A number whose exact arithmetic would be slow."""


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
        UsageError: not a number, or one too large for exact arithmetic (an exponent beyond 5000).
    """
    text = text.strip()
    shown = repr(text if len(text) <= 40 else f"{text[:40]}...")
    base, power, exponent = text.partition("^")
    try:
        if len(text) > _MOST_DIGITS:
            raise _TooLargeError
        if power:
            return _power(Fraction(_decimal(base)), _exponent(exponent))
        return _hexadecimal(text) if "0x" in text.lower() else _decimal(text)
    except _TooLargeError:
        raise UsageError(
            f"{shown} is too large to be handled exactly; exponents reach from -{_LARGEST_EXPONENT} to "
            f"{_LARGEST_EXPONENT}, digits to {_MOST_DIGITS}"
        ) from None
    except (ValueError, ZeroDivisionError, OverflowError):
        raise UsageError(f"{shown} is no number; write it like 70000, -1e-8, 2^-26, 0x1.8p3, inf or nan") from None


def _exponent(text: str) -> int:
    digits = text.strip().lstrip("+-").lstrip("0")
    exponent = int(text)
    if len(digits) > 4 or abs(exponent) > _LARGEST_EXPONENT:
        raise _TooLargeError
    return exponent


def _power(base: Fraction, exponent: int) -> Fraction:
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits * abs(exponent) > _MOST_BITS:
        raise _TooLargeError
    return base**exponent


def _decimal(text: str) -> Fraction | float:
    mantissa, _, exponent = text.lower().partition("e")
    as_float = float(text)
    if not any(digit.isdigit() for digit in text):
        return as_float  # inf, nan
    if not any(digit in mantissa for digit in "123456789"):
        return as_float  # a zero keeps its sign
    _exponent(exponent or "0")
    return Fraction(text)


def _hexadecimal(text: str) -> Fraction | float:
    read = _HEXADECIMAL.fullmatch(text.lower())
    if read is None or not read[2] + read[3]:
        raise ValueError(text)
    significand = int(read[2] + read[3], 16)
    if not significand:
        return -0.0 if read[1] == "-" else 0.0
    exact = Fraction(significand, 16 ** len(read[3])) * Fraction(2) ** _exponent(read[4] or "0")
    return -exact if read[1] == "-" else exact


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
        return f"overflow (saturates at {-fmt.max if exact < 0 else fmt.max:g})"  # exact may exceed every float
    if value == 0 and exact != 0:
        return "flushed to zero"
    if abs(value) == fmt.max and abs(exact) >= overflow_threshold(fmt):
        return "saturated"
    if Fraction(value) == exact:
        return "exact"
    return "subnormal" if 0 < abs(value) < fmt.tiny else "rounded"
