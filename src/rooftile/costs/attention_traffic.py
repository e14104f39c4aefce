"""What attention moves by its published algorithms: derived closed forms, for comparison with the capture."""

from __future__ import annotations

from typing import NamedTuple

from rooftile.errors import UsageError

__all__ = ["AttentionSizes", "FlashTraffic", "flash_traffic", "score_matrix_bytes", "tensor_sizes"]


def _positive(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise UsageError(f"{name} is {value}; give a size of at least 1")


def score_matrix_bytes(seq: int, *, heads: int = 1, batch: int = 1, itemsize: int = 2) -> int:
    """Bytes of the (seq, seq) scores of all heads."""
    _positive(seq=seq, heads=heads, batch=batch, itemsize=itemsize)
    return batch * heads * seq * seq * itemsize


class AttentionSizes(NamedTuple):
    """Bytes of the two quadratic tensors and of the four linear ones."""

    scores_and_probabilities: int
    qkvo: int


def tensor_sizes(seq: int, head_dim: int, *, heads: int = 1, batch: int = 1, itemsize: int = 2) -> AttentionSizes:
    """Scores and probabilities ``2 N^2`` against Q, K, V and O ``4 N d`` elements a head."""
    _positive(head_dim=head_dim)
    scores = score_matrix_bytes(seq, heads=heads, batch=batch, itemsize=itemsize)
    return AttentionSizes(2 * scores, 4 * batch * heads * seq * head_dim * itemsize)


class FlashTraffic(NamedTuple):
    """Bytes of FlashAttention's Algorithms 1 (forward) and 4 (backward), and the blocks that they follow from."""

    forward: int
    backward: int
    block_columns: int  # Bc
    block_rows: int  # Br

    @property
    def total(self) -> int:
        """Forward and backward."""
        return self.forward + self.backward


def flash_traffic(
    batch: int,
    heads: int,
    seq: int,
    head_dim: int,
    *,
    itemsize: int = 2,
    on_chip_elements: int = 98_304,
    statistics_itemsize: int = 4,
) -> FlashTraffic:
    """Device-memory traffic of the FlashAttention paper's (arXiv 2205.14135) two algorithms, as they are written.

    Blocks: ``Bc = floor(M / 4d)`` and ``Br = min(Bc, d)`` with M counted in *elements*; ``Tc = ceil(N / Bc)`` passes.
    Per head, in units of N d elements: forward zero-fills O (1), loads K and V once (2), and on each pass loads Q and O
    and stores O (3). Backward zero-fills dQ (1), loads K and V (2), stores dK and dV (2), and on each pass loads Q, O,
    dO and dQ and stores dQ (5). The statistics l and m (fp32, N each) are zero-filled (2), loaded and stored on each
    forward pass (4) and loaded on each backward pass (2). Asymptotically the ``N d + N^2 d^2 / M`` of the paper.
    """
    _positive(batch=batch, heads=heads, seq=seq, head_dim=head_dim, on_chip_elements=on_chip_elements)
    block_columns = on_chip_elements // (4 * head_dim)
    if block_columns < 1:
        raise UsageError(f"on_chip_elements is {on_chip_elements}; a head of {head_dim} needs at least {4 * head_dim}")
    passes = -(-seq // block_columns)
    matrix = batch * heads * seq * head_dim * itemsize
    statistic = batch * heads * seq * statistics_itemsize
    forward = (1 + 2 + 3 * passes) * matrix + (2 + 4 * passes) * statistic
    backward = (1 + 2 + 2 + 5 * passes) * matrix + 2 * passes * statistic
    return FlashTraffic(forward, backward, block_columns, min(block_columns, head_dim))
