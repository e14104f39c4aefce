"""Fused optimizer steps and gradient scaling; the foreach ones are list forms of elementwise operators."""

from __future__ import annotations

from rooftile.capture.trace import Call, TensorMeta
from rooftile.costs.operands import keyword, reads, total_bytes, writes
from rooftile.costs.record import Cost
from rooftile.costs.registry import formula

__all__: list[str] = []


def _cost(call: Call, per_element: int) -> Cost:
    elements = sum(meta.numel for meta in call.args[0] if isinstance(meta, TensorMeta))
    unscaled = 0
    if isinstance(keyword(call, "grad_scale"), TensorMeta):
        per_element += 1  # g / scale, which is written back to the gradient
        unscaled = total_bytes(call.args[1])
    per_element += bool(keyword(call, "maximize", False))  # -g
    return Cost(
        "optimizer",
        flops=per_element * elements,
        bytes_read=total_bytes(reads(call)),
        bytes_written=total_bytes(writes(call)) + unscaled,
        elementwise=True,
    )


@formula("aten._fused_adam", "aten._fused_adamw")
def adam(call: Call) -> Cost:
    """m = lerp(m, g) 3; v = b2 v + (1 - b2) g g 4; denominator sqrt(v) / c + eps 3; p -= step m / denominator 3: 13.

    Weight decay: AdamW p *= 1 - lr wd: 1; Adam g += wd p: 2. AMSGrad: running maximum 1.
    """
    decay = 0
    if keyword(call, "weight_decay", 0) != 0:
        decay = 1 if "_fused_adamw" in call.operator else 2
    return _cost(call, 13 + decay + bool(keyword(call, "amsgrad", False)))


@formula("aten._fused_sgd")
def sgd(call: Call) -> Cost:
    """p -= lr g: 2. Weight decay g += wd p: 2. Momentum b = mu b + (1 - damp) g: 3 (first step: a copy). Nesterov 2."""
    per_element = 2 + 2 * (keyword(call, "weight_decay", 0) != 0)
    if keyword(call, "momentum", 0) != 0:
        per_element += 0 if keyword(call, "is_first_step", False) else 3
        per_element += 2 * bool(keyword(call, "nesterov", False))
    return _cost(call, per_element)


@formula("aten._fused_adagrad")
def adagrad(call: Call) -> Cost:
    """s += g g: 2; p -= lr g / (sqrt(s) + eps): 5. Weight decay 2."""
    return _cost(call, 7 + 2 * (keyword(call, "weight_decay", 0) != 0))


@formula("aten._amp_foreach_non_finite_check_and_unscale")
def unscale(call: Call) -> Cost:
    """Each gradient is tested for finiteness and multiplied by the inverse scale: 2."""
    elements = sum(meta.numel for meta in call.args[0])
    return Cost("optimizer", 2 * elements, total_bytes(reads(call)), total_bytes(writes(call)), elementwise=True)


@formula("aten._amp_update_scale")
def update_scale(call: Call) -> Cost:
    """One number: a test, a product, a count."""
    return Cost("optimizer", 3, total_bytes(reads(call)), total_bytes(writes(call)))
