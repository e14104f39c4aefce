from __future__ import annotations

import pytest
import torch
from torch import nn

from rooftile import _audit, devices
from rooftile.capture import Step
from rooftile.errors import UsageError
from rooftile.report import Report


def small(**more: object) -> Step:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(inplace=True), nn.Linear(128, 8))
    return Step(model, (torch.randn(16, 64),), loss=lambda out: out.float().square().mean(), **more)  # type: ignore[arg-type]


def test_a_step_and_a_device_give_a_report_with_its_trace() -> None:
    report = _audit.audit(small(), device="h100-sxm")
    assert isinstance(report, Report)
    assert report.trace is not None
    assert report.params.count == 64 * 128 + 128 + 128 * 8 + 8
    assert report.flops.total > 0
    assert report.memory.fits is True


def test_a_device_by_value_is_the_device_by_name() -> None:
    assert _audit.audit(small(), devices.load("l4")).device == _audit.audit(small(), "l4").device


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"device": "h100"}, "near matches: h100-sxm"),
        ({"device": "v100-sxm2-16gb"}, "has no bfloat16"),
        ({"precision": "bf17"}, "bf16"),
        ({"optimizer": "adam"}, "adamw"),
        ({"micro_batches": 0}, "from 1 to 256"),
        ({"kv_dtype": "fp7"}, "kv_dtype is 'fp7'"),
        ({"select": ["MEM9"]}, "unknown rule"),
        ({"batch": 2}, "a Step has its own batch"),
        ({"colour": "red"}, "no option 'colour'"),
    ],
)
def test_what_can_not_be_is_told_before_anything_runs(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        _audit.audit(small(), **{"device": "h100-sxm", **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("option", [{"optimizer": "sgd"}, {"checkpoint": "blocks"}, {"micro_batches": 2}])
def test_training_options_are_refused_in_inference(phase: str, option: dict[str, object]) -> None:
    (name,) = option
    with pytest.raises(UsageError, match=f"{name} .* is for training"):
        _audit.audit("gpt2", "h100-sxm", seq=16, phase=phase, **option)  # type: ignore[arg-type]


@pytest.mark.parametrize("thing", [3, nn.Linear(2, 2), None])
def test_something_that_is_no_step_is_refused(thing: object) -> None:
    with pytest.raises(UsageError, match=r"give a rooftile\.Step"):
        _audit.audit(thing, "h100-sxm")  # type: ignore[arg-type]


def test_progress_is_told_in_words() -> None:
    said: list[str] = []
    _audit.audit(small(), "h100-sxm", progress=said.append)
    assert "forward" in said
    assert "reading the trace" in said


def test_a_recapture_is_made_once_and_only_where_a_rule_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    real = _audit.capture

    def counted(*arguments: object) -> object:
        made.append(arguments[2])
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(_audit, "capture", counted)
    _audit.audit("gpt2", "h100-sxm", seq=64)
    assert len(made) == 1, "a step that fits is captured once"
    made.clear()
    _audit.audit("gpt2", "rtx-4090", batch=24)
    assert 2 <= len(made) <= 4, "its own capture and at most three others"
    assert len({str(options) for options in made[1:]}) <= len(made[1:])


def test_tied_weights_count_once_and_frozen_ones_are_told() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
            self.b.weight = self.a.weight
            self.c = nn.Linear(32, 32, bias=False).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(self.b(self.a(x)))

    report = _audit.audit(
        Step(Tied(), (torch.randn(4, 32),), loss=lambda out: out.float().sum()), "h100-sxm", precision="fp32"
    )
    assert (report.params.count, report.params.trainable) == (2 * 32 * 32, 32 * 32)
    assert report.memory.states.weights == 2 * 32 * 32 * 4
    assert report.memory.states.gradients == 32 * 32 * 4


def test_recomputation_is_a_field_of_its_own_and_part_of_the_total() -> None:
    plain = _audit.audit("gpt2", "h100-sxm", seq=64)
    checkpointed = _audit.audit("gpt2", "h100-sxm", seq=64, checkpoint="blocks")
    assert plain.flops.recompute == 0
    assert 0 < checkpointed.flops.recompute < plain.flops.forward
    assert checkpointed.flops.total == pytest.approx(plain.flops.total + checkpointed.flops.recompute, rel=1e-6)


def test_the_published_states_of_gpt2_xl_come_out_of_the_audit() -> None:
    """16-bit weights and gradients with FP32 masters and Adam: 16 bytes a parameter, 24.92 GB of 1,557,611,200."""
    states = _audit.audit("gpt2-xl", "h100-sxm", seq=64, precision="bf16-master").memory.states
    assert states.weights == states.gradients == 2 * 1_557_611_200
    assert states.master_weights + states.optimizer_state == pytest.approx(12 * 1_557_611_200, rel=1e-6)
    assert states.total / 1e9 == pytest.approx(24.92, abs=0.005)


def test_a_change_that_the_step_refuses_is_not_offered() -> None:
    """One Linear has no blocks to checkpoint, and its batch is fixed."""
    step = Step(
        nn.Linear(4096, 4096),
        (torch.empty(4_000_000, 4096, device="meta"),),
        loss=lambda out: out.float().mean(),
        batch=9,
    )
    (finding,) = _audit.audit(step, "rtx-4090", select=["MEM001"]).findings
    assert "--checkpoint" not in finding.response
    assert "--batch" not in finding.response


def test_a_step_without_a_single_op_is_a_report_too() -> None:
    report = _audit.audit(Step(nn.Identity(), (torch.randn(4),), phase="prefill"), "h100-sxm", precision="fp32")
    assert (report.flops.total, report.bytes.unfused, report.coverage.ops) == (0, 0, 1.0)
    assert Report.from_json(report.to_json()) == report


def test_a_users_own_configuration_never_breaks_the_document() -> None:
    config = {"dtype": torch.bfloat16, "eps": float("inf"), 3: (1, {"a": None})}
    report = _audit.audit(small(config=config), "h100-sxm")
    assert Report.from_json(report.to_json()).target.config["3"] == (1, {"a": None})


def test_frozen_weights_have_no_gradient_state() -> None:
    """A frozen base with a small adapter: the states are the adapter's, and the backward pass has fewer products."""

    class Adapted(nn.Module):
        def __init__(self, frozen: bool) -> None:
            super().__init__()
            self.base = nn.Linear(256, 256, bias=False).requires_grad_(not frozen)
            self.down, self.up = nn.Linear(256, 4, bias=False), nn.Linear(4, 256, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.up(self.down(x))

    def report(frozen: bool) -> Report:
        step = Step(Adapted(frozen), (torch.randn(32, 256),), loss=lambda out: out.float().square().mean())
        return _audit.audit(step, "h100-sxm", precision="fp32")

    adapter, full = report(True), report(False)
    assert adapter.memory.states.gradients == 2 * 4 * 256 * 4
    assert adapter.memory.states.optimizer_state < 2 * 2 * 4 * 256 * 4 + 100
    assert full.flops.matmul - adapter.flops.matmul == 2 * 32 * 256 * 256
