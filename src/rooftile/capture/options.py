"""The choices a step is captured under, each with the words the command line takes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from rooftile._names import unknown_name
from rooftile.errors import UsageError

__all__ = ["ATTENTION", "CHECKPOINT", "OPTIMIZERS", "PRECISIONS", "CaptureOptions"]

PRECISIONS = (
    "fp32", "bf16", "fp16", "bf16-mixed", "fp16-mixed", "bf16-master", "fp16-master", "fp8-block", "fp8-tensor",
    "as-is",
)  # fmt: skip
OPTIMIZERS = ("adamw", "adamw-foreach", "adamw-fused", "adamw-loop", "sgd", "none", "as-is")
CHECKPOINT = ("none", "blocks")
ATTENTION = ("auto", "tiled", "materialized")

#: Every micro-batch is captured, so that the trace is of the whole step.
MAX_MICRO_BATCHES = 256

_CHOICES = {"precision": PRECISIONS, "optimizer": OPTIMIZERS, "checkpoint": CHECKPOINT, "attention": ATTENTION}


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """How to run the step; every field's default is the convention that a report prints.

    ``precision``: ``fp32``, ``bf16``, ``fp16`` are the dtype of parameters, gradients and optimizer state; ``*-mixed``
    is FP32 parameters under the target device's autocast policy; ``*-master`` is 16-bit weights and gradients with FP32
    master weights; ``fp8-block`` and ``fp8-tensor`` are ``bf16-mixed`` with the linear layers in FP8, scaled by tiles
    and blocks (DeepSeek-V3) or with one scale a tensor; ``as-is`` leaves the model as the Step declares it. None is
    the convention: for a model whose parameters are FP32 ``bf16-mixed`` in training and ``bf16`` in inference (nobody
    keeps FP32 weights and casts them again for every token), ``as-is`` for any other.
    ``optimizer``: ``adamw`` is the target's default implementation (foreach on CUDA, a for-loop elsewhere);
    ``as-is`` takes the Step's own, and AdamW where it has none.
    ``live``: run on real CPU tensors instead of meta tensors, with the same choices.
    """

    precision: str | None = None
    optimizer: str = "as-is"
    checkpoint: str = "none"
    attention: str = "auto"
    micro_batches: int = 1
    live: bool = False

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices and not (name == "precision" and value is None):
                raise unknown_name(name, str(value), choices)
        if not isinstance(self.live, bool):
            raise UsageError(f"live is {self.live!r}; give True or False.")
        if not isinstance(self.micro_batches, int) or not 1 <= self.micro_batches <= MAX_MICRO_BATCHES:
            raise UsageError(
                f"micro_batches is {self.micro_batches!r}; give a whole number from 1 to {MAX_MICRO_BATCHES} (each one "
                "is captured; from the second on they are alike, so more of them multiply what that shows)."
            )

    def with_(self, **changes: Any) -> CaptureOptions:
        """The same choices with some of them changed."""
        return replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for ``Trace.settings``."""
        return {f.name: getattr(self, f.name) for f in fields(self)}
