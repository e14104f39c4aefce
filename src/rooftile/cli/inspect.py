"""``rooftile inspect FILE``: the exponents of every tensor in a file, and what each format would lose of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer

from rooftile.cli.formats import PlotOption
from rooftile.cli.options import JsonOption
from rooftile.cli.output import (
    STDOUT,
    check_distinct,
    check_input_kept,
    check_writable,
    next_command,
    progress,
    write_json,
)
from rooftile.cli.tables import printable, table
from rooftile.errors import UsageError

if TYPE_CHECKING:
    from rooftile.formats.histogram import ExponentHistogram
    from rooftile.formats.inspection import FileInspection, TensorInspection
    from rooftile.formats.reach import CountBound
    from rooftile.formats.recipes import Recipe

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command(short_help="Exponent histograms of a file's tensors.")(inspect)


def inspect(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A .safetensors, .npy or .pt file (read with weights_only).")
    ],
    formats: Annotated[
        str | None,
        typer.Option(
            "--formats", metavar="NAMES", help="Formats to judge, separated by commas [default: 16 bits and less]."
        ),
    ] = None,
    json: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Show what each format would flush or overflow of every tensor, and the recipe that loses least."""
    from rooftile.formats.inspection import inspect_file
    from rooftile.formats.plots import check_plot, save_plot, tensor_exponents
    from rooftile.formats.recipes import DEFAULT_FORMATS

    check_input_kept(file, json=json, plot=plot)
    check_distinct(json=json, plot=plot)
    check_writable(json)
    check_plot(plot)
    names = DEFAULT_FORMATS if formats is None else tuple(name.strip() for name in formats.split(",") if name.strip())
    if not names:
        raise UsageError("--formats names no format; give one or more, such as --formats fp16,e4m3fn")
    with progress() as say:
        found = inspect_file(file, names, lambda what: say(printable(what)))
    if plot is not None:
        save_plot(tensor_exponents(found.total, found.formats, found.path), plot)
    if json != STDOUT:
        typer.echo(_report(found))
        typer.echo(next_command(f"rooftile formats show {found.formats[0]}", "what a format holds"))
    if json is not None:
        write_json(json, found.to_dict())


def _report(found: FileInspection) -> str:
    counted = [tensor for tensor in found.tensors if tensor.histogram is not None]
    unread = [tensor for tensor in found.tensors if tensor.histogram is None]
    lines = [
        f"{found.path}: {found.nbytes / 1e9:,.3f} GB, {len(found.tensors):,} tensors, {len(counted):,} counted",
        "",
    ]
    if not counted:
        lines += [_nothing_counted(found), ""]
    else:
        lines += [_tensor_table(counted), "", _format_table(found), ""]
    if unread:
        lines.append("not counted:")
        lines += [f"  {printable(tensor.name)} ({tensor.dtype}): {tensor.unread}" for tensor in unread]
        lines.append("")
    if not counted:
        return "\n".join(lines)
    lines.append("bad: Inf and NaN; binades: lowest and highest exponent; fp16 loses: flushed or overflowed, unscaled")
    lines.append("flush, overflow: share of the non-zero finite values, rounded to nearest; <= marks an upper bound")
    lines.append("error: estimated mean relative error, a flush counted as 1 (even spread in a binade is assumed)")
    return "\n".join(lines) + "\n"


def _nothing_counted(found: FileInspection) -> str:
    if not found.tensors:
        return "The file holds no tensors, so there is nothing to count."
    if all(tensor.unread.startswith("no floating dtype") for tensor in found.tensors):
        return f"None of the file's {len(found.tensors):,} tensors is of a floating dtype that is read."
    return f"None of the file's {len(found.tensors):,} tensors could be counted."


def _tensor_table(tensors: list[TensorInspection]) -> str:
    from rooftile.formats.reach import CountBound, flushed, overflowed

    rows = []
    for tensor in tensors:
        h = tensor.histogram
        if h is None:
            continue
        flush, over = flushed(h, "fp16"), overflowed(h, "fp16")
        rows.append(
            (
                _short(printable(tensor.name), 24),
                tensor.dtype.removeprefix("float8_").replace("bfloat", "bf").replace("float", "fp"),
                _compact(h.total),
                _share(h.zeros, h.total),
                _compact(h.infs + h.nans),
                _range(h),
                _bound(CountBound(flush.low + over.low, flush.high + over.high, h.nonzero)),
                _recipe(tensor.best(8)),
            )
        )
    header = ("tensor", "dtype", "values", "zeros", "bad", "binades", "fp16 loses", "least lost in 8 bits")
    return table(header, rows, left=2)


def _compact(count: int) -> str:
    """Up to four characters and a unit: 999, 262k, 1.07G."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def _format_table(found: FileInspection) -> str:
    from rooftile.formats.reach import flushed, overflowed, subnormal
    from rooftile.formats.recipes import rank_recipes

    h = found.total
    rows = []
    for name in found.formats:
        best = rank_recipes(h, [name])[0]
        rows.append(
            (
                name,
                _bound(flushed(h, name)),
                _bound(subnormal(h, name)),
                _bound(overflowed(h, name)),
                _scale(best) if h.nonzero else "-",
                _bound(best.flushed),
                f"{best.relative_error:.2%}" if h.nonzero else "-",
            )
        )
    header = ("all tensors in", "flush", "below normal", "overflow", "one scale", "flush then", "error")
    return table(header, rows)


def _short(name: str, width: int) -> str:
    return name if len(name) <= width else f"..{name[2 - width :]}"  # names differ at their ends


def _share(part: int, whole: int) -> str:
    if not part:
        return "0"
    share = part / whole
    return f"{share:.1%}" if share >= 0.001 else "<0.1%"


def _bound(bound: CountBound) -> str:
    if bound.high == 0:
        return "0"
    mark = "" if bound.exact else "<="
    return f"{mark}{bound.fraction_high:.1%}" if bound.fraction_high >= 0.001 else f"{mark}{bound.fraction_high:.0e}"


def _range(h: ExponentHistogram) -> str:
    exponents = list(h.counts)
    return f"{exponents[0]}..{exponents[-1]}" if exponents else "-"


def _scale(recipe: Recipe) -> str:
    return f"2^{math.frexp(recipe.encode_scale)[1] - 1}"


def _recipe(recipe: Recipe | None) -> str:
    if recipe is None:
        return "-"
    scale = "" if recipe.encode_scale == 1 else f" x {_scale(recipe)}"
    return f"{recipe.fmt.removeprefix('fp8_')}{scale} {recipe.relative_error:.1%}"
