"""The ledger's peak against counts that know nothing of rooftile, and against the literature's formulas."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from rooftile import devices, zoo
from rooftile.capture import CaptureOptions, Step, Trace, capture
from rooftile.devices import Device
from rooftile.ledgers.memory import memory


def role_bytes(trace: Trace, at: int) -> dict[str, int]:
    out: dict[str, int] = {}
    for s in trace.storages:
        if s.born <= at and (s.died is None or s.died >= at):
            out[s.role] = out.get(s.role, 0) + s.nbytes
    return out


# ------------------------------------------------------------------------------------------------ an independent count
def mlp() -> Step:
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 512), nn.ReLU(inplace=True))
    return Step(model, (torch.randn(512, 256),), lambda y: y.square().mean())


def checkpointed_mlp() -> Step:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 256)) for _ in range(4)
            )

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    return Step(Blocks(), (torch.randn(512, 256, requires_grad=True),), lambda y: y.square().mean())


def tied() -> Step:
    torch.manual_seed(0)
    config = zoo.gpt2_config("gpt2", n_layers=3, n_heads=4, d_model=64, vocab=2003, positions=64)
    model = zoo.GPT2(config)
    return Step(model, {"tokens": torch.randint(2003, (4, 64))}, zoo.NextTokenLoss(torch.randint(2003, (4, 64))))


def allocated_peak(step: Step, options: CaptureOptions, device: Device) -> tuple[int, int]:
    """Peak of what torch's allocator reported during the live step, over what was there when it began."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        trace = capture(step, device, options.with_(live=True))
    events = recorded.profiler.kineto_results.events()
    marks = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    current = highest = 0
    for _, nbytes in marks:
        current += nbytes
        highest = max(highest, current)
    return highest, memory(trace).peak_bytes


@pytest.mark.parametrize("build", [mlp, checkpointed_mlp, tied])
def test_the_peak_is_what_torchs_allocator_reports(build):
    """All tensors of the step are made inside the profiled region (the capture copies the model), so the allocator's
    running sum is the live total. The CPU's materialised attention and fp32 leave no scratch memory to name."""
    cpu = devices.load("tpu-v4")  # a class whose operators are the CPU's own
    options = CaptureOptions(precision="fp32", attention="materialized", optimizer="adamw-loop")
    measured, ledger = allocated_peak(build(), options, cpu)
    assert ledger == pytest.approx(measured, rel=1e-3)


# ------------------------------------------------------------------------------------------------------- optimizers
@pytest.mark.parametrize(
    ("optimizer", "states", "temporaries"), [("adamw-foreach", 4, 1), ("adamw-fused", 4, 0), ("sgd", 2, 0)]
)
def test_the_optimizers_peak_in_multiples_of_the_weights(optimizer: str, states: int, temporaries: int, h100: Device):
    """AdamW: weights, gradients and two moments, and foreach a temporary the size of the weights: 5.0P against 4.0P."""
    model = nn.Sequential(*[nn.Linear(1000, 1000, bias=False) for _ in range(8)])
    trace = capture(
        Step(model, (torch.randn(1, 1000),), lambda y: y.sum()),
        h100,
        CaptureOptions(precision="fp32", optimizer=optimizer),
    )
    weights = 8 * 4_000_000
    in_optimizer = max(sum(role_bytes(trace, i).values()) for i, op in enumerate(trace.ops) if op.phase == "optimizer")
    assert in_optimizer == pytest.approx((states + temporaries) * weights, rel=2e-3)


def test_the_for_loop_needs_temporaries_of_one_tensor_only(h100: Device):
    """The square root, its quotient, and the previous tensor's quotient that the loop's variable still holds."""
    model = nn.Sequential(*[nn.Linear(1000, 1000, bias=False) for _ in range(8)])
    step = Step(model, (torch.randn(1, 1000),), lambda y: y.sum())
    trace = capture(step, h100, CaptureOptions(precision="fp32", optimizer="adamw-loop"))
    in_optimizer = max(sum(role_bytes(trace, i).values()) for i, op in enumerate(trace.ops) if op.phase == "optimizer")
    assert 4 * 32_000_000 < in_optimizer <= 4 * 32_000_000 + 3 * 4_000_000 + 100_000


