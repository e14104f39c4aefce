"""Pooling, interpolation and their gradients: how many input elements stand behind an output."""

from __future__ import annotations

from math import prod

from rooftile.capture.trace import Call
from rooftile.costs.operands import reads, tensor, total_bytes, writes
from rooftile.costs.record import Cost
from rooftile.costs.registry import aten, formula

__all__: list[str] = []


def _cost(call: Call, flops: int) -> Cost:
    return Cost("reduction", flops, total_bytes(reads(call)), total_bytes(writes(call)))


def _window(call: Call, position: int, dims: int) -> int:
    """Elements of the pooling window; one number stands for all dimensions."""
    size = call.argument(position, "kernel_size")
    sizes = size if isinstance(size, tuple) else (size,)
    return int(sizes[0]) ** dims if len(sizes) == 1 else prod(sizes)


def _dims(call: Call) -> int:
    return 3 if "3d" in call.operator else 2 if "2d" in call.operator else 1


@formula(*aten("max_pool2d_with_indices max_pool3d_with_indices max_pool2d avg_pool1d avg_pool2d avg_pool3d"))
def pool(call: Call) -> Cost:
    """One comparison or addition for every element of every window."""
    return _cost(call, call.outputs[0].numel * _window(call, 1, _dims(call)))


@formula("aten.avg_pool2d_backward", "aten.avg_pool3d_backward")
def avg_pool_backward(call: Call) -> Cost:
    """Each output's gradient is added to every element of its window; the input lends its shape only."""
    grad = tensor(call, 0, "grad_output")
    return Cost(
        "reduction", grad.numel * _window(call, 2, _dims(call)), total_bytes((grad,)), total_bytes(call.outputs)
    )


@formula(
    *aten(
        "max_pool2d_with_indices_backward max_pool3d_with_indices_backward adaptive_max_pool2d_backward "
        "adaptive_max_pool3d_backward"
    )
)
def max_pool_backward(call: Call) -> Cost:
    """Each gradient is added where its maximum was: 1; the input lends its shape only."""
    grad, indices = call.inputs[0], call.inputs[-1]
    return Cost("reduction", grad.numel, total_bytes((grad, indices)), total_bytes(call.outputs))


@formula(
    "aten._adaptive_avg_pool2d", "aten._adaptive_avg_pool3d", "aten.adaptive_max_pool2d", "aten.adaptive_max_pool3d"
)
def adaptive_pool(call: Call) -> Cost:
    """Windows that cover the input once: one operation per input element."""
    return _cost(call, call.inputs[0].numel)


@formula("aten._adaptive_avg_pool2d_backward", "aten._adaptive_avg_pool3d_backward")
def adaptive_avg_pool_backward(call: Call) -> Cost:
    """The gradient spread over its window: one operation per input element; the input lends its shape only."""
    return Cost("reduction", call.outputs[0].numel, total_bytes(call.inputs[:1]), total_bytes(call.outputs))


#: FLOPs per output element: a lerp (3) per pair of taps and dimension, cubic 7 per four taps.
_INTERPOLATION = {
    "upsample_linear1d": 3, "upsample_bilinear2d": 9, "_upsample_bilinear2d_aa": 9, "upsample_trilinear3d": 21,
    "upsample_bicubic2d": 35, "_upsample_bicubic2d_aa": 35, "grid_sampler_2d": 9, "grid_sampler_3d": 21,
}  # fmt: skip


@formula(*(f"aten.{name}" for name in _INTERPOLATION))
def interpolate(call: Call) -> Cost:
    """Separable: linear takes a lerp (3) per pair: 1, 3 or 7 lerps in one to three dimensions; cubic 5 of 7 FLOPs."""
    return _cost(call, _INTERPOLATION[call.operator.split(".")[1]] * call.outputs[0].numel)


@formula(
    *(
        f"aten.{name}_backward"
        for name in ("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d")
    )
)
def interpolate_backward(call: Call) -> Cost:
    """Each gradient is added to its taps with the same weights: a product and an addition per tap."""
    taps = {"linear1d": 2, "bilinear2d": 4, "bicubic2d": 16, "trilinear3d": 8}
    count = next(value for name, value in taps.items() if f"_{name}_" in call.operator)
    return _cost(call, 2 * count * call.inputs[0].numel)


@formula(
    *aten(
        "upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward "
        "_upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward "
        "reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward "
        "replication_pad2d_backward replication_pad3d_backward col2im"
    )
)
def folded_back(call: Call) -> Cost:
    """The gradient of a copy that repeats elements: one addition per incoming element; a shape donor is not read."""
    grad = call.inputs[0]
    return Cost("reduction", grad.numel, total_bytes((grad,)), total_bytes(call.outputs))
