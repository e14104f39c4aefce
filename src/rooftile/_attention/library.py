"""The compiled core of attention through ctypes: ``native/attention_abi.h``, packed field by field.

:mod:`rooftile.formats.native` finds and opens the library. Here are its structs and calls, and nothing that decides.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from rooftile._attention.call import Call
from rooftile._attention.dropout import drop_below, keep_factor
from rooftile.formats import native as formats_native

__all__ = ["BF16_PATHS", "MISSING", "PATHS", "Pages", "PlanFields", "backward", "best_path", "forward", "plan"]

#: Code paths by number, as the header names them.
PATHS = ("portable", "avx2", "avx512", "avx512-bf16", "amx", "amx-software")
#: Those whose products of bf16 operands are of bf16 themselves.
BF16_PATHS = ("avx512-bf16", "amx", "amx-software")

_ABI = 1
_HOW_TO_GET_IT = "install g++ or clang and run pip install again"
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# The structs as bytes, with the compiler's own alignment: five times as fast as filling ctypes fields one by one, which
# a call of 50 us feels. A view is a pointer and four strides.
_VIEW = "P4q"
_PROBLEM = struct.Struct(
    "@7q"  # batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim
    "5i"  # dtype, out_dtype, bias_dtype, path, threads
    "IQ"  # drop_below, seed
    "3f"  # scale, softcap, keep_scale
    "i"  # page_size
    + 4 * _VIEW  # q, k, v, out
    + "PPPq"  # lse, lo, hi, interval_stride
    + 2 * _VIEW  # dense, bias
    + "PPq"  # sinks, pages, pages_stride
)
_GRADIENTS = struct.Struct("@" + _VIEW + "P" + 4 * _VIEW)  # dout, dlse, dq, dk, dv, dbias
_PLAN = struct.Struct("@2i5q")  # path, split_keys, q_tile, kv_tile, tasks, scores, scratch_bytes
_ABSENT = (0, 0, 0, 0, 0)


class Pages(NamedTuple):
    """A paged cache: ``table`` int32 (B, pages of a sequence), contiguous rows; keys of a page; keys of the longest."""

    table: Tensor
    size: int
    kv_len: int


class PlanFields(NamedTuple):
    """``rooftile::AttentionPlan``, field by field."""

    path: int
    split_keys: int
    q_tile: int
    kv_tile: int
    tasks: int
    scores: int
    scratch_bytes: int


def _open() -> tuple[ctypes.CDLL | None, str]:
    """The library, or why there is none."""
    state = formats_native.status()
    if not state.available:
        reason = state.reason.partition(";")[0]
        return None, reason if state.path or os.environ.get("ROOFTILE_NATIVE") else f"{reason}; {_HOW_TO_GET_IT}"
    library = ctypes.CDLL(state.path)
    if not hasattr(library, "rooftile_attention_abi"):
        return None, f"{state.path} has no attention: reinstall rooftile"
    found = int(library.rooftile_attention_abi())
    if found != _ABI:
        return None, f"{state.path} speaks attention ABI {found}, this package {_ABI}: reinstall rooftile"
    library.rooftile_attention_forward.argtypes = (ctypes.c_char_p,)
    library.rooftile_attention_backward.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
    library.rooftile_attention_plan.argtypes = (ctypes.c_char_p, ctypes.c_void_p)
    return library, ""


# Opened when this module is: a constant that torch.compile can read, and never a surprise in the middle of a step.
_LIBRARY, MISSING = _open()


def _loaded() -> ctypes.CDLL:
    if _LIBRARY is None:
        raise RuntimeError(f"the compiled attention was called, but it is {MISSING}")
    return _LIBRARY


def best_path() -> int:
    """The path that a call takes where none is named: an index of :data:`PATHS`."""
    return int(_loaded().rooftile_attention_best_path())


def forward(
    call: Call,
    out: Tensor,
    lse: Tensor,
    path: int = -1,
    threads: int | None = None,
    pages: Pages | None = None,
) -> None:
    """Fill ``out`` (B, Hq, Lq, Dv; q's dtype or fp32) and ``lse`` (B, Hq, Lq; contiguous fp32)."""
    problem, _kept = _problem(call, out, lse, path, threads, pages)
    _check(_loaded().rooftile_attention_forward(problem), "forward", call, path)


def backward(
    call: Call,
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    grads: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    path: int = -1,
    threads: int | None = None,
) -> None:
    """Fill dq, dk, dv (None: not wanted) and add to dbias (fp32, of the bias's shape; None: not wanted)."""
    problem, _kept = _problem(call, out, lse, path, threads, None)
    dq, dk, dv, dbias = grads
    whole = (*call.q.shape[:3], call.k.shape[2])
    if dbias is not None:
        dbias = dbias.expand(whole)
    packed = _GRADIENTS.pack(
        *_view(dout), 0 if dlse is None else dlse.data_ptr(), *_view(dq), *_view(dk), *_view(dv), *_view(dbias)
    )
    _check(_loaded().rooftile_attention_backward(problem, packed), "backward", call, path)


def plan(call: Call, path: int = -1, threads: int | None = None) -> PlanFields:
    """How the call would be carried out."""
    problem, _kept = _problem(call, call.q, None, path, threads, None)
    room = ctypes.create_string_buffer(_PLAN.size)
    _check(_loaded().rooftile_attention_plan(problem, room), "plan", call, path)
    return PlanFields(*_PLAN.unpack(room.raw))


def _problem(
    call: Call, out: Tensor, lse: Tensor | None, path: int, threads: int | None, pages: Pages | None
) -> tuple[bytes, tuple[Tensor | None, ...]]:
    """The packed problem, and the tensors made for it, which must outlive the call."""
    q, k, v, see, bias = call.q, call.k, call.v, call.visibility, call.bias
    batch, heads, q_len, dim = q.shape
    kv_len = k.shape[2] if pages is None else pages.kv_len
    lo, hi, dense = see.lo, see.hi, see.dense
    interval_stride = 0
    if lo is not None and hi is not None:
        lo, hi = lo.contiguous(), hi.contiguous()
        interval_stride = q_len if lo.shape[0] > 1 else 0
    if dense is not None:
        dense = dense.expand(batch, heads, q_len, kv_len)
    if bias is not None:
        bias = bias.expand(batch, heads, q_len, kv_len)
    sinks = None if call.sinks is None else call.sinks.to(torch.float32).contiguous()
    dropout = call.seed is not None
    packed = _PROBLEM.pack(
        batch, heads, k.shape[1], q_len, kv_len, dim, v.shape[3],
        _DTYPES[q.dtype], _DTYPES[out.dtype], 0 if bias is None else _DTYPES[bias.dtype],
        path, torch.get_num_threads() if threads is None else threads,
        drop_below(call.dropout_p) if dropout else 0, int(call.seed) if call.seed is not None else 0,
        call.scale, call.softcap, keep_factor(call.dropout_p) if dropout else 1.0,
        0 if pages is None else pages.size,
        q.data_ptr(), *q.stride(), k.data_ptr(), *k.stride(), v.data_ptr(), *v.stride(), out.data_ptr(), *out.stride(),
        0 if lse is None else lse.data_ptr(),
        0 if lo is None else lo.data_ptr(), 0 if hi is None else hi.data_ptr(), interval_stride,
        *_view(dense), *_view(bias),
        0 if sinks is None else sinks.data_ptr(),
        0 if pages is None else pages.table.data_ptr(), 0 if pages is None else pages.table.stride(0),
    )  # fmt: skip
    return packed, (lo, hi, sinks)


def _view(x: Tensor | None) -> tuple[int, ...]:
    return _ABSENT if x is None else (x.data_ptr(), *x.stride())


def _check(failed: int, what: str, call: Call, path: int) -> None:
    if failed:
        raise RuntimeError(
            f"the compiled attention refused its {what} pass (code {failed}) of q {tuple(call.q.shape)} "
            f"{call.q.dtype} and k {tuple(call.k.shape)} on path {path}"
        )
