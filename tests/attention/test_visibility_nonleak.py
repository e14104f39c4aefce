"""Nothing that a row does not see reaches it, forward or backward, whatever it holds; what it does see, does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rooftile import masks

from .inputs import Case
from .oracle import Problem, as_tensor, exact
from .support import DTYPES, EVERY_DTYPE, EVERY_KERNEL, EVERY_NATIVE_KERNEL, attend, complaints, run
from .tolerance import Judge
from .visibility import KINDS

# One element, of NaN or Inf, of one input: of a key that many rows do not see, of a row that does not see many keys.
POISONS = {
    "nan in k": ("k", (0, 0, 70, 3), torch.nan),
    "nan in v": ("v", (0, 1, 70, 3), torch.nan),
    "nan in q": ("q", (0, 2, 20, 3), torch.nan),
    "nan in dout": ("dout", (0, 2, 20, 3), torch.nan),
    "inf in k": ("k", (0, 0, 70, 3), torch.inf),
    "inf in v": ("v", (0, 1, 70, 3), -torch.inf),
    "inf in q": ("q", (0, 2, 20, 3), -torch.inf),
    "inf in dout": ("dout", (0, 2, 20, 3), torch.inf),
}


def poisoned(problem: Problem, name: str, at: tuple[int, ...], value: float) -> Problem:
    x = getattr(problem, name).clone()
    x[at] = value
    return replace(problem, **{name: x})


@EVERY_KERNEL
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("mask", ["causal", "window", "documents", "dense", "causal & padding-left"])
def test_one_bad_number_changes_what_sees_it_and_nothing_else(kernel: str, mask: str, poison: str):
    """Which results a bad number may change is what the definition says (the oracle, poisoned in the same way). All
    others keep their bits, and no result that the definition makes NaN or Inf comes out as a finite number.
    """
    dtype = DTYPES[len(mask + poison) % len(DTYPES)]
    case = Case(110, 110, head_dim=16, heads=(4, 2), batch=2, mask=mask, dtype=dtype)
    problem = case.problem()
    bad = poisoned(problem, *POISONS[poison])
    before, after = (run(kernel, p, case.build_mask(), case.wanted) for p in (problem, bad))
    clean, spoiled = exact(problem), exact(bad)
    for name in before:
        same = torch.from_numpy(np.isclose(clean.value[name], spoiled.value[name], rtol=1e-9, atol=1e-12))
        lost = ~torch.from_numpy(np.isfinite(spoiled.value[name])) & ~same
        assert torch.equal(before[name][same], after[name][same]), f"{name} of what does not see it"
        assert not after[name][lost].isfinite().any(), f"{name}: a finite number where there is none"
        assert same.any()
    reached = {name for name in before if not np.isfinite(spoiled.value[name]).all()} - {"lse"}
    assert reached >= {"dk"}, reached  # the poison is visible to someone


@EVERY_KERNEL
@EVERY_DTYPE
@pytest.mark.parametrize("mask", ["padding", "padding-left", "window-top-left", "dense"])
def test_keys_that_no_row_sees_may_hold_anything(kernel: str, dtype: torch.dtype, mask: str):
    """The memory beyond a sequence's length is somebody else's. Its gradients are zeros."""
    case = Case(37, 90, head_dim=20, heads=(4, 2), batch=3, mask=mask, dtype=dtype)
    problem = case.problem()
    seen = torch.from_numpy(
        np.stack([KINDS[mask].predicate(case.sizes)(b, 0, *np.ogrid[:37, :90]).any(0) for b in range(3)])
    )
    hidden = ~seen[:, None, :, None]
    if mask == "dense":
        hidden = torch.zeros_like(hidden)
        hidden[:, :, 11::7] = True
        visible = masks.dense(KINDS[mask].build(case.sizes).materialize(37, 90) & ~hidden.transpose(2, 3))
    else:
        visible = case.build_mask()
    assert hidden.any()
    clean = run(kernel, problem, visible, case.wanted)
    for garbage in (torch.nan, torch.inf, -torch.inf, torch.finfo(dtype).max):
        k, v = (x.masked_fill(hidden, garbage) for x in (problem.k, problem.v))
        found = run(kernel, replace(problem, k=k, v=v), visible, case.wanted)
        for name, value in clean.items():
            assert torch.equal(found[name], value), (name, garbage)
        for name in ("dk", "dv"):
            assert not found[name].masked_select(hidden).any()


@EVERY_KERNEL
@EVERY_DTYPE
def test_a_row_that_sees_nothing_takes_no_part(kernel: str, dtype: torch.dtype):
    """Output 0, LSE -inf, gradients 0, and neither its query nor what comes back for it reaches a key."""
    case = Case(60, 40, head_dim=16, heads=(4, 2), batch=2, mask="causal", dtype=dtype)  # rows 0 to 19 see nothing
    problem = case.problem()
    assert problem.dlse is not None
    clean = run(kernel, problem, case.build_mask(), case.wanted)
    assert not clean["out"][:, :, :20].any()
    assert torch.equal(clean["lse"][:, :, :20], torch.full((2, 4, 20), -torch.inf))
    assert not clean["dq"][:, :, :20].any()
    q, dout = problem.q.clone(), problem.dout.clone()
    q[:, :, :20], dout[:, :, :20] = torch.nan, torch.inf
    found = run(kernel, replace(problem, q=q, dout=dout), case.build_mask(), case.wanted)
    for name, value in clean.items():
        assert torch.equal(found[name], value), name


@EVERY_KERNEL
@EVERY_DTYPE
def test_a_bias_of_minus_infinity_hides_its_key(kernel: str, dtype: torch.dtype):
    """Like a mask: also a row of nothing else, and a key that holds NaN; its own gradient is 0."""
    case = Case(30, 45, head_dim=16, heads=(4, 2), batch=2, bias="bhqk", dtype=dtype)
    problem = case.problem()
    assert problem.bias is not None
    problem.bias[:, :, 3] = -torch.inf
    problem.bias[:, :, :, 40:] = -torch.inf
    problem.bias[1, 2, 5, 7] = -torch.inf
    k, v = problem.k.clone(), problem.v.clone()
    k[:, :, 40:], v[:, :, 40:] = torch.nan, torch.nan
    problem = replace(problem, k=k, v=v)
    judge = Judge.of(replace(problem, k=k.nan_to_num(0.0), v=v.nan_to_num(0.0)), case.wanted)
    results = run(kernel, problem, None, case.wanted)
    assert judge.complaints(results) == []
    assert not results["out"][:, :, 3].any()
    assert not results["dbias"][problem.bias.isneginf()].any()


@EVERY_KERNEL
def test_a_sink_alone_is_the_whole_softmax_of_a_row_that_sees_nothing(kernel: str):
    """The output is 0, the LSE the sink's logit, and the LSE's gradient goes to the sink."""
    case = Case(9, 6, head_dim=8, mask="causal", sinks=True)  # rows 0 to 2 see nothing
    problem = case.problem()
    assert problem.sinks is not None
    results = run(kernel, problem, case.build_mask(), case.wanted)
    assert torch.equal(results["lse"][0, :, :3], problem.sinks[:, None].expand(2, 3))
    assert not results["out"][:, :, :3].any()
    found = as_tensor(exact(problem).value["dsinks"])
    torch.testing.assert_close(results["dsinks"].double(), found, rtol=1e-5, atol=1e-6)


@pytest.fixture
def nan_filled_memory() -> Iterator[None]:
    """Every tensor that is made without values is made of NaN."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before


