"""The Trace: what ran in one step, and which storages lived when. Frozen, and readable without torch.

Everything that says what a step *means* (costs, ledgers, roofline, rules, report) reads a Trace and nothing else.

Vocabulary
----------
``TensorMeta``  shape, stride, dtype (and layout) of one tensor operand; owns nothing.
``Call``        an operator with its arguments, tensors replaced by their ``TensorMeta``. It has no storages, so the
                32 equal layers of a model share their Calls, and a cost is worked out once per Call.
``Op``          one execution of a Call: where (module path), when (its index in ``Trace.ops``), in which phase, on
                which storages.
``Storage``     bytes with a role and a lifetime. Views share a storage, tied weights are one storage, an in-place
                operator makes none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

__all__ = [
    "ITEMSIZE",
    "PHASES",
    "ROLES",
    "VISIBLE_ROWS",
    "Call",
    "Op",
    "Phase",
    "Role",
    "Storage",
    "TensorMeta",
    "Trace",
    "tensors_in",
]

Phase = Literal["forward", "recompute", "backward", "optimizer"]
PHASES: tuple[Phase, ...] = ("forward", "recompute", "backward", "optimizer")

Role = Literal[
    "parameter",
    "buffer",
    "input",
    "activation",  # born in the forward pass and still needed by the backward pass
    "temporary",
    "gradient",  # of a parameter; gradients of activations are temporaries
    "master_weight",
    "optimizer_state",
    "kv_cache",
    "logits_loss",  # model outputs and what the loss makes of them
    "autocast_cache",  # low-precision copies of weights, kept until the outermost autocast context exits
]
ROLES: tuple[Role, ...] = Role.__args__  # type: ignore[attr-defined]

#: Bytes of one element, by dtype name as torch spells it without ``torch.``.
ITEMSIZE: dict[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "complex32": 4, "complex64": 8, "complex128": 16,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "bool": 1,
}  # fmt: skip


#: Query rows of one entry of a Call's ``visible_keys``: those of a tile, by which costs are counted.
VISIBLE_ROWS = 128


class TensorMeta(NamedTuple):
    """One tensor operand. ``stride`` is in elements; ``nnz`` is set for sparse layouts only."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    layout: str = "strided"
    nnz: int | None = None

    @property
    def numel(self) -> int:
        """Logical elements (an expanded dimension counts fully)."""
        n = 1
        for size in self.shape:
            n *= size
        return n

    @property
    def distinct(self) -> int:
        """Elements that exist in memory: a stride-0 (broadcast) dimension counts once."""
        n = 1
        for size, step in zip(self.shape, self.stride, strict=True):
            if step != 0 or size == 0:
                n *= size
        return n

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the distinct elements, the least that reading the whole tensor moves."""
        return self.distinct * self.itemsize


class Call(NamedTuple):
    """An operator and what it was given; ``args`` and ``kwargs`` keep the operator's own schema order.

    Tensors stand as :class:`TensorMeta`, lists as tuples, dtypes, layouts and devices as strings; ``kwargs`` is a
    tuple of ``(name, value)`` pairs. Arguments left at their default are absent, exactly as the dispatcher passes them.
    ``operator`` is the full name with overload, such as ``aten.mm.default`` or ``rooftile.tiled_attention.default``.
    What a capture knows of a call besides is among ``kwargs`` too (:mod:`rooftile.capture.visible`).
    """

    operator: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[TensorMeta, ...]
    repeated: tuple[int, ...] = ()  # positions in ``inputs`` of a tensor that an earlier position has already

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """The argument at ``position`` of the schema, or by ``name``, or ``default`` where it was left out."""
        if position < len(self.args):
            return self.args[position]
        for key, value in self.kwargs:
            if key == name:
                return value
        return default

    @property
    def inputs(self) -> tuple[TensorMeta, ...]:
        """Every tensor argument, flattened in the order of the schema."""
        return tuple(tensors_in(self.args)) + tuple(tensors_in([value for _, value in self.kwargs]))


def tensors_in(values: Any) -> Iterator[TensorMeta]:
    """All tensors of a (nested) argument list, in order."""
    for value in values:
        if isinstance(value, TensorMeta):
            yield value
        elif isinstance(value, tuple):
            yield from tensors_in(value)


class Op(NamedTuple):
    """One execution. ``inputs``/``outputs`` are storage ids, in the order of ``call.inputs``/``call.outputs``."""

    call: Call
    module: str  # path of the module that asked for it; "loss" and "optimizer" stand for those two
    phase: Phase
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    micro_batch: int = 0

    @property
    def operator(self) -> str:
        """The full operator name, such as ``aten.mm.default``."""
        return self.call.operator


class Storage(NamedTuple):
    """Bytes with a role and a lifetime, in op indices of the trace.

    ``born`` is the op that made it, -1 if it was there before the step. ``died`` is the last op during which it was
    still alive (a storage counts as alive at both ends), None if it outlives the step.
    """

    id: int
    nbytes: int
    role: Role
    born: int
    died: int | None
    module: str  # where it was born; for a parameter, buffer, gradient or state: the owner's module path
    name: str = ""  # full parameter or buffer name, where it has one
    dtype: str = ""
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """One captured step. ``settings`` holds the choices it was captured under, ``notes`` what the capture decided."""

    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
