"""Public operators that the target device runs otherwise than the CPU does, and what stands in for each.

For the length of a capture the composite operators below are replaced at the Autograd keys of meta and CPU tensors, so
every route to them is caught: ``F.*``, ``torch._C._nn``, ``torch.ops.aten``, ``nn.MultiheadAttention``, encoder layers,
recomputation inside backward. Under ``inference_mode`` those keys are absent; there the recorder, which then sees the
composite operator itself, asks :meth:`DevicePolicy.handler`.

=================  =======================================  =====================================
operator           CUDA, ROCm                               CPU, TPU
=================  =======================================  =====================================
attention          the decision table (``attention.py``)    the decision table
dropout            ``native_dropout``, mask of 1 byte       as torch composes it
rms_norm           one kernel, fp32 statistics              as torch composes it
layer, group norm  fp32 statistics                          as the CPU kernel returns them
LSTM, GRU, RNN     one kernel with a reserve buffer         as torch composes it
=================  =======================================  =====================================
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rooftile.capture.operators import register_operators
from rooftile.capture.policy.attention import AttentionCall, AttentionDecision, MaskKind, decide

if TYPE_CHECKING:
    from rooftile.devices import Device

__all__ = ["DevicePolicy"]

aten = torch.ops.aten


class _TiledAttention(torch.autograd.Function):
    """Forward keeps Q, K, V, O and the row statistics; backward recomputes the scores (FlashAttention, §3.1)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        dropout_p, is_causal, scale = rest
        out, lse, rng_state = torch.ops.rooftile.tiled_attention(q, k, v, bias, dropout_p, is_causal, scale)
        ctx.save_for_backward(q, k, v, bias, out, lse, rng_state)
        ctx.rest = rest
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        q, k, v, bias, out, lse, rng_state = ctx.saved_tensors
        wants_bias = bias is not None and ctx.needs_input_grad[3]
        dq, dk, dv, dbias = torch.ops.rooftile.tiled_attention_backward(
            grad_out, q, k, v, out, lse, rng_state, bias, *ctx.rest, wants_bias
        )
        return dq, dk, dv, dbias if wants_bias else None, None, None, None


