"""Speed of the exponent histogram and of rounding, as ratios within one run.

    python benchmarks/formats.py [--elements 67108864] [--threads 2] [--repeats 9] [--json PATH]

Everything is timed in turn, round after round, on the same fp32 tensor, so that a busy machine slows all of it alike;
the ratios are of medians. Bandwidth counts the bytes that the task must move: the tensor once for a histogram or a
sum, the tensor and the result once for a copy or a rounding. Two copies are timed: into memory that is already there,
and into fresh memory (``clone``), which is what every rounding here writes to. gfloat and ml_dtypes run where they
are installed, on one thread, which is all they use; a name missing from the table is not installed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rooftile.formats import FORMATS, exponent_histogram, native_status, round_to
from rooftile.formats.carrier import FP32
from rooftile.formats.rounding import round_with_torch

Task = Callable[[], object]

#: Slow peers run in a few rounds only.
SLOW = ("gfloat", "ml_dtypes", "torch cast", "plain torch")


def tasks(x: torch.Tensor) -> dict[str, tuple[int, Task]]:
    """Name -> bytes that must move, and the task."""
    target = torch.empty_like(x)
    once, twice = x.numel() * 4, x.numel() * 8
    found: dict[str, tuple[int, Task]] = {
        "torch.sum": (once, x.sum),
        "copy_": (twice, lambda: target.copy_(x)),
        "clone": (twice, x.clone),
        "exponent_histogram": (once, lambda: exponent_histogram(x)),
    }
    for name, dtype in (("fp8_e4m3fn", torch.float8_e4m3fn), ("bf16", torch.bfloat16)):
        found[f"round_to {name}"] = (twice, lambda name=name: round_to(x, name))
        found[f"torch cast {name}"] = (twice, lambda dtype=dtype: x.to(dtype).to(torch.float32))
    fmt = FORMATS["fp8_e4m3fn"]
    found["plain torch fp8_e4m3fn"] = (
        twice,
        lambda: round_with_torch(x, fmt, FP32, "nearest-even", "saturate", "keep"),
    )
    return found | _optional_peers(x)


def _optional_peers(x: torch.Tensor) -> dict[str, tuple[int, Task]]:
    array, twice = x.numpy(), x.numel() * 8
    found: dict[str, tuple[int, Task]] = {}
    try:
        import ml_dtypes
    except ImportError:
        pass
    else:
        for name in ("float8_e4m3fn", "bfloat16"):
            dtype = getattr(ml_dtypes, name)
            ours = "fp8_e4m3fn" if name.startswith("float8") else "bf16"
            found[f"ml_dtypes {ours}"] = (twice, lambda dtype=dtype: array.astype(dtype).astype(np.float32))
    try:
        import gfloat
        from gfloat.formats import format_info_bfloat16, format_info_ocp_e4m3
    except ImportError:
        pass
    else:
        for ours, info in (("fp8_e4m3fn", format_info_ocp_e4m3), ("bf16", format_info_bfloat16)):
            found[f"gfloat {ours}"] = (twice, lambda info=info: gfloat.round_ndarray(info, array, sat=True))
    return found


def measure(x: torch.Tensor, repeats: int, slow_repeats: int) -> dict[str, dict[str, float]]:
    """One warm-up round, then ``repeats`` interleaved rounds; medians and quartiles in seconds."""
    times: dict[str, list[float]] = {}
    listed = tasks(x)
    for round_number in range(repeats + 1):
        for name, (_, task) in listed.items():
            if name.startswith(SLOW) and round_number > slow_repeats:
                continue
            start = time.perf_counter()
            task()
            if round_number:
                times.setdefault(name, []).append(time.perf_counter() - start)
    return {name: _summary(seconds, listed[name][0]) for name, seconds in times.items()}


def _summary(seconds: list[float], nbytes: int) -> dict[str, float]:
    low, median, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
    return {
        "median_s": median,
        "spread": (high - low) / median,
        "gb_per_s": nbytes / median / 1e9,
        "best_gb_per_s": nbytes / min(seconds) / 1e9,
        "repeats": len(seconds),
    }


#: What is asked for: ours, its peer, and the least ratio of speeds.
GOALS = (
    ("exponent_histogram", "torch.sum", 0.5),
    ("round_to fp8_e4m3fn", "copy_", 0.4),
    ("round_to bf16", "copy_", 0.4),
    ("round_to fp8_e4m3fn", "clone", 0.4),
    ("round_to bf16", "clone", 0.4),
    ("round_to fp8_e4m3fn", "torch cast fp8_e4m3fn", 1.0),
    ("round_to bf16", "torch cast bf16", 1.0),
    ("round_to fp8_e4m3fn", "ml_dtypes fp8_e4m3fn", 1.0),
    ("round_to bf16", "ml_dtypes bf16", 1.0),
    ("round_to fp8_e4m3fn", "gfloat fp8_e4m3fn", 5.0),
    ("round_to bf16", "gfloat bf16", 5.0),
)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def conditions(arguments: argparse.Namespace) -> dict[str, Any]:
    """The measurement record."""
    return {
        "machine": _cpu(),
        "system": platform.platform(),
        "threads": torch.get_num_threads(),
        "native": native_status().reason,
        "elements": arguments.elements,
        "dtype": "float32, standard normal",
        "warm_up": 1,
        "repeats": arguments.repeats,
        "slow_repeats": arguments.slow_repeats,
        "statistic": "median of interleaved rounds; spread is the interquartile range over the median",
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "numpy", "ml_dtypes", "gfloat")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1 << 26)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--slow-repeats", type=int, default=3)
    parser.add_argument("--json", metavar="PATH")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    x = torch.randn(arguments.elements, generator=torch.Generator().manual_seed(0))
    record = conditions(arguments)
    for name, value in record.items():
        print(f"{name:<14}{value}")
    results = measure(x, arguments.repeats, arguments.slow_repeats)
    print(f"\n{'task':<26}{'median ms':>11}{'spread':>9}{'GB/s':>8}{'best':>8}")
    for name, r in results.items():
        print(
            f"{name:<26}{r['median_s'] * 1e3:>11.1f}{r['spread']:>9.0%}{r['gb_per_s']:>8.2f}{r['best_gb_per_s']:>8.2f}"
        )
    print(f"\n{'ours':<22}{'peer':<24}{'ratio':>8}{'asked':>8}")
    ratios = []
    for ours, peer, least in GOALS:
        if peer not in results:
            print(f"{ours:<22}{peer:<24}{'absent':>8}{least:>8}")
            continue
        ratio = results[ours]["gb_per_s"] / results[peer]["gb_per_s"]
        ratios.append({"ours": ours, "peer": peer, "ratio": ratio, "asked": least})
        print(f"{ours:<22}{peer:<24}{ratio:>8.2f}{least:>8}{'' if ratio >= least else '  below'}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"record": record, "results": results, "ratios": ratios}, indent=2))


if __name__ == "__main__":
    main()
