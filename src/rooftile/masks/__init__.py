"""Which keys each query may see: small masks that compose with ``&``.

Row ``i`` of a mask sees the keys ``[lo_i, hi_i)``: causal, sliding windows, padding, documents, prefixes and every
intersection of them are such intervals, so a kernel reads two integers a row, skips the tiles outside and masks only at
the boundary. Anything else is :func:`dense`. :meth:`Mask.materialize` writes a mask out as booleans from the definition
of its parts, not from their intervals: it is their oracle.

>>> from rooftile import masks
>>> masks.causal().materialize(3, 3)[0, 0].int().tolist()
[[1, 0, 0], [1, 1, 0], [1, 1, 1]]
"""

from rooftile.masks.base import Both, Mask, Visibility
from rooftile.masks.given import Dense, Documents, Padding, dense, documents, padding
from rooftile.masks.positional import Align, Causal, Prefix, Window, causal, prefix, window

__all__ = [
    "Align",
    "Both",
    "Causal",
    "Dense",
    "Documents",
    "Mask",
    "Padding",
    "Prefix",
    "Visibility",
    "Window",
    "causal",
    "dense",
    "documents",
    "padding",
    "prefix",
    "window",
]
