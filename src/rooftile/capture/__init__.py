"""A step goes in, one immutable Trace comes out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rooftile.capture.options import CaptureOptions
from rooftile.capture.step import Step
from rooftile.capture.trace import Call, Op, Storage, TensorMeta, Trace

if TYPE_CHECKING:
    from rooftile.capture.run import capture
    from rooftile.capture.target import load_target

__all__ = ["Call", "CaptureOptions", "Op", "Step", "Storage", "TensorMeta", "Trace", "capture", "load_target"]

#: What needs torch is imported when it is asked for, so that a saved Trace opens without it.
_LATE = {"capture": "rooftile.capture.run", "load_target": "rooftile.capture.target"}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        import importlib

        return getattr(importlib.import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
