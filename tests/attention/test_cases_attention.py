"""Attention inputs from public bug reports by people who do this job (numbers as in the project's list of cases)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import rooftile
from rooftile import masks
from rooftile.errors import UsageError

from .inputs import Case
from .oracle import as_tensor, exact
from .support import EVERY_DTYPE, EVERY_KERNEL, EVERY_NATIVE_KERNEL, KERNELS, attend, complaints, run
from .tolerance import Judge


@EVERY_KERNEL
def test_case_1_a_row_that_sees_nothing_leaves_every_projection_gradient_finite(kernel: str):
    """pytorch 41508: a band mask and key padding together hide every key of one query."""
    torch.manual_seed(1)
    batch, length, heads, dim = 2, 12, 2, 8
    projections = nn.ModuleList(nn.Linear(heads * dim, heads * dim) for _ in range(3))
    x = torch.randn(batch, length, heads * dim, requires_grad=True)
    q, k, v = (p(x).view(batch, length, heads, dim).transpose(1, 2) for p in projections)
    mask = masks.window(3) & masks.padding(torch.tensor([12, 5]))  # rows 7 to 11 of the second see nothing
    out, lse = attend(kernel, q, k, v, mask=mask, return_lse=True)
    assert torch.equal(out[1, :, 7:], torch.zeros(heads, 5, dim))
    assert torch.equal(lse[1, :, 7:], torch.full((heads, 5), -torch.inf))
    assert out[1, :, :7].abs().min() > 0
    (out.square().sum() + lse.masked_fill(lse.isinf(), 0).sum()).backward()
    gradients = [x.grad, *(parameter.grad for parameter in projections.parameters())]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)


@EVERY_KERNEL
@EVERY_DTYPE
def test_case_2_a_row_of_the_lowest_finite_number_is_finite(kernel: str, dtype: torch.dtype):
    """pytorch 110213: masks that add ``finfo.min`` instead of -inf; a row of nothing else has even probabilities."""
    problem = Case(5, 40, head_dim=16, dtype=dtype, bias="hqk").problem()
    assert problem.bias is not None
    problem.bias.zero_()
    problem.bias[:, :, 1] = torch.finfo(dtype).min
    problem.bias[:, :, 2, 3:] = torch.finfo(dtype).min
    results = run(kernel, problem, None, ("dq", "dk", "dv", "dbias"))
    assert Judge.of(problem, ("dq", "dk", "dv", "dbias")).complaints(results) == []
    if dtype != torch.float16:  # there, a score added to the lowest number is not lost
        u = torch.finfo(dtype).eps
        torch.testing.assert_close(results["out"][:, :, 1].float(), problem.v.float().mean(2), atol=u, rtol=u)


@EVERY_KERNEL
@EVERY_DTYPE
def test_case_3_nan_propagates_and_a_masked_one_does_not(kernel: str, dtype: torch.dtype):
    """pytorch 141128: queries of NaN came back as zeros; pytorch 101967: a NaN in a masked key reached the output."""
    problem = Case(20, 20, head_dim=16, dtype=dtype, mask="causal").problem()
    clean = run(kernel, problem, masks.causal(), ())
    lost = run(kernel, replace(problem, q=torch.full_like(problem.q, torch.nan)), masks.causal(), ())
    assert lost["out"].isnan().all()
    assert lost["lse"].isnan().all()
    k, v = problem.k.clone(), problem.v.clone()
    k[:, :, 15:], v[:, :, 15:] = torch.nan, torch.nan
    poisoned = run(kernel, replace(problem, k=k, v=v), masks.causal(), ())
    for name in ("out", "lse"):
        assert torch.equal(poisoned[name][:, :, :15], clean[name][:, :, :15])
        assert poisoned[name][:, :, 15:].isnan().all()


@EVERY_KERNEL
@EVERY_DTYPE
@pytest.mark.parametrize("sign", [1, -1])
def test_case_4_scores_of_ten_thousand_are_finite_and_right(kernel: str, dtype: torch.dtype, sign: int):
    """pytorch 121558: the maximum and the exponent must be rounded alike. Integer operands: every score is exact."""
    generator = torch.Generator().manual_seed(4)
    q = torch.full((1, 2, 8, 4), 64.0, dtype=dtype)
    k = sign * 39 + torch.randint(-1, 2, (1, 2, 100, 4), generator=generator).to(dtype)
    problem = replace(Case(8, 100, head_dim=4, dtype=dtype).problem(), q=q, k=k, scale=1.0)
    scores = q.double() @ k.double().mT
    assert scores.abs().max() > 1e4
    results = run(kernel, problem, None, ("dq", "dk", "dv"))
    judge = Judge.of(problem, ("dq", "dk", "dv"))
    assert judge.complaints(results) == []
    # The scores are multiples of 64: the probabilities are 0 and 1 / n exactly, so no error of 1e4 may show.
    expected = as_tensor(judge.exact.value["out"]).to(dtype)
    torch.testing.assert_close(results["out"], expected, rtol=4 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)
    torch.testing.assert_close(results["lse"].double(), as_tensor(judge.exact.value["lse"]), rtol=2.0**-23, atol=0)


@EVERY_KERNEL
def test_case_5_equal_values_come_back_as_they_are(kernel: str):
    """arXiv 2510.04212: P in bf16 against a row sum in FP32 biases the output. The FP32 state: test_row_sum.py."""
    problem = Case(33, 500, head_dim=64, dtype=torch.bfloat16).problem()
    results = run(kernel, replace(problem, v=torch.ones_like(problem.v)), None, ())
    assert torch.equal(results["out"], torch.ones_like(results["out"]))


def test_case_6_causal_with_one_query_and_five_keys_asks_for_its_alignment():
    """pytorch 108108: such a call attended to key 0 only."""
    q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(UsageError, match="align") as caught:
        rooftile.attention(q, k, k, mask=masks.causal())
    assert "bottom-right" in str(caught.value)
    assert "top-left" in str(caught.value)
    for align, keys in (("bottom-right", 5), ("top-left", 1)):
        seen = masks.causal(align=align).materialize(1, 5)
        assert seen.sum() == keys


@EVERY_KERNEL
def test_case_6_the_alignment_is_carried_out(kernel: str):
    q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 5, 8)
    last = attend(kernel, q, k, k, mask=masks.causal(align="bottom-right"))
    torch.testing.assert_close(last, attend(kernel, q, k, k))
    assert torch.equal(attend(kernel, q, k, k, mask=masks.causal(align="top-left")), k[:, :, :1])


def test_case_7_a_window_is_a_number_of_keys():
    """transformers 39408: off by one."""
    rows = masks.window(4).materialize(10, 10).sum(-1).flatten()
    assert rows.tolist() == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]
    sides = masks.window(left=2, right=1).materialize(6, 6)[0, 0].int().tolist()
    assert sides[3] == [0, 1, 1, 1, 1, 0]


@EVERY_KERNEL
def test_case_7_a_window_of_four_averages_four_keys(kernel: str):
    """Queries of zero: the output is the mean of what a row sees, and the LSE the logarithm of how many it sees."""
    q, v = torch.zeros(1, 1, 100, 8), torch.eye(100)[None, None]
    out, lse = attend(kernel, q, torch.randn(1, 1, 100, 8), v, mask=masks.window(4), return_lse=True)
    assert (out[0, 0] > 0).sum(-1).tolist() == [1, 2, 3, *[4] * 97]
    torch.testing.assert_close(lse[0, 0].exp(), torch.tensor([1.0, 2.0, 3.0, *[4.0] * 97]))


@EVERY_KERNEL
def test_case_8_query_heads_read_the_kv_head_of_their_group(kernel: str):
    """flash-attention 648: by modulo instead; and dK, dV are sums over the group."""
    assert complaints(kernel, Case(40, 50, head_dim=16, batch=2, heads=(6, 2))) == []
    v = torch.arange(2.0).view(1, 2, 1, 1).expand(1, 2, 7, 4)
    out = attend(kernel, torch.randn(1, 6, 3, 4), torch.randn(1, 2, 7, 4), v)
    torch.testing.assert_close(out[0, :, 0, 0], torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 1.0]))


ARGUMENTS: dict[str, Callable[[], dict[str, object]]] = {
    "mask": lambda: {"mask": masks.causal()},
    "bias": lambda: {"bias": torch.linspace(-2, 2, 20).expand(1, 1, 20, 20)},
    "scale": lambda: {"scale": 0.01},
    "softcap": lambda: {"softcap": 0.5},
    "sinks": lambda: {"sinks": torch.tensor([2.0, 3.0])},
    "dropout_p": lambda: {"dropout_p": 0.5, "generator": torch.Generator().manual_seed(1)},
}


SDPA_LACKS = ("softcap", "sinks", "dropout_p")  # dropout: torch's own mask is not the one that the others draw


@pytest.mark.parametrize("kernel", [*KERNELS, "sdpa"], indirect=True)
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_case_9_an_argument_is_honoured_or_refused(kernel: str, argument: str):
    """SageAttention 55: mask, bias and softcap were accepted and ignored."""
    generator = torch.Generator().manual_seed(9)
    q, k, v = (torch.randn(1, 2, 20, 16, generator=generator) for _ in range(3))
    plain = attend(kernel, q, k, v)
    if kernel == "sdpa" and argument in SDPA_LACKS:
        with pytest.raises(UsageError, match=argument.removesuffix("_p").removesuffix("s")):
            attend(kernel, q, k, v, **ARGUMENTS[argument]())
        return
    changed = attend(kernel, q, k, v, **ARGUMENTS[argument]())
    assert not torch.allclose(plain, changed, rtol=1e-3, atol=1e-3)
    expected = attend("reference", q, k, v, **ARGUMENTS[argument]())
    torch.testing.assert_close(changed, expected, rtol=1e-5, atol=1e-6)


@EVERY_KERNEL
@EVERY_DTYPE
def test_case_11_empty_tensors_give_empty_results(kernel: str, dtype: torch.dtype):
    """pytorch 141219: a floating point exception."""
    for batch, q_len, kv_len in ((0, 5, 5), (2, 0, 5), (0, 0, 0)):
        q = torch.ones(batch, 4, q_len, 8, dtype=dtype, requires_grad=True)
        k = torch.ones(batch, 2, kv_len, 8, dtype=dtype, requires_grad=True)
        out, lse = attend(kernel, q, k, k, return_lse=True)
        assert out.shape == q.shape
        assert lse.shape == q.shape[:3]
        (out.sum() + lse.sum()).backward()
        assert q.grad is not None
        assert k.grad is not None
        assert torch.equal(k.grad, torch.zeros_like(k))


@EVERY_KERNEL
def test_case_11_no_key_at_all_is_a_row_that_sees_nothing(kernel: str):
    q, k = torch.ones(2, 4, 3, 8, requires_grad=True), torch.ones(2, 2, 0, 8, requires_grad=True)
    out, lse = attend(kernel, q, k, torch.ones(2, 2, 0, 5), return_lse=True)
    assert torch.equal(out, torch.zeros(2, 4, 3, 5))
    assert torch.equal(lse, torch.full((2, 4, 3), -torch.inf))
    out.sum().backward()
    assert q.grad is not None
    assert torch.equal(q.grad, torch.zeros_like(q))


def test_case_12_merging_two_states_that_saw_nothing_stays_such_a_state():
    """flashinfer 4051: NaN."""
    nothing = rooftile.AttentionState(torch.zeros(1, 2, 3, 4), torch.full((1, 2, 3), -torch.inf))
    merged = rooftile.merge(nothing, nothing)
    assert torch.equal(merged.out, nothing.out)
    assert torch.equal(merged.lse, nothing.lse)
    some = rooftile.AttentionState(torch.ones(1, 2, 3, 4), torch.full((1, 2, 3), 5.0))
    for merged in (rooftile.merge(nothing, some), rooftile.merge(some, nothing)):
        assert torch.equal(merged.out, some.out)
        assert torch.equal(merged.lse, some.lse)


@pytest.mark.parametrize("gap", [88.0, 89.0, 104.0, 1e4, 1e38])
def test_case_12_a_wide_gap_between_two_lse_does_not_overflow(gap: float):
    """EasyContext 14: exp of a gap above 88."""
    low = rooftile.AttentionState(torch.full((1, 1, 1, 2), 3.0), torch.full((1, 1, 1), -gap / 2))
    high = rooftile.AttentionState(torch.full((1, 1, 1, 2), -1.0), torch.full((1, 1, 1), gap / 2))
    for merged in (rooftile.merge(low, high), rooftile.merge(high, low)):
        assert torch.equal(merged.out, high.out)
        assert torch.equal(merged.lse, high.lse)


@EVERY_KERNEL
def test_case_13_the_lse_is_a_natural_logarithm_and_merges_as_one(kernel: str):
    """sglang 40903: base-2 LSE merged as natural ones, an error of 0.105."""
    problem = Case(9, 60, head_dim=16).problem()
    found = exact(problem)
    halves = [
        rooftile.AttentionState.of(problem.q, problem.k[:, :, part], problem.v[:, :, part], kernel=kernel)
        for part in (slice(0, 25), slice(25, 60))
    ]
    merged = rooftile.merge(*halves)
    torch.testing.assert_close(merged.lse.double(), as_tensor(found.value["lse"]), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(merged.out.double(), as_tensor(found.value["out"]), rtol=1e-5, atol=1e-6)


@EVERY_NATIVE_KERNEL
@EVERY_DTYPE
@pytest.mark.parametrize("q_len", [1, 40])
def test_case_14_a_neighbours_length_does_not_change_a_bit(kernel: str, dtype: torch.dtype, q_len: int):
    """flash-attention 1417. Nor do the keys beyond a sequence's length: they are NaN here."""
    generator = torch.Generator().manual_seed(14)
    q = torch.randn(2, 4, q_len, 64, generator=generator).to(dtype)
    keys, values = (torch.randn(2, 2, 700, 64, generator=generator).to(dtype) for _ in range(2))
    found: list[tuple[Tensor, Tensor]] = []
    for neighbour, beyond in ((700, 1.0), (0, torch.nan), (1, torch.inf), (333, -1e4)):
        k, v = keys.clone(), values.clone()
        for sequence, length in enumerate((neighbour, 300)):
            k[sequence, :, length:], v[sequence, :, length:] = beyond, beyond
        mask = masks.padding(torch.tensor([neighbour, 300]))
        out, lse = attend(kernel, q, k, v, mask=mask, return_lse=True)
        found.append((out[1], lse[1]))
    assert found[0][0].isfinite().all()
    for out, lse in found[1:]:
        assert torch.equal(out, found[0][0])
        assert torch.equal(lse, found[0][1])


@EVERY_KERNEL
@EVERY_DTYPE
def test_case_15_real_activations_in_a_batch_have_right_gradients(kernel: str, dtype: torch.dtype):
    """TransformerEngine 3216: wrong only for outliers and a batch of two or more."""
    assert complaints(kernel, Case(70, 70, batch=3, heads=(4, 2), values="outlier", dtype=dtype, mask="causal")) == []


@EVERY_KERNEL
@pytest.mark.parametrize("shape", [(1, 1, 30, 50), (2, 4, 30, 50), (1, 4, 1, 50), (2, 1, 1, 1)])
def test_case_16_a_bias_that_alone_requires_grad_gets_it(kernel: str, shape: tuple[int, ...]):
    """pytorch 148476: it was wrong, or an error."""
    letters = "".join(letter for letter, size in zip("bhqk", shape, strict=True) if size > 1)
    case = Case(30, 50, head_dim=16, batch=2, heads=(4, 2), bias=letters or "b", mask="causal")
    problem = case.problem()
    assert problem.bias is not None
    assert tuple(problem.bias.shape) == shape
    judge = Judge.of(problem, ("dbias",))
    assert judge.complaints(run(kernel, problem, case.build_mask(), ("dbias",))) == []
