"""Values that a format no longer tells apart, or no longer sees: positions and ids, epsilons, scaled gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from rooftile.errors import UsageError
from rooftile.formats.arguments import positive_number
from rooftile.formats.carrier import check_float_tensor, check_strided
from rooftile.formats.catalogue import get_format
from rooftile.formats.format import FloatFormat
from rooftile.formats.reference import round_value
from rooftile.formats.rounding import round_to

__all__ = [
    "CollapsedValues",
    "EpsilonReading",
    "LossScaleEffect",
    "collapsed_values",
    "epsilon_in",
    "through_loss_scale",
]


@dataclass(frozen=True, slots=True)
class CollapsedValues:
    """Distinct values before and after storage. All integers up to ``exact_integers`` are values of the format."""

    fmt: str
    total: int
    distinct_before: int
    distinct_after: int
    exact_integers: int

    @property
    def collapsed(self) -> int:
        """Distinct values that are lost."""
        return self.distinct_before - self.distinct_after

    @property
    def reading(self) -> str:
        """One line for a person."""
        return (
            f"{self.distinct_before:,} distinct values become {self.distinct_after:,} in {self.fmt} "
            f"(integers are exact up to {self.exact_integers:,})"
        )


@dataclass(frozen=True, slots=True)
class EpsilonReading:
    """An eps as ``fmt`` stores it; from magnitude ``absorbed_from`` (a power of two) on, ``v + eps`` is ``v``."""

    fmt: str
    eps: float
    stored: float
    absorbed_from: float

    @property
    def is_zero(self) -> bool:
        """Whether nothing is left of it: a guard against division by zero that guards nothing."""
        return self.stored == 0

    @property
    def reading(self) -> str:
        """One line for a person."""
        if self.is_zero:
            return f"eps {self.eps:g} is zero in {self.fmt}: it protects no division"
        return (
            f"eps {self.eps:g} is {self.stored:.4g} in {self.fmt} "
            f"and is lost beside values of {self.absorbed_from:.4g} and more"
        )


@dataclass(frozen=True, slots=True)
class LossScaleEffect:
    """What a loss scale does to gradients stored in ``fmt``: counts of the finite non-zero values."""

    fmt: str
    encode_scale: float
    nonzero: int
    flushed: int
    overflowed: int
    exact: int  # recovered without any error after division by the scale

    @property
    def reading(self) -> str:
        """One line for a person."""
        return (
            f"{self.fmt} under loss scale {self.encode_scale:g}: of {self.nonzero:,} non-zero values "
            f"{self.flushed:,} vanish, {self.overflowed:,} overflow, {self.exact:,} come back exactly"
        )


def collapsed_values(values: torch.Tensor, fmt: FloatFormat | str) -> CollapsedValues:
    """Count how many different ``values`` (positions, ids; floating or integer, any shape) stay different in ``fmt``.

    Raises:
        UsageError: boolean or complex values, NaN, or integers beyond 2^53, which fp64 can't hold.
    """
    fmt = get_format(fmt)
    if isinstance(values, torch.Tensor) and values.dtype in _INTEGERS:
        wide = check_strided(values, "values").long()  # torch has no maximum of its wider unsigned dtypes
        wrapped = values.dtype == torch.uint64 and bool((wide < 0).any())  # 2^63 and more
        if wide.numel() and (wrapped or max(abs(int(wide.max())), abs(int(wide.min()))) > 2**53):
            raise UsageError("an id is larger than 2^53 and not exact even in fp64; compare such ids as integers")
        exact = wide.double()
    else:
        exact = check_float_tensor(values, "values").double()
    if exact.isnan().any():
        raise UsageError("values contain NaN, which is equal to nothing; drop it first")
    stored = round_to(exact, fmt, overflow="ieee")
    return CollapsedValues(
        fmt.name,
        exact.numel(),
        int(exact.unique().numel()),
        int(stored.unique().numel()),
        exact_integers=_exact_integers(fmt),
    )


_INTEGERS = (
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip


def _exact_integers(fmt: FloatFormat) -> int:
    if fmt.min_exponent - fmt.fraction_bits > 0 or not fmt.zero:
        return 0
    return min(1 << (fmt.fraction_bits + 1), math.floor(fmt.max))


def epsilon_in(eps: float, fmt: FloatFormat | str) -> EpsilonReading:
    """What is left of ``eps`` (positive, finite) when it is stored in ``fmt`` and added to values stored there.

    Raises:
        UsageError: eps is not positive and finite.
    """
    fmt = get_format(fmt)
    positive_number(eps, "eps")
    stored = round_value(eps, fmt, overflow="ieee")
    absorbed = 0.0
    if stored != 0:
        # v = 2^e swallows eps when eps <= spacing(v) / 2 = 2^(e - m - 1); 2^e is an even multiple, so the tie is lost
        # too.
        mantissa, exponent = math.frexp(stored)
        needed = exponent - 1 + (mantissa > 0.5) + fmt.fraction_bits + 1
        absorbed = math.ldexp(1.0, max(needed, fmt.min_exponent))
    return EpsilonReading(fmt.name, eps, stored, absorbed)


def through_loss_scale(x: torch.Tensor, fmt: FloatFormat | str, encode_scale: float) -> LossScaleEffect:
    """Multiply, store in ``fmt``, divide: the path of a gradient under a loss scale.

    Raises:
        UsageError: not floating, or a scale that is not positive and finite.
    """
    fmt = get_format(fmt)
    positive_number(encode_scale, "encode_scale")
    values = check_float_tensor(x).double()
    values = values[values.isfinite() & (values != 0)]
    stored = round_to(values * encode_scale, fmt, overflow="ieee")
    return LossScaleEffect(
        fmt.name,
        encode_scale,
        nonzero=values.numel(),
        flushed=int((stored == 0).sum()),
        overflowed=int((~stored.isfinite()).sum()),
        exact=int((stored / encode_scale == values).sum()),
    )
