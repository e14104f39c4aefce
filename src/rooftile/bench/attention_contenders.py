"""Ways to compute one attention case, and the pass of each that is timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from rooftile._attention import attention
from rooftile.bench.attention_case import Case, Inputs
from rooftile.errors import UsageError

__all__ = ["PEER", "Attend", "Contender", "our_kernel", "timed_pass", "torch_sdpa"]

#: What every ratio is against: F.scaled_dot_product_attention, called directly.
PEER = "torch SDPA"

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to compute a case, and what it says of itself."""

    attend: Attend
    kernel: str
    path: str


def our_kernel(case: Case, inputs: Inputs, kernel: str, backward: bool = False) -> Contender:
    """One of this library's kernels; UsageError with its reasons where it refuses the case."""
    q, k, v = (x.detach().requires_grad_(backward) for x in (inputs.q, inputs.k, inputs.v))
    told = attention.explain(q, k, v, mask=case.mask, kernel=(kernel, "tiled"))  # which takes any call
    if told.kernel != kernel:
        raise UsageError("; ".join(told.refusals[kernel]))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attention(q, k, v, mask=case.mask, kernel=kernel)
        assert isinstance(out, Tensor)  # without return_lse there is nothing else
        return out

    return Contender(attend, told.kernel, told.path)


def torch_sdpa(case: Case, inputs: Inputs) -> Contender:
    """The call that a user of torch would write: ``is_causal`` where that is what the mask means, else booleans."""
    is_causal = case.mask_name == "causal" and case.q_len == case.kv_len
    shows_all = case.mask is None or is_causal or case.visible_pairs == case.square
    shown = None if shows_all or case.mask is None else case.mask.materialize(case.q_len, case.kv_len)
    grouped = case.q_heads != case.kv_heads

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=shown, is_causal=is_causal, enable_gqa=grouped)

    chosen = torch._fused_sdp_choice(
        inputs.q, inputs.k, inputs.v, attn_mask=shown, is_causal=is_causal, enable_gqa=grouped
    )
    return Contender(attend, "scaled_dot_product_attention", SDPBackend(chosen).name.lower().removesuffix("_attention"))


def timed_pass(attend: Attend, inputs: Inputs, backward: bool) -> tuple[Callable[[], object], dict[str, Tensor]]:
    """The pass that is timed (forward without gradients, or backward alone on a graph that is kept) and its result."""
    if not backward:

        def forward() -> Tensor:
            with torch.no_grad():
                return attend(inputs.q, inputs.k, inputs.v)

        return forward, {"out": forward()}
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    out = attend(q, k, v)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (q, k, v), inputs.dout, retain_graph=True)

    return gradients, dict(zip(("dq", "dk", "dv"), gradients(), strict=True))
