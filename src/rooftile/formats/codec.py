"""Codes and neighbours: ``encode``, ``decode``, ``spacing``, ``next_up``, ``next_down``, ``fraction_bits_used``.

All of it works in fp64, of which every value of every format is a value, so nothing is rounded but by :func:`round_to`.
"""

from __future__ import annotations

import math

import torch

from rooftile.errors import UsageError
from rooftile.formats.carrier import FP64, check_float_tensor, check_strided, result_dtype
from rooftile.formats.catalogue import get_format
from rooftile.formats.format import FloatFormat
from rooftile.formats.policy import InfInput, Overflow, Rounding
from rooftile.formats.rounding import round_to

__all__ = ["code_dtype", "decode", "encode", "fraction_bits_used", "next_down", "next_up", "spacing"]

_WIDTH, _BIAS = FP64.fraction_bits, FP64.bias


def code_dtype(fmt: FloatFormat | str) -> torch.dtype:
    """Dtype of encoded tensors: uint8 up to 8 bits, int32 up to 31, int64 beyond (fp64: its 64 bits, as signed)."""
    bits = get_format(fmt).bits
    return torch.uint8 if bits <= 8 else torch.int32 if bits <= 31 else torch.int64


def encode(
    x: torch.Tensor,
    fmt: FloatFormat | str,
    rounding: Rounding = "nearest-even",
    overflow: Overflow = "saturate",
    inf_input: InfInput = "keep",
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """The codes of the values that ``x`` rounds to, in :func:`code_dtype`; the arguments are those of :func:`round_to`.

    Raises:
        UsageError: as :func:`round_to`; also where a result is NaN and the format has no code for NaN.
    """
    fmt = get_format(fmt)
    value = round_to(check_float_tensor(x).double(), fmt, rounding, overflow, inf_input, generator)
    magnitude, negative = _magnitude_codes(value, fmt)
    sign = fmt.sign_bit if fmt.bits < 64 else FP64.sign_bit
    codes = torch.where(negative, magnitude | sign, magnitude)
    nan = value.isnan()
    if fmt.nan_code is not None:
        codes = torch.where(nan, fmt.nan_code, codes)
    elif nan.any():
        count = int(nan.sum())
        raise UsageError(
            f"{count} values have no code in {fmt.name}, which has neither Inf nor NaN; saturate or replace them"
        )
    return codes.to(code_dtype(fmt))


def _magnitude_codes(value: torch.Tensor, fmt: FloatFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Magnitude codes and signs of fp64 tensors whose elements are values of ``fmt`` (NaN gives nonsense)."""
    bits = value.contiguous().view(torch.int64)
    magnitude = bits & FP64.magnitude_mask
    field = (magnitude >> _WIDTH).clamp(min=1)
    significand = magnitude - ((field - 1) << _WIDTH)
    above = (field - _BIAS - fmt.min_exponent).clamp(min=0)
    shift = (_WIDTH - fmt.fraction_bits + fmt.min_exponent + _BIAS - field).clamp(
        min=_WIDTH - fmt.fraction_bits, max=63
    )
    codes = (above << fmt.fraction_bits) + (significand >> shift)
    if not fmt.zero:
        codes = codes - (1 << fmt.fraction_bits)
    if fmt.inf_code is not None:
        codes = torch.where(magnitude == FP64.inf_bits, fmt.inf_code, codes)
    return codes, bits < 0


def decode(codes: torch.Tensor, fmt: FloatFormat | str) -> torch.Tensor:
    """The values of integer ``codes``, as float32 where it holds every value of the format, else float64.

    Raises:
        UsageError: not a strided integer tensor, or a code outside the format.
    """
    fmt = get_format(fmt)
    if (
        not isinstance(codes, torch.Tensor)
        or codes.is_floating_point()
        or codes.is_complex()
        or codes.dtype == torch.bool
    ):
        kind = codes.dtype if isinstance(codes, torch.Tensor) else type(codes).__name__
        raise UsageError(f"codes are integers; got {kind}")
    wide = check_strided(codes, "codes").to(torch.int64)
    if fmt.bits < 64 and wide.numel() and not 0 <= int(wide.min()) <= int(wide.max()) < fmt.number_of_codes:
        wrong = int(wide.min()) if int(wide.min()) < 0 else int(wide.max())
        raise UsageError(f"{wrong} is no code of {fmt.name}; codes run from 0 to {fmt.number_of_codes - 1}")
    negative = wide < 0 if fmt.bits == 64 else (wide & fmt.sign_bit).bool()
    value = _decode_magnitudes(wide & fmt.top_code, fmt)
    if fmt.nan_codes == "negative-zero":
        value = torch.where(wide == fmt.sign_bit, math.nan, value)
    return torch.where(negative, -value, value).to(result_dtype(torch.float32, fmt))


def _decode_magnitudes(magnitude: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """fp64 values of magnitude codes, Inf and NaN codes included."""
    field = magnitude >> fmt.fraction_bits
    fraction = magnitude & ((1 << fmt.fraction_bits) - 1)
    exponent = field + (fmt.min_exponent - int(fmt.zero))
    normal = ((exponent + _BIAS) << _WIDTH) + (fraction << (_WIDTH - fmt.fraction_bits))
    if fmt.zero:
        if not fmt.subnormals:
            low = torch.zeros_like(fraction)
        elif fmt.min_exponent == -1022:
            low = fraction << (_WIDTH - fmt.fraction_bits)
        else:
            low = (fraction.double() * fmt.smallest_subnormal).view(
                torch.int64
            )  # exact: a short integer by a power of two
        normal = torch.where(field == 0, low, normal)
    if fmt.inf_code is not None:
        normal = torch.where(magnitude == fmt.inf_code, FP64.inf_bits, normal)
    special = magnitude > fmt.max_code
    if fmt.inf_code is not None:
        special &= magnitude != fmt.inf_code
    return torch.where(special, FP64.nan_bits, normal).contiguous().view(torch.float64)


def spacing(x: torch.Tensor, fmt: FloatFormat | str) -> torch.Tensor:
    """The gap between neighbouring values of ``fmt`` in the binade that holds ``|x|``; x itself need not be a value
    of it.

    At and near 0 that is the smallest positive value. NaN where x is NaN, infinite or beyond the largest finite value.
    Same shape as ``x``; dtype as :func:`round_to`.
    """
    fmt = get_format(fmt)
    x = check_float_tensor(x)
    value = x.double().contiguous()
    field = (value.view(torch.int64) & FP64.magnitude_mask) >> _WIDTH
    exponent = field - _BIAS
    gap_exponent = exponent.clamp(min=fmt.min_exponent, max=fmt.max_exponent) - fmt.fraction_bits
    gap = torch.where(
        gap_exponent >= -1022,
        (gap_exponent.clamp(min=-1022) + _BIAS) << _WIDTH,
        torch.ones_like(field) << (gap_exponent + 1074).clamp(min=0, max=62),
    ).view(torch.float64)
    gap = torch.where(exponent < fmt.min_exponent, fmt.smallest_subnormal, gap)
    inside = value.abs() <= fmt.max  # False for NaN
    return torch.where(inside, gap, math.nan).to(result_dtype(x.dtype, fmt))


def next_up(x: torch.Tensor, fmt: FloatFormat | str) -> torch.Tensor:
    """The smallest value of ``fmt`` that is greater than ``x`` (IEEE 754-2019 5.3.1, extended to any x).

    Above the largest finite value that is Inf, or NaN in a format without Inf: there is none. NaN stays NaN; +Inf
    stays.
    """
    fmt = get_format(fmt)
    x = check_float_tensor(x)
    return _neighbour(x.double(), fmt, 1).to(result_dtype(x.dtype, fmt))


def next_down(x: torch.Tensor, fmt: FloatFormat | str) -> torch.Tensor:
    """The largest value of ``fmt`` that is less than ``x``: the mirror image of :func:`next_up`."""
    fmt = get_format(fmt)
    x = check_float_tensor(x)
    down = -_neighbour(-x.double(), fmt, 1) if fmt.signed else _neighbour(x.double(), fmt, -1)
    if fmt.signed and not fmt.negative_zero:
        down = torch.where(down == 0, 0.0, down)
    return down.to(result_dtype(x.dtype, fmt))


def _neighbour(x: torch.Tensor, fmt: FloatFormat, direction: int) -> torch.Tensor:
    """Round toward ``direction``; where that stays at x, take one step along the ordered values."""
    rounded = round_to(x, fmt, "up" if direction > 0 else "down", "ieee")
    lowest = -fmt.max if fmt.signed else (0.0 if fmt.zero else fmt.tiny)
    if direction > 0:  # the format has nothing so far down: its lowest value comes next
        stays = x.isneginf() & (fmt.signed and fmt.infinities)
        rounded = torch.where((x < lowest) & ~stays, lowest, rounded)
    moved = rounded > x if direction > 0 else rounded < x
    offset = fmt.smallest_code - 1  # magnitude code minus offset counts the positive values 1, 2, 3...
    codes, negative = _magnitude_codes(torch.nan_to_num(rounded, 0.0, math.inf, -math.inf), fmt)
    ordinal = torch.where(rounded == 0, 0, codes - offset)
    ordinal = torch.where(negative, -ordinal, ordinal) + direction
    last = fmt.max_code - offset
    if not fmt.zero and fmt.signed:  # from the smallest negative value straight to the smallest positive one
        ordinal = torch.where(ordinal == 0, direction, ordinal)
    stepped = _decode_magnitudes((ordinal.abs() + offset).clamp(min=0, max=fmt.top_code), fmt)
    stepped = torch.where(ordinal == 0, 0.0 if fmt.zero else math.nan, stepped)
    stepped = torch.where(ordinal.abs() > last, math.inf if fmt.infinities else math.nan, stepped)
    backwards = negative if fmt.negative_zero else ordinal < 0
    stepped = torch.where(backwards & (rounded != 0), -stepped, stepped)
    if not fmt.signed:
        stepped = torch.where(x <= lowest, math.nan, stepped) if direction < 0 else stepped
        moved = moved & (x >= lowest) if direction < 0 else moved
    return torch.where(rounded.isnan(), math.nan, torch.where(moved, rounded, stepped))


def fraction_bits_used(x: torch.Tensor) -> torch.Tensor:
    """Fraction bits that each value really needs: position of the last set bit below the leading one (int32, x's
    shape).

    0 for zero and for powers of two; -1 for Inf and NaN, which have no fraction. A float32 tensor whose maximum is 7
    would lose no resolution in bf16.
    """
    x = check_float_tensor(x)
    bits = x.double().contiguous().view(torch.int64) & FP64.magnitude_mask
    field = (bits >> _WIDTH).clamp(min=1)
    significand = bits - ((field - 1) << _WIDTH)
    lowest = significand & -significand
    # Both are below 2^53, so the conversion is exact and its exponent field is the position of the leading bit.
    length = _leading_bit(significand) - _leading_bit(lowest)
    return torch.where(bits >= FP64.inf_bits, -1, torch.where(bits == 0, 0, length)).to(torch.int32)


def _leading_bit(integer: torch.Tensor) -> torch.Tensor:
    """Position of the leading one of integers in 1..2^53."""
    return (integer.double().view(torch.int64) >> _WIDTH) - _BIAS
