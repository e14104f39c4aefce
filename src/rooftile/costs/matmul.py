"""Dense matrix products: 2mnk, plus what the epilogue adds."""

from __future__ import annotations

from rooftile.capture.trace import Call, TensorMeta
from rooftile.costs.gemm import gemm_of
from rooftile.costs.operands import bytes_of, keyword, reads, total_bytes, writes
from rooftile.costs.record import Cost
from rooftile.costs.registry import aten, formula

__all__: list[str] = []


@formula(*aten("mm _int_mm _weight_int8pack_mm bmm mv dot vdot outer ger"))
def product(call: Call) -> Cost | None:
    """C = A B: for each of mn outputs k products and k additions; A and B read once, C written once."""
    if any(meta.layout != "strided" for meta in call.inputs):
        from rooftile.costs.sparse import sparse_product

        return sparse_product(call)
    gemm = gemm_of(call)
    if gemm is None:
        return None
    return _cost(call, gemm.flops, gemm.flops, gemm.dtype)


@formula(*aten("addmm baddbmm addbmm addmv addr _addmm_activation"))
def product_and_c(call: Call) -> Cost | None:
    """``beta C + alpha A B``: the product, one addition per output, and one more each where beta or alpha is not 1.

    beta 0 neither reads nor adds C. ``_addmm_activation`` ends with a ReLU (1) or a tanh GELU (9) on each output.
    """
    if any(meta.layout != "strided" for meta in call.inputs):
        from rooftile.costs.sparse import sparse_product

        return sparse_product(call)
    gemm = gemm_of(call)
    if gemm is None:
        return None
    beta, alpha = keyword(call, "beta", 1), keyword(call, "alpha", 1)
    per_output = (beta != 0) + (beta not in (0, 1)) + (alpha != 1)
    if "_addmm_activation" in call.operator:
        per_output += 9 if keyword(call, "use_gelu", False) else 1
    outputs = call.outputs[0].numel if call.outputs else 0
    unread = bytes_of(call.inputs[0]) if beta == 0 else 0
    return _cost(call, gemm.flops + per_output * outputs, gemm.flops, gemm.dtype, unread)


@formula(*aten("_scaled_mm _scaled_mm_v2 _scaled_grouped_mm _grouped_mm"))
def scaled_or_grouped_product(call: Call) -> Cost | None:
    """The product over the rows present, one scaling per output for the scaled forms, one addition for a bias.

    Every group's matrix is read once: which groups got no rows is known only at run time.
    """
    gemm = gemm_of(call)
    if gemm is None:
        return None
    scaled = "_scaled" in call.operator
    position = {"_grouped_mm": 3, "_scaled_mm": 4, "_scaled_grouped_mm": 5, "_scaled_mm_v2": 8}
    bias = call.argument(position[call.operator.split(".")[1]], "bias")
    per_output = int(scaled) + isinstance(bias, TensorMeta)
    return _cost(call, gemm.flops + per_output * call.outputs[0].numel, gemm.flops, gemm.dtype)


def _cost(call: Call, flops: int, matmul_flops: int, dtype: str, unread: int = 0) -> Cost:
    return Cost(
        "matmul",
        flops=flops,
        bytes_read=total_bytes(reads(call)) - unread,
        bytes_written=total_bytes(writes(call)),
        matmul_flops=matmul_flops,
        roof="matmul",
        roof_dtype=dtype,
    )
