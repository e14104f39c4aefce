"""The recorder: a dispatch mode that turns what runs into Ops and Storages, at a few microseconds an operator.

It sits below autograd, so it sees what a device would launch: forward, recomputation, backward and optimizer alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rooftile.capture.modules import ModuleTracker
from rooftile.capture.policy.workspaces import Workspaces
from rooftile.capture.trace import Call, Op, Phase, Role, Storage, TensorMeta
from rooftile.capture.visible import INTERVAL_OPERATORS, Places, visible_keys

__all__ = ["Recorder", "describe"]

_DTYPES = {v: str(v).removeprefix("torch.") for v in vars(torch).values() if isinstance(v, torch.dtype)}


def describe(tensor: Tensor) -> TensorMeta:
    """Shape, stride, dtype and layout of a tensor, without torch types."""
    if tensor.layout is torch.strided:
        return TensorMeta(tuple(tensor.shape), tensor.stride(), _DTYPES[tensor.dtype])
    layout = str(tensor.layout).removeprefix("torch.")
    if tensor.layout is torch.sparse_csr and tensor.crow_indices().dtype == torch.int32:
        layout = "sparse_csr[int32]"
    from torch._subclasses.fake_tensor import FakeTensor

    # Fake and meta tensors keep no non-zeros: how many there are is unknown then, not none.
    nnz = None if tensor.is_meta or isinstance(tensor, FakeTensor) else tensor._nnz()
    return TensorMeta(tuple(tensor.shape), (0,) * tensor.dim(), _DTYPES[tensor.dtype], layout, nnz)


def _is_composite(func: Any) -> bool:
    """Whether the operator is made of others everywhere; one with a kernel of its own stays whole."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    name = func.name()
    if func.namespace == "prim":  # questions about a tensor (its device), not operators
        return False
    return has_kernel(name, "CompositeImplicitAutograd") and not (has_kernel(name, "CPU") or has_kernel(name, "Meta"))


#: What is no work of the device: profiler marks, questions about a tensor, and wrapping or reading a Python number.
_NOT_RECORDED = ("profiler.", "prim.", "aten.lift_fresh.", "aten._local_scalar_dense.", "aten.promote_types.")


def _repeated(args: tuple[Any, ...], kwargs: dict[str, Any], ids: list[int]) -> tuple[int, ...]:
    """Positions of tensors that are the very tensor of an earlier position: ``x * x`` reads x once.

    Two views of one storage may look alike and lie apart, so the offset counts too.
    """
    seen: set[tuple[int, int, TensorMeta]] = set()
    again: list[int] = []
    for position, (tensor, storage) in enumerate(zip(_tensors([args, list(kwargs.values())]), ids, strict=True)):
        offset = int(tensor.storage_offset()) if tensor.layout is torch.strided else 0
        what = (storage, offset, describe(tensor))
        if what in seen:
            again.append(position)
        seen.add(what)
    return tuple(again)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


class _StorageRef(weakref.ref):  # type: ignore[type-arg]
    """A weak reference that knows which record it stands for."""

    __slots__ = ("address", "id")
    id: int
    address: int


class _Live:
    """The mutable record of a storage while the step runs."""

    __slots__ = (
        "born",
        "died",
        "dtype",
        "id",
        "module",
        "name",
        "nbytes",
        "phase",
        "read_in_backward",
        "role",
        "shape",
    )

    def __init__(self, id: int, nbytes: int, born: int, module: str, phase: Phase | None, meta: TensorMeta) -> None:
        self.id, self.nbytes, self.born, self.module, self.phase = id, nbytes, born, module, phase
        self.died: int | None = None
        self.role: Role | None = None
        self.name = ""
        self.dtype, self.shape = meta.dtype, meta.shape
        self.read_in_backward = False