def test_optimizer_state_is_there_when_the_recorded_step_begins(h100: Device):
    step = Step(nn.Linear(64, 64), (torch.randn(2, 64),), lambda y: y.sum())
    trace = capture(step, h100, CaptureOptions(precision="fp32"))
    states = [s for s in trace.storages if s.role == "optimizer_state"]
    assert sum(s.nbytes for s in states) == 2 * 4 * (64 * 64 + 64)
    assert all(s.born == -1 and s.died is None for s in states)


@pytest.mark.parametrize(("precision", "master"), [("bf16-master", 4), ("fp16-master", 4), ("bf16", 0)])
def test_bytes_per_parameter_by_role(precision: str, master: int, h100: Device):
    """GPT-2's ledger in small: 2 (weights) + 2 (gradients) + 4 (masters) + 8 (moments) bytes a parameter."""
    n = 1000 * 1000
    step = Step(nn.Linear(1000, 1000, bias=False), (torch.randn(1, 1000),), lambda y: y.sum())
    trace = capture(step, h100, CaptureOptions(precision=precision))
    roles = {}
    for s in trace.storages:
        roles[s.role] = roles.get(s.role, 0) + s.nbytes
    assert roles["parameter"] == 2 * n
    assert roles["gradient"] == 2 * n
    assert roles.get("master_weight", 0) == master * n
    assert roles["optimizer_state"] == (8 if master else 4) * n


# ------------------------------------------------------------------------------------------------- lifetimes and roles
def test_tied_weights_are_one_storage_with_both_uses_in_the_ops(h100: Device):
    step = tied()
    trace = capture(step, h100, CaptureOptions(precision="fp32"))
    wte = [s for s in trace.storages if s.role == "parameter" and s.shape == (2003, 64)]
    assert len(wte) == 1
    users = {op.operator for op in trace.ops if wte[0].id in op.inputs and op.phase == "forward"}
    assert "aten.embedding.default" in users
    assert "aten.t.default" in users or "aten.mm.default" in users
    assert trace.settings["params_count"] == sum(p.numel() for p in step.model.parameters())


def test_views_and_in_place_operators_make_no_storage(h100: Device):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.lin(x).view(4, 2, 8).transpose(0, 1), inplace=True)

    trace = capture(Step(Net(), (torch.randn(8, 8),), phase="prefill"), h100, CaptureOptions(precision="fp32"))
    born = [s for s in trace.storages if s.born >= 0]
    assert [s.nbytes for s in born] == [8 * 8 * 4]


def test_checkpointing_stops_early_and_names_what_it_recomputes(h100: Device):
    step = checkpointed_mlp()
    trace = capture(step, h100, CaptureOptions(precision="fp32", optimizer="none"))
    forward = [op.operator for op in trace.ops if op.phase == "forward" and op.operator == "aten.addmm.default"]
    recomputed = [op for op in trace.ops if op.phase == "recompute" and op.operator == "aten.addmm.default"]
    # The second Linear of a block saves only its input, which is there before it runs: it is not run again.
    assert (len(forward), len(recomputed)) == (8, 4)
    assert {op.module for op in recomputed} == {f"blocks.{i}.0" for i in range(4)}


def test_backward_operators_bear_the_path_of_the_module_whose_forward_made_them(h100: Device):
    trace = capture(mlp(), h100, CaptureOptions(precision="fp32"))
    modules = {op.module for op in trace.ops if op.phase == "backward" and op.operator == "aten.mm.default"}
    assert modules == {"0", "2"}


def test_the_autocast_weight_cache_is_its_own_line_and_dies_with_the_backward(h100: Device):
    """N Linears under autocast hold 2 bytes more per fp32 weight until the outermost context exits."""
    model = nn.Sequential(*[nn.Linear(100, 100, bias=False) for _ in range(5)])
    trace = capture(Step(model, (torch.randn(1, 100),), lambda y: y.sum()), h100, CaptureOptions())
    cache = [s for s in trace.storages if s.role == "autocast_cache"]
    assert sum(s.nbytes for s in cache) == 5 * 2 * 100 * 100
    last_forward = max(i for i, op in enumerate(trace.ops) if op.phase == "forward")
    assert all(s.died is not None and s.died >= last_forward for s in cache)
    frozen = nn.Sequential(*[nn.Linear(100, 100, bias=False) for _ in range(5)]).requires_grad_(False)
    inference = capture(Step(frozen, (torch.randn(1, 100),), phase="prefill"), h100, CaptureOptions())
    assert not [s for s in inference.storages if s.role == "autocast_cache"]  # torch caches what needs a gradient only


