"""``attn_implementation="rooftile"`` in any transformers model.

>>> from rooftile.integrations.transformers import register
>>> register()
>>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="rooftile")

The model's mask arrives as row intervals wherever it is one (:mod:`rooftile.integrations.transformers_masks`); a mask
of one's own, bool or additive, of four dimensions, is honoured pair by pair. Results are those of
``attn_implementation="eager"`` to rounding, with two differences that are meant: a row that sees no key is 0, where
eager gives the mean of all values, and dropout draws its own mask.

Nothing that a model asks for is ignored: an argument that could change the result and that isn't known is refused, and
so is a model that takes transformers' mask but writes attention out by itself. (One that does neither runs as ever:
nothing here is called.) Under torch.compile sliding windows, chunks and packed sequences are a Boolean square, as they
are for ``"sdpa"``: the compiler can't look into the functions that describe them.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

from torch import Tensor, nn

from rooftile.errors import UsageError
from rooftile.integrations.mask_functions import packed_rows, readings_agree
from rooftile.integrations.transformers_masks import VisibleKeys, make_mask
from rooftile.masks import Mask, causal, dense

__all__ = ["NAME", "attention_forward", "register"]

#: What ``attn_implementation`` takes.
NAME = "rooftile"

#: What models pass on to every attention layer and what changes nothing in it: positions are in q and k already,
#: packed sequences in the mask; the rest is about outputs, losses, caches and the memory of other kernels.
_NEUTRAL = frozenset({
    "cache_position", "deterministic", "layer_idx", "logits_to_keep", "max_length_k", "max_length_q",
    "num_items_in_batch", "output_hidden_states", "output_router_logits", "position_embeddings", "position_ids",
    "return_dict", "use_cache",
})  # fmt: skip


def register() -> None:
    """Make ``"rooftile"`` an attention implementation of the installed transformers; twice is once.

    Raises :class:`~rooftile.errors.UsageError` where transformers is missing, or has not the mask interface of release
    5, which speaks of lengths and offsets.
    """
    way_out = "install it with `pip install -U 'transformers>=5'`."
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    except ImportError as error:
        raise UsageError(
            f"attn_implementation='rooftile' needs transformers with its mask interface ({error}); {way_out}"
        ) from error
    if "q_offset" not in inspect.signature(sdpa_mask).parameters:
        raise UsageError(
            f"attn_implementation='rooftile' needs a newer transformers, whose masks have offsets; {way_out}"
        )
    readings_agree()  # now, and not in the middle of a forward pass that someone records
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, make_mask)


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | VisibleKeys | None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None,
    position_bias: Tensor | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
    sinks: Tensor | None = None, sliding_window: int | None = None, cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None, **rest: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers calls in every attention layer: ``query`` (B, Hq, Lq, D), ``key`` (B, Hkv, Lk, D), ``value``
    (B, Hkv, Lk, Dv); returns (B, Lq, Hq, Dv) and no attention weights.

    ``position_bias`` is added to the scores and has a gradient; ``s_aux`` or ``sinks``: one logit a query head. A
    window is in the mask that the model was given, so ``sliding_window`` says it once more.

    Raises :class:`~rooftile.errors.UsageError` for what it can't honour.
    """
    from rooftile._attention import attention

    if cu_seq_lens_q is not None:
        rest.pop("seq_idx", None)  # the same packing, for the layers of hybrid models that are no attention
    _refuse_unknown(rest)
    if s_aux is not None and sinks is not None:
        raise UsageError(f"{type(module).__name__} gives its sinks twice, as s_aux and as sinks; give one of them.")
    q_len, kv_len = query.shape[2], key.shape[2]
    causal_alone = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    mask, bias = _mask_and_bias(attention_mask, position_bias, q_len, kv_len)
    if attention_mask is None:
        mask = _without_mask(module, q_len, kv_len, bool(causal_alone), sliding_window)
    packed = _packed(cu_seq_lens_q, cu_seq_lens_k, q_len, kv_len)
    if packed is not None:
        mask = packed if mask is None else mask & packed
    if query.shape[0] == 1 != key.shape[0]:  # learned queries, the same for every sequence
        query = query.expand(key.shape[0], -1, -1, -1)
    made = attention(
        query, key, value, mask=mask, bias=bias, scale=scaling, softcap=softcap, sinks=_one_a_head(s_aux, sinks),
        dropout_p=dropout if module.training else 0.0,
    )  # fmt: skip
    return cast("Tensor", made).transpose(1, 2).contiguous(), None


