"""``rooftile bench``: this machine's ceilings, attention kernels side by side, two files of figures compared."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from rooftile.cli.options import JsonOption
from rooftile.cli.output import STDOUT, check_input_kept, check_writable, next_command, typed_again, write_json
from rooftile.errors import UsageError

if TYPE_CHECKING:
    from rooftile.bench.attention_case import Case
    from rooftile.bench.attention_run import Outcome
    from rooftile.bench.record import Record

__all__ = ["register"]

# print, not typer.echo: that takes an ASCII stream for a mistake and writes UTF-8 into it, and µs has no ASCII sign.

_verb = typer.Typer(rich_markup_mode=None)

ThreadsOption = Annotated[int | None, typer.Option("--threads", metavar="N", help="Threads that compute.")]


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.add_typer(_verb, name="bench", short_help="Measure this machine and attention on it.")


@_verb.callback(invoke_without_command=True)
def bench(ctx: typer.Context) -> None:
    """Measure under one contract: warm, in turn, median and spread, and every condition written down."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


@_verb.command()
def ceilings(threads: ThreadsOption = None, json: JsonOption = None) -> None:
    """Measure what this machine can do: FMA, bf16 products, exp2, reads of each cache and of memory, copies.

    Without --threads on one and on all processors.
    """
    from rooftile.bench import hardware, measure_ceilings
    from rooftile.cli.bench_report import ceilings_report

    check_writable(json)
    counts = sorted({1, hardware().logical_cpus}) if threads is None else [threads]
    with _progress() as say:
        found = measure_ceilings(counts, say=say)
    if json != STDOUT:
        print(ceilings_report(found, counts))
        print(next_command("rooftile bench attention", "attention kernels as shares of these"))
    if json is not None:
        _write(json, found.records)


@_verb.command()
def attention(
    ctx: typer.Context,
    shape: Annotated[
        list[str] | None,
        typer.Option("--shape", metavar="B,H,L,D", help="1,8,2048,64 if not given; 1,32/8,1/4096,128: GQA, decode."),
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option("--dtype", help="fp32, bf16, fp16 or fp64 [default: bf16].")
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Mask the future (the last query sees all keys).")] = False,
    backward: Annotated[bool, typer.Option("--backward", help="Time the backward pass too.")] = False,
    kernel: Annotated[
        list[str] | None, typer.Option("--kernel", metavar="NAME", help="native, tiled or reference [default: all].")
    ] = None,
    threads: ThreadsOption = None,
    repeats: Annotated[int, typer.Option("--repeats", metavar="N", help="Rounds that count.")] = 11,
    json: JsonOption = None,
) -> None:
    """Time attention kernels side by side with torch's own: speed, share of the ceiling, error against FP64.

    --shape, --dtype and --kernel can be given several times. torch's own always runs.
    """
    import torch

    from rooftile.bench.attention_run import KERNELS, run_case
    from rooftile.bench.ceilings import COMPUTE, measure_ceilings
    from rooftile.bench.measuring import check_rounds
    from rooftile.cli.bench_report import attention_report

    check_rounds(2, repeats)
    check_writable(json)
    for name in kernel or ():
        if name not in KERNELS:
            raise UsageError(f"--kernel {name}: give {', '.join(KERNELS[:-1])} or {KERNELS[-1]}")
    cases = _cases(shape or ["1,8,2048,64"], dtype or ["bf16"], causal)
    count = torch.get_num_threads() if threads is None else threads
    outcomes: list[Outcome] = []
    with _progress() as say:
        roofs = measure_ceilings([count], only=COMPUTE, repeats=5, say=say)
        for case in cases:
            for is_backward in (False, True) if backward else (False,):
                told = _told(say, f"{case.name} {'backward' if is_backward else 'forward'}")
                outcomes.append(
                    run_case(
                        case, kernels=kernel or KERNELS, backward=is_backward, threads=count, repeats=repeats, say=told
                    )
                )
    if json != STDOUT:
        print(attention_report(outcomes, roofs, count))
        print(_after_attention(ctx, json))
    if json is not None:
        _write(json, [*roofs.records, *(record for outcome in outcomes for record in outcome.records)])


@_verb.command()
def compare(
    before: Annotated[str, typer.Argument(metavar="BEFORE", help="A file that `rooftile bench` wrote with --json.")],
    after: Annotated[str, typer.Argument(metavar="AFTER", help="Another, measured under the same conditions.")],
    json: JsonOption = None,
) -> None:
    """Say what became faster or slower from one file to another. Different conditions are refused, by name."""
    from rooftile.bench import load_records
    from rooftile.bench.comparison import compare_all
    from rooftile.cli.bench_report import comparison_as_dict, comparison_report

    for path in (before, after):
        check_input_kept(path, json=json)
    check_writable(json)
    compared, alone = compare_all(load_records(before), load_records(after))
    if not compared:
        raise UsageError(
            f"{before} and {after} have no measurement in common; measure the same task with both releases"
        )
    if json != STDOUT:
        print(comparison_report(compared, alone))
        print(next_command("rooftile bench ceilings", "what this machine can do at most"))
    if json is not None:
        write_json(
            json, {"schema": "rooftile.bench-comparison/1", "compared": [comparison_as_dict(c) for c in compared]}
        )


def _cases(shapes: Sequence[str], dtypes: Sequence[str], causal: bool) -> list[Case]:
    from rooftile.bench.attention_case import DTYPES, parse_shape

    for name in dtypes:
        if name not in DTYPES:
            raise UsageError(f"--dtype is {name!r}; choose {', '.join(DTYPES)}")
    return [parse_shape(text, DTYPES[name], causal) for text in shapes for name in dtypes]


def _after_attention(ctx: typer.Context, json: str | None) -> str:
    if json is None:
        return next_command(typed_again(ctx, json="attention.json"), "keep it")
    return next_command(f"rooftile bench compare {shlex.quote(json)} AFTER.json", "once there is another to compare")


def _write(path: str, records: Sequence[Record]) -> None:
    from rooftile.bench.record_files import document

    write_json(path, document(records))


def _told(say: Callable[[str], None], what: str) -> Callable[[str], None]:
    return lambda text: say(f"{what}: {text}")


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """What runs now and for how long, on stderr, only on a terminal, gone at the end."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    # Drawn when something new begins and never by a thread of its own, which would run inside what is timed.
    with Progress(
        *columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("measuring")
        yield lambda text: bar.update(task, description=text[:80], refresh=True)
