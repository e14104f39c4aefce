"""Every rule on a step that has the fault and on the nearest step that has not."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rooftile.rules
from rooftile import _audit
from rooftile.capture import Step
from rooftile.errors import UsageError
from rooftile.report.section import Section
from rooftile.rules import FAMILIES, all_rules, matches, rule, select_rules


def findings(step: Step | str, code: str, device: str = "h100-sxm", **options: object) -> list[Section]:
    report = _audit.audit(step, device, select=[code], **options)  # type: ignore[arg-type]
    assert all(f.code == code for f in report.findings)
    return list(report.findings)


# ------------------------------------------------------------------------------------------------------------ registry
def test_every_rule_file_is_found_and_says_what_it_means() -> None:
    from pathlib import Path

    files = [p.name for p in Path(rooftile.rules.__path__[0]).glob("*.py") if re.match(r"[a-z]{3}\d{3}_", p.name)]
    assert len(files) == len(all_rules()) >= 6
    for found in all_rules():
        assert re.fullmatch(r"[A-Z]{3}\d{3}", found.code)
        assert found.family in FAMILIES
        assert any(name.startswith(found.code.lower()) for name in files)
        assert len(found.explanation.split()) > 60, "an explanation says what is seen, why it matters and what to do"


def test_select_and_ignore_take_codes_and_families() -> None:
    codes = lambda **k: [r.code for r in select_rules(**k)]  # noqa: E731
    assert codes() == [r.code for r in all_rules()]
    assert codes(select=["mem"]) == [c for c in codes() if c.startswith("MEM")]
    assert codes(select=["MEM", "KER001"], ignore=["MEM002"]) == ["KER001", "MEM001"]
    assert codes(ignore=["MEM"]) == [c for c in codes() if not c.startswith("MEM")]


@pytest.mark.parametrize("word", ["MEM9", "XYZ", "", "any"])
def test_an_unknown_code_is_refused_and_the_known_ones_named(word: str) -> None:
    with pytest.raises(UsageError, match="unknown rule or family"):
        select_rules(select=[word])


def test_a_near_miss_names_the_rule_that_was_meant() -> None:
    with pytest.raises(UsageError, match=r"near matches.*MEM001"):
        rule("MEM01")


def test_any_matches_every_code_and_a_family_its_own() -> None:
    assert matches("MEM001", "any")
    assert matches("MEM001", "mem")
    assert not matches("MEM001", "KER")


# -------------------------------------------------------------------------------------------------------------- KER001
def test_refused_tiled_attention_is_found_with_the_reason_of_the_refusal() -> None:
    # On V100 flash wants compute capability 8.0 and the memory-efficient kernel no grouped heads.
    (finding,) = findings("llama-3.1-8b", "KER001", "v100-sxm2-16gb", seq=512, phase="prefill", precision="fp16")
    assert "compute capability" in finding.evidence
    assert "32 modules" in finding.evidence
    # 32 layers, 32 heads, 512 x 512 scores; at least written and read by each of two products and the softmax.
    assert finding.saving.moved_bytes >= 6 * 32 * 32 * 512 * 512 * 2
    assert finding.saving.peak_bytes > 0


def test_tiled_attention_is_not_found() -> None:
    assert findings("gpt2", "KER001", seq=64) == []


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.transpose(-1, -2) / 8).softmax(-1) @ v


def test_attention_by_hand_saves_the_peak_that_sdpa_would_have() -> None:
    class Sdpa(ByHand):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t.unsqueeze(1) for t in self.qkv(x).chunk(3, -1))
            return F.scaled_dot_product_attention(q, k, v).squeeze(1)

    def step(model: nn.Module) -> Step:
        return Step(model, (torch.randn(2, 512, 64),), loss=lambda out: out.float().square().mean(), batch=2, seq=512)

    (finding,) = findings(step(ByHand()), "KER001")
    assert "instead of calling scaled_dot_product_attention" in finding.evidence
    by_hand = _audit.audit(step(ByHand()), "h100-sxm").memory.peak_bytes
    sdpa = _audit.audit(step(Sdpa()), "h100-sxm").memory.peak_bytes
    # SDPA keeps what the rule leaves out, its log-sum-exp (8 B a row at most), and its gradients' layout.
    assert by_hand - finding.saving.peak_bytes == pytest.approx(sdpa, rel=0.15)


# -------------------------------------------------------------------------------------------------------------- MEM001
def test_a_step_that_fits_has_no_capacity_finding() -> None:
    assert findings("gpt2", "MEM001", seq=64) == []


def test_the_change_that_is_named_really_fits() -> None:
    options = {"batch": 24, "device": "rtx-4090"}
    (finding,) = findings("gpt2", "MEM001", **options)  # type: ignore[arg-type]
    assert finding.severity == "error"
    named = re.findall(r"--(checkpoint|batch|precision) ([\w-]+)", finding.response)
    assert named, finding.response
    for option, value in named:
        changed = {**options, option: int(value) if option == "batch" else value}
        report = _audit.audit("gpt2", select=["MEM001"], **changed)
        assert report.memory.fits is True, (option, value)
        assert not report.findings


def test_where_nothing_fits_the_finding_says_so_and_names_the_states() -> None:
    (finding,) = findings("llama-3.1-70b", "MEM001", seq=64)
    assert "no single change" in finding.response
    # 70.55e9 parameters at 16 bytes over 84.99e9 visible: 13.3, so 14 ranks or more.
    assert "at least 14 ranks" in finding.response


def test_a_fused_optimizer_predicted_from_the_trace_is_what_a_capture_with_it_gives() -> None:
    step = {"seq": 64, "device": "rtx-4090"}
    foreach = _audit.audit("gpt2", optimizer="adamw-foreach", **step)  # type: ignore[arg-type]
    fused = _audit.audit("gpt2", optimizer="adamw-fused", **step)  # type: ignore[arg-type]
    from rooftile.ledgers.memory import memory

    trace = foreach.trace
    scratch = [s.id for s in trace.storages if s.role == "temporary" and s.born >= 0
               and trace.ops[s.born].phase == "optimizer"]  # fmt: skip
    assert memory(trace, without=scratch).peak_bytes == pytest.approx(fused.memory.peak_bytes, rel=1e-3)


def test_a_step_by_value_is_never_asked_for_another_batch() -> None:
    model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(2)))
    step = Step(model, (torch.empty(900_000, 4096, device="meta"),), loss=lambda out: out.float().mean(), batch=900_000)
    (finding,) = findings(step, "MEM001", "rtx-4090")
    assert "--batch" not in finding.response


# -------------------------------------------------------------------------------------------------------------- MEM002
def test_logits_in_fp32_are_found_where_they_matter_and_only_there() -> None:
    (finding,) = findings("gpt2", "MEM002", batch=4, seq=1024)
    elements = 4 * 1024 * 50257
    assert f"{elements:,} elements" in finding.evidence
    assert 0 < finding.saving.peak_bytes <= 4 * elements * 4
    assert findings("gpt2", "MEM002", batch=4, seq=1024, precision="bf16") == []
    assert findings("gpt2", "MEM002", seq=8) == [], "a few rows of logits are nothing beside the weights"


class Product(nn.Module):
    """An output as large as logits."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4096))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x) * (self.weight * x)


