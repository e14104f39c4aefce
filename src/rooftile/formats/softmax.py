"""Softmax in a format: the overflow that a stable form prevents, apart from the distinctions that storage erased."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rooftile.errors import UsageError
from rooftile.formats.carrier import check_float_tensor
from rooftile.formats.catalogue import get_format
from rooftile.formats.format import FloatFormat
from rooftile.formats.rounding import round_to

__all__ = ["SoftmaxReading", "softmax_in"]


@dataclass(frozen=True, slots=True, eq=False)
class SoftmaxReading:
    """Softmax over the last dimension of logits stored in ``fmt``; the tensors are float64, of the logits' shape.

    ``direct`` evaluates exp(z) / sum(exp(z)), each result stored in the format. ``stable`` subtracts the row's maximum,
    keeps the statistics wide and stores only the probabilities in the format. ``distinct_before`` and
    ``distinct_after`` count different logits, summed over the rows, before and after storage.
    """

    fmt: str
    stored: torch.Tensor
    direct: torch.Tensor
    stable: torch.Tensor
    rows: int
    direct_broken_rows: int  # rows where the direct form is not finite although the stable one is
    distinct_before: int
    distinct_after: int
    # Rows that are not finite in either form, by the first of these reasons that holds:
    non_finite_rows: int = 0  # the logits given hold NaN or +Inf
    masked_rows: int = 0  # every logit given is -Inf: a row that sees nothing
    lost_rows: int = 0  # storage in the format made Inf or NaN of a logit

    @property
    def erased(self) -> int:
        """Distinctions that storage erased and no algebra brings back."""
        return self.distinct_before - self.distinct_after

    @property
    def reading(self) -> str:
        """One line for a person."""
        overflow = (
            f"the direct form breaks in {self.direct_broken_rows:,} of {self.rows:,} rows and the stable one does not"
        )
        undefined = self._undefined()
        if not self.direct_broken_rows:
            overflow = "the direct form is finite"
            if undefined:
                sound = self.rows - self.non_finite_rows - self.masked_rows - self.lost_rows
                overflow = f"the direct form is finite in the other {sound:,} of {self.rows:,} rows" if sound else ""
        overflow = "; ".join(part for part in (undefined, overflow) if part)
        if self.erased:
            return f"{self.fmt}: {overflow}; storage erased {self.erased:,} of {self.distinct_before:,} distinct logits"
        return f"{self.fmt}: {overflow}; storage kept all {self.distinct_before:,} distinct logits"

    def _undefined(self) -> str:
        """Which rows have no finite softmax in any form, and why; empty if there is none."""
        reasons = (
            (self.non_finite_rows, "NaN or +Inf among the logits"),
            (self.masked_rows, "every logit -Inf, a row that sees nothing"),
            (self.lost_rows, "a logit that became Inf or NaN in storage"),
        )
        return "; ".join(
            f"{count:,} of {self.rows:,} rows NaN in either form ({why})" for count, why in reasons if count
        )


def softmax_in(logits: torch.Tensor, fmt: FloatFormat | str) -> SoftmaxReading:
    """Store ``logits`` (at least one dimension, floating) in ``fmt``, then take the softmax over the last dimension.

    Raises:
        UsageError: not floating, or no dimension to sum over.
    """
    fmt = get_format(fmt)
    logits = check_float_tensor(logits, "logits").double()
    if logits.dim() == 0:
        raise UsageError("logits is a scalar; softmax needs a dimension to sum over")
    stored = round_to(logits, fmt, overflow="ieee")
    exponentials = round_to(torch.exp(stored), fmt, overflow="ieee")
    total = round_to(exponentials.sum(-1, keepdim=True), fmt, overflow="ieee")
    direct = round_to(exponentials / total, fmt, overflow="ieee")
    stable = round_to(torch.softmax(stored, -1), fmt, overflow="ieee")
    broken = ~direct.isfinite().all(-1) & stable.isfinite().all(-1)
    undefined = ~stable.isfinite().all(-1)
    non_finite = undefined & (logits.isnan() | logits.isposinf()).any(-1)
    masked = undefined & ~non_finite & logits.isneginf().all(-1)
    return SoftmaxReading(
        fmt.name,
        stored,
        direct,
        stable,
        rows=logits[..., 0].numel() if logits.shape[-1] else 0,
        direct_broken_rows=int(broken.sum()),
        distinct_before=_distinct(logits),
        distinct_after=_distinct(stored),
        non_finite_rows=int(non_finite.sum()),
        masked_rows=int(masked.sum()),
        lost_rows=int((undefined & ~non_finite & ~masked).sum()),
    )


def _distinct(values: torch.Tensor) -> int:
    """Different values in each row, summed over the rows (a NaN differs from everything)."""
    if values.numel() == 0:
        return 0
    ordered = values.sort(-1).values
    return int((ordered[..., 1:] != ordered[..., :-1]).sum()) + values[..., 0].numel()
