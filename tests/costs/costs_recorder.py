"""A small recorder: what a function dispatches below autograd, as Calls, Ops and Storages."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rooftile.capture.trace import Call, Op, Phase, Storage, TensorMeta, Trace, tensors_in


def meta(shape: tuple[int, ...], dtype: str = "float32", stride: tuple[int, ...] | None = None) -> TensorMeta:
    """A TensorMeta; contiguous where no stride is given."""
    if stride is None:
        steps, step = [], 1
        for size in reversed(shape):
            steps.append(step)
            step *= max(size, 1)
        stride = tuple(reversed(steps))
    return TensorMeta(tuple(shape), stride, dtype)


def call(operator: str, *args: Any, outputs: tuple[TensorMeta, ...] = (), **kwargs: Any) -> Call:
    """A Call written by hand."""
    return Call(operator, args, tuple(kwargs.items()), outputs)


def to_meta(tensor: torch.Tensor) -> TensorMeta:
    """What a recorder keeps of a tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    layout = str(tensor.layout).removeprefix("torch.")
    if layout == "strided":
        return TensorMeta(tuple(tensor.shape), tuple(tensor.stride()), dtype)
    return TensorMeta(tuple(tensor.shape), (), dtype, layout, tensor._nnz())


def plain(value: Any) -> Any:
    """Tensors as TensorMeta, lists as tuples, dtypes, layouts and devices as strings."""
    if isinstance(value, torch.Tensor):
        return to_meta(value)
    if isinstance(value, (list, tuple)):
        return tuple(plain(item) for item in value)
    if isinstance(value, (torch.dtype, torch.layout, torch.device, torch.memory_format)):
        return str(value).removeprefix("torch.")
    return value


class Recorder(TorchDispatchMode):
    """Records every operator; ``trace()`` gives what was recorded. ``phase`` is set by the caller as it goes."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.phase: Phase = "forward"
        self._known: dict[Call, Call] = {}
        self._storages: dict[int, Storage] = {}
        self._alive: dict[int, int] = {}  # storage address to id; an entry goes when its storage dies

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = [self._id(tensor, -1) for tensor in _tensors((*args, *kwargs.values()))]
        result = func(*args, **kwargs)
        returned = list(_tensors((result,)))
        record = Call(
            str(func),
            plain(args),
            tuple((name, plain(value)) for name, value in kwargs.items()),
            tuple(to_meta(tensor) for tensor in returned),
        )
        record = self._known.setdefault(record, record)
        after = tuple(self._id(tensor, len(self.ops)) for tensor in returned)
        self.ops.append(Op(record, "", self.phase, tuple(before), after))
        return result

    def _id(self, tensor: torch.Tensor, born: int) -> int:
        if tensor.layout != torch.strided:
            return -1
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            number = len(self._storages)
            self._alive[key] = number
            self._storages[number] = Storage(number, storage.nbytes(), "temporary", born, None, "")
            weakref.finalize(storage, self._died, key, number)
        return self._alive[key]

    def _died(self, key: int, number: int) -> None:
        self._alive.pop(key, None)
        self._storages[number] = self._storages[number]._replace(died=max(0, len(self.ops) - 1))

    def trace(self) -> Trace:
        return Trace(tuple(self.ops), tuple(self._storages.values()))


def _tensors(values: Any) -> Any:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def record(function: Callable[[], Any]) -> Trace:
    """The trace of one function."""
    with Recorder() as recorder:
        function()
    return recorder.trace()


def calls_of(function: Callable[[], Any]) -> list[Call]:
    """The Calls of one function."""
    return [op.call for op in record(function).ops]


__all__ = ["Recorder", "call", "calls_of", "meta", "plain", "record", "tensors_in", "to_meta"]
