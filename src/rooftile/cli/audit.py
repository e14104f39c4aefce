"""``rooftile audit TARGET --device NAME``: what a step computes, moves and needs, and what bounds it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, cast

import typer

from rooftile._collector import collector_paused
from rooftile.cli.options import DeviceFileOption, DeviceOption, JsonOption, chosen_device, complete_target
from rooftile.cli.output import (
    STDOUT,
    check_distinct,
    check_writable,
    progress,
    typed_again,
    write_file,
)
from rooftile.errors import UsageError

if TYPE_CHECKING:
    from rooftile.capture.step import StepPhase
    from rooftile.report import Report

__all__ = ["register"]

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="A built-in model (gpt2, llama-3.1-8b, ...), file.py:function or package.module:function that returns a "
        "rooftile.Step, or a Hugging Face config.json.",
        autocompletion=complete_target,
    ),
]
Phase = Annotated[str | None, typer.Option(metavar="PHASE", help="train, prefill or decode.")]
Batch = Annotated[int | None, typer.Option(metavar="N", help="Sequences per micro-batch.")]
Seq = Annotated[int | None, typer.Option(metavar="N", help="Tokens per sequence; for decode, those in the cache.")]
Precision = Annotated[
    str | None,
    typer.Option(
        metavar="POLICY",
        help="fp32, bf16, fp16, bf16-mixed, fp16-mixed, bf16-master, fp16-master, fp8-block, fp8-tensor or as-is. "
        "Default for FP32 models: bf16-mixed in training, bf16 in inference.",
    ),
]
Optimizer = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="adamw, adamw-foreach, adamw-fused, adamw-loop, sgd, none or as-is (the step's own)."
    ),
]
Checkpoint = Annotated[str | None, typer.Option(metavar="WHAT", help="none or blocks.")]
MicroBatches = Annotated[int | None, typer.Option("--micro-batches", metavar="N", help="Before each update.")]
Attention = Annotated[str | None, typer.Option(metavar="PATH", help="auto, tiled or materialized.")]
KvDtype = Annotated[
    str | None, typer.Option("--kv-dtype", metavar="DTYPE", help="fp32, fp16, bf16, fp8 or int8; default: as computed.")
]
Select = Annotated[list[str] | None, typer.Option(metavar="CODE", help="Only these rules: codes or families.")]
Ignore = Annotated[list[str] | None, typer.Option(metavar="CODE", help="Leave these rules out.")]
FailOn = Annotated[
    list[str] | None,
    typer.Option("--fail-on", metavar="CODE", help="Exit with 1 on such a finding: a code, a family or any."),
]
Live = Annotated[bool, typer.Option("--live", help="Run on real CPU tensors; for models that need values.")]
SaveTrace = Annotated[str | None, typer.Option("--save-trace", metavar="PATH", help="Write the captured trace.")]


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command(short_help="Read a training or inference step on a device.")(audit)


def audit(
    ctx: typer.Context,
    target: Target,
    device: DeviceOption = None,
    device_file: DeviceFileOption = None,
    phase: Phase = None,
    batch: Batch = None,
    seq: Seq = None,
    precision: Precision = None,
    optimizer: Optimizer = None,
    checkpoint: Checkpoint = None,
    micro_batches: MicroBatches = None,
    attention: Attention = None,
    kv_dtype: KvDtype = None,
    live: Live = False,
    select: Select = None,
    ignore: Ignore = None,
    fail_on: FailOn = None,
    json: JsonOption = None,
    save_trace: SaveTrace = None,
) -> int:
    """Read a step on a device: what it computes, what it moves, what bounds it, how much memory it takes and when.

    No accelerator, no weights and no data are needed.
    """
    check_writable(json)
    if save_trace == STDOUT:
        raise UsageError("--save-trace - is no file; give the path of a file, a trace is compressed")
    check_writable(save_trace, "--save-trace")
    check_distinct(json=json, save_trace=save_trace)
    failing = _words(fail_on)
    _check_rules(_words(select), _words(ignore), failing)
    chosen = chosen_device(device, device_file)
    options = {
        name: value
        for name, value in (
            ("precision", precision), ("optimizer", optimizer), ("checkpoint", checkpoint),
            ("micro_batches", micro_batches), ("attention", attention), ("live", live or None),
        )
        if value is not None
    }  # fmt: skip
    with progress() as say, collector_paused():  # torch is large: a tenth of a short command's time
        say("loading torch")
        from rooftile._audit import audit as run_audit

        report = run_audit(
            target, chosen, batch=batch, seq=seq, phase=cast("StepPhase | None", phase), kv_dtype=kv_dtype,
            select=_words(select), ignore=_words(ignore), progress=say, **options,
        )  # fmt: skip
    _write(ctx, report, json, save_trace)
    return int(_fails(report, failing))


def _words(values: Sequence[str] | None) -> list[str]:
    """Repeated options and comma-separated lists alike."""
    return [word.strip() for value in values or () for word in value.split(",") if word.strip()]


def _check_rules(select: Sequence[str], ignore: Sequence[str], failing: Sequence[str]) -> None:
    """Raise UsageError, before the work, for an unknown word and for a ``--fail-on`` that could never come true."""
    from rooftile.rules import select_rules

    checked = {rule.code for rule in select_rules(select, ignore)}
    for word in failing:
        if word.lower() != "any" and checked.isdisjoint(rule.code for rule in select_rules([word])):
            raise UsageError(f"--fail-on {word} can never fail: --select and --ignore leave no such rule to be checked")


def _fails(report: Report, words: Sequence[str]) -> bool:
    from rooftile.rules import matches

    return any(matches(finding.code, word) for finding in report.findings for word in words)


def _write(ctx: typer.Context, report: Report, json: str | None, save_trace: str | None) -> None:
    if json is not None:
        write_file(json, report.to_json() + "\n")
    if save_trace is not None and report.trace is not None:
        from rooftile.capture.trace_file import save_trace as write_trace

        write_trace(report.trace, save_trace)
    if json != STDOUT:
        from rooftile.report.terminal import console, render

        saved = shlex.join(["rooftile", "show", json or ""])
        following = saved if json else typed_again(ctx, json="report.json")
        render(report, console(), next_command=following)
