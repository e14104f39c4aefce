"""The three choices that a cast makes, as explicit arguments (design: nothing relies on what ``.to(dtype)`` does)."""

from __future__ import annotations

from typing import Literal, get_args

from rooftile.errors import UsageError

__all__ = ["InfInput", "Overflow", "Rounding", "check_policy"]

#: Which neighbour a value between two neighbours goes to. ``up`` and ``down`` mean toward +Inf and -Inf.
Rounding = Literal["nearest-even", "toward-zero", "up", "down", "stochastic"]

#: Where a *finite* value ends whose rounded magnitude exceeds the largest finite one. ``saturate``: at the largest
#: finite value. ``ieee``: at Inf, or at NaN in a format without Inf; a directed rounding that points inwards stays at
#: the largest.
Overflow = Literal["saturate", "ieee"]

#: What becomes of an *infinite* input. ``keep``: Inf, or NaN in a format without Inf, so that it stays visible.
#: ``saturate``: the largest finite value.
InfInput = Literal["keep", "saturate"]


def check_policy(rounding: str, overflow: str, inf_input: str) -> None:
    """Refuse a misspelt policy, naming the legal values.

    Raises:
        UsageError: a value outside the three lists.
    """
    given = (("rounding", rounding, Rounding), ("overflow", overflow, Overflow), ("inf_input", inf_input, InfInput))
    for argument, value, legal in given:
        if value not in get_args(legal):
            raise UsageError(f"{argument} is {value!r}; choose one of {', '.join(get_args(legal))}")
