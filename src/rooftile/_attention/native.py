"""The native kernel: C++ behind a C ABI, one code path per family of processors, chosen when it runs."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile._attention import library
from rooftile._attention.call import Call, empty_output
from rooftile._attention.kernel import Contract, Gradients, Kernel, Plan

__all__ = ["Native", "backward", "forward"]

_LARGEST_HEAD_DIM = 512
_LARGEST_LENGTH = 2**31
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Native(Kernel):
    """What runs on a CPU unless another kernel is named."""

    name = "native"

    def refusals(self, call: Call, needs_grad: bool) -> tuple[str, ...]:
        """No library, no CPU, a dtype or size beyond it."""
        q = call.q
        reasons = []
        if library.MISSING:
            reasons.append(f"it is {library.MISSING}")
        if q.device.type != "cpu":
            reasons.append(f"it runs on CPUs, and q is on {q.device}")
        if q.dtype not in _DTYPES:
            reasons.append(f"it has float32, bfloat16 and float16 only, and q is {q.dtype}")
        widest = max(q.shape[3], call.v.shape[3])
        if widest > _LARGEST_HEAD_DIM:
            reasons.append(f"its head dims end at {_LARGEST_HEAD_DIM}, and there is one of {widest}")
        longest = max(q.shape[2], call.k.shape[2])
        if longest >= _LARGEST_LENGTH:
            reasons.append(f"its lengths end at 2^31 - 1, and there is one of {longest}")
        return tuple(reasons)

    def forward(self, call: Call, out_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """``out`` and LSE."""
        out, lse = empty_output(call.q, call.v, out_dtype)
        library.forward(call, out, lse)
        return out, lse

    def backward(
        self, call: Call, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None, wanted: list[bool]
    ) -> Gradients:
        """Gradients of what is wanted."""
        return backward(call, out, lse, dout, dlse, wanted)

    def contract(self, call: Call) -> Contract:
        """Accumulators and statistics are fp32; paths with bf16 products round P to bf16, the others widen first."""
        stored = str(call.q.dtype).removeprefix("torch.")
        narrow = call.q.dtype == torch.bfloat16 and library.PATHS[library.plan(call).path] in library.BF16_PATHS
        product = "bfloat16" if narrow else "float32"
        return Contract(stored, product, "float32", stored, "the same bits for any number of threads")

    def plan(self, call: Call) -> Plan:
        """What the library says that it would do."""
        found = library.plan(call)
        split = f", {found.split_keys} keys a split" if found.split_keys else ""
        return Plan(library.PATHS[found.path] + split, found.q_tile, found.kv_tile, found.scores)


def forward(call: Call, path: int = -1, threads: int | None = None, fp32_out: bool = False) -> tuple[Tensor, Tensor]:
    """The forward pass on a path and a number of threads: what tests force."""
    out, lse = empty_output(call.q, call.v, torch.float32 if fp32_out else None)
    library.forward(call, out, lse, path, threads)
    return out, lse


def backward(
    call: Call,
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    wanted: list[bool],
    path: int = -1,
    threads: int | None = None,
) -> Gradients:
    """The backward pass; ``out`` and ``lse`` are those of the forward pass."""
    q, k, v, bias, sinks = call.q, call.k, call.v, call.bias, call.sinks
    if dout is None:
        dout = torch.zeros((), dtype=q.dtype).expand(out.shape)
    elif dout.dtype != q.dtype:
        dout = dout.to(q.dtype)
    if dlse is not None:
        dlse = dlse.to(torch.float32).contiguous()
    dq, dk, dv = (torch.empty_like(x) if want else x.new_empty(0) for x, want in zip((q, k, v), wanted, strict=False))
    dbias = torch.zeros(bias.shape, dtype=torch.float32) if wanted[3] and bias is not None else None
    library.backward(
        call, out, lse, dout, dlse,
        (dq if wanted[0] else None, dk if wanted[1] else None, dv if wanted[2] else None, dbias), path, threads,
    )  # fmt: skip
    return (
        dq,
        dk,
        dv,
        q.new_empty(0) if dbias is None or bias is None else torch.empty_like(bias).copy_(dbias),
        _sink_gradient(sinks, out, lse, dout, dlse) if wanted[4] and sinks is not None else q.new_empty(0),
    )


def _sink_gradient(sinks: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """-sum of the sink's own probability times D = rowsum(dO O) - dLSE, over sequences and rows."""
    d = (dout.float() * out.float()).sum(-1)
    if dlse is not None:
        d = d - dlse
    share = torch.exp(sinks.float().view(1, -1, 1) - lse)
    parts = torch.where(share == 0, 0, share * d).masked_fill_(lse == -torch.inf, 0)
    # A running sum adds in one order however many threads there are.
    total = parts.transpose(0, 1).flatten(1).cumsum(1, dtype=torch.float64)[:, -1]
    return -total.to(sinks.dtype)
