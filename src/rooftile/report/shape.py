"""What a report's sections hold, as far as the views read them: one declaration, checked when a report is read.

A key that ends in ``?`` may be left out: reports of earlier releases have no such figure. Keys that no view reads are
not declared, and are kept as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rooftile.errors import UsageError

__all__ = ["check_shape"]


@dataclass(frozen=True, slots=True)
class _Kind:
    """A plain value: what the sentence calls it, and the test."""

    name: str
    accepts: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class _Maybe:
    """``of``, or null."""

    of: Any


@dataclass(frozen=True, slots=True)
class _Many:
    """A list of ``of``; of ``length`` items where that is given."""

    of: Any
    length: int | None = None


@dataclass(frozen=True, slots=True)
class _Table:
    """An object with any keys, each with a value of ``of``."""

    of: Any


_Shape = _Kind | _Maybe | _Many | _Table | Mapping[str, Any]


def _is_number(value: Any) -> bool:
    """JSON's numbers are Python's int and float; a bool is an int to Python alone. The limit is that of a float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


_ANY_NUMBER = _Kind("a number", _is_number)
_NUMBER = _Kind("a number of 0 or more", lambda v: _is_number(v) and v >= 0)
_WHOLE = _Kind("a whole number of 0 or more", lambda v: _is_number(v) and isinstance(v, int) and v >= 0)
_TEXT = _Kind("a text", lambda v: isinstance(v, str))
_FLAG = _Kind("true or false", lambda v: isinstance(v, bool))
_SEVERITY = _Kind("error, warning or note", lambda v: v in ("error", "warning", "note"))

_SLOT = {"value": _TEXT, "evidence": _TEXT}

_TARGET = {
    "name": _TEXT, "phase": _TEXT, "batch": _Maybe(_WHOLE), "seq": _Maybe(_WHOLE), "micro_batches": _Maybe(_WHOLE),
    "precision": _TEXT, "optimizer": _Maybe(_TEXT), "checkpoint": _Maybe(_TEXT), "compute_dtype": _Maybe(_TEXT),
    "attention_decision": _Many({"kernel": _TEXT, "count": _WHOLE, "reason": _TEXT}), "notes": _Many(_TEXT),
}  # fmt: skip
_DEVICE = {
    "name": _TEXT, "title": _TEXT, "device_class?": _TEXT, "memory_bandwidth": _NUMBER, "visible_bytes": _WHOLE,
    "peaks": _Many({"input": _TEXT, "flops_per_s": _NUMBER}), "notes?": _Many(_TEXT), "logical_devices?": _WHOLE,
}  # fmt: skip
_COVERAGE = {
    "ops": _NUMBER, "flops": _NUMBER, "bytes": _NUMBER, "ops_total": _WHOLE, "unknown_ops": _Many(_TEXT),
    "unknown_counts": _Table(_WHOLE),
}  # fmt: skip
_PARAMS = {"count": _Maybe(_WHOLE), "trainable": _Maybe(_WHOLE), "bytes": _WHOLE}
_FLOPS = {
    "forward": _WHOLE, "recompute": _WHOLE, "backward": _WHOLE, "optimizer": _WHOLE, "total": _WHOLE, "matmul": _WHOLE,
    "per_token": _Maybe(_NUMBER), "work_ratio": _Maybe(_NUMBER), "lower_bound": _FLAG,
}  # fmt: skip
_BYTES = {
    "unfused": _WHOLE, "fused": _WHOLE, "fusion_removes": _ANY_NUMBER, "tiling_removes": _WHOLE, "lower_bound": _FLAG,
}  # fmt: skip
_FAMILY = {
    "family": _TEXT, "ops": _WHOLE, "flops": _WHOLE, "bytes": _WHOLE, "bytes_fused": _WHOLE, "bound_s": _NUMBER,
    "intensity": _Maybe(_NUMBER), "limit": _TEXT,
}  # fmt: skip
_HEAVIEST = {
    "operator": _TEXT, "shapes": _Many(_Many(_WHOLE)), "module": _TEXT, "phase": _TEXT, "count": _WHOLE,
    "flops": _WHOLE, "bytes": _WHOLE, "bound_s": _NUMBER, "roof": _TEXT,
}  # fmt: skip
_GEMM = {
    "tile": _Many(_WHOLE, length=2), "tiles": _Maybe(_NUMBER), "waves": _Maybe(_NUMBER), "evidence": _TEXT,
}  # fmt: skip
_ROOFLINE = {
    "bound_s": _NUMBER, "bound_fused_s": _NUMBER, "compute_bound_s": _NUMBER, "limit": _TEXT,
    "intensity": _Maybe(_NUMBER), "ridge": _Maybe(_NUMBER), "ridge_dtype": _Maybe(_TEXT), "families": _Many(_FAMILY),
    "heaviest": _Many(_HEAVIEST), "gemm?": _Maybe(_GEMM), "unknown_roofs": _Many(_TEXT), "lower_bound": _FLAG,
}  # fmt: skip
_STATES = dict.fromkeys(("weights", "buffers", "gradients", "optimizer_state", "master_weights", "total"), _WHOLE)
_MEMORY = {
    "peak_bytes": _WHOLE, "peak_phase": _TEXT, "peak_module": _TEXT, "peak_operator": _TEXT, "by_role": _Table(_WHOLE),
    "by_module": _Table(_WHOLE), "phase_peaks": _Table(_WHOLE), "states": _STATES, "visible_bytes": _Maybe(_WHOLE),
    "visible_evidence": _TEXT, "context_bytes": _Maybe(_WHOLE), "fits": _Maybe(_FLAG),
    "headroom_bytes": _Maybe(_ANY_NUMBER), "timeline": _Many({"phase": _TEXT, "live_bytes": _WHOLE}),
}  # fmt: skip
_KV_CACHE = {
    "bytes_per_token": _WHOLE, "total_bytes": _WHOLE, "layers": _WHOLE, "heads": _Maybe(_WHOLE),
    "head_dim": _Maybe(_WHOLE), "batch": _WHOLE, "tokens": _WHOLE, "dtype": _TEXT, "evidence": _TEXT,
    "captured_dtype?": _Maybe(_TEXT),
}  # fmt: skip
_SCALED = {
    "role": _TEXT, "format": _TEXT, "block": _TEXT, "count": _WHOLE, "code_bytes": _WHOLE, "scale_bytes": _WHOLE,
}  # fmt: skip
_PRECISION = {
    "scaled?": _Many(_SCALED),
    "policy": _TEXT, "policy_evidence": _TEXT,
    "roles": _Many({"role": _TEXT, "dtypes": _Table(_WHOLE), "bytes": _WHOLE}),
    "families": _Many({"family": _TEXT} | dict.fromkeys(("storage", "product", "accumulate", "output"), _SLOT)),
    **dict.fromkeys(("autocast", "loss_scale", "gradient_accumulation", "communication"), _SLOT),
}  # fmt: skip
_FINDING = {
    "code": _TEXT, "title": _TEXT, "evidence": _TEXT, "response": _TEXT, "severity": _SEVERITY,
    "saving": {"peak_bytes": _Maybe(_ANY_NUMBER), "moved_bytes": _Maybe(_ANY_NUMBER), "evidence": _TEXT},
}  # fmt: skip

