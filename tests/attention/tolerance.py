"""How wrong a kernel may be: the one place where a tolerance comes from.

For each result X (out, LSE, dQ, dK, dV, dBias, dSinks), in the maximum and in the mean over its elements::

    |kernel - exact|  <=  2 |eager - exact|  +  floor          floor = u |X| + 4 w A

*eager* is what a model without a fused kernel does: the scores, the probabilities and every gradient materialised by
plain torch operations in the dtype of the inputs (:func:`eager`). Twice its error, because a kernel adds in another
order, which changes the error of a sum but not its size.

The floor is for results where eager happens to make no error at all (one key, equal values, powers of two), and is what
any kernel must be allowed to round, to first order:

- ``u |X|``: storing X in the output's format; u is the unit roundoff, half the distance from 1 to the next number.
- ``4 w A``: w is the unit roundoff of the arithmetic, which is FP32 for 16-bit inputs as well, and A the oracle's
  spread (``oracle.py``): X's error if each quantity on the way is off by w. A rounding is off by w / sqrt(3) on
  average, so 4 w is 7 standard deviations, which no element of a million exceeds, and leaves room for an exponential
  within 2 units.
- ``2 u B``, 16-bit inputs only: a kernel's products take 16-bit operands, so P, dS and O (for D) are rounded on the
  way; B is the oracle's operand spread. u bounds such a rounding and is 2.4 standard deviations of it. The row sum is
  the sum of the rounded P, so the LSE has this part too, though it is stored in FP32 whatever the inputs are.
- FP16 operands may be held as pairs of bfloat16 parts, whose last product is dropped: a relative 2^-9 of 2^-9 of each
  product of q and k, which the FP32 result, the LSE, shows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .oracle import Array, Exact, Problem, array, exact, visible_pairs
from .philox import dropout_factor

UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24, torch.float64: 2.0**-53}
ROUNDINGS, OPERAND_ROUNDINGS = 4, 2
Results = dict[str, Tensor]


def materialised_visibility(problem: Problem) -> Tensor:
    """(B, Hq, Lq, Lk) bool."""
    batch, heads = problem.q.shape[:2]
    planes = [np.stack([visible_pairs(problem, b, h) for h in range(heads)]) for b in range(batch)]
    return torch.from_numpy(np.stack(planes)).reshape(batch, heads, problem.q.shape[2], problem.k.shape[2])


def eager(problem: Problem, wanted: tuple[str, ...] = ()) -> Results:
    """Attention as an eager model writes it, in the dtype of the inputs; gradients by autograd for the names wanted.

    The LSE has FP32 scores (16-bit inputs) because it is an FP32 result: judged by scores that were rounded to 16 bits
    it could be wrong in its third digit.
    """
    inputs = {"dq": problem.q, "dk": problem.k, "dv": problem.v, "dbias": problem.bias, "dsinks": problem.sinks}
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items() if x is not None}
    seen = materialised_visibility(problem)
    out, lse = _eager_forward(problem, leaves, seen)
    results = {"out": out.detach()}
    with torch.no_grad():
        wide = {name: x.float() if x.dtype.itemsize == 2 else x for name, x in leaves.items()}
        results["lse"] = _eager_forward(problem, wide, seen)[1]
    if wanted:
        outputs, weights = [out], [problem.dout]
        if problem.dlse is not None:
            outputs, weights = [out, lse], [problem.dout, problem.dlse.to(lse.dtype)]
        grads = torch.autograd.grad(outputs, [leaves[name] for name in wanted], weights)
        results |= dict(zip(wanted, grads, strict=True))
    return results


def _eager_forward(problem: Problem, x: dict[str, Tensor], seen: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = x["dq"], x["dk"], x["dv"]
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scale = q.shape[3] ** -0.5 if problem.scale is None else problem.scale
    batch, heads, q_len, _ = q.shape
    empty = q.new_empty(batch * heads, q_len, k.shape[2])
    scores = torch.baddbmm(empty, q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=scale).view(seen.shape)
    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    if problem.bias is not None:
        finite = x["dbias"].masked_fill(x["dbias"].isneginf(), 0)  # ``seen`` has the others
        scores = scores + finite.to(scores.dtype)
    some = seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen & some, -torch.inf)  # a row of -inf alone would give NaN gradients
    if problem.sinks is not None:
        sinks = x["dsinks"].to(scores.dtype).view(1, -1, 1, 1).expand(batch, heads, q_len, 1)
        scores = torch.cat([scores.masked_fill(~some, -torch.inf), sinks], dim=-1)
        some = torch.ones_like(some)
    p = scores.softmax(-1)[..., : k.shape[2]]
    lse = torch.logsumexp(scores.float() if scores.dtype.itemsize == 2 else scores, -1)
    if problem.dropout_p:
        planes = range(batch * heads)
        kept = [dropout_factor(problem.seed, problem.dropout_p, plane, q_len, k.shape[2]) for plane in planes]
        p = p * torch.from_numpy(np.stack(kept)).view(p.shape).to(p.dtype)
    return (p @ v).masked_fill(~some, 0), lse.masked_fill(~some.squeeze(-1), -torch.inf)


@dataclasses.dataclass(frozen=True)
class Judge:
    """One problem, its exact results and those of eager, computed once for all kernels."""

    problem: Problem
    exact: Exact
    eager: Results

    @classmethod
    def of(cls, problem: Problem, wanted: tuple[str, ...]) -> Judge:
        """Fp64 problems are judged in extended precision."""
        wide: Any = np.longdouble if problem.q.dtype == torch.float64 else np.float64
        return cls(problem, exact(problem, wide), eager(problem, wanted))

    def floor(self, name: str) -> Array:
        """The round-off floor, element by element."""
        inputs, value = self.problem.q.dtype, self.exact.value[name]
        arithmetic = 2.0**-53 if inputs == torch.float64 else 2.0**-24
        if inputs == torch.float16 and name == "lse":
            arithmetic = 2.0**-18
        stored = UNIT_ROUNDOFF[self.eager[name].dtype]
        finite = np.where(np.isfinite(value), abs(value), 0)
        floor: Array = stored * finite + ROUNDINGS * arithmetic * self.exact.spread(name)
        if inputs.itemsize == 2:
            floor = floor + OPERAND_ROUNDINGS * UNIT_ROUNDOFF[inputs] * self.exact.operand_spread(name)
        return floor

    def errors(self, name: str, got: Tensor) -> tuple[Array, Array]:
        """|got - exact| and |eager - exact|; where the exact result is infinite (the LSE of a row that sees nothing) or
        NaN, the same value is no error and another one is an infinite error.
        """
        value = self.exact.value[name]
        both = []
        for x in (got, self.eager[name]):
            computed = array(x, value.dtype.type)
            with np.errstate(invalid="ignore"):
                same = (computed == value) | (np.isnan(computed) & np.isnan(value))
                error = np.where(same, 0, abs(computed - value))
            both.append(np.where(np.isnan(error), np.inf, error))
        return both[0], both[1]

    def complaints(self, results: Results) -> list[str]:
        """One line for each result that is further from the truth than it may be."""
        lines = []
        for name, got in results.items():
            assert got.shape == self.exact.value[name].shape, f"{name}: shape {tuple(got.shape)}"
            if not got.numel():
                continue
            mine, theirs = self.errors(name, got)
            floor = self.floor(name)
            for statistic in (np.max, np.mean):
                error, allowed = statistic(mine), 2 * statistic(theirs) + statistic(floor)
                assert np.isfinite(allowed), f"{name}: eager gives no tolerance for this input"
                if not error <= allowed:
                    parts = f"2 x {statistic(theirs):.3g} of eager + floor {statistic(floor):.3g}"
                    largest = f"largest {np.abs(self.exact.value[name]).max():.3g}"
                    lines.append(f"{name}: {statistic.__name__} error {error:.3g} > {allowed:.3g} = {parts}; {largest}")
        return lines
