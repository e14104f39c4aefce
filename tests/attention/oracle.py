"""Attention from its definition, one head at a time, in FP64 (or more): what the kernels are judged by.

Nothing here comes from the package under test, and the gradients are the derivation's, not autograd's::

    s = scale q k^T       t = cap tanh(s / cap)      z = t + bias            over the visible pairs
    L = log(sum_j exp z_j + exp sink)                p = exp(z - L)          w = p * kept / (1 - dropout)
    o = w v               d = sum(do * o) - dL       dz = w (do v^T) - p d   ds = dz (1 - (t / cap)^2)
    dq = scale ds k       dk = scale ds^T q          dv = w^T do             dsink = -sum_i exp(sink - L) d

A pair that is not visible takes part in no sum, so whatever its operands hold (NaN, Inf) stays out.

Beside every value stands its *spread*: by how much, in units of a relative rounding error u, it moves when every
product, score, exponential, sum and stored quantity on the way is off by an independent u of its own size (first order;
independent errors add as squares, an error that a whole row shares adds as it stands). Its *operand spread* is the
same for those roundings alone that 16-bit kernels make between their products: p before p v and p^T do, ds before ds k
and ds^T q, and o, which d is computed from. ``tolerance.py`` makes the round-off floor from the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .philox import dropout_factor

Array = npt.NDArray[Any]
#: visible(b, h, i, j) -> bool, on index arrays that broadcast; ``None`` is every pair.
Predicate = Callable[[int, int, Array, Array], Array]


@dataclass(frozen=True)
class Problem:
    """One call: ``q`` (B, Hq, Lq, D), ``k`` (B, Hkv, Lk, D), ``v`` (B, Hkv, Lk, Dv), and what multiplies the results in
    the loss.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None = None
    visible: Predicate | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    scale: float | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    seed: int = 0


@dataclass
class Exact:
    """By name ("out", "lse", "dq", "dk", "dv", "dbias", "dsinks"): the value, and the squares of its two spreads."""

    value: dict[str, Array] = field(default_factory=dict)
    variance: dict[str, Array] = field(default_factory=dict)
    operand_variance: dict[str, Array] = field(default_factory=dict)

    def zeros(self, name: str, shape: tuple[int, ...], dtype: Any) -> None:
        for kind in (self.value, self.variance, self.operand_variance):
            kind[name] = np.zeros(shape, dtype)

    def add(self, name: str, at: Any, value: Array, variance: Array, operand_variance: Array) -> None:
        self.value[name][at] += value
        self.variance[name][at] += variance
        self.operand_variance[name][at] += operand_variance

    def spread(self, name: str) -> Array:
        """Of the sum, and one u of the value itself."""
        return np.sqrt(self.variance[name]) + np.where(np.isfinite(self.value[name]), abs(self.value[name]), 0)

    def operand_spread(self, name: str) -> Array:
        """What rounding the operands of the second products adds."""
        return np.sqrt(self.operand_variance[name])


def array(tensor: Tensor, dtype: Any = np.float64) -> Array:
    """The tensor's values, exactly (every dtype of the package is a subset of FP64)."""
    return tensor.detach().double().numpy().astype(dtype)


def visible_pairs(problem: Problem, b: int, h: int) -> npt.NDArray[np.bool_]:
    """(Lq, Lk): the predicate, less the pairs that a bias of -inf hides."""
    q_len, kv_len = problem.q.shape[2], problem.k.shape[2]
    i, j = np.arange(q_len)[:, None], np.arange(kv_len)[None, :]
    seen = np.ones((q_len, kv_len), bool)
    if problem.visible is not None:
        seen &= problem.visible(b, h, i, j)
    if problem.bias is not None:
        seen &= ~np.isneginf(array(_spread(problem.bias, problem)[b, h]))
    return seen


def _spread(bias: Tensor, problem: Problem) -> Tensor:
    return bias.expand(*problem.q.shape[:3], problem.k.shape[2])


