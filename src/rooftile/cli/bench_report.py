"""What ``rooftile bench`` prints: plain tables of at most 100 columns, figures in the digits that they support."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rooftile._units import short_dtypes
from rooftile.bench.comparison import Comparison
from rooftile.bench.digits import figure, significant_digits, with_digits
from rooftile.bench.record import BUSY, WIDE_SPREAD, Record
from rooftile.cli.tables import NOTHING, WIDTH, table

if TYPE_CHECKING:
    from rooftile.bench.attention_run import Outcome
    from rooftile.bench.ceilings import Ceilings

__all__ = ["attention_report", "ceilings_report", "comparison_as_dict", "comparison_report"]

#: Characters of a code path that the table has room for.
_PATH = 16

_ISA_SHOWN = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "asimd", "sve")


def ceilings_report(found: Ceilings, threads: Sequence[int]) -> str:
    """Each ceiling at each number of threads."""
    first = found.records[0]
    lines = [f"rooftile bench ceilings  {_threads(threads)}", *_conditions(first)]
    lines += [*textwrap.wrap(found.method, WIDTH), f"best of {first.repeats} rounds; spread: IQR over the median", ""]
    header = ["ceiling", *(cell for count in threads for cell in (_threads([count]), "spread"))]
    rows = []
    for name in dict.fromkeys(record.task for record in found.records):
        cells = [found.of(name, count) for count in threads]
        rows.append([name, *(text for cell in cells for text in _cell(cell))])
    lines += [table(header, rows), ""]
    lines += _wrapped(f"not measured: {name}: {reason}" for name, reason in found.missing)
    lines += _wrapped(_warnings(found.records))
    return "\n".join(lines)


def attention_report(outcomes: Sequence[Outcome], roofs: Ceilings, threads: int) -> str:
    """One table a case and pass."""
    first = outcomes[0].records[0]
    lines = [f"rooftile bench attention  {_threads([threads])}", *_conditions(first)]
    lines += [
        f"median of {first.repeats} rounds in turn after {first.warm_up} of warm-up, caches warm; GFLOP/s of visible",
        "pairs, `dense` of the whole square; absolute errors; x SDPA: how many times as fast as torch's",
        "own, round by round; ~: the quartiles of that lie on both sides of 1",
        "",
    ]
    for outcome in outcomes:
        lines += [*_outcome(outcome, roofs, threads), ""]
    lines += _wrapped(_above_roof(outcomes, roofs, threads))
    lines += _wrapped(_warnings([record for outcome in outcomes for record in outcome.records]))
    return "\n".join(lines)


def comparison_report(compared: Sequence[Comparison], alone: Sequence[Record]) -> str:
    """Before, after, and their ratio with the interval between their quartiles, one table a task."""
    lines = ["x as fast: how many times the speed, and between which quartiles; across 1 is not told apart", ""]
    for task in dict.fromkeys(one.before.task for one in compared):
        rows = [
            (
                _input(one.before), figure(one.before), figure(one.after),
                f"{one.faster:.2f} ({one.low:.2f}-{one.high:.2f})",
            )
            for one in compared
            if one.before.task == task
        ]  # fmt: skip
        lines += [table((task, "before", "after", "x as fast"), rows), ""]
    lines += _wrapped(f"in one file only: {_titled(record)}" for record in alone)
    lines += _wrapped(_warnings([record for one in compared for record in (one.before, one.after)]))
    return "\n".join(lines)


def comparison_as_dict(one: Comparison) -> dict[str, Any]:
    """The comparison for JSON."""
    return {
        "task": one.before.task, "contender": one.before.contender, "dtype": one.before.dtype,
        "shape": list(one.before.shape), "threads": one.before.threads, "unit": one.before.unit,
        "before": one.before.value, "after": one.after.value, "faster": one.faster, "low": one.low, "high": one.high,
    }  # fmt: skip


def _conditions(record: Record) -> list[str]:
    machine, versions = record.hardware, record.versions
    isa = " ".join(name for name in _ISA_SHOWN if name in machine.isa)
    caches = ", ".join(f"L{cache.level} {_bytes(cache.nbytes)}" for cache in machine.caches)
    text = (
        f"{machine.cpu}, {machine.cores} cores, {isa or 'instruction set unknown'}; {caches or 'caches unknown'}; "
        f"{machine.memory_gib} GiB, huge pages {machine.huge_pages or 'unknown'}; torch {versions.torch}, rooftile "
        f"{versions.rooftile}, C++ core {versions.native_core}"
    )
    return textwrap.wrap(text, WIDTH)


def _outcome(outcome: Outcome, roofs: Ceilings, threads: int) -> Iterator[str]:
    from rooftile.bench.attention_contenders import PEER
    from rooftile.bench.ceilings import compute_ceiling

    case = outcome.case
    roof = compute_ceiling(roofs, outcome.records[0].dtype, threads)
    dtype = outcome.records[0].dtype
    ceiling = "no ceiling is known" if roof is None else f"ceiling {roof[0]}: {roof[1] / 1e9:,.0f} GFLOP/s"
    peer = outcome.of(PEER)
    yield f"{case.name}  {dtype}  {case.mask_name or 'full'}; {ceiling}"
    header = (
        "backward" if outcome.backward else "forward", "path", "median", "IQR", "GFLOP/s", "dense", "ceiling",
        "max err", "mean err", "x SDPA",
    )  # fmt: skip
    yield table(header, [_row(record, peer, roof) for record in outcome.records], left=2)
    yield from _wrapped(f"{r.contender}: {r.path}" for r in outcome.records if _short(r.path) != r.path)
    yield from _wrapped(f"{name} did not run: {reason}" for name, reason in outcome.refused)
    heads = case.batch * case.kv_heads
    if outcome.kv_heads_compared < heads:
        yield f"errors are those of {outcome.kv_heads_compared} of {heads} kv heads: FP64 for all would take too long"


def _row(record: Record, peer: Record | None, roof: tuple[str, float] | None) -> tuple[str, ...]:
    from rooftile.bench.measuring import paired_ratio

    visible, dense = record.rate("visible FLOPs"), record.rate("dense FLOPs")
    digits = significant_digits(record.value, record.standard_error)
    worst = max((error.largest for error in record.errors), default=None, key=_as_error)
    elements = sum(error.elements for error in record.errors)
    mean = sum(error.mean * error.elements for error in record.errors) / elements if elements else None
    ratio = None if peer is None else paired_ratio(peer.samples, record.samples)
    return (
        record.contender,
        _short(record.path) or NOTHING,
        figure(record),
        _spread(record),
        _giga(visible, digits),
        _giga(dense, digits),
        NOTHING if roof is None else f"{visible / roof[1]:.0%}",
        NOTHING if worst is None else f"{worst:.1e}",
        NOTHING if mean is None else f"{mean:.1e}",
        NOTHING if ratio is None else _times(*ratio),
    )


def _times(low: float, ratio: float, high: float) -> str:
    """The ratio, behind a ``~`` where it was not told apart from 1."""
    text = f"{ratio:.2f}" if ratio < 100 else f"{ratio:.0f}"
    return f"~{text}" if low < 1 < high else text


def _short(path: str) -> str:
    """``avx512`` of ``avx512, 256 keys a split``: a column has room for no more."""
    return path.partition(",")[0][:_PATH]


def _giga(rate: float, digits: int) -> str:
    return "<0.01" if rate < 1e7 else with_digits(rate / 1e9, digits)


def _spread(record: Record) -> str:
    return f"{record.spread:.0%}" if record.spread < 10 else ">999%"


def _above_roof(outcomes: Sequence[Outcome], roofs: Ceilings, threads: int) -> Iterator[str]:
    from rooftile.bench.ceilings import compute_ceiling

    for record in (record for outcome in outcomes for record in outcome.records):
        roof = compute_ceiling(roofs, record.dtype, threads)
        if roof is not None and record.rate("visible FLOPs") > roof[1]:
            yield (
                f"error: {_titled(record)} is above the ceiling {roof[0]}: it uses other instructions, or others used "
                "the machine while the ceiling was measured; the share means nothing"
            )


def _as_error(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _cell(record: Record | None) -> tuple[str, str]:
    return (NOTHING, NOTHING) if record is None else (figure(record), _spread(record))


def _warnings(records: Sequence[Record]) -> Iterator[str]:
    wide = [record for record in records if record.wide]
    if wide:
        worst = max(wide, key=lambda record: record.spread)
        yield (
            f"warning: {len(wide)} of {len(records)} figures have an IQR above {WIDE_SPREAD:.0%} of their median "
            f"(most: {_titled(worst)}, {worst.spread:.0%}); measure again on a quiet machine, or with more --repeats"
        )
    disturbed = [record.others_busy or 0.0 for record in records if record.disturbed]
    if disturbed:
        yield (
            f"warning: other processes used up to {max(disturbed):.1f} of {records[0].hardware.logical_cpus} "
            f"processors (more than {BUSY}) during {len(disturbed)} of {len(records)} figures; ratios within a round "
            "suffer least"
        )


def _titled(record: Record) -> str:
    return f"{record.task} {_input(record)}"


def _input(record: Record) -> str:
    """``native 1x32/8x1/4096x128 bf16 causal 2t``."""
    options = dict(record.options)
    parts = [record.contender, short_dtypes(record.dtype), str(options.get("mask", "")), f"{record.threads}t"]
    if len(record.shape) == 4:
        batch, heads, length, head_dim = record.shape
        kv_heads, kv_len = options.get("kv_heads", heads), options.get("kv_len", length)
        heads_text = f"{heads}" if heads == kv_heads else f"{heads}/{kv_heads}"
        length_text = f"{length}" if length == kv_len else f"{length}/{kv_len}"
        parts.insert(1, f"{batch}x{heads_text}x{length_text}x{head_dim}")
    elif record.shape:
        parts.insert(1, "x".join(map(str, record.shape)))
    return " ".join(part for part in parts if part not in ("", "none"))


def _threads(counts: Sequence[int]) -> str:
    return f"{' and '.join(map(str, counts))} {'thread' if list(counts) == [1] else 'threads'}"


def _bytes(nbytes: int) -> str:
    return f"{nbytes // 2**20} MiB" if nbytes >= 2**20 else f"{nbytes // 2**10} KiB"


def _wrapped(lines: Iterator[str]) -> list[str]:
    return [part for line in lines for part in textwrap.wrap(line, WIDTH, subsequent_indent="  ")]
