"""Matrix products that nothing hidden can enter.

A hidden pair has the factor 0, and 0 times NaN is NaN: one non-finite key would reach every query through a plain
product. Here it reaches the queries that see it, and no other.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["finite", "row_sum_product", "visible_product"]

#: Keys of one addition chain of :func:`row_sum_product`.
_CHAIN = 128


def finite(x: Tensor) -> bool:
    """Whether no element is NaN or infinite; False under a function transform, where nobody can look."""
    return not torch._C._are_functorch_transforms_active() and bool(x.isfinite().all())


def row_sum_product(a: Tensor, x: Tensor, visible: Tensor | None) -> Tensor:
    """:func:`visible_product` over keys, at most 128 in one chain; the parts are then added pairwise.

    A library's product does not add every column in one order (edge tiles, gemv), so the row sum as one more column and
    the sums of V = 1 may part by a chain's rounding. Parts of 128 keys keep them within 2 fp32 ulps.
    """
    keys = a.shape[-1]
    if keys <= _CHAIN:
        return visible_product(a, x, visible)
    fill = -keys % _CHAIN
    a = torch.nn.functional.pad(a, (0, fill)).unflatten(-1, (-1, _CHAIN)).transpose(-2, -3)
    x = torch.nn.functional.pad(x, (0, 0, 0, fill)).unflatten(-2, (-1, _CHAIN))
    if visible is not None:
        visible = torch.nn.functional.pad(visible, (0, fill)).unflatten(-1, (-1, _CHAIN)).transpose(-2, -3)
    return visible_product(a, x, visible).sum(-3)


def visible_product(a: Tensor, x: Tensor, visible: Tensor | None) -> Tensor:
    """``a @ x`` where ``a`` is 0 at hidden pairs and ``visible`` (bool, broadcastable to ``a``) says which those are.

    A non-finite element of ``x`` changes only the rows of the result that see it; ``None`` is all visible.
    """
    if visible is None or finite(x):
        return a @ x
    visible = visible.expand(a.shape)
    up, down, sign = x == torch.inf, x == -torch.inf, torch.sign(a)
    grow = _any(visible & (sign > 0), up) | _any(visible & (sign < 0), down)
    fall = _any(visible & (sign > 0), down) | _any(visible & (sign < 0), up)
    lost = _any(visible, x.isnan()) | _any(visible & (sign == 0), up | down) | (grow & fall)
    product = a @ torch.where(x.isfinite(), x, 0)
    correction = torch.where(grow, torch.inf, 0.0).to(product.dtype)
    correction = torch.where(fall, -torch.inf, correction)
    return product + torch.where(lost, torch.nan, correction)


def _any(pairs: Tensor, x: Tensor) -> Tensor:
    """Whether a row of ``pairs`` meets a True of a column of ``x``."""
    return (pairs.float() @ x.float()) > 0
