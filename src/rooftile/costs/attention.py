"""Exact attention kernels: two matrix products forward, five backward, Q, K, V, O and the row statistics once.

Per score (a query row times a key) the forward pass does ``2 D`` FLOPs for Q K^T and ``2 Dv`` for P V, the backward
pass ``2 (3 D + 2 Dv)``: Q K^T again, dP = dO V^T, dV = P^T dO, dQ = dS K, dK = dS^T Q. Skipped tiles are not counted
(:mod:`rooftile.costs.tiles`); ``dense_flops`` counts them. Bytes are the ideal tiled kernel's: no N x N matrix, K and V
once per *key-value* head, so grouped queries read Hkv heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rooftile.capture.trace import Call, TensorMeta
from rooftile.costs.operands import keyword, reads, tensor, total_bytes, writes
from rooftile.costs.record import Cost, NotCountableError
from rooftile.costs.registry import formula
from rooftile.costs.tiles import visited_scores

__all__: list[str] = []


@dataclass(frozen=True, slots=True)
class _Shape:
    """The problem of one call: b batches, h query heads, lq rows, lk keys, head sizes d and dv."""

    b: int
    h: int
    lq: int
    lk: int
    d: int
    dv: int


@dataclass(frozen=True, slots=True)
class _Options:
    causal: bool
    bias: bool
    dropout: bool
    window: int | None = None


def _shape(q: TensorMeta, k: TensorMeta, v: TensorMeta, *, heads_first: bool) -> _Shape:
    if not len(q.shape) == len(k.shape) == len(v.shape) == 4:
        raise NotCountableError("attention operands that are not 4-dimensional")
    head, row = (1, 2) if heads_first else (2, 1)
    return _Shape(q.shape[0], q.shape[head], q.shape[row], k.shape[row], q.shape[3], v.shape[3])


def _forward_flops(shape: _Shape, options: _Options, scores: int) -> tuple[int, int]:
    """(all, in matrix products). Per score: scale, maximum, subtract, exp, sum; a bias adds 1, dropout 3 (as
    ``native_dropout``). Per output element one division by the row sum.
    """
    matmul = 2 * scores * (shape.d + shape.dv)
    per_score = 5 + options.bias + 3 * options.dropout
    return matmul + per_score * scores + shape.b * shape.h * shape.lq * shape.dv, matmul


def _backward_flops(shape: _Shape, options: _Options, scores: int) -> tuple[int, int]:
    """(all, in matrix products). Per score: P = exp(scale S - LSE) 3, dS = P (dP - delta) 2, scale 1; a bias adds 1,
    dropout 3 for the mask again and 2 each for P and dP. delta = rowsum(dO * O): 2 per output element.
    """
    matmul = 2 * scores * (3 * shape.d + 2 * shape.dv)
    per_score = 6 + options.bias + 5 * options.dropout
    return matmul + per_score * scores + 2 * shape.b * shape.h * shape.lq * shape.dv, matmul


def _cost(call: Call, shape: _Shape, options: _Options, *, backward: bool) -> Cost:
    count = _backward_flops if backward else _forward_flops
    heads = shape.b * shape.h
    visited = heads * visited_scores(shape.lq, shape.lk, causal=options.causal, window=options.window)
    flops, matmul = count(shape, options, visited)
    dense, _ = count(shape, options, heads * shape.lq * shape.lk)
    return Cost(
        "attention",
        flops=flops,
        bytes_read=total_bytes(reads(call)),
        bytes_written=total_bytes(writes(call)),
        matmul_flops=matmul,
        dense_flops=dense,
        roof="matmul",
        roof_dtype=tensor(call, 1 if backward else 0, "query").dtype,
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, TensorMeta)


_QKV = ("query", "key", "value")

# Where each operator keeps its options: name -> (position of dropout_p, of is_causal, of the bias). The first three
# tensors are q, k, v; a backward operator has the gradient of the output before them. All in (B, H, L, D).
_HEADS_FIRST_FORWARD: dict[str, tuple[int, int, int | None]] = {
    "aten._scaled_dot_product_flash_attention": (3, 4, None),
    "aten._scaled_dot_product_flash_attention_for_cpu": (3, 4, None),  # attn_mask is keyword-only
    "aten._scaled_dot_product_efficient_attention": (5, 6, 3),
    "aten._scaled_dot_product_cudnn_attention": (5, 6, 3),
    "aten._scaled_dot_product_fused_attention_overrideable": (4, 5, 3),
    "rooftile.tiled_attention": (4, 5, 3),
}
_HEADS_FIRST_BACKWARD: dict[str, tuple[int, int, int | None]] = {
    "aten._scaled_dot_product_flash_attention_backward": (10, 11, None),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": (6, 7, None),
    "aten._scaled_dot_product_efficient_attention_backward": (9, 11, 4),
    "aten._scaled_dot_product_cudnn_attention_backward": (13, 14, 8),
    "aten._scaled_dot_product_fused_attention_overrideable_backward": (12, 13, 4),
    "rooftile.tiled_attention_backward": (8, 9, 7),
}


def _options(call: Call, positions: tuple[int, int, int | None]) -> _Options:
    dropout, causal, bias_at = positions
    bias = call.argument(bias_at, "attn_bias") if bias_at is not None else keyword(call, "attn_mask")
    return _Options(
        causal=bool(call.argument(causal, "is_causal", False)),
        bias=_is_tensor(bias) and bias.numel > 0,
        dropout=call.argument(dropout, "dropout_p", 0.0) > 0,
    )


def _name(call: Call) -> str:
    return call.operator.rsplit(".", 1)[0]


@formula(*_HEADS_FIRST_FORWARD)
def forward(call: Call) -> Cost:
    """O and LSE from q, k, v in (B, H, L, D)."""
    q, k, v = (tensor(call, position, _QKV[position]) for position in range(3))
    options = _options(call, _HEADS_FIRST_FORWARD[_name(call)])
    return _cost(call, _shape(q, k, v, heads_first=True), options, backward=False)


@formula(*_HEADS_FIRST_BACKWARD)
def backward(call: Call) -> Cost:
    """dQ, dK, dV (and the bias's gradient) from dO, q, k, v, O and LSE."""
    q, k, v = (tensor(call, position + 1, _QKV[position]) for position in range(3))
    options = _options(call, _HEADS_FIRST_BACKWARD[_name(call)])
    return _cost(call, _shape(q, k, v, heads_first=True), options, backward=True)


# The kernels below SDPA take (B, L, H, D), or packed documents with their cumulative lengths. How long each document
# is stands in a tensor's values, which a capture has not: then the operator is unknown, not guessed.
_ROWS_FIRST: dict[str, tuple[int, int, int | None, int]] = {
    # name -> positions of dropout_p, of causal, of the bias, of the cumulative lengths
    "aten._flash_attention_forward": (7, 8, None, 3),
    "aten._efficient_attention_forward": (8, 9, 3, 4),
    "aten._flash_attention_backward": (10, 11, None, 6),
    "aten._efficient_attention_backward": (11, 14, 4, 6),
}


@formula(*_ROWS_FIRST)
def rows_first(call: Call) -> Cost | None:
    """The same two counts for the layout (B, L, H, D)."""
    dropout, causal, bias_at, lengths = _ROWS_FIRST[_name(call)]
    is_backward = _name(call).endswith("backward")
    packed = call.argument(lengths, "cum_seq_q")
    if _is_tensor(packed) and packed.numel > 0:
        return None
    q, k, v = (tensor(call, position + is_backward, _QKV[position]) for position in range(3))
    bias = call.argument(bias_at, "bias") if bias_at is not None else None
    shape = _shape(q, k, v, heads_first=False)
    # custom_mask_type of the efficient kernel: 0 none, 1 causal from the top left, 2 from the bottom right.
    kind = int(call.argument(causal, "is_causal", 0))
    left, right = keyword(call, "window_size_left"), keyword(call, "window_size_right")
    is_window = any(size is not None and size >= 0 for size in (left, right))
    if keyword(call, "window_size") is not None or (is_window and (right or left is None or left < 0)):
        return None  # a window that looks ahead, or has no left edge: no tile count for it
    top_left = kind == 1 and "_efficient" in call.operator and not is_window
    if (kind or is_window) and shape.lq != shape.lk and not top_left:
        return None  # aligned at the bottom right, which the tile count is not
    options = _Options(
        causal=kind > 0,
        bias=_is_tensor(bias),
        dropout=call.argument(dropout, "dropout_p", 0.0) > 0,
        window=left + 1 if is_window else None,  # left neighbours and the key itself
    )
    return _cost(call, shape, options, backward=is_backward)
