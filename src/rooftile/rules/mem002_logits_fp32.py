"""MEM002: logits in FP32."""

from __future__ import annotations

from collections.abc import Sequence

from rooftile._units import gb, plural, share
from rooftile.capture.trace import Storage
from rooftile.ledgers.materialized import operator_name
from rooftile.ledgers.memory import memory
from rooftile.rules.finding import Context, Finding, Rule, Saving

__all__ = ["RULE"]

#: A finding needs logits that matter: this share of the peak.
_SHARE_OF_PEAK = 0.02
#: Parts of the names of the operators that turn logits into probabilities; a fused cross entropy has its own.
_NORMALISERS = ("softmax", "logsumexp", "cross_entropy")
_PASSED_THROUGH = ("view", "copy", "elementwise")
#: Outputs with fewer classes are no logits over a vocabulary.
_VOCABULARY = 1000


def _check(context: Context) -> list[Finding]:
    trace, ledger = context.trace, context.ledgers.memory
    logits = _logits(trace.storages)
    if logits is None or not _reaches_a_softmax(context, logits.id):
        return []
    elements = _elements(logits)
    copies = [s for s in trace.storages if s.dtype == "float32" and s.born >= 0 and _is_copy(s, elements)]
    nbytes = sum(s.nbytes for s in copies if s.born <= ledger.peak_at.op and not _dead(s, ledger.peak_at.op))
    if not copies or copies[0].nbytes < _SHARE_OF_PEAK * ledger.peak_bytes:
        return []
    after = memory(trace, without=[s.id for s in copies])
    return [
        Finding(
            code=RULE.code,
            title=RULE.title,
            evidence=(
                f"{plural(len(copies), 'tensor')} of the logits' size ({elements:,} elements, "
                f"{gb(copies[0].nbytes)} each) are FP32; {gb(nbytes)} of them are alive at the peak "
                f"({share(nbytes, ledger.peak_bytes)} of it)"
            ),
            response=(
                "compute the loss over chunks of rows, or with a fused linear cross entropy: the softmax stays in "
                "FP32, the FP32 copies of all logits are never there at once"
            ),
            severity="note",
            where=", ".join(dict.fromkeys(s.module or "(top level)" for s in copies)),
            saving=Saving(
                peak_bytes=ledger.peak_bytes - after.peak_bytes,
                moved_bytes=_moved(context, frozenset(s.id for s in copies)),
            ),
        )
    ]


def _logits(storages: Sequence[Storage]) -> Storage | None:
    """The largest output of the model over a vocabulary; None where it has none."""
    outputs = [s for s in storages if s.role == "logits_loss" and s.name == "output" and _is_vocabulary(s.shape)]
    return max(outputs, key=_elements, default=None)


def _reaches_a_softmax(context: Context, logits: int) -> bool:
    """Whether the loss normalises them; an output that an MSE compares is as large and no logits.

    Casts, slices, temperatures and caps may stand between: what only moves or scales them is followed.
    """
    reached = {logits}
    for op, cost in zip(context.trace.ops, context.costs, strict=True):
        if op.phase != "forward" or reached.isdisjoint(op.inputs):
            continue
        if any(word in operator_name(op.call.operator) for word in _NORMALISERS):
            return True
        if cost is not None and cost.family in _PASSED_THROUGH:
            reached.update(op.outputs)
    return False


def _is_vocabulary(shape: tuple[int, ...]) -> bool:
    return len(shape) >= 2 and shape[-1] >= _VOCABULARY


def _elements(storage: Storage) -> int:
    count = 1
    for size in storage.shape:
        count *= size
    return count


def _is_copy(storage: Storage, elements: int) -> bool:
    return storage.nbytes == 4 * elements and storage.role in ("logits_loss", "activation", "temporary")


def _dead(storage: Storage, op: int) -> bool:
    return storage.died is not None and storage.died < op


def _moved(context: Context, ids: frozenset[int]) -> int:
    """Bytes of the passes over the FP32 copies, unfused."""
    moved = 0
    for op, cost in zip(context.trace.ops, context.costs, strict=True):
        if cost is None or cost.bytes == 0:
            continue
        for meta, sid in (
            *zip(op.call.inputs, op.inputs, strict=True),
            *zip(op.call.outputs, op.outputs, strict=True),
        ):
            if sid in ids:
                moved += meta.nbytes
    return moved


RULE = Rule(
    code="MEM002",
    title="Logits are kept in FP32",
    explanation="""\
With a vocabulary of 50,000 to 130,000 the logits of one sequence are among the largest tensors of a
training step, and a loss under autocast turns them, their log-softmax and their gradient into FP32:
four bytes an element, several times over, just when the activations of all layers are alive.

The softmax has to be computed in FP32. The copies need not all exist at once: a loss over chunks of
rows, or one kernel that fuses the output projection with the cross entropy, keeps FP32 statistics
and 16-bit tensors.

The peak saved is the peak without those storages, an upper bound: chunks keep one of their own.
Ignore it where the peak is elsewhere and the saving reads 0.""",
    check=_check,
)
