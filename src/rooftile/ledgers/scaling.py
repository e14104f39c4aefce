"""Scaling laws: the best split of a compute budget between parameters and tokens. ``derived`` from named constants.

``L(N, D) = E + A / N^alpha + B / D^beta`` under ``C = 6 N D`` has its minimum at ``N = G (C/6)^(beta/(alpha+beta))``,
``G = (alpha A / (beta B))^(1/(alpha+beta))`` (Hoffmann et al. 2022, equation 4). The sets of constants disagree by more
than a factor of two at one budget, so the caller names one: there is no default.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rooftile._names import unknown_name
from rooftile.errors import UsageError

__all__ = ["CONSTANTS", "OptimalSplit", "ScalingLaw", "optimal_split"]


@dataclass(frozen=True, slots=True)
class ScalingLaw:
    """Constants of the parametric loss, N in parameters and D in tokens."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float
    source: str

    @property
    def parameter_exponent(self) -> float:
        """Exponent of C in the best N; follows from alpha and beta."""
        return self.beta / (self.alpha + self.beta)

    @property
    def token_exponent(self) -> float:
        """Exponent of C in the best D."""
        return self.alpha / (self.alpha + self.beta)


CONSTANTS: dict[str, ScalingLaw] = {
    "chinchilla-rounded": ScalingLaw(1.69, 406.4, 410.7, 0.34, 0.28, "Hoffmann et al. 2022 (2203.15556), as printed"),
    "chinchilla-unrounded": ScalingLaw(
        math.exp(0.5267228), math.exp(6.0073404), math.exp(6.0179186), 0.33917084, 0.2849083,
        "Hoffmann et al. 2022, constants before rounding (natural logarithms of A, B, E)",
    ),
    "epoch": ScalingLaw(1.8172, 482.01, 2085.43, 0.3478, 0.3658, "Besiroglu et al. 2024 (2404.10102), a refit"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class OptimalSplit:
    """Parameters and tokens that minimise the loss at a budget, by one named law."""

    parameters: float
    tokens: float
    loss: float
    law: str
    convention: str = "C = 6 N D"
    evidence: str = "derived"


def optimal_split(flops: float, law: str) -> OptimalSplit:
    """The best N and D for ``flops`` of training by the constants called ``law``; UsageError for an unknown name."""
    if law not in CONSTANTS:
        raise unknown_name("set of scaling constants", law, list(CONSTANTS))
    if not flops > 0:
        raise UsageError(f"flops is {flops}; it has to be positive")
    c = CONSTANTS[law]
    g = (c.alpha * c.A / (c.beta * c.B)) ** (1 / (c.alpha + c.beta))
    n = g * (flops / 6) ** c.parameter_exponent
    d = flops / 6 / n
    return OptimalSplit(n, d, c.E + c.A / n**c.alpha + c.B / d**c.beta, law)
