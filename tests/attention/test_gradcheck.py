"""Gradients against finite differences in FP64, and second derivatives: right, or one clear sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import rooftile
from rooftile.errors import UsageError

from .inputs import Case
from .support import EVERY_NATIVE_KERNEL, EVERY_PLAIN_KERNEL

CASES = [
    Case(2, 4, head_dim=2, value_dim=1, heads=(4, 2)),
    Case(4, 4, head_dim=2, heads=(2, 1), mask="causal & padding-left", batch=2, bias="hk", softcap=1.5),
    Case(5, 3, head_dim=2, heads=(2, 2), mask="causal", sinks=True, bias="q"),  # the first two rows see nothing
    Case(4, 6, head_dim=2, heads=(2, 1), dropout_p=0.3, softcap=2.0, sinks=True),
]


def function_of(kernel: str, case: Case) -> tuple[Callable[..., tuple[Tensor, Tensor]], list[Tensor]]:
    """out and (finite) LSE as a function of the differentiable inputs, and those inputs."""
    problem = replace(case, dtype=torch.float64).problem()
    inputs = {"q": problem.q, "k": problem.k, "v": problem.v, "bias": problem.bias, "sinks": problem.sinks}
    names = [name for name, x in inputs.items() if x is not None]

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = rooftile.attention(
            **dict(zip(names, tensors, strict=True)),
            mask=case.build_mask(),
            softcap=case.softcap,
            dropout_p=case.dropout_p,
            generator=case.generator(),
            return_lse=True,
            kernel=kernel,
        )
        return out, lse.masked_fill(lse.isneginf(), 0)

    return call, [inputs[name].detach().clone().requires_grad_() for name in names]  # type: ignore[union-attr]


@EVERY_PLAIN_KERNEL
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_those_of_finite_differences(kernel: str, case: Case):
    call, inputs = function_of(kernel, case)
    assert torch.autograd.gradcheck(call, inputs)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_second_derivatives_through_the_reference_are_right(case: Case):
    call, inputs = function_of("reference", case)
    assert torch.autograd.gradgradcheck(call, inputs)


def twice(kernel: str, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 2, 4, 8, dtype=dtype, requires_grad=True) for _ in range(3))
    out = rooftile.attention(q, k, v, kernel=kernel)
    (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    first.square().sum().backward()


def test_a_second_derivative_of_the_tiled_kernel_is_refused_in_a_sentence():
    with pytest.raises(UsageError, match="kernel='reference'"):
        twice("tiled", torch.float64)


@EVERY_NATIVE_KERNEL
def test_a_second_derivative_of_the_native_kernel_is_refused_in_a_sentence(kernel: str):
    with pytest.raises(UsageError, match="kernel='reference'"):
        twice(kernel, torch.float32)
