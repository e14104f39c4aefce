"""Number formats, and what rounding does to a tensor: the ground floor of the numerical contract.

The catalogue is data and imports without torch; everything that touches a tensor is loaded when it is first named.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rooftile.formats.catalogue import FORMATS, get_format
from rooftile.formats.format import FloatFormat

if TYPE_CHECKING:
    from rooftile.formats.codec import decode, encode, fraction_bits_used, next_down, next_up, spacing
    from rooftile.formats.rounding import round_to

_MODULES = {
    "codec": ("decode", "encode", "fraction_bits_used", "next_down", "next_up", "spacing"),
    "rounding": ("round_to",),
}
_LAZY = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "FORMATS",
    "FloatFormat",
    "decode",
    "encode",
    "fraction_bits_used",
    "get_format",
    "next_down",
    "next_up",
    "round_to",
    "spacing",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
