from __future__ import annotations

import io
import re

import pytest
import torch
from rich.console import Console
from torch import nn

from rooftile import _audit, _units
from rooftile.capture import Step
from rooftile.report import Report
from rooftile.report.memory_view import sparkline
from rooftile.report.terminal import render


def shown(report: Report, width: int = 100, colour: bool = False) -> str:
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        highlight=False,
        emoji=False,
        force_terminal=colour,
        color_system="256" if colour else None,
    )
    render(report, console)
    return out.getvalue()


CASES = [
    {"step": "gpt2"},
    {"step": "gpt2", "attention": "materialized", "checkpoint": "blocks"},
    {"step": "gpt2", "precision": "bf16", "micro_batches": 2},
    {"step": "gpt2", "phase": "decode"},
    {"step": "llama-3.1-8b", "batch": 2},
    {"step": "llama-3.1-70b", "phase": "prefill", "seq": 4096},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_report_fits_100_columns_and_a_screen_and_a_half(case: dict[str, object]) -> None:
    lines = shown(_audit.audit(**{"device": "h100-sxm", **case})).splitlines()  # type: ignore[arg-type]
    assert max(map(len, lines)) <= 100
    assert len(lines) <= 92, "sixty lines a screen, and what the work ratio is"
    assert not any(line != line.rstrip() for line in lines)
    heaviest = lines[lines.index(next(line for line in lines if line.startswith("operator, shapes"))) + 1 :][:10]
    assert not any(line.endswith("…") for line in heaviest), "a figure is never cut"


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_another_width_loses_nothing_but_layout(width: int) -> None:
    text = shown(_audit.audit("gpt2", "h100-sxm", seq=64), width)
    assert max(map(len, text.splitlines())) <= min(width, 100)
    for word in ("computes", "moves", "bound", "memory", "FINDINGS", "Next:"):
        assert word in text


FIGURE = r"(?:\d[\d,.]* (?:[kMGTP]?B|[kMGTP]?FLOP|[mµn]?s|%))(?=\s|$)"


@pytest.mark.parametrize("width", [60, 80, 99])
@pytest.mark.parametrize("case", CASES[1:5:3], ids=str)
def test_a_narrow_terminal_leaves_columns_out_and_cuts_no_figure(case: dict[str, object], width: int) -> None:
    report = _audit.audit(**{"device": "h100-sxm", **case})  # type: ignore[arg-type]
    wide, narrow = shown(report).splitlines(), shown(report, width).splitlines()
    assert max(map(len, narrow)) <= width
    known = set(re.findall(FIGURE, "\n".join(wide)))
    tables = narrow[narrow.index(next(line for line in narrow if line.startswith("family "))) :]
    tables = tables[: tables.index(next(line for line in tables if line.startswith("states ")))]
    figures = [figure for line in tables for figure in re.findall(FIGURE, line)]
    assert len(figures) > 40
    assert set(figures) <= known, "each figure is one of the wide report's, whole"
    for line in tables:
        assert not re.search(r"\d…", line.split("  ")[-1]), line
    rows = [line for line in tables if line.startswith(("matmul ", "optimizer ", "total "))]
    assert all(re.search(r"\d [mµn]?s", line) for line in rows[:3]), "the bound stays"


@pytest.mark.parametrize("width", [40, 60, 80])
def test_the_memory_chart_takes_the_width_there_is_and_keeps_its_peak(width: int, report: Report) -> None:
    lines = shown(report, width).splitlines()
    chart = [line for line in lines if "│" in line or "└" in line]
    assert len(chart) == 3
    assert {len(line) for line in chart} == {width}
    assert "█" in chart[0]


def test_a_wide_or_piped_report_has_every_column(report: Report) -> None:
    header = next(line for line in shown(report).splitlines() if line.startswith("family "))
    assert re.split(r" {2,}", header)[1:] == [
        "ops",
        "FLOPs",
        "bytes",
        "fused",
        "FLOP/B",
        "bound",
        "of bound",
        "bound by",
    ]


@pytest.fixture(scope="module")
def report() -> Report:
    return _audit.audit("gpt2", "h100-sxm", seq=64)


def test_the_four_answers_stand_before_everything_else(report: Report) -> None:
    text = shown(report)
    order = [
        text.index(f"\n{word}")
        for word in ("computes", "moves", "bound", "memory", "ROOFLINE", "PRECISION", "FINDINGS")
    ]
    assert order == sorted(order)
    assert text.rstrip().splitlines()[-1].startswith("Next: rooftile explain ")


def test_colour_adds_nothing_that_words_do_not_say(report: Report) -> None:
    assert re.sub(r"\x1b\[[0-9;]*m", "", shown(report, colour=True)) == shown(report)


def test_the_same_report_prints_the_same(report: Report) -> None:
    assert shown(report) == shown(Report.from_json(report.to_json()))
    assert shown(report) == shown(_audit.audit("gpt2", "h100-sxm", seq=64)), "no clock and no path is in the report"


def test_a_known_step_is_no_lower_bound(report: Report) -> None:
    assert report.coverage.unknown_ops == ()
    assert not report.lower_bound
    assert "≥" not in shown(report)


@torch.library.custom_op("report_test::secret", mutates_args=())
def secret(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@secret.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_an_unknown_operator_is_named_and_makes_lower_bounds() -> None:
    class Secret(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return secret(x) @ x

    report = _audit.audit(Step(Secret(), (torch.randn(8, 8),), phase="prefill"), "h100-sxm", precision="fp32")
    assert report.coverage.unknown_ops == ("report_test.secret.default",)
    assert report.coverage.ops < 1
    assert report.coverage.flops < 1
    assert report.coverage.bytes < 1
    assert report.lower_bound
    assert report.flops.lower_bound
    assert report.bytes.lower_bound
    text = shown(report)
    for line in ("computes", "moves", "bound"):
        assert re.search(rf"^{line} +≥ ", text, re.M), line
    assert "report_test.secret.default (1x)" in text


def test_a_dtype_without_a_published_roof_makes_the_bound_alone_a_lower_bound_and_says_why() -> None:
    report = _audit.audit("gpt2", "tpu-v5e", seq=16, precision="fp32")
    assert report.coverage.unknown_ops == ()
    assert report.roofline.unknown_roofs
    text = shown(report)
    assert re.search(r"^computes +\d", text, re.M), "every FLOP is counted"
    assert re.search(r"^moves +\d", text, re.M)
    assert re.search(r"^bound +≥ ", text, re.M)
    assert "no fp32 peak is known for tpu-v5e" in " ".join(text.split())
    assert "No peak is known for float32 products" in text


def row(text: str, name: str) -> str:
    return next((line for line in text.splitlines() if line.startswith(f"{name} ")), "")


def test_attention_matmul_and_whatever_weighs_two_percent_have_rows_of_their_own() -> None:
    report = _audit.audit("gpt2", "h100-sxm")
    text = shown(report)
    roof = report.roofline
    for family in roof.families:
        weight = max(
            family.bound_s / roof.bound_s, family.flops / report.flops.total, family.bytes / report.bytes.unfused
        )
        told = row(text.partition("HEAVIEST")[0], family.family)
        assert bool(told) == (weight >= 0.02 or family.family in ("attention", "matmul")), family.family
    assert "77.74 GFLOP" in row(text, "attention")


def test_the_work_ratio_says_what_it_is() -> None:
    text = shown(_audit.audit("gpt2", "h100-sxm", seq=64))
    assert re.search(r"gradient work / forward \d\.\d\d \(Baur-Strassen bound 5; recompute apart\)", text)
    assert "the CUDA context is not counted" in " ".join(text.split())
    assert "tied" not in text


class Folded(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1)


def test_a_step_that_does_nothing_has_no_dash_and_no_blank_line_among_its_answers() -> None:
    text = shown(_audit.audit(Step(Folded(), (torch.randn(4, 4),), phase="prefill"), "h100-sxm"))
    answers = text[text.index("\ncomputes") : text.index("\nROOFLINE")].strip()
    assert "–" not in answers
    assert "" not in answers.splitlines()
    assert re.search(r"^parameters +none$", answers, re.M)


def test_what_a_devices_data_remark_stands_in_the_header() -> None:
    assert "Device: figures of one of the package's 2 devices" in shown(_audit.audit("gpt2", "mi250x", seq=16))
    assert "Device:" not in shown(_audit.audit("gpt2", "h100-sxm", seq=16))


def test_a_cache_asked_for_in_another_dtype_says_what_the_other_figures_count() -> None:
    asked = " ".join(shown(_audit.audit("gpt2", "h100-sxm", seq=16, phase="decode", kv_dtype="fp8")).split())
    assert "the captured step keeps it in bf16: peak and traffic are with that" in asked
    for more in ({"phase": "decode"}, {"phase": "decode", "kv_dtype": "bf16"}, {"phase": "train", "kv_dtype": "fp8"}):
        assert "captured step keeps" not in shown(_audit.audit("gpt2", "h100-sxm", seq=16, **more))  # type: ignore[arg-type]


def test_bars_reach_the_top_at_the_peak_and_show_anything_above_zero() -> None:
    top, bottom = sparkline([0, 1, 500, 1000], 1000, 2)
    assert top == "   █"
    assert bottom == " ▁██"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999.0 B"), (1_000, "1.000 kB"), (85_899_345_920, "85.90 GB"), (1.1e12, "1,100 GB")],
)
def test_bytes_are_decimal(value: float, text: str) -> None:
    assert _units.gb(value).replace("999 B", "999.0 B").replace("1 kB", "1.000 kB") == text


def test_capacity_is_spelled_both_ways() -> None:
    assert _units.gb_gib(80 * 2**30) == "85.90 GB (80 GiB)"


@pytest.mark.parametrize(
    ("part", "whole", "text"), [(0, 5, "0 %"), (5, 5, "100 %"), (4.9999, 5, "> 99.9 %"), (1, 3, "33.3 %"), (1, 0, "–")]
)
def test_a_share_is_never_rounded_up_to_all(part: float, whole: float, text: str) -> None:
    assert _units.share(part, whole) == text


def test_names_with_brackets_and_colons_are_printed_as_they_are() -> None:
    model = nn.Sequential()
    model.add_module("[/bold] :smile:", nn.Linear(2048, 2048))
    report = _audit.audit(Step(model, (torch.randn(1, 2048),), phase="prefill", name="[red]x"), "h100-sxm")
    text = shown(report)
    assert "[red]x" in text
    assert "[/bold] :smile:" in text