def _refuse_unknown(rest: dict[str, Any]) -> None:
    """An argument that asks for something: neither known to be neutral, nor None or False."""
    if rest.get("output_attentions"):
        raise UsageError(
            "output_attentions=True needs attention weights, which a tiled kernel never writes out; load the model "
            'with attn_implementation="eager" for them.'
        )
    asked = sorted(
        name for name, given in rest.items() if name not in _NEUTRAL and given is not None and given is not False
    )
    if asked:
        raise UsageError(
            f"the attention layer was given {', '.join(asked)}, which rooftile doesn't know and which may change the "
            'result; drop it, or load the model with attn_implementation="eager".'
        )


def _mask_and_bias(
    mask: Tensor | VisibleKeys | None, position_bias: Tensor | None, q_len: int, kv_len: int
) -> tuple[Mask | None, Tensor | None]:
    """The mask as a rooftile mask, and what is added to the scores."""
    if isinstance(mask, VisibleKeys):
        if tuple(mask.shape[2:]) != (q_len, kv_len):
            raise UsageError(
                f"a mask of {mask.shape[2]} queries and {mask.shape[3]} keys came to {q_len} queries and {kv_len} "
                'keys; this model changes its lengths after it made the mask: use attn_implementation="eager" for it.'
            )
        return mask.mask, position_bias
    if mask is None:
        return None, position_bias
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        what = f"{mask.dim()} dimensions" if isinstance(mask, Tensor) else f"type {type(mask).__name__}"
        raise UsageError(f"the mask has {what}; give a bool or additive mask of (B, H or 1, Lq, Lk).")
    if not mask.is_floating_point():
        if mask.dtype is not mask.bool().dtype:
            raise UsageError(f"the mask is {mask.dtype}; make it bool (True: visible) or additive (0 and -inf).")
        return dense(mask), position_bias
    return None, mask if position_bias is None else position_bias + mask


def _without_mask(
    module: nn.Module, q_len: int, kv_len: int, is_causal: bool, sliding_window: int | None
) -> Mask | None:
    """A model that made no mask: causal where it says so, which one query, the newest, needs no mask for."""
    if sliding_window is not None:
        raise UsageError(
            f"{type(module).__name__} has a window of {sliding_window} and made no mask with it; give the model a mask "
            "of four dimensions that has the window in it."
        )
    if not is_causal or q_len == 1:
        return None
    if q_len != kv_len:
        raise UsageError(
            f"{type(module).__name__} asks for causal attention of {q_len} queries over {kv_len} keys without a mask, "
            "which has two readings; give the model a mask, or is_causal=False if it is no causal attention."
        )
    return causal()


def _packed(cu_q: Tensor | None, cu_k: Tensor | None, q_len: int, kv_len: int) -> Mask | None:
    """Sequences packed into one row, by their cumulative lengths: each sees itself only."""
    if cu_q is None and cu_k is None:
        return None
    if cu_q is None or cu_k is None or q_len != kv_len or not _same(cu_q, cu_k):
        raise UsageError(
            "cu_seq_lens_q and cu_seq_lens_k must be given together and be the same packing of queries and keys; "
            f"got {_lengths(cu_q)} and {_lengths(cu_k)} for {q_len} queries and {kv_len} keys."
        )
    return packed_rows(cu_q, q_len)


def _same(cu_q: Tensor, cu_k: Tensor) -> bool:
    return cu_q is cu_k or (cu_q.shape == cu_k.shape and bool((cu_q == cu_k).all()))


def _lengths(cu: Tensor | None) -> str:
    return "none" if cu is None else f"{cu.numel() - 1} sequences"


def _one_a_head(s_aux: Tensor | None, sinks: Tensor | None) -> Tensor | None:
    found = s_aux if s_aux is not None else sinks
    if found is not None and found.dim() != 1:
        raise UsageError(
            f"sinks of shape {tuple(found.shape)} differ from row to row; rooftile takes one logit a query head, "
            '(Hq,): use attn_implementation="eager" for this model.'
        )
    return found