class _RmsNorm(torch.autograd.Function):
    """CUDA's fused kernel: keeps the input and one fp32 number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: list[int], weight: Tensor | None, eps: float) -> Tensor:
        out, rstd = torch.ops.rooftile.rms_norm(x, shape, weight, eps)
        ctx.save_for_backward(x, rstd, weight)
        ctx.shape = shape
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        x, rstd, weight = ctx.saved_tensors
        dx, dw = torch.ops.rooftile.rms_norm_backward(grad_out, x, rstd, weight, ctx.shape)
        return dx, None, None if weight is None else dw, None


class _Rnn(torch.autograd.Function):
    """One kernel for all steps and layers; the reserve buffer is what its backward pass needs."""

    @staticmethod
    def forward(ctx: Any, options: tuple[Any, ...], n_states: int, x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        hx, weights = list(tensors[:n_states]), list(tensors[n_states:])
        *outs, reserve = torch.ops.rooftile.rnn(x, hx, weights, *options)
        ctx.save_for_backward(x, outs[0], reserve, *tensors)
        ctx.options, ctx.n_states = options, n_states
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, output, reserve, *tensors = ctx.saved_tensors
        hx, weights = tensors[: ctx.n_states], tensors[ctx.n_states :]
        result = torch.ops.rooftile.rnn_backward(list(grads), x, hx, weights, output, reserve, *ctx.options)
        return None, None, *result


def _mask_kind(mask: Tensor | None, is_causal: bool) -> MaskKind:
    if mask is None:
        return "causal" if is_causal else "none"
    return "bool" if mask.dtype == torch.bool else "additive"


class DevicePolicy:
    """How one target device carries out attention, dropout, norms and RNNs; remembers the attention decisions."""

    def __init__(self, device: Device, attention: str) -> None:
        self.device, self.attention = device, attention
        self.decisions: Counter[AttentionDecision] = Counter()
        self._handlers: dict[Any, Callable[..., Any]] = {aten.scaled_dot_product_attention.default: self._sdpa}
        if device.device_class in ("cuda", "rocm"):
            self._handlers |= {
                aten.dropout.default: _native_dropout,
                aten.rms_norm.default: _rms_norm,
                aten.lstm.input: _lstm,
                aten.gru.input: _rnn_handler("GRU"),
                aten.rnn_tanh.input: _rnn_handler("RNN_TANH"),
                aten.rnn_relu.input: _rnn_handler("RNN_RELU"),
            }

    def handler(self, op: Any) -> Callable[..., Any] | None:
        """What stands in for a composite operator that reached the recorder whole."""
        return self._handlers.get(op)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the operators until the block is left."""
        register_operators()
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "overriding a previously registered kernel" is the point
            for op, handler in self._handlers.items():
                for key in ("AutogradMeta", "AutogradCPU"):
                    library.impl(op, handler, key)
        # The encoder fast path is one opaque operator on real CPU tensors and absent on meta ones.
        fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
            library._destroy()

    def _sdpa(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        tensors = [t for t in (q, k, v, attn_mask) if t is not None]
        call = AttentionCall(
            dtype=str(q.dtype).removeprefix("torch."),
            rank=q.dim(),
            query_heads=q.shape[1] if q.dim() == 4 else 1,
            kv_heads=k.shape[1] if k.dim() == 4 else 1,
            query_length=q.shape[-2],
            key_length=k.shape[-2],
            head_dim=q.shape[-1],
            value_dim=v.shape[-1],
            mask=_mask_kind(attn_mask, is_causal),
            mask_grad=attn_mask is not None and attn_mask.requires_grad,
            dropout=dropout_p > 0,
            grad=torch.is_grad_enabled() and any(t.requires_grad for t in tensors),
        )
        decision = decide(call, self.device, self.attention)
        self.decisions[decision] += 1
        if decision.materialized:
            return aten._scaled_dot_product_attention_math.default(
                q, k, v, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
            )[0]
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            # As torch's convert_boolean_attn_mask: the tiled kernels take an additive bias.
            zero = torch.zeros((), dtype=q.dtype, device=q.device)
            attn_mask = torch.where(attn_mask, zero, -math.inf)
        if scale is None:
            scale = 1.0 / math.sqrt(q.shape[-1])
        return _TiledAttention.apply(q, k, v, attn_mask, dropout_p, is_causal, scale)


def _native_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0:
        return x
    return torch.native_dropout(x, p, True)[0]


def _rms_norm(x: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    if weight is not None and weight.dtype != x.dtype:  # torch's fused kernel refuses mixed dtypes
        return aten.rms_norm.default.decompose(x, normalized_shape, weight, eps)
    if eps is None:
        eps = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
    return _RmsNorm.apply(x, list(normalized_shape), weight, eps)


def _run_rnn(mode: str, x: Tensor, hx: list[Tensor], params: list[Tensor], *options: Any) -> tuple[Tensor, ...]:
    _, num_layers, dropout, train, bidirectional, batch_first = options
    if torch.is_autocast_enabled("cpu"):  # as autocast does for _cudnn_rnn: weights, input and state in low precision
        dtype = torch.get_autocast_dtype("cpu")
        x, hx, params = x.to(dtype), [h.to(dtype) for h in hx], [p.to(dtype) for p in params]
    options = (mode, num_layers, dropout, train, bidirectional, batch_first)
    return _Rnn.apply(options, len(hx), x, *hx, *params)


def _lstm(x: Tensor, hx: list[Tensor], params: list[Tensor], *options: Any) -> tuple[Tensor, ...]:
    return _run_rnn("LSTM", x, list(hx), list(params), *options)


def _rnn_handler(mode: str) -> Callable[..., tuple[Tensor, ...]]:
    def handler(x: Tensor, hx: Tensor, params: list[Tensor], *options: Any) -> tuple[Tensor, ...]:
        return _run_rnn(mode, x, [hx], list(params), *options)

    return handler
