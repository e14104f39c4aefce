"""torch's fused encoder kernels (the inference fast paths): many products in one operator, bytes as one kernel's."""

from __future__ import annotations

from rooftile.capture.trace import Call, TensorMeta
from rooftile.costs.operands import reads, tensor, total_bytes, writes
from rooftile.costs.record import Cost, NotCountableError
from rooftile.costs.registry import formula

__all__: list[str] = []

_SCORE_FLOPS = 5  # softmax; see normalization
_NORM_FLOPS = 8  # layer norm with weight and bias
_GELU_FLOPS, _RELU_FLOPS = 5, 1


def _attention(query: TensorMeta, key: TensorMeta, heads: int, masked: bool) -> tuple[int, int]:
    """(products, pointwise) of multi-head attention of width E with B batches, S rows and T keys.

    Projections: Q and the output ``2 B S E^2`` each, K and V ``2 B T E^2`` each. Q K^T and P V: ``2 B S T E`` each.
    Pointwise: a bias on each projection, the scale on Q, softmax (and mask) on each of B H S T scores.
    """
    if not len(query.shape) == len(key.shape) == 3:
        raise NotCountableError("operands that are not (batch, row, width)")
    batch, rows, width = query.shape
    keys = key.shape[1]
    projected = batch * (2 * rows + 2 * keys) * width
    products = 2 * projected * width + 4 * batch * rows * keys * width
    pointwise = projected + batch * rows * width + (_SCORE_FLOPS + masked) * batch * heads * rows * keys
    return products, pointwise


def _cost(call: Call, products: int, pointwise: int, dtype: str) -> Cost:
    return Cost(
        "attention",
        flops=products + pointwise,
        bytes_read=total_bytes(reads(call)),
        bytes_written=total_bytes(writes(call)),
        matmul_flops=products,
        roof="matmul",
        roof_dtype=dtype,
    )


@formula("aten._native_multi_head_attention")
def multi_head_attention(call: Call) -> Cost:
    """``(query, key, value, embed_dim, num_head, weights and biases, mask, ...)``."""
    query, key = tensor(call, 0, "query"), tensor(call, 1, "key")
    masked = isinstance(call.argument(9, "mask"), TensorMeta)
    products, pointwise = _attention(query, key, call.argument(4, "num_head"), masked)
    return _cost(call, products, pointwise, query.dtype)


@formula("aten._transformer_encoder_layer_fwd")
def encoder_layer(call: Call) -> Cost:
    """Attention, two linear layers with an activation between them, two residual additions, two layer norms."""
    source = tensor(call, 0, "src")
    masked = isinstance(call.argument(18, "mask"), TensorMeta)
    products, pointwise = _attention(source, source, call.argument(2, "num_heads"), masked)
    rows = source.shape[0] * source.shape[1]
    first, second = tensor(call, 14, "ffn_weight_1"), tensor(call, 16, "ffn_weight_2")
    products += 2 * rows * (first.numel + second.numel)
    activation = _GELU_FLOPS if call.argument(7, "use_gelu") else _RELU_FLOPS
    # Per hidden unit a bias and the activation; per element of the width a bias, two additions, two norms.
    pointwise += rows * (first.shape[0] * (1 + activation) + source.shape[2] * (1 + 2 + 2 * _NORM_FLOPS))
    return _cost(call, products, pointwise, source.dtype)
