"""Fusion groups found on a Trace: chains of elementwise operators whose intermediates can stay on chip.

Two elementwise operators can share a kernel when one reads what the other wrote, element for element: same shape and
stride (or both contiguous with as many elements), same phase and micro-batch. k such operators on N bytes then move 2 N
instead of 2 k N. What limits a group is *order*: everything that a group needs must exist before it runs, so a matrix
product that reads one member and feeds another keeps the two apart.

The order is kept by levels. Every dependency (a storage written, then read or written again) that can't be fused raises
the level by one, one that can keeps it. Operators that are connected by fusable dependencies *and* share a level form a
group: a path that leaves such a group and returns would have raised the level, so a group can always run as one kernel.
An operator with no fusable producer may wait, so it takes at least the level of the elementwise operator before it.
That finds the groups in one pass; it may miss one that an exhaustive search would find, and never invents one.

Under the ``fused`` schedule a group reads each outside storage once (never more of it than there is) and writes what is
still needed: a version of a storage that an operator outside reads, or one that outlives the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rooftile.capture.trace import Call, TensorMeta, Trace
from rooftile.costs.operands import base_name, bytes_of, mutated_positions, read_positions
from rooftile.costs.record import Cost

__all__ = ["Fusion", "FusionGroup", "fuse", "fused_bytes"]


class FusionGroup(NamedTuple):
    """Ops (indices of the trace, in order) that can run as one kernel, and what they move apart and together."""

    ops: tuple[int, ...]
    bytes_unfused: int
    bytes_fused: int


class Fusion(NamedTuple):
    """The groups of a trace, and each op's bytes under the ``fused`` schedule (0 for an op without a cost).

    In a group the first reader of an outside storage pays for reading it, the last writer for writing it.
    """

    groups: tuple[FusionGroup, ...]
    op_bytes: tuple[int, ...]


# One operand as fusion sees it: its place in ``op.inputs + op.outputs``, its bytes, and a key that is equal for two
# operands whose elements correspond one to one (None: this operand can't stay on chip).
_Operand = tuple[int, int, int | None]


class _Plan(NamedTuple):
    """What fusion needs to know of a Call; worked out once per Call."""

    elementwise: bool
    reads: tuple[_Operand, ...]
    writes: tuple[_Operand, ...]


def _layout(meta: TensorMeta) -> object:
    """The number of elements of a contiguous tensor, whatever its shape; shape and stride of any other."""
    step = 1
    for size, stride in zip(reversed(meta.shape), reversed(meta.stride), strict=True):
        if size != 1:
            if stride != step:
                return (meta.shape, meta.stride)
            step *= size
    return step


def _plan(call: Call, cost: Cost | None, keys: dict[object, int]) -> _Plan | None:
    """None for an operator that touches no memory: a view, an allocation, a question of the host.

    ``keys`` numbers the layouts met so far.
    """
    if cost is not None and (cost.family == "view" or cost.zero_reason == "allocation"):
        return None
    inputs, outputs = call.inputs, call.outputs
    mutated = [at for at in mutated_positions(call) if inputs[at] not in outputs]
    read_at = read_positions(call)
    operands = inputs + outputs
    write_at = (*mutated, *range(len(inputs), len(operands)))
    if cost is None or not cost.elementwise:  # only the order matters
        return _Plan(False, tuple((at, 0, None) for at in read_at), tuple((at, 0, None) for at in write_at))
    # The space that the kernel walks: one tensor's elements, or those of every tensor of a list.
    sizes = [operands[at].numel for at in write_at]
    is_list = base_name(call.operator).startswith(("_foreach", "_fused", "_amp_foreach"))
    walked = tuple(sizes) if is_list else max(sizes, default=0)
    space = keys.setdefault(walked, len(keys) + 1)  # by number: a list of a thousand sizes is hashed once
    whole = set(sizes) if is_list else {walked}

    def operand(at: int) -> _Operand:
        meta = operands[at]
        stays = meta.numel in whole and meta.distinct == meta.numel
        key = keys.setdefault((space, _layout(meta)), len(keys) + 1) if stays else None
        return at, bytes_of(meta), key

    # A shape donor (zeros_like) is an input that is not read.
    reads = tuple(operand(at) for at in read_at) if cost.bytes_read else ()
    return _Plan(True, reads, tuple(operand(at) for at in write_at))


class _Order:
    """One pass over the ops: their levels, which of them join, and who read which version of a storage."""

    def __init__(self, trace: Trace, plans: Sequence[_Plan | None]) -> None:
        count = len(trace.ops)
        self.parent = list(range(count))
        #: The op that wrote what an elementwise op reads (-1: older than the step), parallel to its plan's reads.
        self.sources: dict[int, list[int]] = {}
        #: Who read what an elementwise op wrote: (writer, storage, reader).
        self.uses: list[tuple[int, int, int]] = []
        self._level = [0] * count
        self._stage_start = 0  # first op of this phase and micro-batch: kernels do not reach across
        self._current: dict[int, tuple[int, int | None]] = {}  # storage to its newest version: (writer, key)
        self._readers: dict[int, list[tuple[int, int | None]]] = {}  # storage to (reader, key) of that version
        phase, micro_batch = "", -1
        running = highest = 0
        for index, (op, plan) in enumerate(zip(trace.ops, plans, strict=True)):
            if plan is None:
                continue
            if op.phase != phase or op.micro_batch != micro_batch:
                phase, micro_batch, self._stage_start, running = op.phase, op.micro_batch, index, highest + 1
            storages = op.inputs + op.outputs
            if plan.elementwise:
                level = running = self._place(index, plan, storages, running)
            else:
                level = self._barrier_level(index, plan, storages)
            self._level[index] = level
            if level > highest:
                highest = level
            self._advance(index, plan, storages)

    def _barrier_level(self, index: int, plan: _Plan, storages: tuple[int, ...]) -> int:
        """One above everything that must come first: an operator that is not elementwise shares no kernel."""
        levels, current = self._level, self._current
        level = 0
        for at, _, _ in plan.reads:
            storage = storages[at]
            if storage in current:
                writer, key = current[storage]
                if levels[writer] >= level:
                    level = levels[writer] + 1
                if key is not None:
                    self.uses.append((writer, storage, index))
        for at, _, _ in plan.writes:
            storage = storages[at]
            if storage in current and levels[current[storage][0]] >= level:
                level = levels[current[storage][0]] + 1
            for reader, _ in self._readers.get(storage, ()):
                if levels[reader] >= level:
                    level = levels[reader] + 1
        return level

    def _place(self, index: int, plan: _Plan, storages: tuple[int, ...], running: int) -> int:
        """The level of an elementwise op, after it has joined the ops of that level that may share its kernel."""
        levels, current, start = self._level, self._current, self._stage_start
        near: list[int] = []
        sources: list[int] = []
        level = 0
        for at, _, key in plan.reads:
            storage = storages[at]
            if storage not in current:
                sources.append(-1)
                continue
            writer, written_key = current[storage]
            sources.append(writer)
            behind = levels[writer]
            if key is not None and key == written_key and writer >= start:
                near.append(writer)
            else:
                behind += 1
            if behind > level:
                level = behind
            if written_key is not None:
                self.uses.append((writer, storage, index))
        for at, _, key in plan.writes:
            storage = storages[at]
            # What is overwritten must have been read before; element for element, that may be in the same kernel.
            for reader, read_key in self._readers.get(storage, ()):
                shares = key is not None and key == read_key and reader >= start
                if shares:
                    near.append(reader)
                level = max(level, levels[reader] + (not shares))
            if storage in current and current[storage][0] not in sources:
                level = max(level, levels[current[storage][0]] + 1)
        self.sources[index] = sources
        if near:
            joined = [other for other in near if levels[other] == level]
            if joined:
                for other in joined:
                    self._join(index, other)
                return level
        return level if level > running else running

    def _advance(self, index: int, plan: _Plan, storages: tuple[int, ...]) -> None:
        """Enter what this op read and the versions that it leaves."""
        readers, elementwise = self._readers, plan.elementwise
        for at, _, key in plan.reads:
            storage = storages[at]
            if storage in readers:
                readers[storage].append((index, key))
            else:
                readers[storage] = [(index, key)]
        for at, _, key in plan.writes:
            storage = storages[at]
            if storage in readers:
                del readers[storage]
            # An elementwise write that can't stay on chip still has readers to trace: a key that equals no other.
            self._current[storage] = (index, (key or -index - 1) if elementwise else None)

    def root(self, index: int) -> int:
        parent = self.parent
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    def _join(self, one: int, other: int) -> None:
        first, second = sorted((self.root(one), self.root(other)))
        self.parent[second] = first


def fuse(trace: Trace, costs: Sequence[Cost | None]) -> Fusion:
    """Find the fusion groups of ``trace`` (``costs`` from :func:`~rooftile.costs.trace_costs`) and their bytes.

    Linear in the number of operands.
    """
    known: dict[int, _Plan | None] = {}
    keys: dict[object, int] = {}
    plans: list[_Plan | None] = []
    for op, cost in zip(trace.ops, costs, strict=True):
        key = id(op.call)
        if key not in known:
            known[key] = _plan(op.call, cost, keys)
        plans.append(known[key])
    order = _Order(trace, plans)
    members: dict[int, list[int]] = {}
    for index in order.sources:
        members.setdefault(order.root(index), []).append(index)
    escaping = {(writer, storage) for writer, storage, reader in order.uses if order.root(writer) != order.root(reader)}
    storage_bytes = {storage.id: storage.nbytes for storage in trace.storages}
    outliving = {storage.id for storage in trace.storages if storage.died is None}
    op_bytes = [0 if cost is None else cost.bytes for cost in costs]
    groups: list[FusionGroup] = []
    for ops in members.values():
        if len(ops) < 2:
            continue
        unfused = sum(op_bytes[index] for index in ops)
        _charge(trace, plans, order, ops, (escaping, outliving, storage_bytes), op_bytes)
        groups.append(FusionGroup(tuple(ops), unfused, sum(op_bytes[index] for index in ops)))
    groups.sort()
    return Fusion(tuple(groups), tuple(op_bytes))


def _charge(
    trace: Trace,
    plans: Sequence[_Plan | None],
    order: _Order,
    ops: list[int],
    needs: tuple[set[tuple[int, int]], set[int], dict[int, int]],
    op_bytes: list[int],
) -> None:
    """Replace the members' bytes by what the group's one kernel moves."""
    escaping, outliving, storage_bytes = needs
    inside = set(ops)
    unread = dict[int, int]()  # bytes of an outside storage that the kernel has not read yet
    last_writer: dict[int, int] = {}
    for index in ops:
        plan, op = plans[index], trace.ops[index]
        if plan is not None:
            storages = op.inputs + op.outputs
            last_writer.update((storages[at], index) for at, _, _ in plan.writes)
    for index in ops:
        plan, op = plans[index], trace.ops[index]
        if plan is None:
            continue
        storages = op.inputs + op.outputs
        moved = 0
        for (at, nbytes, _), source in zip(plan.reads, order.sources[index], strict=True):
            if source in inside:
                continue
            storage = storages[at]
            left = unread.get(storage, storage_bytes.get(storage, nbytes))
            moved += min(nbytes, left)
            unread[storage] = left - min(nbytes, left)
        for at, nbytes, _ in plan.writes:
            storage = storages[at]
            if (index, storage) in escaping or (storage in outliving and last_writer[storage] == index):
                moved += nbytes
        op_bytes[index] = moved


def fused_bytes(trace: Trace, costs: Sequence[Cost | None]) -> int:
    """Bytes of the whole trace under the ``fused`` schedule."""
    return sum(fuse(trace, costs).op_bytes)
