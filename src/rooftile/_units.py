"""Numbers with their units, as findings and reports spell them: GB is 1e9 bytes, GiB is 2^30."""

from __future__ import annotations

__all__ = ["count", "duration", "flops", "gb", "gb_gib", "plural", "rate", "share", "short_dtypes"]

_DECIMAL = (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))

#: In this order: the name of bfloat16 contains that of float16.
_SHORT = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "float8_e4m3fn": "e4m3fn",
    "float8_e5m2": "e5m2",
}


def _scaled(value: float, unit: str, scales: tuple[tuple[str, float], ...] = _DECIMAL) -> str:
    """Four significant digits in the largest unit that keeps the number at 1 or more."""
    for prefix, size in scales:
        if abs(value) >= size:
            return f"{_digits(value / size)} {prefix}{unit}"
    return f"{_digits(value)} {unit}"


def _digits(value: float) -> str:
    if value == 0:
        return "0"
    magnitude = abs(value)
    places = 0 if magnitude >= 1000 else 1 if magnitude >= 100 else 2 if magnitude >= 10 else 3
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text and magnitude == int(magnitude) else text


def flops(value: float) -> str:
    """``205.3 TFLOP``."""
    return _scaled(value, "FLOP")


def rate(value: float, unit: str) -> str:
    """``989.4 TFLOP/s``, ``3,350 GB/s``."""
    scales = (("T", 1e12), ("G", 1e9)) if unit == "FLOP/s" else (("G", 1e9),)
    return _scaled(value, unit, scales)


def gb(value: float) -> str:
    """Decimal bytes: ``16.06 GB``, ``2.5 MB``."""
    return _scaled(value, "B", (("G", 1e9), ("M", 1e6), ("k", 1e3)))


def gb_gib(value: float) -> str:
    """Both spellings: ``85.00 GB (79.16 GiB)``."""
    for prefix, power in (("Gi", 30), ("Mi", 20), ("Ki", 10)):
        if abs(value) >= 2**power:
            return f"{gb(value)} ({_digits(value / 2**power)} {prefix}B)"
    return f"{_digits(value)} B"


def duration(seconds: float) -> str:
    """``312.4 ms``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds / 1e-9)} ns" if seconds else "0 s"


def share(part: float, whole: float) -> str:
    """``part`` of ``whole`` in percent; a dash where the whole is nothing. Not rounded up to 100."""
    if not whole:
        return "–"
    value = 100 * (part / whole)
    if 99.95 <= value < 100:
        return "> 99.9 %"
    return f"{value:.0f} %" if value in (0, 100) else f"{value:.1f} %"


def short_dtypes(text: str) -> str:
    """``bf16, fp32`` of ``bfloat16, float32``."""
    for long, short in _SHORT.items():
        text = text.replace(long, short)
    return text


def count(value: int) -> str:
    """``8,030,261,248``."""
    return f"{value:,}"


def plural(number: int, noun: str) -> str:
    """``1 layer``, ``2 layers``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
