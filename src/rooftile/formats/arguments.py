"""Numbers that callers give, read exactly or refused in a sentence."""

from __future__ import annotations

import math
import numbers
from fractions import Fraction

from rooftile.errors import UsageError

__all__ = ["check_count", "finite_number", "positive_number"]


def check_count(value: object, argument: str) -> None:
    """Refuse what counts nothing.

    Raises:
        UsageError: no integer, or below 1.
    """
    if not isinstance(value, numbers.Integral) or value < 1:
        raise UsageError(f"{argument} is {value!r}; give a whole number of at least 1")


def finite_number(value: object, argument: str, wanted: str = "give a finite number") -> Fraction:
    """``value`` exactly.

    Raises:
        UsageError: not a real number, or Inf or NaN; ``wanted`` says what to give instead.
    """
    if isinstance(value, numbers.Rational):
        return Fraction(value)
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return Fraction(float(value))
    raise UsageError(f"{argument} is {value!r}; {wanted}")


def positive_number(value: object, argument: str) -> Fraction:
    """``value`` exactly.

    Raises:
        UsageError: not a positive finite number.
    """
    wanted = "give a positive finite number"
    exact = finite_number(value, argument, wanted)
    if exact <= 0:
        raise UsageError(f"{argument} is {value!r}; {wanted}")
    return exact