def _sum(weights: Array, values: Array, seen: npt.NDArray[np.bool_]) -> Array:
    """``weights @ values`` over the pairs that are seen: 0 * NaN of a hidden one does not count."""
    if np.isfinite(values).all():
        return np.where(seen, weights, 0) @ values
    return np.stack([weights[row, keys] @ values[keys] for row, keys in enumerate(seen)])


def exact(problem: Problem, dtype: Any = np.float64) -> Exact:
    """Output, LSE and all gradients. ``dtype`` is the type of the arithmetic (``np.longdouble`` judges FP64)."""
    batch, q_heads, q_len, _ = problem.q.shape
    result = Exact()
    result.zeros("out", (*problem.q.shape[:3], problem.v.shape[3]), dtype)
    result.zeros("lse", (batch, q_heads, q_len), dtype)
    for name, tensor in (("dq", problem.q), ("dk", problem.k), ("dv", problem.v)):
        result.zeros(name, tuple(tensor.shape), dtype)
    if problem.bias is not None:
        result.zeros("dbias", tuple(_spread(problem.bias, problem).shape), dtype)
    if problem.sinks is not None:
        result.zeros("dsinks", (q_heads,), dtype)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        for b in range(batch):
            for h in range(q_heads):
                _add_head(problem, result, b, h, dtype)
    if problem.bias is not None:  # a broadcast bias is one value used many times: its gradient is the sum
        for kind in (result.value, result.variance, result.operand_variance):
            axes = tuple(axis for axis, size in enumerate(problem.bias.shape) if size == 1)
            kind["dbias"] = kind["dbias"].sum(axis=axes, keepdims=True)
    return result


