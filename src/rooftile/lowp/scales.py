"""From a block's largest magnitude to its two scales, degenerate blocks included.

``decode_scale`` is what a stored value is multiplied by; ``encode_scale`` what a value is multiplied by before the
cast. The degenerate cases, the same for every recipe:

* amax 0: both scales are 1, and the zeros stay exact zeros.
* a tiny amax: the decode scale is never below 2^-126 (2^-127 as e8m0), so the encode scale is finite; there is no
  larger floor, which would flush small gradients.
* NaN and Inf take no part in amax. They become the format's own NaN or Inf; in a format without NaN the block's decode
  scale is NaN, and so is the whole block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rooftile.errors import UsageError
from rooftile.formats.catalogue import get_format
from rooftile.formats.format import FloatFormat
from rooftile.formats.rounding import round_to
from rooftile.lowp.recipes import ScaleRule

__all__ = [
    "ScaleChoice",
    "Scales",
    "check_power_of_two",
    "largest_exponent",
    "least_exponent",
    "scales_of_amax",
    "tensor_scale_of",
]


@dataclass(frozen=True, slots=True)
class Scales:
    """Grids of fp32 scales. ``stored`` is what is kept, in the recipe's scale format; ``decode`` has the tensor's scale
    multiplied in where there is one."""

    stored: torch.Tensor
    decode: torch.Tensor
    encode: torch.Tensor


@dataclass(frozen=True, slots=True)
class ScaleChoice:
    """The fields of a recipe that decide a scale, as plain values."""

    format: FloatFormat
    scale_format: FloatFormat
    rule: ScaleRule


def least_exponent(scale_format: FloatFormat) -> int:
    """Of a decode scale: what keeps 2^-e finite in fp32."""
    return max(scale_format.min_exponent, -126) if scale_format.zero else max(scale_format.min_exponent, -127)


def largest_exponent(fmt: FloatFormat) -> int:
    """Of a power-of-two decode scale: what keeps every value of the format, decoded, finite in fp32."""
    return 127 - fmt.max_exponent


def tensor_scale_of(amax: torch.Tensor, fmt: FloatFormat, scale_format: FloatFormat) -> torch.Tensor:
    """The second scale, 0-dim fp32: it brings the largest block scale to the largest value of ``scale_format``.

    Source: NVIDIA's NVFP4: ``amax / (6 * 448)``.
    """
    scale = amax.max() / (fmt.max * scale_format.max) if amax.numel() else amax.new_zeros(())
    least = (
        2.0**-126 / scale_format.smallest_subnormal
    )  # under it the product with the smallest block scale stays normal
    return torch.where(scale > 0, scale.clamp(min=least), torch.ones_like(scale))


def scales_of_amax(amax: torch.Tensor, choice: ScaleChoice, tensor_scale: torch.Tensor | None = None) -> Scales:
    """The scales of blocks with these largest finite magnitudes (an fp32 grid)."""
    fmt, scale_format = choice.format, choice.scale_format
    zero = amax == 0
    # As a tensor: torch takes a reciprocal for ``number / tensor`` (on CUDA for ``tensor / number`` too).
    largest = torch.full_like(amax, fmt.max)
    if choice.rule == "exact":
        wanted = amax / largest
        if tensor_scale is not None:
            wanted = round_to(wanted / tensor_scale, scale_format).clamp(min=scale_format.smallest_subnormal)
            stored = torch.where(zero, 1.0, wanted)
            decode = stored * tensor_scale
            return Scales(stored, decode, torch.where(zero, 1.0, 1.0 / decode))
        smallest = 2.0 ** least_exponent(scale_format)
        small = wanted < smallest
        stored = torch.where(zero, 1.0, wanted.clamp(min=smallest))
        if scale_format.fraction_bits < 23:
            stored = round_to(stored, scale_format)
            return Scales(stored, stored, 1.0 / stored)
        encode = torch.where(zero, 1.0, torch.where(small, 1.0 / smallest, largest / amax))
        return Scales(stored, stored, encode)
    exponent = torch.frexp(amax).exponent - 1 - fmt.max_exponent
    if choice.rule == "power-of-two-up":
        saturates = amax.double() > torch.ldexp(torch.full_like(amax, fmt.max, dtype=torch.float64), exponent)
        exponent = exponent + saturates.int()
    # Values above max times the largest scale saturate: rounded up they would be decoded to Inf.
    exponent = exponent.clamp(min=least_exponent(scale_format), max=largest_exponent(fmt))
    stored = torch.where(zero, 1.0, _power_of_two(exponent))
    return Scales(stored, stored, torch.where(zero, 1.0, _power_of_two(-exponent)))


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent).float()


def check_power_of_two(scales: torch.Tensor, what: str) -> None:
    """Refuse scales that a power-of-two format can't hold.

    Raises:
        UsageError: the first scale that is not a positive power of two (NaN is allowed: it marks a block).
    """
    mantissa = torch.frexp(scales).mantissa
    wrong = (mantissa != 0.5) & ~scales.isnan()
    if bool(wrong.any()):
        raise UsageError(
            f"{what} has a scale {float(scales[wrong].flatten()[0]):g}, which is no power of two; use a power-of-two "
            "scale_rule, or scale_format fp32"
        )


def choice_of(fmt: str, scale_format: str, rule: str) -> ScaleChoice:
    """The record for an operator's plain arguments."""
    return ScaleChoice(get_format(fmt), get_format(scale_format), rule)  # type: ignore[arg-type]
