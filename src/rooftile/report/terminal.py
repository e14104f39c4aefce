"""The terminal report: at most 100 columns, a screen and a half, readable without colour.

It is made from the report's sections alone, so that a saved one looks the same without torch. The order is the
reader's: what it computes, what it moves, what bounds it, how much memory and when; then the details.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from rooftile import _units as units
from rooftile.report import memory_view, precision_view, roofline_view
from rooftile.report.layout import WIDTH, heading
from rooftile.report.model import Report
from rooftile.report.section import Section

__all__ = ["WIDTH", "console", "render"]

_SEVERITY_STYLE = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}


def console() -> Console:
    """Standard output as the report wants it: no wider than :data:`WIDTH`, no colour in a pipe, numbers not painted."""
    plain = Console(highlight=False, emoji=False)
    return Console(highlight=False, emoji=False, width=min(WIDTH, plain.width) if plain.is_terminal else WIDTH)


def render(report: Report, output: Console, *, next_command: str = "rooftile explain") -> None:
    """Print ``report``. It ends with the explanation of its gravest finding or, without one, with ``next_command``."""
    for block in (
        _header(report),
        _in_short(report),
        roofline_view.blocks(report),
        memory_view.blocks(report),
        precision_view.blocks(report),
        _findings(report),
    ):
        for item in block:
            _print(item, output)
    # One line however long it is, so that it can be copied; a terminal wraps it by itself.
    output.print(_next(report, next_command), markup=False, highlight=False, soft_wrap=True)


def _print(item: RenderableType, output: Console) -> None:
    """Without the spaces that a table pads its lines with: they would be noise in a file or a diff."""
    # Names come from the user's model: "[b]" in one of them is text, not markup.
    options = output.options.update(width=min(WIDTH, output.width), markup=False, highlight=False)
    for line in output.render_lines(item, options, pad=False):
        while line and not line[-1].text.strip():
            line.pop()
        if line:
            line[-1] = Segment(line[-1].text.rstrip(), line[-1].style)
        output.print(Segments([*line, Segment.line()]), end="")


def _header(report: Report) -> Iterable[Text]:
    target, device, coverage = report.target, report.device, report.coverage
    peak = next((p for p in device.peaks if p.input == target.compute_dtype), None)
    what = [str(target.phase)]
    if target.batch:
        what.append(f"batch {target.batch}" + (f" x seq {target.seq:,}" if target.seq else ""))
    if target.micro_batches and target.micro_batches > 1:
        what.append(f"{target.micro_batches} micro-batches")
    what.append(str(target.precision))
    if target.phase == "train":
        what.append(str(target.optimizer))
        if target.checkpoint != "none":
            what.append(f"checkpoint {target.checkpoint}")
    yield Text.assemble((f"rooftile audit  {target.name}", "bold"), f"  {' · '.join(what)}")
    roofs = f"{units.rate(peak.flops_per_s, 'FLOP/s')} {target.compute_dtype}, " if peak is not None else ""
    yield Text.assemble(
        "on ", (device.name, "bold"), f" ({device.title}): {roofs}{units.rate(device.memory_bandwidth, 'B/s')}, "
        f"{units.gb_gib(device.visible_bytes)}"
    )  # fmt: skip
    yield Text(
        "multiply + add = 2 FLOPs · bytes at device memory · GB 1e9, GiB 2^30 · a bound is no time prediction",
        style="dim",
    )
    known = (
        f"formulas known for {_fraction(coverage.ops)} of {coverage.ops_total:,} ops, {_fraction(coverage.flops)} of "
        f"arithmetic ops, {_fraction(coverage.bytes)} of bytes"
    )
    if coverage.unknown_ops:
        names = ", ".join(f"{name} ({n}x)" for name, n in coverage.unknown_counts.items())
        yield Text(f"{known}. Without one: {names}: FLOPs, bytes and bound are lower bounds (≥).", style="yellow")
    else:
        yield Text(known, style="dim")
    if seen := _remark(device):
        yield Text(f"Device: {seen}.", style="dim")
    for note in target.notes:
        yield Text(f"Note: {note}.", style="dim")


def _remark(device: Section) -> str:
    """What the device's data say beside its figures; a report of an earlier release may have neither."""
    notes = list(device.get("notes", ()))
    count = device.get("logical_devices", 1)
    if count > 1 and not notes:
        notes.append(f"software sees {count} devices in one package; the figures are of the package")
    return "; ".join(notes)


