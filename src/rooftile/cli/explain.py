"""``rooftile explain CODE``: what a finding means and what to do."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rooftile.cli.options import JsonOption
from rooftile.cli.output import STDOUT, check_writable, next_command, write_json

if TYPE_CHECKING:
    from rooftile.rules import Rule

__all__ = ["register"]


def _complete_code(incomplete: str) -> list[str]:
    from rooftile.rules import all_rules

    return [rule.code for rule in all_rules() if rule.code.startswith(incomplete.upper())]


Code = Annotated[
    str | None,
    typer.Argument(metavar="[CODE]", help="A rule's code; without one, all are listed.", autocompletion=_complete_code),
]


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command(short_help="Explain a finding, or list the rules.")(explain)


def explain(code: Code = None, json: JsonOption = None) -> None:
    """Say what a finding means, how it is seen, and what to do about it."""
    from rooftile.rules import all_rules, rule

    check_writable(json)
    chosen = [rule(code)] if code is not None else list(all_rules())
    if json != STDOUT:
        typer.echo(_explained(chosen[0]) if code is not None else _listed(chosen))
    if json is not None:
        write_json(json, {"schema": "rooftile.rules/1", "rules": [_record(r) for r in chosen]})


def _explained(rule: Rule) -> str:
    from rooftile.rules import FAMILIES

    title = f"{rule.code}: {rule.title} ({FAMILIES[rule.family]})"
    paragraphs = [textwrap.fill(paragraph, 100, break_on_hyphens=False) for paragraph in rule.explanation.split("\n\n")]
    checking = next_command(f"rooftile audit gpt2 --device h100-sxm --select {rule.code}", "check a step for it alone")
    return "\n\n".join([title, *paragraphs, checking])


def _listed(rules: list[Rule]) -> str:
    from rooftile.rules import FAMILIES

    lines = [f"{rule.code}  {rule.title} ({FAMILIES[rule.family]})" for rule in rules]
    return "\n".join([*lines, "", next_command(f"rooftile explain {rules[0].code}", "why it matters, what to do")])


def _record(rule: Rule) -> dict[str, Any]:
    return {"code": rule.code, "family": rule.family, "title": rule.title, "explanation": rule.explanation}