def test_gradient_accumulation_adds_into_the_first_gradients(h100: Device):
    step = Step(nn.Linear(64, 64, bias=False), (torch.randn(2, 64),), lambda y: y.sum())
    trace = capture(step, h100, CaptureOptions(precision="fp32", micro_batches=3))
    gradients = [s for s in trace.storages if s.role == "gradient"]
    assert sum(s.nbytes for s in gradients) == 64 * 64 * 4
    assert {op.micro_batch for op in trace.ops if op.phase == "backward"} == {0, 1, 2}
    adds = [op for op in trace.ops if op.operator == "aten.add_.Tensor" and op.phase == "backward"]
    assert len(adds) == 2


def test_a_frozen_base_has_no_weight_gradients(h100: Device):
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    model[1].weight.requires_grad_(False)
    trace = capture(Step(model, (torch.randn(4, 32),), lambda y: y.sum()), h100, CaptureOptions(precision="fp32"))
    products = [op for op in trace.ops if op.phase == "backward" and op.operator == "aten.mm.default"]
    # Weight gradients of layers 0 and 2, input gradients of layers 1 and 2; the first input needs none.
    assert len(products) == 4
    assert {s.name for s in trace.storages if s.role == "gradient"} == {"0.weight", "2.weight"}


def test_the_first_capture_of_a_process_is_as_good_as_the_second():
    """Torch imports its compiler inside the first layer norm on meta, and that import keeps the model's frames."""
    code = """
import torch, rooftile
from torch import nn
from rooftile.capture import CaptureOptions, Step, capture

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.lin = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x):
        y = self.norm(x)
        z = torch.softmax(self.lin(y), -1)
        return x + z

def storages():
    with torch.device("meta"):
        step = Step(nn.Sequential(Block(), Block()), (torch.empty(8, 64),), lambda y: y.sum())
    options = CaptureOptions(precision="fp16", optimizer="none")  # an optimizer would import the compiler beforehand
    return capture(step, rooftile.devices.load("h100-sxm"), options).storages

assert storages() == storages()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --------------------------------------------------------------------------------------- Korthikanti et al. 2205.05198
class MegatronLayer(nn.Module):
    """The layer of the paper's section 4: materialised softmax, dropout at three places, everything in fp16."""

    def __init__(self, h: int, a: int) -> None:
        super().__init__()
        self.a = a
        self.ln1, self.ln2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.proj = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.fc1, self.fc2 = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: Tensor) -> Tensor:
        s, b, h = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(s, b, self.a, 3 * h // self.a).split(h // self.a, -1)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        scores = torch.matmul(q, k.transpose(-1, -2)).mul_((h // self.a) ** -0.5)
        p = torch.softmax(scores, -1)
        o = torch.matmul(F.dropout(p, 0.1), v).permute(2, 0, 1, 3).reshape(s, b, h)
        x = x + F.dropout(self.proj(o), 0.1)
        return x + F.dropout(self.fc2(F.gelu(self.fc1(self.ln2(x)))), 0.1)


@pytest.mark.parametrize(
    ("a", "h", "s", "b", "gib"), [(64, 6144, 2048, 4, 6.594), (96, 12288, 2048, 1, 2.672)], ids=["22B", "175B"]
)
def test_activations_of_a_layer_are_korthikantis_formula(a: int, h: int, s: int, b: int, gib: float, h100: Device):
    """sbh (34 + 5 as/h) bytes, asked of the capture: what three layers keep and two do not."""

    def saved(layers: int) -> int:
        with torch.device("meta"):
            model = nn.Sequential(*[MegatronLayer(h, a) for _ in range(layers)])
            x = torch.randn(s, b, h, requires_grad=True)
        trace = capture(Step(model, (x,), lambda y: y.sum()), h100, CaptureOptions(precision="fp16", optimizer="none"))
        first = next(i for i, op in enumerate(trace.ops) if op.phase == "backward")
        return sum(
            t.nbytes for t in trace.storages if t.role == "activation" and t.born < first and (t.died or first) >= first
        )

    layer = saved(3) - saved(2)
    assert layer / 2**30 == pytest.approx(gib, abs=6e-4)
    statistics = 2 * 2 * s * b * 4  # mean and rstd of two layer norms in fp32, which the paper leaves out
    assert layer - statistics == 34 * s * b * h + 5 * a * s * s * b
