"""Generate from prompts of different lengths with a key/value cache, and check every logit against the whole forward.

    python examples/generate_with_cache.py                          # a contiguous cache, seconds
    python examples/generate_with_cache.py --page-size 16           # the same in pages
    python examples/generate_with_cache.py --prompts 5 300 64 --new-tokens 40

A small Llama of the zoo with random weights takes the prompts side by side (prefill), then one token a step each
(decode). Every layer has a ``rooftile.KVCache``: keys are appended where they stay, and attention reads them there.
At the end each sequence goes through the model's own forward pass alone, without a cache, and the largest difference
between the two sets of logits is printed. It ends with an error when that is more than rounding.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from rooftile import KVCache, masks, zoo
from rooftile.zoo.llama import Attention, Block, Llama, rotate

#: fp32 rounding through four layers leaves differences below 1e-6 in logits of about 1.
TOLERANCE = 1e-5
CAUSAL = masks.causal(align="bottom-right")


def caches_for(model: Llama, batch: int, capacity: int, page_size: int | None) -> list[KVCache]:
    """One cache a layer."""
    c, dtype = model.config, model.output.weight.dtype
    if page_size is None:
        return [KVCache(batch, c.n_kv_heads, capacity, c.head_dim, dtype=dtype) for _ in range(c.n_layers)]
    pages = batch * -(-capacity // page_size)
    return [KVCache.paged(batch, c.n_kv_heads, pages, page_size, c.head_dim, dtype=dtype) for _ in range(c.n_layers)]


def attend(layer: Attention, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache, lengths: Sequence[int]) -> Tensor:
    """(B, S, C) -> (B, S, C): sequence b has ``lengths[b]`` new tokens, which see each other and the cache."""
    c = layer.config
    q, k, v = (
        w(x).unflatten(-1, (heads, c.head_dim)).transpose(1, 2)  # (B, heads, S, D)
        for w, heads in ((layer.wq, c.n_heads), (layer.wk, c.n_kv_heads), (layer.wv, c.n_kv_heads))
    )
    cache.append(rotate(k, cos, sin), v, lengths)
    y = cast(Tensor, cache.attend(rotate(q, cos, sin), lengths=lengths, mask=CAUSAL))
    return layer.wo(y.transpose(1, 2).flatten(2))


def forward(model: Llama, tokens: Tensor, lengths: Sequence[int], caches: Sequence[KVCache]) -> Tensor:
    """Logits (B, S, V) of ``tokens`` (B, S), of which sequence b has the first ``lengths[b]``; the caches grow."""
    positions = caches[0].positions[:, None] + torch.arange(tokens.shape[1])  # (B, S): each sequence has its own
    cos, sin = (table[positions].unsqueeze(1) for table in (model.rope_cos, model.rope_sin))  # (B, 1, S, D/2)
    x = model.tok_embeddings(tokens)
    for module, cache in zip(model.blocks, caches, strict=True):
        block = cast(Block, module)
        x = x + attend(block.attention, block.attention_norm(x), cos, sin, cache, lengths)
        x = x + block.feed_forward(block.ffn_norm(x))
    return model.output(model.norm(x))


def generate(
    model: Llama, prompts: Sequence[Tensor], new_tokens: int, caches: Sequence[KVCache]
) -> list[tuple[Tensor, Tensor]]:
    """Greedy continuation: of each prompt all tokens (S,) and the logits (S, V) that the cached passes gave."""
    lengths = [len(prompt) for prompt in prompts]
    tokens = torch.nn.utils.rnn.pad_sequence(list(prompts), batch_first=True)
    logits = forward(model, tokens, lengths, caches)
    sequences = list(prompts)
    seen = [logits[b, :n] for b, n in enumerate(lengths)]
    for _ in range(new_tokens):
        chosen = torch.stack([rows[-1].argmax() for rows in seen])
        logits = forward(model, chosen[:, None], [1] * len(prompts), caches)
        sequences = [torch.cat([old, token[None]]) for old, token in zip(sequences, chosen, strict=True)]
        seen = [torch.cat([old, row]) for old, row in zip(seen, logits, strict=True)]
    return list(zip(sequences, seen, strict=True))


def main(arguments: Sequence[str] | None = None) -> float:
    """Run it; the largest difference between cached and whole logits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, nargs="+", default=[3, 40, 17], help="tokens of each prompt")
    parser.add_argument("--new-tokens", type=int, default=20)
    parser.add_argument("--page-size", type=int, help="keys a page; without it the cache is contiguous")
    options = parser.parse_args(arguments)
    if min(*options.prompts, options.new_tokens, options.page_size or 1) < 1 or options.page_size == 0:
        parser.error("--prompts, --new-tokens and --page-size: give whole numbers, 1 or more")

    torch.manual_seed(0)
    config = zoo.llama_config(n_layers=4, n_heads=8, n_kv_heads=2, d_model=128, d_ff=256, vocab=512)
    total = max(options.prompts) + options.new_tokens
    model = zoo.Llama(config, max_seq=total).eval()
    prompts = [torch.randint(config.vocab, (n,)) for n in options.prompts]
    caches = caches_for(model, len(prompts), total, options.page_size)
    with torch.no_grad():
        generated = generate(model, prompts, options.new_tokens, caches)
        differences = [float((model(tokens[None])[0] - logits).abs().max()) for tokens, logits in generated]

    print(f"first of {config.n_layers} layers: {caches[0]}")
    for prompt, (tokens, _), difference in zip(prompts, generated, differences, strict=True):
        continuation = " ".join(str(int(token)) for token in tokens[len(prompt) :][:8])
        print(
            f"prompt of {len(prompt):>4} tokens -> {continuation} ...   largest difference of a logit {difference:.1e}"
        )
    if max(differences) > TOLERANCE:
        raise SystemExit(
            f"a cached logit differs by {max(differences):.1e} from the whole forward's, above {TOLERANCE}"
        )
    return max(differences)


if __name__ == "__main__":
    main()
