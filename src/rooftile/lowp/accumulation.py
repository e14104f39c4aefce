"""A matrix product with a chosen accumulator, simulated on the CPU beside the fp64 product.

``fp32`` and ``bf16``: one product at a time is added and rounded to nearest. ``hopper-fp8``: as measured on Hopper's
tensor cores (DeepSeek-AI 2024, section 3.3.2; Zhang et al. 2024, SageAttention2): 32 products and the accumulator are
aligned to the largest exponent among them, bits below 13 fraction bits are cut off, and the sum is cut off again; with
promotion the partial sum goes to an fp32 register every 128 terms and starts again from zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from rooftile._names import unknown_name
from rooftile.errors import UsageError
from rooftile.formats.carrier import check_float_tensor
from rooftile.formats.catalogue import get_format
from rooftile.formats.format import FloatFormat
from rooftile.formats.rounding import round_to
from rooftile.formats.single_rounding import add_tensors

__all__ = ["ACCUMULATORS", "Accumulator", "SimulatedProduct", "simulate_matmul"]


@dataclass(frozen=True, slots=True)
class Accumulator:
    """How a running sum is kept.

    ``format``: what it is rounded to. ``group``: products that are aligned and added together. ``truncate``: cut
    bits off instead of rounding. ``promote_every``: terms after which the partial sum
    moves to an fp32 register, 0 for never.
    """

    name: str
    format: FloatFormat
    group: int = 1
    truncate: bool = False
    promote_every: int = 0

    def __post_init__(self) -> None:
        if self.group < 1 or self.promote_every < 0 or self.promote_every % self.group:
            raise UsageError(
                f"accumulator {self.name!r}: group {self.group}, promote_every {self.promote_every}; promotion comes "
                "after whole groups of at least 1"
            )

    def promoted(self, every: int) -> Accumulator:
        """The same one, promoted every so many terms (0: never)."""
        return replace(self, promote_every=every)


_HOPPER = FloatFormat("fp22", 8, 13, 127)

#: By name; ``hopper-fp8-unpromoted`` is what a long sum without promotion gets.
ACCUMULATORS = {
    a.name: a
    for a in (
        Accumulator("fp32", get_format("fp32")),
        Accumulator("bf16", get_format("bf16")),
        Accumulator("hopper-fp8", _HOPPER, group=32, truncate=True, promote_every=128),
        Accumulator("hopper-fp8-unpromoted", _HOPPER, group=32, truncate=True),
    )
}


@dataclass(frozen=True, slots=True)
class SimulatedProduct:
    """The product with the accumulator's errors, and how far it is from the fp64 one.

    Errors are relative to ``|A| |B|^T``, the natural scale of a sum: ``max_error``, ``mean_error``, and ``bias``, the
    mean with its sign, negative towards zero (truncation shrinks a sum). ``max_relative`` is against the exact value
    itself, over the values above a thousandth of the largest. ``non_finite`` results (of an operand, or of an overflow)
    are counted, and enter no error.
    """

    accumulator: str
    terms: int
    values: torch.Tensor
    exact: torch.Tensor
    max_error: float
    mean_error: float
    bias: float
    max_relative: float
    non_finite: int = 0

    @property
    def reading(self) -> str:
        """One line for a person."""
        lost = f"{self.non_finite:,} of {self.values.numel():,} results are not finite"
        if self.non_finite and self.non_finite == self.values.numel():
            return f"{self.accumulator} over {self.terms:,} terms: {lost}, so no error can be given"
        return (
            f"{self.accumulator} over {self.terms:,} terms: error {self.mean_error:.2e} on average and "
            f"{self.max_error:.2e} at most of the sum of magnitudes; results are off by up to {self.max_relative:.2%}"
            + (f"; {lost}" if self.non_finite else "")
        )


def simulate_matmul(
    a: torch.Tensor, b: torch.Tensor, accumulator: str | Accumulator = "hopper-fp8"
) -> SimulatedProduct:
    """``A B^T`` of (m, k) and (n, k), every sum kept in ``accumulator``.

    The products of the operands are exact (their values must have at most 26 significant bits, as all 8- and 16-bit
    formats and fp32 have). Time grows with m n k: meant for some hundreds of rows.

    Raises:
        UsageError: shapes that don't match, an integer tensor, an unknown accumulator.
    """
    chosen = _chosen(accumulator)
    a, b = check_float_tensor(a, "a").double(), check_float_tensor(b, "b").double()
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise UsageError(f"a is {tuple(a.shape)} and b {tuple(b.shape)}; give (m, k) and (n, k)")
    running = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64, device=a.device)
    register = running.clone()
    fp32 = get_format("fp32")
    for start in range(0, a.shape[1], chosen.group):
        products = a[:, None, start : start + chosen.group] * b[None, :, start : start + chosen.group]
        running = _add_group(running, products, chosen)
        if chosen.promote_every and (start + chosen.group) % chosen.promote_every == 0:
            register, running = add_tensors(register, running, fp32), torch.zeros_like(running)
    values = add_tensors(register, running, fp32) if chosen.promote_every else running
    return _compared(chosen, a, b, values)


def _chosen(accumulator: str | Accumulator) -> Accumulator:
    if isinstance(accumulator, Accumulator):
        return accumulator
    if accumulator not in ACCUMULATORS:
        raise unknown_name("accumulator", str(accumulator), list(ACCUMULATORS))
    return ACCUMULATORS[accumulator]


def _add_group(running: torch.Tensor, products: torch.Tensor, chosen: Accumulator) -> torch.Tensor:
    if not chosen.truncate:
        for term in products.unbind(-1):
            running = add_tensors(running, term, chosen.format)
        return running
    addends = torch.cat([running[..., None], products], dim=-1)
    exponent = torch.frexp(addends.abs().amax(dim=-1, keepdim=True)).exponent - 1
    step = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent - chosen.format.fraction_bits)
    total = ((addends / step).trunc() * step).sum(-1)  # exact: integers below 2^20 times one power of two
    cut = round_to(total, chosen.format, "toward-zero")
    # Cutting bits off never reaches Inf by itself; an exponent that the format has no code for does.
    return torch.where(total.abs() >= 2.0 ** (chosen.format.max_exponent + 1), total.sign() * math.inf, cut)


def _compared(chosen: Accumulator, a: torch.Tensor, b: torch.Tensor, values: torch.Tensor) -> SimulatedProduct:
    product, magnitudes = a @ b.t(), a.abs() @ b.abs().t()
    finite = values.isfinite() & product.isfinite()
    exact, scale = product[finite], magnitudes[finite]
    error = values[finite] - exact
    relative = torch.where(scale > 0, error / scale, 0.0)
    large = exact.abs() > 1e-3 * exact.abs().max() if exact.numel() else exact.bool()
    against_itself = (error / exact).abs()[large]
    return SimulatedProduct(
        accumulator=chosen.name,
        terms=a.shape[1],
        values=values.float(),
        exact=product,
        max_error=float(relative.abs().max()) if relative.numel() else 0.0,
        mean_error=float(relative.abs().mean()) if relative.numel() else 0.0,
        bias=float((relative * exact.sign()).mean()) if relative.numel() else 0.0,
        max_relative=float(against_itself.max()) if against_itself.numel() else 0.0,
        non_finite=int((~finite).sum()),
    )