def _add_head(problem: Problem, result: Exact, b: int, h: int, dtype: Any) -> None:
    """All that query head ``h`` of sequence ``b`` contributes."""
    group = problem.q.shape[1] // problem.k.shape[1]
    q, k, v = (array(x, dtype) for x in (problem.q[b, h], problem.k[b, h // group], problem.v[b, h // group]))
    scale = dtype(problem.q.shape[3] ** -0.5 if problem.scale is None else problem.scale)
    seen = visible_pairs(problem, b, h)

    # Scores. x_var is the variance of x in units of u squared.
    s, s_var = scale * (q @ k.T), scale**2 * (q**2 @ k.T**2)
    s_var += s**2
    slope, z = dtype(1), s
    if problem.softcap:
        bent = np.tanh(s / problem.softcap)
        z, slope = problem.softcap * bent, 1 - bent**2
    z_var = s_var
    if problem.bias is not None:
        bias = array(_spread(problem.bias, problem)[b, h], dtype)
        z, z_var = z + bias, z_var + bias**2
    z = np.where(seen, z, -np.inf)

    # Softmax.
    sink = array(problem.sinks[h], dtype) if problem.sinks is not None else dtype(-np.inf)
    top = np.maximum(z.max(axis=1, initial=-np.inf), sink)[:, None]
    shift = np.where(np.isneginf(top), 0, top)  # a row that sees nothing
    p, p_sink = np.where(seen, np.exp(z - shift), 0), np.exp(sink - shift)
    total = p.sum(axis=1, keepdims=True) + p_sink
    empty = total == 0
    lse = np.where(empty, -np.inf, shift + np.log(np.where(empty, 1, total)))
    p, p_sink = (x / np.where(empty, 1, total) for x in (p, p_sink))
    # Of each probability by itself; and relative, shared by a row: its LSE's, and what equal scores round alike.
    p_var = np.where(seen, p**2 * (1 + z_var), 0)
    row_var = np.where(seen, p * (1 + z_var), 0).sum(axis=1, keepdims=True) + np.where(empty, 0, 1 + lse**2)

    # Output.
    kept = dtype(1)
    if problem.dropout_p:
        plane = b * problem.q.shape[1] + h
        kept = dropout_factor(problem.seed, problem.dropout_p, plane, len(q), len(k)).astype(dtype)
    out = _sum(p * kept, v, seen)
    out_var = _sum(p_var * kept**2, v**2, seen)
    result.add("out", (b, h), out, out_var + out**2 * row_var, _sum((p * kept) ** 2, v**2, seen))
    result.add("lse", (b, h), lse[:, 0], row_var[:, 0], (p**2).sum(axis=1))

    # Gradients.
    dout = array(problem.dout[b, h], dtype)
    dlse = (np.zeros(len(q), dtype) if problem.dlse is None else array(problem.dlse[b, h], dtype))[:, None]
    overlap = (dout * out).sum(axis=1, keepdims=True)
    d = overlap - dlse
    d_var = (dout**2 * (out_var + out**2)).sum(axis=1, keepdims=True) + overlap**2 * row_var + dlse**2 + d**2
    dp, dp_var = kept * (dout @ v.T), kept**2 * (dout**2 @ v.T**2)
    dz = np.where(seen, p * (dp - d), 0)
    d_var = d_var + np.where(seen, p * (dp_var + dp**2), 0).sum(axis=1, keepdims=True)  # what equal values round alike
    dz_var = np.where(seen, p_var * (dp - d) ** 2 + p**2 * (dp_var + dp**2), 0)
    ds = np.where(seen, dz * slope, 0)
    ds_var = np.where(seen, dz_var * slope**2 + dz**2 * (2 * (1 - slope)) ** 2 * (1 + s_var), 0)
    # A row shares its errors of d and of the LSE: over its keys they add as they stand, over a key's rows as squares.
    dq, d_row = _sum(ds, k, seen), _sum(p * slope, k, seen) ** 2 * d_var
    d_pair = np.where(seen, (p * slope) ** 2 * d_var + ds**2 * row_var, 0)
    o_var = (dout**2 * out**2).sum(axis=1, keepdims=True)  # of d, by the rounding of the output alone
    o_row, o_pair = d_row / np.where(d_var == 0, 1, d_var) * o_var, np.where(seen, (p * slope) ** 2 * o_var, 0)

    dq_var, dq_operands = _sum(ds_var, k**2, seen) + d_row + dq**2 * row_var, _sum(ds**2, k**2, seen) + o_row
    result.add("dq", (b, h), scale * dq, scale**2 * dq_var, scale**2 * dq_operands)
    dk_var, dk_operands = (_sum(x.T, q**2, seen.T) for x in (ds_var + d_pair, ds**2 + o_pair))
    result.add("dk", (b, h // group), scale * _sum(ds.T, q, seen.T), scale**2 * dk_var, scale**2 * dk_operands)
    dv_var, dv_operands = (_sum((x * kept**2).T, dout**2, seen.T) for x in (p_var + p**2 * row_var, p**2))
    result.add("dv", (b, h // group), _sum((p * kept).T, dout, seen.T), dv_var, dv_operands)
    if problem.bias is not None:
        shared_p, shared_dz = (_shared_by_rows(x, problem.bias) for x in (p, dz))
        dbias_var = dz_var + shared_p * d_var + shared_dz * row_var
        result.add("dbias", (b, h), dz, dbias_var, shared_p * o_var)
    if problem.sinks is not None:
        dsink_var = p_sink**2 * (d_var + d**2 * (1 + sink**2 + row_var))
        result.add("dsinks", h, -(p_sink * d).sum(), dsink_var.sum(), (p_sink**2 * o_var).sum())


def _shared_by_rows(x: Array, bias: Tensor) -> Array:
    """What multiplies the variance of a row's error in its bias gradients: x^2, or (sum of x)^2 where keys share a
    bias.
    """
    if bias.shape[3] != 1:
        return x**2
    shared = np.zeros_like(x)
    shared[:, :1] = x.sum(axis=1, keepdims=True) ** 2  # in one place: the sum over the keys is taken later
    return shared


def as_tensor(values: Array) -> Tensor:
    """The oracle's numbers as an FP64 tensor."""
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float64))
