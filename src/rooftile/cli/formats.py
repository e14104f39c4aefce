"""``rooftile formats``: what each number format holds, one format in full, and one number cast into several."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Annotated, Any, cast, get_args

import typer

from rooftile.cli.options import JsonOption
from rooftile.cli.output import STDOUT, check_distinct, check_writable, next_command, write_json
from rooftile.cli.tables import table
from rooftile.errors import UsageError
from rooftile.formats.casting import Cast, cast_number
from rooftile.formats.catalogue import FORMATS, get_format
from rooftile.formats.format import FloatFormat
from rooftile.formats.policy import Overflow, Rounding
from rooftile.formats.reference import edge_stays, overflow_threshold, value_neighbours

__all__ = ["register"]

_verb = typer.Typer(rich_markup_mode=None)

PlotOption = Annotated[
    str | None,
    typer.Option("--plot", metavar="out.svg|png", help="Draw it too (needs the extra `plot`)."),
]
FormatName = Annotated[
    str,
    typer.Argument(metavar="NAME", help="A format, such as bf16 or e4m3fn.", autocompletion=lambda: list(FORMATS)),
]


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.add_typer(_verb, name="formats", short_help="List number formats, show one, or cast a number.")


@_verb.callback(invoke_without_command=True)
def formats(ctx: typer.Context, json: JsonOption = None, plot: PlotOption = None) -> None:
    """List the number formats: bits, range, resolution, special values."""
    if ctx.invoked_subcommand is not None:
        if json is not None or plot is not None:
            raise UsageError("--json and --plot belong after the name: rooftile formats show NAME --json PATH")
        return
    check_distinct(json=json, plot=plot)
    check_writable(json)
    _draw_number_line(list(FORMATS.values()), plot)
    if json != STDOUT:
        typer.echo(_listing())
        typer.echo(next_command("rooftile formats show e4m3fn", "every figure of one format"))
    if json is not None:
        write_json(json, {"schema": "rooftile.formats/1", "formats": [_as_dict(fmt) for fmt in FORMATS.values()]})


@_verb.command()
def show(name: FormatName, json: JsonOption = None, plot: PlotOption = None) -> None:
    """Show one format: fields, range, resolution, thresholds and special codes."""
    fmt = get_format(name)
    check_distinct(json=json, plot=plot)
    check_writable(json)
    _draw_number_line([fmt], plot)
    if json != STDOUT:
        typer.echo("\n".join(_details(fmt)))
        typer.echo(next_command(f"rooftile formats cast 0.1 --to {fmt.name}", "what a number becomes in it"))
    if json is not None:
        write_json(json, {"schema": "rooftile.format/1", "format": _as_dict(fmt)})


@_verb.command("cast", context_settings={"ignore_unknown_options": True})
def cast_command(
    values: Annotated[
        list[str], typer.Argument(metavar="VALUE...", help="Numbers: 70000, -1e-8, 2^-26, 0x1.8p3, inf.")
    ],
    to: Annotated[str, typer.Option("--to", metavar="FORMATS", help="Formats, separated by commas.")],
    rounding: Annotated[str, typer.Option(help="nearest-even, toward-zero, up or down.")] = "nearest-even",
    overflow: Annotated[str, typer.Option(help="Where a finite overflow ends: ieee or saturate.")] = "ieee",
    json: JsonOption = None,
) -> None:
    """Cast numbers into formats: value, code, neighbours, error in ulps. Decimals are read exactly, rounded once."""
    chosen = [get_format(name.strip()) for name in to.split(",") if name.strip()]
    if not chosen:
        raise UsageError("--to names no format; give one or more, such as --to fp16,bf16,e4m3fn")
    if rounding == "stochastic" or rounding not in get_args(Rounding):
        raise UsageError(f"--rounding is {rounding!r}; choose nearest-even, toward-zero, up or down")
    if overflow not in get_args(Overflow):
        raise UsageError(f"--overflow is {overflow!r}; choose ieee or saturate")
    check_writable(json)
    casts = [
        cast_number(text, fmt, cast(Rounding, rounding), cast(Overflow, overflow)) for text in values for fmt in chosen
    ]
    if json != STDOUT:
        typer.echo(_cast_table(casts))
        typer.echo(next_command(f"rooftile formats show {chosen[0].name}", "the format in full"))
    if json is not None:
        policy = {"rounding": rounding, "overflow": overflow}
        write_json(
            json, {"schema": "rooftile.cast/1", **policy, "casts": [_plain(c, get_format(c.fmt)) for c in casts]}
        )


# --- Showing ---


def _text(value: float | None) -> str:
    """Nine significant digits, which tell all fp32 values apart; integers in full."""
    if value is None:
        return "-"
    if value == 0:
        return "-0" if math.copysign(1, value) < 0 else "0"
    if math.isfinite(value) and value == int(value) and abs(value) < 1e9:
        return str(int(value))
    return f"{value:.9g}"


def _code(code: int | None, fmt: FloatFormat) -> str:
    return "-" if code is None else f"0x{code:0{-(-fmt.bits // 4)}X}"


def _cast_table(casts: list[Cast]) -> str:
    header = ("format", "value", "code", "below", "above", "error, ulps", "")
    rows = [
        (
            one.fmt,
            _text(one.value),
            _code(one.code, get_format(one.fmt)),
            _text(one.below),
            _text(one.above),
            "-" if one.error_ulps is None else f"{one.error_ulps:+.4g}",
            one.note.ljust(max(len(other.note) for other in casts)),
        )
        for one in casts
    ]
    if len({one.text for one in casts}) == 1:
        return f"{casts[0].text}\n\n{table(header, rows)}\n"
    return table(("input", *header), [(c.text, *row) for c, row in zip(casts, rows, strict=True)], left=2) + "\n"


def _listing() -> str:
    rows = [
        (
            fmt.name,
            str(fmt.bits),
            f"{int(fmt.signed)}/{fmt.exponent_bits}/{fmt.fraction_bits}",
            f"{fmt.max:.5g}",
            f"{fmt.tiny:.3g}",
            f"{fmt.smallest_subnormal:.3g}",
            f"{fmt.eps:.3g}",
            _specials(fmt).ljust(12),
        )
        for fmt in FORMATS.values()
    ]
    header = ("format", "bits", "s/e/f", "max", "smallest normal", "smallest", "eps", "specials    ")
    notes = [
        f"{fmt.name}: a matrix-compute mode over {fmt.computes_over} storage ({fmt.storage_bits} bits), not a dtype"
        for fmt in FORMATS.values()
        if fmt.computes_over
    ]
    return table(header, rows) + "\n\n" + "\n".join([*notes, "e8m0: for scales only, no sign and no zero"]) + "\n"


def _specials(fmt: FloatFormat) -> str:
    parts = ["Inf"] if fmt.infinities else []
    parts += ["NaN"] if fmt.nan_codes != "none" else []
    parts += ["-0"] if fmt.negative_zero else []
    return " ".join(parts) or "none"


def _details(fmt: FloatFormat) -> Iterator[str]:
    yield f"{fmt.name}: {fmt.bits} bits = {int(fmt.signed)} sign, {fmt.exponent_bits} exponent (bias {fmt.bias}), " + (
        f"{fmt.fraction_bits} fraction"
    )
    if fmt.computes_over:
        storage = f"{fmt.computes_over} ({fmt.storage_bits} bits)"
        yield f"a matrix-compute mode: operands are stored in {storage} and rounded on the way in"
    yield ""
    edge = _float_or_inf(overflow_threshold(fmt))
    figures = (
        ("max", fmt.max, "largest finite value"),
        ("overflow", edge, f"rounding to nearest leaves the range {'above' if edge_stays(fmt) else 'from'} here"),
        ("smallest normal", fmt.tiny, f"2^{fmt.min_exponent} (tiny)"),
        ("smallest subnormal", fmt.smallest_subnormal, "smallest positive value"),
        (
            "flush threshold",
            fmt.flush_threshold,
            "this and less rounds to zero" if fmt.zero else "nothing rounds to zero",
        ),
        ("eps", fmt.eps, "spacing just above 1"),
        ("unit roundoff", fmt.unit_roundoff, "largest relative error of a normal value"),
    )
    for label, value, meaning in figures:
        yield f"{label:<19} {_text(value):>17}  {meaning}"
    below, above = value_neighbours(Fraction(1), fmt)
    yield f"{'around 1':<19} {_text(below):>17}  and {_text(above)}"
    yield f"{'codes':<19} {fmt.number_of_codes:>17,}  of which special:"
    for special in fmt.special_codes:
        first, last = _code(special.first, fmt), _code(special.last, fmt)
        yield f"{'':<19} {special.meaning:>17}  {first if first == last else f'{first} to {last}'}"
    yield ""


def _float_or_inf(exact: Fraction) -> float:
    """fp64's own overflow edge is no fp64 value."""
    try:
        return float(exact)
    except OverflowError:
        return math.inf


def _as_dict(fmt: FloatFormat) -> dict[str, Any]:
    derived = "bits storage_bits number_of_codes max min eps tiny smallest_normal smallest_subnormal unit_roundoff"
    fields = [*(field.name for field in dataclasses.fields(fmt)), *derived.split(), "flush_threshold", "resolution"]
    special = [{"meaning": s.meaning, "first": s.first, "last": s.last} for s in fmt.special_codes]
    edge = _float_or_inf(overflow_threshold(fmt))
    return {name: getattr(fmt, name) for name in fields} | {
        "overflow_threshold": edge if math.isfinite(edge) else None,
        "special_codes": special,
    }


def _plain(cast: Cast, fmt: FloatFormat) -> dict[str, Any]:
    """JSON has no Inf and no NaN: they are written as strings."""
    fields = {"input" if name == "text" else name: value for name, value in dataclasses.asdict(cast).items()}
    fields["format"] = fields.pop("fmt")
    fields["code_text"] = _code(cast.code, fmt)
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}


def _draw_number_line(chosen: list[FloatFormat], plot: str | None) -> None:
    if plot is None:
        return
    from rooftile.formats.plots import check_plot, number_line, save_plot

    check_plot(plot)
    save_plot(number_line(chosen), plot)
