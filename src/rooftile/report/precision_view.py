"""Precision: the roles in a line each family of dtypes, and the contract per operator family."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from rooftile import _units as units
from rooftile.report.layout import Columns, heading
from rooftile.report.model import Report
from rooftile.report.section import Section

__all__ = ["blocks"]

#: Families of the contract that the terminal shows; all are in the JSON document.
_FAMILIES = ("matmul", "attention", "convolution", "rnn", "softmax", "normalization", "elementwise", "optimizer")
_SLOTS = ("storage", "product", "accumulate", "output")
#: Roles that say nothing about the contract's numbers.
_LEFT_OUT = ("input", "buffer", "temporary")


def blocks(report: Report) -> Iterable[RenderableType]:
    """Roles, contract, policies."""
    precision = report.precision
    yield heading("PRECISION", f"{precision.policy} ({precision.policy_evidence}); evidence in parentheses")
    yield _roles(precision.roles)
    shown = [family for family in precision.families if family.family in _FAMILIES]
    if shown:
        yield _Contract(shown)
    if precision.get("scaled"):
        yield _scaled(precision.scaled)
    names = ("autocast", "loss_scale", "gradient_accumulation", "communication")
    policies = [(f"{name.replace('_', ' ')} ", _slot(precision[name])) for name in names]
    text = Text()
    for index, (name, value) in enumerate(policies):
        text.append(" · " if index else "").append(name, style="bold").append(value)
    yield text


def _roles(roles: Iterable[Section]) -> Text:
    parts = []
    for role in roles:
        if role.role in _LEFT_OUT:
            continue
        dtypes = " + ".join(units.short_dtypes(name) for name in role.dtypes)
        parts.append(f"{role.role.replace('_', ' ')} {dtypes} {units.gb(role.bytes)}")
    return Text.assemble(("roles ", "bold"), " · ".join(parts) or "none", " (observed; each storage once)")


def _scaled(operands: Iterable[Section]) -> Text:
    parts = [
        f"{each.role or 'operand'} {each.format.removeprefix('fp8_')} {each.block} x {each.count:,}: codes "
        f"{units.gb(each.code_bytes)}, scales {units.gb(each.scale_bytes)}"
        for each in operands
    ]
    return Text.assemble(("scaled operands ", "bold"), " · ".join(parts), " (observed; made over the step)")


class _Contract:
    """The four slots of each family; without their evidence where the terminal has no room for it."""

    def __init__(self, families: Sequence[Section]) -> None:
        self._families = families

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        whole = self._table(evidence=True)
        yield whole if whole.width <= options.max_width else self._table(evidence=False)

    def _table(self, *, evidence: bool) -> Columns:
        table = Columns("family", *_SLOTS, left=_SLOTS, spare=("output", "storage"))
        for family in self._families:
            slots = [family[name] for name in _SLOTS]
            table.add_row(family.family, *(_slot(s) if evidence else units.short_dtypes(s.value) for s in slots))
        return table


def _slot(slot: Section) -> str:
    value = units.short_dtypes(slot.value)
    return value if not slot.evidence else f"{value} ({slot.evidence})"
