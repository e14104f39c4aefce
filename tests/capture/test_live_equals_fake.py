"""A step on real CPU tensors, on fake ones and on meta is the same step: ops, storages, bytes, lifetimes."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rooftile
from rooftile import devices, zoo
from rooftile.capture import CaptureOptions, Step, Trace, capture
from rooftile.capture.run import _attempt
from rooftile.devices import Device


def gpt2(device: str = "cpu") -> Step:
    """Two layers, tied embeddings, dropout at its three places."""
    torch.manual_seed(0)
    config = zoo.gpt2_config("gpt2", n_layers=2, n_heads=4, d_model=32, vocab=67, positions=24)
    with torch.device(device):
        model = zoo.GPT2(config)
        tokens = torch.randint(67, (2, 24))
        return Step(model, {"tokens": tokens}, zoo.NextTokenLoss(torch.randint(67, (2, 24))))


def llama(device: str = "cpu") -> Step:
    """Two layers with grouped heads, RMS norm and rotary positions."""
    torch.manual_seed(0)
    config = zoo.llama_config("llama-3.1-8b", n_layers=2, n_heads=4, n_kv_heads=2, d_model=32, d_ff=48, vocab=67)
    with torch.device(device):
        model = zoo.Llama(config, max_seq=24)
        tokens = torch.randint(67, (2, 24))
        return Step(model, {"tokens": tokens}, zoo.NextTokenLoss(torch.randint(67, (2, 24))))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.act = nn.ReLU(inplace=True)
        self.down = nn.Conv2d(8, 8, 3, stride=2, groups=2)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.act(self.norm(self.conv(x)))).mean((2, 3)))


def convnet(device: str = "cpu") -> Step:
    with torch.device(device):
        target = torch.randint(5, (4,))
        return Step(ConvNet(), (torch.randn(4, 3, 9, 9),), lambda y: F.cross_entropy(y, target))


def both(step: Step, device: Device, options: CaptureOptions) -> tuple[Trace, Trace]:
    live = capture(step, device, options.with_(live=True))
    fake = _attempt(step, device, options, lambda _: None, "fake")
    return live, fake


def assert_same(a: Trace, b: Trace) -> None:
    for x, y in zip(a.ops, b.ops, strict=False):
        assert x == y
    assert len(a.ops) == len(b.ops)
    for s, t in zip(a.storages, b.storages, strict=True):
        assert s == t


CASES = [
    (gpt2, "none", "bf16-mixed"),
    (gpt2, "blocks", "bf16-mixed"),
    (llama, "none", "bf16"),
    (llama, "blocks", "bf16-master"),
    (convnet, "none", "fp32"),
    (convnet, "none", "fp16-mixed"),
]


@pytest.mark.parametrize("device", ["h100-sxm", "tpu-v4"])
@pytest.mark.parametrize("attention", ["auto", "materialized"])
@pytest.mark.parametrize(("build", "checkpoint", "precision"), CASES)
def test_live_capture_equals_the_fake_one_op_by_op_and_byte_by_byte(build, checkpoint, precision, attention, device):
    if device == "tpu-v4" and precision == "fp16-mixed":
        precision = "bf16-mixed"
    options = CaptureOptions(precision=precision, checkpoint=checkpoint, attention=attention)
    live, fake = both(build(), devices.load(device), options)
    assert_same(live, fake)


@pytest.mark.parametrize("build", [gpt2, llama, convnet])
def test_meta_capture_equals_the_fake_one(build, h100: Device):
    options = CaptureOptions()
    meta = capture(build("meta"), h100, options)
    assert meta.settings["mode"] == "meta"
    fake = _attempt(build("meta"), h100, options, lambda _: None, "fake")
    assert_same(meta, fake)


@pytest.mark.parametrize("optimizer", ["adamw-loop", "adamw-foreach", "adamw-fused", "sgd"])
def test_every_optimizer_is_captured_the_same_live_and_fake(optimizer: str, h100: Device):
    live, fake = both(gpt2(), h100, CaptureOptions(optimizer=optimizer))
    assert_same(live, fake)


def test_the_audited_model_is_left_as_it_was(h100: Device):
    step = gpt2()
    before = {n: p.clone() for n, p in step.model.named_parameters()}
    capture(step, h100, CaptureOptions(live=True, optimizer="adamw"))
    capture(step, h100, CaptureOptions(precision="bf16-master"))
    for name, parameter in step.model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None


def test_sparse_products_are_counted_live_and_unknown_without_data(h100: Device):
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            dense = torch.rand(100, 80)
            dense[dense > 0.1] = 0
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "sparse CSR tensor support is in beta state"
                self.register_buffer("a", dense.to_sparse_csr())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a @ x

    model = Sparse()
    step = Step(model, (torch.randn(80, 16),), phase="prefill")
    live = rooftile.audit(step, h100, precision="fp32", live=True)
    assert live.coverage.unknown_ops == ()
    assert live.flops.total == 2 * model.a._nnz() * 16
    fake = rooftile.audit(step, h100, precision="fp32")
    assert len(fake.coverage.unknown_ops) == 1
    assert any("--live" in note for note in fake.trace.notes)
