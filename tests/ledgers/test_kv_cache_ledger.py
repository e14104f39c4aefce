from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rooftile import devices
from rooftile.capture import CaptureOptions, Step, capture, load_target
from rooftile.capture.trace import Trace
from rooftile.costs import trace_costs
from rooftile.ledgers.kv_cache import KvCacheLedger, kv_cache
from rooftile.ledgers.materialized import materialized_attention


def read(trace: Trace, kv_dtype: str | None = None) -> KvCacheLedger:
    return kv_cache(trace, materialized_attention(trace, trace_costs(trace)), kv_dtype)


def captured(name: str, phase: str, **options: object) -> Trace:
    step = load_target(name, batch=2, seq=64, phase=phase)  # type: ignore[arg-type]
    return capture(step, devices.load("h100-sxm"), CaptureOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "nbytes"), [("llama-3.1-8b", 131_072), ("llama-3.1-70b", 327_680)])
def test_published_models_keep_the_published_bytes_per_token(name: str, nbytes: int) -> None:
    assert read(captured(name, "prefill")).bytes_per_token == nbytes


@pytest.mark.parametrize("attention", ["tiled", "materialized"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_grouped_heads_count_once_on_either_path_and_in_either_phase(phase: str, attention: str) -> None:
    cache = read(captured("llama-3.1-8b", phase, attention=attention))
    assert (cache.bytes_per_token, cache.layers, cache.heads, cache.head_dim) == (131_072, 32, 8, 128)
    assert (cache.batch, cache.tokens) == (2, 64 + (phase == "decode"))
    assert cache.total_bytes == 131_072 * cache.batch * cache.tokens


@pytest.mark.parametrize(("kv_dtype", "factor"), [("fp32", 2), ("fp16", 1), ("bf16", 1), ("fp8", 0.5), ("int8", 0.5)])
def test_the_dtype_of_the_cache_can_be_asked_for(kv_dtype: str, factor: float) -> None:
    assert read(captured("llama-3.1-8b", "prefill"), kv_dtype).bytes_per_token == 131_072 * factor


class Repeated(nn.Module):
    """Two kv heads of 16, repeated for six query heads by an expand and a copy, as models write it."""

    def __init__(self, causal: bool, repeat: str) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(96, 96), nn.Linear(96, 32), nn.Linear(96, 32)
        self.causal, self.repeat = causal, repeat

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 16)).transpose(1, 2) for p in (self.q, self.k, self.v))
        if self.repeat == "expand":
            k, v = (t[:, :, None].expand(-1, -1, 3, -1, -1).reshape(q.shape) for t in (k, v))
        else:
            k, v = (t.repeat_interleave(3, dim=1) for t in (k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2)


def repeated(causal: bool = True, repeat: str = "expand") -> Trace:
    step = Step(Repeated(causal, repeat), (torch.randn(2, 32, 96),), phase="prefill", batch=2, seq=32)
    return capture(step, devices.load("h100-sxm"), CaptureOptions())


@pytest.mark.parametrize("repeat", ["expand", "repeat_interleave"])
def test_heads_that_were_expanded_and_copied_count_as_the_fewer(repeat: str) -> None:
    cache = read(repeated(repeat=repeat))
    assert (cache.heads, cache.bytes_per_token) == (2, 2 * 2 * 16 * 2)


def test_attention_that_is_not_causal_has_no_cache_and_says_so() -> None:
    cache = read(repeated(causal=False))
    assert cache.bytes_per_token is None
    assert "causal" in cache.reason


def test_a_model_without_attention_has_no_cache_and_says_so() -> None:
    step = Step(nn.Linear(8, 8), (torch.randn(4, 8),), phase="prefill")
    cache = read(capture(step, devices.load("h100-sxm"), CaptureOptions()))
    assert (cache.bytes_per_token, cache.total_bytes) == (None, None)
    assert cache.reason == "no attention was observed"


class Masked(nn.Module):
    """SDPA with a dense mask (B, 1, L, L), made in the way that ``kind`` names."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("held", torch.ones(32, 32, dtype=torch.bool).tril() if kind == "buffer" else None)

    def mask(self, x: Tensor) -> Tensor:
        batch, rows = x.shape[0], x.shape[2]
        at = torch.arange(rows, device=x.device)
        if self.kind == "comparison":
            return (at[None, :] <= at[:, None]).expand(batch, 1, rows, rows)
        if self.kind == "triangle":
            return torch.full((rows, rows), -1e9, device=x.device, dtype=x.dtype).triu(1).expand(batch, 1, rows, rows)
        if self.kind == "buffer":
            return self.held.expand(batch, 1, rows, rows)
        padding = (at < rows - 3)[None, None, None, :].expand(batch, 1, rows, rows)
        return padding.contiguous()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=self.mask(x))


@pytest.mark.parametrize("attention", ["tiled", "materialized"])
@pytest.mark.parametrize(
    ("kind", "evidence"),
    [("comparison", "derived"), ("triangle", "derived"), ("buffer", "assumed"), ("padding", None)],
)
def test_a_dense_mask_is_causal_by_how_it_was_made(kind: str, evidence: str | None, attention: str) -> None:
    step = Step(Masked(kind), (torch.randn(2, 4, 32, 16),), phase="prefill", batch=2, seq=32)
    cache = read(capture(step, devices.load("h100-sxm"), CaptureOptions(precision="fp32", attention=attention)))
    if evidence is None:
        assert cache.bytes_per_token is None
    else:
        assert (cache.bytes_per_token, cache.evidence) == (2 * 4 * 16 * 4, evidence)
