"""Several Python threads at once, a forked child, and an exception elsewhere: the native kernel's own business."""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from .inputs import Case
from .support import DTYPES, EVERY_KERNEL, NATIVE_KERNELS, run


@EVERY_KERNEL
def test_calls_from_several_python_threads_at_once_do_not_meet(kernel: str):
    """Each has its own inputs, dtype and mask; each gets what it gets alone."""
    cases = [
        Case(40 + 7 * n, 90 + 3 * n, head_dim=16 + n, dtype=DTYPES[n % 3], mask="causal" if n % 2 else None, seed=n)
        for n in range(6)
    ]
    problems = [case.problem() for case in cases]

    def work(n: int) -> list[torch.Tensor]:
        found = run(kernel, problems[n], cases[n].build_mask(), cases[n].wanted)
        return list(found.values())

    expected = [work(n) for n in range(6)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for n, values in zip([*range(6)] * 5, pool.map(work, [*range(6)] * 5), strict=True):
            for value, wanted in zip(values, expected[n], strict=True):
                assert torch.equal(value, wanted)


FORKED = """
    import os, sys
    import torch
    sys.path[:0] = [{tests!r}]
    from attention.inputs import Case
    from attention.support import registered, run

    # torch's own operators hang in the child as soon as they share their work, which they do from 32,768 elements on.
    CASES = (
        Case(70, 120, heads=(4, 2), mask="causal", dtype=torch.bfloat16),
        Case(1, 900, head_dim=16, heads=(8, 2), dtype=torch.float16),
    )

    def digest(kernel):
        with registered(kernel):
            found = []
            for case in CASES:
                found += run(kernel, case.problem(), case.build_mask(), case.wanted).values()
        return b"".join(x.contiguous().view(torch.uint8).numpy().tobytes() for x in found)

    kernels = sys.argv[1:]
    torch.set_num_threads(2)
    expected = [digest(kernel) for kernel in kernels]  # the parent's worker threads are running from here on
    child = os.fork()
    if child == 0:
        ok = torch.get_num_threads() == 2 and [digest(kernel) for kernel in kernels] == expected
        os._exit(0 if ok else 7)
    _, status = os.waitpid(child, 0)
    again = [digest(kernel) for kernel in kernels] == expected
    sys.exit(os.waitstatus_to_exitcode(status) if again else 8)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_child_of_a_parent_with_two_threads_gets_the_same_bits():
    """The child inherits no worker thread; its native calls run on the one it has, and neither hang nor differ."""
    script = textwrap.dedent(FORKED).format(tests=str(Path(__file__).resolve().parents[1]))
    done = subprocess.run([sys.executable, "-c", script, *NATIVE_KERNELS], timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
