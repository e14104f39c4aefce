"""Delayed scaling: this step's scale from earlier steps' maxima, so that a tensor is read once (Micikevicius 2022)."""

from __future__ import annotations

import torch
from torch import nn

from rooftile.errors import UsageError

__all__ = ["AmaxHistory"]


class AmaxHistory(nn.Module):
    """The largest magnitudes of the last ``length`` tensors, the newest first; a state dict keeps them."""

    amaxes: torch.Tensor

    def __init__(self, length: int = 16) -> None:
        super().__init__()
        if length < 1:
            raise UsageError(f"length is {length}; an amax history keeps at least 1")
        self.register_buffer("amaxes", torch.zeros(length))

    @torch.no_grad()
    def advance(self, amax: torch.Tensor) -> torch.Tensor:
        """The amax to scale by now, a 0-dim fp32 tensor; ``amax``, the present tensor's own, enters the history.

        The largest of the history; as long as that is 0 (nothing seen, or only zeros) the present amax.
        """
        earlier = self.amaxes.max()
        used = torch.where(earlier > 0, earlier, amax)
        self.amaxes.copy_(torch.cat([amax.reshape(1), self.amaxes[:-1]]))
        return used
