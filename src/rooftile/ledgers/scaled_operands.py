"""Scaled operands of a step: per role the format, the blocks, and the bytes of codes and scales that were made."""

from __future__ import annotations

from dataclasses import dataclass

from rooftile.capture.trace import Call, Trace

__all__ = ["ScaledOperands", "scaled_operands"]

#: Operator -> position of ``block_rows``; ``fmt`` follows two places behind it, ``role`` is the last argument.
_MAKERS = {"rooftile.quantize.default": (1, 8), "rooftile.requantize.default": (2, 8)}


@dataclass(frozen=True, slots=True)
class ScaledOperands:
    """One role's quantised matrices: how many were made in the step, under which recipe, and their bytes in all."""

    role: str
    format: str
    block: str
    count: int
    code_bytes: int
    scale_bytes: int


def scaled_operands(trace: Trace) -> tuple[ScaledOperands, ...]:
    """Observed on the trace, empty where nothing was quantised; bytes add up, they don't all live at once."""
    made: dict[tuple[str, str, str], list[int]] = {}
    for op in trace.ops:
        if op.operator not in _MAKERS:
            continue
        codes, scales = op.call.outputs
        entry = made.setdefault(_key(op.call), [0, 0, 0])
        entry[0] += 1
        entry[1] += codes.nbytes
        entry[2] += scales.nbytes
    order = ("input", "weight", "gradient", "")
    return tuple(
        ScaledOperands(*key, *entry) for key, entry in sorted(made.items(), key=lambda item: order.index(item[0][0]))
    )


def _key(call: Call) -> tuple[str, str, str]:
    block_at, role_at = _MAKERS[call.operator]
    rows, cols = call.argument(block_at, "block_rows"), call.argument(block_at + 1, "block_cols")
    block = "tensor" if not rows and not cols else f"{rows or 'all'}x{cols or 'all'}"
    return str(call.argument(role_at, "role", "")), str(call.argument(block_at + 2, "fmt")), block
