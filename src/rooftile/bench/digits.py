"""Figures with the digits that their measurement supports, and no more. Needs no torch."""

from __future__ import annotations

import math

from rooftile.bench.record import Record

__all__ = ["figure", "scaled", "significant_digits", "with_digits"]

_MOST = 4
_PREFIXES = {1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k", 1.0: "", 1e-3: "m", 1e-6: "µ", 1e-9: "n"}


def significant_digits(value: float, error: float) -> int:
    """How many digits of ``value`` stand before its ``error`` sets in, that digit included; from 1 to 4."""
    if value == 0 or error <= 0:
        return _MOST
    kept = math.floor(math.log10(abs(value))) - math.floor(math.log10(error)) + 1
    return min(max(kept, 1), _MOST)


def with_digits(value: float, digits: int) -> str:
    """``value`` rounded to ``digits`` significant digits, without an exponent."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")
    places = digits - 1 - math.floor(math.log10(abs(rounded)))
    return f"{rounded:,.{max(0, places)}f}"


def scaled(value: float, unit: str, digits: int = 3) -> str:
    """``12.3 ms``, ``1.90 TFLOP/s``, ``7.5 G elements/s``: the largest prefix that keeps the number at 1 or more."""
    size = next((size for size in _PREFIXES if abs(value) >= size), 1e-9)
    gap = " " if unit.startswith("elements") else ""
    return f"{with_digits(value / size, digits)} {_PREFIXES[size]}{gap}{unit}"


def figure(record: Record) -> str:
    """A record's value with its unit, in the digits that the error of its median supports."""
    return scaled(record.value, record.unit, significant_digits(record.value, record.standard_error))
