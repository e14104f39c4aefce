"""Recurrent layers and cells.

Each weight matrix meets every (time step, batch row) pair once, so the products of a layer are
``2 * rows * numel(W)`` summed over its matrices (input-hidden, hidden-hidden, projection; every direction), rows being
the input's elements without its features: right for padded and for packed sequences. The backward pass does the
products twice over: for the data's gradient and for the weights'.
"""

from __future__ import annotations

from math import prod

from rooftile.capture.trace import Call, TensorMeta, tensors_in
from rooftile.costs.operands import reads, tensor, total_bytes, writes
from rooftile.costs.record import Cost
from rooftile.costs.registry import formula

__all__: list[str] = []

# Per hidden unit and time step, without biases.
# LSTM: gates x W + h U 4 additions, 3 sigmoid and a tanh 4, c = f c + i g 3, h = o tanh(c) 2.
# GRU: r and z 2 additions and 2 sigmoid, n = tanh(xW + r hU) 3, h = (1 - z) n + z h 4.
# Plain: one addition, one activation.
_POINTWISE = {"LSTM": 13, "GRU": 11, "RNN_TANH": 2, "RNN_RELU": 2}
# Backward. LSTM: do 4 (dh tanh(c), o (1 - o)), dc 4 (dh o (1 - t^2) + dc), di, df, dg: 4, 4, 3, next dc 1: 20.
# GRU: dn 4, dz 5, dr 4, dh 3: 16. Plain: dh * (1 - h^2) 3.
_POINTWISE_BACKWARD = {"LSTM": 20, "GRU": 16, "RNN_TANH": 3, "RNN_RELU": 1}
_GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}
#: torch's numbers for the modes of cuDNN and oneDNN.
_MODE_NUMBERS = ("RNN_RELU", "RNN_TANH", "LSTM", "GRU")


def _layer_cost(call: Call, mode: str, rows: int, weights: tuple[TensorMeta, ...], *, backward: bool) -> Cost:
    """Cost of all layers and directions whose ``weights`` are given (matrices 2-d, biases 1-d)."""
    matrices = [weight for weight in weights if len(weight.shape) == 2]
    biases = [weight for weight in weights if len(weight.shape) == 1]
    forward_products = 2 * rows * sum(weight.numel for weight in matrices)
    # Layers times directions times hidden units: the gate rows of the input-hidden matrices, of which each layer and
    # direction has one (with its hidden-hidden partner of equally many rows; a projection matrix is wider than high).
    gates = _GATES[mode]
    units = sum(weight.shape[0] for weight in _gate_matrices(matrices, gates)) // 2 // gates
    table = _POINTWISE_BACKWARD if backward else _POINTWISE
    # A bias is one addition per gate; its gradient, one too.
    pointwise = rows * (table[mode] * units + sum(bias.numel for bias in biases))
    matmul = forward_products * (2 if backward else 1)
    return Cost(
        "rnn",
        flops=matmul + pointwise,
        bytes_read=total_bytes(reads(call)),
        bytes_written=total_bytes(writes(call)),
        matmul_flops=matmul,
        roof="matmul",
        roof_dtype=weights[0].dtype,
    )


def _gate_matrices(matrices: list[TensorMeta], gates: int) -> list[TensorMeta]:
    """The matrices with one row per gate and hidden unit: all but the (proj, hidden) ones of a projected LSTM."""
    tallest = max((weight.shape[0] for weight in matrices), default=0)
    return [weight for weight in matrices if weight.shape[0] == tallest and tallest % gates == 0]


def _rows(source: TensorMeta) -> int:
    return prod(source.shape[:-1])


def _weights(call: Call, position: int, name: str) -> tuple[TensorMeta, ...]:
    return tuple(tensors_in((call.argument(position, name),)))


@formula("rooftile.rnn")
def layer(call: Call) -> Cost:
    """``(x, hx, weights, mode, ...)`` to (output, h_n[, c_n], reserve)."""
    return _layer_cost(call, call.args[3], _rows(tensor(call, 0, "x")), _weights(call, 2, "weights"), backward=False)


@formula("rooftile.rnn_backward")
def layer_backward(call: Call) -> Cost:
    """``(grads, x, hx, weights, output, reserve, mode, ...)`` to (dx, dhx..., dweights...)."""
    return _layer_cost(call, call.args[6], _rows(tensor(call, 1, "x")), _weights(call, 3, "weights"), backward=True)


