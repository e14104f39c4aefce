"""A trace that is there already becomes a report. Needs no torch: a saved trace is read on any machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rooftile.capture.options import CaptureOptions
from rooftile.capture.trace import Trace
from rooftile.costs import Cost, trace_costs
from rooftile.costs.fusion import fuse
from rooftile.devices import Device
from rooftile.ledgers.bundle import read_ledgers
from rooftile.report.build import Audited, build_report
from rooftile.report.model import Report
from rooftile.roofline import summary
from rooftile.rules import Context, Rule, check_all

__all__ = ["costs_of", "read_trace"]


def read_trace(
    trace: Trace,
    device: Device,
    *,
    rules: Sequence[Rule] | None = None,
    options: CaptureOptions | None = None,
    kv_dtype: str | None = None,
    recapture: Callable[..., Trace | None] | None = None,
) -> Report:
    """The report of a trace. Without ``recapture``, rules judge by this trace alone.

    Raises UsageError where the device lacks a dtype that the trace computes in.
    """
    costs, fused = costs_of(trace)
    ledgers = read_ledgers(trace, costs, fused, device, kv_dtype)
    context = Context(trace, costs, device, ledgers, options or CaptureOptions(), recapture or _no_recapture)
    return build_report(
        Audited(
            trace=trace,
            costs=costs,
            device=device,
            ledgers=ledgers,
            roofline=summary(trace, costs, device),
            fused=summary(trace, costs, device, op_bytes=fused, schedule="fused"),
            findings=check_all(context, rules),
        )
    )


def costs_of(trace: Trace) -> tuple[tuple[Cost | None, ...], Sequence[int]]:
    """One cost an op, and each op's bytes under the fused schedule."""
    costs = trace_costs(trace)
    return costs, fuse(trace, costs).op_bytes


def _no_recapture(**_: object) -> None:
    return None
