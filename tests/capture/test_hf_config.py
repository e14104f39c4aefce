"""A Hugging Face ``config.json`` is a target: no weights, no download."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rooftile
from rooftile.errors import UsageError

LLAMA = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}  # fmt: skip
BERT = {
    "model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 128,
}  # fmt: skip


def write(folder: Path, config: dict) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder / "config.json")


def test_a_llama_configuration_has_the_products_and_parameters_of_the_zoos_model(tmp_path: Path):
    config = rooftile.zoo.llama_config(
        "llama-3.1-8b", n_layers=2, n_heads=8, n_kv_heads=2, d_model=256, d_ff=512, vocab=1000
    )
    ours = rooftile.zoo.Llama(config, max_seq=128)
    tokens = rooftile.zoo.build("gpt2", seq=128).inputs["tokens"]
    step = rooftile.Step(ours, {"tokens": tokens}, rooftile.zoo.NextTokenLoss(tokens))
    want = rooftile.audit(step, "h100-sxm", precision="bf16", ignore=["MEM"])
    got = rooftile.audit(write(tmp_path, LLAMA), "h100-sxm", seq=128, precision="bf16", ignore=["MEM"])
    assert got.params.count == want.params.count
    assert got.flops.matmul == want.flops.matmul
    assert got.kv_cache.bytes_per_token == want.kv_cache.bytes_per_token == 2 * 2 * 2 * 32 * 2
    assert [d["kernel"] for d in got.trace.settings["attention_decision"]] == ["flash"]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_inference_keeps_a_kv_cache_and_can_be_repeated(phase: str, tmp_path: Path):
    target = write(tmp_path, LLAMA)
    first, second = (
        rooftile.audit(target, "h100-sxm", phase=phase, seq=100, batch=3, precision="bf16") for _ in range(2)
    )
    assert first.kv_cache.bytes_per_token == 512
    assert first.flops.total == second.flops.total
    last = len(first.trace.ops) - 1
    cache = sum(s.nbytes for s in first.trace.storages if s.role == "kv_cache" and s.died in (None, last))
    assert cache >= 3 * 100 * 512


def test_a_masked_language_model_has_no_kv_cache(tmp_path: Path):
    report = rooftile.audit(write(tmp_path, BERT), "h100-sxm", seq=128, precision="bf16")
    assert report.kv_cache.bytes_per_token is None
    with pytest.raises(UsageError, match="no decode phase"):
        rooftile.audit(write(tmp_path, BERT), "h100-sxm", phase="decode")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 4}, "has no 'model_type'"),
        ({"model_type": "no-such-model"}, "transformers can't read"),
        ({"model_type": "vit"}, "neither a causal nor a masked language model"),
        ([], "has no 'model_type'"),
    ],
)
def test_a_file_that_is_no_model_configuration_is_one_sentence(config, message: str, tmp_path: Path):
    with pytest.raises(UsageError, match=message) as caught:
        rooftile.audit(write(tmp_path, config), "h100-sxm")
    assert "\n" not in str(caught.value)


def test_a_missing_or_broken_file_and_too_long_a_sequence_are_one_sentence(tmp_path: Path):
    with pytest.raises(UsageError, match="there is no file"):
        rooftile.audit(str(tmp_path / "none.json"), "h100-sxm")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(UsageError, match="is not a JSON file"):
        rooftile.audit(str(tmp_path / "broken.json"), "h100-sxm")
    with pytest.raises(UsageError, match="2048 positions; use 2048 or less"):
        rooftile.audit(write(tmp_path, LLAMA), "h100-sxm", seq=4096)
