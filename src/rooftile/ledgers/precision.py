"""Precision: the numerical contract of a step, role by role and operator family by family.

Every slot has a value and an evidence word (``declared, observed, derived, assumed``); ``unknown`` is a legal value and
has no evidence. What a kernel does inside is never observed here: it is derived from the device's table or assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rooftile.capture.trace import ROLES, Op, TensorMeta, Trace
from rooftile.costs.operands import mutated_positions
from rooftile.costs.record import Cost
from rooftile.ledgers.materialized import operator_name
from rooftile.ledgers.scaled_operands import ScaledOperands, scaled_operands

__all__ = ["FamilyContract", "PrecisionLedger", "RolePrecision", "Slot", "precision"]

#: Significant bits, the leading one included: the product of two such numbers has at most twice as many.
_SIGNIFICAND = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8, "float8_e4m3fn": 4, "float8_e5m2": 3}
_MATRIX = frozenset({"matmul", "attention", "convolution"})
#: Families that move or make numbers and compute none.
_NO_ARITHMETIC = frozenset({"view", "copy", "creation", "embedding", "indexing", "communication"})


@dataclass(frozen=True, slots=True)
class Slot:
    """A value (dtype names, or words) and how it is known; ``evidence`` is empty where the value is unknown."""

    value: str
    evidence: str

    def __str__(self) -> str:
        return self.value if not self.evidence else f"{self.value} ({self.evidence})"


UNKNOWN = Slot("unknown", "")


@dataclass(frozen=True, slots=True)
class RolePrecision:
    """One role: the bytes of every dtype over the step's storages of that role, each storage once."""

    role: str
    dtypes: dict[str, int]
    bytes: int
    evidence: str


@dataclass(frozen=True, slots=True)
class FamilyContract:
    """The four slots of one operator family."""

    family: str
    storage: Slot
    product: Slot
    accumulate: Slot
    output: Slot


@dataclass(frozen=True, slots=True)
class PrecisionLedger:
    """The contract of the step. ``policy`` is the ``--precision`` word it was captured under, ``autocast_source`` where
    the device's autocast lists were read."""

    policy: str
    roles: tuple[RolePrecision, ...]
    families: tuple[FamilyContract, ...]
    autocast: Slot
    autocast_source: str
    loss_scale: Slot
    gradient_accumulation: Slot
    communication: Slot
    scaled: tuple[ScaledOperands, ...] = ()


def precision(
    trace: Trace,
    costs: Sequence[Cost | None],
    accumulate: dict[str, str] | None = None,
    device_class: str = "",
) -> PrecisionLedger:
    """The precision ledger of a trace.

    ``accumulate`` maps the input dtype of a matrix product to the accumulator of the device's matrix units, as the
    device's table has it; ``device_class`` is ``cuda`` where the vector kernels are CUDA's.
    """
    return PrecisionLedger(
        policy=str(trace.settings.get("precision", "unknown")),
        roles=_roles(trace),
        families=_families(trace, costs, accumulate or {}, device_class),
        autocast=_autocast(trace),
        autocast_source=str((trace.settings.get("autocast") or {}).get("source", "")),
        loss_scale=_loss_scale(trace),
        gradient_accumulation=_gradient_accumulation(trace),
        communication=Slot("none (one rank)", "observed"),
        scaled=scaled_operands(trace),
    )


def _roles(trace: Trace) -> tuple[RolePrecision, ...]:
    totals: dict[str, dict[str, int]] = {}
    for s in trace.storages:
        dtypes = totals.setdefault(s.role, {})
        dtypes[s.dtype or "unknown"] = dtypes.get(s.dtype or "unknown", 0) + s.nbytes
    return tuple(
        RolePrecision(
            role,
            dict(sorted(totals[role].items(), key=lambda item: -item[1])),
            sum(totals[role].values()),
            "observed",
        )
        for role in ROLES
        if role in totals
    )


