"""Models under ``attn_implementation="rooftile"`` give what eager gives: logits, gradients, generated tokens."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import transformers
from tiny_models import build, padded, run, tokens
from torch import Tensor, nn

from rooftile.errors import UsageError
from rooftile.integrations.transformers import attention_forward, register

CAUSAL = ["llama", "mistral", "gpt2", "gemma2", "gpt-oss", "llama4"]


def agree(name: str, real: Tensor, **inputs: Any) -> None:
    """fp32 against eager: both are sums of the same numbers in another order, a few hundred roundings of 6e-8."""
    logits, gradient = run(build(name, "eager"), real, **inputs)
    own_logits, own_gradient = run(build(name, "rooftile"), real, **inputs)
    for own, eager in ((own_logits, logits), (own_gradient, gradient)):
        assert torch.isfinite(own).all()
        assert (own - eager).abs().max() <= 2e-5 * eager.abs().max()


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_model_agrees_with_eager(name: str, side: str):
    mask = padded(side)
    agree(name, mask, input_ids=tokens(), attention_mask=mask)


@pytest.mark.parametrize("side", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_an_encoder_agrees_with_eager(name: str, side: str):
    mask = padded(side)
    agree(name, mask, input_ids=tokens(), attention_mask=mask)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_an_encoder_decoder_agrees_with_eager(name: str):
    own, others = padded("right", 6), padded("left")
    agree(
        name, own, input_ids=tokens(), attention_mask=others, decoder_input_ids=tokens(3, 6), decoder_attention_mask=own
    )


@pytest.mark.parametrize("name", ["llama", "mistral", "bert", "bart"])
def test_in_fp64_a_model_agrees_with_torchs_materialised_attention(name: str):
    mask = padded("left")
    inputs = {"input_ids": tokens(), "attention_mask": mask}
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        logits, gradient = run(build(name, "sdpa", torch.float64), mask, **inputs)
    own_logits, own_gradient = run(build(name, "rooftile", torch.float64), mask, **inputs)
    assert (own_logits - logits).abs().max() <= 1e-13
    assert (own_gradient - gradient).abs().max() <= 1e-13


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", CAUSAL)
def test_a_left_padded_batch_generates_the_tokens_of_eager(name: str, cache: str):
    inputs = {"input_ids": tokens(), "attention_mask": padded("left")}
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    assert torch.equal(
        build(name, "rooftile").generate(**inputs, **options), build(name, "eager").generate(**inputs, **options)
    )


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_beams_of_an_encoder_decoder_are_those_of_eager(name: str):
    inputs = {"input_ids": tokens(), "attention_mask": padded("right")}
    options = {"max_new_tokens": 6, "num_beams": 2, "do_sample": False}
    assert torch.equal(
        build(name, "rooftile").generate(**inputs, **options), build(name, "eager").generate(**inputs, **options)
    )


def test_a_window_of_four_is_four_keys():
    """The last token's logits depend on the four last tokens of one layer, not on a fifth."""
    model = build("mistral", "rooftile", num_hidden_layers=1)
    ids = tokens(1)
    with torch.no_grad():
        last = model(input_ids=ids).logits[0, -1]
        for back, moves in ((4, True), (5, False)):
            other = ids.clone()
            other[0, -back] = 1 + ids[0, -back] % 97
            assert (not torch.equal(model(input_ids=other).logits[0, -1], last)) == moves


def test_a_sequence_of_nothing_but_padding_leaves_every_gradient_as_it_is_without_it():
    ids, mask = tokens(), padded("none")
    mask[2] = 0
    model = build("llama", "rooftile")
    _, with_it = run(model, mask, input_ids=ids, attention_mask=mask)
    _, without = run(model, mask[:2], input_ids=ids[:2], attention_mask=mask[:2])
    assert torch.isfinite(with_it).all()
    assert (with_it - without).abs().max() <= 1e-6 * without.abs().max()


def test_packed_sequences_give_what_they_give_alone():
    model = build("llama", "rooftile")
    ids = tokens(1, 9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    lengths = torch.tensor([0, 4, 9], dtype=torch.int32)
    packing = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "max_length_q": 5, "max_length_k": 5}
    with torch.no_grad():
        alone = torch.cat([model(input_ids=part).logits for part in ids.split([4, 5], 1)], 1)
        by_positions = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        by_lengths = model(input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids), **packing).logits
    assert (by_positions - alone).abs().max() <= 1e-6
    assert (by_lengths - alone).abs().max() <= 1e-6


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_a_four_dimensional_mask_of_ones_own_is_honoured_pair_by_pair(kind: str):
    pairs = torch.rand(3, 1, 11, 11, generator=torch.Generator().manual_seed(3)) < 0.6
    pairs = pairs | torch.eye(11).bool()
    least = torch.finfo(torch.float32).min
    additive = torch.zeros(3, 1, 11, 11).masked_fill(~pairs, least)
    own = build("llama", "rooftile")(input_ids=tokens(), attention_mask=pairs if kind == "bool" else additive).logits
    eager = build("llama", "eager")(input_ids=tokens(), attention_mask=additive).logits
    assert (own - eager).abs().max() <= 1e-5


