"""transformers models of two layers with random weights, and the same model under two attention implementations."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from rooftile.integrations.transformers import register

transformers.logging.set_verbosity_error()
register()

_SIZES = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
          "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0}  # fmt: skip
_ENDS = {"bos_token_id": 1, "eos_token_id": 98}
_DECODER = {**_SIZES, **_ENDS, "num_key_value_heads": 2}
_SEQ2SEQ = {"vocab_size": 99, "d_model": 32, "pad_token_id": 0, "eos_token_id": 98, "decoder_start_token_id": 0}

CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**_DECODER),
    "mistral": lambda: transformers.MistralConfig(**_DECODER, sliding_window=4),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64, pad_token_id=0, **_ENDS
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **_DECODER, head_dim=8, sliding_window=4, query_pre_attn_scalar=8, attn_logit_softcapping=2.0
    ),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **_DECODER, head_dim=8, sliding_window=4, num_local_experts=2, num_experts_per_tok=1
    ),
    "llama4": lambda: transformers.Llama4TextConfig(
        **_DECODER, head_dim=8, attention_chunk_size=5, num_local_experts=2, intermediate_size_mlp=32
    ),
    "bert": lambda: transformers.BertConfig(**_SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    "modernbert": lambda: transformers.ModernBertConfig(
        **_SIZES, local_attention=6, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2, **_ENDS
    ),
    "t5": lambda: transformers.T5Config(**_SEQ2SEQ, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0),
    "bart": lambda: transformers.BartConfig(
        **_SEQ2SEQ, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, bos_token_id=1, dropout=0.0,
    ),
}  # fmt: skip

_CLASSES = {"bert": AutoModelForMaskedLM, "modernbert": AutoModelForMaskedLM, "t5": AutoModelForSeq2SeqLM,
            "bart": AutoModelForSeq2SeqLM}  # fmt: skip


def build(name: str, implementation: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """The model by that name, the same weights for every implementation."""
    config = copy.deepcopy(CONFIGS[name]())
    config.update(changes)
    torch.manual_seed(0)
    model = _CLASSES.get(name, AutoModelForCausalLM).from_config(config, attn_implementation=implementation)
    for parameter in model.parameters():
        if parameter.dim() == 1 and parameter.numel() == 4:  # sinks start at 0
            parameter.data.uniform_(-1, 1)
    return model.to(dtype).eval()


def tokens(batch: int = 3, length: int = 11) -> Tensor:
    """Ids without special tokens."""
    return torch.randint(2, 98, (batch, length), generator=torch.Generator().manual_seed(1))


def padded(side: str, length: int = 11) -> Tensor:
    """An attention mask for three sequences: none of the first is padding, 4 and 7 tokens of the others are."""
    mask = torch.ones(3, length, dtype=torch.long)
    if side == "left":
        mask[1, :4], mask[2, :7] = 0, 0
    elif side == "right":
        mask[1, -4:], mask[2, -7:] = 0, 0
    elif side == "holes":
        mask[1, 2:5], mask[2, ::2] = 0, 0
    return mask


def run(model: Any, real: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
    """Logits where ``real``, and the gradient of their squares in one vector."""
    model.zero_grad()
    logits = model(**inputs).logits[real.bool()]
    logits.double().square().mean().backward()
    return logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
