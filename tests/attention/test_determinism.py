"""The native kernel gives the same bits for any number of threads, every time it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from .inputs import Case
from .support import DTYPES, EVERY_DTYPE, EVERY_NATIVE_KERNEL, run
from .tolerance import Results

CASES = [
    Case(1, 1500, head_dim=64, heads=(8, 2), batch=1),  # decode: the keys are split
    Case(1, 1500, head_dim=64, heads=(8, 2), batch=3, mask="padding"),
    Case(300, 300, head_dim=64, heads=(1, 1), mask="causal"),  # fewer heads than threads: rows and keys are the tasks
    Case(130, 270, head_dim=80, heads=(6, 2), batch=2, mask="window", bias="hqk", sinks=True, dropout_p=0.2),
    Case(65, 200, head_dim=33, heads=(4, 4), batch=2, mask="dense", softcap=3.0),
]


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts torch's number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def results(kernel: str, case: Case) -> Results:
    return run(kernel, case.problem(), case.build_mask(), case.wanted, case.generator())


@EVERY_NATIVE_KERNEL
@pytest.mark.parametrize("number", range(len(CASES)))
@pytest.mark.usefixtures("threads")
def test_one_two_and_three_threads_give_the_same_bits(kernel: str, number: int):
    case = replace(CASES[number], dtype=DTYPES[number % len(DTYPES)])
    torch.set_num_threads(1)
    expected = results(kernel, case)
    for count in (2, 3):
        torch.set_num_threads(count)
        for name, value in results(kernel, case).items():
            assert torch.equal(value, expected[name]), (name, count)


@EVERY_NATIVE_KERNEL
@EVERY_DTYPE
@pytest.mark.usefixtures("threads")
def test_fifty_repeats_on_three_threads_give_the_same_bits(kernel: str, dtype: torch.dtype):
    torch.set_num_threads(3)
    case = Case(66, 70, head_dim=24, heads=(2, 1), batch=1, mask="causal", dtype=dtype)
    expected = results(kernel, case)
    for _ in range(50):
        for name, value in results(kernel, case).items():
            assert torch.equal(value, expected[name]), name


@EVERY_NATIVE_KERNEL
def test_a_row_alone_and_a_row_among_others_have_the_same_bits(kernel: str):
    """What a query gets does not depend on which other sequences and heads are in the call."""
    problem = Case(70, 90, head_dim=40, heads=(4, 2), batch=3).problem()
    whole = run(kernel, problem, None, ("dq", "dk", "dv"))
    for b in range(3):
        for h in range(2):
            alone = {
                "q": problem.q[b : b + 1, 2 * h : 2 * h + 2],
                "k": problem.k[b : b + 1, h : h + 1],
                "v": problem.v[b : b + 1, h : h + 1],
                "dout": problem.dout[b : b + 1, 2 * h : 2 * h + 2],
                "dlse": problem.dlse[b : b + 1, 2 * h : 2 * h + 2],  # type: ignore[index]
            }
            found = run(kernel, replace(problem, **alone), None, ("dq", "dk", "dv"))
            for name, value in found.items():
                heads = slice(h, h + 1) if name in ("dk", "dv") else slice(2 * h, 2 * h + 2)
                assert torch.equal(value, whole[name][b : b + 1, heads]), name