def _families(
    trace: Trace, costs: Sequence[Cost | None], accumulate: dict[str, str], device_class: str
) -> tuple[FamilyContract, ...]:
    # Matrix families have a row for each dtype that their products read: the contract depends on it.
    operands: dict[tuple[str, str], set[str]] = {}
    results: dict[tuple[str, str], set[str]] = {}
    seen: set[int] = set()  # equal layers share their Calls: look at each once
    for op, cost in zip(trace.ops, costs, strict=True):
        if cost is None or cost.family in _NO_ARITHMETIC or id(op.call) in seen:
            continue
        seen.add(id(op.call))
        key = (cost.family, cost.roof_dtype if cost.family in _MATRIX else "")
        inputs = op.call.inputs  # worked out on every access; a foreach operator has thousands
        operands.setdefault(key, set()).update(_floating(inputs))
        written = (*op.call.outputs, *(inputs[at] for at in mutated_positions(op.call)))
        results.setdefault(key, set()).update(_floating(written))
    return tuple(
        _contract(family, product, operands[family, product], results[family, product], accumulate, device_class)
        for family, product in operands
        if operands[family, product]
    )


def _contract(
    family: str,
    product: str,
    operands: set[str],
    results: set[str],
    accumulate: dict[str, str],
    device_class: str,
) -> FamilyContract:
    """``product`` is the dtype that a matrix product reads; other operands (statistics, a bias) may be wider."""
    storage = Slot(_names(operands), "observed")
    output = Slot(_names(results), "observed") if results else UNKNOWN
    if family in _MATRIX:
        return FamilyContract(family, storage, _product(product, accumulate), _accumulator(product, accumulate), output)
    if device_class == "cuda" and operands <= {"float16", "bfloat16", "float32"}:
        # CUDA's vector kernels load 16-bit numbers, compute and reduce in fp32 and round once at the store.
        inside = Slot("float32", "assumed")
        return FamilyContract(family, storage, inside, inside, output)
    return FamilyContract(family, storage, UNKNOWN, UNKNOWN, output)


def _accumulator(dtype: str, accumulate: dict[str, str]) -> Slot:
    """From the device's table, keyed by the inputs' dtype; unknown where it isn't there."""
    return Slot(accumulate[dtype], "derived") if dtype in accumulate else UNKNOWN


def _product(dtype: str, accumulate: dict[str, str]) -> Slot:
    """Exact where twice the significand of the operands fits the accumulator's."""
    if dtype not in accumulate or dtype not in _SIGNIFICAND:
        return UNKNOWN
    if 2 * _SIGNIFICAND[dtype] <= _SIGNIFICAND.get(accumulate[dtype], 0):
        return Slot("exact", "derived")
    return Slot(accumulate[dtype], "derived")


def _floating(metas: Sequence[TensorMeta]) -> set[str]:
    return {m.dtype for m in metas if "float" in m.dtype or "complex" in m.dtype}


def _names(dtypes: set[str]) -> str:
    return ", ".join(sorted(dtypes))


def _autocast(trace: Trace) -> Slot:
    policy = trace.settings.get("autocast")
    if not policy:
        return _entered(trace)
    release = f" of torch {policy['release']}" if policy.get("release") else ""
    return Slot(f"{policy['dtype']} by the {policy['policy']} lists{release}", "derived")


def _entered(trace: Trace) -> Slot:
    """Without a policy of the capture's: what the model, the loss or the step entered by themselves."""
    entered = trace.settings.get("autocast_entered") or ()
    if not entered:
        return Slot("none", "observed")
    release = str(trace.settings.get("torch", "")).partition("+")[0]
    told = dict.fromkeys(
        f"{one['dtype']}, entered by the {one.get('by', 'model')}, by the {one['device_type']} lists"
        + (f" of torch {release}" if release else "")
        for one in entered
    )
    return Slot("; ".join(told), "observed")


def _loss_scale(trace: Trace) -> Slot:
    if trace.settings.get("phase") != "train":
        return Slot("none (no backward pass)", "observed")
    first = trace.settings.get("loss_scale")
    if first:
        return Slot(f"dynamic, {first:g} at first, unscaled before the update", "assumed")
    if any(_is_unscale(op) for op in trace.ops):
        return Slot("dynamic, unscaled before the update", "observed")
    return Slot("none", "observed")


def _is_unscale(op: Op) -> bool:
    return operator_name(op.call.operator).startswith("_amp_foreach_non_finite_check")


def _gradient_accumulation(trace: Trace) -> Slot:
    dtypes = {s.dtype for s in trace.storages if s.role == "gradient" and s.dtype}
    if not dtypes:
        return Slot("none (no gradients)", "observed")
    micro_batches = int(trace.settings.get("micro_batches", 1))
    if micro_batches == 1:
        return Slot(f"none (1 micro-batch; gradients are {_names(dtypes)})", "observed")
    return Slot(f"{_names(dtypes)}, in place over {micro_batches} micro-batches", "observed")
