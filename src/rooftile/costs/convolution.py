"""Convolutions and their three gradients.

Every output element of a convolution sums ``Cin / groups * prod(kernel)`` products, taps that fall on the padding
included: ``2 B H' W' K^2 Cin Cout / groups`` FLOPs. The weight is (Cout, Cin / groups, K...), so that is
``2 * numel(output) * numel(weight) / Cout``. A transposed convolution scatters instead: each *input* element meets
``Cout / groups * prod(kernel)`` weights, (Cin, Cout / groups, K...), so ``2 * numel(input) * numel(weight) / Cin``.

Each product of the forward pass gives one product for the input's gradient (with the weight) and one for the weight's
(with the input): both cost exactly what the forward pass does, grouped or not.
"""

from __future__ import annotations

from rooftile.capture.trace import Call, TensorMeta
from rooftile.costs.operands import bytes_of, reads, tensor, total_bytes
from rooftile.costs.record import Cost
from rooftile.costs.registry import formula

__all__: list[str] = []


def _products(inner: TensorMeta, weight: TensorMeta) -> int:
    """FLOPs of all products; ``inner`` is the tensor whose channels are the weight's first dimension."""
    channels = weight.shape[0]
    return 2 * inner.numel * (weight.numel // channels) if channels else 0


#: name -> position of the flag ``transposed``, or a fixed answer.
_FORWARD: dict[str, int | bool] = {
    "aten.convolution": 6,
    "aten.convolution_overrideable": 6,
    "aten._convolution": 6,
    "aten.mkldnn_convolution": False,
    "aten.cudnn_convolution": False,
    "aten.miopen_convolution": False,
    "aten.cudnn_convolution_transpose": True,
    "aten.miopen_convolution_transpose": True,
    "aten.conv_depthwise3d": False,
    "aten._conv_depthwise2d": False,
    "aten._slow_conv2d_forward": False,
    "aten.slow_conv3d_forward": False,
}


def _is_transposed(call: Call, where: int | bool) -> bool:
    return where if isinstance(where, bool) else bool(call.argument(where, "transposed", False))


@formula(*_FORWARD)
def forward(call: Call) -> Cost:
    """The products, and one addition per output for a bias."""
    source, weight = tensor(call, 0, "input"), tensor(call, 1, "weight")
    output = call.outputs[0]
    transposed = _is_transposed(call, _FORWARD[call.operator.rsplit(".", 1)[0]])
    matmul = _products(source if transposed else output, weight)
    biased = len(reads(call)) > 2
    return _cost(call, matmul + output.numel * biased, matmul, total_bytes(reads(call)), weight.dtype)


@formula("aten.convolution_backward", "aten.convolution_backward_overrideable")
def backward(call: Call) -> Cost:
    """The gradients in ``output_mask``: input and weight one set of products each, bias one addition per element."""
    grad, source, weight = tensor(call, 0, "grad_output"), tensor(call, 1, "input"), tensor(call, 2, "weight")
    overrideable = "overrideable" in call.operator  # its schema has no bias_sizes
    transposed = bool(call.argument(6 if overrideable else 7, "transposed", False))
    mask = call.argument(9 if overrideable else 10, "output_mask", (True, True, True))
    each = _products(source if transposed else grad, weight)
    matmul = each * (bool(mask[0]) + bool(mask[1]))
    # dX = dY * W and dW = dY * X: an operand that no wanted gradient needs is not read.
    read = bytes_of(grad) + bytes_of(weight) * bool(mask[0]) + bytes_of(source) * bool(mask[1])
    return _cost(call, matmul + grad.numel * bool(mask[2]), matmul, read, weight.dtype)


def _cost(call: Call, flops: int, matmul: int, read: int, dtype: str) -> Cost:
    return Cost(
        "convolution",
        flops=flops,
        bytes_read=read,
        bytes_written=total_bytes(call.outputs),
        matmul_flops=matmul,
        roof="matmul",
        roof_dtype=dtype,
        zero_reason="" if flops else "no gradient asked for",
    )
