"""Roofline and traffic: each operator family under its roof, and the ops that weigh most."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from rooftile import _units as units
from rooftile.report.layout import Columns, heading
from rooftile.report.model import Report
from rooftile.report.section import Section

__all__ = ["blocks"]

#: A family with less than this share of the bound, of the FLOPs and of the bytes goes into the row "other" ...
_SHOWN = 0.02
#: ... but these are looked for, so they always have a row.
_ALWAYS_SHOWN = ("matmul", "attention")
#: Attention decisions that are printed.
_DECISIONS = 3


def blocks(report: Report) -> Iterable[RenderableType]:
    """The two tables and what tiling would remove."""
    roof = report.roofline
    ridge = f"ridge {roof.ridge:.1f} FLOP/B for {roof.ridge_dtype}; " if roof.ridge else ""
    yield heading("ROOFLINE AND TRAFFIC", f"{ridge}intensity and bound unfused; derived")
    yield _families(report)
    yield from _attention(report.target.attention_decision)
    if report.bytes.tiling_removes:
        yield Text(
            f"Exact tiled attention would remove {units.gb(report.bytes.tiling_removes)} of passes over N x N scores."
        )
    yield from _gemm(roof.get("gemm"))
    for roof_name in roof.unknown_roofs:
        yield Text(f"No peak is known for {roof_name}: their bound is by bytes alone.", style="yellow")
    yield heading("HEAVIEST OPS", "all executions in all equal layers together")
    yield _heaviest(roof.heaviest)


def _attention(decisions: tuple[Section, ...]) -> Iterable[Text]:
    """Which attention kernel the device takes, and why."""
    for decision in decisions[:_DECISIONS]:
        number = units.plural(decision["count"], "call")
        yield Text.assemble(("attention ", "bold"), f"{decision.kernel}, {number}: {decision.reason}")
    if len(decisions) > _DECISIONS:
        yield Text(f"attention: {len(decisions) - _DECISIONS} more decisions are in the JSON document", style="dim")


def _gemm(gemm: Section | None) -> Iterable[Text]:
    """What whole tiles and waves leave unused; a report of an earlier release has no such figures."""
    if gemm is None or gemm.tiles is None:
        return
    waves = "" if gemm.waves is None else f", waves fill {100 * gemm.waves:.1f} % of the SMs"
    yield Text.assemble(
        ("matmul tiles ", "bold"),
        f"{gemm.tile[0]} x {gemm.tile[1]} ({gemm.evidence}): {100 * gemm.tiles:.1f} % of their area is output{waves}",
    )


def _families(report: Report) -> Columns:
    roof = report.roofline
    table = Columns(
        "family", "ops", "FLOPs", "bytes", "fused", "FLOP/B", "bound", "of bound", "bound by",
        spare=("fused", "ops", "FLOP/B", "of bound", "FLOPs", "bound by"),
    )  # fmt: skip
    present = [row for row in roof.families if row.ops]
    shown = [row for row in present if _is_shown(row, report)]
    rest = [row for row in present if row not in shown]
    for row in shown:
        table.add_row(row.family, *_figures(row, roof.bound_s), row.limit)
    if rest:
        other = {name: sum(row[name] for row in rest) for name in ("ops", "flops", "bytes", "bytes_fused", "bound_s")}
        other["intensity"] = other["flops"] / other["bytes"] if other["bytes"] else None
        table.add_row("other", *_figures(Section(other), roof.bound_s), "")
    total = Section(
        {
            "ops": report.coverage.ops_total,
            "flops": report.flops.total,
            "bytes": report.bytes.unfused,
            "bytes_fused": report.bytes.fused,
            "intensity": roof.intensity,
            "bound_s": roof.bound_s,
        }
    )
    limit = ("≥ " if roof.lower_bound else "") + roof.limit
    table.add_row("total", *_figures(total, roof.bound_s), limit, style="bold")
    return table


def _is_shown(row: Section, report: Report) -> bool:
    return row.family in _ALWAYS_SHOWN or any(
        part >= _SHOWN * whole > 0
        for part, whole in (
            (row.bound_s, report.roofline.bound_s),
            (row.flops, report.flops.total),
            (row.bytes, report.bytes.unfused),
        )
    )


def _figures(row: Section, whole: float) -> list[str]:
    return [
        f"{row.ops:,}",
        units.flops(row.flops),
        units.gb(row.bytes),
        units.gb(row.bytes_fused),
        _intensity(row.intensity),
        units.duration(row.bound_s),
        units.share(row.bound_s, whole),
    ]


def _intensity(value: float | None) -> str:
    if value is None:
        return "–"
    if 0 < value < 0.01:
        return "< 0.01"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _heaviest(rows: tuple[Section, ...]) -> Columns:
    table = Columns(
        "operator, shapes", "where", "FLOPs", "bytes", "bound", "by",
        spare=("by", "FLOPs", "where", "bytes"), left=("where",),
    )  # fmt: skip
    for row in rows:
        count = f"{row['count']} x " if row["count"] > 1 else ""
        name = row.operator.split(".")[1] if "." in row.operator else row.operator
        place = row.phase if row.module in ("", row.phase) else f"{row.phase} {row.module}"
        table.add_row(
            _fit(f"{count}{name} {_shapes(row.shapes)}", 33),
            _fit(place, 22),
            units.flops(row.flops),
            units.gb(row.bytes),
            units.duration(row.bound_s),
            units.short_dtypes(row.roof),
        )
    return table


def _shapes(shapes: tuple[Any, ...]) -> str:
    """The first two operands; the list of a foreach operator is told by its length."""
    if len(shapes) > 8:
        return f"[{len(shapes)} tensors]"
    return " ".join("x".join(str(size) for size in shape) or "scalar" for shape in shapes[:2])


def _fit(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
