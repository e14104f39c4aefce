"""What a number can hold: a binary floating-point format as data, everything else derived with finfo's names.

A value is ``(-1)^s * 1.f * 2^(e - bias)`` (IEEE 754-2019, section 3). A *code* is the bit pattern read as an unsigned
integer; without its sign bit it is the *magnitude code*, and magnitude codes are ordered like the magnitudes they
stand for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from rooftile.errors import UsageError

__all__ = ["FloatFormat", "NanCodes", "SpecialCodes"]

#: Which codes mean NaN. ``ieee``: the top exponent field is reserved (fraction 0 is Inf where the format has
#: infinities, the rest NaN). ``all-ones``: the last magnitude code only. ``negative-zero``: the code that would be
#: -0. ``none``: no code.
NanCodes = Literal["ieee", "all-ones", "negative-zero", "none"]


@dataclass(frozen=True, slots=True)
class SpecialCodes:
    """Codes ``first`` to ``last`` (both included) that stand for ``meaning`` rather than a non-zero finite number."""

    meaning: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """One binary format. Every value of every format fits in fp64; a format for which that fails is refused.

    ``subnormals=False`` means that exponent field 0 holds nothing but zero (hardware that flushes). ``zero=False``
    means that the field 0 is an ordinary binade and no code is zero (scale formats such as e8m0). ``computes_over``
    names the storage format of a matrix-compute mode (tf32 reads fp32 storage and rounds it on the way in); it is
    empty for storage formats.

    Raises:
        UsageError: a combination of fields that is no format, with the field and what to change.
    """

    name: str
    exponent_bits: int
    fraction_bits: int
    bias: int
    signed: bool = True
    infinities: bool = True
    nan_codes: NanCodes = "ieee"
    subnormals: bool = True
    zero: bool = True
    computes_over: str = ""

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise UsageError(f"format {self.name!r}: {problem}")

    def _problem(self) -> str:
        if not 1 <= self.exponent_bits <= 11:
            return f"exponent_bits is {self.exponent_bits}; it must lie in 1..11"
        if not 0 <= self.fraction_bits <= 52:
            return f"fraction_bits is {self.fraction_bits}; it must lie in 0..52"
        if self.nan_codes not in get_args(NanCodes):
            return f"nan_codes is {self.nan_codes!r}; choose one of {', '.join(get_args(NanCodes))}"
        if self.nan_codes == "negative-zero" and not (self.signed and self.zero):
            return "nan_codes 'negative-zero' needs a signed format with a zero"
        if self.nan_codes == "ieee" and self.infinities and self.fraction_bits == 0:
            return "no fraction bit is left to tell NaN from Inf; set infinities=False or another nan_codes"
        if not self.zero and self.subnormals:
            return "a format without zero has no subnormals; set subnormals=False"
        if self.max_code < self.tiny_code:
            return "no code is left for a normal number; give it more bits or fewer special codes"
        if self.min_exponent < -1022 or self.max_exponent > 1023:
            return f"exponents {self.min_exponent}..{self.max_exponent} leave fp64's -1022..1023; choose another bias"
        return ""

    # --- Codes ---

    @property
    def bits(self) -> int:
        """Bits of one code (19 for tf32, whose storage takes 32)."""
        return int(self.signed) + self.exponent_bits + self.fraction_bits

    @property
    def number_of_codes(self) -> int:
        """All bit patterns, special ones included."""
        return 1 << self.bits

    @property
    def sign_bit(self) -> int:
        """The code's sign bit, 0 for an unsigned format."""
        return 1 << (self.bits - 1) if self.signed else 0

    @property
    def top_code(self) -> int:
        """The magnitude code with every exponent and fraction bit set."""
        return (1 << (self.exponent_bits + self.fraction_bits)) - 1

    @property
    def inf_code(self) -> int | None:
        """Magnitude code of infinity, None where there is none."""
        if not self.infinities:
            return None
        if self.nan_codes == "ieee":
            return ((1 << self.exponent_bits) - 1) << self.fraction_bits
        return self.top_code - (self.nan_codes == "all-ones")

    @property
    def nan_code(self) -> int | None:
        """The code that :func:`encode` writes for NaN (quiet, positive), None where the format has no NaN."""
        match self.nan_codes:
            case "none":
                return None
            case "negative-zero":
                return self.sign_bit
            case "all-ones":
                return self.top_code
            case _:
                quiet = 1 << (self.fraction_bits - 1) if self.fraction_bits else 0
                return ((1 << self.exponent_bits) - 1) << self.fraction_bits | quiet

    @property
    def max_code(self) -> int:
        """Magnitude code of the largest finite value."""
        if self.nan_codes == "ieee":
            return (((1 << self.exponent_bits) - 1) << self.fraction_bits) - 1
        return self.top_code - (self.nan_codes == "all-ones") - self.infinities

    @property
    def tiny_code(self) -> int:
        """Magnitude code of the smallest normal value."""
        return 1 << self.fraction_bits if self.zero else 0

    @property
    def smallest_code(self) -> int:
        """Magnitude code of the smallest positive value."""
        return 1 if self.subnormals else self.tiny_code

    @property
    def negative_zero(self) -> bool:
        """Whether -0 has a code of its own."""
        return self.signed and self.zero and self.nan_codes != "negative-zero"

    @property
    def special_codes(self) -> tuple[SpecialCodes, ...]:
        """Every code that is a zero, an infinity or a NaN, as ranges in rising order."""
        found: list[SpecialCodes] = []
        for sign, base in (("+", 0), ("-", self.sign_bit)) if self.signed else (("+", 0),):
            if self.zero and (sign == "+" or self.negative_zero):
                last = base if self.subnormals else base + self.tiny_code - 1
                found.append(SpecialCodes(sign + "0", base, last))
            elif sign == "-" and self.nan_codes == "negative-zero":
                found.append(SpecialCodes("NaN", base, base))
            if self.inf_code is not None:
                found.append(SpecialCodes(sign + "Inf", base + self.inf_code, base + self.inf_code))
            if self.nan_codes in ("ieee", "all-ones"):
                found.append(SpecialCodes("NaN", base + self.max_code + 1 + self.infinities, base + self.top_code))
        return tuple(found)

    def magnitude(self, code: int) -> float:
        """The value of a finite magnitude code, exact in fp64."""
        field, fraction = divmod(code, 1 << self.fraction_bits)
        if self.zero and field == 0:
            return math.ldexp(fraction, self.min_exponent - self.fraction_bits) if self.subnormals else 0.0
        exponent = self.min_exponent + field - int(self.zero)
        return math.ldexp((1 << self.fraction_bits) + fraction, exponent - self.fraction_bits)

    # --- Range and resolution, with finfo's names ---

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value, a power of two."""
        return int(self.zero) - self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the binade that holds the largest finite value."""
        return self.min_exponent + (self.max_code >> self.fraction_bits) - int(self.zero)

    @property
    def max(self) -> float:
        """Largest finite value."""
        return self.magnitude(self.max_code)

    @property
    def min(self) -> float:
        """Most negative finite value; for an unsigned format its smallest value."""
        if self.signed:
            return -self.max
        return 0.0 if self.zero else self.tiny

    @property
    def eps(self) -> float:
        """Spacing just above 1."""
        return math.ldexp(1.0, -self.fraction_bits)

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of rounding to nearest in the normal range, ``eps / 2``."""
        return self.eps / 2

    @property
    def resolution(self) -> float:
        """Decimal resolution ``10^-digits``, as torch.finfo gives it."""
        return float(f"1e-{int(self.fraction_bits * math.log10(2))}")

    @property
    def tiny(self) -> float:
        """Smallest positive normal value (torch and numpy also say ``smallest_normal``)."""
        return self.magnitude(self.tiny_code)

    @property
    def smallest_normal(self) -> float:
        """The same as :attr:`tiny`."""
        return self.tiny

    @property
    def smallest_subnormal(self) -> float:
        """Smallest positive value; equal to :attr:`tiny` for a format without subnormals."""
        return self.magnitude(self.smallest_code)

    @property
    def flush_threshold(self) -> float:
        """Largest magnitude that rounds (to nearest) to zero: half the smallest value, the tie going to zero.

        0.0 for a format without zero, where nothing is flushed. fp64's own threshold, 2^-1075, is not an fp64 value and
        rounds to 0.0 here.
        """
        return self.smallest_subnormal / 2 if self.zero else 0.0

    @property
    def storage_bits(self) -> int:
        """Bits that one value takes in memory."""
        return 32 if self.computes_over == "fp32" else self.bits

    def includes(self, other: FloatFormat) -> bool:
        """Whether every value of ``other`` but NaN is a value of this format (-0 and infinities count)."""
        return (
            self.fraction_bits >= other.fraction_bits
            and self.max >= other.max
            and self._lowest_bit <= other._lowest_bit
            and (self.subnormals or self.min_exponent <= other._smallest_exponent)
            and (self.signed or not other.signed)
            and (self.zero or not other.zero)
            and (self.negative_zero or not other.negative_zero)
            and (self.infinities or not other.infinities)
        )

    @property
    def _lowest_bit(self) -> int:
        """Exponent of the last fraction bit of the smallest normal value."""
        return self.min_exponent - self.fraction_bits

    @property
    def _smallest_exponent(self) -> int:
        """Exponent of the smallest positive value, a power of two in every format."""
        return self._lowest_bit if self.subnormals else self.min_exponent
