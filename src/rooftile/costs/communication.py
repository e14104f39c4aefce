"""Collectives: what they read and write in device memory. The wire is the communication ledger's business."""

from __future__ import annotations

from rooftile.capture.trace import Call
from rooftile.costs.operands import reads, total_bytes, writes
from rooftile.costs.record import Cost
from rooftile.costs.registry import formula

__all__: list[str] = []

_FUNCTIONAL = (
    "all_reduce all_reduce_coalesced all_gather_into_tensor all_gather_into_tensor_out "
    "all_gather_into_tensor_coalesced reduce_scatter_tensor reduce_scatter_tensor_coalesced all_to_all_single broadcast"
)
_DIFFERENTIABLE = "all_gather_into_tensor reduce_scatter_tensor all_to_all_single"
_PROCESS_GROUP = (
    "allreduce_ allreduce_coalesced_ allgather_ _allgather_base_ allgather_coalesced_ allgather_into_tensor_coalesced_ "
    "reduce_scatter_ _reduce_scatter_base_ reduce_scatter_tensor_coalesced_ alltoall_ alltoall_base_ broadcast_ "
    "reduce_ gather_ scatter_ send recv_"
)


@formula(
    *(f"_c10d_functional.{name}" for name in _FUNCTIONAL.split()),
    *(f"_c10d_functional_autograd.{name}" for name in _DIFFERENTIABLE.split()),
    *(f"c10d.{name}" for name in _PROCESS_GROUP.split()),
    zero_reason="communication",
)
def collective(call: Call) -> Cost:
    """Inputs read once, outputs written once. The sums of a reduction are the collective's, not this rank's."""
    return Cost("communication", 0, total_bytes(reads(call)), total_bytes(writes(call)), zero_reason="communication")


@formula(
    "_c10d_functional.wait_tensor", "c10d.barrier", "c10d.monitored_barrier_",
    zero_reason="wait",
)  # fmt: skip
def wait(call: Call) -> Cost:  # noqa: ARG001
    """A synchronisation: nothing moves."""
    return Cost("communication", 0, 0, 0, zero_reason="wait")
