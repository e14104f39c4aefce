"""The kernels under test, each in one line of one list, and a call of them with all its gradients."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import rooftile
from rooftile._attention import kernels, native
from rooftile._attention.call import Call
from rooftile._attention.library import PATHS
from rooftile._attention.native import Native

from .inputs import Case
from .oracle import Problem
from .tolerance import Judge, Results

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


class NativeOnPath(Native):
    """The native kernel on one of its code paths, and on a number of threads, whatever the machine would choose."""

    def __init__(self, path: str, threads: int | None = None) -> None:
        self.name, self._path, self._threads = f"native/{path}", PATHS.index(path), threads

    def forward(self, call: Call, out_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        return native.forward(call, self._path, self._threads, out_dtype == torch.float32)

    def backward(self, call: Call, out: Tensor, lse: Tensor, dout: Any, dlse: Any, wanted: list[bool]) -> Any:
        return native.backward(call, out, lse, dout, dlse, wanted, self._path, self._threads)


@contextlib.contextmanager
def registered(name: str) -> Iterator[None]:
    """A native path goes by a kernel's name ("native/avx2") within; the others have theirs anyway."""
    if not name.startswith("native/"):
        yield
        return
    kernels.KERNELS[name] = NativeOnPath(name.removeprefix("native/"))
    try:
        yield
    finally:
        del kernels.KERNELS[name]


def attend(kernel: str, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Any:
    """``rooftile.attention`` on one kernel."""
    return rooftile.attention(q, k, v, kernel=kernel, **arguments)


def _runs_here(path: str) -> bool:
    """Whether the processor, and the library as it was built, have the path (few rows take a pass of their own)."""
    q = torch.ones(1, 1, 70, 8, dtype=torch.bfloat16)
    try:
        with registered(f"native/{path}"):
            attend(f"native/{path}", q, q, q)
    except RuntimeError:
        return False
    return True


PLAIN_KERNELS = ("reference", "tiled")
NATIVE_KERNELS = tuple(f"native/{path}" for path in PATHS if _runs_here(path))
KERNELS = (*PLAIN_KERNELS, *NATIVE_KERNELS)
#: The AMX path with its tile instructions computed one by one: right on any processor, and slow on all.
SLOW_KERNEL = "native/amx-software"
EVERY_KERNEL = pytest.mark.parametrize("kernel", KERNELS, indirect=True)
EVERY_PLAIN_KERNEL = pytest.mark.parametrize("kernel", PLAIN_KERNELS, indirect=True)
EVERY_NATIVE_KERNEL = pytest.mark.parametrize("kernel", NATIVE_KERNELS, indirect=True)


def arguments(problem: Problem, mask: Any, generator: torch.Generator | None = None) -> dict[str, Any]:
    """What the call takes besides q, k and v."""
    return {
        "mask": mask,
        "bias": problem.bias,
        "scale": problem.scale,
        "softcap": problem.softcap,
        "sinks": problem.sinks,
        "dropout_p": problem.dropout_p,
        "generator": generator,
    }


@functools.lru_cache(maxsize=4)
def judge(case: Case) -> Judge:
    """The case's exact results and eager's, kept for the next kernel."""
    return Judge.of(case.problem(), case.wanted)


def complaints(kernel: str, case: Case) -> list[str]:
    """What is wrong with the kernel's results on the case, all gradients included."""
    judged = judge(case)
    return judged.complaints(run(kernel, judged.problem, case.build_mask(), case.wanted, case.generator()))


def run(
    kernel: str, problem: Problem, mask: Any, wanted: tuple[str, ...], generator: torch.Generator | None = None
) -> Results:
    """out, LSE and the gradients that ``wanted`` names, by one forward and one backward pass."""
    inputs = {"dq": problem.q, "dk": problem.k, "dv": problem.v, "dbias": problem.bias, "dsinks": problem.sinks}
    leaves = {name: inputs[name].detach().clone().requires_grad_() for name in wanted}  # type: ignore[union-attr]
    inputs |= leaves
    extra = arguments(problem, mask, generator) | {"bias": inputs["dbias"], "sinks": inputs["dsinks"]}
    out, lse = attend(kernel, inputs["dq"], inputs["dk"], inputs["dv"], return_lse=True, **extra)  # type: ignore[arg-type]
    results = {"out": out.detach(), "lse": lse.detach()}
    if wanted:
        outputs, weights = [out], [problem.dout]
        if problem.dlse is not None:
            outputs, weights = [out, lse], [problem.dout, problem.dlse]
        results |= dict(zip(wanted, torch.autograd.grad(outputs, list(leaves.values()), weights), strict=True))
    return results
