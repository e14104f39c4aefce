"""``round_to``: the nearest (or next, or random) value of a format, for whole tensors, by bit manipulation.

The twin of :func:`rooftile.formats.reference.round_value`, tested equal to it. The steps, for one magnitude ``a``
(carrier bits):

1. Split into exponent field ``e`` (a subnormal counts as field 1) and significand ``sig``:
   value = sig * 2^(e - bias - M).
2. ``shift``: how many of sig's bits lie below the format's grid. Constant in the normal range, one more per binade
   below it.
3. Divide by 2^shift and round the quotient to an integer ``steps`` as the policy says.
4. Put back: ((e - 1) << M) + (steps << shift). A carry to 2^(M+1) moves into the exponent field by itself.
5. Overflow, Inf, NaN, missing zero, missing sign.
"""

from __future__ import annotations

import torch

from rooftile.formats import native
from rooftile.formats.carrier import FP32, Carrier, check_float_tensor, narrowest_carrier, result_dtype
from rooftile.formats.catalogue import get_format
from rooftile.formats.format import FloatFormat
from rooftile.formats.policy import InfInput, Overflow, Rounding, check_policy

__all__ = ["round_to", "round_with_torch"]

# Temporaries of one piece stay in the L2 cache; on the whole tensor each of some twenty steps would go through memory.
_PIECE = 1 << 17


