"""``rooftile::paged_attention``: the compiled kernel over pages, through their table; forward only.

An operator, so that what traces programs (fake tensors, profilers, audits) sees one call with its operands.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from rooftile._attention import library
from rooftile._attention.call import Call, empty_output
from rooftile.errors import UsageError
from rooftile.masks import Visibility

__all__ = ["paged_attention", "register_paged_operator"]

_SCHEMA = (
    "paged_attention(Tensor q, Tensor keys, Tensor values, Tensor table, Tensor lo, Tensor hi, Tensor? sinks, "
    "float scale, float softcap, int kv_len) -> (Tensor out, Tensor lse)"
)


def _forward(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lo: Tensor, hi: Tensor, sinks: Tensor | None,
    scale: float, softcap: float, kv_len: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    call = Call(q, keys, values, Visibility(lo, hi), None, sinks, scale, softcap, 0.0, None)
    out, lse = empty_output(q, values)
    library.forward(call, out, lse, pages=library.Pages(table, keys.shape[2], kv_len))
    return out, lse


def _forward_fake(q: Tensor, keys: Tensor, values: Tensor, *others: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return empty_output(q, values)


def _refuse_gradient(ctx: Any, *gradients: Tensor | None) -> None:  # noqa: ARG001
    raise UsageError("attention over pages has no gradient: run it under torch.no_grad()")


@functools.cache
def register_paged_operator() -> torch.library.Library:
    """Define the operator; the library object must stay alive for as long as the process."""
    namespace = torch.library.Library("rooftile", "FRAGMENT")
    namespace.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    namespace.impl("paged_attention", _forward, "CPU")
    torch.library.register_fake("rooftile::paged_attention", _forward_fake, lib=namespace)
    torch.library.register_autograd("rooftile::paged_attention", _refuse_gradient, lib=namespace)
    return namespace


_LIBRARY = register_paged_operator()


def paged_attention(call: Call, keys: Tensor, values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """``out`` (B, Hq, Lq, Dv) and LSE of ``call``, whose keys lie in pages (pages, Hkv, page_size, D).

    ``table`` is int32 (B, pages of a sequence), contiguous, with any page where no row sees a key. Of the call's own k
    and v only the shape counts.
    """
    see = call.visibility
    made: tuple[Tensor, Tensor] = torch.ops.rooftile.paged_attention(
        call.q, keys, values, table, see.lo, see.hi, call.sinks, call.scale, call.softcap, call.k.shape[2]
    )
    return made
