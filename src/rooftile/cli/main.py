"""The command ``rooftile``: its verbs, one module each, and the one place where an error becomes a sentence.

torch, numpy and rich are imported by the verbs when they run, never here: ``--help`` has to answer at once. Help is
plain text for the same reason (rich would double its time).

Exit codes: 0 fine, also with findings; 1 only where ``--fail-on`` asked for it; 2 usage, and an output that can't be
written; 3 the target could not be captured; 130 Ctrl-C. Where the reader of a pipe leaves (``| head -1``) the process
ends by SIGPIPE and says nothing, as other filters do: a shell shows 141.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from rooftile.cli import audit, bench, devices, explain, formats, inspect, score, show
from rooftile.cli.streams import prepare
from rooftile.errors import RooftileError

__all__ = ["app", "main", "run"]

#: Each has ``register(app)``.
VERBS = (audit, show, explain, devices, formats, inspect, score, bench)

INTERRUPTED = 130  # 128 + SIGINT, what shells give

app = typer.Typer(
    name="rooftile",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if not asked:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        typer.echo(f"rooftile {version('rooftile')}")
    except PackageNotFoundError:
        typer.echo("rooftile (run from its source, not installed)")
    raise typer.Exit


@app.callback(invoke_without_command=True)
def rooftile(
    ctx: typer.Context,
    _version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Read a PyTorch step before renting the machine: what its numbers survive and what it moves.

    Start with: rooftile audit llama-3.1-8b --device h100-sxm
    """
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


for _verb in VERBS:
    _verb.register(app)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; what went wrong is one sentence on stderr."""
    try:
        result = app(args=list(arguments), prog_name="rooftile", standalone_mode=False)
    except RooftileError as error:
        return _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted; nothing was written", INTERRUPTED)
    except Exception as error:
        # The command-line parser's own errors: which class they have in common depends on the release of typer.
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "rooftile"
        return _fail(f"{error.format_message().rstrip('.')}; see `{path} --help`", 2)
    code = result if isinstance(result, int) else 0
    return _fail("interrupted; nothing was written", code) if code == INTERRUPTED else code


def main() -> None:
    """Entry point of the ``rooftile`` script."""
    prepare()
    code = run(sys.argv[1:])
    gc.disable()  # or Python searches all of torch for cycles once more before it exits: a third of a second
    sys.exit(code)


def _fail(sentence: str, code: int) -> int:
    print(f"rooftile: {' '.join(sentence.split())}", file=sys.stderr)
    return code
