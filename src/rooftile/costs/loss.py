"""Losses. A loss that reduces adds 1 per element for the sum."""

from __future__ import annotations

from rooftile.capture.trace import Call
from rooftile.costs.operands import bytes_of, reads, tensor, total_bytes, writes
from rooftile.costs.record import Cost
from rooftile.costs.registry import formula

__all__: list[str] = []


@formula("aten.nll_loss_forward", "aten.nll_loss2d_forward")
def nll_loss(call: Call) -> Cost:
    """One log-probability per target is gathered (never the whole row), negated and summed: 2 FLOPs a target."""
    logits, target = tensor(call, 0, "self"), tensor(call, 1, "target")
    others = total_bytes(reads(call)) - bytes_of(logits)
    gathered = target.numel * logits.itemsize
    return Cost("loss", 2 * target.numel, others + gathered, total_bytes(call.outputs))


@formula("aten.nll_loss_backward", "aten.nll_loss2d_backward")
def nll_loss_backward(call: Call) -> Cost:
    """-dy / n at each target (2 FLOPs), zeros elsewhere: the whole gradient is written, the logits are not read."""
    logits, target = tensor(call, 1, "self"), tensor(call, 2, "target")
    return Cost("loss", 2 * target.numel, total_bytes(reads(call)) - bytes_of(logits), total_bytes(call.outputs))


#: FLOPs per element before the sum.
_POINTWISE = {
    "mse_loss": 2,  # (x - y)^2
    "mse_loss_backward": 3,  # 2/n * (x - y) * dy
    "l1_loss": 2,
    "smooth_l1_loss": 5,  # d = |x - y| 2; select 1 of d * d * c or d - c, 2 at most
    "smooth_l1_loss_backward": 4,
    "huber_loss": 5,
    "huber_loss_backward": 4,
    "soft_margin_loss": 4,  # log(1 + exp(-y x))
    "soft_margin_loss_backward": 5,
    "binary_cross_entropy": 7,  # (y - 1) log(1 - x) - y log(x): 1 - x, two logs, y - 1, two products, subtract
    "binary_cross_entropy_backward": 6,  # dy * (x - y) / max(x * (1 - x), eps)
    "binary_cross_entropy_with_logits": 7,  # (1 - y) x + log1p(exp(-|x|)) + max(-x, 0)
}


@formula(*(f"aten.{name}" for name in _POINTWISE))
def pointwise_loss(call: Call) -> Cost:
    """A formula per element, and one addition where the result is reduced."""
    flops = _POINTWISE[call.operator.split(".")[1]]
    elements = max(meta.numel for meta in call.inputs)
    reduced = all(meta.numel < elements for meta in call.outputs)
    return Cost("loss", (flops + reduced) * elements, total_bytes(reads(call)), total_bytes(writes(call)))
