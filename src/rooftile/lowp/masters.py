"""FP32 master weights for a 16-bit model, around any torch optimizer (Micikevicius et al. 2018, §3.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from rooftile.errors import UsageError
from rooftile.formats.carrier import format_of
from rooftile.formats.rounding import round_to

__all__ = ["MasterWeights"]

MasterRounding = Literal["nearest-even", "stochastic"]

_SIXTEEN_BITS = (torch.float16, torch.bfloat16)


class MasterWeights:
    """Keep an FP32 copy of every 16-bit parameter and let the optimizer update the copies.

    ``step()`` widens the 16-bit gradients, runs the optimizer on the masters and rounds the result into the model;
    between steps nothing is alive but the masters and the optimizer's state. Parameters that are FP32 already are
    handed to the optimizer as they are. A learning-rate scheduler takes ``masters.optimizer``.

    Gradients *move*: once the masters have them, the model's 16-bit ones are gone. Clip the masters'::

        loss.backward()
        masters.clip_grad_norm_(1.0)                 # not the model's parameters
        masters.step()

    After weights were loaded into the model, call :meth:`refresh`, or the next step writes the old masters over them.

    Parameters
    ----------
    parameters:
        The model's parameters; those that need no gradient are left out.
    optimizer:
        ``optimizer(parameters) -> torch.optim.Optimizer``.
    rounding:
        How a master is rounded into the model: ``nearest-even``, or ``stochastic``, up with probability equal to the
        distance passed, so that the model's weights are unbiased.
    keep:
        With False no master outlives a step: it is made from the model's weight, updated and rounded back, so updates
        below half a spacing survive on average only. Needs ``rounding="stochastic"``.
    generator:
        Of the stochastic draws.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer: Callable[[Any], torch.optim.Optimizer],
        *,
        rounding: MasterRounding = "nearest-even",
        keep: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        given = list(parameters)
        if any(not isinstance(p, Tensor) for p in given):
            raise UsageError("the parameters are not all tensors; pass model.parameters(), not named_parameters()")
        if not callable(optimizer) or isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError("optimizer has to make one: pass lambda p: torch.optim.AdamW(p), not the optimizer itself")
        own = [p for p in given if p.requires_grad]
        if not own:
            raise UsageError("no parameter requires a gradient, so there is nothing to keep master weights of.")
        if rounding not in get_args(MasterRounding):
            raise UsageError(f"rounding is {rounding!r}; choose one of {', '.join(get_args(MasterRounding))}")
        if not keep and rounding != "stochastic":
            raise UsageError("keep=False with rounding to nearest loses small updates; set rounding='stochastic'")
        self.rounding, self.keep, self.generator = rounding, keep, generator
        self.pairs = [(p, self._master(p)) for p in own if p.dtype in _SIXTEEN_BITS]
        masters = {id(p): m for p, m in self.pairs}
        self.optimizer = optimizer([masters.get(id(p), p) for p in own])
        if isinstance(self.optimizer, torch.optim.LBFGS):
            raise UsageError("LBFGS calls a closure several times a step, which masters don't support; use another one")
        self._others = [p for p in own if id(p) not in masters]
        self._updated = [masters.get(id(p), p) for p in own]
        self._release()

    @staticmethod
    def _master(parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(parameter.detach().float())

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Move the model's gradients to the masters, in FP32; done by ``step`` for those that were not moved yet.

        Called apart where something has to see FP32 gradients before the update: unscaling, clipping. What a later
        backward pass adds is added by the next call.
        """
        for parameter, master in self.pairs:
            if not self.keep and master.numel() != parameter.numel():
                master.data = parameter.detach().float()
            if parameter.grad is not None:
                wide = parameter.grad.float()
                master.grad = wide if master.grad is None else master.grad + wide
                parameter.grad = None

    @property
    def has_gradients(self) -> bool:
        """Whether gradients were taken and not yet used or dropped."""
        return any(master.grad is not None for _, master in self.pairs)

    def parameters(self) -> list[nn.Parameter]:
        """What the optimizer updates: the masters, and the FP32 parameters as they are. Clip these, not the model's."""
        return list(self._updated)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Take the gradients and scale them to ``max_norm`` at most; the norm before. After ``unscale_``, if any."""
        self.take_gradients()
        return torch.nn.utils.clip_grad_norm_(self._updated, max_norm, norm_type)

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the masters from the model's weights again: after ``model.load_state_dict`` without a masters' state."""
        if self.keep:
            for parameter, master in self.pairs:
                master.copy_(parameter)

    @torch.no_grad()
    def step(self) -> None:
        """One update: gradients to FP32, the optimizer's step, masters rounded into the model's parameters."""
        self.take_gradients()
        self.optimizer.step()
        self.write_back()

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the model and drop their gradients: the end of a step."""
        for parameter, master in self.pairs:
            if master.grad is not None:
                self._round_into(parameter, master)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget the widened gradients without an update, after a skipped step."""
        for _, master in self.pairs:
            master.grad = None
        self._release()

    def _round_into(self, parameter: nn.Parameter, master: nn.Parameter) -> None:
        if self.rounding == "stochastic" and parameter.device.type != "meta":
            fmt = format_of(parameter.dtype)
            rounded = round_to(master.detach(), fmt, "stochastic", "ieee", generator=self.generator)
            parameter.copy_(rounded)
        else:
            parameter.copy_(master)

    def _release(self) -> None:
        if not self.keep:
            for _, master in self.pairs:
                master.data = master.data.new_empty(0)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop (or zero) the gradients of the model's own parameters; those that were taken are dropped."""
        self.drop_gradients()
        for parameter in [*(p for p, _ in self.pairs), *self._others]:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """The masters (FP32, in the parameters' order; none with ``keep=False``) and the optimizer's state."""
        masters = [master.detach() for _, master in self.pairs] if self.keep else []
        return {"masters": masters, "optimizer": self.optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`. The model's own weights are loaded with the model.

        Raises:
            UsageError: another number of masters, one of another shape, no optimizer's state; nothing is changed then.
        """
        if "optimizer" not in state:
            raise UsageError("the state has no 'optimizer'; give what MasterWeights.state_dict returned")
        saved = state.get("masters")
        expected = [tuple(p.shape) for p, _ in self.pairs] if self.keep else []
        found = [tuple(m.shape) for m in saved] if saved is not None else None
        if found != expected:
            raise UsageError(
                f"the state holds master weights of shapes {found}, this model needs {expected}; load it into the "
                "model that it was saved from"
            )
        for (_, master), old in zip(self.pairs, saved or [], strict=False):
            master.copy_(old)
        self.optimizer.load_state_dict(state["optimizer"])
