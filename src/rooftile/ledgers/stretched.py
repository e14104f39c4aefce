"""Tensors that were expanded and then copied: bigger in memory, no richer in content."""

from __future__ import annotations

from collections.abc import Sequence

from rooftile.capture.trace import Op, TensorMeta
from rooftile.ledgers.materialized import operator_name

__all__ = ["stretched_copies"]

_COPIES = frozenset({"clone", "copy", "copy_", "_to_copy", "contiguous", "repeat"})
#: Operators whose result has the elements of their first input, moved or scaled.
_CARRIERS = frozenset({"mul", "div", "_unsafe_view", "view", "transpose", "alias", "detach"}) | _COPIES


def stretched_copies(ops: Sequence[Op]) -> dict[int, TensorMeta]:
    """Storages of the forward pass that were filled by copying an expanded tensor, with that tensor.

    A copy that is copied or scaled again still counts: its elements are no more distinct than before.
    """
    found: dict[int, TensorMeta] = {}
    for op in ops:
        if op.phase != "forward" or not op.inputs or not op.outputs:
            continue
        name = operator_name(op.call.operator)
        if name not in _CARRIERS:
            continue
        at = 1 if name == "copy_" and len(op.inputs) > 1 else 0
        source, origin = op.call.inputs[at], op.inputs[at]
        if name in _COPIES and any(
            step == 0 and size > 1 for size, step in zip(source.shape, source.stride, strict=True)
        ):
            found[op.outputs[0]] = source
        elif origin in found and op.outputs[0] != origin and source.numel == op.call.outputs[0].numel:
            found[op.outputs[0]] = found[origin]
    return found
