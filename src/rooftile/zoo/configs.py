"""The published sizes of the zoo's models. No torch here, so that a list of names costs nothing.

Sources: GPT-2, Radford et al. 2019 and OpenAI's released ``hparams.json``; Llama 3.1, "The Llama 3 Herd of Models"
(arXiv 2407.21783, Table 3) and the released ``params.json`` / ``config.json``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rooftile._names import unknown_name

__all__ = ["GPT2Config", "LlamaConfig", "RopeScaling", "config", "gpt2_config", "llama_config", "names"]


@dataclass(frozen=True, slots=True)
class GPT2Config:
    """Sizes of a GPT-2: multi-head attention, learned positions, embedding tied to the output head."""

    n_layers: int
    n_heads: int
    d_model: int
    vocab: int = 50257
    positions: int = 1024
    dropout: float = 0.1  # after the embedding, on the attention probabilities, after both residual projections
    norm_eps: float = 1e-5

    @property
    def n_kv_heads(self) -> int:
        """Key/value heads: as many as query heads."""
        return self.n_heads

    @property
    def head_dim(self) -> int:
        """Elements of one head."""
        return self.d_model // self.n_heads


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How Llama 3.1 stretches its rotary frequencies from 8192 trained positions to 131072."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes of a Llama 3.1: grouped-query attention, rotary positions, SwiGLU, a head of its own."""

    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_model: int
    d_ff: int
    vocab: int = 128256
    positions: int = 131072
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = RopeScaling()
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Elements of one head."""
        return self.d_model // self.n_heads


_PUBLISHED: dict[str, GPT2Config | LlamaConfig] = {
    "gpt2": GPT2Config(n_layers=12, n_heads=12, d_model=768),
    "gpt2-medium": GPT2Config(n_layers=24, n_heads=16, d_model=1024),
    "gpt2-large": GPT2Config(n_layers=36, n_heads=20, d_model=1280),
    "gpt2-xl": GPT2Config(n_layers=48, n_heads=25, d_model=1600),
    "llama-3.1-8b": LlamaConfig(n_layers=32, n_heads=32, n_kv_heads=8, d_model=4096, d_ff=14336),
    "llama-3.1-70b": LlamaConfig(n_layers=80, n_heads=64, n_kv_heads=8, d_model=8192, d_ff=28672),
    "llama-3.1-405b": LlamaConfig(n_layers=126, n_heads=128, n_kv_heads=8, d_model=16384, d_ff=53248),
}


def names() -> list[str]:
    """Names of the built-in models, family by family, small to large."""
    return list(_PUBLISHED)


def config(name: str) -> GPT2Config | LlamaConfig:
    """The published sizes of ``name``; UsageError with near matches for a name that is not in the zoo."""
    try:
        return _PUBLISHED[name]
    except KeyError:
        raise unknown_name("model", name, names()) from None


def gpt2_config(name: str = "gpt2", **changes: Any) -> GPT2Config:
    """A GPT-2 configuration with ``changes``, such as ``gpt2_config(n_layers=2, d_model=64, n_heads=4)``."""
    base = config(name)
    if not isinstance(base, GPT2Config):
        raise unknown_name("GPT-2 model", name, [n for n in names() if n.startswith("gpt2")])
    return replace(base, **changes)


def llama_config(name: str = "llama-3.1-8b", **changes: Any) -> LlamaConfig:
    """A Llama configuration with ``changes``, such as ``llama_config(n_layers=2, d_model=64, n_heads=4, ...)``."""
    base = config(name)
    if not isinstance(base, LlamaConfig):
        raise unknown_name("Llama model", name, [n for n in names() if n.startswith("llama")])
    return replace(base, **changes)
