"""``rooftile score FILE``: what every scaling recipe would do to each tensor of a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from rooftile.cli.options import JsonOption
from rooftile.cli.output import STDOUT, check_input_kept, check_writable, next_command, progress, write_json
from rooftile.cli.tables import printable, table
from rooftile.errors import UsageError

if TYPE_CHECKING:
    from rooftile.formats.tensor_files import StoredTensor
    from rooftile.lowp.scoring import RecipeScore, ScoreTable

__all__ = ["register"]

_MOST = 8  # tables in the terminal; --json has all


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command(short_help="Score scaling recipes on a file's tensors.")(score)


def score(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A .safetensors, .npy or .pt file (read with weights_only).")
    ],
    recipes: Annotated[
        str | None,
        typer.Option(
            "--recipes", metavar="NAMES", help="Recipes separated by commas [default: six, from tensor to nvfp4-1x16]."
        ),
    ] = None,
    format: Annotated[
        str | None, typer.Option("--format", metavar="NAME", help="Use this format in every recipe.")
    ] = None,
    tensor: Annotated[
        str | None, typer.Option("--tensor", metavar="TEXT", help="Only tensors whose name contains this.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Show what each scaling recipe would flush, saturate and lose of every tensor, and whether finer scales matter.

    One tensor at a time is in memory.
    """
    from rooftile.formats.tensor_files import open_tensors
    from rooftile.lowp.recipes import recipe
    from rooftile.lowp.scoring import DEFAULT_RECIPES
    from rooftile.lowp.scoring import score as score_tensor

    check_input_kept(file, json=json)
    check_writable(json)
    names = DEFAULT_RECIPES if recipes is None else tuple(name.strip() for name in recipes.split(",") if name.strip())
    chosen = [recipe(name, format) for name in names]
    stored = [entry for entry in open_tensors(file) if tensor is None or tensor in entry.name]
    if not stored:
        known = "no tensor" if tensor is None else f"no tensor whose name contains {tensor!r}"
        raise UsageError(f"{file} has {known}; `rooftile inspect {file}` lists what is there")
    scored: list[tuple[StoredTensor, ScoreTable]] = []
    unread: list[tuple[str, str]] = []
    with progress() as say:
        for number, entry in enumerate(stored, 1):
            say(f"{number}/{len(stored)} {printable(entry.name)}")
            if entry.unread:
                unread.append((entry.name, entry.unread))
            else:
                scored.append((entry, score_tensor(_whole(entry), chosen)))
    if json != STDOUT:
        _print(file, scored, unread)
    if json is not None:
        write_json(json, _as_dict(file, scored, unread))


def _whole(entry: StoredTensor) -> Any:
    """The tensor in memory: blocks go across the pieces that it is read in."""
    import math

    import torch

    whole: torch.Tensor | None = None
    at = 0
    for piece in entry.pieces():
        if whole is None:
            whole = torch.empty(math.prod(entry.shape), dtype=piece.dtype)
        whole[at : at + piece.numel()] = piece.flatten()
        at += piece.numel()
    return torch.empty(entry.shape) if whole is None else whole.reshape(entry.shape)


def _print(file: str, scored: list[tuple[StoredTensor, ScoreTable]], unread: list[tuple[str, str]]) -> None:
    lines = [f"{file}: {len(scored):,} tensors scored", ""]
    for entry, found in scored[:_MOST]:
        title = f"{printable(entry.name)}  {entry.dtype} {'x'.join(map(str, entry.shape)) or 'scalar'}"
        lines += ["  ".join(filter(None, [title, found.not_finite])), _table(found)]
        lines += [f"  {row.recipe}: {_lost(row.lost)}" for row in found.rows if row.lost]
        lines += [f"  {found.reading}", ""]
    if len(scored) > _MOST:
        matter = [printable(entry.name) for entry, found in scored if found.finer_scales_matter]
        lines += [f"{len(scored) - _MOST:,} more tensors: --json has them all, --tensor TEXT chooses", ""]
        lines += [f"finer scales matter for {len(matter):,} of {len(scored):,}: {', '.join(matter[:4])}", ""]
    lines += [f"not scored: {printable(name)}: {why}" for name, why in unread]
    lines.append("flushed, saturated: share of the finite non-zero values; errors are relative, a flush counts as 1")
    typer.echo("\n".join(lines))
    typer.echo(next_command(f"rooftile inspect {file}", "the exponents behind these figures"))


def _table(found: ScoreTable) -> str:
    rows = [
        (
            f"  {row.recipe}", row.format.removeprefix("fp8_"), *(_figures(row) if row.nonzero else ["-"] * 6),
            f"{row.bytes_per_value:.3f}",
        )
        for row in found.rows
    ]  # fmt: skip
    header = ("  recipe", "format", "flushed", "saturated", "median", "99 %", "max", "SNR dB", "bytes")
    return table(header, rows, left=2)


def _lost(count: int) -> str:
    what = "1 finite value becomes" if count == 1 else f"{count:,} finite values become"
    return f"{what} NaN, with a value of the block that is not finite"


def _figures(row: RecipeScore) -> list[str]:
    return [
        _share(row.flushed_share), _share(row.saturated_share), f"{row.median_error:.2%}", f"{row.p99_error:.1%}",
        f"{row.max_error:.1%}", f"{row.snr_db:.1f}",
    ]  # fmt: skip


def _share(share: float) -> str:
    return "0" if share == 0 else f"{share:.2%}" if share >= 1e-4 else "<0.01%"


def _as_dict(file: str, scored: list[tuple[StoredTensor, ScoreTable]], unread: list[tuple[str, str]]) -> dict[str, Any]:
    return {
        "schema": "rooftile.score/1",
        "file": file,
        "tensors": [{"name": entry.name, "dtype": entry.dtype, **found.to_dict()} for entry, found in scored],
        "unread": [{"name": name, "why": why} for name, why in unread],
    }
