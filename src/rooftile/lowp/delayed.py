"""Delayed scaling: this step's scale from earlier steps' maxima, so that a tensor is read once (Micikevicius 2022)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from rooftile.errors import UsageError

__all__ = ["AmaxHistory", "Pass", "forward_amaxes", "pass_of"]

#: What a forward pass does to the histories. ``advance``: training, its maxima enter. ``peek``: evaluation, nothing
#: enters. ``recall``: a pass that activation checkpointing computes again, which takes the scales of the first time.
Pass = Literal["advance", "peek", "recall"]


class AmaxHistory(nn.Module):
    """The largest magnitudes of the last ``length`` tensors, the newest first; a state dict keeps them.

    ``used`` is the amax that each of those tensors was scaled by, for a forward pass that is computed again; a state
    dict doesn't keep it.
    """

    amaxes: torch.Tensor
    used: torch.Tensor

    def __init__(self, length: int = 16) -> None:
        super().__init__()
        if length < 1:
            raise UsageError(f"length is {length}; an amax history keeps at least 1")
        self.register_buffer("amaxes", torch.zeros(length))
        self.register_buffer("used", torch.zeros(length), persistent=False)

    @torch.no_grad()
    def advance(self, amax: torch.Tensor) -> torch.Tensor:
        """The amax to scale by now, a 0-dim fp32 tensor; ``amax``, the present tensor's own, enters the history.

        The largest of the history; as long as that is 0 (nothing seen, or only zeros) the present amax.
        """
        used = self.peek(amax)
        self.amaxes.copy_(torch.cat([amax.reshape(1), self.amaxes[:-1]]))
        self.used.copy_(torch.cat([used.reshape(1), self.used[:-1]]))
        return used

    @torch.no_grad()
    def peek(self, amax: torch.Tensor) -> torch.Tensor:
        """The amax to scale by, as :meth:`advance` gives it, without a trace in the history: for evaluation."""
        earlier = self.amaxes.max()
        return torch.where(earlier > 0, earlier, amax)


def pass_of(training: bool) -> Pass:
    """Which pass this is; ask where the user's grad mode holds, outside an autograd function.

    A recomputation runs inside the backward pass. Checkpointing with ``use_reentrant=True`` runs the first pass without
    gradients, so it is the second one that advances, from the same history unless another pass came between.
    """
    if not training or not torch.is_grad_enabled():
        return "peek"
    if torch.compiler.is_compiling():
        return "advance"
    node = torch._C._current_autograd_node()
    return "advance" if node is None or node.name() == "CheckpointFunctionBackward" else "recall"


@torch.no_grad()
def forward_amaxes(
    histories: tuple[AmaxHistory | None, AmaxHistory | None], amaxes: tuple[torch.Tensor, torch.Tensor], which: Pass
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The amaxes to scale input and weight by (0-dim fp32), None where the role is not delayed."""
    pairs = list(zip(histories, amaxes, strict=True))
    if which == "advance":
        first, second = (None if h is None else h.advance(amax) for h, amax in pairs)
    elif which == "peek":
        first, second = (None if h is None else h.peek(amax) for h, amax in pairs)
    else:
        # Both entered together: the newest entry with these maxima is the pass that is computed again. One alone may
        # not tell, as the weight is the same in every micro-batch.
        same = [h.amaxes == amax for h, amax in pairs if h is not None]
        length = min(len(each) for each in same)
        entry = torch.stack([each[:length] for each in same]).all(0).int().argmax()
        first, second = (None if h is None else h.used[entry] for h, _ in pairs)
    return first, second
