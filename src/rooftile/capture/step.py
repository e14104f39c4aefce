"""The Step: everything that one training or inference step is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from rooftile.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["STEP_PHASES", "Step", "StepPhase"]

StepPhase = Literal["train", "prefill", "decode"]
STEP_PHASES: tuple[StepPhase, ...] = ("train", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a model, to be audited.

    Parameters
    ----------
    model:
        The module. Meta, fake or real parameters; real ones are never written to by an audit.
    inputs:
        Positional arguments as a tuple, or keyword arguments as a dict. Arguments named ``kv_cache``, ``cache`` or
        ``past_key_values`` are the KV cache.
    loss:
        ``loss(output) -> scalar``. ``None`` for inference, or where the model returns the loss itself (a scalar, or an
        output with a ``.loss``).
    optimizer:
        A ``torch.optim.Optimizer`` over the model's parameters, or a callable ``parameters -> Optimizer``. ``None``
        leaves the choice to the audit's ``optimizer=`` option.
    phase:
        ``train`` (forward, backward, optimizer), ``prefill`` or ``decode`` (forward without gradients).
    name, batch, seq, config:
        What a report calls the target; filled in for zoo models.
    """

    model: torch.nn.Module
    inputs: tuple[Any, ...] | dict[str, Any]
    loss: Callable[[Any], torch.Tensor] | None = None
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None
    phase: StepPhase = "train"
    name: str = ""
    batch: int | None = None
    seq: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        import torch

        if not isinstance(self.model, torch.nn.Module):
            raise UsageError(f"Step.model is a {type(self.model).__name__}; give a torch.nn.Module.")
        if not isinstance(self.inputs, tuple | dict):
            raise UsageError(
                f"Step.inputs is a {type(self.inputs).__name__}; give a tuple of positional arguments "
                "or a dict of keyword arguments."
            )
        if self.phase not in STEP_PHASES:
            raise UsageError(f"Step.phase is {self.phase!r}; give one of {', '.join(STEP_PHASES)}.")
        if self.loss is not None and not callable(self.loss):
            raise UsageError(f"Step.loss is a {type(self.loss).__name__}; give a callable output -> scalar, or None.")
        optimizer = self.optimizer
        if optimizer is not None and not (isinstance(optimizer, torch.optim.Optimizer) or callable(optimizer)):
            raise UsageError(
                f"Step.optimizer is a {type(optimizer).__name__}; give a torch.optim.Optimizer, "
                "a callable parameters -> Optimizer, or None."
            )
        if self.phase != "train" and optimizer is not None:
            raise UsageError(f"Step.optimizer is set but the phase is {self.phase!r}; leave it None for inference.")
