"""Speed of block quantisation and of scoring recipes, as ratios within one run.

    python benchmarks/lowp.py [--rows 8192] [--cols 4096] [--threads 2] [--repeats 15] [--json PATH]

Everything is timed in turn, round after round, on the same tensors, so that a busy machine slows all of it alike; the
ratios are of medians, and of the best rounds beside them. Bandwidth counts the bytes that a task must move: input and
codes for a quantisation, the tensor twice for a copy. A copy is timed into memory that is already there (``copy_``),
which is how quantisation into existing memory (``into``) is timed, and into fresh memory (``clone``), which is what
the public call makes. ``plain torch`` is the same quantisation written with torch operations and torch's own cast,
``without core`` this library's exact path where no compiler was found.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rooftile import lowp
from rooftile.formats import get_format, native_status
from rooftile.lowp import native
from rooftile.lowp.operators import quantize_matrix
from rooftile.lowp.scoring import DEFAULT_RECIPES

Task = Callable[[], object]
BLOCKS = {"1x128": (1, 128), "128x128": (128, 128)}
E4M3 = get_format("fp8_e4m3fn")
SLOW = ("plain torch", "without core", "six", "score")


def plain_torch(x: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Amax, scale, multiply, clamp, cast: what one writes without a kernel."""
    rows, cols = x.shape
    tiled = x.view(rows // block[0], block[0], cols // block[1], block[1]).float()
    amax = tiled.abs().amax(dim=(1, 3), keepdim=True).clamp(min=1e-30)
    codes = (tiled * (448.0 / amax)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return codes.view(rows, cols), (amax / 448.0).flatten()


def without_core(x: torch.Tensor, block: tuple[int, int]) -> object:
    kept, native.available = native.available, lambda _: False
    try:
        return quantize_matrix(x, *block, E4M3.name, "fp32", "exact")
    finally:
        native.available = kept


def into(x: torch.Tensor, block: tuple[int, int], codes: torch.Tensor, scales: torch.Tensor) -> Task:
    """The kernel alone, into memory that is already there."""
    plan, blocks = native._ScalePlan(0, E4M3.max_exponent, -126, E4M3.max), native._blocks(x, block)
    code, library, source = native._code_plan(E4M3), native._loaded(), native._SOURCES[x.dtype]
    return lambda: library.rooftile_quantize_blocks(
        x.data_ptr(), source, ctypes.byref(blocks), ctypes.byref(code), ctypes.byref(plan), codes.data_ptr(),
        scales.data_ptr(), torch.get_num_threads(), -1,
    )  # fmt: skip


def tasks(x: torch.Tensor) -> dict[str, tuple[int, Task]]:
    """Name -> bytes that must move, and the task."""
    found: dict[str, tuple[int, Task]] = {}
    codes = torch.zeros(x.shape, dtype=torch.uint8)
    for name, tensor in (("fp32", x), ("bf16", x.bfloat16())):
        target, size = torch.zeros_like(tensor), tensor.element_size()
        found[f"copy_ {name}"] = (2 * size * x.numel(), lambda t=target, s=tensor: t.copy_(s))
        found[f"clone {name}"] = (2 * size * x.numel(), tensor.clone)
        moved = (size + 1) * x.numel()
        for label, block in BLOCKS.items():
            scales = torch.zeros(-(-x.shape[0] // block[0]), -(-x.shape[1] // block[1]))
            found[f"into {label} {name}"] = (moved, into(tensor, block, codes, scales))
            arguments = (tensor, *block, E4M3.name, "fp32", "exact")
            found[f"quantize {label} {name}"] = (moved, lambda a=arguments: quantize_matrix(*a))
            found[f"plain torch {label} {name}"] = (moved, lambda t=tensor, b=block: plain_torch(t, b))
            found[f"without core {label} {name}"] = (moved, lambda t=tensor, b=block: without_core(t, b))
    small = x[: max(1, x.shape[0] // 4)].contiguous()
    found["score"] = (0, lambda: lowp.score(small))
    found["six passes"] = (0, lambda: [lowp.quantize(small, name).dequantize() for name in DEFAULT_RECIPES])
    return found


def goals() -> list[tuple[str, str, float]]:
    """Ours, its peer, and the least ratio asked for (of bandwidths where both have one, else of times)."""
    asked = []
    for dtype in ("fp32", "bf16"):
        for block in BLOCKS:
            asked.append((f"into {block} {dtype}", f"copy_ {dtype}", 0.4))
            asked.append((f"quantize {block} {dtype}", f"clone {dtype}", 0.4))
            asked.append((f"quantize {block} {dtype}", f"plain torch {block} {dtype}", 5.0))
    return [*asked, ("score", "six passes", 1.0)]


def measure(x: torch.Tensor, repeats: int, slow_repeats: int) -> dict[str, dict[str, float]]:
    """One warm-up round, then interleaved rounds; medians, quartiles and best in seconds."""
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
    rows = {}
    for name, seconds in times.items():
        low, median, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
        rows[name] = {
            "median_s": median, "best_s": min(seconds), "spread": (high - low) / median,
            "gb_per_s": listed[name][0] / median / 1e9, "repeats": len(seconds),
        }  # fmt: skip
    return rows


def ratio(rows: dict[str, dict[str, float]], ours: str, peer: str, key: str) -> float:
    """How many times the peer's speed: of bandwidths for a copy, of times for the same task."""
    by_time = rows[peer][key] / rows[ours][key]
    if not peer.startswith(("copy_", "clone")):
        return by_time
    bytes_ratio = (rows[ours]["gb_per_s"] * rows[ours]["median_s"]) / (rows[peer]["gb_per_s"] * rows[peer]["median_s"])
    return by_time * bytes_ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--cols", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--slow-repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    x = torch.randn(arguments.rows, arguments.cols, generator=torch.Generator().manual_seed(0))
    rows = measure(x, arguments.repeats, arguments.slow_repeats)
    verdicts = [
        {"ours": ours, "peer": peer, "asked": asked, "median": ratio(rows, ours, peer, "median_s"),
         "best": ratio(rows, ours, peer, "best_s")}
        for ours, peer, asked in goals()
    ]  # fmt: skip
    record: dict[str, Any] = {
        "machine": {"processor": platform.processor() or platform.machine(), "system": platform.platform()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "native": native_status().reason,
        "threads": torch.get_num_threads(),
        "target": f"{arguments.rows} x {arguments.cols} normal values; score and six passes on a quarter of them",
        "warm_up": 1,
        "statistic": "median and interquartile range, contenders interleaved",
        "seconds": rows,
        "ratios": verdicts,
    }
    report(record)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


def report(record: dict[str, Any]) -> None:
    print(f"{record['target']}; torch {record['versions']['torch']}, {record['threads']} threads, {record['native']}")
    for name, row in record["seconds"].items():
        rate = f"{row['gb_per_s']:7.2f} GB/s" if row["gb_per_s"] else " " * 12
        print(f"{name:26s} {1e3 * row['median_s']:9.2f} ms  {rate}  (spread {row['spread']:.0%}, {row['repeats']} x)")
    for row in record["ratios"]:
        mark = "ok" if row["median"] >= row["asked"] else "MISSED"
        print(
            f"{row['ours']:22s} / {row['peer']:24s} {row['median']:6.2f} (best rounds {row['best']:.2f}), "
            f"asked {row['asked']}: {mark}"
        )


if __name__ == "__main__":
    main()
