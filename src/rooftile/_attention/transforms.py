"""The operators under ``torch.func``: vmap folds the mapped dim into the batch, grad is written as functorch wants it.

Where folding would change a result (dropout bits, which count sequences; a gradient of the sinks, which sums over them)
the examples run one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile._attention.operators import LIBRARY, differentiate_twice, save_backward, save_forward
from rooftile._attention.schema import BIAS, DIFFERENTIABLE, INPUT_COUNT, SEED, SINKS, TENSOR_COUNT, V
from rooftile.errors import UsageError

__all__ = ["attention_transformed", "backward_transformed"]

_REVERSE_ONLY = (
    "a forward-mode derivative was asked of attention (torch.func.hessian is jacfwd of jacrev), which has reverse mode "
    "only: use jacrev(jacrev(f)), with kernel='reference' for second derivatives"
)

_Rule = tuple[tuple[Tensor, ...], tuple[int, ...]]


class _Attention(torch.autograd.Function):
    """``rooftile::attention`` for function transforms."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        made: tuple[Tensor, Tensor] = torch.ops.rooftile.attention(*inputs)
        return made

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        save_forward(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        wanted = [bool(ctx.needs_input_grad[i]) for i in DIFFERENTIABLE]
        made = backward_transformed(*grads, *tensors, *ctx.scalars, out, lse, wanted)
        result: list[Tensor | None] = [None] * INPUT_COUNT
        for place, grad, want in zip(DIFFERENTIABLE, made, wanted, strict=True):
            result[place] = grad if want else None
        return tuple(result)

    @staticmethod
    def jvp(*_: Any) -> Any:
        raise UsageError(_REVERSE_ONLY)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> _Rule:
        return _batched_forward(attention_transformed, info.batch_size, in_dims, inputs)


class _Backward(torch.autograd.Function):
    """``rooftile::attention_backward`` for function transforms."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = torch.ops.rooftile.attention_backward(*inputs)
        return made

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        save_backward(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *seconds: Tensor | None) -> tuple[Tensor | None, ...]:
        return differentiate_twice(ctx, *seconds)

    @staticmethod
    def jvp(*_: Any) -> Any:
        raise UsageError(_REVERSE_ONLY)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> _Rule:
        return _batched_backward(backward_transformed, info.batch_size, in_dims, inputs)


def attention_transformed(*inputs: Any) -> tuple[Tensor, Tensor]:
    """The operator, seen by every transform that is active."""
    made: tuple[Tensor, Tensor] = _Attention.apply(*inputs)
    return made


def backward_transformed(*inputs: Any) -> tuple[Tensor, ...]:
    """The operator's backward pass, seen by every transform that is active."""
    made: tuple[Tensor, ...] = _Backward.apply(*inputs)
    return made


def _batched_forward(
    run: Callable[..., tuple[Tensor, Tensor]], size: int, in_dims: tuple[int | None, ...], inputs: tuple[Any, ...]
) -> _Rule:
    if inputs[SEED] is not None or in_dims[SINKS] is not None:
        return _one_by_one(run, size, in_dims, inputs)
    folded = _folded(size, in_dims, inputs, whole=())
    return tuple(x.unflatten(0, (size, -1)) for x in run(*folded)), (0, 0)


def _batched_backward(
    run: Callable[..., tuple[Tensor, ...]], size: int, in_dims: tuple[int | None, ...], inputs: tuple[Any, ...]
) -> _Rule:
    operands, operand_dims = inputs[2 : 2 + INPUT_COUNT], in_dims[2 : 2 + INPUT_COUNT]
    wanted = inputs[-1]
    if operands[SEED] is not None or operand_dims[SINKS] is not None or wanted[4]:
        return _one_by_one(run, size, in_dims, inputs)
    batch = _length(operands[0], operand_dims[0])
    folded = _folded(size, operand_dims, operands, whole=(BIAS,) if wanted[3] else ())
    grads, results = (
        [None if x is None else _fold(x, dim, size, batch) for x, dim in zip(xs, dims, strict=True)]
        for xs, dims in ((inputs[:2], in_dims[:2]), (inputs[-3:-1], in_dims[-3:-1]))
    )
    made = [
        x.unflatten(0, (size, -1)) if x.numel() else x.new_empty(size, 0)
        for x in run(*grads, *folded, *results, wanted)
    ]
    if wanted[3] and _length(operands[BIAS], operand_dims[BIAS]) == 1:
        made[3] = made[3].sum(1, keepdim=True)
    return tuple(made), (0,) * len(made)


def _one_by_one(
    run: Callable[..., tuple[Tensor, ...]], size: int, in_dims: tuple[int | None, ...], inputs: tuple[Any, ...]
) -> _Rule:
    results = [
        run(*(x.select(dim, i) if isinstance(dim, int) else x for x, dim in zip(inputs, in_dims, strict=True)))
        for i in range(size)
    ]
    stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def _folded(size: int, in_dims: tuple[int | None, ...], inputs: tuple[Any, ...], whole: tuple[int, ...]) -> list[Any]:
    """The operands with the mapped dim in the batch; what all sequences share stays shared, but for ``whole``."""
    batch = _length(inputs[0], in_dims[0])
    folded = list(inputs)
    for place in range(TENSOR_COUNT):
        x, dim = inputs[place], in_dims[place]
        if x is None or place in (SINKS, SEED):
            continue
        if place > V and dim is None and x.shape[0] == 1 and place not in whole:
            continue
        folded[place] = _fold(x, dim, size, batch)
    return folded


def _fold(x: Tensor, dim: int | None, size: int, batch: int) -> Tensor:
    x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.expand(size, batch, *x.shape[2:]).flatten(0, 1)


def _length(x: Tensor, dim: int | None) -> int:
    """The first size of a tensor as one example has it."""
    return x.shape[1] if dim == 0 else x.shape[0]


def _register_batching() -> None:
    """Batching rules of the operators themselves: gradients that are batched call them directly."""

    def forward(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> _Rule:
        return _batched_forward(torch.ops.rooftile.attention, info.batch_size, in_dims, inputs)

    def backward(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> _Rule:
        return _batched_backward(torch.ops.rooftile.attention_backward, info.batch_size, in_dims, inputs)

    torch.library.register_vmap("rooftile::attention", forward, lib=LIBRARY)
    torch.library.register_vmap("rooftile::attention_backward", backward, lib=LIBRARY)


_register_batching()
