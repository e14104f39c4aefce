"""Dropout, norms and RNNs as the target device carries them out, and the values that live capture computes for them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rooftile import devices
from rooftile.capture import CaptureOptions, Step, Trace, capture
from rooftile.capture.policy.overrides import DevicePolicy
from rooftile.devices import Device

CPU_LIKE = "tpu-v4"  # a device class for which torch composes these operators as on the CPU


def run(model: nn.Module, x: Tensor, device: Device, precision: str = "bf16", live: bool = False) -> Trace:
    step = Step(model, (x,), lambda y: (y[0] if isinstance(y, tuple) else y).sum())
    return capture(step, device, CaptureOptions(precision=precision, optimizer="none", live=live))


def operators(trace: Trace, phase: str | None = None) -> set[str]:
    return {op.operator for op in trace.ops if phase in (None, op.phase)}


@pytest.mark.parametrize("live", [False, True])
def test_dropout_is_one_kernel_with_a_mask_of_one_byte_on_cuda(live: bool, h100: Device):
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1))
    trace = run(model, torch.randn(4, 8), h100, live=live)
    (dropout,) = [op for op in trace.ops if op.operator == "aten.native_dropout.default"]
    assert [t.dtype for t in dropout.call.outputs] == ["bfloat16", "bool"]
    mask = trace.storages[dropout.outputs[1]]
    assert (mask.nbytes, mask.role) == (32, "activation")
    assert "aten.bernoulli_.float" not in operators(trace)
    assert "aten.bernoulli_.float" in operators(run(model, torch.randn(4, 8), devices.load(CPU_LIKE), live=live))


def test_dropout_in_evaluation_is_nothing(h100: Device):
    step = Step(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)), (torch.randn(4, 8),), phase="prefill")
    assert not any("dropout" in op.operator for op in capture(step, h100, CaptureOptions()).ops)


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize(
    ("norm", "operator"),
    [
        (nn.LayerNorm(16), "aten.native_layer_norm.default"),
        (nn.GroupNorm(4, 16), "aten.native_group_norm.default"),
        (nn.RMSNorm(16), "rooftile.rms_norm.default"),
    ],
)
def test_statistics_of_norms_are_fp32_for_16_bit_inputs_on_cuda(
    norm: nn.Module, operator: str, live: bool, h100: Device
):
    model = nn.Sequential(nn.Linear(16, 16), norm)
    trace = run(model, torch.randn(4, 16), h100, live=live)
    (op,) = [op for op in trace.ops if op.operator == operator]
    assert op.call.outputs[0].dtype == "bfloat16"
    assert {t.dtype for t in op.call.outputs[1:]} == {"float32"}


def test_rms_norm_is_composed_where_the_device_has_no_kernel_and_for_mixed_dtypes(h100: Device):
    model = nn.Sequential(nn.Linear(16, 16), nn.RMSNorm(16))
    assert "rooftile.rms_norm.default" not in operators(run(model, torch.randn(4, 16), devices.load(CPU_LIKE)))

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16))

        def forward(self, x: Tensor) -> Tensor:
            return F.rms_norm(x.bfloat16(), (16,), self.weight)

    assert "rooftile.rms_norm.default" not in operators(run(Mixed(), torch.randn(4, 16), h100, precision="as-is"))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: object) -> None:
        super().__init__()
        self.rnn = kind(6, 10, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


RNNS = [
    (nn.LSTM, {}),
    (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    (nn.LSTM, {"proj_size": 4, "bias": False}),
    (nn.GRU, {"num_layers": 2}),
    (nn.RNN, {}),
    (nn.RNN, {"nonlinearity": "relu", "bias": False}),
]


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize(("kind", "options"), RNNS)
def test_an_rnn_is_one_kernel_forward_and_one_backward_on_cuda(kind, options: dict, live: bool, h100: Device):
    model, x = Recurrent(kind, **options), torch.randn(5, 3, 6)
    trace = run(model, x, h100, precision="fp32", live=live)
    assert operators(trace, "forward") >= {"rooftile.rnn.default"}
    assert "rooftile.rnn_backward.default" in operators(trace, "backward")
    assert not any(op.operator.startswith(("aten.mm", "aten.addmm")) for op in trace.ops)
    gradients = {s.name: s.nbytes for s in trace.storages if s.role == "gradient"}
    assert gradients == {n: 4 * p.numel() for n, p in model.named_parameters()}


@pytest.mark.parametrize(("kind", "options"), RNNS)
def test_the_values_and_gradients_of_a_live_rnn_are_torchs(kind, options: dict, h100: Device):
    torch.manual_seed(0)
    model, x = Recurrent(kind, **options).double(), torch.randn(5, 3, 6, dtype=torch.float64, requires_grad=True)
    inputs = [x, *model.parameters()]
    want = model(x)
    want_grads = torch.autograd.grad(want.square().sum(), inputs)
    with DevicePolicy(h100, "auto").installed():
        got = model(x)
        got_grads = torch.autograd.grad(got.square().sum(), inputs)
    for a, b in zip((got, *got_grads), (want, *want_grads), strict=True):
        assert (a - b).abs().max() <= 1e-12


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shape", [(16,), (4, 16)])
def test_the_values_and_gradients_of_the_live_rms_norm_are_torchs(weighted: bool, shape: tuple[int, ...], h100: Device):
    torch.manual_seed(0)
    x = torch.randn(3, 4, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(shape, dtype=torch.float64, requires_grad=True) if weighted else None
    inputs = [t for t in (x, weight) if t is not None]
    want = F.rms_norm(x, shape, weight, 1e-5)
    want_grads = torch.autograd.grad(want.square().sum(), inputs)
    with DevicePolicy(h100, "auto").installed():
        got = F.rms_norm(x, shape, weight, 1e-5)
        got_grads = torch.autograd.grad(got.square().sum(), inputs)
    for a, b in zip((got, *got_grads), (want, *want_grads), strict=True):
        assert (a - b).abs().max() <= 1e-12


def test_rms_norm_without_eps_takes_torchs_default(h100: Device):
    x = torch.full((2, 16), 1e-5)
    want = F.rms_norm(x, (16,))
    with DevicePolicy(h100, "auto").installed():
        assert torch.allclose(F.rms_norm(x, (16,)), want, rtol=1e-6, atol=0)


def test_the_backward_of_flash_attention_names_its_scratch_memory(h100: Device):
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.kv = nn.Linear(64, 64), nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x).view(2, 128, 4, 16).transpose(1, 2)
            k, v = (t.view(2, 128, 1, 16).transpose(1, 2) for t in self.kv(x).chunk(2, -1))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    trace = run(Attention(), torch.randn(2, 128, 64), h100)
    spaces = {s.name: s.nbytes for s in trace.storages if s.name.startswith("workspace")}
    assert spaces == {
        "workspace: attention backward, dQ accumulator fp32": 2 * 4 * 128 * 32 * 4,
        "workspace: attention backward, row sums fp32": 2 * 4 * 128 * 4,
        "workspace: attention backward, dK and dV per query head": 2 * 128 * 4 * 32 * 2,
    }
    assert all(s.born == s.died for s in trace.storages if s.name.startswith("workspace"))
