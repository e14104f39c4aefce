"""Weight updates that rounding swallows: ``round(w + dw) == w`` although ``dw`` is not zero.

A weight moves only if its update passes half the spacing around it, and that spacing is coarser above a power of two
than below it (Micikevicius et al. 2018, section 3.1: the reason for FP32 master weights).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rooftile.errors import UsageError
from rooftile.formats.arguments import check_count, finite_number
from rooftile.formats.carrier import check_float_tensor, result_dtype
from rooftile.formats.catalogue import get_format
from rooftile.formats.format import FloatFormat
from rooftile.formats.policy import Rounding
from rooftile.formats.rounding import round_to
from rooftile.formats.single_rounding import add_tensors

__all__ = ["SwallowedUpdates", "UpdatesOverSteps", "apply_update", "swallowed_updates", "updates_over_steps"]


@dataclass(frozen=True, slots=True)
class SwallowedUpdates:
    """Counts of one update, and of decoupled weight decay as an update of its own (None without decay).

    ``total`` = ``zero`` + ``swallowed`` + ``effective`` + ``non_finite`` (weight, update or result is Inf or NaN).
    """

    fmt: str
    total: int
    zero: int
    swallowed: int
    effective: int
    non_finite: int
    decay: SwallowedUpdates | None = None

    @property
    def fraction(self) -> float:
        """Swallowed share of the non-zero finite updates; 0.0 if there is none."""
        tried = self.swallowed + self.effective
        return self.swallowed / tried if tried else 0.0

    @property
    def reading(self) -> str:
        """One line for a person."""
        tried = self.swallowed + self.effective
        line = f"{self.swallowed:,} of {tried:,} non-zero updates leave their {self.fmt} weight as it was"
        if self.decay is not None:
            line += (
                f"; of weight decay alone, {self.decay.swallowed:,} of {self.decay.swallowed + self.decay.effective:,}"
            )
        return line


@dataclass(frozen=True, slots=True)
class UpdatesOverSteps:
    """What became of the weights after ``steps`` times the same update."""

    fmt: str
    steps: int
    total: int
    moved: int
    reached: int  # weights that ended where the exact sum, rounded once, would be

    @property
    def reading(self) -> str:
        """One line for a person."""
        return (
            f"after {self.steps:,} steps {self.moved:,} of {self.total:,} {self.fmt} weights have moved, "
            f"{self.reached:,} to where wide accumulation would bring them"
        )


def _stored(weight: torch.Tensor, update: torch.Tensor, fmt: FloatFormat) -> tuple[torch.Tensor, torch.Tensor]:
    weight, update = check_float_tensor(weight, "weight"), check_float_tensor(update, "update")
    if weight.shape != update.shape:
        raise UsageError(f"weight is {tuple(weight.shape)} and update {tuple(update.shape)}; give equal shapes")
    return round_to(weight.double(), fmt), update.double()


def apply_update(
    weight: torch.Tensor,
    update: torch.Tensor,
    fmt: FloatFormat | str,
    rounding: Rounding = "nearest-even",
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """``round(w + dw)``: the weight, stored in ``fmt``, after the update; the exact sum is rounded once.

    Args:
        weight: any shape, floating; rounded to ``fmt`` first, since that is where it is stored.
        update: the same shape, floating; taken as it is, so round it first where it is stored in 16 bits itself.

    Returns:
        A tensor of the weight's shape and, where that holds every value of ``fmt``, its dtype.

    Raises:
        UsageError: shapes differ, a tensor is not floating, or the policy is unknown.
    """
    fmt = get_format(fmt)
    stored, exact = _stored(weight, update, fmt)
    return add_tensors(stored, exact, fmt, rounding, generator).to(result_dtype(weight.dtype, fmt))


def swallowed_updates(
    weight: torch.Tensor,
    update: torch.Tensor,
    fmt: FloatFormat | str,
    *,
    weight_decay: float | None = None,
    rounding: Rounding = "nearest-even",
    generator: torch.Generator | None = None,
) -> SwallowedUpdates:
    """Count the updates that change nothing.

    Args:
        weight: the weights, any shape; rounded to ``fmt`` first.
        update: what is added, sign and learning rate included; the same shape.
        fmt: the format that the weights are stored in.
        weight_decay: learning rate times decay coefficient of a *decoupled* decay (AdamW), which multiplies the
            weight by ``1 - weight_decay`` in a step of its own, before the update and with its own rounding.

    Raises:
        UsageError: shapes differ, a tensor is not floating, the policy is unknown, or weight_decay is negative or not
            finite.
    """
    fmt = get_format(fmt)
    stored, exact = _stored(weight, update, fmt)
    decay = None
    if weight_decay is not None:
        if finite_number(weight_decay, "weight_decay", "give a finite number of at least 0, or None") < 0:
            raise UsageError(f"weight_decay is {weight_decay}; give at least 0, since a decay brings weights toward 0")
        decay, stored = _count(stored, -weight_decay * stored, fmt, rounding, generator)
    counts, _ = _count(stored, exact, fmt, rounding, generator)
    return SwallowedUpdates(
        fmt.name, counts.total, counts.zero, counts.swallowed, counts.effective, counts.non_finite, decay
    )


def _count(
    stored: torch.Tensor, update: torch.Tensor, fmt: FloatFormat, rounding: Rounding, generator: torch.Generator | None
) -> tuple[SwallowedUpdates, torch.Tensor]:
    after = add_tensors(stored, update, fmt, rounding, generator)
    finite = stored.isfinite() & update.isfinite() & after.isfinite()
    zero = finite & (update == 0)
    swallowed = finite & (update != 0) & (after == stored)
    effective = finite & (after != stored)
    total, zeros, lost, done = stored.numel(), int(zero.sum()), int(swallowed.sum()), int(effective.sum())
    return SwallowedUpdates(fmt.name, total, zeros, lost, done, total - int(finite.sum())), after


def updates_over_steps(
    weight: torch.Tensor,
    update: torch.Tensor,
    fmt: FloatFormat | str,
    steps: int,
    rounding: Rounding = "nearest-even",
    generator: torch.Generator | None = None,
) -> UpdatesOverSteps:
    """Apply the same update ``steps`` times in ``fmt`` and compare with one wide sum.

    Raises:
        UsageError: steps is no whole number or below one, or as :func:`swallowed_updates`.
    """
    check_count(steps, "steps")
    fmt = get_format(fmt)
    stored, exact = _stored(weight, update, fmt)
    current = stored
    for _ in range(steps):
        current = add_tensors(current, exact, fmt, rounding, generator)
    goal = add_tensors(stored, exact * steps, fmt)
    return UpdatesOverSteps(
        fmt.name, steps, stored.numel(), int((current != stored).sum()), int((current == goal).sum())
    )
