"""The operators that stand for what a target device runs as one kernel: attention, RMS norm, RNN.

Registered once under ``rooftile::`` with kernels for meta tensors (what an audit runs) and for real CPU tensors (what a
live capture runs, by plain torch operations: right values, no claim to speed). Their outputs have the shapes, strides
and dtypes that the device's kernel would return; what the kernel needs besides is named in ``workspaces``.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["register_operators", "rnn_reserve_shape"]

_SCHEMAS = (
    "tiled_attention(Tensor q, Tensor k, Tensor v, Tensor? attn_bias, float dropout_p, bool is_causal, float scale) "
    "-> (Tensor, Tensor, Tensor)",
    "tiled_attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor rng_state, "
    "Tensor? attn_bias, float dropout_p, bool is_causal, float scale, bool bias_grad) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    "rms_norm(Tensor x, int[] normalized_shape, Tensor? weight, float eps) -> (Tensor, Tensor)",
    "rms_norm_backward(Tensor grad_out, Tensor x, Tensor rstd, Tensor? weight, int[] normalized_shape) "
    "-> (Tensor, Tensor)",
    "rnn(Tensor x, Tensor[] hx, Tensor[] weights, str mode, int num_layers, float dropout, bool train, "
    "bool bidirectional, bool batch_first) -> Tensor[]",
    "rnn_backward(Tensor[] grads, Tensor x, Tensor[] hx, Tensor[] weights, Tensor output, Tensor reserve, str mode, "
    "int num_layers, float dropout, bool train, bool bidirectional, bool batch_first) -> Tensor[]",
)

#: Query rows of one tile of the CPU kernels: their scores take 256 * Lk fp32 numbers a head.
_TILE = 256

#: Gates of one cell, the numbers a step keeps for its backward pass.
_GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}


@functools.cache
def register_operators() -> torch.library.Library:
    """Define the operators; the library object must stay alive for as long as the process."""
    library = torch.library.Library("rooftile", "FRAGMENT")
    for schema in _SCHEMAS:
        library.define(schema)
    for name in ("tiled_attention", "tiled_attention_backward", "rms_norm", "rms_norm_backward", "rnn", "rnn_backward"):
        library.impl(name, globals()[f"_{name}_meta"], "Meta")
        library.impl(name, globals()[f"_{name}_cpu"], "CPU")
    return library


# ---------------------------------------------------------------------------------------------------------- attention
def _attention_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``out`` is laid out (B, Lq, H, Dv) as the CUDA kernels write it, so that merging the heads is a view."""
    batch, heads, rows, _ = q.shape
    out = q.new_empty((batch, rows, heads, v.shape[-1])).transpose(1, 2)
    lse = q.new_empty((batch, heads, rows), dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    return out, lse, q.new_empty((2,), dtype=torch.int64)


def _like_bhld(x: Tensor) -> Tensor:
    """A gradient in (B, L, H, D) memory order, returned as (B, H, L, D)."""
    batch, heads, length, dim = x.shape
    return x.new_empty((batch, length, heads, dim)).transpose(1, 2)


def _tiled_attention_meta(
    q: Tensor, k: Tensor, v: Tensor, attn_bias: Tensor | None, dropout_p: float, is_causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _attention_outputs(q, v)


def _tiled_attention_backward_meta(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rng_state: Tensor,
    attn_bias: Tensor | None, dropout_p: float, is_causal: bool, scale: float, bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dbias = torch.empty_like(attn_bias) if bias_grad and attn_bias is not None else q.new_empty((0,))
    return _like_bhld(q), _like_bhld(k), _like_bhld(v), dbias


def _scores(
    q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool, scale: float, start: int, acc: torch.dtype
) -> Tensor:
    """``scale * Q K^T + bias`` of the rows from ``start``, (B, Hkv, G, rows, Lk); -inf where a key isn't visible."""
    batch, heads, rows, dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.to(acc).reshape(batch, kv_heads, heads // kv_heads, rows, dim)
    scores = torch.matmul(grouped, k.to(acc).unsqueeze(2).transpose(-1, -2)).mul_(scale)
    if bias is not None:
        tile = bias if bias.shape[-2] == 1 else bias[..., start : start + rows, :]
        tile = tile.to(acc).expand(batch, heads, rows, k.shape[2])
        scores += tile.reshape(scores.shape)
    if is_causal:
        keys = torch.arange(k.shape[2], device=q.device)
        row_ids = torch.arange(start, start + rows, device=q.device)
        scores.masked_fill_(keys[None, :] > row_ids[:, None], -math.inf)
    return scores


def _dropout_factor(like: Tensor, rng_state: Tensor, start: int, dropout_p: float) -> Tensor:
    """The same factors (0 or 1 / (1 - p)) in forward and backward: a generator seeded by the state and the tile."""
    generator = torch.Generator().manual_seed(int(rng_state[0]) + start)
    keep = torch.rand(like.shape, generator=generator) >= dropout_p
    return keep.to(like.dtype).div_(1.0 - dropout_p)


def _tiled_attention_cpu(
    q: Tensor, k: Tensor, v: Tensor, attn_bias: Tensor | None, dropout_p: float, is_causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    out, lse, rng_state = _attention_outputs(q, v)
    rng_state.copy_(torch.randint(2**31, (2,))) if dropout_p else rng_state.zero_()
    batch, heads, rows, _ = q.shape
    for start in range(0, rows, _TILE):
        tile = slice(start, start + _TILE)
        s = _scores(q[:, :, tile], k, attn_bias, is_causal, scale, start, lse.dtype)
        tile_lse = torch.logsumexp(s, -1)
        p = torch.exp(s - torch.nan_to_num(tile_lse, neginf=0.0).unsqueeze(-1))
        if dropout_p:
            p *= _dropout_factor(p, rng_state, start, dropout_p)
        o = torch.matmul(p, v.to(p.dtype).unsqueeze(2))
        out[:, :, tile] = o.reshape(batch, heads, -1, v.shape[-1]).to(out.dtype)
        lse[:, :, tile] = tile_lse.reshape(batch, heads, -1)
    return out, lse, rng_state


def _tiled_attention_backward_cpu(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rng_state: Tensor,
    attn_bias: Tensor | None, dropout_p: float, is_causal: bool, scale: float, bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dS = P * (dP - D) with P recomputed from the LSE and D = rowsum(dO * O) (FlashAttention, Algorithm 4)."""
    acc = lse.dtype
    batch, heads, rows, _ = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    grouped = (batch, kv_heads, heads // kv_heads)
    dq, dk, dv = _like_bhld(q), torch.zeros_like(k, dtype=acc), torch.zeros_like(v, dtype=acc)
    dbias = torch.zeros_like(attn_bias, dtype=acc) if bias_grad and attn_bias is not None else q.new_empty((0,))
    for start in range(0, rows, _TILE):
        tile = slice(start, start + _TILE)
        s = _scores(q[:, :, tile], k, attn_bias, is_causal, scale, start, acc)
        count = s.shape[-2]
        tile_lse = torch.nan_to_num(lse[:, :, tile], neginf=0.0).reshape(*grouped, count, 1)
        p = torch.exp(s - tile_lse)
        do = grad_out[:, :, tile].to(acc)
        d = (do * out[:, :, tile].to(acc)).sum(-1).reshape(*grouped, count, 1)
        do = do.reshape(*grouped, count, v.shape[-1])
        factor = _dropout_factor(p, rng_state, start, dropout_p) if dropout_p else None
        dv += torch.matmul((p if factor is None else p * factor).transpose(-1, -2), do).sum(2)
        dp = torch.matmul(do, v.to(acc).unsqueeze(2).transpose(-1, -2))
        ds = p * ((dp if factor is None else dp * factor) - d)
        if dbias.numel():
            full = ds.reshape(batch, heads, count, keys)
            shape = tuple(count if i == attn_bias.dim() - 2 and n > 1 else n for i, n in enumerate(attn_bias.shape))  # type: ignore[union-attr]
            part = dbias if dbias.shape[-2] == 1 else dbias[..., tile, :]
            part += full.sum_to_size(shape)
        dq[:, :, tile] = (
            torch.matmul(ds, k.to(acc).unsqueeze(2)).mul_(scale).reshape(batch, heads, count, -1).to(dq.dtype)
        )
        dk += torch.matmul(ds.transpose(-1, -2), q[:, :, tile].to(acc).reshape(*grouped, count, -1)).mul_(scale).sum(2)
    grad_k, grad_v = _like_bhld(k).copy_(dk), _like_bhld(v).copy_(dv)
    return dq, grad_k, grad_v, dbias.to(attn_bias.dtype) if attn_bias is not None and dbias.numel() else dbias


# ----------------------------------------------------------------------------------------------------------- RMS norm
def _rms_norm_meta(x: Tensor, normalized_shape: list[int], weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """``rstd`` is fp32 for 16-bit inputs, one number a row, as CUDA's fused kernel keeps it."""
    kept = x.dim() - len(normalized_shape)
    stat = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.empty_like(x), x.new_empty((*x.shape[:kept], *[1] * len(normalized_shape)), dtype=stat)


def _rms_norm_backward_meta(
    grad_out: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, normalized_shape: list[int]
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight) if weight is not None else x.new_empty((0,))


def _rms_norm_cpu(x: Tensor, normalized_shape: list[int], weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    out, rstd = _rms_norm_meta(x, normalized_shape, weight, eps)
    dims = tuple(range(-len(normalized_shape), 0))
    wide = x.to(rstd.dtype)
    rstd.copy_(torch.rsqrt(wide.square().mean(dims, keepdim=True) + eps))
    y = wide * rstd
    return out.copy_(y if weight is None else y * weight.to(rstd.dtype)), rstd


def _rms_norm_backward_cpu(
    grad_out: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, normalized_shape: list[int]
) -> tuple[Tensor, Tensor]:
    """With y = x r and g = dy * w: dx = r (g - y mean(g y)), dw = sum over rows of dy y."""
    dims = tuple(range(-len(normalized_shape), 0))
    rows = tuple(range(x.dim() - len(normalized_shape)))
    y, grad = x.to(rstd.dtype) * rstd, grad_out.to(rstd.dtype)
    g = grad if weight is None else grad * weight.to(rstd.dtype)
    dx = (rstd * (g - y * (g * y).mean(dims, keepdim=True))).to(x.dtype)
    return dx, (grad * y).sum(rows).to(weight.dtype) if weight is not None else x.new_empty((0,))


# ---------------------------------------------------------------------------------------------------------------- RNN
def rnn_reserve_shape(mode: str, steps: int, batch: int, hidden: int, layers: int, directions: int) -> tuple[int, ...]:
    """Numbers kept for the backward pass: the gates and, for an LSTM, the cell state of every step and layer.

    cuDNN does not publish the size of its reserve buffer; this is what the algorithm needs, an ``assumed`` figure.
    """
    return (layers, directions, steps, batch, (_GATES[mode] + (mode == "LSTM")) * hidden)


def _rnn_outputs(
    x: Tensor, hx: list[Tensor], mode: str, num_layers: int, bidirectional: bool, batch_first: bool
) -> list[Tensor]:
    directions = 2 if bidirectional else 1
    steps, batch = (x.shape[1], x.shape[0]) if batch_first else (x.shape[0], x.shape[1])
    state = hx[0].shape[-1]  # of h: the projection's size where an LSTM has one
    hidden = hx[1].shape[-1] if mode == "LSTM" else state
    output = x.new_empty((*x.shape[:2], directions * state))
    reserve = x.new_empty(rnn_reserve_shape(mode, steps, batch, hidden, num_layers, directions))
    return [output, *(h.new_empty(h.shape, dtype=x.dtype) for h in hx), reserve]


def _rnn_meta(
    x: Tensor, hx: list[Tensor], weights: list[Tensor], mode: str, num_layers: int, dropout: float, train: bool,
    bidirectional: bool, batch_first: bool,
) -> list[Tensor]:  # fmt: skip
    return _rnn_outputs(x, hx, mode, num_layers, bidirectional, batch_first)


def _rnn_backward_meta(
    grads: list[Tensor], x: Tensor, hx: list[Tensor], weights: list[Tensor], output: Tensor, reserve: Tensor,
    mode: str, num_layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> list[Tensor]:  # fmt: skip
    return [torch.empty_like(t) for t in (x, *hx, *weights)]


def _rnn_composite(mode: str, x: Tensor, hx: list[Tensor], weights: list[Tensor], *rest: Any) -> list[Tensor]:
    """Torch's own composition, called past any override of the public operator."""
    packet = {"LSTM": "lstm", "GRU": "gru", "RNN_TANH": "rnn_tanh", "RNN_RELU": "rnn_relu"}[mode]
    operator = getattr(torch.ops.aten, packet).input
    num_layers, dropout, train, bidirectional, batch_first = rest
    state = list(hx) if mode == "LSTM" else hx[0]
    per_layer = len(weights) // (num_layers * (2 if bidirectional else 1))  # w_ih, w_hh[, b_ih, b_hh][, w_hr]
    has_biases = per_layer >= 4
    result = operator.decompose(
        x, state, list(weights), has_biases, num_layers, dropout, train, bidirectional, batch_first
    )
    return list(result)


def _rnn_cpu(
    x: Tensor, hx: list[Tensor], weights: list[Tensor], mode: str, num_layers: int, dropout: float, train: bool,
    bidirectional: bool, batch_first: bool,
) -> list[Tensor]:  # fmt: skip
    *outs, reserve = _rnn_outputs(x, hx, mode, num_layers, bidirectional, batch_first)
    with torch.no_grad():
        values = _rnn_composite(mode, x, hx, weights, num_layers, dropout, train, bidirectional, batch_first)
    for out, value in zip(outs, values, strict=True):
        out.copy_(value)
    return [*outs, reserve.zero_()]


def _rnn_backward_cpu(
    grads: list[Tensor], x: Tensor, hx: list[Tensor], weights: list[Tensor], output: Tensor, reserve: Tensor,
    mode: str, num_layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> list[Tensor]:  # fmt: skip
    autograd = torch._C.DispatchKey.AutogradFunctionality
    # An operator runs below autograd; its gradient by recomputation needs autograd once more.
    with torch.enable_grad(), torch._C._SetExcludeDispatchKeyGuard(autograd, False):
        leaves = [t.detach().requires_grad_() for t in (x, *hx, *weights)]
        state, parameters = leaves[1 : 1 + len(hx)], leaves[1 + len(hx) :]
        values = _rnn_composite(
            mode, leaves[0], state, parameters, num_layers, dropout, train, bidirectional, batch_first
        )
        return list(torch.autograd.grad(values, leaves, list(grads)))
