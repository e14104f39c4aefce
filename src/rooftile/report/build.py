"""From ledgers, roofline and findings to the sections of a report. Every figure's convention is in the document."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rooftile.capture.trace import PHASES, Trace
from rooftile.costs.record import Cost
from rooftile.devices import Device
from rooftile.ledgers.bundle import Ledgers
from rooftile.ledgers.memory import MemoryLedger
from rooftile.ledgers.precision import PrecisionLedger, Slot
from rooftile.report.coverage import coverage_section
from rooftile.report.model import SCHEMA, Report
from rooftile.roofline import RooflineSummary, gemm_quantisation
from rooftile.rules import Finding

__all__ = ["CONVENTIONS", "Audited", "build_report"]

CONVENTIONS: dict[str, str] = {
    "flop": "a multiply and an add are two FLOPs; an elementwise op is one an element, transcendental included",
    "causal": "FLOPs and bytes are those of the kernel that runs; the count without skipped tiles is dense_total",
    "boundary": "device memory",
    "schedule": "unfused: each op reads its inputs and writes its outputs once; fused: elementwise chains keep their "
    "intermediates on chip",
    "memory": "allocated: live tensors; the device's context and the allocator's rounding are not in it",
    "bound": "max(FLOPs/roof, bytes/bandwidth) per op, summed; a bound, not a prediction of time",
    "tf32": "not allowed: fp32 matrix products stand under the fp32 roof",
    "kv_cache": "in the compute dtype unless another is asked for",
    "units": "GB = 1e9 bytes, GiB = 2^30 bytes; JSON has bytes, FLOPs, seconds",
    "scope": "one rank",
    "fit": "live tensors against the capacity that the driver shows",
}

_ROLE_BYTES = "each storage of the step once; not all are alive together"


@dataclass(frozen=True, slots=True)
class Audited:
    """Everything that the sections are made of. ``fused`` is the roofline under the fused schedule."""

    trace: Trace
    costs: Sequence[Cost | None]
    device: Device
    ledgers: Ledgers
    roofline: RooflineSummary
    fused: RooflineSummary
    findings: Sequence[Finding]


def build_report(audited: Audited) -> Report:
    """The report, through the same checks as one that is read from a file."""
    coverage = coverage_section(audited.trace, audited.costs)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "target": _target(audited.trace),
        "device": audited.device.to_dict(),
        "conventions": CONVENTIONS,
        "coverage": coverage,
        "params": _params(audited.trace, audited.ledgers.memory),
        "flops": _flops(audited.trace, audited.costs, bool(coverage["unknown_ops"])),
        "bytes": _bytes(audited),
        "roofline": _roofline(audited),
        "memory": _memory(audited),
        "kv_cache": asdict(audited.ledgers.kv_cache),
        "precision": _precision(
            audited.ledgers.precision, str(audited.trace.settings.get("precision_evidence", "declared"))
        ),
        "findings": [asdict(f) for f in audited.findings],
    }
    return Report.from_dict(document, trace=audited.trace)


def _target(trace: Trace) -> dict[str, Any]:
    settings = trace.settings
    names = (
        "phase", "batch", "seq", "micro_batches", "precision", "optimizer", "checkpoint", "attention", "compute_dtype",
        "mode", "torch",
    )  # fmt: skip
    return {
        "name": settings.get("target", ""),
        **{name: settings.get(name) for name in names},
        "attention_decision": list(settings.get("attention_decision") or ()),
        "config": _json_values(settings.get("config") or {}),
        "seconds": dict(settings.get("seconds") or {}),
        "ops": len(trace.ops),
        "storages": len(trace.storages),
        "notes": list(trace.notes),
    }


def _json_values(value: Any) -> Any:
    """A user's own configuration: what JSON has no word for is spelled as Python does."""
    if isinstance(value, Mapping):
        return {str(key): _json_values(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_json_values(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def _params(trace: Trace, memory: MemoryLedger) -> dict[str, Any]:
    settings = trace.settings
    return {
        "count": settings.get("params_count"),
        "trainable": settings.get("params_trainable"),
        "embedding": settings.get("embedding_params"),
        "bytes": memory.states.weights,
        "by_dtype": dict(settings.get("params_by_dtype") or {}),
        "tied": "once",
        "evidence": "observed",
    }


def _flops(trace: Trace, costs: Sequence[Cost | None], lower_bound: bool) -> dict[str, Any]:
    by_phase: dict[str, int] = dict.fromkeys(PHASES, 0)
    matmul = dense = 0
    for op, cost in zip(trace.ops, costs, strict=True):
        if cost is not None:
            by_phase[op.phase] += cost.flops
            matmul += cost.matmul_flops
            dense += cost.flops if cost.dense_flops is None else cost.dense_flops
    forward, backward = by_phase["forward"], by_phase["backward"]
    settings = trace.settings
    tokens = (settings.get("batch") or 0) * (settings.get("seq") or 0) * (settings.get("micro_batches") or 1)
    if settings.get("phase") == "decode":
        tokens = settings.get("batch") or 0
    total = sum(by_phase.values())
    return {
        **by_phase,
        "total": total,
        "matmul": matmul,
        "dense_total": dense,
        "per_token": total / tokens if tokens else None,
        "tokens": tokens or None,
        # Reverse mode needs at most five times the forward pass (Baur and Strassen 1983); dense layers three.
        "work_ratio": (forward + backward) / forward if forward and backward else None,
        "work_ratio_bound": 5.0,
        "lower_bound": lower_bound,
        "evidence": "derived",
    }


def _bytes(audited: Audited) -> dict[str, Any]:
    traffic = audited.ledgers.traffic
    return {
        "unfused": traffic.unfused,
        "fused": traffic.fused,
        "boundary": "device memory",
        "by_family": [asdict(row) for row in traffic.by_family],
        "by_phase": traffic.by_phase,
        "fusion_removes": traffic.fusion_removes,
        "tiling_removes": traffic.tiling_removes,
        "lower_bound": traffic.unknown_ops > 0,
        "evidence": "derived",
    }


def _roofline(audited: Audited) -> dict[str, Any]:
    summary, fused = audited.roofline, audited.fused
    fused_bytes = {row.family: row for row in fused.families}
    dtype = audited.trace.settings.get("compute_dtype")
    return {
        "bound_s": summary.bound_s,
        "bound_fused_s": fused.bound_s,
        "schedule": summary.schedule,
        "compute_bound_s": summary.compute_bound_s,
        "limit": summary.limit,
        "intensity": summary.intensity,
        "ridge": summary.ridge.get(str(dtype)),
        "ridge_dtype": dtype,
        "ridges": summary.ridge,
        "bandwidth": audited.device.memory_bandwidth,
        "families": [
            {
                **asdict(row),
                "intensity": row.intensity,
                "limit": row.limit,
                "bytes_fused": fused_bytes[row.family].bytes if row.family in fused_bytes else 0,
                "bound_fused_s": fused_bytes[row.family].bound_s if row.family in fused_bytes else 0.0,
            }
            for row in summary.families
        ],
        "heaviest": [
            {
                "operator": row.operator,
                "shapes": [list(meta.shape) for meta in row.call.inputs],
                "module": row.module,
                "phase": row.phase,
                "family": row.family,
                "count": row.count,
                "flops": row.flops,
                "bytes": row.bytes,
                "intensity": row.intensity,
                "bound_s": row.bound_s,
                "limit": row.limit,
                "roof": row.roof,
            }
            for row in summary.heaviest
        ],
        "gemm": asdict(gemm_quantisation(audited.trace, audited.device)),
        "unknown_roofs": list(summary.unknown_roofs),
        "lower_bound": summary.lower_bound,
        "evidence": "derived",
    }


def _memory(audited: Audited) -> dict[str, Any]:
    ledger, fit, device = audited.ledgers.memory, audited.ledgers.fit, audited.device
    at = ledger.peak_at
    return {
        "kind": "allocated",
        "peak_bytes": ledger.peak_bytes,
        "peak_at": str(at),
        "peak_op": at.op,
        "peak_module": at.module,
        "peak_phase": at.phase,
        "peak_operator": at.operator,
        "by_role": ledger.by_role,
        "by_module": ledger.by_module,
        "role_peaks": ledger.role_peaks,
        "phase_peaks": {p.phase: p.peak_bytes for p in ledger.phase_peaks},
        "states": {**asdict(ledger.states), "total": ledger.states.total},
        "resident_bytes": ledger.resident_bytes,
        "nominal_bytes": device.nominal_bytes,
        "visible_bytes": fit.visible_bytes,
        "visible_evidence": device.visible_evidence,
        "context_bytes": fit.context_bytes,
        "fits": fit.fits,
        "headroom_bytes": fit.headroom_bytes,
        "timeline": [asdict(point) for point in ledger.timeline()],
        "evidence": "derived",
    }


def _precision(ledger: PrecisionLedger, evidence: str) -> dict[str, Any]:
    return {
        "policy": ledger.policy,
        "policy_evidence": evidence,
        "autocast_source": ledger.autocast_source,
        "roles": [asdict(role) for role in ledger.roles],
        "role_bytes": _ROLE_BYTES,
        "families": [_slots(asdict(family)) for family in ledger.families],
        "scaled": [asdict(operands) for operands in ledger.scaled],
        **{
            name: asdict(getattr(ledger, name))
            for name in ("autocast", "loss_scale", "gradient_accumulation", "communication")
        },
    }


def _slots(family: Mapping[str, Any]) -> dict[str, Any]:
    return {key: asdict(value) if isinstance(value, Slot) else value for key, value in family.items()}
