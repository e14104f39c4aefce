"""Scratch memory that a device's kernel takes while it runs, by name; everything not listed here is unknown, not zero.

From torch 2.13's sources (``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp``, ``mha_bwd``): the
backward pass of flash attention accumulates dQ in fp32, keeps one fp32 number a row, and writes dK and dV once per
*query* head before it sums them over a group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rooftile.capture.trace import Call

if TYPE_CHECKING:
    from rooftile.devices import Device

__all__ = ["Workspaces", "workspaces_of"]

#: ``(name, bytes)`` pairs for one Call, alive during that op only.
Workspaces = Callable[[Call], tuple[tuple[str, int], ...]]


def _none(call: Call) -> tuple[tuple[str, int], ...]:  # noqa: ARG001
    return ()


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _flash(call: Call) -> tuple[tuple[str, int], ...]:
    if call.operator != "rooftile.tiled_attention_backward.default":
        return ()
    q, k, v = call.args[1], call.args[2], call.args[3]
    batch, heads, rows, dim = q.shape
    padded = _round_up(rows, 128)
    spaces = [
        ("attention backward, dQ accumulator fp32", batch * heads * padded * _round_up(dim, 32) * 4),
        ("attention backward, row sums fp32", batch * heads * padded * 4),
    ]
    if heads != k.shape[1]:
        per_key = batch * k.shape[2] * heads
        spaces.append(("attention backward, dK and dV per query head", per_key * (dim + v.shape[3]) * k.itemsize))
    return tuple(spaces)


def workspaces_of(device: Device) -> Workspaces:
    """The scratch memory of the device class's kernels."""
    return _flash if device.device_class in ("cuda", "rocm") else _none
