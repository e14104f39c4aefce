"""Whether a mask hides later keys, read off how it was made: its values are not there to look at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rooftile.capture.trace import Op, Storage, TensorMeta, Trace
from rooftile.ledgers.materialized import operator_name

__all__ = ["Causality", "MaskOrigins"]

#: ``derived``: a triangle or a comparison of row and column numbers went into the mask. ``assumed``: a mask with a row
#: for each query was handed in or held as a buffer. None: it has nothing that differs from row to row (padding).
Causality = Literal["derived", "assumed"]

_TRIANGLES = frozenset({"tril", "tril_", "triu", "triu_", "tril_indices", "triu_indices"})
_COMPARISONS = frozenset({"le", "lt", "ge", "gt"})


class MaskOrigins:
    """Answers for the masks of one trace, each found once by walking back through the ops that wrote it."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._writers: dict[int, list[int]] | None = None
        self._roles: dict[int, Storage] = {}
        self._known: dict[int, Causality | None] = {}

    def of(self, storage: int, rows: int, columns: int) -> Causality | None:
        """How the mask in ``storage``, for ``rows`` queries and ``columns`` keys, is known to be causal; else None."""
        if storage not in self._known:
            self._known[storage] = self._walk(storage, (rows, columns))
        return self._known[storage]

    def _walk(self, mask: int, size: tuple[int, int]) -> Causality | None:
        writers = self._index()
        seen, todo = {mask}, [mask]
        handed_in = False
        while todo:
            storage = todo.pop()
            origin = self._roles.get(storage)
            if origin is not None and origin.born < 0:
                handed_in |= origin.role in ("buffer", "input") and origin.shape[-2:] == size
                continue
            for index in writers.get(storage, ()):
                op = self._trace.ops[index]
                if _compares_rows_with_columns(op):
                    return "derived"
                for source in op.inputs:
                    if source not in seen:
                        seen.add(source)
                        todo.append(source)
        return "assumed" if handed_in else None

    def _index(self) -> dict[int, list[int]]:
        """The forward ops that wrote each storage."""
        if self._writers is None:
            self._writers = {}
            for index, op in enumerate(self._trace.ops):
                if op.phase == "forward":
                    for storage in op.outputs:
                        self._writers.setdefault(storage, []).append(index)
            self._roles = {s.id: s for s in self._trace.storages}
        return self._writers


def _compares_rows_with_columns(op: Op) -> bool:
    """A triangle, or an inequality of a column of numbers with a row of numbers."""
    name = operator_name(op.call.operator)
    if name in _TRIANGLES:
        return True
    if name not in _COMPARISONS or not op.call.outputs:
        return False
    inputs: Sequence[TensorMeta] = op.call.inputs
    return len(inputs) == 2 and _has_rows(op.call.outputs[0].shape) and not any(_has_rows(_own(m)) for m in inputs)


def _has_rows(shape: Sequence[int]) -> bool:
    return len(shape) >= 2 and shape[-1] > 1 and shape[-2] > 1


def _own(meta: TensorMeta) -> tuple[int, ...]:
    """The shape before an expand."""
    return tuple(1 if step == 0 else size for size, step in zip(meta.shape, meta.stride, strict=True))
