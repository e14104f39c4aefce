"""Which operands of a Call are read, which are written, and how many bytes that is.

An operator's schema lists its tensors; what crosses the memory boundary differs from that list in three ways. A
broadcast dimension exists once; ``copy_`` and ``fill_`` overwrite their first argument without reading it; an in-place
list operator (``_foreach_add_``) returns nothing and writes its first argument.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from rooftile.capture.trace import ITEMSIZE, Call, TensorMeta, tensors_in
from rooftile.costs.layouts import sparse_bytes
from rooftile.costs.record import NotCountableError

__all__ = [
    "base_name",
    "bytes_of",
    "is_in_place",
    "keyword",
    "mutated_positions",
    "read_positions",
    "reads",
    "split_operator",
    "strided_only",
    "tensor",
    "total_bytes",
    "writes",
]

#: Operators that overwrite their first argument (a tensor or a list of them) without reading it.
OVERWRITES_FIRST = frozenset({
    "copy_", "fill_", "zero_", "bernoulli_", "uniform_", "normal_", "random_", "exponential_", "geometric_",
    "log_normal_", "cauchy_", "_foreach_copy_", "_foreach_zero_",
    "allgather_", "_allgather_base_", "reduce_scatter_", "_reduce_scatter_base_", "alltoall_", "alltoall_base_",
    "recv_",
})  # fmt: skip

#: Arguments that an operator writes besides what it returns, by position in its schema. An in-place operator
#: (a trailing underscore) that is not listed writes its first argument.
MUTATED_ARGUMENTS: dict[str, tuple[int, ...]] = {
    "_fused_adam_": (0, 2, 3, 4),
    "_fused_adamw_": (0, 2, 3, 4),
    "_fused_sgd_": (0, 2),
    "_fused_adagrad_": (0, 2),
    "_fused_muon_": (0, 2),
    "_amp_foreach_non_finite_check_and_unscale_": (0, 1),
    "_amp_update_scale_": (0, 1),
    "native_batch_norm": (3, 4),
    "_native_batch_norm_legit": (3, 4),
    "_batch_norm_with_update": (3, 4),
    "cudnn_batch_norm": (3, 4),
    "miopen_batch_norm": (3, 4),
}


@lru_cache(maxsize=4096)
def split_operator(operator: str) -> tuple[str, str, str]:
    """``aten.add.Tensor`` to ``("aten", "add", "Tensor")``; a missing overload is ``"default"``."""
    namespace, _, rest = operator.partition(".")
    base, _, overload = rest.partition(".")
    return namespace, base, overload or "default"


def base_name(operator: str) -> str:
    """The operator without namespace and overload: ``aten.add_.Tensor`` gives ``add_``."""
    return split_operator(operator)[1]


def is_in_place(base: str) -> bool:
    """Whether a base name is spelled in-place (``add_``); dunder names (``__and__``) are not, ``__iand__`` is."""
    if base.startswith("__"):
        return base.startswith("__i") and base not in ("__invert__", "__index__")
    return base.endswith("_")


def bytes_of(meta: TensorMeta) -> int:
    """Bytes of the elements that exist: broadcast dimensions once, overlapping windows once, sparse ones by ``nnz``.

    Raises :class:`NotCountableError` for a dtype whose element size is unknown and for a sparse layout without ``nnz``.
    """
    itemsize = ITEMSIZE.get(meta.dtype)
    if itemsize is None:
        raise NotCountableError(f"dtype {meta.dtype}")
    if meta.layout != "strided":
        return sparse_bytes(meta)
    distinct, reach = 1, 1
    for size, step in zip(meta.shape, meta.stride, strict=True):
        if size == 0:
            return 0
        if step:
            distinct *= size
            reach += (size - 1) * abs(step)
    # An unfolded tensor has more elements than memory behind it: its windows overlap.
    return min(distinct, reach) * itemsize


def total_bytes(metas: Iterable[TensorMeta]) -> int:
    """Sum of :func:`bytes_of`."""
    return sum(bytes_of(meta) for meta in metas)


def tensor(call: Call, position: int, name: str) -> TensorMeta:
    """The tensor argument at ``position`` or ``name``; :class:`NotCountableError` if there is none."""
    value = call.argument(position, name)
    if not isinstance(value, TensorMeta):
        raise NotCountableError(f"argument {name}")
    return value


def strided_only(call: Call) -> None:
    """:class:`NotCountableError` if an operand is sparse: how many elements take part then depends on the operator."""
    if any(meta.layout != "strided" for meta in (*call.inputs, *call.outputs)):
        raise NotCountableError("a sparse operand")


def keyword(call: Call, name: str, default: Any = None) -> Any:
    """A keyword-only argument, or ``default`` where it was left out."""
    return dict(call.kwargs).get(name, default)


def _flat_count(value: Any) -> int:
    """How many flattened inputs one argument stands for."""
    return 1 if isinstance(value, TensorMeta) else sum(1 for _ in tensors_in((value,)))


def _flat_positions(call: Call, arguments: tuple[int, ...]) -> list[int]:
    """Positions in ``call.inputs`` of the tensors of the given schema arguments."""
    found: list[int] = []
    start = 0
    for index, value in enumerate(call.args):
        count = _flat_count(value)
        if index in arguments:
            found.extend(range(start, start + count))
        start += count
    return found


def _out_positions(call: Call) -> list[int]:
    """Positions in ``call.inputs`` of ``out=`` tensors."""
    start = sum(_flat_count(value) for value in call.args)
    found: list[int] = []
    is_out_overload = "out" in split_operator(call.operator)[2]
    for name, value in call.kwargs:
        count = _flat_count(value)
        if is_out_overload and name.startswith("out"):
            found.extend(range(start, start + count))
        start += count
    return found


def mutated_positions(call: Call) -> tuple[int, ...]:
    """Positions in ``call.inputs`` that the operator writes."""
    base = base_name(call.operator)
    arguments = MUTATED_ARGUMENTS.get(base)
    if arguments is None:
        arguments = (0,) if is_in_place(base) else ()
    return tuple(_flat_positions(call, arguments) + _out_positions(call))


def read_positions(call: Call) -> tuple[int, ...]:
    """Positions in ``call.inputs`` that the operator reads."""
    unread = set(_out_positions(call))
    if base_name(call.operator) in OVERWRITES_FIRST:
        unread.update(_flat_positions(call, (0,)))
    return tuple(index for index in range(len(call.inputs)) if index not in unread)


def reads(call: Call) -> tuple[TensorMeta, ...]:
    """The tensors that the operator reads, each once: one that is given twice is there the second time."""
    inputs, repeated = call.inputs, call.repeated
    return tuple(inputs[index] for index in read_positions(call) if index not in repeated)


def writes(call: Call) -> tuple[TensorMeta, ...]:
    """The tensors that the operator writes: its outputs, and what it mutates without returning it."""
    if call.outputs and base_name(call.operator) not in MUTATED_ARGUMENTS:
        return call.outputs
    inputs = call.inputs
    return call.outputs + tuple(inputs[index] for index in mutated_positions(call))
