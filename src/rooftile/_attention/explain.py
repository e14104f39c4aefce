"""What a call would do, before it does it: the kernel and why no other, its precision, tiles, arithmetic and bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor

from rooftile._attention.arguments import checked_call, checked_dropout, short
from rooftile._attention.call import Call
from rooftile._attention.function import needs_grad
from rooftile._attention.kernel import Contract
from rooftile._attention.kernels import KERNELS, checked_names, refusals, select
from rooftile._attention.tiles import row_tiles
from rooftile.masks import Mask

__all__ = ["Explanation", "explain", "with_explain"]

_P = ParamSpec("_P")
_R = TypeVar("_R", covariant=True)


@dataclass(frozen=True, slots=True)
class Explanation:
    """One call's account. Shares are of the square of all (sequence, head, query, key); FLOPs and bytes of the
    forward pass: a multiply and an add are two, each operand and result crosses once.
    """

    shapes: str
    kernel: str
    asked: tuple[str, ...]
    path: str
    contract: Contract
    q_tile: int
    kv_tile: int
    visible_share: float
    visited_share: float
    flops: int
    dense_flops: int
    bytes: int
    refusals: dict[str, tuple[str, ...]]
    lacks: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        c = self.contract
        lines = [
            f"attention {self.shapes}: kernel {self.kernel!r}, path {self.path} (asked for: {', '.join(self.asked)})",
            f"  precision   storage {c.storage}, product {c.product}, accumulate {c.accumulate}, output {c.output}; "
            f"{c.determinism}",
            f"  tiles       {self.q_tile} queries x {self.kv_tile} keys",
            f"  square      {self.visible_share:.2%} visible, {self.visited_share:.2%} visited",
            f"  forward     {self.flops:,} FLOP ({self.dense_flops:,} without skipping), {self.bytes:,} bytes",
        ]
        lines += [f"  lacks       {point}" for point in self.lacks]
        for name, reasons in self.refusals.items():
            if name == self.kernel:
                continue
            able = "able, and later in the order" if name in self.asked else "able, and not asked for"
            lines.append(f"  {name:<11} " + (f"refused: {'; '.join(reasons)}" if reasons else able))
        return "\n".join(lines)


@torch.compiler.disable(reason="an explanation is for people: no graph can hold it")  # type: ignore[untyped-decorator]
def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    return_lse: bool = False,  # noqa: ARG001 - the same arguments as the call's
    kernel: str | tuple[str, ...] = "auto",
) -> Explanation:
    """What :func:`rooftile.attention` would do with the same arguments; nothing is computed, no random number drawn.

    Raises the errors that the call would raise.
    """
    checked_dropout(dropout_p, generator)
    # The seed comes from a generator of its own: explaining a step must not change the next.
    call = checked_call(q, k, v, mask, bias, scale, softcap, sinks, dropout_p, torch.Generator())
    with_grad = needs_grad(q, k, v, bias, sinks)
    name = select(kernel, call, with_grad)
    plan = KERNELS[name].plan(call)
    pairs = call.q.shape[0] * call.q.shape[1] * call.q.shape[2] * call.k.shape[2]
    return Explanation(
        shapes=f"q {short(call.q)}, k {short(call.k)}, v {short(call.v)} {_dtype(call.q.dtype)} on {call.q.device}",
        kernel=name,
        asked=checked_names(kernel),
        path=plan.path,
        contract=KERNELS[name].contract(call),
        q_tile=plan.q_tile,
        kv_tile=plan.kv_tile,
        visible_share=visible_share(call),
        visited_share=plan.visited / pairs if pairs else 0.0,
        flops=_flops(call, plan.visited),
        dense_flops=_flops(call, pairs),
        bytes=_bytes(call),
        refusals=refusals(call, with_grad),
        lacks=KERNELS[name].lacks,
    )


class Explained(Protocol[_P, _R]):
    """A function, and its account under the same arguments."""

    explain: Callable[_P, Explanation]

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R: ...


def with_explain(function: Callable[_P, _R]) -> Explained[_P, _R]:
    """``function`` itself, with :func:`explain` as its attribute."""
    explained = cast(Explained[_P, _R], function)
    explained.explain = cast(Callable[_P, Explanation], explain)
    return explained


def visible_share(call: Call) -> float:
    """Visible pairs as a share of the square, by intervals, booleans and a bias of -inf."""
    q_len, kv_len = call.q.shape[2], call.k.shape[2]
    if call.is_empty:
        return 0.0
    see = call.visibility
    if see.dense is None and call.bias is None:
        if see.lo is None or see.hi is None:
            return 1.0
        return float((see.hi - see.lo).clamp(min=0).double().mean()) / kv_len
    seen, pairs = 0, 0
    for tile in row_tiles(q_len, kv_len):
        shown = tile.visible(call)
        if call.bias is not None:
            part = tile.part(call.bias) != -torch.inf
            part = part.unsqueeze(2) if part.shape[1] == 1 else part.unflatten(1, (-1, call.group))
            shown = part if shown is None else shown & part
        if shown is not None:
            shown = shown.expand(*shown.shape[:3], tile.rows.stop - tile.rows.start, kv_len)
            seen += int(shown.sum())
            pairs += shown.numel()
    return seen / pairs


def _flops(call: Call, visited: int) -> int:
    """2 D for q k^T and 2 Dv for p v a pair; scale, maximum, subtract, exp, sum, a bias 1, dropout 3; one division a
    result.
    """
    elementwise = 5 + (call.bias is not None) + 3 * (call.seed is not None)
    results = call.q.shape[0] * call.q.shape[1] * call.q.shape[2] * call.v.shape[3]
    return visited * (2 * (call.q.shape[3] + call.v.shape[3]) + elementwise) + results


def _bytes(call: Call) -> int:
    """Every operand and result once."""
    see = call.visibility
    operands = (call.q, call.k, call.v, see.lo, see.hi, see.dense, call.bias, call.sinks)
    rows = call.q.shape[0] * call.q.shape[1] * call.q.shape[2]
    results = rows * (call.v.shape[3] * call.q.element_size() + call.accumulator.itemsize)
    return sum(x.numel() * x.element_size() for x in operands if x is not None) + results


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