def round_to(
    x: torch.Tensor,
    fmt: FloatFormat | str,
    rounding: Rounding = "nearest-even",
    overflow: Overflow = "saturate",
    inf_input: InfInput = "keep",
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Every element of ``x`` rounded once to a value of ``fmt``.

    Args:
        x: any shape, strides and device; float64, float32, float16, bfloat16 or a float8 dtype.
        fmt: a format or its name.
        rounding: ties of ``nearest-even`` go to the even multiple of the spacing; ``stochastic`` goes up with
            probability equal to the distance passed (resolved to 2^-62 of a spacing).
        overflow: where a finite value beyond the range ends: ``saturate`` or ``ieee`` (Inf, or NaN in a format
            without Inf).
        inf_input: ``keep`` (Inf, or NaN in a format without Inf) or ``saturate``.
        generator: of the stochastic draws, on x's device.

    Returns:
        A new contiguous tensor of x's shape, without gradient; of x's dtype where that holds every value of ``fmt``,
        otherwise float32 or float64. NaN stays NaN, also for a format without NaN: it says that no value of the
        format stands there.

    Raises:
        UsageError: an integer, complex or sparse tensor, an unknown format or policy.
    """
    fmt = get_format(fmt)
    check_policy(rounding, overflow, inf_input)
    x = check_float_tensor(x)
    out_dtype = result_dtype(x.dtype, fmt)
    carrier = narrowest_carrier(x.dtype, fmt)
    source = x.to(carrier.dtype).contiguous()
    on_cpu = source.device.type == "cpu" and rounding != "stochastic"
    if carrier is FP32 and on_cpu and native.can_round(fmt) and native.available():
        rounded = native.round_fp32(source, fmt, rounding, overflow, inf_input)
    else:
        rounded = round_with_torch(source, fmt, carrier, rounding, overflow, inf_input, generator)
    return rounded.to(out_dtype)


def round_with_torch(
    source: torch.Tensor,
    fmt: FloatFormat,
    carrier: Carrier,
    rounding: Rounding,
    overflow: Overflow,
    inf_input: InfInput,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """:func:`round_to` in plain torch operations: ``source`` is contiguous and of the carrier's dtype, and so is the
    result.
    """
    out = torch.empty_like(source)
    piece = _PIECE if source.device.type == "cpu" else max(1, source.numel())
    bits_in, bits_out = source.view(carrier.int_dtype).flatten(), out.view(carrier.int_dtype).flatten()
    for start in range(0, bits_in.numel(), piece):
        bits = bits_in[start : start + piece]
        magnitude = bits & carrier.magnitude_mask
        negative = bits < 0
        rounded = _round_magnitude(magnitude, negative, fmt, carrier, rounding, generator)
        rounded = _apply_policy(rounded, magnitude, negative, fmt, carrier, rounding, overflow, inf_input)
        signed = negative if fmt.negative_zero else negative & (rounded != 0)
        bits_out[start : start + piece] = torch.where(signed & fmt.signed, rounded | carrier.sign_bit, rounded)
    return out


def _round_magnitude(
    magnitude: torch.Tensor,
    negative: torch.Tensor,
    fmt: FloatFormat,
    carrier: Carrier,
    rounding: Rounding,
    generator: torch.Generator | None,
) -> torch.Tensor:
    """Steps 1 to 4 of the module's list; what becomes of Inf and NaN bits is overwritten in step 5."""
    width = carrier.fraction_bits
    field = (magnitude >> width).clamp_(min=1)
    significand = magnitude - ((field - 1) << width)
    depth = (fmt.min_exponent + carrier.bias - field).clamp_(min=0)  # binades below the smallest normal
    normal_shift = width - fmt.fraction_bits
    # Below the smallest normal the grid is even: the subnormals, or 0 and tiny where there are none.
    extra = depth if fmt.subnormals else torch.where(depth > 0, depth + fmt.fraction_bits, 0)
    full_shift = extra + normal_shift
    shift = full_shift.clamp(max=width + 2)  # more would say nothing new: less than a quarter of a step
    below = significand >> shift
    rest = significand - (below << shift)
    if rounding == "toward-zero":
        steps = below
    elif rounding == "nearest-even":
        twice, whole = rest << 1, torch.ones_like(shift) << shift
        steps = below + ((twice > whole) | ((twice == whole) & (below & 1).bool())).to(below.dtype)
    elif rounding == "stochastic":
        steps = below + _stochastic_carry(rest, full_shift, generator).to(below.dtype)
    else:
        away = negative if rounding == "down" else ~negative
        steps = below + (away & (rest != 0)).to(below.dtype)
    # Beyond the width of the significand the result is zero or one step, the smallest value of the format.
    smallest = carrier.bits_of(fmt.smallest_subnormal)
    return torch.where(shift > width, steps * smallest, ((field - 1) << width) + (steps << shift))


def _stochastic_carry(rest: torch.Tensor, shift: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """True with probability rest / 2^shift, by comparing 62-bit integers."""
    rest, shift = rest.long(), shift.long()
    draw = torch.randint(0, 1 << 62, rest.shape, generator=generator, device=rest.device, dtype=torch.int64)
    scaled_up = rest << (62 - shift).clamp(min=0)
    scaled_down = rest >> (shift - 62).clamp(min=0, max=63)
    return draw < torch.where(shift <= 62, scaled_up, scaled_down)


def _apply_policy(
    rounded: torch.Tensor,
    magnitude: torch.Tensor,
    negative: torch.Tensor,
    fmt: FloatFormat,
    carrier: Carrier,
    rounding: Rounding,
    overflow: Overflow,
    inf_input: InfInput,
) -> torch.Tensor:
    """Step 5: what the format has no code for."""
    largest = carrier.bits_of(fmt.max)
    infinity = carrier.inf_bits if fmt.infinities else carrier.nan_bits
    if not fmt.zero:
        rounded = torch.where(rounded == 0, carrier.bits_of(fmt.tiny), rounded)
    if overflow == "saturate" or rounding == "toward-zero":
        rounded = rounded.clamp(max=largest)
    else:
        beyond = rounded > largest
        rounded = torch.where(beyond, infinity, rounded)
        if rounding in ("up", "down"):  # a directed rounding toward zero never leaves the range
            rounded = torch.where(beyond & (negative if rounding == "up" else ~negative), largest, rounded)
    rounded = torch.where(magnitude == carrier.inf_bits, largest if inf_input == "saturate" else infinity, rounded)
    rounded = torch.where(magnitude > carrier.inf_bits, carrier.nan_bits, rounded)
    if not fmt.signed:
        rounded = torch.where(negative & (magnitude != 0), carrier.nan_bits, rounded)
    return rounded
