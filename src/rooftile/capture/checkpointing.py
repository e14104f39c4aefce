"""``--checkpoint blocks``: gradient checkpointing of a model's repeated layers, by torch's own machinery."""

from __future__ import annotations

import functools

from torch import nn
from torch.utils.checkpoint import checkpoint

from rooftile.errors import UsageError

__all__ = ["checkpoint_blocks", "find_blocks"]


def find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList | nn.Sequential]:
    """The path and the list of the repeated layers: the longest list of at least two modules of one class."""
    best: tuple[str, nn.ModuleList | nn.Sequential] | None = None
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < 2:
            continue
        if len({type(child) for child in module}) == 1 and (best is None or len(module) > len(best[1])):
            best = path, module
    if best is None:
        raise UsageError(
            "checkpoint 'blocks' finds no list of repeated layers in the model (an nn.ModuleList or nn.Sequential of "
            "one class); checkpoint inside your model and leave --checkpoint none."
        )
    return best


def checkpoint_blocks(model: nn.Module) -> str:
    """Recompute each block in the backward pass (non-reentrant: it stops as soon as all is there); returns the path."""
    path, blocks = find_blocks(model)
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return path
