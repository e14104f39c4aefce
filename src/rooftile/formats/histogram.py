"""``exponent_histogram``: one pass over a tensor, and afterwards every question about range is answered without it.

Counts are kept per binade ``2^e <= |x| < 2^(e+1)`` and sign, beside exact zeros, infinities and NaNs; the largest and
the smallest non-zero magnitude are kept exactly. The record merges (streams, ranks) and serialises, without torch.
:mod:`rooftile.formats.reach` asks it what a format would flush or overflow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rooftile.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["ExponentHistogram", "exponent_histogram"]

_SCHEMA = "rooftile.exponent_histogram/1"


@dataclass(frozen=True, slots=True)
class ExponentHistogram:
    """Counts of one tensor, or of several that were merged.

    ``powers`` counts the values that are exactly plus or minus 2^e, which settles thresholds that are powers of two.
    ``positive`` and ``negative`` map a binade's exponent to its count (non-zero counts only, rising exponents). Values
    that are subnormal in their own dtype sit in the binade that they belong to. ``amax`` and ``amin`` are the largest
    finite and the smallest non-zero magnitude, 0.0 if there is none. ``dtypes`` are the formats that were counted.
    """

    positive: Mapping[int, int]
    negative: Mapping[int, int]
    powers: Mapping[int, int]
    positive_zeros: int = 0
    negative_zeros: int = 0
    positive_infs: int = 0
    negative_infs: int = 0
    nans: int = 0
    subnormals: int = 0  # non-zero values below the smallest normal of the dtype they were stored in
    amax: float = 0.0
    amin: float = 0.0
    dtypes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        for name in _BY_EXPONENT:
            counts = {e: n for e, n in sorted(getattr(self, name).items()) if n}
            object.__setattr__(self, name, MappingProxyType(counts))

    @property
    def counts(self) -> dict[int, int]:
        """Count per binade, both signs together: exponent to count, rising exponents."""
        exponents = sorted({*self.positive, *self.negative})
        return {e: self.positive.get(e, 0) + self.negative.get(e, 0) for e in exponents}

    @property
    def zeros(self) -> int:
        """Exact zeros, -0 included."""
        return self.positive_zeros + self.negative_zeros

    @property
    def infs(self) -> int:
        """Infinities of both signs."""
        return self.positive_infs + self.negative_infs

    @property
    def nonzero(self) -> int:
        """Finite values other than zero: the denominator of every fraction that could be flushed or overflow."""
        return sum(self.positive.values()) + sum(self.negative.values())

    @property
    def total(self) -> int:
        """All elements, whatever they are."""
        return self.nonzero + self.zeros + self.infs + self.nans

    @property
    def dynamic_range(self) -> int:
        """Binades from the smallest to the largest non-zero finite value, both included; 0 if there is none."""
        exponents = self.counts
        return max(exponents) - min(exponents) + 1 if exponents else 0

    def merge(self, other: ExponentHistogram) -> ExponentHistogram:
        """The histogram of both tensors together; associative and commutative, exact."""
        return merge_all([self, other])

    def __add__(self, other: ExponentHistogram) -> ExponentHistogram:
        return self.merge(other) if isinstance(other, ExponentHistogram) else NotImplemented

    def __radd__(self, other: int) -> ExponentHistogram:
        """``sum(histograms)`` starts from 0, which adds nothing."""
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "schema": _SCHEMA,
            **{name: {str(e): n for e, n in getattr(self, name).items()} for name in _BY_EXPONENT},
            **{name: getattr(self, name) for name in (*_COUNTERS, "amax", "amin")},
            "dtypes": list(self.dtypes),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ExponentHistogram:
        """The record that :meth:`to_dict` wrote.

        Raises:
            UsageError: another schema, or a field that is missing or not a number.
        """
        if data.get("schema") != _SCHEMA:
            raise UsageError(
                f"schema is {data.get('schema')!r}, not {_SCHEMA!r}; give what ExponentHistogram.to_dict made"
            )
        try:
            fields: dict[str, Any] = {name: {int(e): int(n) for e, n in data[name].items()} for name in _BY_EXPONENT}
            fields |= {name: int(data[name]) for name in _COUNTERS}
            fields |= {name: float(data[name]) for name in ("amax", "amin")}
            return cls(**fields, dtypes=tuple(data["dtypes"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"an exponent histogram can't be read from this data: {error!r}; write it again") from None


_BY_EXPONENT = ("positive", "negative", "powers")
_COUNTERS = ("positive_zeros", "negative_zeros", "positive_infs", "negative_infs", "nans", "subnormals")


def merge_all(histograms: Iterable[ExponentHistogram]) -> ExponentHistogram:
    """One histogram of any number of them, also of none."""
    parts = list(histograms)
    fields: dict[str, Any] = {name: {} for name in _BY_EXPONENT}
    for part in parts:
        for name in _BY_EXPONENT:
            for exponent, count in getattr(part, name).items():
                fields[name][exponent] = fields[name].get(exponent, 0) + count
    fields |= {name: sum(getattr(part, name) for part in parts) for name in _COUNTERS}
    return ExponentHistogram(
        **fields,
        amax=max((part.amax for part in parts), default=0.0),
        amin=min((part.amin for part in parts if part.amin), default=0.0),
        dtypes=tuple(dict.fromkeys(name for part in parts for name in part.dtypes)),
    )


def exponent_histogram(x: torch.Tensor) -> ExponentHistogram:
    """Count ``x`` by sign and binade in one pass.

    Args:
        x: any shape, strides and device; float64, float32, float16, bfloat16 or a float8 dtype. A tensor that is not
            dense in memory is copied in pieces, never as a whole.

    Raises:
        UsageError: an integer, complex, sparse or meta tensor.
    """
    from rooftile.formats.carrier import check_float_tensor, format_of
    from rooftile.formats.counting import count_exponents

    x = check_float_tensor(x)
    counted = merge_all(count_exponents(x))
    fmt = format_of(x.dtype)
    below = sum(count for exponent, count in counted.counts.items() if exponent < fmt.min_exponent)
    return replace(counted, subnormals=below, dtypes=(fmt.name,))
