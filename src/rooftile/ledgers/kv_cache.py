"""KV cache: the bytes that generation must keep per token, read off the attention that ran.

``2 L h_kv d_h`` elements a token: K and V of every layer with the heads that exist, not the query heads that share
them. A K that was expanded and copied to more heads before the attention counts the fewer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rooftile.capture.trace import ITEMSIZE, Op, TensorMeta, Trace
from rooftile.costs.operands import keyword
from rooftile.ledgers.causality import Causality, MaskOrigins
from rooftile.ledgers.materialized import MaterializedAttention, operator_name
from rooftile.ledgers.stretched import stretched_copies

__all__ = ["KV_DTYPES", "KvCacheLedger", "kv_cache"]

#: What ``--kv-dtype`` takes, and the storage dtype that each name means.
KV_DTYPES = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "int8": "int8",
}


@dataclass(frozen=True, slots=True)
class KvCacheLedger:
    """Bytes of the cache. Every figure is None where ``reason`` says why the model has none.

    ``bytes_per_token`` is for one token of one sequence, all layers; ``total_bytes`` for ``batch`` sequences of
    ``tokens`` tokens. ``heads`` and ``head_dim`` are None where the layers differ. ``captured_dtype`` is what the
    captured step keeps its cache in, None where it keeps none: peak and traffic are with that, whatever ``dtype`` is.
    """

    bytes_per_token: int | None
    total_bytes: int | None
    layers: int
    heads: int | None
    head_dim: int | None
    batch: int | None
    tokens: int | None
    dtype: str | None
    evidence: str
    reason: str
    captured_dtype: str | None = None


@dataclass(frozen=True, slots=True)
class _Layer:
    """Elements of K and of V that one token adds in one layer."""

    batch: int
    tokens: int
    heads: int
    head_dim: int
    elements: int
    dtype: str


def kv_cache(
    trace: Trace, attention: Sequence[MaterializedAttention] = (), kv_dtype: str | None = None
) -> KvCacheLedger:
    """The KV cache of the model in this trace. ``kv_dtype`` is a name of :data:`KV_DTYPES`, None: the compute dtype."""
    seen, layers, known = 0, [], set()
    copies, masks = stretched_copies(trace.ops), MaskOrigins(trace)
    decoding = trace.settings.get("phase") == "decode"
    for op in _first_calls(trace.ops):
        seen += 1
        causal = "derived" if decoding else _tiled_causality(op, masks)
        if causal is not None:
            known.add(causal)
            layers.append(_tiled_layer(op, copies))
    for found in attention:
        seen += 1
        causal = (
            "derived"
            if decoding
            else None
            if found.row_mask is None
            else masks.of(found.row_mask, found.rows, found.columns)
        )
        layer = _materialized_layer(found, copies, trace.settings.get("batch"))
        if causal is not None and layer is not None:
            known.add(causal)
            layers.append(layer)
    if not layers:
        return _none("no attention was observed" if not seen else "no causal attention: nothing is generated from it")
    dtype = KV_DTYPES[kv_dtype] if kv_dtype else trace.settings.get("compute_dtype")
    return _ledger(layers, dtype, "assumed" if "assumed" in known else "derived", _captured_dtype(trace))


def _captured_dtype(trace: Trace) -> str | None:
    """The widest dtype of the tensors that the step keeps as its cache."""
    kept = {s.dtype for s in trace.storages if s.role == "kv_cache" and s.dtype}
    return max(kept, key=lambda name: ITEMSIZE.get(name, 0), default=None)


def _ledger(layers: list[_Layer], dtype: str | None, evidence: Causality, captured: str | None) -> KvCacheLedger:
    # A materialised path may have widened K before its product; what the model computes in says more.
    dtype = dtype or max({layer.dtype for layer in layers}, key=lambda name: ITEMSIZE[name])
    per_token = sum(layer.elements for layer in layers) * ITEMSIZE[dtype]
    heads, dims = {layer.heads for layer in layers}, {layer.head_dim for layer in layers}
    batch, tokens = max(layer.batch for layer in layers), max(layer.tokens for layer in layers)
    return KvCacheLedger(
        bytes_per_token=per_token,
        total_bytes=per_token * batch * tokens,
        layers=len(layers),
        heads=heads.pop() if len(heads) == 1 else None,
        head_dim=dims.pop() if len(dims) == 1 else None,
        batch=batch,
        tokens=tokens,
        dtype=dtype,
        evidence=evidence,
        reason="",
        captured_dtype=captured,
    )


def _none(reason: str) -> KvCacheLedger:
    return KvCacheLedger(None, None, 0, None, None, None, None, None, "observed", reason)


def _first_calls(ops: Sequence[Op]) -> Iterator[Op]:
    """The first attention call of every module: later micro-batches and recomputation see the same cache."""
    seen: set[str] = set()
    for op in ops:
        name = operator_name(op.call.operator)
        if op.phase != "forward" or "attention" not in name or "backward" in name or op.module in seen:
            continue
        if len(op.call.inputs) >= 3 and len(op.call.inputs[1].shape) == 4:
            seen.add(op.module)
            yield op


def _tiled_causality(op: Op, masks: MaskOrigins) -> Causality | None:
    """Declared to the operator, or by a mask with a row for each query."""
    if operator_name(op.call.operator) in ("attention", "paged_attention"):
        return _interval_causality(op, masks)
    causal_at = 5 if operator_name(op.call.operator) == "tiled_attention" else 4
    if bool(op.call.argument(causal_at, "is_causal", False)):
        return "derived"
    bias = op.call.argument(3, "attn_bias")
    if not isinstance(bias, TensorMeta) or bias.shape[-2] == 1 or bias.stride[-2] == 0:
        return None
    return masks.of(op.inputs[3], bias.shape[-2], bias.shape[-1])


def _interval_causality(op: Op, masks: MaskOrigins) -> Causality | None:
    """Of ``rooftile::attention``: by the mask that its intervals were made from, or by a dense mask."""
    if keyword(op.call, "visible_causal", False):
        return "derived"
    if operator_name(op.call.operator) == "paged_attention":
        return None
    before = sum(isinstance(op.call.argument(at, ""), TensorMeta) for at in range(5))
    dense = op.call.argument(5, "dense")
    if not isinstance(dense, TensorMeta) or dense.shape[-2] == 1 or dense.stride[-2] == 0:
        return None
    return masks.of(op.inputs[before], dense.shape[-2], dense.shape[-1])


def _tiled_layer(op: Op, producers: dict[int, TensorMeta]) -> _Layer:
    k, v = op.call.inputs[1:3]  # (B, Hkv, L, D), or pages of such
    batch, tokens = k.shape[0], k.shape[2]
    if operator_name(op.call.operator) == "paged_attention":
        batch, tokens = op.call.inputs[0].shape[0], op.call.argument(9, "kv_len")
    k_heads = _heads(k, producers.get(op.inputs[1]))
    v_heads = _heads(v, producers.get(op.inputs[2]))
    return _Layer(
        batch=batch,
        tokens=tokens,
        heads=k_heads,
        head_dim=k.shape[3],
        elements=k_heads * k.shape[3] + v_heads * v.shape[3],
        dtype=k.dtype,
    )


def _materialized_layer(
    found: MaterializedAttention, producers: dict[int, TensorMeta], batch: int | None
) -> _Layer | None:
    """K is (B*H, D, L), V is (B*H, L, Dv); None where the captured batch doesn't divide their first dimension."""
    folded = found.k.shape[0] if len(found.k.shape) == 3 else 1
    if not batch or folded % batch:
        return None
    heads = folded // batch
    k_heads = heads // _stretch(producers.get(found.k_storage))
    v_heads = heads // _stretch(producers.get(found.v_storage))
    head_dim, value_dim = found.k.shape[-2], found.v.shape[-1]
    return _Layer(batch, found.columns, k_heads, head_dim, k_heads * head_dim + v_heads * value_dim, found.k.dtype)


def _heads(meta: TensorMeta, stretched: TensorMeta | None) -> int:
    """Heads of a (B, H, L, D) operand that are distinct: neither expanded here nor in the copy that made it."""
    if meta.stride[1] == 0:
        return 1
    return meta.shape[1] // _stretch(stretched)


def _stretch(source: TensorMeta | None) -> int:
    """How many times the copied input repeats each head; the batch dimension is not a head."""
    if source is None:
        return 1
    repeats = 1
    for size, step in zip(source.shape[1:], source.stride[1:], strict=True):
        if step == 0:
            repeats *= size
    return repeats
