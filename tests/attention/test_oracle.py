"""The yardstick itself: its random numbers, its gradients, and that it does fail kernels that are wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from .inputs import Case
from .oracle import Problem, array, as_tensor, exact
from .philox import dropout_bits, philox4x32
from .tolerance import ROUNDINGS, Judge, Results, eager, materialised_visibility

# Random123, tests/kat_vectors: "philox4x32 10", counter, key, output.
KNOWN_ANSWERS = [
    "00000000 00000000 00000000 00000000 00000000 00000000 6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    "ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 408f276d 41c83b0e a20bc7c6 6d5451fd",
    "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 d16cfe09 94fdcceb 5001e420 24126ea1",
]


@pytest.mark.parametrize("line", KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(line: str):
    words = [int(word, 16) for word in line.split()]
    counter = [np.array([word], dtype=np.uint64) for word in words[:4]]
    output = philox4x32(counter, (words[4], words[5]))
    assert [int(word[0]) for word in output] == words[6:]


def test_the_bits_of_a_pair_do_not_depend_on_the_lengths():
    assert np.array_equal(dropout_bits(12345, 3, 5, 6), dropout_bits(12345, 3, 9, 31)[:5, :6])


@pytest.mark.parametrize(
    "case",
    [
        Case(5, 7, head_dim=3, value_dim=4, dtype=torch.float64, heads=(4, 2), batch=2),
        Case(6, 6, head_dim=4, dtype=torch.float64, mask="causal & padding-left", batch=2, softcap=2.0, bias="hk"),
        Case(7, 5, head_dim=4, dtype=torch.float64, mask="causal", bias="bhqk", sinks=True, softcap=1.5, scale=0.7),
        Case(6, 9, head_dim=4, dtype=torch.float64, dropout_p=0.3, heads=(6, 2), sinks=True, bias="q"),
        Case(12, 12, head_dim=4, dtype=torch.float64, mask="dense", batch=2, bias="b", dropout_p=0.1),
    ],
    ids=str,
)
def test_the_oracle_and_autograd_agree(case: Case):
    """The derivation's gradients against autograd's, through an entirely different formulation of the forward pass."""
    problem = case.problem()
    found, expected = exact(problem), eager(problem, case.wanted)
    assert set(expected) == {"out", "lse", *case.wanted}
    for name, value in expected.items():
        torch.testing.assert_close(as_tensor(found.value[name]), value, rtol=1e-12, atol=1e-13, msg=name)


def test_the_spread_bounds_what_small_errors_of_the_inputs_do():
    case = Case(9, 13, head_dim=5, dtype=torch.float64, heads=(4, 2), softcap=3.0, bias="hqk", sinks=True)
    problem, u, generator = case.problem(), 1e-6, torch.Generator().manual_seed(5)

    def moved(x: Tensor) -> Tensor:
        return x * (1 + u * (2 * torch.rand(x.shape, generator=generator, dtype=x.dtype) - 1))

    before = exact(problem)
    after = exact(replace(problem, q=moved(problem.q), k=moved(problem.k), v=moved(problem.v)))
    for name in before.value:
        change, bound = abs(after.value[name] - before.value[name]), ROUNDINGS * u * before.spread(name)
        assert np.all(change <= bound), name
        assert bound.mean() < 200 * change.mean(), name


def test_the_oracle_keeps_what_is_hidden_out_of_everything():
    problem = Case(4, 6, head_dim=3, dtype=torch.float64, mask="causal-top-left").problem()
    clean = exact(problem)
    k, v = problem.k.clone(), problem.v.clone()
    k[:, :, 4:], v[:, :, 4:] = torch.nan, torch.inf  # keys that no row sees
    poisoned = exact(replace(problem, k=k, v=v))
    for name in clean.value:
        np.testing.assert_allclose(clean.value[name], poisoned.value[name], rtol=1e-13)


# --- The tolerance can fail: kernels with one fault each, all of them found in the wild. ---


def _exact_results(problem: Problem, names: tuple[str, ...]) -> Results:
    """A perfect kernel: the exact results, rounded once."""
    found, dtype = exact(problem), problem.q.dtype
    return {name: as_tensor(found.value[name]).to(torch.float32 if name == "lse" else dtype) for name in names}


def _two_bf16_parts(x: Tensor) -> Tensor:
    high = x.bfloat16().float()
    return high + (x - high).bfloat16().float()


def _with(problem: Problem, **changes: Tensor | float) -> Problem:
    return replace(problem, **changes)  # type: ignore[arg-type]


FAULTS: dict[str, Callable[[Problem], Problem]] = {
    "a softmax scale that is 2 % off": lambda p: _with(p, scale=1.02 * p.q.shape[3] ** -0.5),
    "query heads read the kv heads by modulo": lambda p: _with(p, k=p.k.roll(1, 1), v=p.v.roll(1, 1)),
    "softcap ignored": lambda p: replace(p, softcap=None),
    "bias ignored": lambda p: replace(p, bias=None),
    "sinks ignored": lambda p: replace(p, sinks=None),
    "one key too many in every row": lambda p: replace(p, visible=lambda b, h, i, j: j <= i + 1),
    "a hidden last key": lambda p: replace(p, visible=lambda b, h, i, j: (j <= i) & (j < 64)),
    "the gradient of the LSE ignored": lambda p: replace(p, dlse=None),
}
FAULTY = Case(65, 65, heads=(4, 2), mask="causal", softcap=5.0, bias="hqk", sinks=True, dtype=torch.bfloat16)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_kernel_with_one_fault_fails(fault: str):
    names = ("out", "lse", "dq", "dk", "dv")
    problem = FAULTY.problem()
    judge = Judge.of(problem, FAULTY.wanted)
    assert judge.complaints(_exact_results(problem, names)) == []
    assert judge.complaints(_exact_results(FAULTS[fault](problem), names))


def test_fp32_operands_held_in_two_bf16_parts_fail():
    """The "medium" contract, 1e-5 to 1e-4 off, is not FP32."""
    case = Case(127, 239)
    problem = case.problem()
    rough = replace(problem, **{name: _two_bf16_parts(getattr(problem, name)) for name in ("q", "k", "v")})
    complaints = Judge.of(problem, case.wanted).complaints(_exact_results(rough, ("out", "dq", "dk", "dv")))
    assert len({line.partition(":")[0] for line in complaints}) == 4, complaints


def test_a_base_2_lse_fails():
    case = Case(17, 31)
    problem = case.problem()
    lse = as_tensor(exact(problem).value["lse"]) / math.log(2)
    assert Judge.of(problem, ()).complaints({"lse": lse.float()})


def test_16_bit_accumulators_fail():
    """Values whose sum stays put once an addend is below half of its last place."""
    case = Case(8, 1024, dtype=torch.bfloat16, values="constant")
    problem = case.problem()
    p = (problem.q.float() @ problem.k.float().mT * case.head_dim**-0.5).softmax(-1)
    total = torch.zeros_like(problem.dout)
    for j in range(case.kv_len):
        total += (p[..., j : j + 1] * problem.v[:, :, j : j + 1].float()).bfloat16()
    assert Judge.of(problem, ()).complaints({"out": total})


def test_visibility_is_the_predicate_less_what_a_bias_of_minus_infinity_hides():
    problem = Case(3, 3, head_dim=2, mask="causal-top-left", bias="qk").problem()
    assert problem.bias is not None
    problem.bias[0, 0, 2, 0] = -torch.inf
    expected = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 1]], dtype=torch.bool)
    assert torch.equal(materialised_visibility(problem)[0, 1], expected)


def test_arrays_hold_the_tensor_exactly():
    x = torch.tensor([1.0, 2.0**-133, -3.0], dtype=torch.bfloat16)
    assert array(x).tolist() == [1.0, 2.0**-133, -3.0]