class Recorder(TorchDispatchMode):
    """Records every operator between ``__enter__`` and ``__exit__``.

    ``handler(op)`` gives what stands in for a composite operator under inference mode; ``run(op, args, kwargs)`` runs
    an operator as the target would; ``workspaces(call)`` names a kernel's scratch memory.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled inside a capture; the guard would import the compiler and cost time at every op."""
        return False

    def __init__(
        self,
        modules: ModuleTracker,
        handler: Callable[[Any], Callable[..., Any] | None],
        run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
        workspaces: Workspaces,
    ) -> None:
        super().__init__()
        self.modules = modules
        self.phase: Phase = "forward"  # what the step is doing; an op's own may be "recompute"
        self.micro_batch = 0
        self.ops: list[Op] = []
        self.storages: list[_Live] = []
        self._handler, self._run, self._workspaces = handler, run, workspaces
        self._calls: dict[Any, Call] = {}
        self._scratch: dict[int, tuple[tuple[str, int], ...]] = {}
        self._live: dict[int, _StorageRef] = {}
        self._composite: dict[Any, bool] = {}
        self._ignored: dict[Any, bool] = {}
        self._intervals: dict[Any, Places | None] = {}
        self._visible: dict[int, tuple[tuple[str, Any], ...]] = {}  # by the storage of the intervals' first ends
        self._host: set[int] = set()
        self._op_phase: Phase = "forward"  # of the operator that is being recorded, with its module: a storage's birth
        self._op_module = ""

    # ------------------------------------------------------------------------------------------------------ storages
    def storage_id(self, tensor: Tensor, meta: TensorMeta, born: int) -> int:
        """The id of the tensor's storage, which is recorded as born at ``born`` if it was not known."""
        if meta.layout != "strided":
            tensor = tensor._values() if meta.layout == "sparse_coo" else tensor.values()
        storage = tensor.untyped_storage()
        address = storage._cdata
        known = self._live.get(address)
        if known is not None:
            return known.id
        new = len(self.storages)
        module, phase = ("", None) if born < 0 else (self._op_module, self._op_phase)
        self.storages.append(_Live(new, storage.nbytes(), born, module, phase, meta))
        ref = _StorageRef(storage, self._died)
        ref.id, ref.address = new, address
        self._live[address] = ref
        return new

    def _died(self, ref: _StorageRef) -> None:
        del self._live[ref.address]  # before the address can be used again
        self.storages[ref.id].died = len(self.ops) - 1

    def tag(self, tensor: Tensor, role: Role, name: str = "", module: str | None = None) -> None:
        """Give the tensor's storage a role; the first role it gets stays."""
        meta = describe(tensor)
        live = self.storages[self.storage_id(tensor, meta, len(self.ops) - 1)]
        if live.role is None:
            live.role = role
            live.name, live.dtype, live.shape = name, meta.dtype, meta.shape
            if module is not None:
                live.module = module

    def mark_host(self, tensor: Tensor) -> None:
        """The tensor lives in the host's memory on the target: neither it nor work on it alone is recorded."""
        self._host.add(self.storage_id(tensor, describe(tensor), -1))

    # ----------------------------------------------------------------------------------------------------- operators
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        composite = self._composite.get(func)
        if composite is None:
            composite = self._composite[func] = _is_composite(func)
        if composite:  # inference mode: autograd did not decompose it
            handler = self._handler(func)
            with self:
                result = handler(*args, **kwargs) if handler else func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = self._run(func, args, kwargs)
        ignored = self._ignored.get(func)
        if ignored is None:
            ignored = self._ignored[func] = str(func).startswith(_NOT_RECORDED)
        if not ignored:
            self._record(func, args, kwargs, result)
        return result

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        now = len(self.ops)
        phase, module = self.modules.locate(self.phase)
        inputs: list[int] = []
        outputs: list[int] = []
        spec = self._spec(args, inputs, -1)
        named = tuple([(k, self._spec((v,), inputs, -1)[0]) for k, v in kwargs.items()]) if kwargs else ()
        if func not in self._intervals:
            self._intervals[func] = INTERVAL_OPERATORS.get(str(func))
        places = self._intervals[func]
        if places is not None:
            named += self._visible_keys(args, places)
        if self._host and inputs and inputs[0] in self._host:
            self._host.update(inputs)
            return
        self._op_module, self._op_phase = module, phase
        metas: list[TensorMeta] = []
        self._outputs(result, metas, outputs, now)
        repeated = _repeated(args, kwargs, inputs) if len(set(inputs)) < len(inputs) else ()
        key = (func, spec, named, tuple(metas), repeated)
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = Call(str(func), spec, named, key[3], repeated)
            self._scratch[id(call)] = self._workspaces(call)
        self.ops.append(Op(call, module, phase, tuple(inputs), tuple(outputs), self.micro_batch))
        if phase == "backward":
            storages = self.storages
            for i in inputs:
                storages[i].read_in_backward = True
        for name, nbytes in self._scratch[id(call)]:
            self._add_workspace(name, nbytes, now, module, phase)

    def _visible_keys(self, args: tuple[Any, ...], places: Places) -> tuple[tuple[str, Any], ...]:
        """What the intervals say; the backward pass's are those of the forward pass, whose mask is gone."""
        lo = args[places.lo]
        if not isinstance(lo, Tensor):
            return visible_keys(args, places)
        storage = self.storage_id(lo, describe(lo), -1)
        if storage not in self._visible:
            self._visible[storage] = visible_keys(args, places)
        return self._visible[storage]

    def _add_workspace(self, name: str, nbytes: int, now: int, module: str, phase: Phase) -> None:
        live = _Live(len(self.storages), nbytes, now, module, phase, TensorMeta((nbytes,), (1,), "uint8"))
        live.died, live.role, live.name = now, "temporary", f"workspace: {name}"
        self.storages.append(live)

    def _spec(self, values: Any, ids: list[int], born: int) -> tuple[Any, ...]:
        """Arguments without torch types; the storages of tensors go to ``ids``."""
        out: list[Any] = []
        for value in values:
            if isinstance(value, Tensor):
                meta = describe(value)
                ids.append(self.storage_id(value, meta, born))
                out.append(meta)
            elif value is None or isinstance(value, bool | int | float | str):
                out.append(value)
            elif isinstance(value, list | tuple):
                out.append(self._spec(value, ids, born))
            elif isinstance(value, torch.dtype):
                out.append(_DTYPES[value])
            elif isinstance(value, torch.device):
                out.append("device")  # meta, fake CPU or CPU: all stand for the target
            else:  # layouts, memory formats, generators, complex numbers
                out.append(str(value).removeprefix("torch."))
        return tuple(out)

    def _outputs(self, result: Any, metas: list[TensorMeta], ids: list[int], now: int) -> None:
        if isinstance(result, Tensor):
            meta = describe(result)
            metas.append(meta)
            ids.append(self.storage_id(result, meta, now))
        elif isinstance(result, list | tuple):
            for item in result:
                self._outputs(item, metas, ids, now)

    def finished(self, classify: Callable[[_Live], Role]) -> tuple[tuple[Op, ...], tuple[Storage, ...]]:
        """The frozen records, storages numbered from 0; ``classify`` gives a role to those that have none."""
        kept = [s for s in self.storages if s.id not in self._host]
        number = {s.id: new for new, s in enumerate(kept)}
        storages = tuple(
            Storage(new, s.nbytes, s.role or classify(s), s.born, s.died, s.module, s.name, s.dtype, s.shape)
            for new, s in enumerate(kept)
        )
        ops = tuple(
            op._replace(
                inputs=tuple([number.get(i, -1) for i in op.inputs]), outputs=tuple([number[i] for i in op.outputs])
            )
            for op in self.ops
        ) if self._host else tuple(self.ops)  # fmt: skip
        return ops, storages
