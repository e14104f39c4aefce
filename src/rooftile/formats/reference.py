"""The definition of rounding, in exact rational arithmetic, one number at a time.

This is the oracle: slow, short, and written as the definition reads. :mod:`rooftile.formats.rounding` is its fast twin.
What a format cannot hold (NaN, or an overflow, in a format without NaN) is NaN as a value and refused as a code.
"""

from __future__ import annotations

import math
from fractions import Fraction

from rooftile.errors import UsageError
from rooftile.formats.catalogue import get_format
from rooftile.formats.format import FloatFormat
from rooftile.formats.policy import InfInput, Overflow, Rounding, check_policy

__all__ = [
    "decode_code",
    "edge_stays",
    "encode_value",
    "floor_log2",
    "overflow_threshold",
    "round_value",
    "value_neighbours",
    "value_spacing",
]


def floor_log2(x: Fraction) -> int:
    """The exponent e with ``2^e <= x < 2^(e+1)`` for a positive rational, by integer comparison."""
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if Fraction(2) ** e <= x else e - 1


def value_spacing(magnitude: Fraction, fmt: FloatFormat) -> Fraction:
    """The gap between neighbours in the binade that holds ``magnitude`` (>= 0), were the exponent unbounded above."""
    exponent = floor_log2(magnitude) if magnitude else fmt.min_exponent - 1
    if exponent >= fmt.min_exponent:
        return Fraction(2) ** (exponent - fmt.fraction_bits)
    return Fraction(
        fmt.smallest_subnormal
    )  # below the smallest normal the grid is even; without subnormals it is 0, tiny


def overflow_threshold(fmt: FloatFormat) -> Fraction:
    """Where rounding to nearest starts to overflow: half a spacing above the largest finite value."""
    return Fraction(fmt.max) + value_spacing(Fraction(fmt.max), fmt) / 2


def edge_stays(fmt: FloatFormat) -> bool:
    """Whether a value exactly on :func:`overflow_threshold` goes back to the largest value, an even multiple."""
    return fmt.fraction_bits > 0 and fmt.max_code % 2 == 0


def round_value(
    x: float | Fraction,
    fmt: FloatFormat | str,
    rounding: Rounding = "nearest-even",
    overflow: Overflow = "saturate",
    inf_input: InfInput = "keep",
    draw: Fraction = Fraction(0),
) -> float:
    """The value of ``fmt`` that ``x`` rounds to. ``draw`` in [0, 1) is the uniform number of stochastic rounding.

    Raises:
        UsageError: an unknown format or policy.
    """
    fmt = get_format(fmt)
    check_policy(rounding, overflow, inf_input)
    if isinstance(x, float) and math.isnan(x):
        return math.nan
    negative = math.copysign(1.0, x) < 0 if isinstance(x, float) else x < 0
    if negative and x != 0 and not fmt.signed:
        return math.nan
    sign = -1.0 if negative and fmt.signed else 1.0
    if isinstance(x, float) and math.isinf(x):
        magnitude = fmt.max if inf_input == "saturate" else (math.inf if fmt.infinities else math.nan)
        return sign * magnitude

    exact = abs(Fraction(x))
    spacing = value_spacing(exact, fmt)
    steps = _pick(exact / spacing, _away(rounding, negative), draw)
    rounded = steps * spacing
    if rounded > Fraction(fmt.max):
        inward = rounding == "toward-zero" or (rounding == "up" and negative) or (rounding == "down" and not negative)
        if overflow == "saturate" or inward:
            return sign * fmt.max
        return sign * math.inf if fmt.infinities else math.nan
    if rounded == 0 and not fmt.zero:
        return sign * fmt.tiny  # a format without zero saturates at its smallest value
    if rounded == 0 and not fmt.negative_zero:
        return 0.0
    return sign * float(rounded)


def _away(rounding: Rounding, negative: bool) -> str:
    """A directed rounding seen from the magnitude: away from zero or toward it."""
    if rounding == "up":
        return "toward-zero" if negative else "away"
    if rounding == "down":
        return "away" if negative else "toward-zero"
    return rounding


def _pick(n: Fraction, how: str, draw: Fraction) -> int:
    """The integer that ``n >= 0`` spacings become."""
    below = math.floor(n)
    rest = n - below
    if how == "toward-zero" or rest == 0:
        return below
    if how == "away":
        return below + 1
    if how == "stochastic":
        return below + (draw < rest)
    if rest == Fraction(1, 2):
        return below + below % 2  # the even neighbour
    return below + (rest > Fraction(1, 2))


def decode_code(code: int, fmt: FloatFormat | str) -> float:
    """The value of one code.

    Raises:
        UsageError: the code is negative or has more bits than the format.
    """
    fmt = get_format(fmt)
    if not 0 <= code < fmt.number_of_codes:
        raise UsageError(f"{code} is no code of {fmt.name}; codes run from 0 to {fmt.number_of_codes - 1}")
    negative = bool(code & fmt.sign_bit)
    magnitude_code = code & fmt.top_code
    if fmt.nan_codes == "negative-zero" and code == fmt.sign_bit:
        return math.nan
    if magnitude_code == fmt.inf_code:
        return -math.inf if negative else math.inf
    if magnitude_code > fmt.max_code:
        return math.nan
    return math.copysign(fmt.magnitude(magnitude_code), -1.0 if negative else 1.0)


def encode_value(
    x: float | Fraction,
    fmt: FloatFormat | str,
    rounding: Rounding = "nearest-even",
    overflow: Overflow = "saturate",
    inf_input: InfInput = "keep",
    draw: Fraction = Fraction(0),
) -> int:
    """The code of the value that ``x`` rounds to.

    Raises:
        UsageError: the result is NaN and the format has no code for NaN.
    """
    fmt = get_format(fmt)
    value = round_value(x, fmt, rounding, overflow, inf_input, draw)
    if math.isnan(value):
        if fmt.nan_code is None:
            raise UsageError(
                f"{x} has no code in {fmt.name}, which has neither Inf nor NaN; saturate, or replace it first"
            )
        return fmt.nan_code
    sign = fmt.sign_bit if math.copysign(1.0, value) < 0 else 0
    if math.isinf(value):
        if fmt.inf_code is None:
            raise UsageError(f"{fmt.name} has no infinity")
        return sign | fmt.inf_code
    if value == 0:
        return sign
    exact = abs(Fraction(value))
    if exact < Fraction(fmt.tiny):
        return sign | int(exact / Fraction(fmt.smallest_subnormal))
    exponent = floor_log2(exact)
    fraction = int((exact / Fraction(2) ** exponent - 1) * 2**fmt.fraction_bits)
    return sign | (fmt.tiny_code + ((exponent - fmt.min_exponent) << fmt.fraction_bits) + fraction)


def value_neighbours(x: Fraction, fmt: FloatFormat) -> tuple[float, float]:
    """The values of ``fmt`` next below and next above ``x``, both different from it; Inf or NaN beyond the ends."""
    step = Fraction(fmt.smallest_subnormal) / 4  # less than any gap
    above = round_value(x, fmt, "up", "ieee")
    if above == x:
        above = round_value(x + step, fmt, "up", "ieee")
    below = round_value(x, fmt, "down", "ieee")
    if below == x:
        below = round_value(x - step, fmt, "down", "ieee")
    return below, above
