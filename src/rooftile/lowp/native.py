"""The block kernels of the C++ core through ctypes; :mod:`rooftile.formats.native` finds and opens the library.

Where they can't be used, plain torch operations do the same with the same codes and scales.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rooftile.formats import native as formats_native
from rooftile.formats.carrier import FP32
from rooftile.formats.format import FloatFormat
from rooftile.lowp.recipes import Recipe

__all__ = ["ERROR_BINS", "NativeScore", "available", "block_amax", "encode_blocks", "quantize_blocks", "score_blocks"]

_ABI = 2
_SOURCES = {torch.float32: 0, torch.bfloat16: 1}
_RULES = {"exact": 0, "power-of-two-up": 1, "power-of-two-floor": 2}

#: Bins of a relative error: 256 a binade from 2^-24 to 1; smaller errors share the first, the last is 1: flushed.
ERROR_BINS = 24 * 256 + 1

#: Elements of a scored task: read once from memory, then from the second-level cache for every recipe.
_TASK_ELEMENTS = 1 << 16


class _CodePlan(ctypes.Structure):
    """``rooftile::CodePlan``, field by field."""

    _fields_ = (
        ("shift", ctypes.c_int32), ("rebias", ctypes.c_uint32), ("tiny_bits", ctypes.c_uint32),
        ("magic", ctypes.c_float), ("max_bits", ctypes.c_uint32),
        ("inf_code", ctypes.c_uint32), ("nan_code", ctypes.c_int32), ("sign_bit", ctypes.c_uint32),
        ("keeps_minus_zero", ctypes.c_uint32),
    )  # fmt: skip


class _ScalePlan(ctypes.Structure):
    """``rooftile::ScalePlan``."""

    _fields_ = (
        ("rule", ctypes.c_int32), ("max_exponent", ctypes.c_int32), ("least_exponent", ctypes.c_int32),
        ("max", ctypes.c_float),
    )  # fmt: skip


class _Blocks(ctypes.Structure):
    """``rooftile::Blocks``."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("rows", "cols", "block_rows", "block_cols", "grid_cols"))


class _ScoreInput(ctypes.Structure):
    """``rooftile::ScoreInput``."""

    _fields_ = (
        ("blocks", _Blocks), ("code", _CodePlan), ("encode", ctypes.c_void_p), ("decode", ctypes.c_void_p),
    )  # fmt: skip


class NativeScore(ctypes.Structure):
    """``rooftile::ScoreOutput``."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("zeros", "non_finite", "flushed", "saturated")),
        *((name, ctypes.c_double) for name in ("signal", "noise", "largest_error")),
        ("errors", ctypes.c_int64 * ERROR_BINS),
    )
    lost: int = 0  # no field: the core knows nothing of blocks that a NaN destroys


@functools.cache
def _library() -> ctypes.CDLL | None:
    state = formats_native.status()
    if not state.available:
        return None
    library = ctypes.CDLL(state.path)
    if not hasattr(library, "rooftile_lowp_abi") or int(library.rooftile_lowp_abi()) != _ABI:
        return None
    pointer, i32 = ctypes.c_void_p, ctypes.c_int32
    library.rooftile_block_amax.argtypes = (pointer, i32, pointer, pointer, i32, i32)
    library.rooftile_quantize_blocks.argtypes = (pointer, i32, pointer, pointer, pointer, pointer, pointer, i32, i32)
    library.rooftile_encode_blocks.argtypes = (pointer, i32, pointer, pointer, pointer, pointer, i32, i32)
    library.rooftile_score.argtypes = (pointer, i32, pointer, pointer, i32, ctypes.c_int64, ctypes.c_int64, i32, i32)
    return library


def available(x: torch.Tensor) -> bool:
    """Whether the kernels take ``x``: a contiguous fp32 or bf16 matrix in the CPU's memory."""
    return (
        x.device.type == "cpu" and x.dtype in _SOURCES and x.dim() == 2 and x.is_contiguous() and _library() is not None
    )


def _loaded() -> ctypes.CDLL:
    library = _library()
    if library is None:
        raise RuntimeError(f"the C++ core was called but is {formats_native.status().reason}")
    return library


@functools.cache
def _code_plan(fmt: FloatFormat) -> _CodePlan:
    nan_code = -1 if fmt.nan_code is None else fmt.nan_code
    inf_code = fmt.inf_code if fmt.inf_code is not None else max(nan_code, 0)
    return _CodePlan(
        shift=FP32.fraction_bits - fmt.fraction_bits,
        rebias=(FP32.bias + fmt.min_exponent + FP32.fraction_bits - fmt.fraction_bits) << fmt.fraction_bits,
        tiny_bits=FP32.bits_of(fmt.tiny),
        magic=math.ldexp(1.0, FP32.fraction_bits + fmt.min_exponent - fmt.fraction_bits),
        max_bits=FP32.bits_of(fmt.max),
        inf_code=inf_code,
        nan_code=nan_code,
        sign_bit=fmt.sign_bit,
        keeps_minus_zero=int(fmt.negative_zero),
    )


