"""The carrier: fp32 or fp64 read as integers, in which every vectorised operation of this package works.

The bits of a non-negative float, read as an integer, are ordered like the floats, and adding one in the last place
carries from the fraction into the exponent exactly where the binade ends. Exponents are read from those bits, never
from a log2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rooftile.errors import UsageError
from rooftile.formats.catalogue import FORMATS, get_format
from rooftile.formats.format import FloatFormat

__all__ = [
    "FP32",
    "FP64",
    "Carrier",
    "check_float_tensor",
    "check_strided",
    "format_of",
    "narrowest_carrier",
    "result_dtype",
]


@dataclass(frozen=True, slots=True)
class Carrier:
    """A floating dtype, the integer dtype of the same width, and the layout of its bits."""

    dtype: torch.dtype
    int_dtype: torch.dtype
    fraction_bits: int
    bias: int

    @property
    def inf_bits(self) -> int:
        """Bits of +Inf; every larger magnitude is a NaN."""
        return (2 * self.bias + 1) << self.fraction_bits

    @property
    def nan_bits(self) -> int:
        """Bits of the quiet NaN without payload."""
        return self.inf_bits | 1 << (self.fraction_bits - 1)

    @property
    def magnitude_mask(self) -> int:
        """Every bit but the sign."""
        return int(torch.iinfo(self.int_dtype).max)

    @property
    def sign_bit(self) -> int:
        """The sign bit, as the signed integer that it is."""
        return int(torch.iinfo(self.int_dtype).min)

    def bits_of(self, value: float) -> int:
        """Bits of one non-negative value."""
        return int(torch.tensor(value, dtype=self.dtype).view(self.int_dtype).item())


FP32 = Carrier(torch.float32, torch.int32, 23, 127)
FP64 = Carrier(torch.float64, torch.int64, 52, 1023)


def format_of(dtype: torch.dtype) -> FloatFormat:
    """The catalogue's format of a torch dtype.

    Raises:
        UsageError: the dtype is not a real floating dtype with one value per element.
    """
    name = str(dtype).removeprefix("torch.")
    if not dtype.is_floating_point or name not in FLOATING:
        raise UsageError(f"{dtype} is no floating dtype of the catalogue; give one of {', '.join(FLOATING)}")
    return get_format(name)


#: torch's names of the floating dtypes that a tensor may have here.
FLOATING = (
    "float64", "float32", "float16", "bfloat16",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip


def check_float_tensor(x: torch.Tensor, argument: str = "x") -> torch.Tensor:
    """``x`` without its autograd history (rounding is piecewise constant), or a refusal.

    Raises:
        UsageError: not a tensor, nested, not strided, without data (meta), or of an integer, boolean or complex dtype.
    """
    if not isinstance(x, torch.Tensor):
        raise UsageError(f"{argument} is {type(x).__name__}; give a floating torch.Tensor, such as torch.tensor(x)")
    check_strided(x, argument)
    if str(x.dtype).removeprefix("torch.") not in FLOATING:
        raise UsageError(f"{argument} has dtype {x.dtype}; give a floating tensor ({', '.join(FLOATING)})")
    return x.detach()


def check_strided(x: torch.Tensor, argument: str) -> torch.Tensor:
    """``x``, or a refusal.

    Raises:
        UsageError: a nested or sparse tensor, or one without data (meta).
    """
    if x.is_nested:  # some of them call themselves strided
        raise UsageError(
            f"{argument} is a nested tensor; give each of its parts (x.unbind()) or a padded strided tensor"
        )
    if x.layout != torch.strided or x.device.type == "meta":
        raise UsageError(f"{argument} is a {x.layout} tensor on {x.device}; give a strided tensor with data")
    return x


def narrowest_carrier(dtype: torch.dtype, fmt: FloatFormat) -> Carrier:
    """fp32 where both the input and every binade of ``fmt`` are normal or subnormal fp32 values, else fp64."""
    fits = FORMATS["fp32"].includes(fmt) and fmt.min_exponent >= FORMATS["fp32"].min_exponent
    return FP32 if fits and dtype != torch.float64 else FP64


def result_dtype(dtype: torch.dtype, fmt: FloatFormat) -> torch.dtype:
    """``dtype`` if it holds every value of ``fmt``, else the narrower of float32 and float64 that does."""
    for candidate in (dtype, torch.float32):
        if format_of(candidate).includes(fmt):
            return candidate
    return torch.float64
