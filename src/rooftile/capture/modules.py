"""Which module an operator belongs to, forward and backward, and whether it is recomputation."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from rooftile.capture.trace import Phase

__all__ = ["ModuleTracker"]

#: AccumulateGrad nodes have no place in the forward order; their sequence number is the largest 64-bit integer.
_NO_SEQUENCE = 2**64 - 1


class ModuleTracker:
    """Module paths by global forward hooks; backward operators by the sequence number of their autograd node.

    An operator that autograd records takes the next sequence number in the forward pass, and its node still bears it in
    the backward pass: the same link that torch's profiler draws between the two.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._paths = {id(m): name for name, m in model.named_modules()}
        self._owners = {id(p): name.rpartition(".")[0] for name, p in model.named_parameters()}
        self._stack: list[str] = []
        self._by_sequence: dict[int, str] = {}
        self._next_sequence = torch._C._autograd._get_sequence_nr
        self._node = torch._C._current_autograd_node
        self._saving_hooks = torch._C._autograd._top_saved_tensors_default_hooks
        self.failed: str | None = None  # the innermost module that an exception passed through
        self.outside = ""  # what operators outside of every module are filed under

    def locate(self, phase: Phase) -> tuple[Phase, str]:
        """The phase and module path of the operator that is being dispatched."""
        node = self._node() if phase == "backward" else None
        if node is None:
            module = self._stack[-1] if self._stack else self.outside
        elif self._stack or torch.is_grad_enabled() or self._saving_hooks(False) is not None:
            # While autograd runs a node, gradients are off and nobody saves tensors: whatever does, or runs a module,
            # is recomputation.
            phase, module = "recompute", self._stack[-1] if self._stack else self._module_of(node)
        else:
            return phase, self._module_of(node)
        # Whether or not this operator got a node, the last number given out is the nearest one to it.
        self._by_sequence[self._next_sequence() - 1] = module
        return phase, module

    def _module_of(self, node: Any) -> str:
        sequence = node._sequence_nr()
        if sequence == _NO_SEQUENCE:
            return self._owners.get(id(node.variable), "")
        return self._by_sequence.get(sequence, "")

    def _enter(self, module: torch.nn.Module, args: Any) -> None:  # noqa: ARG002
        path = self._paths.get(id(module))
        if path is None:  # a module that the model doesn't own: keep the path of whoever called it
            path = self._stack[-1] if self._stack else type(module).__name__
        self._stack.append(path)

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        path = self._stack.pop()
        if self.failed is None and sys.exc_info()[0] is not None:
            self.failed = path

    @contextlib.contextmanager
    def tracking(self) -> Iterator[None]:
        """Install the hooks until the block is left."""
        before = register_module_forward_pre_hook(self._enter)
        # always_call: checkpointing stops its recomputation early by an exception.
        after = register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()
            self._stack.clear()
