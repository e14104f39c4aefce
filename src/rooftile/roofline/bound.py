"""One operator under its roofs: the least time that its arithmetic and its bytes allow.

A bound is a bound, never a prediction: nothing that the device does can be faster, and most of it is slower.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rooftile.costs.record import Cost
from rooftile.devices import Device, Peak
from rooftile.errors import UnitError, UsageError

__all__ = ["Bound", "Limit", "attainable", "bound_of", "check_bandwidth", "check_rate", "ridge", "ridges"]

Limit = Literal["compute", "memory"]

#: Dtypes that run on every device, somehow: where no peak is published their roof is unknown. A 16-bit or 8-bit float
#: without a peak can't be multiplied at all, so it is an error.
_RUN_EVERYWHERE = ("float32", "float64", "int8", "int16", "int32", "int64", "uint8", "complex64", "complex128")

#: How far above a roof a measured rate may lie and still be the roof's own rounding (989.4 stands for 989.43).
_ROUNDING = 1e-3


@dataclass(frozen=True, slots=True)
class Bound:
    """Least seconds of one operator: ``max(compute_seconds, memory_seconds)``.

    ``compute_seconds`` is None where a roof of its arithmetic is unknown; then ``seconds`` is the memory bound alone
    and the true bound may be higher. ``roof`` is the peak that gave ``compute_seconds``, None without arithmetic.
    """

    seconds: float
    compute_seconds: float | None
    memory_seconds: float
    limit: Limit
    roof: Peak | None


def attainable(intensity: float, peak: float, bandwidth: float) -> float:
    """FLOP/s that a kernel of ``intensity`` FLOP/byte can reach under ``peak`` FLOP/s and ``bandwidth`` bytes/s."""
    if not (intensity >= 0 and peak > 0 and bandwidth > 0):
        raise UsageError(
            f"attainable({intensity}, {peak}, {bandwidth}): intensity has to be 0 or more, peak and bandwidth positive"
        )
    return min(peak, intensity * bandwidth)


def ridge(device: Device, dtype: str, *, accumulate: str = "float32", tf32: bool = False) -> float:
    """Ridge point in FLOP/byte: the intensity from which products of ``dtype`` are bound by arithmetic."""
    return device.peak(dtype, accumulate, tf32).flops_per_s / device.memory_bandwidth


def ridges(device: Device) -> dict[str, float]:
    """Ridge point in FLOP/byte of every input dtype that the device accumulates in fp32."""
    return {dtype: ridge(device, dtype) for dtype in device.inputs if device.supports(dtype)}


def bound_of(cost: Cost, device: Device, *, allow_tf32: bool = False, bytes_moved: int | None = None) -> Bound:
    """The bound of one operator on ``device``.

    Matrix products stand under the peak of their dtype (fp32 under the fp32 peak unless ``allow_tf32``), all other
    FLOPs under the fp32 vector peak; the two units work side by side, so the slower one counts. ``bytes_moved``
    replaces the bytes of the unfused schedule. Raises UsageError where the device has not the dtype.
    """
    memory = (cost.bytes if bytes_moved is None else bytes_moved) / device.memory_bandwidth
    # A formula may leave matmul_flops out and say only which roof it stands under.
    product = cost.matmul_flops or (cost.flops if cost.roof == "matmul" else 0)
    rest = cost.flops - product
    times: list[tuple[float, Peak]] = []
    unknown = False
    for flops, peak in (
        (product, _product_peak(cost.roof_dtype, device, allow_tf32) if product else None),
        (rest, device.vector_peak if rest else None),
    ):
        if peak is not None:
            times.append((flops / peak.flops_per_s, peak))
        elif flops:
            unknown = True
    compute, roof = max(times, key=lambda entry: entry[0], default=(0.0, None))
    limit: Limit = "compute" if cost.flops and compute >= memory else "memory"
    return Bound(max(compute, memory), None if unknown else compute, memory, limit, roof)


def check_rate(
    flops: float, seconds: float, device: Device, dtype: str, *, accumulate: str = "float32", tf32: bool = False
) -> float:
    """The rate ``flops / seconds`` in FLOP/s, or UnitError if it lies above the device's roof for ``dtype``."""
    peak = device.peak(dtype, accumulate, tf32)
    rate = _rate(flops, seconds, "FLOPs")
    if rate > peak.flops_per_s * (1 + _ROUNDING):
        raise UnitError(
            f"{rate / 1e12:,.1f} TFLOP/s of {dtype} is above the roof of {device.name}, {peak.flops_per_s / 1e12:,.1f} "
            "TFLOP/s dense; correct the count (causal or sparse work counted as dense?), the time, the dtype or the "
            "number of devices"
        )
    return rate


def check_bandwidth(nbytes: float, seconds: float, device: Device) -> float:
    """The rate ``nbytes / seconds`` in bytes/s, or UnitError if it lies above the device's memory bandwidth."""
    rate = _rate(nbytes, seconds, "bytes")
    if rate > device.memory_bandwidth * (1 + _ROUNDING):
        raise UnitError(
            f"{rate / 1e9:,.1f} GB/s is above the memory bandwidth of {device.name}, "
            f"{device.memory_bandwidth / 1e9:,.1f} GB/s; correct the count (bytes that a cache served?), the time or "
            "the number of devices"
        )
    return rate


def _rate(amount: float, seconds: float, what: str) -> float:
    if not (amount >= 0 and seconds > 0):
        raise UnitError(
            f"{amount} {what} in {seconds} s is no rate; time has to be positive and the count not negative"
        )
    return amount / seconds


def _product_peak(dtype: str, device: Device, allow_tf32: bool) -> Peak | None:
    if dtype in _RUN_EVERYWHERE and not device.supports(dtype):
        return None
    return device.peak(dtype, tf32=allow_tf32)
