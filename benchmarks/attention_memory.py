"""The section on memory: the peak of one attention call beyond its inputs and outputs, each in a process of its own.

    python benchmarks/attention_memory.py native bfloat16 forward 4 32768 2     # prints bytes, as the parent reads them

Half the length is measured too: what grows with L x L is four times as much at twice the length, O(B H L) twice.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from attention_rows import Row, Section, Setting
from torch import Tensor

from rooftile import attention
from rooftile._units import gb_gib
from rooftile.bench import threads_set

LENGTH, HEAD_DIM = 32768, 64
MATERIALISED = 8 << 30  # bytes of the scores of all heads, in the input's dtype
MOST = 1 / 32  # of them; an fp32 row of D for each query row is 1 / 256


def memory(setting: Setting) -> Section:
    """bf16 and fp32, forward and backward, at N 32768; torch's own beside ours."""
    length, materialised = LENGTH // setting.shorter, MATERIALISED // setting.shorter**2
    threads = setting.threads[-1]
    section = Section(
        f"memory beyond inputs and outputs at N {length}, where scores would be {gb_gib(materialised)}",
        "peak of the resident set beyond inputs and outputs / bytes of materialised scores",
    )
    for dtype, which in ((torch.bfloat16, "forward"), (torch.bfloat16, "backward"), (torch.float32, "forward")):
        heads = MATERIALISED // (LENGTH * LENGTH * dtype.itemsize)
        for kernel in (setting.kernel, "torch"):
            name = str(dtype).removeprefix("torch.")
            setting.say(f"memory of {kernel}, {name} {which}, two lengths")
            whole, half = (_in_a_process(kernel, name, which, heads, rows, threads) for rows in (length, length // 2))
            section.rows.append(
                Row(
                    f"{kernel}, 1 x {heads} x {length} x {HEAD_DIM} {which}", name, threads, ours=gb_gib(whole),
                    ratio=whole / materialised, minimum=MOST if kernel == setting.kernel else None, at_most=True,
                    note=f"{whole / (heads * length):,.0f} B a query row; at half the length {gb_gib(half)}",
                )
            )  # fmt: skip
    return section


def _in_a_process(kernel: str, dtype: str, which: str, heads: int, length: int, threads: int) -> int:
    command = [sys.executable, __file__, kernel, dtype, which, str(heads), str(length), str(threads)]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return int(answer.stdout)


# --- in the process of its own ---


def extra_bytes(kernel: str, dtype: torch.dtype, which: str, heads: int, length: int) -> int:
    """Bytes at the peak of one call that are neither its inputs nor its outputs."""

    def inputs(rows: int) -> list[Tensor]:
        return [torch.randn(1, heads, rows, HEAD_DIM).to(dtype).requires_grad_(which == "backward") for _ in range(3)]

    def attend(tensors: Sequence[Tensor]) -> Tensor:
        q, k, v = tensors
        out = F.scaled_dot_product_attention(q, k, v) if kernel == "torch" else attention(q, k, v, kernel=kernel)
        assert isinstance(out, Tensor)
        return out

    few = inputs(256)  # libraries are loaded, threads have their stacks
    warm = attend(few)
    if which == "backward":
        torch.autograd.grad(warm, few, torch.ones_like(warm))
    given = inputs(length)
    if which == "forward":
        return _extra(lambda: (attend(given),))
    out, dout = attend(given), torch.ones(1, heads, length, HEAD_DIM, dtype=dtype)
    return _extra(lambda: torch.autograd.grad(out, given, dout))


def _extra(run: Callable[[], Sequence[Tensor]]) -> int:
    Path("/proc/self/clear_refs").write_text("5")  # the peak of the resident set starts anew
    before = _status("VmRSS")
    outputs = sum(tensor.nbytes for tensor in run())
    return max(0, _status("VmHWM") - before - outputs)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    _, asked_kernel, asked_dtype, asked_pass, asked_heads, asked_length, asked_threads = sys.argv
    with threads_set(int(asked_threads)):
        sizes = int(asked_heads), int(asked_length)
        print(extra_bytes(asked_kernel, getattr(torch, asked_dtype), asked_pass, *sizes))