def _blocks(x: torch.Tensor, block: tuple[int, int]) -> _Blocks:
    rows, cols = x.shape
    return _Blocks(rows, cols, block[0], block[1], -(-cols // block[1]))


def _grid(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    return torch.empty(-(-x.shape[0] // block[0]), -(-x.shape[1] // block[1]), dtype=torch.float32)


def _check(failed: int, what: str, x: torch.Tensor, block: tuple[int, int], isa: int) -> None:
    if failed:
        raise RuntimeError(f"the C++ core refused {what} of {tuple(x.shape)} {x.dtype} in {block} blocks, isa {isa}")


def block_amax(x: torch.Tensor, block: tuple[int, int], isa: int = -1) -> torch.Tensor:
    """Largest finite magnitude of each block, fp32, as a grid of blocks."""
    out, blocks = _grid(x, block), _blocks(x, block)
    failed = _loaded().rooftile_block_amax(
        x.data_ptr(), _SOURCES[x.dtype], ctypes.byref(blocks), out.data_ptr(), torch.get_num_threads(), isa
    )
    _check(failed, "block_amax", x, block, isa)
    return out


def quantize_blocks(
    x: torch.Tensor, fmt: FloatFormat, block: tuple[int, int], rule: str, least_exponent: int, isa: int = -1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (uint8, of x's shape) and fp32 decode scales (a grid of blocks), from one pass over ``x``."""
    codes, decode, blocks = torch.empty(x.shape, dtype=torch.uint8), _grid(x, block), _blocks(x, block)
    scale = _ScalePlan(_RULES[rule], fmt.max_exponent, least_exponent, fmt.max)
    failed = _loaded().rooftile_quantize_blocks(
        x.data_ptr(), _SOURCES[x.dtype], ctypes.byref(blocks), ctypes.byref(_code_plan(fmt)), ctypes.byref(scale),
        codes.data_ptr(), decode.data_ptr(), torch.get_num_threads(), isa,
    )  # fmt: skip
    _check(failed, "quantize_blocks", x, block, isa)
    return codes, decode


def encode_blocks(
    x: torch.Tensor, fmt: FloatFormat, block: tuple[int, int], encode_scale: torch.Tensor, isa: int = -1
) -> torch.Tensor:
    """Codes (uint8) of ``x`` times the block's encode scale (a contiguous fp32 grid of blocks)."""
    codes, blocks = torch.empty(x.shape, dtype=torch.uint8), _blocks(x, block)
    failed = _loaded().rooftile_encode_blocks(
        x.data_ptr(), _SOURCES[x.dtype], ctypes.byref(blocks), ctypes.byref(_code_plan(fmt)), encode_scale.data_ptr(),
        codes.data_ptr(), torch.get_num_threads(), isa,
    )  # fmt: skip
    _check(failed, "encode_blocks", x, block, isa)
    return codes


@dataclass(frozen=True, slots=True)
class ScoreTask:
    """One recipe over the scored matrix: resolved block, and contiguous fp32 grids of scales."""

    recipe: Recipe
    format: FloatFormat
    block: tuple[int, int]
    encode_scale: torch.Tensor
    decode_scale: torch.Tensor


def score_blocks(x: torch.Tensor, tasks: Sequence[ScoreTask], isa: int = -1) -> list[NativeScore]:
    """What every recipe does to ``x``, which crosses the memory boundary once for all of them."""
    inputs = (_ScoreInput * len(tasks))()
    outputs = (NativeScore * len(tasks))()
    for entry, task in zip(inputs, tasks, strict=True):
        entry.blocks, entry.code = _blocks(x, task.block), _code_plan(task.format)
        entry.encode, entry.decode = task.encode_scale.data_ptr(), task.decode_scale.data_ptr()
    task_cols = min(max(1, x.shape[1]), _TASK_ELEMENTS)
    task_rows = max(1, _TASK_ELEMENTS // task_cols)
    failed = _loaded().rooftile_score(
        x.data_ptr(), _SOURCES[x.dtype], inputs, outputs, len(tasks), task_rows, task_cols, torch.get_num_threads(), isa
    )
    _check(failed, "score", x, tasks[0].block, isa)
    return list(outputs)
