"""``rooftile::attention`` and ``rooftile::attention_backward``: what autograd, torch.compile, export and audits see.

Tensors and scalars only; the kernel is a name that was chosen before. Defined through ``torch.library.Library``, which
costs a small call a third of what ``custom_op`` does.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from rooftile._attention.call import Call, accumulator, empty_gradients, empty_output, empty_result
from rooftile._attention.kernel import Gradients
from rooftile._attention.kernels import KERNELS
from rooftile.errors import UsageError
from rooftile.masks import Visibility

__all__ = ["attention_backward_op", "attention_op", "register_operators", "run_backward", "run_forward"]

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? lo, Tensor? hi, Tensor? dense, Tensor? bias, Tensor? sinks, Tensor? seed, "
    "float scale, float softcap, float dropout_p, bool fp32_out, str kernel"
)
_SCHEMAS = (
    f"attention({_INPUTS}) -> (Tensor out, Tensor lse)",
    f"attention_backward(Tensor? dout, Tensor? dlse, {_INPUTS}, Tensor out, Tensor lse, bool[5] wanted) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)",
)
#: Where q, k, v, bias and sinks stand among the inputs.
_DIFFERENTIABLE = (0, 1, 2, 6, 7)
_INPUT_COUNT = 14


def _forward(
    q: Tensor, k: Tensor, v: Tensor, lo: Tensor | None, hi: Tensor | None, dense: Tensor | None, bias: Tensor | None,
    sinks: Tensor | None, seed: Tensor | None, scale: float, softcap: float, dropout_p: float, fp32_out: bool,
    kernel: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    call = Call(q, k, v, Visibility(lo, hi, dense), bias, sinks, scale, softcap, dropout_p, seed)
    return run_forward(call, fp32_out, kernel)


def run_forward(call: Call, fp32_out: bool, kernel: str) -> tuple[Tensor, Tensor]:
    """The kernel's forward pass, or the result of no pairs at all."""
    dtype = accumulator(call.q.dtype) if fp32_out else None
    if call.is_empty:
        return empty_result(call, dtype)
    return KERNELS[kernel].forward(call, dtype)


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return empty_output(q, v, accumulator(q.dtype) if others[-2] else None)


def _backward(dout: Tensor | None, dlse: Tensor | None, *inputs: Any) -> Gradients:
    *operands, out, lse, wanted = inputs
    call = _call_of(operands)
    return run_backward(call, out, lse, dout, dlse, wanted, operands[-1])


def run_backward(
    call: Call, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None, wanted: list[bool], kernel: str
) -> Gradients:
    """The kernel's backward pass; nothing flows through a call without pairs, but from the LSE to the sinks."""
    if not call.is_empty and (dout is not None or dlse is not None):
        return KERNELS[kernel].backward(call, out, lse, dout, dlse, wanted)
    grads = empty_gradients(call, wanted)
    for grad in grads:
        grad.zero_()
    if dlse is not None and wanted[4] and call.sinks is not None:
        grads[4].copy_(dlse.sum((0, 2)))
    return grads


def _backward_fake(dout: Tensor | None, dlse: Tensor | None, *inputs: Any) -> Gradients:
    *operands, _, _, wanted = inputs
    return empty_gradients(_call_of(operands), wanted)


def _call_of(operands: list[Any]) -> Call:
    q, k, v, lo, hi, dense, bias, sinks, seed, scale, softcap, dropout_p, _, _ = operands
    return Call(q, k, v, Visibility(lo, hi, dense), bias, sinks, scale, softcap, dropout_p, seed)


# ----------------------------------------------------------------------------------------------------------- autograd
def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:9], *output)
    ctx.scalars = inputs[9:]


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, out, lse = ctx.saved_tensors
    grads: list[Tensor | None] = [None] * _INPUT_COUNT
    if dout is None and dlse is None:
        return tuple(grads)
    wanted = [bool(ctx.needs_input_grad[i]) for i in _DIFFERENTIABLE]
    *scalars, fp32_out, kernel = ctx.scalars
    call = _call_of([*tensors, *scalars, fp32_out, kernel])
    made = attention_backward_op(call, out, lse, dout, dlse, wanted, fp32_out, kernel)
    for index, grad, want in zip(_DIFFERENTIABLE, made, wanted, strict=True):
        grads[index] = grad if want else None
    return tuple(grads)


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: Gradients) -> None:  # noqa: ARG001
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:11])
    ctx.scalars, ctx.wanted = inputs[11:16], inputs[18]


def _differentiate_twice(ctx: Any, *seconds: Tensor | None) -> tuple[Tensor | None, ...]:
    kernel = ctx.scalars[-1]
    if not KERNELS[kernel].differentiable_twice:
        raise UsageError(
            f"a second derivative was asked of attention's kernel {kernel!r}, which has none: use kernel='reference'"
        )
    inputs = ctx.saved_tensors
    leaves = [x if x is None else x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    with torch.enable_grad():
        call = _call_of([*leaves[2:], *ctx.scalars])
        dout, dlse = leaves[:2]
        made = run_backward(call, call.q, call.q, dout, dlse, ctx.wanted, kernel)
        pairs = [(g, s) for g, s, want in zip(made, seconds, ctx.wanted, strict=True) if want and s is not None]
        pairs = [(g, s) for g, s in pairs if g.requires_grad]
    places = [i for i, x in enumerate(leaves) if x is not None and x.requires_grad]
    result: list[Tensor | None] = [None] * 19
    if pairs:
        found = torch.autograd.grad(
            [g for g, _ in pairs], [leaves[i] for i in places], [s for _, s in pairs], allow_unused=True
        )
        for place, grad in zip(places, found, strict=True):
            result[place] = grad
    return tuple(result)


@functools.cache
def register_operators() -> torch.library.Library:
    """Define the operators; the library object must stay alive for as long as the process."""
    library = torch.library.Library("rooftile", "FRAGMENT")
    for schema in _SCHEMAS:
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for name, run, fake in (
        ("attention", _forward, _forward_fake),
        ("attention_backward", _backward, _backward_fake),
    ):
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"rooftile::{name}", fake, lib=library)
    torch.library.register_autograd("rooftile::attention", _differentiate, setup_context=_save, lib=library)
    torch.library.register_autograd(
        "rooftile::attention_backward", _differentiate_twice, setup_context=_save_backward, lib=library
    )
    return library


_LIBRARY = register_operators()


def attention_op(call: Call, fp32_out: bool, kernel: str) -> tuple[Tensor, Tensor]:
    """``out`` and LSE by the operator, differentiable."""
    see = call.visibility
    made: tuple[Tensor, Tensor] = torch.ops.rooftile.attention(
        call.q, call.k, call.v, see.lo, see.hi, see.dense, call.bias, call.sinks, call.seed,
        call.scale, call.softcap, call.dropout_p, fp32_out, kernel,
    )  # fmt: skip
    return made


def attention_backward_op(
    call: Call,
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    wanted: list[bool],
    fp32_out: bool,
    kernel: str,
) -> Gradients:
    """The gradients by the operator, differentiable where the kernel is twice."""
    see = call.visibility
    made: Gradients = torch.ops.rooftile.attention_backward(
        dout, dlse, call.q, call.k, call.v, see.lo, see.hi, see.dense, call.bias, call.sinks, call.seed,
        call.scale, call.softcap, call.dropout_p, fp32_out, kernel, out, lse, wanted,
    )  # fmt: skip
    return made
