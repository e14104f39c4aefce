"""What the public functions accept. Whatever can't be honoured is a :class:`UsageError`: argument, value, way out."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rooftile._attention.call import DTYPES, Call, accumulator
from rooftile._attention.dropout import draw_seed
from rooftile.errors import UsageError
from rooftile.masks import Mask, Visibility

__all__ = [
    "autocast_operands",
    "checked_call",
    "checked_dropout",
    "checked_scale",
    "checked_sinks",
    "checked_softcap",
    "short",
]

_EVERYTHING = Visibility()
_FP32_MAX, _FP32_TINY = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny


def checked_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    bias: Tensor | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout_p: float,
    generator: torch.Generator | None,
) -> Call:
    """The arguments of :func:`rooftile.attention` as one call, or the error that says what is wrong."""
    check_operand("q", q)
    check_operand("k", k)
    check_operand("v", v)
    q, k, v = autocast_operands(q, k, v)
    check_shapes(q, k, v)
    visibility = _EVERYTHING if mask is None else checked_visibility(mask, q, k)
    if bias is not None:
        _check_bias(bias, q, k)
    if sinks is not None:
        checked_sinks(sinks, q)
    dropout = checked_dropout(dropout_p, generator)
    return Call(
        q,
        k,
        v,
        visibility,
        bias,
        sinks,
        checked_scale(scale, q.shape[3]),
        checked_softcap(softcap),
        dropout,
        draw_seed(generator) if dropout else None,
    )


def check_operand(name: str, x: object) -> None:
    """A dense floating-point tensor of four dims."""
    if not isinstance(x, Tensor):
        raise UsageError(f"{name} is {type(x).__name__}: give a tensor (B, H, L, D)")
    if x.dtype not in DTYPES:
        raise UsageError(f"{name} is {x.dtype}: attention takes float32, bfloat16, float16 and float64; convert it")
    if x.layout != torch.strided or x.is_nested:
        raise UsageError(f"{name} is no dense tensor: use attention_varlen for sequences of different lengths")
    if x.dim() != 4:
        raise UsageError(f"{name} has shape {short(x)}: give (B, H, L, D); add the missing dims with unsqueeze or view")


def autocast_operands(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In an autocast region q, k and v in its dtype, as F.scaled_dot_product_attention takes them (fp64 stays)."""
    # Tensors without data stand for those of a CPU, or of a device whose policy an audit puts in its place.
    kind = "cpu" if q.device.type == "meta" else q.device.type
    if not torch.is_autocast_enabled(kind):
        return q, k, v
    to = torch.get_autocast_dtype(kind)
    q, k, v = (x if x.dtype == torch.float64 else x.to(to) for x in (q, k, v))
    return q, k, v


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """One dtype, one device, and shapes that belong together."""
    if not q.dtype == k.dtype == v.dtype:
        raise UsageError(f"q is {q.dtype}, k {k.dtype} and v {v.dtype}: convert them to one dtype")
    if not q.device == k.device == v.device:
        raise UsageError(f"q is on {q.device}, k on {k.device} and v on {v.device}: move them to one device")
    batch, q_heads, _, dim = q.shape
    if k.shape[0] != batch or v.shape[0] != batch:
        raise UsageError(
            f"q {short(q)}, k {short(k)} and v {short(v)} differ in batch: nothing is broadcast, expand explicitly"
        )
    if k.shape[3] != dim:
        raise UsageError(
            f"q {short(q)} and k {short(k)} differ in head dim, {dim} and {k.shape[3]}: they must be equal"
        )
    if k.shape[1] != v.shape[1] or k.shape[2] != v.shape[2]:
        raise UsageError(f"k {short(k)} and v {short(v)} differ in heads or length: all but the last dim must agree")
    if dim == 0 or v.shape[3] == 0:
        raise UsageError(f"q {short(q)} and v {short(v)}: a head dim of 0 leaves nothing to attend with")
    kv_heads = k.shape[1]
    if (kv_heads == 0) != (q_heads == 0) or (kv_heads and q_heads % kv_heads):
        raise UsageError(
            f"q has {q_heads} heads and k {kv_heads}: query heads must be a multiple of kv heads (query head i reads "
            "kv head i // (Hq / Hkv))"
        )


