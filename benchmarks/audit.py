"""What an audit costs, against torch's own counters around the same step on the same meta tensors.

    python benchmarks/audit.py [--repeats 7] [--json PATH]

Ours is one captured step of Llama 3.1 8B (training, batch 1, seq 4096, AdamW) with costs, ledgers, roofline and every
rule that needs no second capture. The peers run one step of the same model under ``FlopCounterMode`` (FLOPs only) and
under ``MemTracker`` (memory only). All are run in turn in one process; model build, the step that initialises the
optimizer's state and re-audits are timed apart. The peers' step has no autocast (torch does none on meta tensors), so
ours is given twice: in FP32, the same operators, and with the default bf16-mixed policy, which is more of them.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode

import rooftile
from rooftile._audit import read_trace
from rooftile.capture import CaptureOptions, load_target
from rooftile.capture.run import capture

DEVICE = "h100-sxm"
MODEL = "llama-3.1-8b"


def ours(target: str, precision: str) -> dict[str, float]:
    """Seconds of one audit by part; ``step`` is what the peers do: the step itself and everything read from it."""
    device = rooftile.devices.load(DEVICE)
    started = time.perf_counter()
    step = load_target(target)
    built = time.perf_counter()
    trace = capture(step, device, CaptureOptions(precision=precision))
    captured = time.perf_counter()
    read_trace(trace, device)
    done = time.perf_counter()
    parts = trace.settings["seconds"]
    return {
        "build": built - started + parts["prepare"],
        "optimizer state": parts["optimizer_state"],
        "capture": captured - built - parts["prepare"] - parts["optimizer_state"],
        "reading": done - captured,
        "step": done - built - parts["prepare"] - parts["optimizer_state"],
        "total": done - started,
    }


def plain_step() -> tuple[Callable[[], None], torch.nn.Module, torch.optim.Optimizer]:
    """The same step without rooftile, its optimizer's state initialised."""
    step = load_target(MODEL)
    optimizer = torch.optim.AdamW(step.model.parameters(), lr=1e-3, foreach=True)

    def run() -> None:
        assert isinstance(step.inputs, dict)
        assert step.loss is not None
        step.loss(step.model(**step.inputs)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    run()
    return run, step.model, optimizer


def under_flop_counter() -> float:
    run, _, _ = plain_step()
    started = time.perf_counter()
    with FlopCounterMode(display=False):
        run()
    return time.perf_counter() - started


def under_mem_tracker() -> float:
    run, model, optimizer = plain_step()
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    started = time.perf_counter()
    with tracker:
        run()
    return time.perf_counter() - started


def bare() -> float:
    run, _, _ = plain_step()
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def whole_command() -> float:
    """The command in a process of its own: interpreter, imports, capture, re-audits for findings, report."""
    command = [sys.executable, "-m", "rooftile.cli", "audit", MODEL, "--device", DEVICE]
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


def spread(values: list[float]) -> dict[str, float]:
    quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {"median_s": statistics.median(values), "iqr_s": quartiles[2] - quartiles[0], "repeats": len(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    contenders: dict[str, Callable[[], float]] = {
        "bare step": bare,
        "FlopCounterMode": under_flop_counter,
        "MemTracker": under_mem_tracker,
        "rooftile, fp32": lambda: ours(MODEL, "fp32")["step"],
        "rooftile, bf16-mixed": lambda: ours(MODEL, "bf16-mixed")["step"],
    }
    for run in contenders.values():  # warm-up: imports, caches
        run()
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(arguments.repeats):
        for name, run in contenders.items():
            samples[name].append(run())
    small = [ours(MODEL, "bf16-mixed") for _ in range(3)]
    large = [ours("llama-3.1-405b", "bf16-mixed") for _ in range(3)]
    commands = [whole_command() for _ in range(3)]
    rows = {name: spread(values) for name, values in samples.items()}
    parts = {part: statistics.median(run[part] for run in small) for part in small[0]}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    record: dict[str, Any] = {
        "machine": {"processor": platform.processor() or platform.machine(), "system": platform.platform()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "threads": torch.get_num_threads(),
        "target": f"{MODEL} train, batch 1, seq 4096, AdamW foreach, meta tensors, device {DEVICE}",
        "warm_up": 1,
        "statistic": "median and interquartile range, contenders interleaved",
        "seconds": rows,
        "parts_bf16_mixed_s": parts,
        "ratio_405b_to_8b": statistics.median(r["step"] for r in large) / parts["step"],
        "whole_command_s": statistics.median(commands),
        "peak_process_bytes": peak,
    }
    report(record)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


def report(record: dict[str, Any]) -> None:
    print(record["target"])
    print(f"torch {record['versions']['torch']}, {record['threads']} threads, {record['machine']['processor']}")
    flop, tracker = (record["seconds"][name]["median_s"] for name in ("FlopCounterMode", "MemTracker"))
    for name, row in record["seconds"].items():
        ratios = f"{row['median_s'] / flop:6.2f} x FlopCounterMode  {row['median_s'] / tracker:6.2f} x MemTracker"
        print(f"{name:24s} {row['median_s']:7.3f} s  (IQR {row['iqr_s']:.3f})  {ratios}")
    for part, seconds in record["parts_bf16_mixed_s"].items():
        print(f"  {part:22s} {seconds:7.3f} s")
    step, whole = record["parts_bf16_mixed_s"]["step"], record["whole_command_s"]
    print(f"whole command, process and re-audit included: {whole:.3f} s, {whole / step:.2f} x the one captured step")
    print(f"405B / 8B: {record['ratio_405b_to_8b']:.2f}   (126 layers / 32 layers: {126 / 32:.2f})")
    print(f"peak process memory, 405B included: {record['peak_process_bytes'] / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
