"""NUM001: weights updated in 16 bits without masters."""

from __future__ import annotations

from rooftile._units import gb, plural, share
from rooftile.costs.operands import mutated_positions
from rooftile.rules.finding import Context, Finding, Rule, Saving

__all__ = ["RULE"]

#: Half the spacing just above 1: a smaller relative update rounds away.
_SWALLOWED_BELOW = {"bfloat16": "2^-8 (0.39 %)", "float16": "2^-11 (0.049 %)"}


def _check(context: Context) -> list[Finding]:
    trace = context.trace
    updated = any(op.phase == "optimizer" for op in trace.ops)
    states = context.ledgers.memory.states
    if not updated or states.master_weights:
        return []
    written = {
        sid
        for op in trace.ops
        if op.phase == "optimizer"
        for sid in (*op.outputs, *(op.inputs[at] for at in mutated_positions(op.call)))
    }
    weights = [s for s in trace.storages if s.role == "parameter" and s.id in written and s.dtype in _SWALLOWED_BELOW]
    if not weights:
        return []
    nbytes = sum(s.nbytes for s in weights)
    dtypes = sorted({s.dtype for s in weights})
    swallowed = " and ".join(f"{_SWALLOWED_BELOW[d]} of a {d} weight" for d in dtypes)
    # FP32 masters take two bytes more than the weights' own two, beside them.
    masters = 2 * nbytes
    return [
        Finding(
            code=RULE.code,
            title=RULE.title,
            evidence=(
                f"the optimizer writes {plural(len(weights), 'weight tensor')} ({gb(nbytes)}, "
                f"{share(nbytes, states.weights)} of the weights' bytes) in {', '.join(dtypes)} and no FP32 "
                f"master is kept: an update below about {swallowed} is rounded away"
            ),
            response=(
                f"--precision {'bf16' if dtypes[0] == 'bfloat16' else 'fp16'}-master keeps FP32 masters "
                f"({gb(masters)} of masters, and optimizer state in FP32); or round the update stochastically"
            ),
            severity="warning",
            where="optimizer",
            saving=Saving(peak_bytes=-masters),
        )
    ]


RULE = Rule(
    code="NUM001",
    title="Weights are updated in 16 bits without masters",
    explanation="""\
The optimizer computes w + dw and stores the result in bf16 or fp16. Where |dw| is below half the
spacing of numbers at w (2^-9 to 2^-8 of w in bf16, 2^-12 to 2^-11 in fp16) the stored weight does
not move at all. Late in training, with small learning rates, that is most updates: the loss stalls
and nothing in the logs says why.

An FP32 master copy keeps the sum of small updates; the 16-bit weight is cast from it every step. It
costs 4 bytes a parameter (and FP32 moments, if those were 16-bit too). Stochastic rounding of the
update moves weights in expectation, without a master, and with noise.

The saving is negative: it is what the masters alone cost. Ignore it where the update rule is known
to be large relative to the weights, or for an inference step.""",
    check=_check,
)
