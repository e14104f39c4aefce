"""Test values of a format, and an oracle for whole tensors that shares no step with the code under test."""

from __future__ import annotations

import math

import numpy as np
import torch

from rooftile.formats.format import FloatFormat
from rooftile.formats.reference import decode_code


def positive_values(fmt: FloatFormat) -> list[float]:
    """Every positive finite value, rising."""
    return [fmt.magnitude(code) for code in range(fmt.smallest_code, fmt.max_code + 1)]


def tricky_values(fmt: FloatFormat) -> torch.Tensor:
    """float64: every value, every midpoint, the fp64 neighbours of both, the overflow edge and the specials; both
    signs.
    """
    values = np.array([0.0, *positive_values(fmt)])
    if fmt.max < 1e300:
        values = np.append(values, [2 * values[-1] - values[-2], 4 * values[-1]])
    centres = np.concatenate([values, (values[1:] + values[:-1]) / 2, values[1:2] / 2, values[1:2] / 4])
    around = np.concatenate([np.nextafter(centres, 0.0), centres, np.nextafter(centres, np.inf)])
    special = np.array([0.0, 5e-324, 2.0**-1022, 1.7976931348623157e308, np.inf])
    magnitudes = np.concatenate([around, special])
    return torch.from_numpy(np.concatenate([magnitudes, -magnitudes, [np.nan]]))


def random_values(fmt: FloatFormat, count: int, generator: torch.Generator) -> torch.Tensor:
    """float64: exponents spread over the format's range and a few binades beyond each end, random signs."""
    low = max(fmt.min_exponent - fmt.fraction_bits - 4, -1060)
    high = min(fmt.max_exponent + 4, 1023)
    exponents = torch.randint(low, high + 1, (count,), generator=generator).double()
    fractions = 1 + torch.rand(count, generator=generator, dtype=torch.float64)
    signs = torch.randint(0, 2, (count,), generator=generator).double() * 2 - 1
    halves = torch.exp2(torch.floor(exponents / 2)), torch.exp2(exponents - torch.floor(exponents / 2))
    return signs * fractions * halves[0] * halves[1]


def nearest_even_by_search(x: torch.Tensor, fmt: FloatFormat, overflow: str = "saturate") -> np.ndarray:
    """Round finite float64 values by looking them up between the format's midpoints (all exact in fp64 up to 50
    bits).
    """
    values = np.array([0.0, *positive_values(fmt)]) if fmt.zero else np.array(positive_values(fmt))
    beyond = 2 * values[-1] - values[-2] if fmt.fraction_bits else 2 * values[-1]
    table = np.append(values, beyond)
    middle = (table[1:] + table[:-1]) / 2
    magnitude = np.abs(x.numpy())
    index = np.searchsorted(middle, magnitude, side="left")  # number of midpoints strictly below
    tie = (index < len(middle)) & (magnitude == middle[np.minimum(index, len(middle) - 1)])
    # A tie goes to the even multiple of the spacing. Zero is even; with one significant bit no other value is, and the
    # larger one is taken (IEEE 754-2019, 4.3.1).
    to_larger = index % 2 == 1 if fmt.fraction_bits else ~((index == 0) & fmt.zero)
    index = np.where(tie & to_larger, index + 1, index)
    over = math.inf if fmt.infinities else math.nan
    result = np.append(values, values[-1] if overflow == "saturate" else over)[np.minimum(index, len(values))]
    signed = np.copysign(result, x.numpy())
    if not fmt.signed:
        signed = np.where((x.numpy() < 0), math.nan, result)
    return signed if fmt.negative_zero else signed + 0.0


def decoded(fmt: FloatFormat) -> np.ndarray:
    """Every code's value by the scalar reference."""
    return np.array([decode_code(code, fmt) for code in range(fmt.number_of_codes)])


def same(a: torch.Tensor | np.ndarray, b: torch.Tensor | np.ndarray) -> bool:
    """Equal values and signs of zero, NaN equal to NaN; the first differences are shown by the assertion."""
    left, right = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    equal = (left == right) & (np.signbit(left) == np.signbit(right)) | (np.isnan(left) & np.isnan(right))
    assert equal.all(), [(left[i], right[i]) for i in np.flatnonzero(~equal)[:5]]
    return True
