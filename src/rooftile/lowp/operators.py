"""The operators of scaled low precision: ``rooftile::quantize``, ``rooftile::requantize`` and ``rooftile::scaled_mm``.

All have a fake implementation, so they run under ``torch.compile``, on meta tensors and in an audit. Blocks are plain
integers, 0 for a whole extent; formats are names.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.errors import UsageError
from rooftile.formats.carrier import FP32
from rooftile.formats.catalogue import get_format
from rooftile.formats.codec import decode, encode
from rooftile.formats.format import FloatFormat
from rooftile.lowp import native
from rooftile.lowp.blocks import any_nonfinite, block_amax, grid_of, resolve_block, times_scales
from rooftile.lowp.recipes import Recipe
from rooftile.lowp.scales import ScaleChoice, choice_of, largest_exponent, least_exponent, scales_of_amax

__all__ = ["block_arguments", "code_dtype", "decode_blocks", "quantize_matrix", "requantize_transposed", "scaled_mm"]

#: torch's own dtype for the codes of a format; the other formats' codes are uint8.
_CODE_DTYPES = {
    "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_e5m2fnuz": torch.float8_e5m2fnuz,
}

#: Blocks up to this many elements stay in the second-level cache between their maximum and their codes.
_FUSED_ELEMENTS = 1 << 16


def code_dtype(fmt: str) -> torch.dtype:
    """Dtype of the codes of a format: torch's float8 dtype, or uint8."""
    return _CODE_DTYPES.get(get_format(fmt).name, torch.uint8)


def block_arguments(recipe: Recipe) -> tuple[int, int]:
    """A recipe's block as the operators take it, 0 for a whole extent."""
    return recipe.block[0] or 0, recipe.block[1] or 0


