"""KER001: attention on the materialised path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rooftile._units import gb, plural, share
from rooftile.ledgers.materialized import MaterializedAttention
from rooftile.ledgers.memory import memory
from rooftile.ledgers.modules import module_group
from rooftile.rules.finding import Context, Finding, Rule, Saving

__all__ = ["RULE"]


def _check(context: Context) -> list[Finding]:
    attention = context.ledgers.attention
    if not attention:
        return []
    trace, before = context.trace, context.ledgers.memory
    scores = frozenset().union(*(a.scores for a in attention))
    after = memory(trace, without=scores)
    moved = sum(a.moved_bytes for a in attention)
    decisions = trace.settings.get("attention_decision", ())
    refusals = [d for d in decisions if d.get("materialized") and not str(d.get("kernel")).startswith("rooftile")]
    first = attention[0]
    evidence = (
        f"{plural(len(attention), 'module')} write {first.rows} x {first.columns} scores to memory; passes over "
        f"tensors of that size move {gb(moved)}, {share(moved, context.ledgers.traffic.unfused)} of the "
        f"step's bytes (unfused); {_why(attention, refusals)}"
    )
    return [
        Finding(
            code=RULE.code,
            title=RULE.title,
            evidence=evidence,
            response=_response(bool(refusals)),
            severity="warning",
            where=", ".join(dict.fromkeys(module_group(a.module) for a in attention)),
            saving=Saving(peak_bytes=before.peak_bytes - after.peak_bytes, moved_bytes=moved),
        )
    ]


def _why(attention: Sequence[MaterializedAttention], refusals: Sequence[dict[str, Any]]) -> str:
    """The capture's own decisions explain what went through SDPA; the rest was written out by hand."""
    if not refusals:
        return "the model writes softmax(QK^T)V out instead of calling scaled_dot_product_attention"
    reasons = "; ".join(dict.fromkeys(str(d["reason"]) for d in refusals))
    through_sdpa = sum(int(d["count"]) for d in refusals)
    by_hand = sum(a.calls for a in attention) - through_sdpa
    return reasons + (f"; {plural(by_hand, 'call')} more are written out by hand" if by_hand > 0 else "")


def _response(refused: bool) -> str:
    exact = "rooftile.attention (exact; compiled on CPUs, elsewhere in torch operations with linear memory)"
    if refused:
        return f"remove the reason above, or call {exact}, which takes this call"
    return f"call torch.nn.functional.scaled_dot_product_attention with the same mask and scale, or {exact}"


RULE = Rule(
    code="KER001",
    title="Attention writes its scores to memory",
    explanation="""\
Materialised attention stores the N x N scores and probabilities (and, in training, keeps them for
the backward pass). Each pass over them crosses the device-memory boundary: their bytes grow with
the square of the sequence, those of Q, K, V and O only linearly.

Exact tiled attention computes the same result block by block: the scores stay on chip, the backward
pass recomputes them from one log-sum-exp a row.

Seen in: a matrix product, any scale, mask or cast, a softmax, any dropout, and a product with the
probabilities, followed through the storages of the trace. It does not matter whether SDPA was
decomposed into it (then the capture's reason says why every tiled kernel refused the call) or the
model wrote it out.

The bytes saved are the passes over score-sized tensors; the peak saved is the peak without those
storages. The log-sum-exp that replaces them (4 bytes a row and head) is not subtracted. Ignore it
for short sequences, where the scores are small.""",
    check=_check,
)
