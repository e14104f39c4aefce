"""From a Call to its Cost: the table of formulas, its memory, and the door for custom operators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

from rooftile.capture.trace import Call, Trace
from rooftile.costs.operands import is_in_place, split_operator
from rooftile.costs.record import Cost, Family, NotCountableError
from rooftile.errors import UsageError

__all__ = [
    "Formula",
    "aten",
    "cost_of",
    "formula",
    "known_operators",
    "register_cost",
    "trace_costs",
    "zero_flop_operators",
]

Formula = Callable[[Call], Cost | None]

_BUILT_IN: dict[str, Formula] = {}
_ZERO_REASONS: dict[str, str] = {}
_CUSTOM: dict[str, Formula] = {}


def formula(*operators: str, zero_reason: str = "") -> Callable[[Formula], Formula]:
    """Enter a built-in formula under names without overload (``aten.mm``); ``zero_reason`` where it is always 0 FLOP.

    ``aten.add`` also serves ``aten.add_`` and every overload; a name with overload is more specific and wins.
    """

    def enter(function: Formula) -> Formula:
        for operator in operators:
            if operator in _BUILT_IN:
                raise UsageError(f"{operator} has two built-in formulas; keep one")
            _BUILT_IN[operator] = function
            if zero_reason:
                _ZERO_REASONS[operator] = zero_reason
        return function

    return enter


def aten(names: str) -> list[str]:
    """Blank-separated base names as torch's operators: ``"mm bmm"`` to ``aten.mm``, ``aten.bmm``."""
    return [f"aten.{name}" for name in names.split()]


def known_operators() -> frozenset[str]:
    """Names (without overload) that have a formula, custom ones included."""
    return frozenset(_BUILT_IN) | frozenset(_CUSTOM)


def zero_flop_operators() -> dict[str, str]:
    """Operators that never compute, each with the reason why."""
    return dict(_ZERO_REASONS)


def _lookup(table: dict[str, Formula], operator: str) -> Formula | None:
    namespace, base, _ = split_operator(operator)
    name = f"{namespace}.{base}"
    found = table.get(operator) or table.get(name)
    if found is None and is_in_place(base):
        found = table.get(name[:-1])
    return found


@functools.lru_cache(maxsize=1 << 16)
def cost_of(call: Call) -> Cost | None:
    """What ``call`` costs, or None for an operator without a formula (it is listed by name, never counted as zero).

    Raises :class:`~rooftile.errors.UsageError` if a registered custom formula fails or returns something impossible.
    """
    custom = _lookup(_CUSTOM, call.operator)
    if custom is not None:
        return _checked(call.operator, custom, call)
    built_in = _lookup(_BUILT_IN, call.operator)
    if built_in is None:
        return None
    try:
        cost = built_in(call)
    except NotCountableError:
        return None
    if cost is not None and cost.flops == 0 and not cost.zero_reason:
        tensors = call.outputs or call.inputs
        if all(meta.numel == 0 for meta in tensors) or any(meta.numel == 0 for meta in call.inputs):
            return replace(cost, zero_reason="empty")
    if cost is not None and cost.flops and any("complex" in meta.dtype for meta in (*call.inputs, *call.outputs)):
        return _complex(cost)
    return cost


def _complex(cost: Cost) -> Cost | None:
    """A complex multiply-add is 4 products and 4 sums, 8 FLOPs against 2; other complex work is unknown."""
    if cost.family != "matmul":
        return None
    epilogue = 2 * (cost.flops - cost.matmul_flops)  # a complex sum is two
    dense = None if cost.dense_flops is None else 4 * cost.dense_flops
    return replace(cost, flops=4 * cost.matmul_flops + epilogue, matmul_flops=4 * cost.matmul_flops, dense_flops=dense)


