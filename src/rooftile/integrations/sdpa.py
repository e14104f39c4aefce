"""Route ``F.scaled_dot_product_attention`` to rooftile for the length of a block.

>>> with rooftile.integrations.route_sdpa() as routed:
...     loss = model(x).sum()
...     loss.backward()
>>> print(routed)

Every public route is caught, because the operator itself is replaced and not a Python name: ``F.``, ``torch._C._nn``,
``torch.ops.aten``, ``nn.MultiheadAttention`` and encoder layers, recomputation by checkpointing inside backward,
``no_grad`` and ``inference_mode``. Leaving the block, also by an exception, restores torch's own.

A call that rooftile doesn't take runs torch's own SDPA, unchanged, and ``routed.refused`` says why and how often.
Attention that never calls SDPA is out of reach and is not reported: ``nn.MultiheadAttention`` with ``need_weights``,
softmax(QK^T)V by hand, code that was compiled before.

The block is its own thread's (strictly: its context's, so an asyncio task's too): other threads run torch's own. A
block inside a block hides the outer one, which doesn't count its calls. Backward passes are part of what ran forward,
wherever they run; only checkpointing recomputes, and does so as routed where backward is inside the block too.

What differs from torch: a row that sees no key is 0; dropout draws another mask than torch's of the same seed; a second
derivative is a clear error with most kernels.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from rooftile import masks
from rooftile._attention import attention
from rooftile._attention.kernels import checked_names
from rooftile.errors import UsageError

__all__ = ["RoutedSdpa", "route_sdpa"]

_SDPA = torch.ops.aten.scaled_dot_product_attention.default

#: Where a call can arrive: with autograd on real tensors and on meta tensors, below it (inference mode), under vmap.
_KEYS = ("AutogradCPU", "AutogradMeta", "CPU", "FuncTorchVmapMode")


@dataclass(slots=True)
class RoutedSdpa:
    """What became of the calls so far: ``taken`` by rooftile, ``refused`` by reason and number."""

    kernel: str | tuple[str, ...]
    taken: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        """A line for what was taken and one for each reason."""
        calls = "call" if self.taken == 1 else "calls"
        lines = [f"{self.taken} {calls} of scaled_dot_product_attention by rooftile"]
        lines += [f"{count} by torch: {reason}" for reason, count in self.refused.most_common()]
        return "\n".join(lines)


_active: ContextVar[RoutedSdpa | None] = ContextVar("rooftile_routed_sdpa", default=None)


@contextlib.contextmanager
def route_sdpa(*, kernel: str | tuple[str, ...] = "auto") -> Iterator[RoutedSdpa]:
    """Within the block, ``F.scaled_dot_product_attention`` is :func:`rooftile.attention` with ``kernel``.

    Yields the :class:`RoutedSdpa` that counts. torch's fused encoder layers, which don't call SDPA, are off meanwhile
    (for the whole process, as torch's own switch is).

    Raises :class:`~rooftile.errors.UsageError` for a kernel that is no name and no tuple of names.
    """
    checked_names(kernel)
    routed = RoutedSdpa(kernel)
    _INSTALLATION.enter()
    token = _active.set(routed)
    try:
        yield routed
    finally:
        _active.reset(token)
        _INSTALLATION.leave()


class _Installation:
    """The operator's replacement, there as long as a block is open in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0
        self._library: torch.library.Library | None = None
        self._fast_path = True

    def enter(self) -> None:
        with self._lock:
            if self._blocks == 0:
                library = torch.library.Library("aten", "IMPL")
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # "overriding a previously registered kernel" is the point
                    for key in _KEYS:
                        library.impl(_SDPA, _routed_or_not, key)
                self._library = library
                self._fast_path = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self._blocks += 1

    def leave(self) -> None:
        with self._lock:
            self._blocks -= 1
            if self._blocks == 0 and self._library is not None:
                torch.backends.mha.set_fastpath_enabled(self._fast_path)
                self._library._destroy()
                self._library = None


_INSTALLATION = _Installation()


def _routed_or_not(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """What stands in for the operator: rooftile in a routed block where it takes the call, torch's own otherwise."""
    routed = _active.get()
    if routed is not None:
        call = _SdpaCall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        out = _taken(call, routed)
        if isinstance(out, Tensor):
            return out
        routed.refused[out] += 1
    own: Tensor = _SDPA.decompose(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return own


class _SdpaCall(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for t in (self.q, self.k, self.v, self.mask) if t is not None)


def _taken(call: _SdpaCall, routed: RoutedSdpa) -> Tensor | str:
    """The result by rooftile, or why it doesn't take the call; what torch itself refuses goes to torch."""
    reason = _why_not(call)
    if reason is not None:
        return reason
    operands = _operands(call)
    if operands is None:
        return _TORCH_REFUSES
    # A kernel may refuse after the dropout's seed was drawn; torch must then see the generator as it was.
    state = torch.get_rng_state() if call.dropout_p else None
    routed.taken += 1  # before: checkpointing ends its recomputation by an exception
    try:
        return _attention(call, operands, routed.kernel)
    except UsageError as error:  # nothing was computed
        routed.taken -= 1
        if state is not None:
            torch.set_rng_state(state)
        return str(error)


_TORCH_REFUSES = "torch refuses the call itself"


def _why_not(call: _SdpaCall) -> str | None:
    """What can't be routed whatever its numbers are, in one sentence."""
    if any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in call.tensors):
        return "inside torch.func (vmap, grad, ...)"
    if _is_traced(call.q):
        return "traced by torch.compile or export: what is compiled would outlive the block"
    kinds = {type(t).__name__ for t in call.tensors if not _is_plain(t)}
    if kinds:
        return f"tensors of a kind of their own ({', '.join(sorted(kinds))})"
    if forward_ad._current_level >= 0 and any(_has_tangent(t) for t in call.tensors):
        return "forward-mode derivatives"
    if not _any_backend():
        return "a backend was chosen with torch.nn.attention.sdpa_kernel"
    if len({t.dim() for t in (call.q, call.k, call.v)}) > 1 or not 2 <= call.q.dim() <= 4:
        return (
            f"operands of {call.q.dim()}, {call.k.dim()} and {call.v.dim()} dimensions; rooftile takes 2, 3 or 4 alike"
        )
    if call.mask is None:
        return None
    if call.is_causal:
        return "is_causal together with a mask, which torch's own kernels read differently"
    return None if 2 <= call.mask.dim() <= 4 else f"a mask of {call.mask.dim()} dimensions"


def _has_tangent(tensor: Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None


def _any_backend() -> bool:
    """Whether torch chooses among all of its kernels itself, as it does outside of ``sdpa_kernel``."""
    cuda = torch.backends.cuda
    return bool(cuda.flash_sdp_enabled() and cuda.mem_efficient_sdp_enabled() and cuda.math_sdp_enabled())


def _is_plain(tensor: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return type(tensor) in (Tensor, nn.Parameter, nn.Buffer, FakeTensor) and tensor.layout is torch.strided


def _is_traced(tensor: Tensor) -> bool:
    tracing = torch._guards.TracingContext.try_get() is not None or get_proxy_mode() is not None
    return tracing or torch.compiler.is_compiling() or torch._is_functional_tensor(tensor)


def _operands(call: _SdpaCall) -> tuple[Tensor, Tensor, Tensor] | None:
    """q, k, v as (B, H, L, D), what torch broadcasts expanded; None where the shapes don't fit torch's rules."""
    q, k, v = (t[(None,) * (4 - t.dim())] for t in (call.q, call.k, call.v))
    if q.shape[3] != k.shape[3] or k.shape[2] != v.shape[2] or not q.shape[3]:
        return None
    batch = _broadcast(q.shape[0], k.shape[0], v.shape[0])
    kv_heads = _broadcast(k.shape[1], v.shape[1])
    if batch is None or kv_heads is None:
        return None
    q_heads = q.shape[1]
    if call.enable_gqa:
        if not kv_heads or q_heads % kv_heads:
            return None
    elif q_heads == 1:
        q_heads = kv_heads
    elif kv_heads not in (1, q_heads):  # one kv head for several query heads is a group
        return None
    return q.expand(batch, q_heads, -1, -1), k.expand(batch, kv_heads, -1, -1), v.expand(batch, kv_heads, -1, -1)


def _broadcast(*sizes: int) -> int | None:
    """The common size, where those that differ from it are 1."""
    others = {size for size in sizes if size != 1}
    if len(others) > 1:
        return None
    return others.pop() if others else 1


def _attention(call: _SdpaCall, operands: tuple[Tensor, Tensor, Tensor], kernel: str | tuple[str, ...]) -> Tensor:
    mask: masks.Mask | None = masks.causal(align="top-left") if call.is_causal else None  # torch's is_causal
    bias: Tensor | None = None
    if call.mask is not None:
        given = call.mask[(None,) * (4 - call.mask.dim())]
        mask, bias = (masks.dense(given), None) if given.dtype == torch.bool else (None, given)
    made = attention(*operands, mask=mask, bias=bias, scale=call.scale, dropout_p=call.dropout_p, kernel=kernel)
    out = cast("Tensor", made)  # the LSE wasn't asked for
    return out.reshape(*out.shape[4 - call.q.dim() :])
