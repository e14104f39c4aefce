"""All ledgers of one trace, read together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rooftile.capture.trace import Trace
from rooftile.costs.record import Cost
from rooftile.devices import Device
from rooftile.ledgers.kv_cache import KvCacheLedger, kv_cache
from rooftile.ledgers.materialized import MaterializedAttention, materialized_attention
from rooftile.ledgers.memory import Fit, MemoryLedger, fit, memory
from rooftile.ledgers.precision import PrecisionLedger, precision
from rooftile.ledgers.traffic import TrafficLedger, traffic

__all__ = ["Ledgers", "read_ledgers"]


@dataclass(frozen=True, slots=True)
class Ledgers:
    """What one trace means on one device. ``attention`` lists the modules whose scores reach memory."""

    memory: MemoryLedger
    fit: Fit
    traffic: TrafficLedger
    precision: PrecisionLedger
    kv_cache: KvCacheLedger
    attention: tuple[MaterializedAttention, ...]


def read_ledgers(
    trace: Trace,
    costs: Sequence[Cost | None],
    fused_bytes: Sequence[int],
    device: Device,
    kv_dtype: str | None = None,
) -> Ledgers:
    """Every ledger. ``costs`` and ``fused_bytes`` have one entry an op of the trace."""
    attention = materialized_attention(trace, costs)
    memory_ledger = memory(trace)
    # Where a device has several accumulators for one input, torch's default is the fp32 one.
    accumulate = {p.input: "float32" if device.supports(p.input) else p.accumulate for p in device.peaks}
    return Ledgers(
        memory=memory_ledger,
        fit=fit(memory_ledger.peak_bytes, device.visible_bytes),
        traffic=traffic(trace, costs, fused_bytes, attention),
        precision=precision(trace, costs, accumulate, device.device_class),
        kv_cache=kv_cache(trace, attention, kv_dtype),
        attention=attention,
    )
