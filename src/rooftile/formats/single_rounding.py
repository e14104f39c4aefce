"""Sums that are rounded once: what an adder of the format would give, although only fp64 adders are at hand.

An fp64 sum is made *odd*: if it was inexact and its last bit is even, it moves one unit toward the exact value. An odd
last bit is never on a midpoint of a format with at least two fraction bits fewer, so a second rounding is as if from
the exact sum (Boldo and Melquiond 2008, "Emulation of FMA and correctly rounded sums: proved algorithms using
rounding to odd"). The error of the fp64 sum is exact (Knuth's two-sum).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch

from rooftile.errors import UsageError
from rooftile.formats.carrier import FP64
from rooftile.formats.format import FloatFormat
from rooftile.formats.policy import Rounding
from rooftile.formats.rounding import round_to

__all__ = ["add_scalars", "add_tensors", "exact_sum", "round_scalar"]

_ODD_BITS = FP64.fraction_bits - 2  # a format with more fraction bits than this gains nothing from rounding to odd


def add_tensors(
    a: torch.Tensor,
    b: torch.Tensor,
    fmt: FloatFormat,
    rounding: Rounding = "nearest-even",
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """``a + b`` (float64) rounded once to ``fmt``, overflow as IEEE says, as float64.

    Raises:
        UsageError: a format near fp64's width with a rounding other than nearest-even.
    """
    total = a + b
    if fmt.fraction_bits > _ODD_BITS:
        if rounding != "nearest-even":
            raise UsageError(f"sums in {fmt.name} are rounded to nearest only; rounding is {rounding!r}")
        return round_to(total, fmt, rounding, "ieee")
    shifted = total - a
    error = (a - (total - shifted)) + (b - shifted)
    bits = total.contiguous().view(torch.int64)
    inexact = (error != 0) & total.isfinite() & error.isfinite() & (bits & 1 == 0)
    outwards = torch.signbit(error) == torch.signbit(total)
    odd = torch.where(inexact, torch.where(outwards, bits + 1, bits - 1), bits).view(torch.float64)
    return round_to(odd, fmt, rounding, "ieee", generator=generator)


def add_scalars(a: float, b: float, fmt: FloatFormat) -> float:
    """``a + b`` rounded once to the nearest value of ``fmt``, ties to even: :func:`add_tensors` without a tensor's
    cost.
    """
    total = a + b
    if math.isfinite(total) and fmt.fraction_bits <= _ODD_BITS:
        shifted = total - a
        error = (a - (total - shifted)) + (b - shifted)
        if error and (total / math.ulp(total)) % 2 == 0:
            total = math.nextafter(total, math.inf if error > 0 else -math.inf)
    return round_scalar(total, fmt)


def round_scalar(x: float, fmt: FloatFormat) -> float:
    """The nearest value of a signed format with zero, ties to even, overflow as IEEE says; fast enough for a loop."""
    if math.isnan(x):
        return x
    if abs(x) >= 2 * fmt.max:  # Inf too; for fp64 the limit is infinite itself
        return math.copysign(math.inf, x) if fmt.infinities else math.nan
    exponent = max(math.frexp(x)[1] - 1, fmt.min_exponent)
    step = exponent - fmt.fraction_bits
    if exponent == fmt.min_exponent and abs(x) < fmt.tiny and not fmt.subnormals:
        step = fmt.min_exponent
    rounded = math.copysign(math.ldexp(round(math.ldexp(abs(x), -step)), step), x)
    if abs(rounded) > fmt.max:
        return math.copysign(math.inf, x) if fmt.infinities else math.nan
    return rounded


def exact_sum(terms: Sequence[float]) -> Fraction:
    """A rational that rounds to every format as the exact sum does: its fp64 rounding, and the sign of what that
    missed.
    """
    nearest = math.fsum(terms)
    return Fraction(nearest) + Fraction(math.fsum([*terms, -nearest]))