def test_an_output_that_no_softmax_reads_is_no_logits() -> None:
    inputs = (torch.randn(512, 4096),)
    mean = Step(Product(), inputs, loss=lambda out: (out.float() - 1).square().mean())
    assert findings(mean, "MEM002", precision="fp32") == []


@pytest.mark.parametrize(
    "loss",
    [
        lambda out: nn.functional.cross_entropy(out.float() / 2.0, torch.zeros(512, dtype=torch.long)),
        lambda out: -nn.functional.log_softmax(out[:-1].float(), -1).mean(),
        lambda out: (torch.logsumexp(out.float(), -1) - out[:, 0].float()).mean(),
    ],
)  # fmt: skip
def test_logits_are_known_by_the_softmax_that_reads_them(loss: object) -> None:
    step = Step(Product(), (torch.randn(512, 4096),), loss=loss)  # type: ignore[arg-type]
    assert len(findings(step, "MEM002", precision="fp32")) == 1


def test_a_regression_has_no_logits() -> None:
    step = Step(nn.Linear(16, 2), (torch.randn(4096, 16),), loss=lambda out: out.float().square().mean())
    assert findings(step, "MEM002", precision="fp32") == []


# -------------------------------------------------------------------------------------------------------------- NUM001
@pytest.mark.parametrize("optimizer", ["adamw-foreach", "adamw-fused", "adamw-loop", "sgd"])
def test_16_bit_weights_without_masters_are_found_under_every_optimizer(optimizer: str) -> None:
    (finding,) = findings("gpt2", "NUM001", seq=16, precision="bf16", optimizer=optimizer)
    assert "148 weight tensors" in finding.evidence
    assert finding.saving.peak_bytes == -4 * 124_439_808, "FP32 masters cost four bytes a parameter"


