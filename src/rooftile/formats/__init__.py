"""Number formats, and what rounding does to a tensor: the ground floor of the numerical contract.

The catalogue is data and imports without torch; everything that touches a tensor is loaded when it is first named.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rooftile.formats.catalogue import FORMATS, get_format
from rooftile.formats.format import FloatFormat

if TYPE_CHECKING:
    from rooftile.formats.accumulation import Accumulation, Cancellation, accumulate, cancellation
    from rooftile.formats.codec import decode, encode, fraction_bits_used, next_down, next_up, spacing
    from rooftile.formats.collapse import (
        CollapsedValues,
        EpsilonReading,
        LossScaleEffect,
        collapsed_values,
        epsilon_in,
        through_loss_scale,
    )
    from rooftile.formats.histogram import ExponentHistogram, exponent_histogram, merge_all
    from rooftile.formats.native import NativeStatus
    from rooftile.formats.native import status as native_status
    from rooftile.formats.reach import CountBound, LossScaleWindow, flushed, loss_scale_window, overflowed, subnormal
    from rooftile.formats.recipes import Recipe, rank_recipes
    from rooftile.formats.rounding import round_to
    from rooftile.formats.softmax import SoftmaxReading, softmax_in
    from rooftile.formats.updates import (
        SwallowedUpdates,
        UpdatesOverSteps,
        apply_update,
        swallowed_updates,
        updates_over_steps,
    )

_MODULES = {
    "accumulation": ("Accumulation", "Cancellation", "accumulate", "cancellation"),
    "codec": ("decode", "encode", "fraction_bits_used", "next_down", "next_up", "spacing"),
    "collapse": (
        "CollapsedValues",
        "EpsilonReading",
        "LossScaleEffect",
        "collapsed_values",
        "epsilon_in",
        "through_loss_scale",
    ),
    "histogram": ("ExponentHistogram", "exponent_histogram", "merge_all"),
    "native": ("NativeStatus",),
    "reach": ("CountBound", "LossScaleWindow", "flushed", "loss_scale_window", "overflowed", "subnormal"),
    "recipes": ("Recipe", "rank_recipes"),
    "rounding": ("round_to",),
    "softmax": ("SoftmaxReading", "softmax_in"),
    "updates": ("SwallowedUpdates", "UpdatesOverSteps", "apply_update", "swallowed_updates", "updates_over_steps"),
}
_LAZY = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "FORMATS",
    "Accumulation",
    "Cancellation",
    "CollapsedValues",
    "CountBound",
    "EpsilonReading",
    "ExponentHistogram",
    "FloatFormat",
    "LossScaleEffect",
    "LossScaleWindow",
    "NativeStatus",
    "Recipe",
    "SoftmaxReading",
    "SwallowedUpdates",
    "UpdatesOverSteps",
    "accumulate",
    "apply_update",
    "cancellation",
    "collapsed_values",
    "decode",
    "encode",
    "epsilon_in",
    "exponent_histogram",
    "flushed",
    "fraction_bits_used",
    "get_format",
    "loss_scale_window",
    "merge_all",
    "native_status",
    "next_down",
    "next_up",
    "overflowed",
    "rank_recipes",
    "round_to",
    "softmax_in",
    "spacing",
    "subnormal",
    "swallowed_updates",
    "through_loss_scale",
    "updates_over_steps",
]


def __getattr__(name: str) -> Any:
    if name == "native_status":
        return importlib.import_module(f"{__name__}.native").status
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