def trace_costs(trace: Trace) -> tuple[Cost | None, ...]:
    """One cost per op of ``trace``, in order; equal Calls are worked out once.

    Passes over tensors in the optimizer phase are of the family ``optimizer``, whatever operators they are made of.
    """
    # The capture interns Calls: looking them up by identity avoids hashing a deep tuple for every op.
    seen: dict[tuple[int, bool], Cost | None] = {}
    costs: list[Cost | None] = []
    for op in trace.ops:
        call = op[0]
        key = id(call), op[2] == "optimizer"
        if key not in seen:
            cost = cost_of(call)
            if cost is not None and key[1] and cost.family in ("elementwise", "reduction", "copy"):
                cost = replace(cost, family="optimizer")
            seen[key] = cost
        costs.append(seen[key])
    return tuple(costs)


def register_cost(op: Any, *, override: bool = False) -> Callable[[Formula], Formula]:
    """Decorator that gives the operator ``op`` a cost formula ``(call: Call) -> Cost``.

    ``op`` is a name (``"mylib::foo"``, ``"mylib::foo.Tensor"``, ``"mylib.foo.default"``), a torch ``OpOverload`` or
    ``OpOverloadPacket``, or what ``torch.library.custom_op`` returned. A name without overload serves all of them.

    Raises :class:`~rooftile.errors.UsageError` for a name that already has a formula (pass ``override=True``), for a
    name that is none, and later, when the formula is used, if it raises or returns something that is no Cost.

    Example::

        @rooftile.register_cost("mylib::gate")
        def gate_cost(call):
            x = call.inputs[0]
            return Cost("custom", flops=2 * x.numel, bytes_read=x.nbytes, bytes_written=x.nbytes)
    """
    name = _operator_name(op)

    def enter(function: Formula) -> Formula:
        if not callable(function):
            raise UsageError(f"the cost formula for {name} is {function!r}; give a function from a Call to a Cost")
        if not override and (_lookup(_CUSTOM, name) or _lookup(_BUILT_IN, name)):
            raise UsageError(f"{name} already has a cost formula; pass override=True to replace it")
        _CUSTOM[name] = function
        cost_of.cache_clear()
        return function

    return enter


def _operator_name(op: Any) -> str:
    """``mylib.foo`` or ``mylib.foo.overload`` for any spelling of an operator."""
    overload = getattr(op, "_opoverload", None)  # what torch.library.custom_op returns
    text = op if isinstance(op, str) else str(overload if overload is not None else op)
    if not isinstance(op, str) and overload is None and type(op).__module__ != "torch._ops":
        raise UsageError(f"{op!r} names no operator; give a name such as 'mylib::foo' or a torch operator")
    parts = text.replace("::", ".").split(".")
    if len(parts) not in (2, 3) or not all(part.isidentifier() for part in parts):
        raise UsageError(f"{text!r} names no operator; write 'namespace::name' or 'namespace::name.overload'")
    return ".".join(parts)


def _checked(operator: str, function: Formula, call: Call) -> Cost:
    """The custom formula's cost, or one sentence that says what is wrong with it."""
    told = f"the cost formula registered for {operator}"
    try:
        cost = function(call)
    except Exception as error:
        raise UsageError(f"{told} raised {type(error).__name__}: {error}; correct the formula") from error
    if not isinstance(cost, Cost):
        raise UsageError(f"{told} returned {type(cost).__name__} {cost!r}; return a rooftile.costs.Cost")
    if cost.family not in get_args(Family):
        raise UsageError(f"{told} gave the family {cost.family!r}; use one of {', '.join(get_args(Family))}")
    counts = {
        "flops": cost.flops,
        "bytes_read": cost.bytes_read,
        "bytes_written": cost.bytes_written,
        "matmul_flops": cost.matmul_flops,
        "dense_flops": 0 if cost.dense_flops is None else cost.dense_flops,
    }
    for field, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise UsageError(f"{told} gave {field} = {value!r}; give a count, an integer that is not negative")
    if cost.matmul_flops > cost.flops:
        raise UsageError(
            f"{told} gave matmul_flops {cost.matmul_flops} above flops {cost.flops}; it is a share of them"
        )
    if cost.flops == 0 and not cost.zero_reason:
        raise UsageError(f"{told} gave 0 FLOP without a reason; set zero_reason, such as 'copy' or 'lookup'")
    return cost
