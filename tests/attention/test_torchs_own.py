"""torch's own kernel as a peer: the same values where it takes a call, a refusal where it would ignore an argument."""

from __future__ import annotations

import pytest
import torch

import rooftile
from rooftile import masks
from rooftile.errors import UsageError

MASKS = {
    "none": None,
    "causal": masks.causal(align="top-left"),
    "rows that see nothing": masks.padding([0, 30]),
    "window": masks.window(3, align="bottom-right"),
    "dense": masks.dense(torch.rand(50, 70, generator=torch.Generator().manual_seed(0)) > 0.5),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("biased", [False, True])
def test_values_and_gradients_are_the_references(mask: str, biased: bool):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, h, n, 16, generator=generator) for h, n in ((4, 50), (2, 70), (2, 70)))
    bias = torch.randn(1, 4, 50, 70, generator=generator) if biased else None
    results = []
    for kernel in ("sdpa", "reference"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = rooftile.attention(*leaves, mask=MASKS[mask], bias=bias, return_lse=True, kernel=kernel)
        out.square().sum().backward()
        results.append([out, lse, *(x.grad for x in leaves)])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-5)


def test_the_lse_has_no_gradient_and_says_so():
    q = torch.randn(1, 1, 3, 4, requires_grad=True)
    _, lse = rooftile.attention(q, q, q, kernel="sdpa", return_lse=True)
    with pytest.raises(UsageError, match="no gradient of the LSE"):
        lse.sum().backward()


def test_a_bias_that_wants_a_gradient_is_refused():
    q, bias = torch.randn(1, 1, 3, 4), torch.zeros(1, 1, 3, 3, requires_grad=True)
    with pytest.raises(UsageError, match="bias has no gradient"):
        rooftile.attention(q, q, q, bias=bias, kernel="sdpa")
