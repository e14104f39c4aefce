"""A model that calls ``rooftile.attention``: its intervals are known without data where positions decide them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rooftile
from rooftile import attention, masks
from rooftile.capture import CaptureOptions, Step, Trace, capture
from rooftile.capture.trace_file import load_trace, save_trace
from rooftile.costs import trace_costs
from rooftile.devices import Device
from rooftile.errors import CaptureError
from rooftile.ledgers.kv_cache import kv_cache

FORWARD, BACKWARD = "rooftile.attention.default", "rooftile.attention_backward.default"
LENGTH = 300


class Attends(nn.Module):
    """A projection into 4 query heads and 2 kv heads, and what ``attend`` makes of them."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor, Any], Tensor], mask: Any = None) -> None:
        super().__init__()
        self.proj = nn.Linear(32, 128)
        self.attend, self.mask = attend, mask

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.proj(x).view(*x.shape[:2], 8, 16).transpose(1, 2).split([4, 2, 2], 1)
        return self.attend(q, k, v, self.mask).transpose(1, 2).flatten(2)


def exact(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    return attention(q, k, v, mask=mask)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=mask is not None, enable_gqa=True)


def run(model: nn.Module, device: Device, phase: str = "train", **options: Any) -> Trace:
    torch.manual_seed(0)
    step = Step(model, (torch.randn(2, LENGTH, 32),), (lambda y: y.sum()) if phase == "train" else None, phase=phase)
    return capture(step, device, CaptureOptions(**{"precision": "bf16-mixed", "optimizer": "none", **options}))


def attentions(trace: Trace) -> list[tuple[str, Any, str]]:
    """Operator, cost and how its visible keys are known, of every attention call."""
    known = [dict(op.call.kwargs).get("visible_evidence", "") for op in trace.ops]
    return [
        (op.operator, cost, evidence)
        for op, cost, evidence in zip(trace.ops, trace_costs(trace), known, strict=True)
        if "attention" in op.operator
    ]


@pytest.mark.parametrize("live", [False, True])
def test_forward_and_backward_cost_what_torchs_causal_kernel_costs(live: bool, h100: Device):
    own = attentions(run(Attends(exact, masks.causal()), h100, live=live))
    torchs = attentions(run(Attends(sdpa, True), h100, live=live))
    assert [name for name, *_ in own] == [FORWARD, BACKWARD]
    for (_, mine, evidence), (_, theirs, _) in zip(own, torchs, strict=True):
        assert evidence == ("observed" if live else "derived")
        assert (mine.flops, mine.dense_flops, mine.roof_dtype) == (theirs.flops, theirs.dense_flops, theirs.roof_dtype)


