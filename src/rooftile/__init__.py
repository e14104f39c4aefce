"""rooftile: what do a step's numbers survive, and what does it move?

>>> import rooftile
>>> report = rooftile.audit("gpt2", device="h100-sxm")
>>> report.memory.peak_bytes

The names below load when they are first asked for: ``import rooftile`` itself does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rooftile import bench, capture, devices, formats, integrations, ledgers, lowp, masks, roofline, zoo
    from rooftile._attention import attention
    from rooftile._attention.kv_cache import KVCache, SlidingWindow
    from rooftile._attention.state import AttentionState, merge, merge_all
    from rooftile._attention.varlen import attention_varlen
    from rooftile._audit import audit
    from rooftile.capture import CaptureOptions, Step, Trace
    from rooftile.capture.trace_file import load_trace, save_trace
    from rooftile.costs import Cost, flops, register_cost
    from rooftile.errors import CaptureError, RooftileError, UnitError, UsageError
    from rooftile.report.model import Report

#: Public name -> module that has it; a module that bears the name itself is the name.
_PUBLIC = {
    "AttentionState": "rooftile._attention.state",
    "CaptureError": "rooftile.errors",
    "CaptureOptions": "rooftile.capture.options",
    "Cost": "rooftile.costs",
    "KVCache": "rooftile._attention.kv_cache",
    "Report": "rooftile.report.model",
    "RooftileError": "rooftile.errors",
    "SlidingWindow": "rooftile._attention.kv_cache",
    "Step": "rooftile.capture.step",
    "Trace": "rooftile.capture.trace",
    "UnitError": "rooftile.errors",
    "UsageError": "rooftile.errors",
    "attention": "rooftile._attention",
    "attention_varlen": "rooftile._attention.varlen",
    "audit": "rooftile._audit",
    "bench": "rooftile.bench",
    "capture": "rooftile.capture",
    "devices": "rooftile.devices",
    "flops": "rooftile.costs.flops",
    "formats": "rooftile.formats",
    "integrations": "rooftile.integrations",
    "ledgers": "rooftile.ledgers",
    "lowp": "rooftile.lowp",
    "load_trace": "rooftile.capture.trace_file",
    "masks": "rooftile.masks",
    "merge": "rooftile._attention.state",
    "merge_all": "rooftile._attention.state",
    "register_cost": "rooftile.costs",
    "roofline": "rooftile.roofline",
    "save_trace": "rooftile.capture.trace_file",
    "zoo": "rooftile.zoo",
}

__all__ = [
    "AttentionState",
    "CaptureError",
    "CaptureOptions",
    "Cost",
    "KVCache",
    "Report",
    "RooftileError",
    "SlidingWindow",
    "Step",
    "Trace",
    "UnitError",
    "UsageError",
    "attention",
    "attention_varlen",
    "audit",
    "bench",
    "capture",
    "devices",
    "flops",
    "formats",
    "integrations",
    "ledgers",
    "load_trace",
    "lowp",
    "masks",
    "merge",
    "merge_all",
    "register_cost",
    "roofline",
    "save_trace",
    "zoo",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("rooftile")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'rooftile' has no attribute {name!r}")
    import importlib

    module = importlib.import_module(_PUBLIC[name])
    return module if _PUBLIC[name].rpartition(".")[2] == name else getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
