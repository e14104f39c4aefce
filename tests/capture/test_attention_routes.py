"""Every route to scaled-dot-product attention is caught and becomes what the target device would run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rooftile import devices
from rooftile.capture import CaptureOptions, Step, Trace, capture
from rooftile.devices import Device

FORWARD, BACKWARD = "rooftile.tiled_attention.default", "rooftile.tiled_attention_backward.default"


class Routed(nn.Module):
    """A projection and then attention by one route."""

    def __init__(self, route: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.proj = nn.Linear(16, 48)
        self.route = route

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.reshape(2, -1, 2, 8).transpose(1, 2) for t in self.proj(x).chunk(3, -1))
        return self.route(q, k, v)


def run(model: nn.Module, device: Device, phase: str = "train", **options: object) -> Trace:
    step = Step(model, (torch.randn(2, 8, 16),), (lambda y: y.sum()) if phase == "train" else None, phase=phase)
    return capture(step, device, CaptureOptions(**{"precision": "bf16", "optimizer": "none", **options}))


def count(trace: Trace, operator: str, phase: str | None = None) -> int:
    return sum(op.operator == operator and phase in (None, op.phase) for op in trace.ops)


def inference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.inference_mode():
        return F.scaled_dot_product_attention(q, k, v)


ROUTES = {
    "functional": F.scaled_dot_product_attention,
    "torch._C._nn": torch._C._nn.scaled_dot_product_attention,
    "torch.ops.aten": torch.ops.aten.scaled_dot_product_attention,
    "aten overload": torch.ops.aten.scaled_dot_product_attention.default,
}


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_a_route_is_one_operation_forward_and_one_backward(route: str, live: bool, h100: Device):
    trace = run(Routed(ROUTES[route]), h100, live=live)
    assert (count(trace, FORWARD), count(trace, BACKWARD)) == (1, 1)


@pytest.mark.parametrize("live", [False, True])
def test_inference_mode_inside_the_model_is_caught(live: bool, h100: Device):
    assert count(run(Routed(inference), h100, phase="prefill", live=live), FORWARD) == 1


def test_recomputation_inside_backward_is_caught_and_named(h100: Device):
    def recomputed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(lambda a, b, c: F.scaled_dot_product_attention(a, b, c).sin(), q, k, v, use_reentrant=False)

    trace = run(Routed(recomputed), h100)
    assert count(trace, FORWARD, "forward") == 1
    assert count(trace, FORWARD, "recompute") == 1
    assert count(trace, BACKWARD, "backward") == 1


@pytest.mark.parametrize("phase", ["train", "prefill"])
@pytest.mark.parametrize("live", [False, True])
def test_multihead_attention_and_encoder_layers_are_caught(phase: str, live: bool, h100: Device):
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    trace = run(encoder, h100, phase=phase, live=live)
    assert count(trace, FORWARD) == 2
    assert count(trace, BACKWARD) == (2 if phase == "train" else 0)


def test_the_override_leaves_torch_as_it_was(h100: Device):
    q = torch.randn(1, 2, 4, 8)
    before = F.scaled_dot_product_attention(q, q, q)
    run(Routed(F.scaled_dot_product_attention), h100)
    assert torch.equal(F.scaled_dot_product_attention(q, q, q), before)
    assert torch.backends.mha.get_fastpath_enabled()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert F.linear(torch.randn(2, 4), torch.randn(3, 4)).dtype == torch.bfloat16
        assert torch.softmax(torch.randn(2, 4, dtype=torch.bfloat16), -1).dtype == torch.bfloat16


def test_a_failing_model_leaves_torch_as_it_was(h100: Device):
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("broken")

    with pytest.raises(Exception, match="broken"):
        run(Broken(), h100, phase="prefill")
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    assert "rooftile" not in str(F.scaled_dot_product_attention(q, q, q).grad_fn).lower()
    assert not torch.is_autocast_enabled("cpu")


def test_materialised_attention_has_its_score_matrices_among_the_storages_and_tiled_has_not(h100: Device):
    def score_bytes(attention: str) -> list[int]:
        step = Step(Routed(F.scaled_dot_product_attention), (torch.randn(2, 12, 16),), lambda y: y.sum())
        trace = capture(step, h100, CaptureOptions(attention=attention))
        return [s.nbytes for s in trace.storages if s.shape[-2:] == (12, 12)]

    assert not score_bytes("tiled")
    assert len(score_bytes("materialized")) >= 2


def reason(trace: Trace) -> str:
    (decision,) = trace.settings["attention_decision"]
    return f"{decision['kernel']}: {decision['reason']}"


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(8, 8, dtype=torch.bool, device=q.device).tril())


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)


def grouped_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.zeros(8, 8, dtype=q.dtype, device=q.device)
    return F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], attn_mask=mask, enable_gqa=True)


@pytest.mark.parametrize(
    ("route", "device", "precision", "expected"),
    [
        (F.scaled_dot_product_attention, "h100-sxm", "bf16", "flash: "),
        (F.scaled_dot_product_attention, "h100-sxm", "fp32", "memory-efficient: .*flash takes fp16 and bf16"),
        (F.scaled_dot_product_attention, "v100-sxm2-32gb", "fp16", "memory-efficient: .*capability 8.0"),
        (masked, "h100-sxm", "bf16", "memory-efficient: .*no attn_mask"),
        (grouped, "h100-sxm", "bf16", "flash: "),
        (grouped_mask, "h100-sxm", "bf16", "math: .*no attn_mask.*no grouped heads"),
        (F.scaled_dot_product_attention, "tpu-v4", "bf16", "math: .*no tiled kernel on tpu"),
        (F.scaled_dot_product_attention, "mi300x", "bf16", "flash: "),
    ],
)
def test_the_decision_table_gives_the_kernel_and_the_reason(route, device: str, precision: str, expected: str):
    import re

    trace = run(Routed(route), devices.load(device), precision=precision)
    assert re.match(expected, reason(trace)), reason(trace)
    materialized = trace.settings["attention_decision"][0]["materialized"]
    assert count(trace, FORWARD) == (0 if materialized else 1)


@pytest.mark.parametrize(
    "kwargs", [{}, {"is_causal": True}, {"attn_mask": "bool"}, {"attn_mask": "bias"}, {"scale": 0.3}]
)
def test_live_attention_and_its_gradients_are_torchs(kwargs: dict, h100: Device):
    """The stand-in computes: outputs and gradients against torch's own materialised path in fp64."""
    kwargs = dict(kwargs)
    if kwargs.get("attn_mask") == "bool":
        kwargs["attn_mask"] = torch.ones(8, 8, dtype=torch.bool).tril(1)
    elif kwargs.get("attn_mask") == "bias":
        kwargs["attn_mask"] = torch.randn(2, 2, 8, 8, dtype=torch.float64, requires_grad=True)
    from rooftile.capture.policy.overrides import DevicePolicy

    tensors = [torch.randn(2, 2, 8, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    inputs = tensors + ([kwargs["attn_mask"]] if getattr(kwargs.get("attn_mask"), "requires_grad", False) else [])
    want = F.scaled_dot_product_attention(*tensors, **kwargs)
    want_grads = torch.autograd.grad(want.square().sum(), inputs)
    with DevicePolicy(h100, "tiled").installed():
        got = F.scaled_dot_product_attention(*tensors, **kwargs)
        got_grads = torch.autograd.grad(got.square().sum(), inputs)
    for a, b in zip((got, *got_grads), (want, *want_grads), strict=True):
        assert (a - b).abs().max() <= 1e-12
