"""What a format would do to a tensor's range, asked of its exponent histogram alone.

A threshold that is a power of two (every flush at a power-of-two scale), or beyond the tensor's extremes, gives an
exact count; one that falls inside a binade gives a lower and an upper bound, which differ by that binade's count.
Both are always returned. All comparisons are in exact rational arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from rooftile.errors import UsageError
from rooftile.formats.arguments import finite_number, positive_number
from rooftile.formats.catalogue import get_format
from rooftile.formats.format import FloatFormat
from rooftile.formats.histogram import ExponentHistogram
from rooftile.formats.reference import edge_stays, floor_log2, overflow_threshold

__all__ = ["CountBound", "LossScaleWindow", "flushed", "loss_scale_window", "overflowed", "subnormal"]


@dataclass(frozen=True, slots=True)
class CountBound:
    """A count between ``low`` and ``high`` (equal if it is exact) out of ``of`` finite non-zero values."""

    low: int
    high: int
    of: int

    @property
    def exact(self) -> bool:
        """Whether the histogram alone settles the count."""
        return self.low == self.high

    @property
    def fraction_low(self) -> float:
        """``low`` as a fraction of the finite non-zero values; 0.0 of none."""
        return self.low / self.of if self.of else 0.0

    @property
    def fraction_high(self) -> float:
        """``high`` as a fraction of the finite non-zero values; 0.0 of none."""
        return self.high / self.of if self.of else 0.0


@dataclass(frozen=True, slots=True)
class LossScaleWindow:
    """Loss scales under which no finite value of the tensor overflows and (almost) none is flushed.

    ``low`` and ``high`` are the ends [S_lo, S_hi]; with ``allowed`` flushed values, ``low`` stands for a scale that
    surely suffices. ``empty`` windows are an answer: the tensor is wider than the format. ``powers_of_two`` are the
    exponents of the powers of two inside.
    """

    fmt: str
    low: float
    high: float
    allowed: int
    powers_of_two: range
    infs: int = 0  # of the data as they were counted: no scale brings these or the NaNs back
    nans: int = 0

    @property
    def empty(self) -> bool:
        """Whether no scale serves."""
        return self.low > self.high

    @property
    def reading(self) -> str:
        """One line for a person."""
        bad = _not_finite(self.infs, self.nans)
        return self._of_finite_values() + (f"; the data hold {bad}, which no scale brings back" if bad else "")

    def _of_finite_values(self) -> str:
        if self.empty:
            return f"no loss scale serves {self.fmt}: what saves the small values overflows the large ones"
        if not len(self.powers_of_two):
            return f"loss scales {self.low:.4g} to {self.high:.4g} serve {self.fmt}, none of them a power of two"
        first, last = self.powers_of_two[0], self.powers_of_two[-1]
        every = "every finite value" if self.infs or self.nans else "every value"
        return f"loss scales 2^{first} to 2^{last} keep {every} inside {self.fmt}"


def _not_finite(infs: int, nans: int) -> str:
    """``3 Inf and 1 NaN``; empty if there are none."""
    return " and ".join(f"{count:,} {kind}" for count, kind in ((infs, "Inf"), (nans, "NaN")) if count)


def _count_up_to(h: ExponentHistogram, threshold: Fraction, inclusive: bool) -> CountBound:
    """How many magnitudes are below ``threshold`` (or equal to it, if ``inclusive``)."""

    def inside(magnitude: float) -> bool:
        return magnitude < threshold or (inclusive and magnitude == threshold)

    if not h.nonzero or inside(h.amax):
        return CountBound(h.nonzero, h.nonzero, h.nonzero)
    if not inside(h.amin):
        return CountBound(0, 0, h.nonzero)
    edge = floor_log2(threshold)
    low = sum(count for exponent, count in h.counts.items() if exponent < edge)
    if threshold == Fraction(2) ** edge:
        settled = low + (h.powers.get(edge, 0) if inclusive else 0)
        return CountBound(settled, settled, h.nonzero)
    high = low + h.counts.get(edge, 0)
    # The extremes are known exactly: amin lies inside, amax does not.
    return CountBound(max(low, 1), min(high, h.nonzero - 1), h.nonzero)


def _not_below(bound: CountBound) -> CountBound:
    return CountBound(bound.of - bound.high, bound.of - bound.low, bound.of)


def flushed(h: ExponentHistogram, fmt: FloatFormat | str, encode_scale: float = 1.0) -> CountBound:
    """Non-zero values that round (to nearest) to zero in ``fmt`` after multiplication by ``encode_scale``.

    Raises:
        UsageError: a scale that is not positive and finite, or an unknown format.
    """
    fmt = get_format(fmt)
    scale = positive_number(encode_scale, "encode_scale")
    if not fmt.zero:
        return CountBound(0, 0, h.nonzero)
    return _count_up_to(h, Fraction(fmt.smallest_subnormal) / 2 / scale, inclusive=True)


def subnormal(h: ExponentHistogram, fmt: FloatFormat | str, encode_scale: float = 1.0) -> CountBound:
    """Values that lie below the smallest normal of ``fmt`` after scaling, the flushed ones included: resolution is
    lost.
    """
    fmt = get_format(fmt)
    return _count_up_to(h, Fraction(fmt.tiny) / positive_number(encode_scale, "encode_scale"), inclusive=False)


def overflowed(h: ExponentHistogram, fmt: FloatFormat | str, encode_scale: float = 1.0) -> CountBound:
    """Finite values that round (to nearest) beyond the largest of ``fmt`` after scaling: Inf, NaN or saturated."""
    fmt = get_format(fmt)
    edge = overflow_threshold(fmt) / positive_number(encode_scale, "encode_scale")
    return _not_below(_count_up_to(h, edge, inclusive=edge_stays(fmt)))


def loss_scale_window(h: ExponentHistogram, fmt: FloatFormat | str = "fp16", allowed: float = 0.0) -> LossScaleWindow:
    """The scales [S_lo, S_hi] that bring the tensor into ``fmt``.

    Args:
        h: the histogram of the unscaled gradients.
        fmt: the format that they are stored in.
        allowed: fraction of the non-zero values that may be flushed. With 0 both ends are exact (from ``amin`` and
            ``amax``, rounded inwards to fp64); otherwise ``low`` is the least scale that the binade counts guarantee.

    Raises:
        UsageError: nothing finite and non-zero was counted, or ``allowed`` lies outside [0, 1).
    """
    fmt = get_format(fmt)
    share = finite_number(allowed, "allowed", "give a fraction in [0, 1)")
    if not 0 <= share < 1:
        raise UsageError(f"allowed is {allowed}; give a fraction in [0, 1)")
    bad = _not_finite(h.infs, h.nans)
    if not h.nonzero and bad:
        raise UsageError(f"the histogram has {bad} and no finite non-zero value; no loss scale mends that")
    if not h.nonzero:
        raise UsageError("the histogram has no finite non-zero value, so every loss scale serves; check the gradients")
    budget = math.floor(share * h.nonzero)
    smallest = _smallest_to_keep(h, budget)
    threshold = Fraction(fmt.smallest_subnormal) / 2 if fmt.zero else Fraction(0)
    # At S_lo the product must exceed the flush threshold; at S_hi it must stay below the overflow edge (or on it).
    low = _next_float(threshold / smallest, up=True, strict=True)
    high = _next_float(overflow_threshold(fmt) / Fraction(h.amax), up=False, strict=not edge_stays(fmt))
    first, last = math.frexp(low)[1] - 1 if low > 0 else -1074, math.frexp(high)[1] - 1
    powers = [e for e in range(first, last + 1) if low <= math.ldexp(1.0, e) <= high]
    inside = range(powers[0], powers[-1] + 1) if powers else range(0)
    return LossScaleWindow(fmt.name, low, high, budget, inside, h.infs, h.nans)


def _smallest_to_keep(h: ExponentHistogram, budget: int) -> Fraction:
    """A magnitude below which at most ``budget`` values lie: a binade's lower edge, or amin itself."""
    below = 0
    for exponent, count in h.counts.items():
        if below + count > budget:
            return max(Fraction(2) ** exponent, Fraction(h.amin))
        below += count
    return Fraction(h.amax)


def _next_float(exact: Fraction, up: bool, strict: bool) -> float:
    """The fp64 value nearest to ``exact`` on the asked side of it."""
    try:
        near = float(exact)
    except OverflowError:
        return math.inf if up else 1.7976931348623157e308
    toward = math.inf if up else -math.inf
    while (Fraction(near) < exact if up else Fraction(near) > exact) or (strict and Fraction(near) == exact):
        near = math.nextafter(near, toward)
    return near
