"""Attention found by storage flow, on traces written by hand and on captured models."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from ledger_traces import meta, op
from torch import Tensor, nn

from rooftile import devices
from rooftile.capture import CaptureOptions, Step, capture
from rooftile.capture.trace import Trace
from rooftile.costs import trace_costs
from rooftile.ledgers.materialized import MaterializedAttention, materialized_attention

B, H, L, D = 2, 3, 24, 16


class Attention(nn.Module):
    """Attention over (B, L, H D), written in the way that ``style`` names."""

    def __init__(self, style: str, heads: int = H, dim: int = D) -> None:
        super().__init__()
        self.style, self.heads = style, heads
        self.qkv = nn.Linear(heads * dim, 3 * heads * dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        rows = x.shape[1]
        if self.style == "sdpa":
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.style == "einsum":
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[-1])
            out = torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)
        elif self.style == "fp32 softmax, additive mask":
            mask = torch.full((rows, rows), float("-inf"), device=x.device).triu(1)
            scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2) + mask
            out = F.softmax(scores.float(), dim=-1).to(v.dtype) @ v
        elif self.style == "soft cap":
            scores = 30 * torch.tanh(q @ k.transpose(-1, -2) / 30)
            out = scores.softmax(-1) @ v
        else:
            scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
            hidden = torch.ones(rows, rows, dtype=torch.bool, device=x.device).triu(1)
            out = F.dropout(scores.masked_fill(hidden, float("-inf")).softmax(-1), 0.1) @ v
        return out.transpose(1, 2).flatten(2)


def captured(model: nn.Module, **options: object) -> Trace:
    step = Step(model, (torch.randn(B, L, H * D),), loss=lambda out: out.float().square().mean(), batch=B, seq=L)
    return capture(step, devices.load("h100-sxm"), CaptureOptions(**options))  # type: ignore[arg-type]


def found(trace: Trace) -> tuple[MaterializedAttention, ...]:
    return materialized_attention(trace, trace_costs(trace))


@pytest.mark.parametrize("style", ["bool mask, dropout", "einsum", "fp32 softmax, additive mask", "soft cap"])
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_attention_written_by_hand_is_found_however_it_is_written(style: str, precision: str) -> None:
    (attention,) = found(captured(nn.Sequential(Attention(style)), precision=precision))
    assert (attention.module, attention.rows, attention.columns) == ("0", L, L)
    assert (attention.row_mask is not None) == (style in ("bool mask, dropout", "fp32 softmax, additive mask"))


def test_sdpa_is_found_only_on_the_materialised_path() -> None:
    model = nn.Sequential(Attention("sdpa"))
    assert found(captured(model, attention="tiled")) == ()
    assert len(found(captured(model, attention="materialized"))) == 1


def test_score_storages_are_those_of_the_scores_size_and_no_others() -> None:
    trace = captured(nn.Sequential(Attention("bool mask, dropout")), precision="fp32")
    (attention,) = found(trace)
    # D, H D and 3 H D differ from L, so a storage of B H L L elements is a score or its gradient, in fp32 or as a mask.
    sizes = {B * H * L * L * itemsize for itemsize in (1, 4)}
    assert attention.scores == {s.id for s in trace.storages if s.nbytes in sizes}


def test_bytes_moved_are_the_passes_counted_by_hand() -> None:
    """bmm writes S; scale, softmax read and write; bmm reads P: six passes forward of one score matrix in fp32."""
    scores = meta(B * H, L, L)
    q, k, v = meta(B * H, L, D), meta(B * H, D, L), meta(B * H, L, D)
    trace = Trace(
        (
            op("aten.bmm.default", [(q, 0), (k, 1)], [(scores, 3)], module="a"),
            op("aten.div.Tensor", [(scores, 3)], [(scores, 4)], module="a", rest=(4.0,)),
            op("aten._softmax.default", [(scores, 4)], [(scores, 5)], module="a", rest=(-1, False)),
            op("aten.bmm.default", [(scores, 5), (v, 2)], [(v, 6)], module="a"),
        ),
        (),
    )
    (attention,) = found(trace)
    assert attention.scores == {3, 4, 5}
    assert attention.moved_bytes == 6 * B * H * L * L * 4
    assert attention.row_mask is None


def test_a_head_as_wide_as_the_sequence_is_long_does_not_make_q_a_score() -> None:
    model = nn.Sequential(Attention("einsum", heads=2, dim=L))
    step = Step(model, (torch.randn(B, L, 2 * L),), loss=lambda out: out.float().square().mean(), batch=B, seq=L)
    trace = capture(step, devices.load("h100-sxm"), CaptureOptions(precision="fp32"))
    (attention,) = found(trace)
    operands = {sid for o in trace.ops if o.operator == "aten.mm.default" for sid in (*o.inputs, *o.outputs)}
    assert not attention.scores & operands


def test_a_router_is_no_attention() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(32, 4), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            weight = self.gate(x).softmax(-1).amax(-1, keepdim=True)
            return self.up(x) * weight

    step = Step(Router(), (torch.randn(8, 32),), loss=lambda out: out.square().mean())
    assert found(capture(step, devices.load("h100-sxm"), CaptureOptions(precision="fp32"))) == ()
