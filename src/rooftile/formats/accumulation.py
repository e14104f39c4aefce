"""Sums and dot products in a chosen accumulator: serial, pairwise, wide; and how much cancels in a sum."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch

from rooftile.errors import UsageError
from rooftile.formats.carrier import check_float_tensor
from rooftile.formats.catalogue import get_format
from rooftile.formats.format import FloatFormat
from rooftile.formats.reference import round_value, value_spacing
from rooftile.formats.rounding import round_to
from rooftile.formats.single_rounding import add_scalars, add_tensors, exact_sum, round_scalar

__all__ = ["Accumulation", "Cancellation", "accumulate", "cancellation"]


@dataclass(frozen=True, slots=True)
class Accumulation:
    """One sum, added up in three ways. ``accumulator`` and ``wide_format`` are names of formats.

    ``serial``: left to right in the accumulator. ``pairwise``: a balanced tree in the accumulator. ``wide``: left to
    right in the wide format, rounded to the accumulator once at the end. ``exact``: the exact sum rounded to fp64;
    ``best``: the exact sum rounded to the accumulator. ``stagnant`` counts the non-zero terms that left the serial sum
    unchanged. Errors are in ulps of the accumulator at the exact sum; infinite where a result is not finite.
    """

    accumulator: str
    wide_format: str
    terms: int
    serial: float
    pairwise: float
    wide: float
    exact: float
    best: float
    stagnant: int
    serial_ulps: float
    pairwise_ulps: float
    wide_ulps: float

    @property
    def reading(self) -> str:
        """One line for a person."""
        stopped = f"; {self.stagnant:,} non-zero terms changed nothing" if self.stagnant else ""
        return (
            f"{self.terms:,} terms, exactly {self.exact:.9g}: serial {self.accumulator} gives {self.serial:.9g}, "
            f"pairwise {self.pairwise:.9g}, {self.wide_format} accumulation {self.wide:.9g}{stopped}"
        )


@dataclass(frozen=True, slots=True)
class Cancellation:
    """How much of a sum cancels: ``condition`` = sum of magnitudes / magnitude of the sum (Higham 2002, section 4.2).

    A relative error ``u`` of the terms may become ``condition * u`` of the sum, whatever the order of summation.
    """

    terms: int
    total: float
    absolute: float
    condition: float

    @property
    def bits_lost(self) -> float:
        """log2 of the condition number: leading bits that cancel, infinite if everything does."""
        return math.log2(self.condition) if self.condition < math.inf else math.inf

    def trusted_digits(self, fmt: FloatFormat | str) -> float:
        """Decimal digits that a sum of terms rounded to ``fmt`` can still have, 0.0 if none."""
        roundoff = get_format(fmt).unit_roundoff * self.condition
        return max(0.0, -math.log10(roundoff)) if roundoff < math.inf else 0.0

    @property
    def reading(self) -> str:
        """One line for a person."""
        if self.condition == math.inf:
            return f"{self.terms:,} terms cancel completely: no digit of the sum can be trusted"
        return f"{self.terms:,} terms, condition number {self.condition:.3g}: {self.bits_lost:.1f} leading bits cancel"


def _terms(x: torch.Tensor, argument: str = "x") -> torch.Tensor:
    x = check_float_tensor(x, argument)
    if x.dim() != 1:
        raise UsageError(f"{argument} has shape {tuple(x.shape)}; a sum takes one dimension, flatten it first")
    return x.double()


def accumulate(
    x: torch.Tensor,
    accumulator: FloatFormat | str = "fp16",
    *,
    other: torch.Tensor | None = None,
    product: FloatFormat | str | None = None,
    wide: FloatFormat | str = "fp32",
) -> Accumulation:
    """Add up ``x``, or ``x * other``, in the accumulator; every addition is rounded once, to nearest, ties to even.

    Args:
        x: one dimension, floating.
        accumulator: the format of the running sum.
        other: the second factor of a dot product; the same shape.
        product: the format that each product is rounded to; None keeps products exact, as multiply-accumulate units
            do, and needs factors of at most float32.
        wide: the wider accumulator to compare with.

    Raises:
        UsageError: not one dimension, shapes differ, exact products of float64, or an accumulator without sign or zero.
    """
    narrow, broad = get_format(accumulator), get_format(wide)
    for fmt in (narrow, broad):
        if not (fmt.signed and fmt.zero):
            raise UsageError(f"{fmt.name} has no sign or no zero, so nothing can be accumulated in it")
    terms = _terms(x)
    if other is not None:
        terms = _products(x, terms, other, product)
    elif product is not None:
        raise UsageError("product names the format of x * other; give other, or leave product out")
    values: list[float] = terms.tolist()
    serial, stagnant = _serial(values, narrow)
    broad_sum, _ = _serial(values, broad)
    if not all(map(math.isfinite, values)):
        raise UsageError("a term is Inf or NaN, and so is every sum; drop it first")
    exact = exact_sum(values)
    found = serial, _pairwise(terms, narrow), round_scalar(broad_sum, narrow)
    ulps = [_ulps(value, exact, narrow) for value in found]
    best = round_value(exact, narrow, overflow="ieee")
    return Accumulation(
        narrow.name, broad.name, len(values), *found, round_value(exact, "fp64", overflow="ieee"), best, stagnant, *ulps
    )


def _products(
    x: torch.Tensor, left: torch.Tensor, other: torch.Tensor, product: FloatFormat | str | None
) -> torch.Tensor:
    right = _terms(other, "other")
    if left.shape != right.shape:
        raise UsageError(f"x has {left.numel()} elements and other {right.numel()}; give equally many")
    if product is None and torch.float64 in (x.dtype, other.dtype):
        raise UsageError("the product of two float64 values is not exact; name the product's format, or give float32")
    exact = left * right  # two 24-bit significands: 48 bits, exact in fp64
    return exact if product is None else round_to(exact, product, overflow="ieee").double()


def _serial(values: list[float], fmt: FloatFormat) -> tuple[float, int]:
    total, stagnant = 0.0, 0
    for value in values:
        before, total = total, add_scalars(total, value, fmt)
        stagnant += value != 0 and total == before
    return total, stagnant


def _pairwise(terms: torch.Tensor, fmt: FloatFormat) -> float:
    if terms.numel() == 0:
        return 0.0
    if terms.numel() == 1:
        return round_scalar(terms.item(), fmt)
    while terms.numel() > 1:
        even = terms.numel() // 2 * 2
        terms = torch.cat([add_tensors(terms[0:even:2], terms[1:even:2], fmt), terms[even:]])
    return float(terms.item())


def _ulps(value: float, exact: Fraction, fmt: FloatFormat) -> float:
    if not math.isfinite(value):
        return math.inf
    return float(abs(Fraction(value) - exact) / value_spacing(abs(exact), fmt))


def cancellation(x: torch.Tensor) -> Cancellation:
    """The condition number of the sum of ``x`` (one dimension, floating), from exact sums.

    1.0 for an empty or all-zero sum, which is known exactly; infinite where non-zero terms add up to zero.

    Raises:
        UsageError: not one dimension, not floating, or a term that is not finite.
    """
    values: list[float] = _terms(x).tolist()
    if not all(map(math.isfinite, values)):
        raise UsageError("a term is Inf or NaN; drop it first")
    total, absolute = math.fsum(values), math.fsum(map(abs, values))
    condition = 1.0 if absolute == 0 else math.inf if total == 0 else absolute / abs(total)
    return Cancellation(len(values), total, absolute, condition)
