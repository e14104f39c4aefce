"""Scaled products on the device: which calls torch's scaled matmul takes, and the call.

None of this has run on hardware: the conditions are those that torch 2.13 documents and checks for
``torch.nn.functional.scaled_mm``, and every other call is decoded and multiplied in fp32 instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import ScalingType
from torch.nn.functional import scaled_mm as torch_scaled_mm

__all__ = ["device_product", "product_refusals"]

_GRANULE = 16  # elements of 1 byte: both inner dimensions are read in 16-byte pieces
_PAIRS = {
    ("tensor", "tensor"): (ScalingType.TensorWise, ScalingType.TensorWise),
    ("row", "row"): (ScalingType.RowWise, ScalingType.RowWise),
    ("tile", "tile"): (ScalingType.BlockWise1x128, ScalingType.BlockWise1x128),
    ("tile", "block"): (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128),
    ("block", "tile"): (ScalingType.BlockWise128x128, ScalingType.BlockWise1x128),
}


def _kind(codes: Tensor, block: Sequence[int]) -> str:
    match tuple(block):
        case (0, 0):
            return "tensor"
        case (1, 0):
            return "row"
        case (1, 128):
            return "tile"
        case (128, 128):
            return "block"
    return f"{block[0] or codes.shape[0]}x{block[1] or codes.shape[1]} blocks"


def product_refusals(
    a: Tensor, a_block: Sequence[int], b: Tensor, b_block: Sequence[int], out_dtype: torch.dtype
) -> list[str]:
    """Why ``a @ b^T`` can't go through torch's scaled matmul; empty where it can."""
    reasons = []
    if a.device.type != "cuda":
        return [f"the operands are on {a.device.type}, scaled matmul needs cuda"]
    capability = torch.cuda.get_device_capability(a.device)
    kinds = (_kind(a, a_block), _kind(b, b_block))
    if kinds not in _PAIRS:
        reasons.append(f"scales of {kinds[0]} with {kinds[1]} have no kernel in torch")
    elif "tile" in kinds and capability != (9, 0):
        reasons.append(f"1x128 tiles need compute capability 9.0, this device has {capability[0]}.{capability[1]}")
    if capability < (8, 9):
        reasons.append(f"fp8 products need compute capability 8.9, this device has {capability[0]}.{capability[1]}")
    codes = {a.dtype, b.dtype}
    if not codes <= {torch.float8_e4m3fn, torch.float8_e5m2}:
        reasons.append(f"codes of {' and '.join(sorted(map(str, codes)))}; only e4m3fn and e5m2 are multiplied")
    if codes == {torch.float8_e5m2}:
        reasons.append("e5m2 by e5m2 is not supported")
    if "tensor" not in kinds and codes != {torch.float8_e4m3fn}:
        reasons.append("finer scales need e4m3fn on both sides")
    if a.shape[1] % _GRANULE or b.shape[0] % _GRANULE:
        reasons.append(f"inner dimension {a.shape[1]} and output columns {b.shape[0]} must be multiples of {_GRANULE}")
    if a.shape[0] == 0:
        reasons.append("there are no rows")
    if "tensor" not in kinds and out_dtype != torch.bfloat16:
        reasons.append(f"finer scales give bfloat16, not {out_dtype}")
    if out_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        reasons.append(f"output {out_dtype} is not supported")
    return reasons


def device_product(
    a: Tensor, a_scale: Tensor, a_block: Sequence[int], b: Tensor, b_scale: Tensor, b_block: Sequence[int],
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """``a @ b^T`` by torch's scaled matmul, accumulated in fp32; no :func:`product_refusals`."""
    kinds = (_kind(a, a_block), _kind(b, b_block))
    left, right = _PAIRS[kinds]
    out: Tensor = torch_scaled_mm(
        a.contiguous(),
        b.contiguous().t(),
        _layout(a_scale, kinds[0]),
        left,
        _layout(b_scale, kinds[1]).t(),
        right,
        output_dtype=out_dtype,
        use_fast_accum=False,
    )
    return out


def _layout(scale: Tensor, kind: str) -> Tensor:
    """The grid as the kernels read it: 1x128 column by column, 128x128 in rows padded to a multiple of four."""
    if kind == "tile":
        return scale.t().contiguous().t()
    if kind == "block":
        rows, cols = scale.shape
        padded = scale.new_zeros(rows, -(-cols // 4) * 4)
        padded[:, :cols] = scale
        return padded[:, :cols]
    return scale.contiguous()
