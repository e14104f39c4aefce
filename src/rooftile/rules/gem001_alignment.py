"""GEM001: matrix products whose dimensions are off alignment."""

from __future__ import annotations

from dataclasses import dataclass, field

from rooftile._units import plural, share
from rooftile.capture.trace import Call
from rooftile.costs.gemm import alignment, gemm_of
from rooftile.ledgers.modules import module_group
from rooftile.rules.finding import Context, Finding, Rule

__all__ = ["RULE"]

#: A finding needs products that matter: this share of the step's matrix-product FLOPs.
_SHARE_OF_FLOPS = 0.001
#: Whole 128-byte lines in 16 bits: what the guide recommends from A100 on.
_PAD_TO = 64


@dataclass(slots=True)
class _Size:
    """One dimension that is no multiple of 16 bytes, over all products that have it."""

    granule: int
    flops: int = 0
    products: int = 0
    modules: dict[str, None] = field(default_factory=dict)


def _check(context: Context) -> list[Finding]:
    total = sum(c.matmul_flops for c in context.costs if c is not None)
    findings = []
    for size, seen in sorted(_misaligned(context).items(), key=lambda item: -item[1].flops):
        if not total or seen.flops < _SHARE_OF_FLOPS * total:
            continue
        padded = -(-size // _PAD_TO) * _PAD_TO
        findings.append(
            Finding(
                code=RULE.code,
                title=f"A matrix dimension of {size:,} is off alignment",
                evidence=(
                    f"{size:,} is no multiple of {seen.granule} elements (16 bytes); "
                    f"{plural(seen.products, 'product')} with {share(seen.flops, total)} of the matrix FLOPs have it"
                ),
                response=(
                    f"pad it to {padded:,} (a multiple of {_PAD_TO}, {share(padded - size, size)} more work); "
                    "for a vocabulary, pad the embedding and mask the extra logits"
                ),
                severity="warning" if seen.flops >= 0.01 * total else "note",
                where=", ".join(seen.modules),
            )
        )
    return findings


def _misaligned(context: Context) -> dict[int, _Size]:
    sizes: dict[int, _Size] = {}
    per_call: dict[int, tuple[int, tuple[int, ...]]] = {}  # equal layers share their Calls
    for op, cost in zip(context.trace.ops, context.costs, strict=True):
        if cost is None or cost.family != "matmul" or cost.flops == 0:
            continue
        key = id(op.call)
        if key not in per_call:
            per_call[key] = _off(op.call)
        granule, off = per_call[key]
        for size in off:
            seen = sizes.setdefault(size, _Size(granule))
            seen.flops += cost.matmul_flops
            seen.products += 1
            seen.modules[module_group(op.module)] = None
    return sizes


def _off(call: Call) -> tuple[int, tuple[int, ...]]:
    """The granule, and the sizes above it that are no multiple. A size below it (a vector's 1) can't be padded away."""
    gemm = gemm_of(call)
    if gemm is None:
        return 1, ()
    found = alignment(gemm)
    return found.granule, tuple(
        dict.fromkeys(getattr(gemm, name) for name in found.misaligned if getattr(gemm, name) > found.granule)
    )


RULE = Rule(
    code="GEM001",
    title="Matrix dimensions off alignment",
    explanation="""\
Matrix units load operands in whole 16-byte pieces (8 elements of bf16 or fp16, 4 of fp32, 16 of
fp8). Where a dimension is no multiple, rows start at odd addresses: the library takes a slower
kernel, or copies the operand first. GPT-2's vocabulary of 50,257 is the known case: padded to
50,304 the same product runs on the fast kernels.

The dimensions are those of the products that ran, forward and backward, grouped by size. No saving
is printed: how much slower the unaligned kernel is depends on the library and is measured, not
derived.

Ignore it where the size comes from a short batch that production does not use.

Source: NVIDIA, Matrix Multiplication Background User's Guide.""",
    check=_check,
)
