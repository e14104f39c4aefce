"""Layer, group, batch and RMS normalisation, forward and backward; softmax with them: all are one pass over rows.

FLOPs are per element of the input; the few per-row operations (a division by the row length, an rsqrt) are left out.

Forward, with mean: mean 1, variance 3 (subtract, square, add), apply 2 (subtract, scale): 6. RMS: mean square 2, apply
1: 3. Batch norm in evaluation mode only applies: 2. Then 1 for a weight and 1 for a bias.

Backward, with ``xhat`` recomputed and ``g = dy * w``: dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) takes
xhat 2, the two sums 3 (add; multiply, add), the combination 4 (multiply, two subtractions, scale): 9, and 1 for g
where there is a weight. RMS has no mean: xhat 1, one sum 2, combination 3: 6. Gradients of the weight (multiply, add)
take 2, of the bias 1.
"""

from __future__ import annotations

from rooftile.capture.trace import Call, TensorMeta
from rooftile.costs.operands import bytes_of, reads, tensor, total_bytes, writes
from rooftile.costs.record import Cost, Family
from rooftile.costs.registry import formula

__all__: list[str] = []

_MEAN_FORWARD, _RMS_FORWARD, _APPLY_ONLY = 6, 3, 2
_MEAN_BACKWARD, _RMS_BACKWARD = 9, 6


def _given(call: Call, position: int, name: str) -> bool:
    return isinstance(call.argument(position, name), TensorMeta)


def _cost(call: Call, flops: int, family: Family = "normalization", unread: int = 0, reason: str = "") -> Cost:
    read = total_bytes(reads(call)) - unread
    return Cost(family, flops, read, total_bytes(writes(call)), zero_reason=reason)


#: name -> (position of input, of weight, of bias, FLOPs of the statistics and their use); -1: has none.
_FORWARD = {
    "aten.native_layer_norm": (0, 2, 3, _MEAN_FORWARD),
    "aten.native_group_norm": (0, 1, 2, _MEAN_FORWARD),
    "aten._fused_rms_norm": (0, 2, -1, _RMS_FORWARD),
    "rooftile.rms_norm": (0, 2, -1, _RMS_FORWARD),
    "aten._native_batch_norm_legit_no_training": (0, 1, 2, _APPLY_ONLY),
    "aten._batch_norm_no_update": (0, 1, 2, _APPLY_ONLY),
}


@formula(*_FORWARD)
def forward(call: Call) -> Cost:
    """Normalised output and the statistics that the backward pass needs."""
    x_at, weight_at, bias_at, flops = _FORWARD[call.operator.rsplit(".", 1)[0]]
    affine = _given(call, weight_at, "weight") + (bias_at >= 0 and _given(call, bias_at, "bias"))
    return _cost(call, (flops + affine) * tensor(call, x_at, "input").numel)


@formula(
    "aten.native_batch_norm",
    "aten._native_batch_norm_legit",
    "aten._batch_norm_with_update",
    "aten.cudnn_batch_norm",
    "aten.miopen_batch_norm",
)
def batch_norm(call: Call) -> Cost:
    """Batch statistics while training, the running ones (apply only) otherwise."""
    affine = _given(call, 1, "weight") + _given(call, 2, "bias")
    if "_with_update" in call.operator:
        training = True
    else:
        training = bool(call.argument(3 if call.operator.endswith(".no_stats") else 5, "training", True))
    flops = _MEAN_FORWARD if training else _APPLY_ONLY
    return _cost(call, (flops + affine) * tensor(call, 0, "input").numel)


#: name -> (position of grad, of input, of weight, of output_mask, FLOPs of dx without the weight); -1: has none.
_BACKWARD = {
    "aten.native_layer_norm_backward": (0, 1, 5, 7, _MEAN_BACKWARD),
    "aten.native_group_norm_backward": (0, 1, 4, 9, _MEAN_BACKWARD),
    "aten.native_batch_norm_backward": (0, 1, 2, 9, _MEAN_BACKWARD),
    "aten.batch_norm_backward": (0, 1, 2, 9, _MEAN_BACKWARD),
    "aten.cudnn_batch_norm_backward": (1, 0, 2, -1, _MEAN_BACKWARD),
    "aten.miopen_batch_norm_backward": (1, 0, 2, -1, _MEAN_BACKWARD),
    "aten._fused_rms_norm_backward": (0, 1, 4, 5, _RMS_BACKWARD),
    "rooftile.rms_norm_backward": (0, 1, 3, -1, _RMS_BACKWARD),
}


@formula(*_BACKWARD)
def backward(call: Call) -> Cost:
    """The gradients that ``output_mask`` asks for: of the input, the weight, the bias."""
    name = call.operator.rsplit(".", 1)[0]
    grad_at, x_at, weight_at, mask_at, flops = _BACKWARD[name]
    weight = _given(call, weight_at, "weight")
    rms = flops == _RMS_BACKWARD
    default: tuple[bool, ...] = (True, weight) if rms else (True, weight, weight)
    mask = call.argument(mask_at, "output_mask", default) if mask_at >= 0 else default
    frozen_statistics = name == "aten.native_batch_norm_backward" and call.argument(7, "train", True) is False
    per_element = 0
    if mask[0]:
        # With running statistics the mean and variance are constants: dx = dy * w * rstd.
        per_element += weight + (1 if frozen_statistics else flops)
    if mask[1]:
        per_element += 2
    if len(mask) > 2 and mask[2]:
        per_element += 1
    x = tensor(call, x_at, "input")
    only_bias = not mask[0] and not mask[1]
    reason = "" if per_element else "no gradient asked for"
    return _cost(
        call, per_element * tensor(call, grad_at, "grad_out").numel, unread=bytes_of(x) * only_bias, reason=reason
    )


#: FLOPs per element.
_SOFTMAX = {
    "_softmax": 5,  # maximum, subtract, exp, sum, divide
    "_log_softmax": 5,  # maximum, subtract, exp, sum, subtract the logarithm
    "_safe_softmax": 6,  # as softmax, and a test for rows that are all -inf
    "_softmax_backward_data": 4,  # y * (dy - sum(y * dy)): multiply, sum, subtract, multiply
    "_log_softmax_backward_data": 4,  # dy - exp(y) * sum(dy): sum, exp, multiply, subtract
    "_masked_softmax": 6,
    "_masked_softmax_backward": 5,
}


@formula(*(f"aten.{name}" for name in _SOFTMAX))
def softmax(call: Call) -> Cost:
    """One row at a time on chip: the input (or y and dy) read once, the result written once."""
    return _cost(call, _SOFTMAX[call.operator.split(".")[1]] * call.outputs[0].numel, "softmax")


#: FLOPs per element of the pieces that synchronised batch norm and weight norm are made of.
_PIECES = {
    "batch_norm_stats": 4,  # mean, variance
    "batch_norm_elemt": 4,  # subtract, scale, weight, bias
    "batch_norm_backward_reduce": 4,  # sum dy; (x - mean) dy, summed
    "batch_norm_backward_elemt": 5,  # (x - mean) c, dy - mean dy, subtract, scale
    "batch_norm_gather_stats_with_counts": 6,  # per rank and channel: weighted mean and variance
    "_weight_norm_interface": 3,  # |v|^2 by square and add; v * (g / |v|)
    "_weight_norm_interface_backward": 5,  # sum(dw v); (g / |v|) (dw - v c)
}


@formula(*(f"aten.{name}" for name in _PIECES))
def pieces(call: Call) -> Cost:
    """One pass over the first operand."""
    return _cost(call, _PIECES[call.operator.split(".")[1]] * call.inputs[0].numel)