@pytest.mark.parametrize(
    "options",
    [{"precision": "bf16-master"}, {"precision": "fp32"}, {"precision": "bf16-mixed"},
     {"precision": "bf16", "optimizer": "none"}, {"precision": "bf16", "phase": "prefill"}],
    ids=str,
)  # fmt: skip
def test_weights_that_are_wide_or_not_updated_are_not_found(options: dict[str, str]) -> None:
    assert findings("gpt2", "NUM001", seq=16, **options) == []


# -------------------------------------------------------------------------------------------------------------- GEM001
def test_gpt2s_vocabulary_is_off_alignment_and_llamas_is_not() -> None:
    (finding,) = findings("gpt2", "GEM001", seq=64)
    assert "50,257" in finding.title
    assert "50,304" in finding.response
    assert "lm_head" in finding.where
    assert findings("llama-3.1-8b", "GEM001", seq=64) == []


def test_a_decode_step_is_not_blamed_for_its_one_row() -> None:
    assert findings("llama-3.1-8b", "GEM001", phase="decode", seq=64) == []


# -------------------------------------------------------------------------------------------------------------- LAY001
def regression(loss: object) -> Step:
    return Step(nn.Linear(16, 1), (torch.randn(64, 16),), loss=loss)  # type: ignore[arg-type]


TARGETS = torch.randn(64)


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize(
    "loss",
    [
        lambda out: (out - TARGETS).square().mean(),
        lambda out: F.mse_loss(out, TARGETS),
        lambda out: F.smooth_l1_loss(out, TARGETS),
        lambda out: (out * TARGETS).sum(),
    ],
    ids=["difference", "mse_loss", "smooth_l1_loss", "product"],
)
def test_a_column_against_a_row_is_found(loss: object, precision: str) -> None:
    (finding,) = findings(regression(loss), "LAY001", precision=precision)
    assert "(64, 64)" in finding.evidence
    assert finding.where == "loss"


@pytest.mark.parametrize(
    "loss",
    [
        lambda out: (out.squeeze(-1) - TARGETS).square().mean(),
        lambda out: (out - TARGETS.unsqueeze(-1)).square().mean(),
        lambda out: F.mse_loss(out.squeeze(-1), TARGETS),
        lambda out: (out - TARGETS.unsqueeze(0)).square().mean(),  # both lifted to two dimensions: a pairwise matrix
        lambda out: (out + torch.ones(3, device=out.device)).mean(),  # an outer sum of different sizes
        lambda out: (out * math.pi + out.mean()).sum(),
    ],
    ids=["squeezed", "unsqueezed", "mse_loss", "pairwise on purpose", "outer sum", "scalars"],
)
def test_shapes_that_fit_or_were_lifted_on_purpose_are_not_found(loss: object) -> None:
    assert findings(regression(loss), "LAY001", precision="fp32") == []


@pytest.mark.parametrize("name", ["gpt2", "llama-3.1-8b"])
def test_published_models_have_no_silent_broadcast(name: str) -> None:
    assert findings(name, "LAY001", seq=64) == []


def test_one_change_that_fits_is_not_any_one_of_several() -> None:
    from rooftile.rules import mem001_over_capacity as rule_module

    one, other = (rule_module._Change(label, 10) for label in ("--batch 1", "--checkpoint blocks"))
    context = None  # not read where something fits
    assert rule_module._response(context, [one], one, 20).startswith("this fits, found")  # type: ignore[arg-type]
    assert rule_module._response(context, [one, other], one, 20).startswith("any one of these fits")  # type: ignore[arg-type]
