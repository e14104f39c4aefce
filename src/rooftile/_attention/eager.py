"""A plain eager call without the dispatcher: two Python kernels behind it cost more than a small attention does.

Everything that wants to see operators (compilers, fake tensors, dispatch modes, function transforms, tensor
subclasses, the profiler) goes through :mod:`rooftile._attention.operators`; the values are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rooftile._attention.call import Call
from rooftile._attention.operators import attention_backward_op, attention_op, inputs_of
from rooftile._attention.run import run_backward, run_forward
from rooftile._attention.transforms import attention_transformed
from rooftile.errors import UsageError
from rooftile.masks import Visibility

__all__ = ["attend"]

_LEGACY_BATCH = torch._C._dispatch_key_parse("Batched")
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def attend(call: Call, fp32_out: bool, kernel: str, with_grad: bool) -> tuple[Tensor, Tensor]:
    """``out`` and LSE of a validated call by the kernel; differentiable where ``with_grad``."""
    if torch.compiler.is_compiling():
        if torch._C._are_functorch_transforms_active():
            raise UsageError("torch.compile of a torch.func transform of attention: leave out one of the two")
        return attention_op(call, fp32_out, kernel)
    _refuse_tangents(call)
    if torch._C._get_tracing_state() is not None:  # a jit trace records operators, not writes through pointers
        return attention_op(call, fp32_out, kernel)
    if torch._C._are_functorch_transforms_active():
        return attention_transformed(*inputs_of(call, fp32_out, kernel))
    if not _direct(call.q, call.k, call.v, call.bias, call.sinks):
        return attention_op(call, fp32_out, kernel)
    if not with_grad:
        return run_forward(call, fp32_out, kernel)
    see = call.visibility
    made: tuple[Tensor, Tensor] = _Attention.apply(
        call.q, call.k, call.v, call.bias, call.sinks, see.lo, see.hi, see.dense, call.seed,
        (call.scale, call.softcap, call.dropout_p, fp32_out, kernel), call,
    )  # fmt: skip
    return made


def _refuse_tangents(call: Call) -> None:
    """Forward-mode derivatives would be lost without a word."""
    if forward_ad._current_level < 0:
        return
    for name, x in (("q", call.q), ("k", call.k), ("v", call.v), ("bias", call.bias), ("sinks", call.sinks)):
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise UsageError(
                f"{name} carries a forward-mode tangent, and attention has reverse-mode derivatives only: use grad, "
                "vjp or jacrev instead of jvp or jacfwd"
            )


def _direct(*operands: Tensor | None) -> bool:
    """Whether nothing listens to operators and every tensor is memory and no more."""
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._autograd._profiler_enabled()
        and all(x is None or (type(x) in _PLAIN_TYPES and not x.is_neg()) for x in operands)
        and operands[0] is not None
        and operands[0].device.type != "meta"
    )


def _batched(x: Tensor | None) -> bool:
    """Whether this is a batch in disguise: what ``torch.autograd.grad(..., is_grads_batched=True)`` passes."""
    return x is not None and torch._C._dispatch_keys(x).has(_LEGACY_BATCH)


class _Attention(torch.autograd.Function):
    """The operator's forward and backward pass as one node of the graph."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        *tensors, scalars, call = inputs
        ctx.set_materialize_grads(False)
        fp32_out, kernel = scalars[3:]
        out, lse = run_forward(call, fp32_out, kernel)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.scalars = scalars
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dout, dlse = grads
        if dout is None and dlse is None:
            return (None,) * 11
        q, k, v, bias, sinks, lo, hi, dense, seed, out, lse = ctx.saved_tensors
        scale, softcap, dropout_p, fp32_out, kernel = ctx.scalars
        wanted = list(ctx.needs_input_grad[:5])
        call = Call(q, k, v, Visibility(lo, hi, dense), bias, sinks, scale, softcap, dropout_p, seed)
        # By the operator where someone differentiates again, or where gradients are batched.
        if torch.is_grad_enabled() or not _direct(q, k, v, bias, sinks, dout, dlse) or _batched(dout) or _batched(dlse):
            made = attention_backward_op(call, out, lse, dout, dlse, wanted, fp32_out, kernel)
        else:
            made = run_backward(call, out, lse, dout, dlse, wanted, kernel)
        return (*(grad if want else None for grad, want in zip(made, wanted, strict=True)), *(None,) * 6)
