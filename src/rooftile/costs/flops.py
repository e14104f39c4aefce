"""Closed forms beside the capture. Every one is ``derived``: a formula on declared sizes, not an observed step."""

from __future__ import annotations

from typing import NamedTuple

from rooftile.errors import UnitError, UsageError

__all__ = [
    "WorkRatio",
    "conv2d",
    "linear",
    "mfu",
    "model_per_token",
    "self_attention",
    "work_ratio",
]


def _not_negative(**sizes: float) -> None:
    for name, value in sizes.items():
        if not value >= 0:  # NaN too
            raise UsageError(f"{name} is {value}; give a count of at least 0")


def linear(batch: int, n_in: int, n_out: int) -> int:
    """Forward FLOPs of a linear layer without bias: ``2 B Nin Nout``, a product and an addition per weight and row."""
    _not_negative(batch=batch, n_in=n_in, n_out=n_out)
    return 2 * batch * n_in * n_out


def conv2d(batch: int, height: int, width: int, kernel: int, c_in: int, c_out: int) -> int:
    """Forward FLOPs of a convolution with ``height`` x ``width`` *outputs*: ``2 B H' W' K^2 Cin Cout``."""
    _not_negative(batch=batch, height=height, width=width, kernel=kernel, c_in=c_in, c_out=c_out)
    return 2 * batch * height * width * kernel**2 * c_in * c_out


def self_attention(batch: int, seq: int, width: int) -> int:
    """Forward FLOPs of a self-attention layer: ``B (4 S^2 d + 8 S d^2)``.

    Q K^T and P V take ``2 S^2 d`` each over all heads; the four projections Q, K, V, O take ``2 S d^2`` each.
    """
    _not_negative(batch=batch, seq=seq, width=width)
    return batch * (4 * seq**2 * width + 8 * seq * width**2)


def model_per_token(
    params: int,
    embedding_params: int,
    layers: int,
    heads: int,
    head_dim: int,
    seq: int,
    causal: bool = False,
) -> int:
    """FLOPs of one training token (forward and backward): ``6 (N - embedding) + 12 L H D S``.

    A weight takes 2 forward and 4 backward. Attention takes ``4 S H D`` per token and layer forward (Q K^T and P V
    against S keys) and twice that backward. ``causal`` halves the attention term; the default is the dense convention
    of torchtitan and of the PaLM paper's MFU (appendix B). Evidence: derived.
    """
    _not_negative(params=params, embedding_params=embedding_params, layers=layers, heads=heads)
    _not_negative(head_dim=head_dim, seq=seq)
    if embedding_params > params:
        raise UsageError(f"embedding_params is {embedding_params} of {params} parameters; it is a part of them")
    attention = 12 * layers * heads * head_dim * seq
    return 6 * (params - embedding_params) + (attention // 2 if causal else attention)


def mfu(tokens_per_s: float, flop_per_token: float, peak_flop_per_s: float) -> float:
    """Model FLOPs utilisation of one device, a fraction of its peak (FLOP/s, not TFLOP/s).

    Raises :class:`~rooftile.errors.UnitError` above 1: a measurement above its roof has the wrong units, dtype, count
    or scope.
    """
    _not_negative(tokens_per_s=tokens_per_s, flop_per_token=flop_per_token)
    if not peak_flop_per_s > 0:
        raise UsageError(f"the peak is {peak_flop_per_s} FLOP/s; give a rate above 0")
    share = tokens_per_s * flop_per_token / peak_flop_per_s
    if share > 1:
        raise UnitError(
            f"{tokens_per_s:g} tokens/s of {flop_per_token:g} FLOP are {share:.3g} times the peak of "
            f"{peak_flop_per_s:g} FLOP/s; check units, dtype, sparsity of the peak and tokens per device"
        )
    return share


class WorkRatio(NamedTuple):
    """Work of a gradient relative to the forward pass, beside Baur and Strassen's bound."""

    backward: float  # backward / forward
    total: float  # (forward + backward) / forward
    backward_bound: float = 4.0
    total_bound: float = 5.0

    @property
    def within(self) -> bool:
        """Whether both ratios keep their bound."""
        return self.backward <= self.backward_bound and self.total <= self.total_bound


def work_ratio(forward: float, backward: float) -> WorkRatio:
    """Reverse mode takes at most 4 operations for each scalar operation, at most 5 W(f) in all (Baur, Strassen 1983).

    Dense layers reach 2: each product of the forward pass gives one for the data and one for the weights.
    """
    _not_negative(backward=backward)
    if not forward > 0:
        raise UsageError(f"forward is {forward} FLOPs; a ratio needs a forward pass with arithmetic")
    return WorkRatio(backward / forward, (forward + backward) / forward)
