"""Audits of transformers models under ``attn_implementation="rooftile"``, without data."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_models import build, padded, tokens

from rooftile import devices
from rooftile.capture import CaptureOptions, Step, Trace, capture
from rooftile.costs import trace_costs
from rooftile.ledgers.kv_cache import kv_cache

FORWARD = "rooftile.attention.default"


def run(name: str, phase: str = "train", live: bool = False, **inputs: Any) -> Trace:
    loss = (lambda output: output.logits.float().square().mean()) if phase == "train" else None
    step = Step(build(name, "rooftile"), inputs, loss, phase=phase)
    options = CaptureOptions(precision="bf16-mixed", optimizer="none", live=live)
    return capture(step, devices.load("h100-sxm"), options)


def visible(trace: Trace) -> list[tuple[Any, Any]]:
    """The keys that each layer's one block of rows reaches, and how that is known."""
    known = [dict(op.call.kwargs) for op in trace.ops if op.operator == FORWARD]
    return [(words.get("visible_keys"), words.get("visible_evidence")) for words in known]


def unknown(trace: Trace) -> set[str]:
    return {op.operator for op, cost in zip(trace.ops, trace_costs(trace), strict=True) if cost is None}


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2"])
def test_a_causal_model_needs_no_data_and_no_guess(name: str):
    trace = run(name, input_ids=tokens())
    assert unknown(trace) == set()
    assert visible(trace) == [(((0, 11),), "derived")] * 2
    assert kv_cache(trace).evidence == "derived"
    assert not any("assumed" in note for note in trace.notes)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_padding_is_data_so_a_dry_audit_assumes_and_a_live_one_looks(name: str):
    inputs = {"input_ids": tokens(), "attention_mask": padded("right")}
    dry, live = run(name, **inputs), run(name, live=True, **inputs)
    assert unknown(dry) == unknown(live) == set()
    assert {evidence for _, evidence in visible(dry)} == {"assumed"}
    assert visible(live) == [(((0, 11), (0, 7), (0, 4)), "observed")] * 2
    assert any("upper bound" in note for note in dry.notes)


def test_equal_audits_are_equal():
    inputs = {"input_ids": tokens()}
    assert run("mistral", **inputs).ops == run("mistral", **inputs).ops


def test_an_encoder_without_padding_hides_nothing():
    trace = run("bert", "prefill", input_ids=tokens())
    assert visible(trace) == [(None, None)] * 2
    assert not any("assumed" in note for note in trace.notes)
