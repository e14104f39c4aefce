"""LAY001: a silent broadcast that grows a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rooftile._units import gb, plural
from rooftile.capture.trace import Call, TensorMeta
from rooftile.ledgers.materialized import operator_name
from rooftile.ledgers.modules import module_group
from rooftile.ledgers.stretched import stretched_copies
from rooftile.rules.finding import Context, Finding, Rule

__all__ = ["RULE"]

#: Elementwise operators and losses that stretch their inputs against each other without being asked.
_BROADCASTING = frozenset(
    {
        "add", "sub", "rsub", "mul", "div", "true_divide", "pow", "maximum", "minimum", "fmod", "remainder", "atan2",
        "where", "lerp", "addcmul", "addcdiv", "mse_loss", "smooth_l1_loss", "huber_loss",
        "binary_cross_entropy", "binary_cross_entropy_with_logits",
    }
)  # fmt: skip


def _check(context: Context) -> list[Finding]:
    places: dict[str, list[_Grown]] = {}
    # A loss expands both sides first, and autocast then copies one in another dtype: the copy is as poor as its source.
    copies = stretched_copies(context.trace.ops)
    for op in context.trace.ops:
        if op.phase == "forward" and operator_name(op.call.operator) in _BROADCASTING:
            operands = tuple(
                copies.get(storage, meta)
                for meta, storage in zip(op.call.inputs, op.inputs, strict=True)
                if "float" in meta.dtype and meta.shape
            )
            grown = grown_shape(operands)
            if grown is not None:
                places.setdefault(op.module, []).append(_Grown(op.call, operands, grown))
    return [_finding(module, grown) for module, grown in places.items()]


class _Grown(NamedTuple):
    """A call, its floating-point operands as they were before any expand, and the shape that it works on."""

    call: Call
    operands: tuple[TensorMeta, ...]
    shape: tuple[int, ...]


def _finding(module: str, calls: list[_Grown]) -> Finding:
    call, floating, grown = max(calls, key=lambda item: _count(item.shape))
    shapes = " with ".join(str(_unstretched(m)) for m in floating)
    nbytes = _count(grown) * max(m.itemsize for m in floating)
    return Finding(
        code=RULE.code,
        title=RULE.title,
        evidence=(
            f"{operator_name(call.operator)} of {shapes} works on {grown}, {_count(grown):,} elements "
            f"({gb(nbytes)}) where neither input has more than {max(m.distinct for m in floating):,}; "
            f"{plural(len(calls), 'op')} here"
        ),
        response="give both tensors the same shape: squeeze(-1) the (B, 1) one, or unsqueeze(-1) the (B,) one",
        severity="warning",
        where=module_group(module),
    )


def grown_shape(metas: Sequence[TensorMeta]) -> tuple[int, ...] | None:
    """The broadcast shape where two inputs stretch each other, along equal sizes and without having been aligned.

    (B, 1) with (B,) gives (B, B). An outer product of different sizes, or of tensors that were both unsqueezed to the
    same rank, is meant; integers (position masks) are too.
    """
    if len(metas) < 2:
        return None
    rank = max(len(m.shape) for m in metas)
    shapes = [_unstretched(m) for m in metas]
    aligned = [(1,) * (rank - len(s)) + s for s in shapes]
    grown = tuple(max(sizes) for sizes in zip(*aligned, strict=True))
    if _count(grown) <= max(_count(s) for s in shapes):
        return None
    ranks_differ = len({len(m.shape) for m in metas}) > 1
    expanded = any(step == 0 and size > 1 for m in metas for size, step in zip(m.shape, m.stride, strict=True))
    # Each of the two is stretched along a dimension that the other has, and the two have the same size.
    stretched = [{size for size, own in zip(grown, shape, strict=True) if own == 1 and size > 1} for shape in aligned]
    crossed = any(a & b for i, a in enumerate(stretched) for b in stretched[i + 1 :])
    return grown if crossed and (ranks_differ or expanded) else None


def _unstretched(meta: TensorMeta) -> tuple[int, ...]:
    """The shape before an expand: a stride-0 dimension has size 1."""
    return tuple(1 if step == 0 else size for size, step in zip(meta.shape, meta.stride, strict=True))


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


RULE = Rule(
    code="LAY001",
    title="A silent broadcast grows a tensor",
    explanation="""\
Predictions of shape (B, 1) and targets of shape (B,) broadcast to (B, B): every prediction is
compared with every target. The loss is a number, it even goes down, and it is not the loss that was
meant; the memory and the work grow with B squared.

Seen in: an elementwise operator or a loss on floating-point tensors of different ranks (or expanded
ones) that stretch each other along equal sizes, so that the result has more elements than either.
Outer products of different sizes and operands that were both unsqueezed to the same rank are taken
as meant.

Give both tensors the same shape before the operator.""",
    check=_check,
)
