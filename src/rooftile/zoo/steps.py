"""From a name to a step: the model in its phase, its inputs, its loss. Nothing has run yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rooftile.errors import UsageError
from rooftile.zoo.configs import GPT2Config, LlamaConfig, config
from rooftile.zoo.gpt2 import GPT2
from rooftile.zoo.kv_cache import KVCache
from rooftile.zoo.llama import Llama

__all__ = ["DEFAULT_SEQ", "NextTokenLoss", "Phase", "ZooStep", "build"]

Phase = Literal["train", "prefill", "decode"]
PHASES: tuple[Phase, ...] = ("train", "prefill", "decode")

#: Sequence where none is given, if the model has that many positions.
DEFAULT_SEQ = 4096


@dataclass(frozen=True, slots=True)
class NextTokenLoss:
    """Mean cross entropy of logits (B, S, V) against ``targets`` (B, S) int64, the tokens one place further on."""

    targets: Tensor

    def __call__(self, logits: Tensor) -> Tensor:
        """A scalar."""
        return F.cross_entropy(logits.flatten(0, 1), self.targets.flatten())


@dataclass(frozen=True, slots=True)
class ZooStep:
    """What a capture needs. ``inputs`` are keyword arguments of ``model``; ``loss`` takes its output (train only).

    ``inputs["kv_cache"]`` (prefill, decode) is one (k, v) pair a layer, each (B, Hkv, length, D), length ``seq`` in
    prefill and ``seq + 1`` in decode; the model writes the new rows in place and returns (logits, kv_cache).
    """

    model: nn.Module
    inputs: dict[str, Any]
    loss: NextTokenLoss | None
    config: GPT2Config | LlamaConfig
    name: str
    phase: Phase
    batch: int
    seq: int


def build(
    name: str,
    *,
    batch: int = 1,
    seq: int | None = None,
    phase: Phase = "train",
    device: str | torch.device = "meta",
    dtype: torch.dtype | None = None,
    kv_dtype: torch.dtype | None = None,
) -> ZooStep:
    """A step of the zoo's model ``name``.

    ``seq`` is the length of the sequence (train, prefill) or of the cache that one new token meets (decode); by
    default 4096 or what the model's positions allow. ``dtype`` is that of the parameters (fp32 by default; rotary
    tables stay fp32), ``kv_dtype`` that of the cache (by default ``dtype``). On a real device weights are initialised
    as published and tokens are random. Raises UsageError for an unknown name or phase, batch < 1, or seq that the
    model's positions do not hold.
    """
    sizes = config(name)
    if phase not in PHASES:
        raise UsageError(f"unknown phase {phase!r}; choose one of {', '.join(PHASES)}")
    if batch < 1:
        raise UsageError(f"batch is {batch}; it has to be 1 or more")
    seq = _checked_seq(name, seq, sizes.positions, phase)
    with torch.device(device), _default_dtype(dtype or torch.float32):
        model: nn.Module = GPT2(sizes) if isinstance(sizes, GPT2Config) else Llama(sizes, max_seq=_rows(seq, phase))
        new = 1 if phase == "decode" else seq
        inputs: dict[str, Any] = {"tokens": _tokens(batch, new, sizes.vocab)}
        loss = NextTokenLoss(_tokens(batch, new, sizes.vocab)) if phase == "train" else None
        if phase != "train":
            inputs["kv_cache"] = _empty_cache(sizes, batch, _rows(seq, phase), kv_dtype or dtype or torch.float32)
    model.train(phase == "train")
    return ZooStep(model, inputs, loss, sizes, name, phase, batch, seq)


def _rows(seq: int, phase: Phase) -> int:
    """Positions in use: decode adds one token to ``seq`` cached ones."""
    return seq + 1 if phase == "decode" else seq


def _checked_seq(name: str, seq: int | None, positions: int, phase: Phase) -> int:
    most = positions - 1 if phase == "decode" else positions
    if seq is None:
        return min(DEFAULT_SEQ, most)
    if seq < 1:
        raise UsageError(f"seq is {seq}; it has to be 1 or more")
    if seq > most:
        why = ", one of which the new token takes" if phase == "decode" else ""
        raise UsageError(f"seq is {seq}, but {name} has {positions} positions{why}; use {most} or less")
    return seq


def _tokens(batch: int, length: int, vocab: int) -> Tensor:
    return torch.randint(vocab, (batch, length))


def _empty_cache(sizes: GPT2Config | LlamaConfig, batch: int, length: int, dtype: torch.dtype) -> KVCache:
    """Zeros: the cached tokens are nobody's, and zeros keep every result finite."""
    shape = (batch, sizes.n_kv_heads, length, sizes.head_dim)
    return tuple((torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in range(sizes.n_layers))


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Parameters are born in ``dtype``: a later ``model.to(dtype)`` would round the rotary tables as well."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
