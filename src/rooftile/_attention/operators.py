"""``rooftile::attention`` and ``rooftile::attention_backward``: what autograd, torch.compile, export and audits see.

Tensors and scalars only; the kernel is a name that was chosen before. Defined through ``torch.library.Library``, which
costs a small call a third of what ``custom_op`` does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile._attention.call import Call, accumulator, empty_gradients, empty_output
from rooftile._attention.kernel import Gradients
from rooftile._attention.kernels import KERNELS
from rooftile._attention.run import run_backward, run_forward
from rooftile._attention.schema import DIFFERENTIABLE, INPUT_COUNT, SCHEMAS, TENSOR_COUNT
from rooftile.errors import UsageError
from rooftile.masks import Visibility

__all__ = [
    "LIBRARY",
    "attention_backward_op",
    "attention_op",
    "differentiate_twice",
    "inputs_of",
    "save_backward",
    "save_forward",
]


#: dout and dlse, the inputs of the forward pass, out, lse, wanted.
_BACKWARD_INPUT_COUNT = 2 + INPUT_COUNT + 3


def _forward(
    q: Tensor, k: Tensor, v: Tensor, lo: Tensor | None, hi: Tensor | None, dense: Tensor | None, bias: Tensor | None,
    sinks: Tensor | None, seed: Tensor | None, scale: float, softcap: float, dropout_p: float, fp32_out: bool,
    kernel: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    call = Call(q, k, v, Visibility(lo, hi, dense), bias, sinks, scale, softcap, dropout_p, seed)
    return run_forward(call, fp32_out, kernel)


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return empty_output(q, v, accumulator(q.dtype) if others[-2] else None)


def _backward(dout: Tensor | None, dlse: Tensor | None, *inputs: Any) -> Gradients:
    *operands, out, lse, wanted = inputs
    call = _call_of(operands)
    return run_backward(call, out, lse, dout, dlse, wanted, operands[-1])


def _backward_fake(dout: Tensor | None, dlse: Tensor | None, *inputs: Any) -> Gradients:
    *operands, _, _, wanted = inputs
    return empty_gradients(_call_of(operands), wanted)


def _call_of(operands: list[Any]) -> Call:
    q, k, v, lo, hi, dense, bias, sinks, seed, scale, softcap, dropout_p, _, _ = operands
    return Call(q, k, v, Visibility(lo, hi, dense), bias, sinks, scale, softcap, dropout_p, seed)


# ----------------------------------------------------------------------------------------------------------- autograd
def save_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """What the backward pass reads."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:TENSOR_COUNT], *output)
    ctx.scalars = inputs[TENSOR_COUNT:]


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, out, lse = ctx.saved_tensors
    grads: list[Tensor | None] = [None] * INPUT_COUNT
    if dout is None and dlse is None:
        return tuple(grads)
    wanted = [bool(ctx.needs_input_grad[i]) for i in DIFFERENTIABLE]
    *scalars, fp32_out, kernel = ctx.scalars
    call = _call_of([*tensors, *scalars, fp32_out, kernel])
    made = attention_backward_op(call, out, lse, dout, dlse, wanted, fp32_out, kernel)
    for index, grad, want in zip(DIFFERENTIABLE, made, wanted, strict=True):
        grads[index] = grad if want else None
    return tuple(grads)


def save_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """What the second derivative reads."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:11])
    ctx.scalars, ctx.wanted = inputs[11:16], inputs[18]


def differentiate_twice(ctx: Any, *seconds: Tensor | None) -> tuple[Tensor | None, ...]:
    """The second derivative, by autograd through the kernel's own backward pass where that is torch operations."""
    kernel = ctx.scalars[-1]
    if not KERNELS[kernel].differentiable_twice:
        raise UsageError(
            f"a second derivative was asked of attention's kernel {kernel!r}, which has none: use kernel='reference'"
        )
    operands = list(ctx.saved_tensors)
    places = [i for i, x in enumerate(operands) if x is not None and x.is_floating_point()]

    def first(*leaves: Tensor) -> Gradients:
        inputs = operands.copy()
        for place, leaf in zip(places, leaves, strict=True):
            inputs[place] = leaf
        call = _call_of([*inputs[2:], *ctx.scalars])
        # The reference needs no out and no LSE.
        return run_backward(call, call.q, call.q, inputs[0], inputs[1], ctx.wanted, kernel)

    derived: Any = torch.func.vjp(first, *(operands[place] for place in places))
    made, pull = derived
    found = pull(tuple(torch.zeros_like(g) if s is None else s for g, s in zip(made, seconds, strict=True)))
    result: list[Tensor | None] = [None] * _BACKWARD_INPUT_COUNT
    for place, grad in zip(places, found, strict=True):
        result[place] = grad
    return tuple(result)


def _register_operators() -> torch.library.Library:
    library = torch.library.Library("rooftile", "FRAGMENT")
    for schema in SCHEMAS:
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for name, run, fake in (
        ("attention", _forward, _forward_fake),
        ("attention_backward", _backward, _backward_fake),
    ):
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"rooftile::{name}", fake, lib=library)
    torch.library.register_autograd("rooftile::attention", _differentiate, setup_context=save_forward, lib=library)
    torch.library.register_autograd(
        "rooftile::attention_backward", differentiate_twice, setup_context=save_backward, lib=library
    )
    return library


#: Held for as long as the process: its end would undo the registrations.
LIBRARY = _register_operators()


def inputs_of(call: Call, fp32_out: bool, kernel: str) -> tuple[Any, ...]:
    """The call as the operators take it."""
    see = call.visibility
    return (
        call.q, call.k, call.v, see.lo, see.hi, see.dense, call.bias, call.sinks, call.seed,
        call.scale, call.softcap, call.dropout_p, fp32_out, kernel,
    )  # fmt: skip


def attention_op(call: Call, fp32_out: bool, kernel: str) -> tuple[Tensor, Tensor]:
    """``out`` and LSE by the operator, differentiable."""
    made: tuple[Tensor, Tensor] = torch.ops.rooftile.attention(*inputs_of(call, fp32_out, kernel))
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
    made: Gradients = torch.ops.rooftile.attention_backward(
        dout, dlse, *inputs_of(call, fp32_out, kernel), out, lse, wanted
    )
    return made
