"""A kernel's two passes with what is the same for all of them: calls without a pair, and autocast regions."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile._attention.call import Call, accumulator, empty_gradients, empty_result
from rooftile._attention.kernel import Gradients
from rooftile._attention.kernels import KERNELS

__all__ = ["run_backward", "run_forward"]


def run_forward(call: Call, fp32_out: bool, kernel: str) -> tuple[Tensor, Tensor]:
    """The kernel's forward pass, or the result of no pairs at all; ``fp32_out`` asks for the accumulator's dtype."""
    dtype = accumulator(call.q.dtype) if fp32_out else None
    if call.is_empty:
        return empty_result(call, dtype)
    kind = call.q.device.type
    if torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):  # what a kernel does inside is not the user's region
            return KERNELS[kernel].forward(call, dtype)
    return KERNELS[kernel].forward(call, dtype)


def run_backward(
    call: Call, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None, wanted: list[bool], kernel: str
) -> Gradients:
    """The kernel's backward pass; nothing flows through a call without pairs, but from the LSE to the sinks."""
    if not call.is_empty and (dout is not None or dlse is not None):
        kind = call.q.device.type
        if torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return KERNELS[kernel].backward(call, out, lse, dout, dlse, wanted)
        return KERNELS[kernel].backward(call, out, lse, dout, dlse, wanted)
    grads = empty_gradients(call, wanted)
    for grad in grads:
        grad.zero_()
    if dlse is not None and wanted[4] and call.sinks is not None:
        grads[4].copy_(dlse.sum((0, 2)))
    return grads
