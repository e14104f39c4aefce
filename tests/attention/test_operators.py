"""The registered operators with every argument, and recomputation of a call with its dropout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import rooftile
from rooftile import masks

EACH_KERNEL = pytest.mark.parametrize("kernel", ["native", "tiled", "reference"])


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((2, 4, 12, 8), (2, 2, 12, 8), (2, 2, 12, 8))
    q, k, v = (torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)
    return q, k, v


@EACH_KERNEL
@pytest.mark.parametrize("rich", [False, True])
def test_the_operators_pass_opcheck(kernel: str, rich: bool):
    """With nothing but q, k and v, and with everything at once, dropout included."""
    q, k, v = inputs()
    extras: tuple[Any, ...] = (None,) * 6
    if rich:
        lo, hi = torch.zeros(1, 12, dtype=torch.int32), torch.arange(1, 13, dtype=torch.int32)[None]
        dense, bias = torch.ones(1, 1, 12, 12, dtype=torch.bool), torch.randn(1, 4, 12, 12, requires_grad=True)
        extras = (lo, hi, dense, bias, torch.randn(4, requires_grad=True), torch.tensor(77))
    arguments = (q, k, v, *extras, 0.4, 5.0 if rich else 0.0, 0.25 if rich else 0.0, False, kernel)
    torch.library.opcheck(torch.ops.rooftile.attention.default, arguments)
    with torch.no_grad():
        out, lse = torch.ops.rooftile.attention(*arguments)
    detached = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
    backward = (torch.ones_like(out), torch.ones_like(lse), *detached, out, lse, [True, True, True, rich, rich])
    torch.library.opcheck(
        torch.ops.rooftile.attention_backward.default, backward, test_utils=("test_schema", "test_faketensor")
    )


@EACH_KERNEL
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_repeats_the_forward_pass_dropout_included(kernel: str, use_reentrant: bool):
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = rooftile.attention(q, k, v, dropout_p=0.3, mask=masks.causal(), kernel=kernel)
        assert isinstance(out, Tensor)
        return out

    def checkpointed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(function, q, k, v, use_reentrant=use_reentrant)  # type: ignore[no-any-return]

    found = []
    for call in (function, checkpointed):
        torch.manual_seed(9)
        q, k, v = inputs()
        out = call(q, k, v)
        out.square().sum().backward()
        found.append([out.detach(), q.grad, k.grad, v.grad])
    for value, wanted in zip(*found, strict=True):
        assert torch.equal(value, wanted)  # type: ignore[arg-type]
