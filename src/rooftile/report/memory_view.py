"""Memory: the timeline, what is alive at the peak, the states, the fit, and the KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from rooftile import _units as units
from rooftile.report.layout import Beside, Columns, heading
from rooftile.report.model import Report
from rooftile.report.section import Section

__all__ = ["blocks", "sparkline"]

_BARS = " ▁▂▃▄▅▆▇█"
_ROWS = 2
_COLUMNS = 86
#: Columns of the chart's scale.
_LABEL = 11
#: Lines of the tables by role and by module.
_LINES = 6


def blocks(report: Report) -> Iterable[RenderableType]:
    """Timeline, tables, fit, KV cache."""
    memory = report.memory
    yield heading("MEMORY", "live tensors (allocated); derived from observed lifetimes")
    if memory.timeline:
        yield _Timeline([(point.phase, point.live_bytes) for point in memory.timeline], memory.peak_bytes)
    yield _at_the_peak(memory)
    yield from _states_and_fit(report)
    yield _kv_cache(report.kv_cache)


class _Timeline:
    """Live bytes over the step, in as many columns as the terminal has room for."""

    def __init__(self, points: Sequence[tuple[str, int]], top: int) -> None:
        self._points, self._top = points, top

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width - _LABEL - 2
        phases, values = _stretched(self._points, max(1, min(_COLUMNS, room)))
        labels = [units.gb(self._top), *[""] * (_ROWS - 2), "0 B"]
        for label, line in zip(labels, sparkline(values, self._top, _ROWS), strict=True):
            yield Text(f"{label:>{_LABEL}} │{line}")
        yield Text(f"{'':>{_LABEL}} └{_ruler(phases)}", style="dim")


def _stretched(points: Sequence[tuple[str, int]], width: int) -> tuple[list[str], list[int]]:
    """The points over at most ``width`` columns; a column keeps the largest of its points, so the peak stays."""
    columns_ = min(width, len(points))
    phases, values = [], []
    for column in range(columns_):
        part = points[column * len(points) // columns_ : (column + 1) * len(points) // columns_]
        phase, value = max(part, key=lambda point: point[1])
        phases.append(phase)
        values.append(value)
    return phases, values


def sparkline(values: Sequence[int], top: int, rows: int) -> list[str]:
    """Bars in ``rows`` lines, the highest line first; ``top`` fills all of them, anything above 0 shows."""
    steps = rows * (len(_BARS) - 1)
    heights = [max(1, round(steps * value / top)) if value and top else 0 for value in values]
    per_row = len(_BARS) - 1
    return [
        "".join(_BARS[min(max(height - row * per_row, 0), per_row)] for height in heights)
        for row in reversed(range(rows))
    ]


def _ruler(phases: Sequence[str]) -> str:
    """Phase names under their columns, cut where a phase is narrower than its name."""
    out, first = "", 0
    while first < len(phases):
        end = first
        while end < len(phases) and phases[end] == phases[first]:
            end += 1
        width = end - first
        out += phases[first][: width - 1].ljust(width - 1, "─") + "┘" if width > 1 else "┘"
        first = end
    return out


def _at_the_peak(memory: Section) -> Beside:
    """By role and by module."""
    return Beside(
        _split(f"at the peak, {memory.peak_phase or 'no op'}: by role", memory.by_role, memory.peak_bytes),
        _split("by module", memory.by_module, memory.peak_bytes),
    )


def _split(title: str, parts: Mapping[str, int], whole: int) -> Columns:
    table = Columns(title, "", "")
    items = [(name, nbytes) for name, nbytes in parts.items() if nbytes]
    shown, rest = items[:_LINES], items[_LINES:]
    if len(rest) == 1:
        shown, rest = items, []
    for name, nbytes in shown:
        table.add_row(name.replace("_", " ") if "." not in name else name, units.gb(nbytes), units.share(nbytes, whole))
    if rest:
        nbytes = sum(n for _, n in rest)
        table.add_row(f"{len(rest)} more", units.gb(nbytes), units.share(nbytes, whole))
    return table


def _context(nbytes: int | None, device_class: str | None) -> str:
    whose = "CUDA" if device_class == "cuda" else "device's"
    return f"the {whose} context is not counted" if nbytes is None else f"the {whose} context takes {units.gb(nbytes)}"


def _states_and_fit(report: Report) -> Iterable[Text]:
    memory = report.memory
    states = memory.states
    names = ("weights", "buffers", "gradients", "master_weights", "optimizer_state")
    parts = [f"{name.replace('_', ' ')} {units.gb(states[name])}" for name in names if states[name]]
    total = f" = {units.gb(states.total)}" if len(parts) > 1 else ""
    yield Text.assemble(("states ", "bold"), f"{' + '.join(parts) or 'none'}{total}")
    peaks = " · ".join(f"{phase} {units.gb(nbytes)}" for phase, nbytes in memory.phase_peaks.items())
    yield Text.assemble(("peak by phase ", "bold"), peaks or "no ops")
    if None in (memory.fits, memory.headroom_bytes, memory.visible_bytes):
        yield Text.assemble(("fit ", "bold"), "unknown: the device's visible capacity is not known")
        return
    verdict, style = ("fits", "green") if memory.fits else ("does not fit", "bold red")
    left = f"{units.gb(abs(memory.headroom_bytes))} {'left' if memory.fits else 'too much'}"
    yield Text.assemble(
        ("fit ", "bold"),
        f"{units.gb(memory.peak_bytes)} of {units.gb(memory.visible_bytes)} visible ({memory.visible_evidence}): ",
        (verdict, style),
        f", {left}; {_context(memory.context_bytes, report.device.get('device_class'))}",
    )


def _kv_cache(cache: Section) -> Text:
    if cache.bytes_per_token is None:
        return Text.assemble(("KV cache ", "bold"), f"none: {cache.reason}")
    heads = _counted(cache.layers, "layer")
    if cache.heads and cache.head_dim:
        heads += f" x {_counted(cache.heads, 'head')} x {cache.head_dim}"
    return Text.assemble(
        ("KV cache ", "bold"),
        f"{cache.bytes_per_token:,} B a token ({heads}, {cache.dtype}; {cache.evidence}), "
        f"{units.gb(cache.total_bytes)} for {cache.batch} x {cache.tokens:,}{_as_captured(cache)}",
    )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _as_captured(cache: Section) -> str:
    """What the other figures count where the cache is asked for in another dtype than the captured one."""
    captured = cache.get("captured_dtype")
    if captured is None or captured == cache.dtype:
        return ""
    return f"; the captured step keeps it in {units.short_dtypes(captured)}: peak and traffic are with that"
