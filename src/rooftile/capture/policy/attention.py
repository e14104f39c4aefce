"""Which attention kernel the target device would take: the decision table, with reasons.

The conditions are torch's own (``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` and ``sdp_utils_cpp.cpp`` of
torch 2.13), in torch's order of preference: flash, then memory-efficient, then the materialised ``math`` path. A kernel
says why it can't take a call; the first one without reasons is taken. cuDNN's attention, which torch may prefer on
Hopper and Blackwell, moves the same bytes as flash and is not told apart from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from rooftile.devices import Device

__all__ = ["AttentionCall", "AttentionDecision", "decide"]

MaskKind = Literal["none", "causal", "bool", "additive"]


class AttentionCall(NamedTuple):
    """What the choice depends on. ``head_dim`` is of Q and K, ``value_dim`` of V."""

    dtype: str
    rank: int
    query_heads: int
    kv_heads: int
    query_length: int
    key_length: int
    head_dim: int
    value_dim: int
    mask: MaskKind
    mask_grad: bool
    dropout: bool
    grad: bool


class AttentionDecision(NamedTuple):
    """The kernel, whether it materialises the N x N scores, and why."""

    kernel: str
    materialized: bool
    reason: str


class Kernel(Protocol):
    """A kernel is a name and the list of reasons why it can't take a call (empty: it can)."""

    @property
    def name(self) -> str: ...

    def refusals(self, call: AttentionCall, device: Device) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class Flash:
    """FlashAttention-2 as torch ships it (CUDA), AOTriton's (ROCm)."""

    name: str = "flash"

    def refusals(self, call: AttentionCall, device: Device) -> list[str]:
        """Reasons, in torch's order."""
        capability = device.compute_capability or 0.0
        out = _shape_refusals(call)
        if call.dtype not in ("float16", "bfloat16"):
            out.append(f"flash takes fp16 and bf16, not {call.dtype}")
        if device.device_class == "cuda" and capability < 8.0:
            out.append(f"flash needs compute capability 8.0, the device has {capability}")
        if call.mask in ("bool", "additive"):
            out.append("flash takes no attn_mask")
        if call.head_dim != call.value_dim:
            out.append(f"flash needs equal head dims, got {call.head_dim} and {call.value_dim}")
        if call.head_dim > 256:
            out.append(f"flash takes head dims up to 256, got {call.head_dim}")
        if call.grad and call.head_dim > 192 and capability in (8.6, 8.9, 12.0):
            out.append(f"flash has no backward for head dim {call.head_dim} on compute capability {capability}")
        if call.mask == "causal" and call.query_length != call.key_length:
            out.append("flash refuses is_causal with unequal lengths")
        if call.query_heads % call.kv_heads:
            out.append(f"{call.query_heads} query heads are not a multiple of {call.kv_heads} kv heads")
        return out


@dataclass(frozen=True, slots=True)
class MemoryEfficient:
    """The CUTLASS memory-efficient kernel: fp32 too, additive masks, no grouped heads."""

    name: str = "memory-efficient"

    def refusals(self, call: AttentionCall, device: Device) -> list[str]:
        """Reasons, in torch's order."""
        capability = device.compute_capability or 0.0
        out = _shape_refusals(call)
        dtypes = ("float16", "bfloat16", "float32") if capability >= 8.0 or device.device_class == "rocm" else (
            "float16", "float32")  # fmt: skip
        if call.dtype not in dtypes:
            out.append(f"memory-efficient takes {', '.join(dtypes)}, not {call.dtype}")
        if call.query_heads != call.kv_heads:
            out.append("memory-efficient takes no grouped heads (enable_gqa)")
        align = 4 if call.dtype == "float32" or capability < 7.5 else 8
        if call.head_dim % align or call.value_dim % align:
            out.append(f"memory-efficient needs head dims that are multiples of {align}")
        return out


@dataclass(frozen=True, slots=True)
class CpuFlash:
    """Torch's tiled CPU kernel."""

    name: str = "flash-for-cpu"

    def refusals(self, call: AttentionCall, device: Device) -> list[str]:  # noqa: ARG002
        """Reasons, in torch's order."""
        out = _shape_refusals(call)
        if call.dropout:
            out.append("flash-for-cpu has no dropout")
        if call.head_dim != call.value_dim:
            out.append(f"flash-for-cpu needs equal head dims, got {call.head_dim} and {call.value_dim}")
        if call.mask_grad:
            out.append("flash-for-cpu has no gradient for the mask")
        return out


#: Per device class, in torch's order of preference. A class without an entry has no tiled kernel that torch takes.
KERNELS: dict[str, tuple[Kernel, ...]] = {
    "cuda": (Flash(), MemoryEfficient()),
    "rocm": (Flash(), MemoryEfficient()),
    "cpu": (CpuFlash(),),
    "tpu": (),
}


def _shape_refusals(call: AttentionCall) -> list[str]:
    out = []
    if call.rank != 4:
        out.append(f"tiled kernels take 4-dimensional inputs, got {call.rank}")
    if 0 in (call.query_length, call.key_length):
        out.append("tiled kernels take no empty sequence")
    return out


def decide(call: AttentionCall, device: Device, choice: str) -> AttentionDecision:
    """The kernel for one call under ``--attention auto|tiled|materialized``."""
    if choice == "materialized":
        return AttentionDecision("math", True, "asked for with --attention materialized")
    refused: list[str] = []
    for kernel in KERNELS[device.device_class]:
        reasons = kernel.refusals(call, device)
        if not reasons:
            why = "; ".join(refused)
            return AttentionDecision(kernel.name, False, f"taken on {device.name}" + (f" because {why}" if why else ""))
        refused += reasons
    if choice == "tiled" and call.rank == 4:
        why = "; ".join(refused) or f"torch has none on {device.device_class}"
        return AttentionDecision("tiled", False, f"asked for with --attention tiled, though torch has no kernel: {why}")
    if not refused:
        refused = [f"torch has no tiled kernel on {device.device_class}; whether its compiler fuses is unknown"]
    return AttentionDecision("math", True, "; ".join(refused))
