"""What a kernel is: declared capabilities, and a method that says why it can't take a call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from rooftile._attention.call import Call

__all__ = ["Contract", "Gradients", "Kernel", "Plan"]

#: dq, dk, dv, dbias, dsinks; a tensor of no elements where not wanted.
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Contract:
    """The four slots of a precision contract, and whether the bits repeat."""

    storage: str
    product: str
    accumulate: str
    output: str
    determinism: str


@dataclass(frozen=True, slots=True)
class Plan:
    """How a call is carried out: its path, tile sizes, and the pairs (over all heads) that its tiles visit."""

    path: str
    q_tile: int
    kv_tile: int
    visited: int


class Kernel(ABC):
    """One implementation of exact attention."""

    name: str
    #: Whether its backward pass has a derivative of its own.
    differentiable_twice = False
    #: Points of the contract that the kernel does not keep.
    lacks: tuple[str, ...] = ()

    @abstractmethod
    def refusals(self, call: Call, needs_grad: bool) -> tuple[str, ...]:
        """Why the kernel can't take the call; empty where it can."""

    @abstractmethod
    def forward(self, call: Call, out_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """``out`` (B, Hq, Lq, Dv) in q's dtype, or in ``out_dtype``, and the LSE (B, Hq, Lq)."""

    @abstractmethod
    def backward(
        self, call: Call, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None, wanted: list[bool]
    ) -> Gradients:
        """Gradients of what ``wanted`` names: q, k, v, bias, sinks."""

    @abstractmethod
    def contract(self, call: Call) -> Contract:
        """In which precision the call is carried out."""

    @abstractmethod
    def plan(self, call: Call) -> Plan:
        """In which tiles the call is carried out."""
