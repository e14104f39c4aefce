"""What one Call costs: the record that every formula returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Cost", "Family", "NotCountableError", "Roof"]

Family = Literal[
    "matmul", "attention", "convolution", "rnn", "sparse",
    "normalization", "softmax", "reduction", "elementwise", "loss", "dropout",
    "embedding", "indexing", "copy", "view", "creation", "optimizer", "communication", "custom",
]  # fmt: skip

#: Which peak bounds the arithmetic: the matrix units for the dtype, or the fp32 vector units.
Roof = Literal["matmul", "vector"]


@dataclass(frozen=True, slots=True)
class Cost:
    """FLOPs and device-memory bytes of one Call under the ``unfused`` schedule.

    A multiply and an add are two FLOPs; an elementwise operator is one FLOP an element, transcendental included.
    ``flops`` is what the kernel does, ``dense_flops`` the count without skipped (causal, windowed) tiles: equal for
    everything but attention. ``matmul_flops`` is the share of ``flops`` done in matrix products. ``bytes_read`` and
    ``bytes_written`` count every distinct element read or written once. ``zero_reason`` says why FLOPs are 0.
    """

    family: Family
    flops: int
    bytes_read: int
    bytes_written: int
    matmul_flops: int = 0
    dense_flops: int | None = None
    roof: Roof = "vector"
    roof_dtype: str = "float32"  # input dtype of the matrix product, where roof is "matmul"
    zero_reason: str = ""
    elementwise: bool = False  # one output element from the same element of each input: may be fused with neighbours

    @property
    def bytes(self) -> int:
        """Bytes read plus bytes written."""
        return self.bytes_read + self.bytes_written


class NotCountableError(Exception):
    """A formula met an operand it can't count (an unknown dtype or layout): the operator is then listed as unknown."""
