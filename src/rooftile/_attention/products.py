"""Matrix products that nothing hidden can enter.

A hidden pair has the factor 0, and 0 times NaN is NaN: one non-finite key would reach every query through a plain
product. Here it reaches the queries that see it, and no other.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["finite", "visible_product"]


def finite(x: Tensor) -> bool:
    """Whether no element is NaN or infinite; False under a function transform, where nobody can look."""
    return not torch._C._are_functorch_transforms_active() and bool(x.isfinite().all())


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