@EVERY_KERNEL
@EVERY_DTYPE
@pytest.mark.parametrize(
    "case",
    [
        Case(17, 70, head_dim=20, value_dim=9, heads=(4, 2), batch=2, bias="hk", sinks=True),
        Case(70, 31, head_dim=20, value_dim=40, heads=(4, 2), batch=2, mask="window"),  # some rows see nothing
        Case(40, 64, head_dim=16, heads=(2, 2), batch=3, mask="padding"),  # some keys are seen by nobody
        Case(1, 300, head_dim=16, heads=(4, 2), batch=3, mask="padding"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("nan_filled_memory")
def test_results_are_written_whole_and_nothing_is_read_beyond_the_inputs(kernel: str, dtype: torch.dtype, case: Case):
    """Inputs inside buffers of NaN, outputs in memory that was NaN."""
    assert torch.empty(3).isnan().all()
    case = replace(case, dtype=dtype)
    problem = case.problem()

    def framed(x: Tensor) -> Tensor:
        around = torch.full([size + 3 for size in x.shape], torch.nan, dtype=x.dtype)
        inside = around[tuple(slice(1, size + 1) for size in x.shape)]
        inside.copy_(x)
        return inside

    names = [name for name in ("q", "k", "v", "dout", "dlse", "bias", "sinks") if getattr(problem, name) is not None]
    framed_problem = replace(problem, **{name: framed(getattr(problem, name)) for name in names})
    mask = case.build_mask()
    inputs = {"dq": framed_problem.q, "dk": framed_problem.k, "dv": framed_problem.v}
    inputs |= {"dbias": framed_problem.bias, "dsinks": framed_problem.sinks}
    for name in case.wanted:
        inputs[name].requires_grad_()
    out, lse = attend(
        kernel, inputs["dq"], inputs["dk"], inputs["dv"], mask=mask, bias=inputs["dbias"], sinks=inputs["dsinks"],
        return_lse=True,
    )  # fmt: skip
    gradients = torch.autograd.grad(
        [out, lse], [inputs[name] for name in case.wanted], [framed_problem.dout, framed_problem.dlse]
    )
    results = {"out": out.detach(), "lse": lse.detach(), **dict(zip(case.wanted, gradients, strict=True))}
    assert Judge.of(problem, case.wanted).complaints(results) == []


@EVERY_NATIVE_KERNEL
def test_subnormal_halves_lose_at_most_themselves(kernel: str):
    """16-bit subnormals may count as zero, never as something else."""
    problem = Case(8, 40, head_dim=16, dtype=torch.float16).problem()
    tiny = torch.finfo(torch.float16).tiny
    problem = replace(problem, v=(problem.v.float() * tiny / 8).half())
    out = run(kernel, problem, None, ())["out"]
    assert (out.double() - as_tensor(exact(problem).value["out"])).abs().max() <= tiny


@EVERY_KERNEL
def test_left_padding_and_right_padding_are_each_others_mirror(kernel: str):
    assert complaints(kernel, Case(50, 50, head_dim=8, batch=3, mask="padding-left")) == []
    q, k, v = (torch.randn(2, 1, 9, 4) for _ in range(3))
    lengths = torch.tensor([4, 9])
    left = attend(kernel, q, k, v, mask=masks.padding(lengths, side="left"))
    right = attend(kernel, q, k.flip(2), v.flip(2), mask=masks.padding(lengths))
    torch.testing.assert_close(left, right)
