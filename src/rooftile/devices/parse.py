"""From a TOML table to a Device, with every way to get it wrong answered by one sentence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from rooftile.devices.device import (
    ASSUMED_VISIBLE,
    DEVICE_CLASSES,
    Ceiling,
    Device,
    Evidence,
    Link,
    Peak,
    Provenance,
)
from rooftile.errors import UsageError

__all__ = ["device_from_table", "link_from_table"]

_REQUIRED = ("title", "vendor", "device_class", "nominal_bytes", "memory_bandwidth", "peaks", "provenance")
_OPTIONAL = (
    "compute_capability", "sm_count", "on_chip_bytes", "on_chip_usable_bytes", "visible_bytes", "visible_evidence",
    "links", "measured", "logical_devices", "notes",
)  # fmt: skip

#: Dtypes that a product may have as its input; a misspelt one would never be found again.
_INPUTS = (
    "float64", "float32", "tf32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "int8",
)  # fmt: skip

# What a figure has to lie between, or it was given in another unit than the one asked for.
_FLOPS_RANGE = (1e9, 1e17, "FLOP/s, such as 312e12 for 312 TFLOP/s")
_RATE_RANGE = (1e9, 1e15, "bytes per second, such as 2039e9 for 2039 GB/s")
_CAPACITY_RANGE = (1e8, 1e14, "bytes, such as 85899345920 for 80 GiB")


class _Table:
    """A TOML table that knows where it is, so that a message can say so."""

    def __init__(self, where: str, values: Any, required: Iterable[str], optional: Iterable[str] = ()) -> None:
        self.where = where
        if not isinstance(values, Mapping):
            raise UsageError(f"{where} has to be a table of keys and values, not {values!r}")
        self.values = values
        known = (*required, *optional)
        for key in values:
            if key not in known:
                near = get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
                raise UsageError(f"{where} has the unknown key {key!r}; {hint}")
        for key in required:
            if key not in values:
                raise UsageError(f"{where} lacks the key {key!r}; add it")

    def text(self, key: str, default: str | None = None) -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str) or not value.strip():
            raise UsageError(f"{self.where}: {key} is {value!r}; it has to be a non-empty string")
        return value

    def choice(self, key: str, choices: Iterable[str], default: str | None = None) -> str:
        value = self.text(key, default)
        if value not in choices:
            raise UsageError(f"{self.where}: {key} is {value!r}; choose one of {', '.join(choices)}")
        return value

    def number(self, key: str, within: tuple[float, float, str] | None = None) -> float:
        value = self.values[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise UsageError(f"{self.where}: {key} is {value!r}; it has to be a positive number")
        if within is not None and not within[0] <= value <= within[1]:
            raise UsageError(f"{self.where}: {key} is {value!r}, which can't be right in its unit; give {within[2]}")
        return float(value)

    def whole(self, key: str, within: tuple[float, float, str] | None = None) -> int:
        value = self.number(key, within)
        if value != int(value):
            raise UsageError(f"{self.where}: {key} is {value!r}; it has to be a whole number")
        return int(value)

    def whole_or_none(self, key: str) -> int | None:
        return self.whole(key) if key in self.values else None

    def items(self, key: str) -> list[Any]:
        value = self.values.get(key, [])
        if not isinstance(value, list):
            raise UsageError(f"{self.where}: {key} is {value!r}; it has to be a list")
        return value

    def strings(self, key: str) -> tuple[str, ...]:
        for value in self.items(key):
            if not isinstance(value, str):
                raise UsageError(f"{self.where}: {key} has {value!r}; it has to hold strings")
        return tuple(self.items(key))


def device_from_table(name: str, values: Any, links: Mapping[str, Link], source: str = "") -> Device:
    """The device that a table describes; UsageError where it does not describe one.

    ``links`` are the links that the table may name, ``source`` the file that messages point to.
    """
    where = f"{source}: [{name}]" if source else f"[{name}]"
    table = _Table(where, values, _REQUIRED, _OPTIONAL)
    told = _Table(f"{where} provenance", values["provenance"], ("peaks", "capacity", "bandwidth"), ("visible", "chip"))
    nominal = table.whole("nominal_bytes", _CAPACITY_RANGE)
    visible, evidence, visible_source = _visible(table, told, nominal)
    chip_keys = [key for key in ("sm_count", "on_chip_bytes", "on_chip_usable_bytes") if key in values]
    if chip_keys and "chip" not in told.values:
        raise UsageError(f"{told.where} lacks the key 'chip', the source of {chip_keys[0]}; add it")
    for link in table.strings("links"):
        if link not in links:
            raise UsageError(f"{where}: links has the unknown link {link!r}; known: {', '.join(links)}")
    device_class = table.choice("device_class", DEVICE_CLASSES)
    return Device(
        name=name,
        title=table.text("title"),
        vendor=table.text("vendor"),
        device_class=next(c for c in DEVICE_CLASSES if c == device_class),
        peaks=_peaks(table, told.text("peaks")),
        memory_bandwidth=table.number("memory_bandwidth", _RATE_RANGE),
        nominal_bytes=nominal,
        visible_bytes=visible,
        visible_evidence=evidence,
        provenance=Provenance(
            capacity=told.text("capacity"),
            visible=visible_source,
            bandwidth=told.text("bandwidth"),
            chip=told.text("chip") if "chip" in told.values else "",
        ),
        compute_capability=table.number("compute_capability") if "compute_capability" in values else None,
        sm_count=table.whole_or_none("sm_count"),
        on_chip_bytes=table.whole_or_none("on_chip_bytes"),
        on_chip_usable_bytes=table.whole_or_none("on_chip_usable_bytes"),
        links=tuple(links[link] for link in table.strings("links")),
        measured=_measured(table),
        logical_devices=table.whole("logical_devices") if "logical_devices" in values else 1,
        notes=table.strings("notes"),
    )


def link_from_table(name: str, values: Any) -> Link:
    """The link that a table describes."""
    table = _Table(f"[{name}]", values, ("title", "both_directions", "provenance"))
    rate = table.number("both_directions", _RATE_RANGE)
    return Link(name, table.text("title"), rate, table.text("provenance"))


def _visible(table: _Table, told: _Table, nominal: int) -> tuple[int, Evidence, str]:
    if "visible_bytes" not in table.values:
        return int(nominal * ASSUMED_VISIBLE), "assumed", f"{ASSUMED_VISIBLE} of nominal_bytes"
    visible = table.whole("visible_bytes", _CAPACITY_RANGE)
    if visible > nominal:
        raise UsageError(
            f"{table.where}: visible_bytes {visible} is above nominal_bytes {nominal}; swap or correct them"
        )
    if "visible" not in told.values:
        raise UsageError(f"{told.where} lacks the key 'visible', the source of visible_bytes; add it")
    assumed = table.choice("visible_evidence", ("declared", "assumed"), "declared") == "assumed"
    return visible, "assumed" if assumed else "declared", told.text("visible")


def _peaks(table: _Table, default_provenance: str) -> tuple[Peak, ...]:
    peaks: dict[tuple[str, str], Peak] = {}
    for i, values in enumerate(table.items("peaks")):
        entry = _Table(f"{table.where} peaks[{i}]", values, ("input", "accumulate", "flops_per_s"), ("provenance",))
        rate = entry.number("flops_per_s", _FLOPS_RANGE)
        accumulate = entry.choice("accumulate", ("float64", "float32", "float16", "int32"))
        inputs = values["input"] if isinstance(values["input"], list) else [values["input"]]
        for dtype in inputs:
            if dtype not in _INPUTS:
                raise UsageError(f"{entry.where}: input is {dtype!r}; choose from {', '.join(_INPUTS)}")
            if (dtype, accumulate) in peaks:
                raise UsageError(f"{entry.where} repeats {dtype} with {accumulate} accumulation; keep one of them")
            provenance = entry.text("provenance", default_provenance)
            peaks[dtype, accumulate] = Peak(dtype, accumulate, rate, provenance)
    if not peaks:
        raise UsageError(f"{table.where}: peaks is empty; give at least one")
    return tuple(peaks.values())


def _measured(table: _Table) -> tuple[Ceiling, ...]:
    ceilings = []
    for i, values in enumerate(table.items("measured")):
        entry = _Table(f"{table.where} measured[{i}]", values, ("input", "flops_per_s", "provenance"))
        rate = entry.number("flops_per_s", _FLOPS_RANGE)
        ceilings.append(Ceiling(entry.choice("input", _INPUTS), rate, entry.text("provenance")))
    return tuple(ceilings)