_ATEN_MODES = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "RNN_TANH", "rnn_relu": "RNN_RELU"}


@formula(*(f"aten.{name}" for name in _ATEN_MODES))
def aten_layer(call: Call) -> Cost:
    """torch's own layers; the packed form (overload ``data``) has the batch sizes before hx."""
    _, base, overload = call.operator.split(".")
    weights = _weights(call, 3 if overload == "data" else 2, "params")
    return _layer_cost(call, _ATEN_MODES[base], _rows(tensor(call, 0, "input")), weights, backward=False)


@formula("aten._cudnn_rnn", "aten.miopen_rnn")
def cudnn_layer(call: Call) -> Cost:
    """The list of weights are views of one buffer, which is not read a second time."""
    return _without_buffer(call, position=6, buffer_at=3, backward=False)


@formula("aten._cudnn_rnn_backward", "aten.miopen_rnn_backward")
def cudnn_layer_backward(call: Call) -> Cost:
    """As the forward pass, with its output and reserve and the gradients."""
    return _without_buffer(call, position=10, buffer_at=3, backward=True)


def _without_buffer(call: Call, *, position: int, buffer_at: int, backward: bool) -> Cost:
    mode = _MODE_NUMBERS[call.argument(position, "mode")]
    weights = _weights(call, 1, "weight")
    cost = _layer_cost(call, mode, _rows(tensor(call, 0, "input")), weights, backward=backward)
    buffer = call.argument(buffer_at, "weight_buf")
    repeated = total_bytes(weights) if isinstance(buffer, TensorMeta) else 0
    return Cost(
        "rnn", cost.flops, cost.bytes_read - repeated, cost.bytes_written,
        matmul_flops=cost.matmul_flops, roof="matmul", roof_dtype=cost.roof_dtype,
    )  # fmt: skip


@formula("aten.mkldnn_rnn_layer")
def mkldnn_layer(call: Call) -> Cost:
    """One layer and direction: input, four weights (two matrices, two biases), hx, cx."""
    mode = _MODE_NUMBERS[call.argument(9, "mode")]
    return _layer_cost(call, mode, _rows(tensor(call, 0, "input")), _weights_of_mkldnn(call), backward=False)


@formula("aten.mkldnn_rnn_layer_backward")
def mkldnn_layer_backward(call: Call) -> Cost:
    """The same four weights at the same places."""
    mode = _MODE_NUMBERS[call.argument(14, "mode")]
    return _layer_cost(call, mode, _rows(tensor(call, 0, "input")), _weights_of_mkldnn(call), backward=True)


def _weights_of_mkldnn(call: Call) -> tuple[TensorMeta, ...]:
    # Named weight0 to weight3 forward and weight1 to weight4 backward, always given by position.
    return tuple(tensor(call, position, f"weight{position}") for position in range(1, 5))


#: FLOPs per hidden unit of the fused cells, whose matrix products are operators of their own; and per gate for biases.
_CELLS = {
    "_thnn_fused_lstm_cell": (_POINTWISE["LSTM"], 4),
    "_thnn_fused_gru_cell": (_POINTWISE["GRU"], 3),
    "_thnn_fused_lstm_cell_backward_impl": (_POINTWISE_BACKWARD["LSTM"], 0),
    "_thnn_fused_gru_cell_backward": (_POINTWISE_BACKWARD["GRU"], 0),
}


@formula(*(f"aten.{name}" for name in _CELLS))
def cell(call: Call) -> Cost:
    """The pointwise part of one time step; two biases add one operation per gate each."""
    base = call.operator.split(".")[1]
    per_unit, gates = _CELLS[base]
    if base.endswith("impl"):
        hidden = tensor(call, 2, "cx").numel
    elif base.endswith("backward"):
        hidden = tensor(call, 0, "grad_hy").numel
    else:
        hidden = tensor(call, 2, "cx" if "lstm" in base else "hx").numel
        biases = (call.argument(3, "input_bias"), call.argument(4, "hidden_bias"))
        per_unit += gates * sum(isinstance(bias, TensorMeta) for bias in biases)
    return Cost("rnn", per_unit * hidden, total_bytes(reads(call)), total_bytes(writes(call)))
