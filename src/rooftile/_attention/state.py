"""Partial states of attention: what attention over some of the keys leaves behind, and how two such states become one.

Attention over keys A and B is made of attention over A and attention over B when each keeps its log-sum-exp beside
its output (Milakov and Gimelshein, arXiv 1805.02867; Liu et al., arXiv 2310.01889, section 3). Split-KV decode, a
paged cache and context parallelism all stand on this one identity:

    l = log(exp(l_A) + exp(l_B));   O = exp(l_A - l) O_A + exp(l_B - l) O_B
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Self

import torch
from torch import Tensor

from rooftile._attention.arguments import checked_call
from rooftile._attention.eager import attend
from rooftile._attention.function import needs_grad
from rooftile._attention.kernels import select
from rooftile.errors import UsageError
from rooftile.masks import Mask

__all__ = ["AttentionState", "merge", "merge_all"]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionState:
    """Attention of some queries over some of their keys.

    ``out`` (B, Hq, Lq, Dv) and ``lse`` (B, Hq, Lq), the natural logarithm of the sum of exp(scores), both fp32 (fp64
    for fp64 inputs), so that merging rounds nothing to 16 bits. A row that has seen no key is (0, -inf). Sinks are not
    in a state: they belong to the row as a whole and enter once, in :meth:`finish`.

    Raises :class:`~rooftile.errors.UsageError` for other dtypes, shapes that don't belong together, or two devices.
    """

    out: Tensor
    lse: Tensor

    def __post_init__(self) -> None:
        out, lse = self.out, self.lse
        if out.dtype not in (torch.float32, torch.float64) or lse.dtype != out.dtype:
            raise UsageError(
                f"a partial state is fp32 or fp64 in both parts, and this one has out {out.dtype} and lse {lse.dtype}: "
                "make it with AttentionState.of(q, k, v), which keeps out in fp32 for 16-bit inputs"
            )
        if out.ndim != 4 or lse.shape != out.shape[:3]:
            raise UsageError(
                f"out is (B, Hq, Lq, Dv) and lse (B, Hq, Lq), and these are {tuple(out.shape)} and {tuple(lse.shape)}: "
                "pass the two results of one call"
            )
        if lse.device != out.device:
            raise UsageError(f"out is on {out.device} and lse on {lse.device}: move one to the other's device")

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Mask | None = None,
        bias: Tensor | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        dropout_p: float = 0.0,
        kernel: str | tuple[str, ...] = "auto",
    ) -> Self:
        """The state of q (B, Hq, Lq, D) over k (B, Hkv, Lk, D) and v (B, Hkv, Lk, Dv): arguments of
        :func:`rooftile.attention`.

        ``dropout_p`` is there to be refused: a dropped pair is drawn by its key's index in the whole row, which a part
        of the keys doesn't know.
        """
        if dropout_p:
            raise UsageError(
                f"dropout_p={dropout_p} in a partial state: leave it out, or run rooftile.attention over all keys at "
                "once"
            )
        call = checked_call(q, k, v, mask, bias, scale, softcap, None, 0.0, None)
        with_grad = needs_grad(q, k, v, bias)
        return cls(*attend(call, True, select(kernel, call, with_grad), with_grad))

    def merge(self, other: AttentionState) -> AttentionState:
        """The state over the keys of both; they must not share a key, which would count twice."""
        return merge(self, other)

    def finish(self, dtype: torch.dtype | None = None, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The final output in ``dtype`` (by default the state's own) and LSE, after ``sinks`` (Hq,) have entered.

        A sink is a logit of its head that every row sees and that has no value: it adds exp(sink) to the row sum.
        Finish once, after the last merge.
        """
        if dtype is not None and not dtype.is_floating_point:
            raise UsageError(f"finish(dtype={dtype}) would cut the output to integers: give a floating-point dtype")
        state = self if sinks is None else merge(self, _sink_state(self, sinks))
        return (state.out if dtype is None else state.out.to(dtype)), state.lse


def merge(a: AttentionState, b: AttentionState) -> AttentionState:
    """The state over the keys of ``a`` and of ``b``: commutative, and associative to rounding. Differentiable."""
    return merge_all((a, b))


def merge_all(states: Sequence[AttentionState]) -> AttentionState:
    """The state over the keys of all ``states``: one shift by the largest LSE, one sum in the order given.

    Gaps of any size between the LSEs are fine (the exponents are never positive), (0, -inf) merged with itself stays
    itself, NaN propagates. No input is copied into a stack. Raises :class:`~rooftile.errors.UsageError` for an empty
    sequence and for states of different shape, dtype or device.
    """
    if isinstance(states, AttentionState) or not all(isinstance(state, AttentionState) for state in states):
        found = type(states).__name__ if isinstance(states, AttentionState) else [type(s).__name__ for s in states]
        raise UsageError(f"merge_all takes a sequence of AttentionState, and this is {found}: pass states in a list")
    if not states:
        raise UsageError("merge_all of no state has no shape: pass at least one state")
    first = states[0]
    for i, state in enumerate(states):
        _check_alike(first, state, i)
    if len(states) == 1:
        return first
    # The shift changes nothing but rounding, so no gradient goes through it. A row without keys needs a finite one.
    largest = reduce(torch.maximum, (state.lse.detach() for state in states))
    shift = torch.where(largest == -torch.inf, 0, largest)
    weights = [torch.exp(state.lse - shift) for state in states]
    total = reduce(torch.add, weights)
    unseen = total == 0
    total = torch.where(unseen, 1, total)
    out = reduce(torch.add, (_weighted(state, weight) for state, weight in zip(states, weights, strict=True)))
    # Divided by the sum of these very weights: exp(l_A - l) would carry the rounding of l, about |l| ulps.
    return AttentionState(out / total.unsqueeze(-1), torch.where(unseen, -torch.inf, shift + torch.log(total)))


def _weighted(state: AttentionState, weight: Tensor) -> Tensor:
    """The state's share; a row without keys has none, whatever memory lies in its out (0 * NaN is NaN)."""
    return torch.where((state.lse == -torch.inf).unsqueeze(-1), 0, state.out) * weight.unsqueeze(-1)


def _check_alike(first: AttentionState, state: AttentionState, i: int) -> None:
    for what in ("shape", "dtype", "device"):
        expected, found = getattr(first.out, what), getattr(state.out, what)
        if found != expected:
            raise UsageError(
                f"states merge when they are of the same queries, and state {i} has {what} {found} where state 0 has "
                f"{expected}: take both from the same q, with values of one head dim"
            )


def _sink_state(state: AttentionState, sinks: Tensor) -> AttentionState:
    """A sink as a state of its own: the value 0 seen with the logit ``sinks[h]``."""
    heads = state.lse.shape[1]
    if sinks.shape != (heads,) or not sinks.is_floating_point():
        raise UsageError(
            f"sinks is one logit a query head, a floating-point tensor ({heads},), and this is {sinks.dtype} "
            f"{tuple(sinks.shape)}: pass one value for each of the {heads} heads"
        )
    if sinks.device != state.lse.device:
        raise UsageError(f"sinks is on {sinks.device} and the state on {state.lse.device}: move sinks there")
    lse = sinks.to(state.lse.dtype).view(1, heads, 1).expand(state.lse.shape)
    return AttentionState(torch.zeros_like(state.out), lse)
