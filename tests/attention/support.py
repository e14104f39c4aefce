"""The kernels under test, each in one line of one list, and a call of them with all its gradients."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import rooftile

from .inputs import Case
from .oracle import Problem
from .tolerance import Judge, Results

PLAIN_KERNELS = ("reference", "tiled")
NATIVE_KERNELS: tuple[str, ...] = ()
KERNELS = (*PLAIN_KERNELS, *NATIVE_KERNELS)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def attend(kernel: str, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Any:
    """``rooftile.attention`` on one kernel; a native one is followed by its code path ("native/avx2")."""
    return rooftile.attention(q, k, v, kernel=kernel, **arguments)


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
