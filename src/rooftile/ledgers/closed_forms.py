"""Closed forms beside the capture: what no single-rank capture can answer, each ``derived`` and naming its convention.

Bytes everywhere. A capture of the real step is worth more than any of these: they leave out what their formula
leaves out, and say so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rooftile.errors import UsageError

__all__ = [
    "ActivationsEstimate",
    "KVCacheSize",
    "States",
    "activations_estimate",
    "kv_cache_size",
    "states",
]

#: Bytes of one parameter and of one gradient element, of one element of optimizer state, of the master copy (or 0).
_ELEMENT_BYTES: dict[str, tuple[int, int, int]] = {
    "fp32": (4, 4, 0),
    "bf16": (2, 2, 0),
    "fp16": (2, 2, 0),
    "bf16-mixed": (4, 4, 0),  # autocast keeps parameters, gradients and states in fp32
    "fp16-mixed": (4, 4, 0),
    "bf16-master": (2, 4, 4),
    "fp16-master": (2, 4, 4),
}
#: States per parameter: Adam keeps two moments, plain SGD none.
_MOMENTS = {"adamw": 2, "sgd": 0, "none": 0}


@dataclass(frozen=True, slots=True)
class States:
    """Bytes one rank keeps for the whole of training, activations apart."""

    parameters: float
    gradients: float
    master_weights: float
    optimizer: float
    convention: str
    unit: str = "bytes per rank"
    evidence: str = "derived"

    @property
    def total(self) -> float:
        """All of them."""
        return self.parameters + self.gradients + self.master_weights + self.optimizer


@dataclass(frozen=True, slots=True)
class ActivationsEstimate:
    """Bytes one rank saves in the forward pass for the backward pass, by a published rule."""

    per_layer: float
    layers: int
    rule: str
    formula: str
    unit: str = "bytes per rank"
    evidence: str = "derived"

    @property
    def total(self) -> float:
        """All layers; embedding, head and loss are not in these rules."""
        return self.per_layer * self.layers


@dataclass(frozen=True, slots=True)
class KVCacheSize:
    """Bytes of keys and values: ``2 L h_kv d_h`` elements a token and sequence."""

    bytes_per_token: int
    total: int
    unit: str = "bytes"
    evidence: str = "derived"


def states(
    params: float,
    *,
    precision: str = "bf16-master",
    zero_stage: Literal[0, 1, 2, 3] = 0,
    ranks: int = 1,
    optimizer: str = "adamw",
) -> States:
    """Bytes of weights, gradients, master weights and optimizer states per rank.

    Per parameter: ``*-master`` 2 + 2 + 4 + 8, ``fp32`` and ``*-mixed`` 4 + 4 + 0 + 8, ``bf16`` and ``fp16``
    2 + 2 + 0 + 4 (with Adam). ZeRO stage 1 divides master weights and optimizer states by ``ranks``, stage 2 the
    gradients too, stage 3 the parameters too (1910.02054, Table 1). Raises UsageError for choices it does not know.
    """
    if precision not in _ELEMENT_BYTES:
        raise UsageError(f"precision is {precision!r}; choose one of {', '.join(_ELEMENT_BYTES)}")
    if optimizer not in _MOMENTS:
        raise UsageError(f"optimizer is {optimizer!r}; choose one of {', '.join(_MOMENTS)}")
    if zero_stage not in (0, 1, 2, 3):
        raise UsageError(f"zero_stage is {zero_stage!r}; choose 0, 1, 2 or 3")
    _positive(params=params, ranks=ranks)
    element, state, master = _ELEMENT_BYTES[precision]
    moments = _MOMENTS[optimizer]
    if optimizer == "none":
        master = 0  # nothing updates, so nothing needs a master copy
    share = {stage: params / (ranks if zero_stage >= stage else 1) for stage in (1, 2, 3)}
    sharded = f", ZeRO stage {zero_stage} over {ranks} ranks" if zero_stage else ""
    return States(
        parameters=element * share[3],
        gradients=element * share[2],
        master_weights=master * share[1],
        optimizer=moments * state * share[1],
        convention=f"{element} + {element} + {master} + {moments * state} bytes per parameter "
        f"(weight, gradient, master, {optimizer}){sharded}",
    )


def activations_estimate(
    *,
    batch: int,
    seq: int,
    layers: int,
    d_model: int,
    heads: int | None = None,
    rule: Literal["12BSdL", "korthikanti"] = "12BSdL",
    itemsize: int = 2,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    recompute: Literal["none", "selective", "full"] = "none",
) -> ActivationsEstimate:
    """Activations saved for the backward pass by a published rule; an estimate, not a capture.

    ``12BSdL``: 12 elements per token, layer and channel, of ``itemsize`` bytes; it knows no parallelism and no
    recomputation. ``korthikanti`` (2205.05198, Table 2): 16-bit activations, 1-byte dropout masks, materialised
    softmax, with s seq, b batch, h d_model, a heads, t tensor_parallel; per layer ``sbh(34 + 5as/h)``, tensor parallel
    ``sbh(10 + 24/t + 5as/(ht))``, with sequence parallelism all of it divided by t, ``selective`` recomputation
    without the 5as/h term, ``full`` 2sbh. Raises UsageError for what a rule does not cover.
    """
    _positive(batch=batch, seq=seq, layers=layers, d_model=d_model, itemsize=itemsize, tensor_parallel=tensor_parallel)
    if recompute not in ("none", "selective", "full"):
        raise UsageError(f"recompute is {recompute!r}; choose none, selective or full")
    if rule == "12BSdL":
        if tensor_parallel != 1 or sequence_parallel or recompute != "none":
            raise UsageError("the rule 12BSdL knows no parallelism and no recomputation; use rule='korthikanti'")
        return ActivationsEstimate(
            12.0 * batch * seq * d_model * itemsize, layers, rule, f"12 B S d x {itemsize} bytes"
        )
    if rule != "korthikanti":
        raise UsageError(f"rule is {rule!r}; choose 12BSdL or korthikanti")
    if heads is None or itemsize != 2:
        raise UsageError("the rule korthikanti needs heads and 16-bit activations; give heads=, leave itemsize at 2")
    _positive(heads=heads)
    factor, formula = _korthikanti(heads * seq / d_model, tensor_parallel, sequence_parallel, recompute)
    return ActivationsEstimate(seq * batch * d_model * factor, layers, rule, formula)


def _korthikanti(a_s_over_h: float, t: int, sequence_parallel: bool, recompute: str) -> tuple[float, str]:
    """Bytes per token, channel and layer, and the formula that gave them."""
    if recompute == "full":
        return 2.0, "2sbh"
    scores = 0.0 if recompute == "selective" else 5 * a_s_over_h
    told = "" if recompute == "selective" else " + 5as/h"
    if sequence_parallel:
        return (34 + scores) / t, f"sbh(34{told})/t"
    if t > 1:
        return 10 + (24 + scores) / t, f"sbh(10 + (24{told})/t)"
    return 34 + scores, f"sbh(34{told})"


def kv_cache_size(layers: int, kv_heads: int, head_dim: int, tokens: int, batch: int, itemsize: int) -> KVCacheSize:
    """Bytes of the KV cache of ``batch`` sequences of ``tokens`` tokens; ``kv_heads`` counts heads that are stored."""
    _positive(layers=layers, kv_heads=kv_heads, head_dim=head_dim, batch=batch, itemsize=itemsize)
    if tokens < 0:
        raise UsageError(f"tokens is {tokens}; it has to be 0 or more")
    per_token = 2 * layers * kv_heads * head_dim * itemsize
    return KVCacheSize(per_token, per_token * tokens * batch)


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise UsageError(f"{name} is {value}; it has to be positive")
