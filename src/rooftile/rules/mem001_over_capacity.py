"""MEM001: the peak is over the visible capacity, and which single change would fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rooftile._units import gb, plural
from rooftile.ledgers.memory import MemoryLedger, memory
from rooftile.rules.finding import Context, Finding, Rule, Saving

__all__ = ["RULE"]

#: A recapture takes about as long as the audit's own capture; the changes are ordered so that these are the likeliest.
_RECAPTURES = 3

#: Bytes a parameter of weights, gradients, masters and AdamW's two moments: the least that a precision can need.
_STATE_BYTES = {"bf16": 8, "fp16": 8, "bf16-master": 16, "fp16-master": 16}


@dataclass(frozen=True, slots=True)
class _Change:
    """One change, the peak with it, and whether a capture was needed to know."""

    label: str
    peak_bytes: int


def _check(context: Context) -> list[Finding]:
    fit = context.ledgers.fit
    if fit.fits is not False or fit.visible_bytes is None:
        return []
    peak, visible = context.ledgers.memory.peak_bytes, fit.visible_bytes
    tried = list(_changes(context, visible))
    fitting = [change for change in tried if change.peak_bytes <= visible]
    best = fitting[0] if fitting else min(tried, key=lambda c: c.peak_bytes, default=None)
    return [
        Finding(
            code=RULE.code,
            title=RULE.title,
            evidence=(
                f"peak {gb(peak)} of live tensors, visible {gb(visible)}: "
                f"{gb(peak - visible)} too much, before the device's context and the allocator's rounding"
            ),
            response=_response(context, fitting, best, visible),
            severity="error",
            where=str(context.ledgers.memory.peak_at),
            saving=Saving(peak_bytes=peak - best.peak_bytes if best else None),
        )
    ]


def _response(context: Context, fitting: list[_Change], best: _Change | None, visible: int) -> str:
    if fitting:
        listed = "; ".join(f"{c.label} (peak {gb(c.peak_bytes)})" for c in fitting)
        return f"{'this fits' if len(fitting) == 1 else 'any one of these fits'}, found by auditing with it: {listed}"
    parts = ["no single change that was tried fits"]
    if best is not None:
        parts.append(f"nearest: {best.label} (peak {gb(best.peak_bytes)})")
    states = context.ledgers.memory.states.total
    if states > visible:
        ranks = -(-states // visible)
        parts.append(
            f"weights, gradients and optimizer state alone are {gb(states)}: "
            f"shard them over at least {plural(ranks, 'rank')}, or combine changes"
        )
    else:
        parts.append("combine changes, or shard the states over several ranks")
    return "; ".join(parts)


def _changes(context: Context, visible: int) -> Iterator[_Change]:
    """Single changes in the order of what they cost the user: first those that need no second capture."""
    trace, now = context.trace, context.ledgers.memory
    if context.ledgers.attention:
        scores = frozenset().union(*(a.scores for a in context.ledgers.attention))
        yield _Change("tiled attention", memory(trace, without=scores).peak_bytes)
    if str(trace.settings.get("optimizer", "")).startswith("adamw") and trace.settings["optimizer"] != "adamw-fused":
        scratch = [
            s.id
            for s in trace.storages
            if s.role == "temporary" and s.born >= 0 and trace.ops[s.born].phase == "optimizer"
        ]
        yield _Change("--optimizer adamw-fused", memory(trace, without=scratch).peak_bytes)
    left = _RECAPTURES
    for label, run in _recaptures(context, now, visible):
        if left == 0:
            return
        ledger = run()
        if ledger is not None:
            left -= 1
            yield _Change(label, ledger.peak_bytes)


def _recaptures(
    context: Context, now: MemoryLedger, visible: int
) -> Iterator[tuple[str, Callable[[], MemoryLedger | None]]]:
    """Changes that could help, each with the capture that tells; those that can't are left out unrun."""
    settings, options = context.trace.settings, context.options
    training = settings.get("phase") == "train"
    batch = settings.get("batch") or 1
    # Neither checkpointing nor a smaller batch touches the states: where these alone are too much, don't ask.
    if now.states.total <= visible:
        if training and options.checkpoint == "none":
            yield "--checkpoint blocks", lambda: _peak(context, checkpoint="blocks")
        if batch > 1:
            smaller = max(1, batch // 2)
            yield f"--batch {smaller}", lambda: _peak(context, batch=smaller)
            if smaller > 1:
                yield "--batch 1", lambda: _peak(context, batch=1)
    precision = str(settings.get("precision"))
    if precision not in ("fp32", "bf16-mixed", "fp16-mixed"):
        return
    wide = "fp16" if precision == "fp16-mixed" or not context.device.supports("bfloat16") else "bf16"
    parameters = int(settings.get("params_trainable") or 0)
    has_adamw = str(settings.get("optimizer", "")).startswith("adamw")
    for name in (f"{wide}-master", wide) if training else (wide,):
        if not (training and has_adamw) or _STATE_BYTES[name] * parameters <= visible:
            yield _precision_label(name, training), lambda name=name: _peak(context, precision=name)  # type: ignore[misc]


def _precision_label(name: str, training: bool) -> str:
    return f"--precision {name}" + (" (but see NUM001: updates are lost)" if training and "master" not in name else "")


def _peak(context: Context, **changes: object) -> MemoryLedger | None:
    trace = context.recapture(**changes)
    return None if trace is None else memory(trace)


RULE = Rule(
    code="MEM001",
    title="The peak is over what the device shows",
    explanation="""\
The most bytes of live tensors at one moment of the step exceed the capacity that the driver offers
a process (less than the nominal one: an 80 GB card shows about 79.2 GiB). Such a step ends in an
out-of-memory error; live tensors are the least it needs, the context and the allocator's rounding
come on top.

The rule looks for one change that fits, by auditing again with it: exact tiled attention, a fused
optimizer (no temporaries of the weights' size), checkpointing, a smaller micro-batch, 16-bit
weights with FP32 masters. Where the trace at hand tells the answer (storages that would not be
allocated), it is transformed; otherwise the step is captured again with that option. Changes that
cannot help, because the states alone are too much, are not run. At most three captures are made.

Where nothing fits by itself: combine changes, or shard weights, gradients and optimizer state over
ranks (ZeRO, FSDP).""",
    check=_check,
)
