"""Where each input of ``rooftile::attention`` stands."""

from __future__ import annotations

__all__ = ["BIAS", "DIFFERENTIABLE", "INPUTS", "INPUT_COUNT", "SCHEMAS", "SEED", "SINKS", "TENSOR_COUNT", "V"]

INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? lo, Tensor? hi, Tensor? dense, Tensor? bias, Tensor? sinks, Tensor? seed, "
    "float scale, float softcap, float dropout_p, bool fp32_out, str kernel"
)
SCHEMAS = (
    f"attention({INPUTS}) -> (Tensor out, Tensor lse)",
    f"attention_backward(Tensor? dout, Tensor? dlse, {INPUTS}, Tensor out, Tensor lse, bool[5] wanted) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)",
)
V, BIAS, SINKS, SEED = 2, 6, 7, 8
TENSOR_COUNT = 9
INPUT_COUNT = 14
#: q, k, v, bias and sinks: what ``wanted`` speaks of.
DIFFERENTIABLE = (0, 1, 2, BIAS, SINKS)