def test_dropout_is_of_training_alone_and_of_torchs_generator():
    model = build("llama", "rooftile", attention_dropout=0.3)
    inputs = {"input_ids": tokens()}

    def logits(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return model(**inputs).logits.detach()

    assert torch.equal(logits(0), logits(1))
    model.train()
    assert torch.equal(logits(0), logits(0))
    assert not torch.equal(logits(0), logits(1))


def test_dropped_probabilities_keep_their_mean():
    module = nn.Module().train()
    module.is_causal = False
    q, k, v = torch.randn(2, 4, 64, 8), torch.randn(2, 4, 64, 8), torch.ones(2, 4, 64, 8)
    out, weights = attention_forward(module, q, k, v, None, dropout=0.5)
    assert weights is None
    assert out.std() > 0.05
    assert abs(out.mean() - 1) <= 5 * out[..., 0].std() / out[..., 0].numel() ** 0.5


def test_gradient_checkpointing_changes_no_gradient():
    mask = padded("left")
    plain, saved = build("llama", "rooftile"), build("llama", "rooftile")
    saved.activation_checkpointing_enable()
    inputs = {"input_ids": tokens(), "attention_mask": mask, "use_cache": False}
    assert torch.equal(run(plain.train(), mask, **inputs)[1], run(saved.train(), mask, **inputs)[1])


def test_a_step_under_autocast_is_that_of_eager_to_bf16():
    mask = padded("left")
    gradients = []
    for implementation in ("eager", "rooftile"):
        with torch.autocast("cpu", torch.bfloat16):
            gradients.append(run(build("llama", implementation), mask, input_ids=tokens(), attention_mask=mask)[1])
    eager, own = gradients
    assert (own - eager).norm() <= 0.03 * eager.norm()


def test_a_compiled_model_is_one_graph_and_gives_the_same():
    model = build("llama", "rooftile", num_hidden_layers=1)
    mask = padded("left")
    inputs = {"input_ids": tokens(), "attention_mask": mask, "use_cache": False}
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert (compiled(**inputs).logits - model(**inputs).logits)[mask.bool()].abs().max() <= 1e-6


# ---------------------------------------------------------------------------------------------------------- refusals
def call(**options: Any) -> tuple[Tensor, None]:
    module = nn.Module()
    module.is_causal = options.pop("module_is_causal", False)
    q_len = options.pop("q_len", 5)
    q, k = torch.randn(2, 4, q_len, 8), torch.randn(2, 2, 5, 8)
    return attention_forward(module, q, k, k, options.pop("mask", None), **options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"output_attentions": True}, "never writes out"),
        ({"block_indices": torch.zeros(1)}, "block_indices, which rooftile doesn't know"),
        ({"s_aux": torch.zeros(2, 4, 5, 1)}, "differ from row to row"),
        ({"s_aux": torch.zeros(4), "sinks": torch.zeros(4)}, "gives its sinks twice"),
        ({"sliding_window": 3}, "window of 3 and made no mask"),
        ({"module_is_causal": True, "q_len": 3}, "two readings"),
        ({"mask": torch.ones(2, 5).bool()}, "2 dimensions"),
        ({"mask": torch.ones(2, 1, 5, 5, dtype=torch.long)}, "torch.int64"),
        ({"cu_seq_lens_q": torch.tensor([0, 5])}, "must be given together"),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 5]), "cu_seq_lens_k": torch.tensor([0, 3, 5])}, "the same packing"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused(options: dict[str, Any], sentence: str):
    with pytest.raises(UsageError, match=sentence):
        call(**options)


def test_arguments_that_ask_for_nothing_are_taken():
    out, _ = call(use_cache=True, position_ids=torch.arange(5), output_attentions=False, block_indices=None)
    assert out.shape == (2, 5, 4, 8)


def test_a_model_that_writes_attention_out_by_itself_is_refused():
    config = transformers.BloomConfig(vocab_size=99, hidden_size=32, n_layer=1, n_head=4)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="rooftile")
    with pytest.raises(UsageError, match="BloomConfig doesn't call transformers' attention interface"):
        model(input_ids=tokens())


def test_a_transformers_without_the_mask_interface_is_refused(monkeypatch: pytest.MonkeyPatch):
    def older(batch_size: int, cache_position: Tensor, kv_length: int) -> None:
        """As it was called before."""

    with monkeypatch.context() as patch:
        patch.setattr(transformers.masking_utils, "sdpa_mask", older)
        with pytest.raises(UsageError, match="needs a newer transformers"):
            register()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers.masking_utils", None)
        with pytest.raises(UsageError, match="needs transformers with its mask interface"):
            register()


def test_register_twice_is_once():
    register()
    register()
    assert build("bert", "rooftile").config._attn_implementation == "rooftile"
