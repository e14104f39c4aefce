"""Run one step under the recorder and hand over its Trace."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rooftile.capture.checkpointing import checkpoint_blocks
from rooftile.capture.compiler import compiler_is_imported, without_compiler
from rooftile.capture.failures import capture_error, is_refusal
from rooftile.capture.materialize import (
    compute_dtype,
    copy_step,
    resolve_precision,
    scale_linears,
)
from rooftile.capture.options import CaptureOptions
from rooftile.capture.policy.optimizers import build_optimizer, initialise_state
from rooftile.capture.runner import LOSS_SCALE, Progress, Runner
from rooftile.capture.step import Step
from rooftile.capture.trace import Op, Trace
from rooftile.capture.visible import assumptions, exact_attention_calls
from rooftile.errors import UsageError
from rooftile.lowp.masters import MasterWeights

if TYPE_CHECKING:
    from rooftile.devices import Device

__all__ = ["capture"]


def capture(step: Step, device: Device, options: CaptureOptions, progress: Progress | None = None) -> Trace:
    """Run ``step`` once as ``device`` would and record it.

    On meta tensors first, on fake CPU tensors where the model refuses meta, on real CPU tensors with ``options.live``.
    The optimizer's state is initialised before the recorded step, as it is from the second step of a training on.

    Raises
    ------
    UsageError
        A step and options that contradict each other.
    CaptureError
        The model can't run without data; the sentence names the user's file and line.
    """
    say = progress or (lambda _: None)
    if isinstance(step.model, torch.jit.ScriptModule):
        raise UsageError(
            "the model is a ScriptModule, which can't be copied; give the nn.Module that it was made from."
        )
    wrapped = getattr(step.model, "_orig_mod", None)
    if isinstance(wrapped, nn.Module):  # torch.compile's wrapper: what it will fuse is unknown, what it runs is not
        step = replace(step, model=wrapped)
    with _LOCK, _own_contexts():
        if not options.live:
            try:
                return _undisturbed(step, device, options, say, "meta")
            except Exception as error:
                if is_refusal(error):
                    raise
                say(f"meta tensors refused ({_first_line(error)}); again on fake CPU tensors")
        try:
            return _undisturbed(step, device, options, say, "live" if options.live else "fake")
        except Exception as error:
            if is_refusal(error):
                raise
            raise capture_error(error) from error


#: A capture replaces operators for the whole process while it runs; captures of several threads take turns.
_LOCK = threading.RLock()


@contextlib.contextmanager
def _own_contexts() -> Iterator[None]:
    """Gradients on, autocast and inference mode off, whatever context the caller is in: the Step says what it wants."""
    # Not by an autocast context of our own: the weight cache is cleared when the *outermost* one exits.
    enabled = {device: torch.is_autocast_enabled(device) for device in ("cpu", "cuda")}
    try:
        for device in enabled:
            torch.set_autocast_enabled(device, False)
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for device, was in enabled.items():
            torch.set_autocast_enabled(device, was)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


@contextlib.contextmanager
def _tensors(mode: str) -> Iterator[str]:
    """The device that tensors are put on; for ``fake`` with the fake mode active."""
    if mode != "fake":
        yield "cpu" if mode == "live" else "meta"
        return
    from torch._subclasses.fake_tensor import FakeTensorMode

    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)  # it logs a traceback for what we turn into one sentence
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield "cpu"
    finally:
        log.setLevel(level)


def _undisturbed(step: Step, device: Device, options: CaptureOptions, say: Progress, mode: str) -> Trace:
    """One capture; a second one where the first made torch import its compiler in the middle of the step.

    The exceptions that this import handles keep the frames that they passed through, the model's among them, and so its
    tensors would seem to live longer than they do.
    """

    def attempt() -> Trace:
        return _attempt(step, device, options, say, mode)

    clean = compiler_is_imported()
    trace = without_compiler(attempt) if mode == "meta" else attempt()
    if not clean and compiler_is_imported():
        gc.collect()
        trace = attempt()
    return trace


def _attempt(step: Step, device: Device, options: CaptureOptions, say: Progress, mode: str) -> Trace:
    notes: list[str] = []
    precision, note = resolve_precision(step, options)
    if note:
        notes.append(note)
    seconds: dict[str, float] = {}
    clock = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        seconds[name], clock = now - clock, now

    with contextlib.ExitStack() as stack:
        target = stack.enter_context(_tensors(mode))
        stack.enter_context(warnings.catch_warnings())
        # Torch warns about tensors without data and about kernels replaced on purpose; neither is the user's doing.
        warnings.simplefilter("ignore")
        say(f"preparing {step.name or type(step.model).__name__} on {mode} tensors")
        own = copy_step(step, precision, target)
        own.model.train(own.model.training if own.phase == "train" else False)
        scaled = scale_linears(own.model, precision)
        if scaled:
            notes.append(scaled)
        if options.checkpoint == "blocks" and own.phase == "train":
            notes.append(f"checkpointing every block of {checkpoint_blocks(own.model)!r}")
        masters = precision.endswith("-master")
        optimizer, optimizer_name = build_optimizer(own, options.optimizer, device.device_class, masters)
        lap("prepare")
        if optimizer is not None:
            say("initialising the optimizer's state")
            _initialise(optimizer, own.model)
        lap("optimizer_state")
        runner = Runner(own, device, options, precision, optimizer, say)
        ops, storages = runner.run()
        lap("step")
    settings = _settings(step, own, device, options, precision, optimizer_name, mode, runner)
    exact = exact_attention_calls(ops)
    settings["attention_decision"] += exact
    if exact and options.attention != "auto":
        notes.append(
            f"--attention {options.attention} is about torch's own attention: what calls rooftile.attention keeps the "
            "kernel that the model names"
        )
    assumed = assumptions(ops)
    if assumed:
        notes.append(assumed)
    settings["seconds"] = seconds
    if mode != "live" and any(
        t.layout != "strided" for call in {id(o.call): o.call for o in ops}.values() for t in call.inputs
    ):
        notes.append(
            "sparse tensors keep no values without data: their products and bytes are unknown; --live counts them"
        )
    if any(e["device_type"] == "cpu" for e in runner.entered) and device.device_class != "cpu":
        notes.append(
            "the model enters torch.autocast('cpu'): taken as the target's, for tensors here are on the CPU or meta"
        )
    if mode == "fake":
        notes.append("captured on fake CPU tensors: the model does not run on meta tensors")
    return Trace(ops, storages, settings, tuple(notes))


def _initialise(optimizer: torch.optim.Optimizer | MasterWeights, model: nn.Module) -> None:
    try:
        initialise_state(optimizer, model)
    except TypeError as error:
        raise UsageError(
            f"the optimizer {type(optimizer).__name__} can't take a step by itself ({error}); "
            "give one whose step() needs no closure, or --optimizer none."
        ) from error


def _settings(
    step: Step, own: Step, device: Device, options: CaptureOptions, precision: str, optimizer: str, mode: str,
    runner: Runner,
) -> dict[str, Any]:  # fmt: skip
    parameters = list(own.model.parameters())
    embedding = {
        id(m.weight): m.weight.numel() for m in own.model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)
    }
    policy = runner.autocast_policy
    autocast = None
    if runner.autocast is not None:
        autocast = {
            "policy": policy.name,
            "dtype": str(runner.autocast).removeprefix("torch."),
            "source": policy.source,
            "release": policy.release,
        }
    return {
        "target": step.name or type(step.model).__name__,
        "phase": step.phase,
        "batch": step.batch,
        "seq": step.seq,
        **options.as_dict(),
        "precision": precision,
        "precision_evidence": "assumed" if options.precision is None else "declared",
        "optimizer": optimizer,
        "compute_dtype": str(compute_dtype(precision, own.model)).removeprefix("torch."),
        "device": device.name,
        "device_class": device.device_class,
        "mode": mode,
        "params_count": sum(p.numel() for p in parameters),
        "params_trainable": sum(p.numel() for p in parameters if p.requires_grad),
        "params_by_dtype": _by_dtype(parameters),
        "embedding_params": sum(embedding.values()),
        "config": dict(step.config),
        "attention_decision": [
            {"kernel": d.kernel, "materialized": d.materialized, "reason": d.reason, "count": n}
            for d, n in runner.policy.decisions.items()
        ],
        "autocast": autocast,
        "autocast_entered": runner.entered,
        "loss_scale": LOSS_SCALE if precision == "fp16-mixed" and step.phase == "train" else None,
        "torch": torch.__version__,
    }


def _by_dtype(parameters: list[nn.Parameter]) -> dict[str, int]:
    out: dict[str, int] = {}
    for p in parameters:
        name = str(p.dtype).removeprefix("torch.")
        out[name] = out.get(name, 0) + p.numel()
    return out


def _has_sparse(ops: tuple[Op, ...]) -> bool:
    calls = {id(op.call): op.call for op in ops}
    return any(tensor.layout != "strided" for call in calls.values() for tensor in call.inputs)