@pytest.mark.parametrize("live", [False, True])
def test_every_operator_of_the_step_has_a_cost(live: bool, h100: Device):
    mask = masks.causal() & masks.padding([LENGTH, 100]) & masks.documents(torch.arange(LENGTH) // 40)
    trace = run(Attends(exact, mask), h100, live=live)
    assert {op.operator for op, cost in zip(trace.ops, trace_costs(trace), strict=True) if cost is None} == set()


@pytest.mark.parametrize(
    "mask", [masks.padding([LENGTH, 100]), masks.documents(torch.arange(LENGTH) // 150)], ids=["padding", "documents"]
)
def test_what_data_hide_counts_in_full_without_data_and_says_so(mask: masks.Mask, h100: Device):
    dry, live = (run(Attends(exact, mask), h100, live=live) for live in (False, True))
    for (_, assumed, word), (_, observed, other_word) in zip(attentions(dry), attentions(live), strict=True):
        assert (word, other_word) == ("assumed", "observed")
        assert assumed.flops == assumed.dense_flops
        assert observed.flops < assumed.flops
    assert any("upper bound (assumed)" in note for note in dry.notes)
    assert not live.notes


def test_positions_still_count_where_data_hide_more(h100: Device):
    both = attentions(run(Attends(exact, masks.causal() & masks.padding([LENGTH, 100])), h100))
    alone = attentions(run(Attends(exact, masks.causal()), h100))
    assert [cost.flops for _, cost, _ in both] == [cost.flops for _, cost, _ in alone]
    assert {word for *_, word in both} == {"assumed"}


def test_without_a_mask_nothing_is_assumed(h100: Device):
    trace = run(Attends(exact), h100)
    assert {(cost.flops == cost.dense_flops, word) for _, cost, word in attentions(trace)} == {(True, "")}
    assert not trace.notes


def test_under_autocast_it_reads_sixteen_bits_and_keeps_fp32_statistics(h100: Device):
    trace = run(Attends(exact, masks.causal()), h100)
    forward = next(op for op in trace.ops if op.operator == FORWARD)
    assert {meta.dtype for meta in forward.call.inputs[:3]} == {"bfloat16"}
    assert [meta.dtype for meta in forward.call.outputs] == ["bfloat16", "float32"]


def test_a_recomputed_call_is_filed_as_recomputation(h100: Device):
    model = nn.ModuleList([Attends(exact, masks.causal()) for _ in range(2)])

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.back = model, nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = self.back(block(x))
            return x

    trace = run(Blocks(), h100, checkpoint="blocks")
    phases = [op.phase for op in trace.ops if op.operator == FORWARD]
    assert phases == ["forward"] * 2 + ["recompute"] * 2
    assert {dict(op.call.kwargs)["visible_evidence"] for op in trace.ops if op.operator in (FORWARD, BACKWARD)} == {
        "derived"
    }


def test_the_decision_names_rooftile_and_nothing_is_materialised(h100: Device):
    report = rooftile.audit(
        Step(Attends(exact, masks.causal()), (torch.randn(2, LENGTH, 32),), lambda y: y.sum()), device="h100-sxm"
    )
    assert [(d.kernel, d.count) for d in report.target.attention_decision] == [("rooftile", 1)]
    assert "KER001" not in [finding.code for finding in report.findings]
    assert report.coverage.ops == 1.0


@pytest.mark.parametrize(
    ("mask", "bytes_per_token"), [(masks.causal(), 2 * 2 * 16 * 2), (masks.prefix(7), 128), (None, None)]
)
def test_the_kv_cache_is_that_of_the_kv_heads_where_the_mask_is_causal(
    mask: Any, bytes_per_token: int | None, h100: Device
):
    assert kv_cache(run(Attends(exact, mask), h100)).bytes_per_token == bytes_per_token


class Cached(nn.Module):
    """A projection into 4 query heads and 2 kv heads of 16, kept in a cache that already holds ``held`` tokens."""

    def __init__(self, paged: bool, held: int) -> None:
        super().__init__()
        self.proj = nn.Linear(32, 128)
        make = rooftile.KVCache.paged if paged else rooftile.KVCache
        self.cache = make(2, 2, *((200, 8) if paged else (1500,)), 16, dtype=torch.float32)  # type: ignore[operator]
        self.cache.append(*[torch.zeros(2, 2, held, 16)] * 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.proj(x).view(*x.shape[:2], 8, 16).transpose(1, 2).split([4, 2, 2], 1)
        self.cache.append(k, v)
        return self.cache.attend(q, mask=masks.causal(align="bottom-right"))


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(("rows", "held", "scores"), [(1, 769, 770), (300, 0, 128 * 128 + 128 * 256 + 44 * 300)])
def test_a_cache_costs_the_keys_that_it_holds_with_and_without_data(
    rows: int, held: int, scores: int, paged: bool, live: bool, h100: Device
):
    step = Step(Cached(paged, held), (torch.randn(2, rows, 32),), phase="decode" if rows == 1 else "prefill")
    trace = capture(step, h100, CaptureOptions(precision="fp32", live=live))
    ((_, cost, evidence),) = [found for found in attentions(trace) if "rooftile" in found[0]]
    assert cost.matmul_flops == 2 * 4 * scores * 2 * (16 + 16)
    assert evidence == ("observed" if live else "derived")
    kept, row = 2 * 2 * (held + rows) * 32 * 4, 2 * 4 * rows * (2 * 16 + 1) * 4
    assert kept + row <= cost.bytes_read + cost.bytes_written < (kept + row) * 1.05  # and intervals, a table
    found = kv_cache(trace)
    assert (found.bytes_per_token, found.batch, found.tokens) == (2 * 2 * 16 * 4, 2, held + rows)
    assert [d["count"] for d in trace.settings["attention_decision"]] == [1]


def test_packed_sequences_count_as_one_where_the_offsets_are_data(h100: Device):
    def packed(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        cu = torch.tensor([0, 128, 300], dtype=torch.int32, device=q.device)
        operands = (x.flatten(0, 1) if x.dim() == 3 else x[0].transpose(0, 1) for x in (q, k, v))
        return rooftile.attention_varlen(*operands, cu, cu, mask=mask).transpose(0, 1)[None]

    step = Step(Attends(packed, masks.causal()), (torch.randn(1, LENGTH, 32),), phase="prefill")
    dry, live = (capture(step, h100, CaptureOptions(precision="fp32", live=live)) for live in (False, True))
    (one,), (two,) = attentions(dry), attentions(live)
    assert (one[2], two[2]) == ("assumed", "observed")
    assert one[1].matmul_flops == 2 * 4 * (128 * 128 + 128 * 256 + 44 * 300) * (16 + 16)
    assert two[1].matmul_flops < one[1].matmul_flops
    assert kv_cache(dry).tokens == LENGTH
    assert len(dry.notes) == 1


def test_an_option_for_torchs_attention_says_that_it_changes_nothing_here(h100: Device):
    notes = run(Attends(exact, masks.causal()), h100, attention="materialized").notes
    assert sum("--attention materialized is about torch's own attention" in note for note in notes) == 1
    assert not any("--attention" in note for note in run(Attends(exact), h100).notes)


@pytest.mark.parametrize(("precision", "itemsize"), [("bf16", 2), ("bf16-mixed", 2), ("fp32", 4)])
@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("held", ["attribute", "list"])
def test_a_cache_that_the_model_holds_is_in_the_dtype_that_attention_runs_in(
    held: str, live: bool, precision: str, itemsize: int, h100: Device
):
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(32, 32)
            cache = rooftile.KVCache(2, 2, 2 * LENGTH, 16, dtype=torch.float32)
            self.held = cache if held == "attribute" else [cache]

        def forward(self, x: Tensor) -> Tensor:
            cache = self.held if held == "attribute" else self.held[0]
            q = self.proj(x).unflatten(-1, (2, 16)).transpose(1, 2)
            cache.append(q, q)
            return cache.attend(q, mask=masks.causal(align="bottom-right"))

    model = Cached()
    trace = run(model, h100, "prefill", precision=precision, live=live)
    assert {t.dtype for op in trace.ops if "attention" in op.operator for t in op.call.inputs[:3]} == {
        {2: "bfloat16", 4: "float32"}[itemsize]
    }
    cache = model.held if held == "attribute" else model.held[0]
    assert cache.lengths.tolist() == [0, 0], "the user's own cache is left alone"


def test_a_kernel_that_the_model_names_and_the_capture_lacks_is_told_with_its_place(h100: Device):
    model = Attends(lambda q, k, v, mask: attention(q, k, v, mask=mask, kernel="sdpa", softcap=2.0))
    with pytest.raises(CaptureError, match=r"test_exact_attention_audit.py:\d+ .*UsageError.*kernel='sdpa'"):
        run(model, h100)


def test_a_saved_trace_keeps_what_is_visible(tmp_path: Path, h100: Device):
    trace = run(Attends(exact, masks.window(100)), h100)
    save_trace(trace, tmp_path / "trace.json.gz")
    assert load_trace(tmp_path / "trace.json.gz").ops == trace.ops


def test_two_captures_are_the_same(h100: Device):
    model = Attends(exact, masks.window(100))
    assert run(model, h100).ops == run(model, h100).ops
