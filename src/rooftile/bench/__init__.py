"""The measurement contract: how a figure is taken, what is written down with it, and which figures may be compared.

Records, their files and their comparison need no torch; what measures is loaded when it is first named.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rooftile.bench.comparison import Comparison, compare
from rooftile.bench.machine import Cache, Hardware, Versions, hardware, versions
from rooftile.bench.record import Record, TensorError
from rooftile.bench.record_files import SCHEMA, load_records, save_records

if TYPE_CHECKING:
    from rooftile.bench.ceilings import Ceilings, compute_ceiling, measure_ceilings
    from rooftile.bench.measuring import Timing, measure, paired_ratio, recorded, threads_set

_MODULES = {
    "ceilings": ("Ceilings", "compute_ceiling", "measure_ceilings"),
    "measuring": ("Timing", "measure", "paired_ratio", "recorded", "threads_set"),
}
_LAZY = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "SCHEMA",
    "Cache",
    "Ceilings",
    "Comparison",
    "Hardware",
    "Record",
    "TensorError",
    "Timing",
    "Versions",
    "compare",
    "compute_ceiling",
    "hardware",
    "load_records",
    "measure",
    "measure_ceilings",
    "paired_ratio",
    "recorded",
    "save_records",
    "threads_set",
    "versions",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
