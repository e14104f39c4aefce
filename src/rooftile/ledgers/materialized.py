"""Attention that writes its scores to memory, found by following storages.

The pattern is softmax(Q K^T) V as it reaches the dispatcher: a matrix product, any scale, mask, soft cap or cast, a
softmax, any dropout or cast, and a matrix product with the probabilities. It does not matter whether the model wrote
it by hand or SDPA was decomposed into it. What tiled attention removes is every pass over a tensor of the scores' size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rooftile.capture.trace import Op, TensorMeta, Trace
from rooftile.costs.record import Cost

__all__ = ["MaterializedAttention", "materialized_attention", "operator_name"]

_PRODUCTS = frozenset({"bmm", "mm", "baddbmm", "addmm", "matmul"})
_SOFTMAX = frozenset({"_softmax", "softmax", "_safe_softmax"})
_MASKING = frozenset({"masked_fill", "masked_fill_", "where", "add", "add_"})
_PASSING = _MASKING | frozenset(
    {
        "mul", "mul_", "div", "div_", "sub", "sub_", "tanh", "tanh_", "_to_copy", "clone", "copy_", "contiguous",
        "native_dropout", "dropout", "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand", "alias",
        "detach", "slice", "permute", "transpose", "rand_like", "bernoulli_",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MaterializedAttention:
    """All materialised attention of one module.

    ``q, k, v`` are the operands of the two products as the first call saw them: ``k`` usually transposed, heads
    folded into the batch. ``scores`` are the ids of the storages of the scores' size that live only because the
    attention is materialised; ``moved_bytes`` is what reading and writing such tensors moves, unfused, in all phases.
    ``row_mask`` is the storage of a mask with a row for each query that was applied (a causal mask is one), or None.
    """

    module: str
    calls: int
    q: TensorMeta
    k: TensorMeta
    v: TensorMeta
    k_storage: int
    v_storage: int
    rows: int
    columns: int
    first_op: int
    row_mask: int | None
    scores: frozenset[int]
    moved_bytes: int


@dataclass(slots=True)
class _Chain:
    """A product on its way through the softmax to the second product."""

    op: int
    module: str
    q: TensorMeta
    k: TensorMeta
    k_storage: int
    scores: TensorMeta
    softmaxed: bool = False
    row_mask: int | None = None
    storages: set[int] = field(default_factory=set)
    v: TensorMeta | None = None
    v_storage: int = -1


def operator_name(operator: str) -> str:
    """``aten.mm.default`` is ``mm``."""
    parts = operator.split(".")
    return parts[1] if len(parts) > 1 else operator


def materialized_attention(trace: Trace, costs: Sequence[Cost | None]) -> tuple[MaterializedAttention, ...]:
    """Every module of the step whose attention writes its scores to memory, in the order of execution."""
    by_module: dict[str, list[_Chain]] = {}
    for chain in _complete_chains(trace.ops):
        by_module.setdefault(chain.module, []).append(chain)
    if not by_module:
        return ()
    storages, moved = _score_sized(trace.ops, costs, by_module)
    found = []
    for module, chains in by_module.items():
        first = chains[0]
        if first.v is None:
            continue
        found.append(
            MaterializedAttention(
                module=module,
                calls=len(chains),
                q=first.q,
                k=first.k,
                v=first.v,
                k_storage=first.k_storage,
                v_storage=first.v_storage,
                rows=first.scores.shape[-2],
                columns=first.scores.shape[-1],
                first_op=first.op,
                row_mask=next((chain.row_mask for chain in chains if chain.row_mask is not None), None),
                scores=frozenset(storages[module]),
                moved_bytes=moved[module],
            )
        )
    return tuple(found)


def _complete_chains(ops: Sequence[Op]) -> list[_Chain]:
    """One pass over the forward ops; ``pending`` maps a storage to the chain whose scores or probabilities it holds."""
    pending: dict[int, _Chain] = {}
    complete: list[_Chain] = []
    for index, op in enumerate(ops):
        if op.phase not in ("forward", "recompute"):
            continue
        name = operator_name(op.call.operator)
        if name in _PRODUCTS:
            _visit_product(index, op, name, pending, complete)
        elif name in _SOFTMAX:
            chain = pending.get(op.inputs[0]) if op.inputs else None
            if chain is not None:
                chain.softmaxed = True
                _follow(op, chain, pending)
        elif name in _PASSING:
            chain = next((pending[i] for i in op.inputs if i in pending), None)
            if chain is not None:
                if name in _MASKING and not chain.softmaxed:
                    masks = (s for m, s in _others(op, chain) if _has_a_row_each(m, chain.scores))
                    chain.row_mask = next(masks, chain.row_mask)
                _follow(op, chain, pending)
    return complete


def _visit_product(index: int, op: Op, name: str, pending: dict[int, _Chain], complete: list[_Chain]) -> None:
    # baddbmm and addmm put the matrix that they add first.
    skip = 1 if name in ("baddbmm", "addmm") else 0
    if len(op.inputs) < skip + 2:
        return
    left, right = op.inputs[skip : skip + 2]
    metas = op.call.inputs[skip : skip + 2]
    for probabilities, value, meta in ((left, right, metas[1]), (right, left, metas[0])):
        chain = pending.get(probabilities)
        if chain is not None and chain.softmaxed and chain.v is None:
            chain.v, chain.v_storage = meta, value
            complete.append(chain)
            return
    output = op.call.outputs[0]
    if len(output.shape) >= 2 and op.outputs:
        chain = _Chain(index, op.module, metas[0], metas[1], right, output)
        if skip == 1 and _has_a_row_each(op.call.inputs[0], output):
            chain.row_mask = op.inputs[0]
        chain.storages.add(op.outputs[0])
        pending[op.outputs[0]] = chain


def _follow(op: Op, chain: _Chain, pending: dict[int, _Chain]) -> None:
    for meta, storage in zip(op.call.outputs, op.outputs, strict=True):
        if meta.numel == chain.scores.numel:
            pending[storage] = chain
            chain.storages.add(storage)


def _others(op: Op, chain: _Chain) -> Iterable[tuple[TensorMeta, int]]:
    return ((m, s) for m, s in zip(op.call.inputs, op.inputs, strict=True) if s not in chain.storages)


def _has_a_row_each(mask: TensorMeta, scores: TensorMeta) -> bool:
    """A mask whose last two dimensions are those of the scores, neither of them stretched."""
    return (
        len(mask.shape) >= 2
        and mask.shape[-2:] == scores.shape[-2:]
        and scores.shape[-2] > 1
        and 0 not in mask.stride[-2:]
    )


def _score_sized(
    ops: Sequence[Op], costs: Sequence[Cost | None], by_module: dict[str, list[_Chain]]
) -> tuple[dict[str, set[int]], dict[str, int]]:
    """Storages of the scores' size in each module, and the bytes that passes over them move."""
    storages = {module: set().union(*(c.storages for c in chains)) for module, chains in by_module.items()}
    moved = dict.fromkeys(by_module, 0)
    # Where a head dimension equals the number of keys, a shape doesn't tell scores from Q, K or V: then only the
    # storages that were followed (and what the softmax's backward pass reads and writes) count.
    ambiguous = {module: _ambiguous(chains[0]) for module, chains in by_module.items()}
    for op, cost in zip(ops, costs, strict=True):
        chains = by_module.get(op.module)
        if chains is None or (cost is not None and cost.bytes == 0):
            continue
        scores, known = chains[0].scores, storages[op.module]
        softmax_backward = operator_name(op.call.operator) == "_softmax_backward_data"
        for meta, storage in (
            *zip(op.call.inputs, op.inputs, strict=True),
            *zip(op.call.outputs, op.outputs, strict=True),
        ):
            if storage in known or (_same_size(meta, scores) and (softmax_backward or not ambiguous[op.module])):
                known.add(storage)
                moved[op.module] += meta.nbytes
    return storages, moved


def _ambiguous(chain: _Chain) -> bool:
    rows, columns = chain.scores.shape[-2:]
    head_dims = {chain.q.shape[-1], chain.v.shape[-1] if chain.v is not None else 0}
    return rows in head_dims or columns in head_dims


def _same_size(meta: TensorMeta, scores: TensorMeta) -> bool:
    """The scores' elements, as they are or transposed, none of them stretched (an expanded mask owns nothing new)."""
    return (
        meta.numel == scores.numel
        and meta.distinct == meta.numel
        and sorted(meta.shape[-2:]) == sorted(scores.shape[-2:])
    )
