"""What a machine can do, as data with provenance. No torch."""

from __future__ import annotations

from rooftile.devices.catalog import from_toml, link, links, load, names
from rooftile.devices.device import Ceiling, Device, DeviceClass, Link, Peak, Provenance

__all__ = [
    "Ceiling",
    "Device",
    "DeviceClass",
    "Link",
    "Peak",
    "Provenance",
    "from_toml",
    "link",
    "links",
    "load",
    "names",
]
