"""Reductions and scans: FLOPs per input element."""

from __future__ import annotations

from rooftile.capture.trace import Call
from rooftile.costs.operands import reads, strided_only, total_bytes, writes
from rooftile.costs.record import Cost
from rooftile.costs.registry import formula

__all__: list[str] = []

_ONE = (
    "sum nansum mean prod amax amin max min argmax argmin any all cumsum cumprod cummax cummin _cummax_helper "
    "_cummin_helper median nanmedian mode logcumsumexp trace equal _foreach_max"
)

_PER_INPUT = {
    **dict.fromkeys(_ONE.split(), 1),
    "aminmax": 2,
    "_aminmax": 2,
    "count_nonzero": 2,  # compare, add
    "norm": 2,  # square, add
    "linalg_vector_norm": 2,
    "_foreach_norm": 2,
    "_foreach_powsum": 2,
    "nanmean": 2,  # test, add
    "var": 4,  # mean: add; then subtract, square, add
    "std": 4,
    "var_mean": 4,
    "std_mean": 4,
    "logsumexp": 4,  # maximum, subtract, exp, add
    "dist": 3,  # subtract, square, add
    "cumprod_backward": 3,
    "_cdist_forward": 3,
    "histc": 1,
    "bincount": 1,
}


@formula(*(f"aten.{name}" for name in _PER_INPUT))
def reduction(call: Call) -> Cost:
    """Every input element takes part once; the output is as small as the reduction makes it.

    ``max.other`` and ``min.other`` of two tensors are elementwise: one comparison per output.
    """
    strided_only(call)
    base, overload = call.operator.split(".")[1:3]
    if overload == "other":
        elements = call.outputs[0].numel
    else:
        elements = sum(meta.numel for meta in reads(call)) if base.startswith("_foreach") else call.inputs[0].numel
    return Cost(
        "reduction", _PER_INPUT[base.rstrip("_")] * elements, total_bytes(reads(call)), total_bytes(writes(call))
    )
