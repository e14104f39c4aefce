"""The optimizer that a target device would run, by the words of ``--optimizer``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rooftile.capture.step import Step
from rooftile.errors import UsageError
from rooftile.lowp.masters import MasterWeights

__all__ = ["build_optimizer", "initialise_state"]

#: torch's default AdamW is the foreach implementation on CUDA (and ROCm, which is CUDA to torch), a for-loop elsewhere.
_DEFAULT = {"cuda": "adamw-foreach", "rocm": "adamw-foreach", "cpu": "adamw-loop", "tpu": "adamw-loop"}


def _factory(name: str, device_class: str) -> Callable[[Any], torch.optim.Optimizer]:
    if name == "sgd":
        foreach = device_class in ("cuda", "rocm")
        return lambda params: torch.optim.SGD(params, lr=1e-3, foreach=foreach)
    if name == "adamw-fused":
        return _fused_adamw
    return lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=name == "adamw-foreach")


def _fused_adamw(params: Any) -> torch.optim.Optimizer:
    """AdamW(fused=True); torch refuses to make it, or its state, for meta parameters, so both are made here."""
    optimizer = torch.optim.AdamW(params, lr=1e-3, foreach=False)
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, None
    optimizer.defaults["fused"] = True
    optimizer._step_supports_amp_scaling = True
    for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return optimizer


def build_optimizer(
    step: Step, name: str, device_class: str, masters: bool
) -> tuple[torch.optim.Optimizer | MasterWeights | None, str]:
    """The optimizer over the step's parameters and its resolved name; ``(None, "none")`` where there is none."""
    trainable = [p for p in step.model.parameters() if p.requires_grad]
    if step.phase != "train" or name == "none" or not trainable:
        return None, "none"
    own = step.optimizer
    if name == "as-is" and own is not None:
        if isinstance(own, torch.optim.Optimizer):
            if masters:
                raise UsageError(
                    "the Step's optimizer is already bound to its parameters, so it can't update master weights; "
                    "give Step(optimizer=) as a callable parameters -> Optimizer."
                )
            return own, type(own).__name__
        built = MasterWeights(trainable, own) if masters else own(trainable)
        inner = built.optimizer if isinstance(built, MasterWeights) else built
        return built, type(inner).__name__
    resolved = _DEFAULT[device_class] if name in ("adamw", "as-is") else name
    factory = _factory(resolved, device_class)
    return (MasterWeights(trainable, factory) if masters else factory(trainable)), resolved


class _NothingToDoOnMeta(TorchDispatchMode):
    """In-place operators over lists of meta tensors change nothing; torch would visit every tensor of each of them."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name()
        if name.startswith("aten::_foreach_") and name.partition(".")[0].endswith("_") and args[0][0].is_meta:
            return None
        return func(*args, **(kwargs or {}))


def initialise_state(optimizer: torch.optim.Optimizer | MasterWeights, model: nn.Module) -> None:
    """Run one step at learning rate 0, so that the state that appears only after the first step is there."""
    inner = optimizer.optimizer if isinstance(optimizer, MasterWeights) else optimizer
    rates = [group["lr"] for group in inner.param_groups]
    for group in inner.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    with _NothingToDoOnMeta():
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(inner.param_groups, rates, strict=True):
        group["lr"] = rate