@torch.library.custom_op("rooftile::quantize", mutates_args=())
def quantize_matrix(
    x: Tensor, block_rows: int, block_cols: int, fmt: str, scale_format: str, scale_rule: str,
    amax: Tensor | None = None, tensor_scale: Tensor | None = None, role: str = "",  # noqa: ARG001
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Codes of a matrix (rows, cols) and its grid of stored scales (fp32).

    ``amax`` (0-dim) stands for the tensor's own largest magnitude (delayed scaling); ``tensor_scale`` (0-dim) is the
    second scale that the stored ones are relative to. ``role`` changes nothing; an audit reads it.
    """
    block = resolve_block((block_rows, block_cols), *x.shape)
    choice = choice_of(fmt, scale_format, scale_rule)
    source = x if x.dtype in (torch.float32, torch.bfloat16, torch.float64) else x.float()
    source = source.contiguous()
    done = False
    fused = amax is None and tensor_scale is None and block[0] * block[1] <= _FUSED_ELEMENTS
    if fused and choice.scale_format.bits in (8, 32) and native.available(source):
        codes, stored = native.quantize_blocks(
            source, choice.format, block, scale_rule, least_exponent(choice.scale_format)
        )
        done = scale_rule != "power-of-two-up" or not bool((stored > 2.0 ** largest_exponent(choice.format)).any())
    if not done:  # also where the core, which knows no largest scale, has passed it
        codes, stored = _quantize_in_two_passes(source, block, choice, amax, tensor_scale)
    return codes.view(code_dtype(fmt)), stored


def _quantize_in_two_passes(
    x: Tensor, block: tuple[int, int], choice: ScaleChoice, amax: Tensor | None, tensor_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    fmt = choice.format
    given = None if amax is None else amax.float().reshape(1, 1).expand(grid_of(x.shape, block))
    largest = _largest_of(x, block) if given is None else given
    scales = scales_of_amax(largest, choice, tensor_scale)
    stored = scales.stored.contiguous().clone()
    if native.available(x) and scales.encode.numel() == 1:
        even = _even_rows(x)
        codes = native.encode_blocks(even, fmt, (1, even.shape[1]), scales.encode.expand(len(even), 1).contiguous())
        codes = codes.view(x.shape)
    elif native.available(x):
        codes = native.encode_blocks(x, fmt, block, scales.encode.contiguous())
    else:
        codes = _encode(times_scales(x if x.dtype == torch.float64 else x.float(), scales.encode, block), fmt)
    if fmt.nan_code is None:
        stored = torch.where(any_nonfinite(x, block), torch.nan, stored)
    return codes, stored


def _largest_of(x: Tensor, block: tuple[int, int]) -> Tensor:
    if not native.available(x):
        return block_amax(x, block)
    if x.numel() and grid_of(x.shape, block) == (1, 1):
        even = _even_rows(x)
        return native.block_amax(even, (1, even.shape[1])).amax().reshape(1, 1)
    return native.block_amax(x, block)


def _even_rows(x: Tensor) -> Tensor:
    """A matrix under one scale as rows that threads can share, whatever its own shape."""
    width = next((w for w in (4096, 1024, 256) if x.numel() % w == 0), 0)
    return x.view(-1, width) if width and x.numel() else x


def _encode(scaled: Tensor, fmt: FloatFormat) -> Tensor:
    if scaled.dtype == torch.float32:
        return _encode_fp32(scaled, fmt)
    if fmt.nan_code is None:
        scaled = torch.where(scaled.isfinite(), scaled, 0.0)
    return encode(scaled, fmt, inf_input="keep").to(torch.uint8)


def _encode_fp32(scaled: Tensor, fmt: FloatFormat) -> Tensor:
    """The steps of native/lowp_kernels.cpp in torch operations; :func:`encode` says the same in fp64, slowly."""
    shift = FP32.fraction_bits - fmt.fraction_bits
    bits = scaled.contiguous().view(torch.int32)
    magnitude = bits & FP32.magnitude_mask
    value = magnitude.clamp(max=FP32.bits_of(fmt.max))
    # A power of two whose spacing is the format's at the value: adding it rounds, and the low bits count the steps.
    grid = (value & FP32.inf_bits).clamp_(min=FP32.bits_of(fmt.tiny)).add_(shift << FP32.fraction_bits)
    steps = (value.view(torch.float32) + grid.view(torch.float32)).view(torch.int32) - grid
    code = steps + (grid >> shift) - ((FP32.bias + fmt.min_exponent + shift) << fmt.fraction_bits)
    sign = torch.where(bits < 0, fmt.sign_bit, 0)
    nan_code = fmt.nan_code or 0
    if not fmt.negative_zero:
        sign = torch.where(code == 0, 0, sign)
    inf_code = (
        torch.where(bits < 0, fmt.inf_code | fmt.sign_bit, fmt.inf_code) if fmt.inf_code is not None else nan_code
    )
    code = torch.where(magnitude == FP32.inf_bits, inf_code, code | sign)
    return torch.where(magnitude > FP32.inf_bits, nan_code, code).to(torch.uint8)


@quantize_matrix.register_fake
def _(
    x: Tensor, block_rows: int, block_cols: int, fmt: str, scale_format: str, scale_rule: str,  # noqa: ARG001
    amax: Tensor | None = None, tensor_scale: Tensor | None = None, role: str = "",  # noqa: ARG001
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, cols = x.shape
    grid = (-(-rows // block_rows) if block_rows else 1, -(-cols // block_cols) if block_cols else 1)
    return x.new_empty((rows, cols), dtype=code_dtype(fmt)), x.new_empty(grid, dtype=torch.float32)


@torch.library.custom_op("rooftile::requantize", mutates_args=())
def requantize_transposed(
    codes: Tensor, scale: Tensor, block_rows: int, block_cols: int, fmt: str, scale_format: str, scale_rule: str,
    wide: bool = False, role: str = "",  # noqa: ARG001
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The transpose of a quantised matrix, quantised again by the same recipe along its own rows.

    Decoded in fp32 (fp64 where ``wide``); on a device this is one pass over the codes.
    """
    dtype = torch.float64 if wide else torch.float32
    decoded = decode_blocks(codes, scale, (block_rows, block_cols), fmt, dtype)
    made: tuple[Tensor, Tensor] = quantize_matrix(decoded.t(), block_rows, block_cols, fmt, scale_format, scale_rule)
    return made


@requantize_transposed.register_fake
def _(
    codes: Tensor, scale: Tensor, block_rows: int, block_cols: int, fmt: str, scale_format: str,  # noqa: ARG001
    scale_rule: str, wide: bool = False, role: str = "",  # noqa: ARG001
) -> tuple[Tensor, Tensor]:  # fmt: skip
    cols, rows = codes.shape
    grid = (-(-rows // block_rows) if block_rows else 1, -(-cols // block_cols) if block_cols else 1)
    return codes.new_empty((rows, cols)), scale.new_empty(grid)


def decode_blocks(codes: Tensor, scales: Tensor, block: tuple[int, int], fmt: str, dtype: torch.dtype) -> Tensor:
    """The values of a matrix of codes times their decode scales, in ``dtype`` (float32 or float64)."""
    values = codes.to(dtype) if codes.dtype.is_floating_point else decode(codes, fmt).to(dtype)
    return times_scales(values, scales, resolve_block(block, *codes.shape))


@torch.library.custom_op("rooftile::scaled_mm", mutates_args=())
def scaled_mm(
    a: Tensor, a_scale: Tensor, a_block: list[int], a_fmt: str, b: Tensor, b_scale: Tensor, b_block: list[int],
    b_fmt: str, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """``A B^T`` of two quantised matrices, A (m, k) and B (n, k), accumulated in fp32 (fp64 for an fp64 result).

    A scaled product of the device where hardware and layout allow (:func:`rooftile.lowp.scaled_mm_path` says when);
    otherwise both operands are decoded and multiplied in fp32.
    """
    if a.shape[1] != b.shape[1]:
        raise UsageError(f"a is {tuple(a.shape)} and b {tuple(b.shape)}; both need the same number of columns")
    if a.device.type == "cuda":
        from rooftile.lowp.device_mm import device_product, product_refusals

        if not product_refusals(a, a_block, b, b_block, out_dtype):
            return device_product(a, a_scale, a_block, b, b_scale, b_block, out_dtype)
    wide = torch.float64 if out_dtype == torch.float64 else torch.float32
    left = decode_blocks(a, a_scale, (a_block[0], a_block[1]), a_fmt, wide)
    right = decode_blocks(b, b_scale, (b_block[0], b_block[1]), b_fmt, wide)
    with torch.autocast(a.device.type, enabled=False):  # an operator's inside is not the user's region
        product: Tensor = left @ right.t()
    return product.to(out_dtype)


@scaled_mm.register_fake
def _(
    a: Tensor, a_scale: Tensor, a_block: list[int], a_fmt: str, b: Tensor, b_scale: Tensor, b_block: list[int],  # noqa: ARG001
    b_fmt: str, out_dtype: torch.dtype,  # noqa: ARG001
) -> Tensor:  # fmt: skip
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)