_REPORT: Mapping[str, _Shape] = {
    "target": _TARGET, "device": _DEVICE, "conventions": _Table(_TEXT), "coverage": _COVERAGE, "params": _PARAMS,
    "flops": _FLOPS, "bytes": _BYTES, "roofline": _ROOFLINE, "memory": _MEMORY, "precision": _PRECISION,
    "findings": _Many(_FINDING),
}  # fmt: skip


def check_shape(document: Mapping[str, Any], source: str) -> None:
    """Raise UsageError, which names ``source`` and the key, where a value is not what the views take it for."""
    faults = (*_faults(document, _REPORT, ""), *_cache_faults(document), *_infinities(document, ""))
    if faults:
        raise UsageError(f"{source}: {faults[0]}; write it again with `rooftile audit --json`")


def _cache_faults(document: Mapping[str, Any]) -> Iterator[str]:
    """A model without a cache has the reason in place of the figures."""
    cache = document.get("kv_cache")
    none = isinstance(cache, Mapping) and cache.get("bytes_per_token", 0) is None
    yield from _faults(cache, {"reason": _TEXT} if none else _KV_CACHE, "kv_cache")


def _faults(value: Any, shape: _Shape, path: str) -> Iterator[str]:
    if isinstance(shape, _Kind):
        if not shape.accepts(value):
            yield f"{path!r} is {_shown(value)}, where {shape.name} belongs"
    elif isinstance(shape, _Maybe):
        if value is not None:
            yield from _faults(value, shape.of, path)
    elif isinstance(shape, _Many):
        if not isinstance(value, list | tuple):
            yield f"{path!r} is {_shown(value)}, where a list belongs"
        elif shape.length not in (None, len(value)):
            yield f"{path!r} has {len(value)} items, where {shape.length} belong"
        else:
            for index, item in enumerate(value):
                yield from _faults(item, shape.of, f"{path}[{index}]")
    elif not isinstance(value, Mapping):
        yield f"{path!r} is {_shown(value)}, where an object belongs"
    elif isinstance(shape, _Table):
        for key, item in value.items():
            yield from _faults(item, shape.of, f"{path}.{key}")
    else:
        yield from _record_faults(value, shape, path)


def _record_faults(value: Mapping[str, Any], shape: Mapping[str, _Shape], path: str) -> Iterator[str]:
    for name, of in shape.items():
        key = name.removesuffix("?")
        inner = f"{path}.{key}" if path else key
        if key in value:
            yield from _faults(value[key], of, inner)
        elif key == name:
            yield f"the key {inner!r} is missing"


def _infinities(value: Any, path: str) -> Iterator[str]:
    """NaN and Infinity are no JSON, though Python reads them; they could not be written again."""
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{path!r} is {value!r}, which JSON does not have"
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _infinities(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _infinities(item, f"{path}[{index}]")


def _shown(value: Any) -> str:
    """The value as JSON spells it, cut where it is long."""
    if isinstance(value, Mapping | list | tuple):
        return "an object" if isinstance(value, Mapping) else "a list"
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else _number_text(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _number_text(value: Any) -> str:
    if isinstance(value, int) and abs(value) >= 10**40:  # Python refuses to spell the longest
        return "a whole number of more than 40 digits"
    return repr(value)
