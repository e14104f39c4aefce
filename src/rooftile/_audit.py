"""``rooftile.audit``: a step and a device go in, a report comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from rooftile.capture import CaptureOptions, Step, capture, load_target
from rooftile.capture.materialize import resolve_precision
from rooftile.capture.step import StepPhase
from rooftile.capture.trace import Trace
from rooftile.devices import Device
from rooftile.devices import load as load_device
from rooftile.errors import RooftileError, UsageError
from rooftile.ledgers.kv_cache import KV_DTYPES
from rooftile.report.model import Report
from rooftile.report.read import read_trace
from rooftile.rules import select_rules

__all__ = ["audit"]

Progress = Callable[[str], None]

#: The dtype that a precision multiplies in; a device without it can't run the step.
_COMPUTES_IN = {
    "bf16": "bfloat16", "bf16-mixed": "bfloat16", "bf16-master": "bfloat16",
    "fp16": "float16", "fp16-mixed": "float16", "fp16-master": "float16",
    "fp8-block": "float8_e4m3fn", "fp8-tensor": "float8_e4m3fn",
}  # fmt: skip


def audit(
    step: Step | str,
    device: Device | str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    phase: StepPhase | None = None,
    kv_dtype: str | None = None,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    progress: Progress | None = None,
    **options: Any,
) -> Report:
    """Audit one step on one device.

    Parameters
    ----------
    step:
        A :class:`rooftile.Step`, or a target as on the command line (``"gpt2"``, ``"file.py:function"``), for which
        ``batch``, ``seq`` and ``phase`` may be given.
    device:
        A name (``rooftile devices`` lists them) or a :class:`~rooftile.devices.Device`.
    kv_dtype:
        Storage of the KV cache: ``fp32``, ``fp16``, ``bf16``, ``fp8`` or ``int8``; by default as computed.
    select, ignore:
        Codes or families of the rules to check (all by default) and to leave out.
    progress:
        Called with a short sentence as the work proceeds.
    options:
        Fields of :class:`~rooftile.capture.CaptureOptions`: ``precision``, ``optimizer``, ``checkpoint``,
        ``attention``, ``micro_batches``, ``live``.

    Raises
    ------
    UsageError
        For an unknown name or a combination that can't be (a device without the dtype, an optimizer in inference).
    CaptureError
        For a model that can't run without data.
    """
    rules = select_rules(_words(select), _words(ignore))
    if kv_dtype is not None and kv_dtype not in KV_DTYPES:
        raise UsageError(f"kv_dtype is {kv_dtype!r}; give one of {', '.join(KV_DTYPES)}, or leave it out")
    if not isinstance(device, str | Device):
        raise UsageError(f"device is {device!r}; give a name (`rooftile devices` lists them) or a rooftile Device")
    chosen = (load_device(device) if isinstance(device, str) else device).one_of_package()
    choices = _capture_options(options)
    loaded, rebuild = _step(step, batch, seq, phase, choices.live)
    _check_combination(loaded, chosen, choices, options)
    trace = capture(loaded, chosen, choices, progress)
    if progress is not None:
        progress("reading the trace")
    again = _Recapture(loaded, rebuild, chosen, choices, progress)
    return read_trace(trace, chosen, rules=rules, options=choices, kv_dtype=kv_dtype, recapture=again)


class _Recapture:
    """Audits of the same step with options changed, each made once."""

    def __init__(
        self,
        step: Step,
        rebuild: Callable[[int], Step] | None,
        device: Device,
        options: CaptureOptions,
        progress: Progress | None,
    ) -> None:
        self._step, self._rebuild, self._device = step, rebuild, device
        self._options, self._progress = options, progress
        self._made: dict[tuple[tuple[str, object], ...], Trace | None] = {}

    def __call__(self, **changes: object) -> Trace | None:
        key = tuple(sorted(changes.items()))
        if key not in self._made:
            batch = changes.pop("batch", None)
            if self._progress is not None:
                self._progress("auditing again with " + ", ".join(f"{name} {value}" for name, value in key))
            self._made[key] = self._capture(batch, changes)
        return self._made[key]

    def _capture(self, batch: object, changes: dict[str, object]) -> Trace | None:
        """None for a change that this step refuses: a fixed batch, a model without blocks to checkpoint."""
        step = self._step
        try:
            if isinstance(batch, int):
                if self._rebuild is None:
                    return None
                step = self._rebuild(batch)
            return capture(step, self._device, replace(self._options, **changes), None)  # type: ignore[arg-type]
        except RooftileError:
            return None


def _capture_options(options: dict[str, Any]) -> CaptureOptions:
    known = CaptureOptions.__dataclass_fields__
    for name in options:
        if name not in known:
            raise UsageError(f"audit has no option {name!r}; it has {', '.join(known)}")
    return CaptureOptions(**options)


def _words(values: Iterable[str]) -> list[str]:
    """One word as good as a list of one."""
    return [values] if isinstance(values, str) else list(values)


def _step(
    step: Step | str, batch: int | None, seq: int | None, phase: StepPhase | None, live: bool
) -> tuple[Step, Callable[[int], Step] | None]:
    """The step, and how to build it for another batch where that is possible."""
    if isinstance(step, str):
        target = step
        loaded = load_target(target, batch=batch, seq=seq, phase=phase, live=live)
        if loaded.batch is None:
            return loaded, None
        return loaded, lambda other: load_target(target, batch=other, seq=seq, phase=phase, live=live)
    if not isinstance(step, Step):
        raise UsageError(f"audit was given a {type(step).__name__}; give a rooftile.Step or the name of a target")
    for name, value in (("batch", batch), ("seq", seq), ("phase", phase)):
        if value is not None:
            raise UsageError(f"{name}={value!r} is for a target by name; a Step has its own {name}")
    return step, None


def _check_combination(step: Step, device: Device, options: CaptureOptions, given: dict[str, Any]) -> None:
    """Choices that contradict each other, told before anything runs."""
    precision, _ = resolve_precision(step, options)
    dtype = _COMPUTES_IN.get(precision)
    if dtype is not None and not device.supports(dtype):
        has = ", ".join(name for name in device.inputs if name != "tf32")
        instead = (
            "; take --precision fp16-mixed (or fp16)" if dtype == "bfloat16" and device.supports("float16") else ""
        )
        raise UsageError(
            f"{device.name} has no {dtype}, which precision {precision} computes in; it has {has}{instead}"
        )
    if step.phase == "train":
        return
    for name, idle in (("optimizer", ("none", "as-is")), ("checkpoint", ("none",)), ("micro_batches", (1,))):
        if name in given and given[name] not in idle:
            raise UsageError(f"{name} {given[name]} is for training; leave it out in phase {step.phase}")
