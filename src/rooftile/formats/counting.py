"""Counting exponents: a tensor in pieces, each by the C++ core or by plain torch operations, with equal results."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rooftile.formats import native
from rooftile.formats.carrier import FP32, FP64, Carrier
from rooftile.formats.histogram import ExponentHistogram

__all__ = ["count_exponents", "count_with_torch"]

_NATIVE_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_PIECE = 1 << 22  # elements of one piece: what a copy or the torch path may hold at a time


def count_exponents(x: torch.Tensor) -> Iterator[ExponentHistogram]:
    """Histograms of pieces that together are ``x`` (their ``subnormals`` and ``dtypes`` are left empty)."""
    use_native = x.device.type == "cpu" and native.available()
    for piece in _dense_pieces(x):
        if not use_native:
            for part in piece.split(_PIECE):
                yield count_with_torch(part)
        elif x.dtype in _NATIVE_DTYPES:
            yield _count_natively(piece)
        else:
            for part in piece.split(_PIECE):
                yield _count_natively(part.float())  # float8: exact


def _dense_pieces(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """One-dimensional contiguous pieces; no copy where ``x`` fills its memory, in whatever order of dimensions."""
    if x.numel() == 0:
        return
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda d: (-strides[d], d))
    dense = x.permute(order)
    if dense.is_contiguous():
        yield dense.reshape(-1)
        return
    if x.numel() <= _PIECE or x.dim() == 0:
        yield x.reshape(-1).contiguous()  # an expanded tensor stays strided under reshape
        return
    longest = max(range(x.dim()), key=lambda d: x.shape[d])
    half = x.shape[longest] // 2
    for part in (x.narrow(longest, 0, half), x.narrow(longest, half, x.shape[longest] - half)):
        yield from _dense_pieces(part)


def _count_natively(flat: torch.Tensor) -> ExponentHistogram:
    carrier = FP64 if flat.dtype == torch.float64 else FP32  # the core counts 16-bit values as the fp32 that they are
    counted = native.histogram_fields(flat)
    fields, special = counted.fields, counted.special
    half = len(fields) // 2
    lowest = 1 - carrier.bias - carrier.fraction_bits
    signed: list[dict[int, int]] = []
    for sign in (0, 1):
        # Fields 0 and top hold zeros, subnormals, Inf and NaN, which `special` counts apart.
        counts = {f - carrier.bias: fields[sign * half + f] for f in range(1, half - 1) if fields[sign * half + f]}
        for bit, count in enumerate(special.subnormals[sign]):
            if count:
                counts[lowest + bit] = count
        signed.append(counts)
    powers = {field - carrier.bias: count for field, count in enumerate(counted.powers)}
    powers |= {lowest + bit: count for bit, count in enumerate(special.subnormal_powers) if count}
    return ExponentHistogram(
        signed[0],
        signed[1],
        powers,
        positive_zeros=special.zeros[0],
        negative_zeros=special.zeros[1],
        positive_infs=special.infs[0],
        negative_infs=special.infs[1],
        nans=special.nans,
        amax=_value(special.largest, carrier),
        amin=_value(special.smallest, carrier) if special.smallest != 2**64 - 1 else 0.0,
    )


def _value(bits: int, carrier: Carrier) -> float:
    return float(torch.tensor(bits, dtype=carrier.int_dtype).view(carrier.dtype).item())


def count_with_torch(flat: torch.Tensor) -> ExponentHistogram:
    """The same counts from a one-dimensional tensor in plain torch operations, on its device."""
    carrier = FP64 if flat.dtype == torch.float64 else FP32
    bits = flat.to(carrier.dtype).view(carrier.int_dtype)
    magnitude = bits & carrier.magnitude_mask
    negative = bits < 0
    finite = (magnitude != 0) & (magnitude < carrier.inf_bits)
    zeros, infs = magnitude == 0, magnitude == carrier.inf_bits
    signed = [_binades(magnitude[finite & (negative == sign)], carrier) for sign in (False, True)]
    proper = magnitude[finite]
    return ExponentHistogram(
        signed[0],
        signed[1],
        _binades(proper[_is_power(proper, carrier)], carrier),
        positive_zeros=int((zeros & ~negative).sum()),
        negative_zeros=int((zeros & negative).sum()),
        positive_infs=int((infs & ~negative).sum()),
        negative_infs=int((infs & negative).sum()),
        nans=int((magnitude > carrier.inf_bits).sum()),
        amax=_value(int(proper.max()), carrier) if proper.numel() else 0.0,
        amin=_value(int(proper.min()), carrier) if proper.numel() else 0.0,
    )


def _binades(magnitude: torch.Tensor, carrier: Carrier) -> dict[int, int]:
    """Counts by exponent of finite non-zero magnitudes; a subnormal's exponent is that of its leading bit."""
    field = magnitude >> carrier.fraction_bits
    # A subnormal's bits are its value in units of the smallest one; as fp64 integers their exponent field is exact.
    leading = (magnitude.double().view(torch.int64) >> FP64.fraction_bits) - FP64.bias - carrier.fraction_bits + 1
    exponent = torch.where(field == 0, leading, field.long()) - carrier.bias
    values, counts = exponent.unique(return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def _is_power(magnitude: torch.Tensor, carrier: Carrier) -> torch.Tensor:
    """Where finite non-zero magnitudes are powers of two: no fraction, or for a subnormal a single bit."""
    normal = magnitude >> carrier.fraction_bits > 0
    fraction = magnitude & ((1 << carrier.fraction_bits) - 1)
    return torch.where(normal, fraction == 0, magnitude & (magnitude - 1) == 0)