def checked_visibility(mask: object, q: Tensor, k: Tensor) -> Visibility:
    """The mask as intervals and booleans for these operands."""
    if not isinstance(mask, Mask):
        hint = (
            "masks.dense(...) for a bool tensor, bias= for an additive one" if isinstance(mask, Tensor) else "masks.*"
        )
        raise UsageError(f"mask is {type(mask).__name__}: give a mask of rooftile.masks ({hint})")
    for held in mask.tensors:
        if held.device != q.device:
            raise UsageError(f"mask {mask} is on {held.device} and q on {q.device}: move the mask's tensors")
    if mask.batch is not None and mask.batch != q.shape[0]:
        raise UsageError(
            f"mask {mask} is of {mask.batch} sequences and q {short(q)} of {q.shape[0]}: they must be equal"
        )
    see = mask.visibility(q.shape[2], k.shape[2], q.device)
    if see.dense is not None and see.dense.shape[1] not in (1, q.shape[1]):
        raise UsageError(f"mask {mask} has {see.dense.shape[1]} heads and q {q.shape[1]}: give 1 or all")
    return see


def _check_bias(bias: object, q: Tensor, k: Tensor) -> None:
    whole = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if not isinstance(bias, Tensor):
        raise UsageError(f"bias is {type(bias).__name__}: give a tensor that is added to the scores, {whole}")
    if bias.dtype == torch.bool:
        raise UsageError("bias is bool: a boolean mask goes into mask=masks.dense(...); True is visible")
    if bias.dtype not in (q.dtype, accumulator(q.dtype)):
        raise UsageError(f"bias is {bias.dtype} and q {q.dtype}: give the bias in q's dtype or {accumulator(q.dtype)}")
    if bias.device != q.device:
        raise UsageError(f"bias is on {bias.device} and q on {q.device}: move one of them")
    if bias.dim() != 4:
        raise UsageError(f"bias has shape {short(bias)}: give 4 dims, 1 where it is the same for all of {whole}")
    for size, full, name in zip(bias.shape, whole, ("batch", "heads", "queries", "keys"), strict=True):
        if size not in (1, full):
            raise UsageError(f"bias has shape {short(bias)}, the scores {whole}: {name} must be {full}, or 1")


def checked_sinks(sinks: object, q: Tensor, head_dim: int = 1) -> None:
    """One logit a query head (``head_dim`` is where q has its heads)."""
    heads = q.shape[head_dim]
    if not isinstance(sinks, Tensor):
        raise UsageError(f"sinks is {type(sinks).__name__}: give a tensor of one logit a query head, ({heads},)")
    if sinks.dtype not in (q.dtype, accumulator(q.dtype)):
        raise UsageError(f"sinks are {sinks.dtype} and q {q.dtype}: give them in q's dtype or {accumulator(q.dtype)}")
    if sinks.device != q.device:
        raise UsageError(f"sinks are on {sinks.device} and q on {q.device}: move one of them")
    if sinks.dim() != 1 or sinks.shape[0] != heads:
        raise UsageError(f"sinks have shape {short(sinks)} for {heads} query heads: give one logit a head, ({heads},)")


def checked_scale(scale: object, head_dim: int) -> float:
    """The factor of the scores, 1 / sqrt(D) unless given."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    value = _number(scale, "scale", "leave it out for 1 / sqrt(D)")
    if not abs(value) <= _FP32_MAX:
        raise UsageError(f"scale={scale}: give a finite number that fp32 can hold, or leave it out for 1 / sqrt(D)")
    return value


def checked_softcap(softcap: object) -> float:
    """The cap, 0 for none."""
    if softcap is None:
        return 0.0
    value = _number(softcap, "softcap", "leave it out for none")
    if not _FP32_TINY <= value <= _FP32_MAX:
        raise UsageError(
            f"softcap={softcap}: give a positive finite number that fp32 can hold, or leave it out for none"
        )
    return value


def checked_dropout(dropout_p: object, generator: object) -> float:
    """The share of probabilities to drop, in [0, 1)."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise UsageError(f"generator is {type(generator).__name__}: give a torch.Generator, or None for torch's own")
    value = _number(dropout_p, "dropout_p", "give 0.0 for none")
    if not 0 <= value < 1:
        raise UsageError(f"dropout_p={dropout_p}: give a share in [0, 1), 0.0 for none")
    return value


def short(x: Tensor) -> str:
    """The shape as a tuple."""
    return str(tuple(x.shape))


def _number(value: object, name: str, way_out: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymFloat, torch.SymInt)):
        raise UsageError(f"{name}={value!r} is {type(value).__name__}: give a Python number, or {way_out}")
    return float(value)
