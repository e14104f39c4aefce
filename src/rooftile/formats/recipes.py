"""Which format and tensor-wide scale would lose least of a tensor, estimated from its exponent histogram alone.

The estimate is the mean relative error of rounding to nearest, with a vanished value counted as error 1 and a saturated
one as at most 1. Inside a binade the magnitudes are taken as uniformly spread (`assumed`); everything else is
`derived`. With m fraction bits the mean of |error| / |x| over such a binade is 2^-m * ln(2) / 4 (half an ulp at most,
a quarter on average, times the mean of 1/x). Below the smallest normal each binade has one bit fewer; the binade just
above the flush threshold rounds up to the smallest value: 2 ln 2 - 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from rooftile.errors import UsageError
from rooftile.formats.catalogue import FORMATS, get_format
from rooftile.formats.format import FloatFormat
from rooftile.formats.histogram import ExponentHistogram
from rooftile.formats.reach import CountBound, flushed, overflowed

__all__ = ["Recipe", "estimate_recipe", "largest_safe_exponent", "rank_recipes"]

DEFAULT_FORMATS = ("bf16", "fp16", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2", "fp8_e5m2fnuz", "fp8_e3m4", "fp6_e2m3",
                   "fp6_e3m2", "fp4_e2m1")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recipe:
    """A format and one power-of-two scale for the whole tensor (multiply by ``encode_scale`` before the cast).

    ``relative_error`` is the estimate of the module's docstring: a mean over the finite non-zero values.
    """

    fmt: str
    bits: int
    encode_scale: float
    flushed: CountBound
    overflowed: CountBound
    relative_error: float

    @property
    def decode_scale(self) -> float:
        """Multiply by this after the cast; exact, a power of two."""
        return 1 / self.encode_scale


def largest_safe_exponent(h: ExponentHistogram, fmt: FloatFormat | str) -> int:
    """The largest e for which ``amax * 2^e`` does not exceed the largest value of ``fmt``; 0 if nothing was counted."""
    fmt = get_format(fmt)
    if not h.amax:
        return 0
    exponent = math.frexp(fmt.max)[1] - math.frexp(h.amax)[1]
    fits = math.frexp(h.amax)[0] <= math.frexp(fmt.max)[0]
    return max(-1000, min(1000, exponent if fits else exponent - 1))


def estimate_recipe(h: ExponentHistogram, fmt: FloatFormat | str, encode_scale: float = 1.0) -> Recipe:
    """The recipe's counts and estimated error; 0 where the format holds every value of the tensor's own dtype.

    Args:
        h: the tensor's histogram.
        fmt: a signed format with a zero.
        encode_scale: a power of two.

    Raises:
        UsageError: a scale that is not a power of two, or a scale-only format.
    """
    fmt = get_format(fmt)
    if not (fmt.signed and fmt.zero):
        raise UsageError(f"{fmt.name} holds scales only; choose a format with a sign and a zero")
    mantissa, exponent = math.frexp(encode_scale) if encode_scale > 0 and math.isfinite(encode_scale) else (0.0, 0)
    if mantissa != 0.5:
        raise UsageError(f"encode_scale is {encode_scale}; give a power of two")
    shift = exponent - 1
    lossless = shift == 0 and bool(h.dtypes) and all(fmt.includes(get_format(name)) for name in h.dtypes)
    if lossless:
        return Recipe(fmt.name, fmt.bits, 1.0, CountBound(0, 0, h.nonzero), CountBound(0, 0, h.nonzero), 0.0)
    error = sum(count * _binade_error(binade + shift, fmt) for binade, count in h.counts.items())
    return Recipe(
        fmt.name,
        fmt.bits,
        encode_scale,
        flushed(h, fmt, encode_scale),
        overflowed(h, fmt, encode_scale),
        error / h.nonzero if h.nonzero else 0.0,
    )


def _binade_error(exponent: int, fmt: FloatFormat) -> float:
    """Mean relative error in the binade [2^exponent, 2^(exponent + 1)) of the scaled values, saturating."""
    if exponent > fmt.max_exponent:  # mean of 1 - max / x
        return 1.0 - math.ldexp(fmt.max, -exponent) * math.log(2)
    if exponent == fmt.max_exponent:  # part of the binade may lie beyond the largest value
        largest = math.ldexp(fmt.max, -exponent)
        return (largest - 1) * math.ldexp(math.log(2) / 4, -fmt.fraction_bits) + (
            2 - largest - largest * math.log(2 / largest)
        )
    bits = fmt.fraction_bits
    if exponent < fmt.min_exponent:
        bits = bits - (fmt.min_exponent - exponent) if fmt.subnormals else -1 - (fmt.min_exponent - 1 - exponent)
    if bits >= 0:
        return math.ldexp(math.log(2) / 4, -bits)
    return 2 * math.log(2) - 1 if bits == -1 else 1.0


def rank_recipes(h: ExponentHistogram, formats: Iterable[FloatFormat | str] = DEFAULT_FORMATS) -> tuple[Recipe, ...]:
    """Every format unscaled and at its largest safe power-of-two scale, the least estimated error first.

    Among equal errors the unscaled recipe and the narrower format come first.
    """
    found = []
    for fmt in formats:
        scales = dict.fromkeys((1.0, math.ldexp(1.0, largest_safe_exponent(h, fmt))))
        found += [estimate_recipe(h, fmt, scale) for scale in scales]
    return tuple(
        sorted(found, key=lambda r: (r.relative_error, r.encode_scale != 1.0, r.bits, list(FORMATS).index(r.fmt)))
    )
