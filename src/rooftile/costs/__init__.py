"""One formula per operator: FLOPs and bytes of a captured Call.

``cost_of(call)`` and ``trace_costs(trace)`` are the reading side, ``register_cost(op)`` teaches a custom operator.
The formulas live in one module per family and enter themselves into the registry when they are imported below.
"""

from rooftile.costs import (  # noqa: F401  (imported for the formulas that they register)
    attention,
    communication,
    convolution,
    elementwise,
    exact_attention,
    indexing,
    loss,
    low_precision,
    matmul,
    movement,
    normalization,
    optimizer,
    pooling,
    reduction,
    rnn,
    sparse,
    transformer,
)
from rooftile.costs.record import Cost, Family, Roof
from rooftile.costs.registry import cost_of, known_operators, register_cost, trace_costs, zero_flop_operators

__all__ = [
    "Cost",
    "Family",
    "Roof",
    "cost_of",
    "known_operators",
    "register_cost",
    "trace_costs",
    "zero_flop_operators",
]
