"""Llama 3.1 (arXiv 2407.21783), to be read top to bottom.

B batch, S sequence, C d_model, H heads, D head_dim, V vocabulary: the papers' symbols are the code's names.
"""
# ruff: noqa: N806

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rooftile.zoo.configs import LlamaConfig
from rooftile.zoo.kv_cache import KVCache, LayerCache, first_position, store

__all__ = ["Llama", "rope_frequencies", "rotate"]


def rope_frequencies(config: LlamaConfig) -> Tensor:
    """Rotation per position of each of the D/2 pairs, in radians, fp32 (D/2,).

    Llama 3.1 divides the slow frequencies (wavelength above original_positions / low_freq_factor) by ``factor``,
    keeps the fast ones, and blends in between (the released ``apply_scaling``).
    """
    D = config.head_dim
    # On the CPU whatever the surrounding default device is: on meta there would be no values to scale.
    freqs = config.rope_theta ** -(torch.arange(0, D, 2, dtype=torch.float64, device="cpu") / D)
    if config.rope_scaling is not None:
        s = config.rope_scaling
        wavelength = 2 * math.pi / freqs
        keep = (s.original_positions / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
        keep = keep.clamp(0, 1)
        freqs = keep * freqs + (1 - keep) * freqs / s.factor
    return freqs.float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pair (i, i + D/2) of ``x`` (B, H, S, D) by its position's angle; ``cos``, ``sin`` are (S, D/2)."""
    # Cast first: an fp32 table would promote a 16-bit q or k, and attention with it, to fp32.
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions and no biases."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        H, Hkv, D, C = config.n_heads, config.n_kv_heads, config.head_dim, config.d_model
        self.wq = nn.Linear(C, H * D, bias=False)
        self.wk = nn.Linear(C, Hkv * D, bias=False)
        self.wv = nn.Linear(C, Hkv * D, bias=False)
        self.wo = nn.Linear(H * D, C, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache | None = None) -> Tensor:
        """(B, S, C) -> (B, S, C)."""
        B, S, _ = x.shape
        H, Hkv, D = self.config.n_heads, self.config.n_kv_heads, self.config.head_dim
        q = self.wq(x).view(B, S, H, D).transpose(1, 2)  # (B, H, S, D)
        k = self.wk(x).view(B, S, Hkv, D).transpose(1, 2)  # (B, Hkv, S, D)
        v = self.wv(x).view(B, S, Hkv, D).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = store(cache, k, v)
        causal = q.shape[2] == k.shape[2]  # one new token sees the whole cache
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        return self.wo(y.transpose(1, 2).reshape(B, S, H * D))


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.w2 = nn.Linear(config.d_ff, config.d_model, bias=False)
        self.w3 = nn.Linear(config.d_model, config.d_ff, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, C) -> (B, S, C)."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Pre-norm residual block."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache | None = None) -> Tensor:
        """(B, S, C) -> (B, S, C)."""
        x = x + self.attention(self.attention_norm(x), cos, sin, cache)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Token embedding, blocks, a last norm and an untied head.

    ``max_seq``: positions that the rotary tables hold, by default all the model's.
    """

    rope_cos: Tensor  # (max_seq, D/2), fp32
    rope_sin: Tensor

    def __init__(self, config: LlamaConfig, max_seq: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.output = nn.Linear(config.d_model, config.vocab, bias=False)
        device = self.output.weight.device
        positions = torch.arange(max_seq or config.positions, device=device, dtype=torch.float32)
        angles = positions[:, None] * rope_frequencies(config).to(device)
        self.register_buffer("rope_cos", angles.cos(), persistent=False)
        self.register_buffer("rope_sin", angles.sin(), persistent=False)
        if not self.output.weight.is_meta:
            self.init_weights()

    def init_weights(self) -> None:
        """N(0, 0.02), the released configuration's ``initializer_range``; norms stay 1."""
        for name, parameter in self.named_parameters():
            if "norm" not in name:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, kv_cache: KVCache | None = None) -> Tensor | tuple[Tensor, KVCache]:
        """``tokens`` (B, S) int64 -> logits (B, S, V); with a cache: (logits (B, 1, V) of the last token, cache)."""
        first = first_position(tokens, kv_cache)
        last = first + tokens.shape[1]
        cos, sin = self.rope_cos[first:last], self.rope_sin[first:last]
        x = self.tok_embeddings(tokens)  # (B, S, C)
        for i, block in enumerate(self.blocks):
            x = block(x, cos, sin) if kv_cache is None else block(x, cos, sin, kv_cache[i])
        if kv_cache is None:
            return self.output(self.norm(x))
        return self.output(self.norm(x[:, -1:])), kv_cache
