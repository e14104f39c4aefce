"""GPT-2 (Radford et al. 2019), to be read top to bottom.

B batch, S sequence, C d_model, H heads, D head_dim, V vocabulary: the papers' symbols are the code's names.
"""
# ruff: noqa: N806

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rooftile.zoo.configs import GPT2Config
from rooftile.zoo.kv_cache import KVCache, LayerCache, first_position, store

__all__ = ["GPT2"]


class CausalSelfAttention(nn.Module):
    """Multi-head attention with one projection for q, k and v, biases, and dropout on the probabilities."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.c_attn = nn.Linear(config.d_model, 3 * config.d_model)
        self.c_proj = nn.Linear(config.d_model, config.d_model)
        self.attn_dropout = config.dropout
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> Tensor:
        """(B, S, C) -> (B, S, C)."""
        B, S, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, S, self.n_heads, C // self.n_heads).transpose(1, 2) for t in (q, k, v))  # (B, H, S, D)
        if cache is not None:
            k, v = store(cache, k, v)
        y = F.scaled_dot_product_attention(
            q, k, v,
            dropout_p=self.attn_dropout if self.training else 0.0,
            is_causal=q.shape[2] == k.shape[2],  # one new token sees the whole cache
        )  # fmt: skip
        y = y.transpose(1, 2).reshape(B, S, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    """Expand four times, GELU in its tanh form, project back."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.d_model, 4 * config.d_model)
        self.c_proj = nn.Linear(4 * config.d_model, config.d_model)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, C) -> (B, S, C)."""
        x = F.gelu(self.c_fc(x), approximate="tanh")
        return self.resid_dropout(self.c_proj(x))


class Block(nn.Module):
    """Pre-norm residual block."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> Tensor:
        """(B, S, C) -> (B, S, C)."""
        x = x + self.attn(self.ln_1(x), cache)
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """Token and position embeddings, blocks, a last norm, and a head that is the token embedding itself."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab, config.d_model)
        self.wpe = nn.Embedding(config.positions, config.d_model)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.ln_f = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.d_model, config.vocab, bias=False)
        self.lm_head.weight = self.wte.weight
        if not self.wte.weight.is_meta:
            self.init_weights()

    def init_weights(self) -> None:
        """N(0, 0.02), positions N(0, 0.01), biases 0, residual projections divided by sqrt(2 layers)."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.config.n_layers))
            elif "ln_" not in name:
                nn.init.normal_(parameter, std=0.01 if name.startswith("wpe") else 0.02)

    def forward(self, tokens: Tensor, kv_cache: KVCache | None = None) -> Tensor | tuple[Tensor, KVCache]:
        """``tokens`` (B, S) int64 -> logits (B, S, V); with a cache: (logits (B, 1, V) of the last token, cache)."""
        first = first_position(tokens, kv_cache)
        positions = torch.arange(first, first + tokens.shape[1], device=tokens.device)
        x = self.drop(self.wte(tokens) + self.wpe(positions))  # (B, S, C)
        for i, block in enumerate(self.blocks):
            x = block(x) if kv_cache is None else block(x, kv_cache[i])
        if kv_cache is None:
            return self.lm_head(self.ln_f(x))
        return self.lm_head(self.ln_f(x[:, -1:])), kv_cache