def _fraction(value: float) -> str:
    return units.share(value, 1.0)


def _in_short(report: Report) -> Iterable[RenderableType]:
    """The four answers."""
    flops, moved, roof, memory = report.flops, report.bytes, report.roofline, report.memory
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    products = f", {units.share(flops.matmul, flops.total)} in matrix products" if flops.total else ""
    per_token = f", {units.flops(flops.per_token)} a token" if flops.per_token else ""
    table.add_row("computes", f"{_at_least(flops)}{units.flops(flops.total)}{products}{per_token}")
    parts = [f"{name} {units.flops(flops[name])}" for name in ("forward", "recompute", "backward", "optimizer")
             if flops[name]]  # fmt: skip
    if parts:
        table.add_row("", Text(" · ".join(parts), style="dim"))
    if flops.work_ratio:
        told = f"gradient work / forward {flops.work_ratio:.2f} (Baur-Strassen bound 5; recompute apart)"
        table.add_row("", Text(told, style="dim"))
    table.add_row(
        "moves",
        f"{_at_least(moved)}{units.gb(moved.unfused)} unfused, {units.gb(moved.fused)} with elementwise chains fused "
        f"({units.share(moved.fusion_removes, moved.unfused) if moved.unfused else '0 %'} less)",
    )
    compute = units.share(roof.compute_bound_s, roof.bound_s) if roof.bound_s else "0 %"
    table.add_row(
        "bound",
        f"{_at_least(roof)}{units.duration(roof.bound_s)} unfused ({compute} of it by arithmetic, the rest by memory), "
        f"{units.duration(roof.bound_fused_s)} fused{_missing_peak(report)}",
    )
    table.add_row("memory", _memory_line(memory))
    if report.params.count is not None:
        table.add_row("parameters", _parameters(report.params))
    yield Text("")
    yield table


def _at_least(part: Section) -> str:
    """The mark of a lower bound: each figure has its own reason to be one."""
    return "≥ " if part.lower_bound else ""


def _missing_peak(report: Report) -> str:
    """Why the bound is a lower one where every formula is known."""
    dtypes = list(dict.fromkeys(units.short_dtypes(name.partition(" ")[0]) for name in report.roofline.unknown_roofs))
    return f"; ≥: no {' and no '.join(dtypes)} peak is known for {report.device.name}" if dtypes else ""


def _parameters(params: Section) -> str:
    frozen = params.count - (params.count if params.trainable is None else params.trainable)
    text = f"{params.count:,}" + (f" ({frozen:,} of them frozen)" if frozen else "")
    return f"{text}, {units.gb_gib(params.bytes)}" if params.count else "none"


def _memory_line(memory: Section) -> Text:
    text = Text(f"peak {units.gb_gib(memory.peak_bytes)}, ")
    if memory.fits is None:
        text.append("fit unknown")
    else:
        text.append("fits" if memory.fits else "DOES NOT FIT", style="green" if memory.fits else "bold red")
    operator = memory.peak_operator.removeprefix("aten.").removesuffix(".default")
    where = [part for part in dict.fromkeys((memory.peak_phase, memory.peak_module, operator)) if part]
    return text.append(f"; at {' · '.join(where) or 'its start'}")


def _findings(report: Report) -> Iterable[RenderableType]:
    if not report.findings:
        yield heading("FINDINGS", "none of the rules checked found anything")
        return
    yield heading("FINDINGS", "rooftile explain CODE says more")
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column()
    for finding in report.findings:
        style = _SEVERITY_STYLE.get(finding.severity, "bold")
        table.add_row(
            Text(f"{finding.code}", style=style),
            Text.assemble((f"{finding.title}", "bold"), f" [{finding.severity}]: {finding.evidence}."),
        )
        table.add_row("", Text.assemble(f"→ {finding.response}", (_saving(finding.saving), "dim")))
    yield table


def _saving(saving: Section) -> str:
    parts = []
    for nbytes, what in ((saving.peak_bytes, "at the peak"), (saving.moved_bytes, "moved")):
        if nbytes:
            parts.append(f"{'saves' if nbytes > 0 else 'costs'} {units.gb(abs(nbytes))} {what}")
    return f"  ({', '.join(parts)}; {saving.evidence})" if parts else ""


def _next(report: Report, otherwise: str) -> Text:
    """The command that most likely comes next."""
    command = f"rooftile explain {report.findings[0].code}" if report.findings else otherwise
    return Text.assemble("\nNext: ", (command, "bold"))
