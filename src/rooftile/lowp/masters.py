"""FP32 master weights for a 16-bit model, around any torch optimizer (Micikevicius et al. 2018, §3.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from rooftile.errors import UsageError

__all__ = ["MasterWeights"]


class MasterWeights:
    """Keep an FP32 copy of every 16-bit parameter and let the optimizer update the copies.

    ``step()`` widens the 16-bit gradients, runs the optimizer on the masters and rounds the result into the model;
    between steps nothing is alive but the masters and the optimizer's state. Parameters that are FP32 already are
    handed to the optimizer as they are.

    Parameters
    ----------
    parameters:
        The model's parameters; those that need no gradient are left out.
    optimizer:
        ``optimizer(parameters) -> torch.optim.Optimizer``.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        own = [p for p in parameters if p.requires_grad]
        if not own:
            raise UsageError("no parameter requires a gradient, so there is nothing to keep master weights of.")
        self.pairs = [(p, self._master(p)) for p in own if p.dtype in (torch.float16, torch.bfloat16)]
        masters = {id(p): m for p, m in self.pairs}
        self.optimizer = optimizer([masters.get(id(p), p) for p in own])
        self._others = [p for p in own if id(p) not in masters]

    @staticmethod
    def _master(parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(parameter.detach().float())

    @torch.no_grad()
    def step(self) -> None:
        """One update: gradients to FP32, the optimizer's step, masters rounded into the model's parameters."""
        for parameter, master in self.pairs:
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.optimizer.step()
        for parameter, master in self.pairs:
            master.grad = None
            parameter.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop (or zero) the gradients of the model's own parameters."""
        for parameter in [*(p for p, _ in self.pairs), *self._others]:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()
